"""How a finding is made: severity from what its repair saves, recurrence from its steps.

All savings, and all shares of a step, are of one pace (`pace.pace_ns`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np

from clusterprof import words
from clusterprof.analysis.findings.pace import job_of, of_saving, pace_ns, recurrence, when
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Interval, Saved
from clusterprof.columns import Bools, Floats
from clusterprof.results import Finding, Recurrence, Saving, Severity

#: a sentence of the verdict's first line is at most this long, to fit a terminal's line
SENTENCE_LENGTH = 100
#: and a name in it: two of them leave a fifth for what is said
_NAME_LENGTH = SENTENCE_LENGTH * 2 // 5
_LEVELS: tuple[Severity, ...] = ("info", "warning", "critical")

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
    #: of a module those of an earlier turn are weighed before the others, whatever they save
    turn: int = 0
    #: rows of the placed table that no repair of a later tier is about
    calls: Bools | None = None


def finding(
    dataset: Dataset, code: Code, ranks: Sequence[int], say: Words, saved: Saved | None = None
) -> Finding:
    """Make a finding from what its repair saves; without a repair nothing is saved.

    It costs in each steady-state step what the what-if saves in the window. The severity is that of
    the least that may be saved: what happens once in a window is an information, unless the pace
    before it tells how often it does.
    """
    costs_ns, step_ns, saved_ns = np.zeros(0), max(pace_ns(dataset), 1.0), 0.0
    lies, summary, at_most = Interval(0.0, 0.0, (0.0, 0.0)), say.summary, say.at_most
    if saved:
        saved = replace(saved, long_run=saved.long_run or say.hidden)
        # no step can cost more than it lasts
        costs_ns = saved.by_step_ns if say.costs is None else say.costs
        costs_ns = np.clip(costs_ns, 0.0, dataset.durations)
        # nor can its repair save more than the step where one rank's times are wrong
        saved_ns, lies = min(saved.ns, saved.of_ns), job_of(dataset).interval(saved, ranks)
        if saved.long_run and not saved.paced:
            # where queued work hides it, the longer step to come
            step_ns = max(saved.of_ns, 1.0)
        job_of(dataset).weighed[code.code, tuple(ranks), round(saved_ns)] = saved
    hit = np.flatnonzero(costs_ns > limits.WARNING_FRAC * costs_ns.max(initial=0.0))
    often = recurrence(len(hit), len(costs_ns))
    if saved and not saved.paced and often == "once":
        at_most = "info"
    share = min(max(saved_ns / step_ns, 0.0), 1.0)
    if saved and at_most != "info" and lies.least_ns <= 0 and severity(share) != "info":
        summary = _doubted(summary, saved, lies)
    level = min(severity(lies.least_ns / step_ns), at_most, key=_LEVELS.index)
    unsure_ns = round(max(saved_ns - lies.least_ns, lies.most_ns - saved_ns))
    steps_said = saved and often != "persistent" and of_saving(dataset, saved) in summary
    return {
        "code": code.code,
        "severity": max(level, say.at_least, key=_LEVELS.index),
        "rank": say.rank,
        "ranks": list(ranks),
        "steps": [int(dataset.steady_steps[k]) for k in hit],
        "recurrence": say.recurrence or often,
        "cost_ns_per_step": round(float(costs_ns.mean())) if len(costs_ns) else 0,
        "share_of_step": round(share, 4),
        "saved_ns_per_step": round(saved_ns),
        "saved_alone_ns": round(saved.alone_ns) if saved else 0,
        "saved_least_ns": round(lies.least_ns),
        "saved_most_ns": round(lies.most_ns),
        "saved_uncertainty_ns": unsure_ns,
        "saving": _saving(saved, max(lies.clocks_ns)) if saved else None,
        "confidence": say.confidence,
        "summary": _worded(dataset, summary + ("" if steps_said else when(dataset, costs_ns, hit))),
        "evidence": say.evidence,
        "advice": _worded(dataset, say.advice or code.recommendation),
        "next": say.follow_up,
    }


def _doubted(summary: str, saved: Saved, lies: Interval) -> str:
    """A summary that says, second, that the saving may be nothing, and what would tell."""
    record = "profile more steps" if saved.paced else "profile it by clusterprof, with step logs,"
    why = f"{record} to tell."
    if lies.clocks_ns[0] >= limits.HALF * saved.ns:
        why = "the ranks' clocks are not known well enough."
    first, *rest = words.sentences(summary)
    return " ".join((first, f"It may be nothing: {why}", *rest))


def severity(share: float) -> Severity:
    """Return how severe it is to lose this share of a step."""
    return _LEVELS[(share >= limits.WARNING_FRAC) + (share >= limits.CRITICAL_FRAC)]


def _saving(saved: Saved, clocks_ns: float) -> Saving:
    """Where a saving is from."""
    base, long = saved.base_ns, saved.base_long_ns
    return {
        "window": {"step_ns": round(base), "without_ns": round(base - saved.window_ns)},
        "long_run": {"step_ns": round(long), "without_ns": round(long - saved.long_ns)},
        "stated": "long_run" if saved.long_run else "window",
        "each_ns": [round(ns) for ns in saved.by_step_ns.tolist()],
        "clocks_ns": round(clocks_ns),
        "net_of": [{"code": code, "ranks": list(ranks)} for code, ranks in saved.base.repaired],
    }


def _worded(dataset: Dataset, text: str) -> str:
    """A sentence about GPUs as it is; for a job without any, about what it computes on."""
    if not dataset.on_host:
        return text
    return re.sub(r"\bGPU(s?)\b", r"processor\1", text).replace("its kernels", "its operators")


def named(name: object) -> str:
    """A name from a report (a call, a range, a host), short enough for a sentence."""
    text = words.plain(str(name))
    return text if len(text) <= _NAME_LENGTH else text[: _NAME_LENGTH - 1] + "…"
