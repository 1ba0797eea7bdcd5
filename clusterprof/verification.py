"""Whether a repair saves what was stated: the change of the step against a finding's saving.

Only what was repaired between two runs can show in their steps. The findings tell what that was: to
the finding that is verified come those of RUN (A) that are gone in NEWRUN (B), and the saving of
all of them is compared, as the change of the step is of all of them:

- of one finding what its repair saves alone: what is stated once others are repaired is right only
  where they were;
- of several, with all that their savings are stated after, the sum of these savings, which add up;
- of several otherwise the replay of the repairs at once (`Combined`), where the run has it.

The change is `comparison.compare`'s, of undisturbed steps alone, with its noise. A saving is as
predicted where it differs from what is stated by less than the uncertainty of both: the noise, and
how far the stated interval reaches to that side, as independent errors.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from clusterprof import __version__, comparison, console, merge_run, words
from clusterprof.errors import ClusterprofError, ReportError, UsageError
from clusterprof.report.comparison_text import names_of
from clusterprof.results import (
    Basis,
    Change,
    ComparedFinding,
    Comparison,
    Finding,
    MeasuredRun,
    Outcome,
    PredictedSaving,
    Repaired,
    Results,
    Verification,
)
from clusterprof.run_directory import Window

VERIFICATION_VERSION = 1
_FINDING = re.compile(r"(?P<code>[a-z_.]+)(:(?P<rank>[0-9]{1,9}))?")
#: a summary says so where not all that is stated can be saved
_AT_MOST = re.compile(r"saves? (at most|up to) ")


class Asked(NamedTuple):
    """Which findings of a run were repaired; by default the first that saves something."""

    code: str = ""
    rank: int | None = None
    #: all that the run states a saving of at once
    at_once: bool = False


class _CannotTell(Exception):  # noqa: N818 - it is an answer
    """Why it cannot be determined whether a repair saves what was stated."""


def asked_for(text: str | None, *, at_once: bool = False) -> Asked:
    """What `--finding CODE[:RANK]` and `--all` ask for. Raises UsageError."""
    if text is None:
        return Asked(at_once=at_once)
    match = _FINDING.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--finding: cannot read {text!r}",
            "expected a finding's code, and a rank where several have it: straggler.host:3",
        )
    return Asked(match["code"], int(match["rank"]) if match["rank"] else None)


def verify(old: Path, new: Path, asked: Asked) -> Verification:
    """Compare what the run `old` states with what the steps of `new` show.

    Raises ReportError where either cannot be read, UsageError where `old` has no such finding.
    """
    window, results = comparison.read_run(old)
    a, b = comparison.of_run(old, window, results), comparison.measured(new)
    _check(str(old), results)
    verification = _undetermined(a, b)
    try:
        repaired = _repaired(results, asked)
        _check_comparable(a, b)
        compared = comparison.compare([a], [b])
        verification["step"], verification["findings"] = compared["step"], compared["findings"]
        predicted = _predicted(results, repaired, compared["findings"])
        verification["predicted"] = predicted
        verification["outcome"] = _outcome(predicted, compared["step"])
        notes = _notes(verification["outcome"], predicted, compared, results, repaired)
        verification["notes"] = [*notes, *compared["warnings"]]
    except _CannotTell as reason:
        verification["why"] = str(reason)
    verification["verdict"] = _verdict(verification)
    return verification


def _undetermined(a: MeasuredRun, b: MeasuredRun) -> Verification:
    """A verification of two runs of which nothing is determined yet."""
    return {
        "verification_version": VERIFICATION_VERSION,
        "clusterprof_version": __version__,
        "verdict": "",
        "a": a["name"],
        "b": b["name"],
        "outcome": "cannot be determined",
        "why": "",
        "predicted": None,
        "step": None,
        "a_steps": a["outside_steps"],
        "b_steps": b["outside_steps"],
        "findings": [],
        "notes": [],
    }


def _check(name: str, results: Results) -> None:
    """Raise ReportError for savings that a damaged or edited file states."""
    combined = results["combined"]
    times = [ns for f in results["findings"] for ns in (f["saved_least_ns"], f["saved_most_ns"])]
    times += combined["remaining_ns"] if combined else []
    choices = len(combined["remaining_ns"]) if combined else 1
    if any(abs(ns) > comparison.LONGEST_NS for ns in times) or (
        combined and choices != 1 << len(combined["findings"])
    ):
        raise ReportError(
            f"{name} is damaged: no repair can save what it states",
            "merge the run again: clusterprof merge RUN",
        )


# --- what is to be verified


def _repaired(results: Results, asked: Asked) -> list[Finding]:
    """The findings that were repaired, each with a saving. Raises UsageError, _CannotTell."""
    findings = results["findings"]
    if asked.at_once:
        combined = results["combined"]
        keys = [_key(entry) for entry in combined["findings"]] if combined else []
        repaired = [finding for finding in findings if _key(finding) in keys]
        if not repaired:
            raise _CannotTell("A states no saving of several findings at once")
        return repaired
    if asked.code:
        candidates = [finding for finding in findings if _is_asked(finding, asked)]
        if not candidates:
            raise _no_such(findings, asked)
    else:
        candidates = [finding for finding in findings if finding["saved_ns_per_step"] > 0]
        candidates += [finding for finding in findings if _saving_unknown(finding)]
        if not candidates:
            raise _CannotTell("A has no finding whose repair saves anything")
    finding = candidates[0]
    if _saving_unknown(finding):
        raise _CannotTell(f"the saving of {_named(finding)} is unknown in A")
    if finding["saved_ns_per_step"] <= 0 and finding["saved_alone_ns"] <= 0:
        raise _CannotTell(f"the repair of {_named(finding)} saves nothing, as A states")
    return [finding]


def _is_asked(finding: Finding, asked: Asked) -> bool:
    return finding["code"] == asked.code and asked.rank in (None, *finding["ranks"])


def _no_such(findings: Sequence[Finding], asked: Asked) -> UsageError:
    names = [
        finding["code"] if finding["rank"] is None else f"{finding['code']}:{finding['rank']}"
        for finding in findings
    ]
    rank = "" if asked.rank is None else f" of rank {asked.rank}"
    return UsageError(
        f"--finding: the run has no finding {asked.code}{rank}",
        f"its findings: {words.listed(dict.fromkeys(names)) or 'none'}",
    )


def _saving_unknown(finding: Finding) -> bool:
    """Whether flight recorders alone tell of it, which do not tell what it delays."""
    return finding["code"] == "straggler.shallow" and finding["saved_ns_per_step"] <= 0


def _check_comparable(a: MeasuredRun, b: MeasuredRun) -> None:
    """Raise _CannotTell where no step of one can be compared with those of the other."""
    if differences := comparison.other_job([a], [b]):
        raise _CannotTell(f"these are no runs of one job: {differences[0]}")
    needed = comparison.LEAST_BLOCKS * comparison.LEAST_STEPS
    for side, run in (("A", a), ("B", b)):
        if run["outside_ns"]:
            continue
        steps = run["outside_steps"]
        if not steps and not _has_step_log(Path(run["name"])):
            raise _CannotTell(
                f"{side} has no step log: it must be the directory of a run under clusterprof"
            )
        undisturbed = f"{words.counted(steps, 'undisturbed step')} outside its windows"
        if steps < needed:
            raise _CannotTell(f"{side} has {undisturbed}, {needed} are needed: run more steps")
        raise _CannotTell(
            f"{side} has {undisturbed}, logged in too few stretches to tell the noise"
        )


def _has_step_log(given: Path) -> bool:
    """Whether any rank of a run directory has a step log that can be read."""
    with contextlib.suppress(ClusterprofError):
        return given.is_dir() and bool(merge_run.job_record(Window.at(given)).steps)
    return False


# --- what is predicted


def _predicted(
    results: Results, repaired: Sequence[Finding], compared: Sequence[ComparedFinding]
) -> PredictedSaving:
    """What is saved by the repair of these findings and of those that are gone in B.

    Raises _CannotTell where the run does not state that.
    """
    changed = {_key(finding) for finding in repaired}
    changed |= {_key(finding) for finding in compared if finding["state"] == "gone"}
    findings = [finding for finding in results["findings"] if _key(finding) in changed]
    if len(findings) == 1:
        return _alone(findings[0])
    if all(_key(before) in changed for finding in findings for before in _net_of(finding)):
        return _of_several(findings, "sum", sum(f["saved_ns_per_step"] for f in findings))
    combined = results["combined"]
    places = [_key(entry) for entry in combined["findings"]] if combined else []
    if combined is None or not changed.issubset(places):
        raise _CannotTell(_not_stated(findings, repaired))
    choice = sum(1 << place for place, key in enumerate(places) if key in changed)
    remaining = combined["remaining_ns"]
    return _of_several(findings, "replay", max(remaining[0] - remaining[choice], 0))


def _not_stated(findings: Sequence[Finding], repaired: Sequence[Finding]) -> str:
    """Why the saving of several findings at once is not known."""
    names = words.listed(map(_named, repaired))
    if gone := [finding for finding in findings if finding not in repaired]:
        others = f"{words.listed(map(_named, gone))} {'is' if len(gone) == 1 else 'are'}"
        names += f", and {others} gone in B as well: A does not state what all of them save at once"
        return f"asked for is {names}"
    return f"A does not state what {names} save at once"


def _alone(finding: Finding) -> PredictedSaving:
    """What one finding's repair saves where nothing else is repaired.

    The stated interval is that of the saving once others are repaired. Where alone it saves more,
    that is taken to be as uncertain by its share, and to lie within nothing and twice as much.
    """
    saved_ns, alone_ns = finding["saved_ns_per_step"], finding["saved_alone_ns"]
    reach = _reach_ns(finding)
    if alone_ns > saved_ns > 0:
        reach = [max(ns, min(ns * alone_ns / saved_ns, alone_ns)) for ns in reach]
    return _stated([finding], "alone", alone_ns, reach)


def _of_several(findings: Sequence[Finding], basis: Basis, saved_ns: int) -> PredictedSaving:
    """What several repairs save at once; how far that may be wrong adds up as for independent."""
    reach = [math.hypot(*side) for side in zip(*map(_reach_ns, findings), strict=True)]
    return _stated(findings, basis, saved_ns, reach)


def _reach_ns(finding: Finding) -> list[float]:
    """By how much less, and how much more, a finding's repair may save than stated."""
    saved_ns = finding["saved_ns_per_step"]
    ends = saved_ns - finding["saved_least_ns"], finding["saved_most_ns"] - saved_ns
    return [max(float(ns), 0.0) for ns in ends]


def _stated(
    findings: Sequence[Finding], basis: Basis, saved_ns: int, reach: Sequence[float]
) -> PredictedSaving:
    less_ns, more_ns = reach
    return {
        "findings": [{"code": f["code"], "ranks": f["ranks"]} for f in findings],
        "basis": basis,
        "saved_ns": saved_ns,
        "saved_least_ns": max(round(saved_ns - less_ns), 0),
        "saved_most_ns": round(saved_ns + more_ns),
    }


# --- what is there


def _outcome(predicted: PredictedSaving, step: Change) -> Outcome:
    """What may be said of the change: none where `compare` says so."""
    if step["direction"] == "none":
        return "no change beyond the noise"
    measured_ns, saved_ns = -step["change_ns"], predicted["saved_ns"]
    if step["direction"] == "shorter" and _agrees(saved_ns, predicted, step):
        return "as predicted"
    return "more than predicted" if measured_ns > saved_ns else "less than predicted"


def _agrees(saved_ns: float, predicted: PredictedSaving, step: Change) -> bool:
    """Whether what was measured differs from a saving of `saved_ns` by less than both may err.

    As uncertain as what is predicted.
    """
    apart_ns = -step["change_ns"] - saved_ns
    return abs(apart_ns) <= _unsure_ns(apart_ns, predicted, step)


def _unsure_ns(apart_ns: float, predicted: PredictedSaving, step: Change) -> float:
    """How much more (or less, below 0) may be measured than predicted by chance."""
    less_ns = predicted["saved_ns"] - predicted["saved_least_ns"]
    more_ns = predicted["saved_most_ns"] - predicted["saved_ns"]
    return math.hypot(step["noise_ns"], more_ns if apart_ns > 0 else less_ns)


def _notes(
    outcome: Outcome,
    predicted: PredictedSaving,
    compared: Comparison,
    results: Results,
    repaired: Sequence[Finding],
) -> list[str]:
    """What else bears on the outcome: the findings of B, the noise, how the saving is stated."""
    step, saved_ns = compared["step"], predicted["saved_ns"]
    notes = _became(compared["findings"], predicted["findings"])
    noise = words.bound(step["noise_ns"])
    hidden = saved_ns > 0 and _agrees(saved_ns, predicted, step)
    if outcome == "no change beyond the noise" and hidden:
        notes.append(f"the noise of {noise} hides such a saving: this does not refute it")
    if outcome == "as predicted" and _agrees(saved_ns / 2, predicted, step):
        notes.append("the uncertainty is wide: half of this saving would be as predicted as well")
    if step["direction"] == "longer":
        notes.append("steps of B are longer")
    if any(_AT_MOST.search(finding["summary"]) for finding in repaired):
        notes.append("A states it as the most that can be saved: a part of it is no contradiction")
    if any(finding["recurrence"] != "persistent" for finding in repaired):
        notes.append("the cause was not in all steps of A's window: it may be rarer outside of it")
    if predicted["basis"] == "alone":
        notes += _stated_otherwise(repaired[0], step["a_ns"])
    pace = results["pace"]
    if pace is not None and abs(pace["step_ns"] - step["a_ns"]) > step["noise_ns"]:
        stated, usual = words.ms(pace["step_ns"]), words.ms(step["a_ns"])
        notes.append(f"the saving is stated of a step of {stated}, undisturbed ones take {usual}")
    return notes


def _stated_otherwise(finding: Finding, step_ns: int) -> list[str]:
    """That A states another saving first, once others are repaired, where it noticeably does."""
    saved_ns, before = finding["saved_ns_per_step"], _net_of(finding)
    if not before or not words.alone(saved_ns, finding["saved_alone_ns"], step_ns):
        return []
    names = words.listed(map(_named, before), 2)
    gone = "is" if len(before) == 1 else "are"
    return [
        f"A states {words.ms(saved_ns)} after the repair of {names}, which {gone} not gone in B"
    ]


def _became(compared: Sequence[ComparedFinding], repaired: Sequence[Repaired]) -> list[str]:
    """What has become of the findings that were repaired, and which are new, in sentences."""
    keys = {_key(finding) for finding in repaired}
    sentences = []
    for finding in compared:
        saves = f"its repair saves {words.ms(finding['b_saved_ns'])} there"
        name = comparison.named(finding)
        in_b = finding["b_saved_ns"] > 0 or finding["b_alone_ns"] > 0
        if _key(finding) in keys and finding["state"] == "gone":
            sentences.append(f"{name} is gone in B")
        elif _key(finding) in keys and not in_b:
            sentences.append(f"{name} is not found in B, which is within the noise")
        elif _key(finding) in keys:
            sentences.append(f"{name} is still found in B: {saves}")
        elif finding["state"] in ("new", "worse"):
            sentences.append(f"{name} is {finding['state']} in B: {saves}")
        elif finding["state"] == "better":
            sentences.append(f"{name} is better in B: {saves}")
    return sentences


# --- words


def _key(finding: Finding | ComparedFinding | Repaired) -> tuple[str, tuple[int, ...]]:
    """What tells findings apart, as in a comparison."""
    return finding["code"], tuple(finding["ranks"])


def _net_of(finding: Finding) -> list[Repaired]:
    return finding["saving"]["net_of"] if finding["saving"] else []


def _named(finding: Finding | Repaired) -> str:
    """A finding's code with its ranks."""
    return " ".join(filter(None, (finding["code"], words.ranks(finding["ranks"], 4))))


def _verdict(verification: Verification) -> str:
    """The whole in one line."""
    predicted, step = verification["predicted"], verification["step"]
    if predicted is None or step is None:
        return f"cannot be determined: {verification['why']}"
    measured = _with_noise(-step["change_ns"], step["noise_ns"])
    return (
        f"predicted {_saving_text(predicted)}, measured {measured} of each "
        f"{words.ms(step['a_ns'])} step: {verification['outcome']}"
    )


def _saving_text(predicted: PredictedSaving) -> str:
    """What is predicted, and from where to where it lies."""
    saved_ns, most_ns = predicted["saved_ns"], predicted["saved_most_ns"]
    if saved_ns > 0:
        return words.between(saved_ns, predicted["saved_least_ns"], most_ns)
    return f"at most {words.ms(most_ns)}" if most_ns > 0 else "nothing"


def _with_noise(ns: int, noise_ns: int) -> str:
    """A time with the noise as `compare` prints it, and no finer than that: `16.2 ±1.3 ms`."""
    noise = words.bound(noise_ns)
    number, _, unit = noise.partition(" ")
    if unit != "ms":
        return words.with_bound(ns, noise_ns)
    return f"{words.milliseconds(ns, len(number.partition('.')[2]))} {noise}"


def render(verification: Verification, width: int = 100) -> str:
    """The verification as plain text of `width` columns; it ends in a newline."""
    lines = [*console.wrapped(words.plain(verification["verdict"]), width), ""]
    for side, name in (("A", verification["a"]), ("B", verification["b"])):
        lines += console.wrapped(f"{side}  {names_of([name])}", width, " " * 3)
    rows = [*_basis(verification), *(("note", note) for note in verification["notes"])]
    lines += [""] * bool(rows)
    for label, text in rows:
        lines += console.wrapped(f"  {label:<9}  {words.plain(text)}", width, " " * 13)
    return "\n".join(lines) + "\n"


def _basis(verification: Verification) -> list[tuple[str, str]]:
    """What is predicted, and what is measured, as far as it is determined."""
    rows, predicted, step = list[tuple[str, str]](), verification["predicted"], verification["step"]
    if predicted is not None:
        names = words.listed(map(_named, predicted["findings"]))
        how = {
            "alone": f"what repairing {names} alone saves (no other finding is gone in B)",
            "sum": f"what {names} save, each once those before it are repaired: the sum",
            "replay": f"the replay with {names} repaired",
        }
        rows.append(("predicted", how[predicted["basis"]]))
    if step is not None:
        times = f"{words.ms(step['a_ns'])} in A, {words.ms(step['b_ns'])} in B"
        steps = f"{verification['a_steps']:,} and {verification['b_steps']:,} steps"
        rows.append(("measured", f"{times}: {steps} outside the windows, by step logs"))
    return rows
