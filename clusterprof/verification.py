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
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from clusterprof import __version__, comparison, console, words
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.merge_run import job_record
from clusterprof.report.comparison_text import heading
from clusterprof.results import (
    SHALLOW_STRAGGLER,
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
    finding_key,
)
from clusterprof.run_directory import Window

VERIFICATION_VERSION = 1
#: those that state the most that can be saved: by full overlap, by equal stages
_AT_MOST = ("communication.exposed", "pipeline.imbalance")


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
    match = re.fullmatch(r"(?P<code>[a-z_.]+)(:(?P<rank>[0-9]{1,9}))?", text)
    if match is None:
        raise UsageError(
            f"--finding: cannot read {text!r}",
            "expected a finding's code, and a rank where several have it: straggler.host:3",
        )
    return Asked(match["code"], int(match["rank"]) if match["rank"] else None)


def verify(old: Path, new: Path, asked: Asked) -> Verification:
    """What `old` states, by the steps of `new`. Raises ReportError; UsageError: no such finding."""
    window, results = comparison.read_run(old)
    a, b = comparison.of_run(old, window, results), comparison.measured(new)
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


def _repaired(results: Results, asked: Asked) -> list[Finding]:
    """The findings that were repaired, each with a saving. Raises UsageError, _CannotTell."""
    findings = results["findings"]
    if asked.at_once:
        keys = _replayed_at_once(results)
        repaired = [finding for finding in findings if finding_key(finding) in keys]
        if not repaired:
            raise _CannotTell("A states no saving of several findings at once")
        return repaired
    finding = _asked(findings, asked) if asked.code else _first_saving(findings)
    if finding["saved_ns_per_step"] <= 0 and finding["code"] == SHALLOW_STRAGGLER:
        raise _CannotTell(f"the saving of {_named(finding)} is unknown in A")
    if finding["saved_ns_per_step"] <= 0 and finding["saved_alone_ns"] <= 0:
        raise _CannotTell(f"the repair of {_named(finding)} saves nothing, as A states")
    return [finding]


def _first_saving(findings: Sequence[Finding]) -> Finding:
    """The first that saves something, else one of flight recorders, which do not tell how much."""
    saving = [finding for finding in findings if finding["saved_ns_per_step"] > 0]
    if candidates := [*saving, *(f for f in findings if f["code"] == SHALLOW_STRAGGLER)]:
        return candidates[0]
    raise _CannotTell("A has no finding whose repair saves anything")


def _asked(findings: Sequence[Finding], asked: Asked) -> Finding:
    """The first finding of this code and rank. Raises UsageError."""
    for finding in findings:
        if finding["code"] == asked.code and asked.rank in (None, *finding["ranks"]):
            return finding
    names = [
        finding["code"] if finding["rank"] is None else f"{finding['code']}:{finding['rank']}"
        for finding in findings
    ]
    rank = "" if asked.rank is None else f" of rank {asked.rank}"
    raise UsageError(
        f"--finding: the run has no finding {asked.code}{rank}",
        f"its findings: {words.listed(dict.fromkeys(names)) or 'none'}",
    )


def _check_comparable(a: MeasuredRun, b: MeasuredRun) -> None:
    """Raise _CannotTell where no step of one can be compared with those of the other."""
    if differences := comparison.other_job([a], [b]):
        raise _CannotTell(f"these are no runs of one job: {differences[0]}")
    needed = comparison.LEAST_BLOCKS * comparison.LEAST_STEPS
    for side, run in (("A", a), ("B", b)):
        if run["outside_ns"]:
            continue
        steps, given = run["outside_steps"], Path(run["name"])
        has_log = steps > 0
        with contextlib.suppress(ClusterprofError):
            has_log = has_log or (given.is_dir() and bool(job_record(Window.at(given)).steps))
        undisturbed = f"{words.counted(steps, 'undisturbed step')} outside its windows"
        if not has_log:
            why = "no step log: it must be the directory of a run under clusterprof"
        elif steps < needed:
            why = f"{undisturbed}, {needed} are needed: run more steps"
        else:
            why = f"{undisturbed}, logged in too few stretches to tell the noise"
        raise _CannotTell(f"{side} has {why}")


def _predicted(
    results: Results, repaired: Sequence[Finding], compared: Sequence[ComparedFinding]
) -> PredictedSaving:
    """What these repairs and those gone in B save. Raises _CannotTell where it is not stated."""
    changed = {*map(finding_key, repaired)}
    changed |= {finding_key(finding) for finding in compared if finding["state"] == "gone"}
    findings = [finding for finding in results["findings"] if finding_key(finding) in changed]
    if len(findings) == 1:
        return _stated(findings, "alone", findings[0]["saved_alone_ns"])
    before = chain.from_iterable(map(_net_of, findings))
    if changed.issuperset(map(finding_key, before)):
        return _stated(findings, "sum", sum(f["saved_ns_per_step"] for f in findings))
    combined, keys = results["combined"], _replayed_at_once(results)
    if combined and changed.issubset(keys):
        choice = sum((key in changed) << place for place, key in enumerate(keys))
        saved_ns = combined["remaining_ns"][0] - combined["remaining_ns"][choice]
        return _stated(findings, "replay", max(saved_ns, 0))
    names = words.listed(map(_named, repaired))
    gone = [_named(finding) for finding in findings if finding not in repaired]
    if not gone:
        raise _CannotTell(f"A does not state what {names} save at once")
    raise _CannotTell(
        f"asked for is {names}, and {words.listed(gone)} {_is_or_are(gone)} gone in B as well: A "
        "does not state what all of them save at once"
    )


def _is_or_are(subjects: Sequence[object]) -> str:
    return "is" if len(subjects) == 1 else "are"


def _stated(findings: Sequence[Finding], basis: Basis, saved_ns: int) -> PredictedSaving:
    """The saving with its interval: how far several may be wrong adds up as for independent ones.

    The stated interval of a finding is that of the saving once others are repaired. Where alone it
    saves more, that is taken to be as uncertain by its share, and to lie within nothing and twice
    as much.
    """
    net_ns = [finding["saved_ns_per_step"] for finding in findings]
    less = [ns - f["saved_least_ns"] for ns, f in zip(net_ns, findings, strict=True)]
    more = [f["saved_most_ns"] - ns for ns, f in zip(net_ns, findings, strict=True)]
    reach = [math.hypot(*(max(ns, 0) for ns in side)) for side in (less, more)]
    if basis == "alone" and saved_ns > net_ns[0] > 0:
        reach = [max(ns, min(ns * saved_ns / net_ns[0], saved_ns)) for ns in reach]
    return {
        "findings": [{"code": f["code"], "ranks": f["ranks"]} for f in findings],
        "basis": basis,
        "saved_ns": saved_ns,
        "saved_least_ns": max(round(saved_ns - reach[0]), 0),
        "saved_most_ns": round(saved_ns + reach[1]),
    }


def _outcome(predicted: PredictedSaving, step: Change) -> Outcome:
    """What may be said of the change: none where `compare` says so."""
    if step["direction"] == "none":
        return "no change beyond the noise"
    measured_ns, saved_ns = -step["change_ns"], predicted["saved_ns"]
    if step["direction"] == "shorter" and _agrees(saved_ns, predicted, step):
        return "as predicted"
    return "more than predicted" if measured_ns > saved_ns else "less than predicted"


def _agrees(saved_ns: float, predicted: PredictedSaving, step: Change) -> bool:
    """Whether what was measured differs from `saved_ns` by less than both may err."""
    apart_ns = -step["change_ns"] - saved_ns
    end_ns = predicted["saved_most_ns"] if apart_ns > 0 else predicted["saved_least_ns"]
    return abs(apart_ns) <= math.hypot(step["noise_ns"], end_ns - predicted["saved_ns"])


def _notes(
    outcome: Outcome,
    predicted: PredictedSaving,
    compared: Comparison,
    results: Results,
    repaired: Sequence[Finding],
) -> list[str]:
    """What else bears on the outcome: the findings of B, the noise, how the saving is stated."""
    step, saved_ns, pace = compared["step"], predicted["saved_ns"], results["pace"]
    notes = _became(compared["findings"], predicted["findings"])
    hidden = saved_ns > 0 and _agrees(saved_ns, predicted, step)
    if outcome == "no change beyond the noise" and hidden:
        noise = words.bound(step["noise_ns"])
        notes.append(f"the noise of {noise} hides such a saving: this does not refute it")
    if outcome == "as predicted" and _agrees(saved_ns / 2, predicted, step):
        notes.append("the uncertainty is wide: half of this saving would be as predicted as well")
    if step["direction"] == "longer":
        notes.append("steps of B are longer")
    if any(finding["code"] in _AT_MOST for finding in repaired):
        notes.append("A states it as the most that can be saved: a part of it is no contradiction")
    if any(finding["recurrence"] != "persistent" for finding in repaired):
        notes.append("the cause was not in all steps of A's window: it may be rarer outside of it")
    if predicted["basis"] == "alone":
        notes += _stated_otherwise(repaired[0], step["a_ns"])
    if pace is not None and abs(pace["step_ns"] - step["a_ns"]) > step["noise_ns"]:
        stated, usual = words.ms(pace["step_ns"]), words.ms(step["a_ns"])
        notes.append(f"the saving is stated of a step of {stated}, undisturbed ones take {usual}")
    return notes


def _stated_otherwise(finding: Finding, step_ns: int) -> list[str]:
    """That A states another saving first, once others are repaired, where it noticeably does."""
    saved_ns, before = finding["saved_ns_per_step"], _net_of(finding)
    if not before or not words.alone(saved_ns, finding["saved_alone_ns"], step_ns):
        return []
    names, saved = words.listed(map(_named, before), 2), words.ms(saved_ns)
    which = f"which {_is_or_are(before)} not gone in B"
    return [f"A states {saved} after the repair of {names}, {which}"]


def _became(compared: Sequence[ComparedFinding], repaired: Sequence[Repaired]) -> list[str]:
    """What has become of the findings that were repaired, and which are new, in sentences."""
    keys = {finding_key(finding) for finding in repaired}
    sentences = []
    for finding in compared:
        saves = f"its repair saves {words.ms(finding['b_saved_ns'])} there"
        state, was_repaired = finding["state"], finding_key(finding) in keys
        if was_repaired and state == "gone":
            became = "is gone in B"
        elif was_repaired and finding["b_saved_ns"] <= 0 and finding["b_alone_ns"] <= 0:
            became = "is not found in B, which is within the noise"
        elif was_repaired:
            became = f"is still found in B: {saves}"
        elif state in ("new", "worse", "better"):
            became = f"is {state} in B: {saves}"
        else:
            continue
        sentences.append(f"{comparison.named(finding)} {became}")
    return sentences


def _replayed_at_once(results: Results) -> list[tuple[str, tuple[int, ...]]]:
    """The keys of the findings whose saving at once the run states, in their order there."""
    combined = results["combined"]
    return [finding_key(entry) for entry in combined["findings"]] if combined else []


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
    saved_ns, most_ns = predicted["saved_ns"], predicted["saved_most_ns"]
    saving = f"at most {words.ms(most_ns)}" if most_ns > 0 else "nothing"
    if saved_ns > 0:
        saving = words.between(saved_ns, predicted["saved_least_ns"], most_ns)
    # with the noise as `compare` prints it, and no finer than that: `16.2 ±1.3 ms`
    noise = words.bound(step["noise_ns"])
    number, _, unit = noise.partition(" ")
    measured = words.with_bound(-step["change_ns"], step["noise_ns"])
    if unit == "ms":
        decimals = len(number.partition(".")[2])
        measured = f"{words.milliseconds(-step['change_ns'], decimals)} {noise}"
    usual = words.ms(step["a_ns"])
    outcome = verification["outcome"]
    return f"predicted {saving}, measured {measured} of each {usual} step: {outcome}"


def render(verification: Verification, width: int = 100) -> str:
    """The verification as plain text of `width` columns; it ends in a newline."""
    lines = heading(verification["verdict"], [verification["a"]], [verification["b"]], width)
    rows = list[tuple[str, str]]()
    if (predicted := verification["predicted"]) is not None:
        names = words.listed(map(_named, predicted["findings"]))
        basis = {
            "alone": f"what repairing {names} alone saves (no other finding is gone in B)",
            "sum": f"what {names} save, each once those before it are repaired: the sum",
            "replay": f"the replay with {names} repaired",
        }[predicted["basis"]]
        rows.append(("predicted", basis))
    if (step := verification["step"]) is not None:
        times = f"{words.ms(step['a_ns'])} in A, {words.ms(step['b_ns'])} in B"
        steps = f"{verification['a_steps']:,} and {verification['b_steps']:,} steps"
        rows.append(("measured", f"{times}: {steps} outside the windows, by step logs"))
    rows += [("note", note) for note in verification["notes"]]
    lines += [""] * bool(rows)
    for label, text in rows:
        lines += console.wrapped(f"  {label:<9}  {words.plain(text)}", width, " " * 13)
    return "\n".join(lines) + "\n"
