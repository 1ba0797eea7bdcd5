"""Compare two runs, or several runs of each side: step time, its parts, and findings.

What a comparison can claim. Steps of one run are no independent measurements: neighbours are alike,
and runs of one program differ from each other by more than their steps tell (other nodes, other
clocks of the GPUs, another order of ranks). So a run is one measurement, and its steps only tell
how much one varies:

- A run's value is the median of the means of up to 20 blocks of consecutive steps (batch means:
  Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research 30,
  1982: more than 30 batches gain nothing); of a window's few steps it is their mean, so that the
  parts of a step add up.
- Runs of one program vary by 0.8% of a step (`_RUNS_FRAC`) and by what their own steps leave open
  of their values: that is assumed. Where a side has several runs, how they vary is measured as
  well, and both variances are pooled, the assumed one with the weight of `_WEIGHT` (the moderated t
  of Smyth, "Linear models and empirical Bayes methods", SAGMB 3, 2004, with a prior that is stated
  and not estimated). Runs that differ by far more refute the assumption, and count alone.
- The noise is the half-width of the 95% interval of the difference by Student's t. A change within
  it is called none.

Assumption: both sides ran on machines as busy as each other. A machine that was slower during all
of one run looks like a slower program; only further runs tell them apart.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from clusterprof import __version__, gate, merge_run, words
from clusterprof.agent.contracts import paths
from clusterprof.analysis.model import limits
from clusterprof.collect import live_windows
from clusterprof.columns import Floats, sum_by
from clusterprof.console import say
from clusterprof.errors import ClusterprofError, MergeError, ReportError
from clusterprof.ingest.rank_steps import WARM_UP, period, stretches
from clusterprof.report import comparison_text, results_json
from clusterprof.results import (
    Change,
    ComparedFinding,
    Comparison,
    Direction,
    MeasuredFinding,
    MeasuredRun,
    Results,
    State,
    StepParts,
    finding_key,
)
from clusterprof.run_directory import Window

COMPARISON_VERSION = 2
#: standard deviation of a step over runs of one program: the middle of 15 programs whose runs were
#: repeated on H200s (tests/data/recordings/pairs.json, saved_spread_ms over the range that a normal
#: sample of so many repeats has). Launch-bound ones varied by up to 8%
_RUNS_FRAC = 0.008
#: the assumption counts as much as five runs would, which have four degrees of freedom
_WEIGHT = 4
#: runs whose variance is so many times the assumed one refute it: by chance in 5 of 100 cases (F of
#: 2 and 4 degrees of freedom). Then what is measured counts alone
_REFUTED = 6.9
_LEVEL = 0.95
#: blocks of steps: at most so many, of so many steps at least; fewer blocks tell no spread
_BLOCKS, LEAST_STEPS, LEAST_BLOCKS = 20, 4, 4
#: of 20 blocks a correlation is known to some 0.2 only
_MOST_ALIKE = 0.8
#: the scaled median absolute deviation of normal values is their standard deviation
_MAD = 1.4826

#: the parts of a step in the order in which they are shown: all but the two that are themselves
#: parts of the exposed communication add up to the step
PARTS: dict[str, str] = {
    "duration_ns": "step in the window",
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed communication",
    "exposed_wait_ns": "waiting for a later rank",
    "blocking_ns": "blocking compute",
    "exposed_copy_ns": "exposed copies",
    "idle_ns": "idle",
}

#: the parts of a step's account
_STEP = list(StepParts.__annotations__)


def measured(given: Path) -> MeasuredRun:
    """What is compared of a run directory, an --output or a results.json. Raises ReportError."""
    return of_run(given, *read_run(given))


def read_run(given: Path) -> tuple[Window | None, Results]:
    """The window of a run directory (None for a results.json), and its results, as `measured`."""
    try:
        run = Window.at(given) if given.is_dir() else None
        file = run.merged / paths.RESULTS if run is not None else given
        exists = file.exists()
    except OSError as error:
        raise ReportError(f"{given} cannot be read: {error.strerror}") from None
    if exists:
        return run, results_json.read(file)
    if run is not None:
        raise results_json.not_merged(given)
    advice = "name a run directory that was merged, or a results.json"
    raise ReportError(f"{given} does not exist", advice)


def of_run(given: Path, run: Window | None, results: Results) -> MeasuredRun:
    """What a comparison needs of what was read: with step logs where it is a run directory."""
    kept = of_results(str(given), results)
    if run is not None and run.directory.manifest.is_file():
        with contextlib.suppress(ClusterprofError):  # what is damaged is no reason to refuse
            manifest = run.directory.read_manifest()
            kept["program"] = _program(manifest.again)
            kept["world_size"] = kept["world_size"] or manifest.world_size
            run = Window.at(given, manifest.attempt)
            blocks, kept["outside_steps"] = clean_steps(run, results)
            kept["outside_ns"] = [round(ns) for ns in blocks.tolist()]
    return kept


def of_results(name: str, results: Results) -> MeasuredRun:
    """What a comparison needs of results alone: their window."""
    ranks, topology = results["ranks"], results["topology"]
    worlds = {entry["world_size"] for entry in ranks} - {None}
    sizes = {group["size"] for group in topology["groups"]} - {0}
    blocking_ns = [entry["blocking_ns"] or 0 for entry in results["compute_absent"]
                   if entry["blocking_ns"] is not None]  # fmt: skip
    kept = MeasuredFinding.__annotations__
    findings: Any = [{key: finding[key] for key in kept} for finding in results["findings"]]  # type: ignore[literal-required]
    return {
        "name": name,
        "clusterprof_version": results["clusterprof_version"],
        "world_size": worlds.pop() if len(worlds) == 1 else None,
        "stages": topology["stage_count"],
        "group_sizes": [] if None in sizes else sorted(cast("set[int]", sizes)),
        "devices": sorted({entry["device"] for entry in ranks} - {""}),
        "profilers": sorted({entry["profiler"] for entry in ranks}),
        "profiled": [entry["rank"] for entry in ranks],
        "program": "",
        "outside_ns": [],
        "outside_steps": 0,
        "window": _mean_steps(results),
        "blocking_ns": round(sum(blocking_ns) / len(blocking_ns)) if blocking_ns else None,
        "findings": findings,
    }


def _mean_steps(results: Results) -> Any:
    """The steps that are evidence, each the mean over ranks."""
    return [
        {part: round(np.mean([account[part] for account in step["ranks"]])) for part in _STEP}  # type: ignore[literal-required]
        for step in results["steps"]
        if step["settled"] and step["ranks"] and step["duration_ns"] > 0
    ]


def _program(again: Sequence[str]) -> str:
    """The script or module of a command line, without its folder and arguments."""
    program = again[again.index("--") + 1 :] if "--" in again else []
    for word, following in zip_longest(program, program[1:]):
        if word == "-m" and following is not None:
            return str(following)
        if word.endswith(".py"):
            return Path(word).name
    return Path(program[0]).name if program else ""


def clean_steps(run: Window, results: Results) -> tuple[Floats, int]:
    """The mean step (ns) of each block of steps outside of all windows, and how many steps.

    By the log of the rank whose mean step is the middle one: ranks that wait for each other have
    one pace. Empty where there are too few.
    """
    from clusterprof.analysis.model.replay import SETTLE_STEPS

    windows, until = [*live_windows.windows(run)], _alike_until(run, results)
    job = merge_run.job_record(run)
    ranks = []
    for rank, log in job.steps.items():
        first, count, took, _ = stretches(log, job.paces.get(rank, {}))
        clean = (first >= WARM_UP) & (first + count <= until) & (count > 0) & (took > 0)
        for window in windows:
            clean &= (first + count <= window.first) | (first >= window.end + SETTLE_STEPS)
        count, took = count[clean], took[clean]
        if len(count):
            ranks.append((took.sum() / count.sum(), count, took))
    if not ranks:
        return np.zeros(0), 0
    _, count, took = sorted(ranks, key=lambda rank: rank[0])[(len(ranks) - 1) // 2]
    return blocked(count, took), int(count.sum())


def _alike_until(run: Window, results: Results) -> float:
    """The step up to which all are as before the window; infinite where those after it are, too.

    By the run's own account of what profiling cost, beyond chance: a smaller share of a step than
    is worth a finding would still be a change.
    """
    cost = results["capture"]
    for times in (cost["profiled"], cost["unprofiled"]) if cost else ():
        # before and after are known where their uncertainty is
        if times is not None and times["after_uncertainty_ns"] is not None:
            longer_ns = (times["after_ns"] or 0) - (times["before_ns"] or 0)
            if longer_ns > times["after_uncertainty_ns"]:
                return run.deep().window().first
    return math.inf


def blocked(count: npt.NDArray[np.int64], took: npt.NDArray[np.int64]) -> Floats:
    """The mean step of each of up to 20 blocks of consecutive steps; empty for too few steps.

    `count` and `took` (ns) are stretches of steps in their order, which stay whole. Where steps
    repeat a pattern, blocks hold whole patterns.
    """
    total = int(count.sum())
    after = period(took) if total == len(count) else 1
    length = after * math.ceil(max(total / _BLOCKS, LEAST_STEPS) / after)
    if after == 1 or total < LEAST_BLOCKS * length:
        blocks = min(_BLOCKS, total // LEAST_STEPS)
        if blocks < LEAST_BLOCKS:
            return np.zeros(0)
        block = ((np.cumsum(count) - count / 2) * blocks / total).astype(np.int64)
    else:
        blocks = total // length
        count, took = count[: blocks * length], took[: blocks * length]
        block = np.arange(blocks * length) // length
    steps = sum_by(block, count, blocks)
    taken = sum_by(block, took, blocks)[steps > 0]
    return np.asarray(taken / steps[steps > 0]) if len(taken) >= LEAST_BLOCKS else np.zeros(0)


class Value(NamedTuple):
    """One run's time per step, and its standard error by the run's own steps, ns."""

    ns: float
    error_ns: float


def of_blocks(blocks: Sequence[int]) -> Value:
    """A run's step by its blocks: their median, and its standard error.

    A few blocks with a stalled file system or a saved checkpoint change neither. A median's error
    is sqrt(pi/2) of a mean's; of blocks that are like their neighbours (a first-order
    autoregression, by the correlation of adjacent blocks) it is larger.
    """
    values = np.asarray(blocks, dtype=np.float64)
    middle = float(np.median(values))
    apart = values - middle
    spread = _MAD * float(np.median(np.abs(apart)))
    # those far off would make any series look uncorrelated
    apart = np.clip(apart, -2 * spread, 2 * spread)
    total = float((apart**2).sum())
    alike = float((apart[1:] * apart[:-1]).sum()) / total if total else 0.0
    alike = min(max(alike, 0.0), _MOST_ALIKE)
    longer = (math.pi / 2) * (1 + alike) / (1 - alike)
    return Value(middle, spread * math.sqrt(longer / len(values)))


def of_steps(steps: Sequence[int]) -> Value:
    """A part of a window's few steps: its mean, as parts add up, and its standard error."""
    values = np.asarray(steps, dtype=np.float64)
    return Value(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))


def change(label: str, a: Sequence[Value], b: Sequence[Value], step_ns: float) -> Change:
    """What may be claimed of one time of all runs, which vary in proportion to `step_ns`."""
    from clusterprof.analysis.model.shallow import students_t

    errors = [run.error_ns**2 for run in (*a, *b)]
    assumed = (_RUNS_FRAC * step_ns) ** 2 + sum(errors) / len(errors)
    sides = [np.asarray([run.ns for run in side]) for side in (a, b)]
    free = sum(len(side) - 1 for side in sides)
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
    weight = _WEIGHT if squares <= _REFUTED * assumed * free else 0
    variance = (weight * assumed + squares) / (weight + free)
    apart = math.sqrt(variance * sum(1 / len(s) for s in sides))
    noise = students_t((1 - _LEVEL) / 2, weight + free) * apart
    before, after = (float(side.mean()) for side in sides)
    direction: Direction = "none"
    if abs(after - before) > noise:
        direction = "longer" if after > before else "shorter"
    return {
        "what": label, "a_ns": round(before), "b_ns": round(after),
        "change_ns": round(after - before), "noise_ns": round(noise), "direction": direction,
    }  # fmt: skip


def compare(a: Sequence[MeasuredRun], b: Sequence[MeasuredRun]) -> Comparison:
    """Compare. Raises MergeError where no step can be, ReportError where a number is no time."""
    runs = (*a, *b)
    for run in runs:
        results_json.check(Path(run["name"]), run, MeasuredRun)
    by_logs, parts = all(run["outside_ns"] for run in runs), _parts_changed(a, b)
    step = _step_changed(a, b, parts)
    steps = [run["outside_steps"] if by_logs else len(run["window"]) for run in runs]
    findings = _findings(a, b, step)
    return {
        "comparison_version": COMPARISON_VERSION,
        "clusterprof_version": __version__,
        "verdict": _verdict(step, findings),
        "a": [run["name"] for run in a],
        "b": [run["name"] for run in b],
        "steps_from": "step logs" if by_logs else "window",
        "a_steps": sum(steps[: len(a)]),
        "b_steps": sum(steps[len(a) :]),
        "step": step,
        "parts": parts,
        "findings": findings,
        "other_job": other_job(a, b),
        "warnings": _warnings(a, b),
    }


def _step_changed(
    a: Sequence[MeasuredRun], b: Sequence[MeasuredRun], parts: Sequence[Change]
) -> Change:
    """The step by all runs' logs, else by their windows. Raises MergeError."""
    runs = (*a, *b)
    if all(run["outside_ns"] for run in runs):
        before, after = ([of_blocks(run["outside_ns"]) for run in side] for side in (a, b))
        return change("step", before, after, float(np.mean([value.ns for value in before])))
    if parts:
        return parts[0] | {"what": "step"}
    names = words.listed([run["name"] for run in runs], 4)
    raise MergeError(
        f"{names} have no steps in common that can be compared",
        "both need two steady-state steps in their windows, or step logs of twenty steps "
        "outside of them",
    )


def _parts_changed(a: Sequence[MeasuredRun], b: Sequence[MeasuredRun]) -> list[Change]:
    """The window's steps and their parts, as far as all runs have them.

    What blocks compute is known of the whole window alone: it is taken to differ from step to step
    as the exposed communication does, whose part it is.
    """
    runs = []
    for run in (*a, *b):
        # a single step of a window does not tell how much steps vary
        if len(run["window"]) < 2:
            return []
        steps = cast("list[dict[str, int]]", run["window"])
        values = {part: of_steps([step[part] for step in steps]) for part in _STEP}
        if run["blocking_ns"] is not None:
            error_ns = values["exposed_communication_ns"].error_ns
            values["blocking_ns"] = Value(run["blocking_ns"], error_ns)
        runs.append(values)
    step_ns = float(np.mean([values["duration_ns"].ns for values in runs[: len(a)]]))
    parts = []
    for name, label in PARTS.items():
        of_runs = [values[name] for values in runs if name in values]
        if len(of_runs) == len(runs):
            parts.append(change(label, of_runs[: len(a)], of_runs[len(a) :], step_ns))
    return parts


def _findings(
    a: Sequence[MeasuredRun], b: Sequence[MeasuredRun], step: Change
) -> list[ComparedFinding]:
    """The findings above info, most changed first; one that moved is gone there and new here."""
    sides: dict[tuple[str, tuple[int, ...]], tuple[list[MeasuredFinding], ...]] = {}
    for side, runs in enumerate((a, b)):
        for finding in (finding for run in runs for finding in run["findings"]):
            sides.setdefault(finding_key(finding), ([], []))[side].append(finding)
    compared = [
        _compared(before, after, (len(a), len(b)), step)
        for _, (before, after) in sorted(sides.items())
        if any(finding["severity"] != "info" for finding in (*before, *after))
    ]
    return sorted(compared, key=lambda finding: -abs(finding["b_saved_ns"] - finding["a_saved_ns"]))


def _compared(
    before: Sequence[MeasuredFinding],
    after: Sequence[MeasuredFinding],
    runs: tuple[int, int],
    step: Change,
) -> ComparedFinding:
    """One finding in the runs of both sides; where it is not found it saves nothing.

    Its noise is how uncertain both savings are, and by how much steps differ from run to run. What
    a side does not find may still save what is below every finding's limit. What saves more only
    because a cause before it is gone saves no more alone.
    """
    sides = list(zip((before, after), runs, strict=True))
    saved = [sum(f["saved_ns_per_step"] for f in side) / count for side, count in sides]
    alone = [sum(f["saved_alone_ns"] for f in side) / count for side, count in sides]
    unsure = [max((f["saved_uncertainty_ns"] for f in side), default=0) for side, _ in sides]
    growth, unseen = saved[1] - saved[0], limits.LEAST_FRAC * step["b_ns"]
    if before and after:
        # the lesser of both, or nothing where one is more and the other less
        growth, unseen = sorted((0.0, growth, alone[1] - alone[0]))[1], 0.0
    noise = math.hypot(*unsure, unseen, step["noise_ns"])
    state: State = "same"
    if growth > noise:
        state = "worse" if before else "new"
    elif -growth > noise:
        state = "better" if after else "gone"
    severe = [f["severity"] for f in (*before, *after) if f["severity"] != "info"]
    last = [*before, *after][-1]
    return {
        "code": last["code"], "ranks": last["ranks"], "rank": last["rank"], "state": state,
        "severity": severe[-1],
        "a_saved_ns": round(saved[0]), "a_alone_ns": round(alone[0]),
        "b_saved_ns": round(saved[1]), "b_alone_ns": round(alone[1]),
        "noise_ns": round(noise),
        "share_of_step": round(growth / max(step["b_ns"], 1), 4), "summary": last["summary"],
    }  # fmt: skip


def _verdict(step: Change, findings: Sequence[ComparedFinding]) -> str:
    a, b = (words.ms(step[key]) for key in ("a_ns", "b_ns"))
    share, noise = (
        words.percent(abs(step[key]) / max(step["a_ns"], 1)) for key in ("change_ns", "noise_ns")
    )
    first = f"No change of the step beyond the noise: {a} and {b} (±{noise})."
    if step["direction"] != "none":
        first = f"Steps are {share} {step['direction']} in B: {a} to {b} (±{noise})."
    changed = []
    for state in ("new", "worse", "better", "gone"):
        names = [named(finding) for finding in findings if finding["state"] == state]
        if names:
            changed.append(f"{state.capitalize()}: {words.listed(names, 3)}.")
    return " ".join([first, *changed])


def named(finding: ComparedFinding) -> str:
    """A finding's code, with its rank where it is about one."""
    who = f" {words.ranks(finding['ranks'])}" if finding["rank"] is not None else ""
    return f"{finding['code']}{who}"


def other_job(a: Sequence[MeasuredRun], b: Sequence[MeasuredRun]) -> list[str]:
    """Why these are no runs of one job; what is not known differs from nothing."""

    def texts(side: Sequence[MeasuredRun], name: str) -> set[str]:
        values: list[Any] = [run[name] for run in side]  # type: ignore[literal-required]
        lists = [value if isinstance(value, list) else [value] for value in values]
        return {", ".join(map(str, items)) for items in lists if items != [None]} - {""}

    differences = []
    for name, noun in (
        ("world_size", "a world of {} ranks"),
        ("stages", "{} pipeline stages"),
        ("group_sizes", "communicators of {} ranks"),
        ("devices", "{}"),
        ("program", "the program {}"),
    ):
        of_a, of_b = texts(a, name), texts(b, name)
        if of_a and of_b and of_a != of_b:
            a_has, b_has = (noun.format(words.listed(sorted(side))) for side in (of_a, of_b))
            differences.append(f"A has {a_has}, B {b_has}")
    return differences


def _warnings(a: Sequence[MeasuredRun], b: Sequence[MeasuredRun]) -> list[str]:
    warnings = []
    profiled = [{tuple(run["profiled"]) for run in side} for side in (a, b)]
    if profiled[0] != profiled[1] and all(run["window"] for run in (*a, *b)):
        of_a, of_b = (words.ranks(chain.from_iterable(side)) for side in profiled)
        warnings.append(
            f"{of_a} were profiled in A, {of_b} in B: the window's parts are means over different "
            "ranks"
        )
    kinds = []
    for side in (a, b):
        profilers = chain.from_iterable(run["profilers"] for run in side)
        kinds.append({profiler.partition(" ")[0] for profiler in profilers} - {""})
    if all(kinds) and kinds[0] != kinds[1]:
        of_a, of_b = (words.listed(sorted(kind)) for kind in kinds)
        warnings.append(f"A was captured by {of_a}, B by {of_b}, which cost the window differently")
    return warnings


def fails(conditions: Sequence[gate.Condition], comparison: Comparison) -> bool:
    """Whether a condition of `--fail-on` is met, each with a message.

    A finding counts where it is new or saves more than before, beyond the noise, and with what it
    saves more. Says so where the noise is wider than a step's limit: such a change is not seen.
    """
    step = comparison["step"]
    share, noise = (step[key] / max(step["a_ns"], 1) for key in ("change_ns", "noise_ns"))
    worse = [finding for finding in comparison["findings"] if finding["state"] in ("new", "worse")]
    figures = partial(comparison_text.figures, comparison)
    failed = gate.fails(conditions, worse, (share, noise), figures)
    for condition in conditions:
        limit = condition.step_frac
        if limit is not None and step["direction"] == "none" and noise > limit:
            say(
                f"--fail-on {condition.text}: the noise is ±{words.percent(noise)}, which hides a "
                "smaller change; compare more steps, or a baseline of several runs"
            )
    return failed
