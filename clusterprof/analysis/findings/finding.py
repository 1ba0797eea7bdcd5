"""How a finding is made: the pace it is of, its words, its severity, the command that shows more.

Severity follows from what its repair saves, recurrence from its steps. All savings, and all shares
of a step, are of one pace (`pace_ns`): that of the job without the profiler where its step logs
tell it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np

from clusterprof import masking, words
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Interval, Saved, WhatIfs, what_ifs
from clusterprof.columns import Bools, Floats
from clusterprof.results import FOR_NSYS, NODES, RANKS, Finding, Pace, Recurrence, Saving, Severity

#: a sentence of the verdict's first line is at most this long, to fit a terminal's line
SENTENCE_LENGTH = 100
_LEVELS: tuple[Severity, ...] = ("info", "warning", "critical")
#: the code of a job whose kernels are launched too slowly
LAUNCH_BOUND = "host.launch_bound"

Evidence = list[dict[str, Any]]


class Code(NamedTuple):
    """A finding code in words: what it means, when it is wrong, what to do in general."""

    code: str
    title: str
    meaning: str
    when_wrong: str
    recommendation: str


class Tier(IntEnum):
    """What a module's findings are weighed after: those of the tiers before its own."""

    STRAGGLERS = auto()
    LINKS = auto()
    UNPROFILED = auto()
    STAGES = auto()
    #: what all ranks lose alike, first what saves most
    EVERYONE = auto()
    REST = auto()


class Words(NamedTuple):
    """What a finding says beside what its repair saves.

    The summary's first sentence must make sense alone: it may become the verdict.
    """

    summary: str
    evidence: Evidence
    confidence: float = limits.MEASURED
    #: the one of its ranks that it is about
    rank: int | None = None
    #: the code's recommendation unless given
    advice: str = ""
    #: the command that shows more, if any
    follow_up: str = ""
    at_most: Severity = "critical"
    at_least: Severity = "info"
    #: where something else than the window tells it
    recurrence: Recurrence | None = None
    #: what it costs in each steady-state step (ns), where that is not what its repair saves there
    costs: Floats | None = None
    #: queued work covers it in the window: its saving is stated for the long run
    hidden: bool = False


@dataclass(frozen=True, eq=False)
class Repair:
    """A cause that can be taken out of a job's lengths: what a module of findings proposes.

    `registry.weigh` says what that saves, and after what; the finding is made of it last.
    """

    code: Code
    ranks: tuple[int, ...]
    #: any lengths of the job without the cause
    apply: Callable[[Lengths], Lengths]
    #: the finding in words, by what its repair saves
    words: Callable[[Saved], Words]
    #: it is a finding where it saves this share of the window's step
    least: float = limits.LEAST_FRAC
    #: of a tier those of an earlier turn are weighed before the others, whatever they save
    turn: int = 0
    #: rows of the placed table that no repair of a later tier is about
    calls: Bools | None = None


def finding(dataset: Dataset, code: Code, ranks: Sequence[int], say: Words) -> Finding:
    """Make a finding that nothing is replayed for: it costs nothing, and nothing is saved."""
    return {
        "code": code.code,
        "severity": say.at_least,
        "rank": say.rank,
        "ranks": list(ranks),
        "steps": [],
        "recurrence": say.recurrence or "persistent",
        "cost_ns_per_step": 0,
        "share_of_step": 0.0,
        "saved_ns_per_step": 0,
        "saved_alone_ns": 0,
        "saved_least_ns": 0,
        "saved_most_ns": 0,
        "saved_uncertainty_ns": 0,
        "saving": None,
        "confidence": say.confidence,
        "summary": _worded(dataset, say.summary),
        "evidence": say.evidence,
        "advice": _worded(dataset, say.advice or code.recommendation),
        "next": say.follow_up,
    }


def finding_of_repair(
    dataset: Dataset, code: Code, ranks: Sequence[int], say: Words, saved: Saved
) -> Finding:
    """Make a finding from what its repair saves.

    It costs in each steady-state step what the what-if saves in the window. The severity is that of
    the least that may be saved: what happens once in a window is an information, unless the pace
    before it tells how often it does.
    """
    saved, job = replace(saved, long_run=saved.long_run or say.hidden), job_of(dataset)
    # no step can cost more than it lasts
    costs_ns = saved.by_step_ns if say.costs is None else say.costs
    costs_ns = np.clip(costs_ns, 0.0, dataset.durations)
    hit = np.flatnonzero(costs_ns > limits.WARNING_FRAC * costs_ns.max(initial=0.0))
    often = recurrence(len(hit), len(costs_ns))
    # nor can its repair save more than the step where one rank's times are wrong
    saved_ns, lies = min(saved.ns, saved.of_ns), job.interval(saved, ranks)
    job.weighed[code.code, tuple(ranks), round(saved_ns)] = saved
    # where queued work hides it, the longer step to come
    step_ns = max(job.step_ns if saved.paced or not saved.long_run else saved.of_ns, 1.0)
    share = min(max(saved_ns / step_ns, 0.0), 1.0)
    at_most: Severity = say.at_most if often != "once" or saved.beyond_window else "info"
    level = min(severity(lies.least_ns / step_ns), at_most, key=_LEVELS.index)
    if at_most != "info" and severity(share) != "info":
        say = say._replace(summary=_doubted(dataset, say.summary, saved, lies))
    steps_said = often != "persistent" and of_saving(dataset, saved) in say.summary
    if 0 < len(hit) < len(costs_ns) and not steps_said:
        when = (
            f" It happens in {_often(dataset, hit)}, {words.ms(float(costs_ns[hit].mean()))} each."
        )
        say = say._replace(summary=say.summary + when)
    return finding(dataset, code, ranks, say) | {
        "severity": max(level, say.at_least, key=_LEVELS.index),
        "steps": [int(dataset.steady_steps[k]) for k in hit],
        "recurrence": say.recurrence or often,
        "cost_ns_per_step": round(float(costs_ns.mean())) if len(costs_ns) else 0,
        "share_of_step": round(share, 4),
        "saved_ns_per_step": round(saved_ns),
        "saved_alone_ns": round(saved.alone_ns),
        "saved_least_ns": round(lies.least_ns),
        "saved_most_ns": round(lies.most_ns),
        "saved_uncertainty_ns": round(max(saved_ns - lies.least_ns, lies.most_ns - saved_ns)),
        "saving": _saving(saved, max(lies.clocks_ns)),
    }


def _saving(saved: Saved, clocks_ns: float) -> Saving:
    """Where a saving is from."""
    base, long = saved.base_ns, saved.base_long_ns
    entry: Saving = {
        "window": {"step_ns": round(base), "without_ns": round(base - saved.window_ns)},
        "long_run": {"step_ns": round(long), "without_ns": round(long - saved.long_ns)},
        "stated": "long_run" if saved.long_run else "window",
        "each_ns": [round(ns) for ns in saved.by_step_ns.tolist()],
        "clocks_ns": round(clocks_ns),
        "net_of": [{"code": code, "ranks": list(ranks)} for code, ranks in saved.base.repaired],
    }
    if looks := saved.looks:
        entry["stated"] = "looks"
        entry["looks"] = {
            "steps": looks.steps, "lateness_ns": looks.lateness_ns, "bound_ns": looks.bound_ns,
            "share": round(looks.share, 4), "share_uncertainty": round(looks.share_error, 4),
        }  # fmt: skip
    return entry


def _doubted(dataset: Dataset, summary: str, saved: Saved, lies: Interval) -> str:
    """A summary that says, second, that the saving may be nothing, if so, and what would tell."""
    if lies.least_ns > 0:
        return summary
    has_logs = saved.paced or bool(dataset.capture)
    record = "profile more steps" if has_logs else "profile it by clusterprof, with step logs,"
    why = f"{record} to tell."
    if lies.clocks_ns[0] >= limits.HALF * saved.ns:
        why = "the ranks' clocks are not known well enough."
    first, *rest = words.sentences(summary)
    return " ".join((first, f"It may be nothing: {why}", *rest))


def severity(share: float) -> Severity:
    """Return how severe it is to lose this share of a step."""
    return _LEVELS[(share >= limits.WARNING_FRAC) + (share >= limits.CRITICAL_FRAC)]


def above_info(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are worth acting on: those above severity info."""
    return [finding for finding in findings if finding["severity"] != "info"]


def _worded(dataset: Dataset, text: str) -> str:
    """A sentence about GPUs as it is; for a job without any, about what it computes on."""
    if not dataset.on_host:
        return text
    return re.sub(r"\bGPU(s?)\b", r"processor\1", text).replace("its kernels", "its operators")


def named(name: object) -> str:
    """A name from a report (a call, a range, a host), short enough for a sentence."""
    text, most = words.plain(str(name)), SENTENCE_LENGTH * 2 // 5  # two leave a fifth for the rest
    return text if len(text) <= most else text[: most - 1] + "…"


# --- the pace that savings are of


def job_of(dataset: Dataset) -> WhatIfs:
    """The job's what-ifs: the registry asks for findings only where there are any."""
    job = what_ifs(dataset)
    assert job is not None
    return job


def pace_ns(dataset: Dataset) -> float:
    """The step (ns) that all savings are of."""
    job = what_ifs(dataset)
    return job.step_ns if job is not None else dataset.step_ns


def pace(dataset: Dataset) -> Pace | None:
    """Both paces of the job; None without steady-state steps."""
    job = what_ifs(dataset)
    if job is None or not dataset.step_ns:
        return None
    return {
        "step_ns": round(job.step_ns),
        "without_profiler": job.paced,
        "window_step_ns": round(dataset.step_ns),
    }


def of_the_window(dataset: Dataset) -> list[str]:
    """Warnings of a window that shows little of a step, or steps that the job has less often."""
    job, warnings = what_ifs(dataset), list[str]()
    if job is None:
        return warnings
    where = "outside the window" if job.paced else "in the replay"
    paces = f"steps take {words.ms(job.step_ns)} {where} and "
    paces += f"{words.ms(dataset.step_ns)} in it, "
    if job.unseen_ns > limits.WARNING_FRAC * job.step_ns:
        warnings.append(
            f"{paces}and nothing recorded explains the rest (such as batches that were fetched "
            "ahead while the profiler started): profile more steps (--steps)"
        )
    shares = np.ones(1) if job.shares is None else job.shares
    if len(seldom := np.flatnonzero(shares < limits.HALF / len(shares))):
        steps = words.numbers([dataset.steady_steps[k] for k in seldom])
        warnings.append(
            f"{paces}more than the profiler's overhead explains: savings count its longer steps "
            f"({steps}) less often, so that the mean is the step outside"
            if not len(dataset.outside_ns)
            else f"{paces}with longer ones ({steps}): savings count such steps as often as "
            f"they come in the {len(dataset.outside_ns)} steps outside"
        )
    return warnings


def another_pace(dataset: Dataset) -> bool:
    """Whether the window's steps are another pace than that of the savings."""
    return abs(dataset.step_ns - pace_ns(dataset)) > limits.LEAST_FRAC * pace_ns(dataset)


def of_step(dataset: Dataset, saved: Saved) -> str:
    """A saving as text: `16.9 ms of each 47.5 ms step (35%)`, or `(35%; 20.1 ms alone)`."""
    alone = words.alone(saved.ns, saved.alone_ns, pace_ns(dataset))
    return _of(saved.ns, pace_ns(dataset), f"; {alone}" if alone else "")


def of_saving(dataset: Dataset, saved: Saved) -> str:
    """The same; of what the window has in few steps, how long in those."""
    hit, count = np.flatnonzero(saved.hit), len(saved.by_step_ns)
    if saved.beyond_window or not len(hit) or recurrence(len(hit), count) == "persistent":
        return of_step(dataset, saved)
    much = words.ms(min(float(saved.by_step_ns[hit].mean()), float(dataset.durations[hit].mean())))
    if len(hit) == 1:
        return f"{much} in step {dataset.steady_steps[hit[0]]} alone"
    share = words.percent(saved.ns / pace_ns(dataset))
    return f"{much} in {_often(dataset, hit)}, {share} of all time"


def of_window(dataset: Dataset, ns: float) -> str:
    """A time that was measured in the window as text, with the window's own step."""
    return _of(ns, dataset.step_ns) + (" under the profiler" if another_pace(dataset) else "")


def _of(ns: float, step_ns: float, more: str = "") -> str:
    return f"{words.ms(ns)} of each {words.ms(step_ns)} step ({words.percent(ns / step_ns)}{more})"


def recurrence(hit: int, steps: int) -> Recurrence:
    """How often it is what is in `hit` of so many steps."""
    if hit >= limits.STEADY_FRAC * steps:
        return "persistent"
    return "once" if hit <= 1 else "intermittent"


def _often(dataset: Dataset, hit: np.ndarray) -> str:
    """In how many steps it is; the first and last where they are one stretch of the window."""
    often = f"{len(hit)} of {len(dataset.steady_steps)} steady-state steps"
    if len(hit) < limits.FEW or hit[-1] - hit[0] + 1 > len(hit):
        return often
    return f"{often} ({dataset.steady_steps[hit[0]]} to {dataset.steady_steps[hit[-1]]})"


# --- the run again, as shows more


def capture(dataset: Dataset, ranks: Sequence[int], *options: str, profiler: str = "nsys") -> str:
    """The command line that profiles `ranks` again by this profiler, with `options` that show more.

    It is the run's own, whole; where that is unknown, of the launcher that its hosts suggest. nsys
    shows most, whatever captured the run, and whatever the environment names by default; a profiler
    that the run's own line names behind the ranks is the only one that can capture them. Empty
    where no rank is known.
    """
    if not ranks:
        return ""
    launcher = "srun" if len({t.info.host for t in dataset.tables}) > 1 else "torchrun"
    given = dataset.again or ("clusterprof", launcher, RANKS, *masking.UNKNOWN_LAUNCH)
    ranks_at = given.index(RANKS) if RANKS in given else len(given)
    rest = given[ranks_at + 1 :]
    if profiler == "nsys" and dataset.launches_graphs:
        options = (*options, f"--nsys-arg={NODES}")
    by = [] if "--profiler" in rest[:1] else ["--profiler", profiler, *options]
    return masking.command([*given[:ranks_at], "--ranks", ",".join(map(str, ranks)), *by, *rest])


def lighter(dataset: Dataset) -> str:
    """The profiler for ranks of which only their part of the steps is to be seen.

    It is torch.profiler in a launch-bound job, which nsys slows until it ends: unless the run's own
    line asks for what nsys alone can do.
    """
    job = what_ifs(dataset)
    bound = job is not None and any(code == LAUNCH_BOUND for code, _ in job.repaired)
    return "torch" if bound and not asks_for_nsys(dataset) else "nsys"


def asks_for_nsys(dataset: Dataset) -> bool:
    """Whether the run's own command line has options that --profiler torch refuses."""
    return bool(FOR_NSYS & {word.partition("=")[0] for word in dataset.again})


def operators(dataset: Dataset) -> tuple[str, str]:
    """The option that shows PyTorch's operators with the nsys of the reports.

    nsys 2025.3 marks them itself; 2024.2 refuses the option, and torch can do it.
    """
    matches = [re.search(r"nsys (\d+)\.(\d+)", t.info.profiler) for t in dataset.tables]
    versions = [(int(m[1]), int(m[2])) for m in matches if m]
    by_nsys = min(versions, default=(0, 0)) >= (2025, 3)
    return "--pytorch", "autograd-nvtx" if by_nsys else "emit-nvtx"
