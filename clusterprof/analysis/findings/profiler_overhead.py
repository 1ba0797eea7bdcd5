"""What the profiler itself has caused: told apart from the job's own costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clusterprof.align.clock import UNBOUNDED_NS
from clusterprof.analysis.findings import savings
from clusterprof.analysis.findings.finding import Code, finding, ms, percent
from clusterprof.analysis.model import host_activity, host_gaps, limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.results import CaptureCost, Finding, StepTimes

#: place among the modules of findings (`registry`)
ORDER = 90

CODES = (
    Code(
        "profiler.perturbation",
        "Profiler overhead",
        "What profiling did to the training: stalls at its start and stop, ranks desynchronised "
        "by the start, and steps that take longer inside the window.",
        "It compares the window with the steps around it and assumes that the job does the same "
        "in both.",
        "No action: it ends with the window. If too few steady-state steps are left, use a longer "
        "window (--steps).",
    ),
)

#: the ranks' spread after the start is worth a word from this many usual steps on
_LEAST_STEPS = 0.5
#: a host that is away this part of its cost at one stretch is late by its own doing
_AWAY_FRAC = 0.5
#: a stall shorter than this is no stall
_STALL_NS = 1_000_000

_NOTHING = (
    "nothing to do: this is not the job's own doing, and ends with the window; a longer window "
    "makes the settled part larger"
)
_LENGTHEN = "too few settled steps are left: lengthen the window by {} steps or more (--steps)"

Parts = tuple[list[str], list[dict[str, Any]]]


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `profiler.perturbation`: what the capture did to the training, as far as measured.

    Once: standing still at its start and stop (by the step logs of a run, `dataset.capture`), and
    how far the start tore the ranks apart (the spread of the aligned begins of the first step
    that all ranks have). In each step of the window: what it took longer than before. The settled
    steps leave the torn ones out, so its cost to them is 0; a host that the capture slows has
    had that taken off (`savings`). Information, unless it leaves no evidence at all.
    """
    if not dataset.ranks:
        return []
    told, evidence = [], []
    for part in (_stalls, _longer_steps, _torn, _slowed):
        said, shown = part(dataset)
        told += said
        evidence += shown
    void = len(dataset.steady_steps) < LEAST_STEADY
    if not told:
        return []
    return [
        finding(
            dataset,
            "profiler.perturbation",
            rank=None,
            ranks=dataset.ranks,
            cost=np.zeros(len(dataset.steady_steps)),
            confidence=0.9,
            at_most="info",
            at_least="warning" if void else "info",
            summary="the capture itself: " + "; ".join(told),
            evidence=evidence,
            advice=_LENGTHEN.format(missing(dataset)) if void else _NOTHING,
        )
    ]


def missing(dataset: Dataset) -> int:
    """By how many steps a window must be longer to hold enough settled ones."""
    return max(LEAST_STEADY + 1 - len(dataset.steady_steps), 1)


def _stalls(dataset: Dataset) -> Parts:
    cost = dataset.capture
    if cost is None:
        return [], []
    at = {"start": cost["stall_start_ns"], "stop": cost["stall_stop_ns"] or 0}
    long = {when: ns for when, ns in at.items() if ns >= _STALL_NS}
    if not long:
        return [], []
    told = " and ".join(f"{ms(ns)} at its {when}" for when, ns in long.items())
    shown = {f"stall_{when}_ns": ns for when, ns in long.items()}
    what = "the longest standstill of a captured rank, once; all others wait for it"
    return [f"a captured rank stood still {told}, once"], [{**shown, "what": what}]


def _longer_steps(dataset: Dataset) -> Parts:
    """Steps inside the window beside those before and after, captured ranks and others apart."""
    if dataset.capture is None:
        return _longer_than_usual(dataset)
    told, shown = [], []
    for whose, times in _groups(dataset.capture):
        outside = [t for t in (times["before_ns"], times["after_ns"]) if t is not None]
        inside = times["inside_ns"]
        if inside is None or not outside:
            continue
        usual = min(outside)
        more = inside - usual
        shown.append(
            {
                "whose": whose,
                **{name: ns for name, ns in times.items() if ns is not None},
                "more_ns_per_step": more,
                "what": f"steps of {whose}: {ms(inside)} inside the window, {ms(usual)} outside",
            }
        )
        if more >= limits.LEAST_FRAC * usual:
            told.append(_more(whose, more, usual))
    return told, shown


def _groups(cost: CaptureCost) -> list[tuple[str, StepTimes]]:
    groups = [("captured ranks", cost["profiled"])]
    if cost["unprofiled"] is not None:
        groups.append(("the other ranks", cost["unprofiled"]))
    return groups


def _longer_than_usual(dataset: Dataset) -> Parts:
    """The same where only the steps before the window are known.

    Medians inside, and before it the larger of median and mean: pauses now and then are the job's.
    """
    usual = dataset.usual_step_ns
    inside = float(np.median(dataset.durations)) if len(dataset.durations) else 0.0
    more = inside - usual if usual else 0.0
    if not usual or more < limits.WARNING_FRAC * usual:
        return [], []
    shown = {"before_ns": usual, "inside_ns": round(inside), "more_ns_per_step": round(more)}
    what = f"steps take {ms(inside)} inside the window, {ms(usual)} before it"
    return [_more("captured ranks", more, usual)], [{**shown, "what": what}]


def _more(whose: str, more: float, usual: float) -> str:
    return f"each step of {whose} takes {ms(more)} ({percent(more / usual)}) longer inside it"


def _torn(dataset: Dataset) -> Parts:
    """How far the start tore the ranks apart, and the steps that show start or stop."""
    lines = [line for line in dataset.timelines if line.has_steps]
    known = [line for line in lines if dataset.clock.uncertainty(line.rank) < UNBOUNDED_NS]
    if len(known) < 2:
        return [], []
    step = max(int(line.step[0]) for line in known)
    begins = []
    for line in known:
        at = int(np.searchsorted(line.step, step))
        if at < len(line.step):
            own = line.host_begin[at : at + 1]
            begins.append((int(dataset.clock.align(line.rank, own)[0]), line.rank))
    if len(begins) < 2:
        return [], []
    (first, early), (last, late) = min(begins), max(begins)
    if last - first < _LEAST_STEPS * dataset.step_ns:
        return [], []
    out = [str(s) for s in dataset.steps if s not in dataset.steady_steps]
    left = f"step{'s' if len(out) > 1 else ''} {', '.join(out)}" if out else "no step"
    verb = "are" if len(out) > 1 else "is"
    told = (
        f"starting it tore the ranks {ms(last - first)} apart; {left} {verb} left out of the "
        "evidence"
    )
    shown = {
        "step": step,
        "rank": late,
        "time_ns": last,
        "spread_ns": last - first,
        "what": f"rank {early} begins step {step} first, rank {late} last",
    }
    return [told], [shown]


def _slowed(dataset: Dataset) -> Parts:
    """Hosts that need longer inside the window than whole steps took before it."""
    slow = (
        savings.slowed(dataset, host_activity.pace(dataset))
        if dataset.steady_steps
        else np.zeros(0)
    )
    ranks = [k for k in np.argsort(-slow).tolist() if slow[k] > 0]
    if not ranks:
        return [], []
    worst = ranks[0]
    who = f"rank {dataset.ranks[worst]}'s host" + (" most" if len(ranks) > 1 else "")
    told = f"it slows {who}, by {ms(float(slow[worst]))} a step, which no rank is blamed for"
    shown = [
        {
            "rank": dataset.ranks[k],
            "slower_ns_per_step": round(float(slow[k])),
            "what": f"its host needs {ms(float(slow[k]))} a step more than whole steps took before",
        }
        for k in ranks[:16]
    ]
    return [told], shown


def discounted(dataset: Dataset, found: Sequence[Finding]) -> list[Finding]:
    """Return the findings; late hosts that the capture itself explains are information, and last.

    Tracing takes time of the hosts, of one more than of another. By the step logs, which go on
    outside the window, the settled steps are so much longer than the others: a host whose
    lateness costs no more than that may be in time without a capture; but tracing never keeps a
    host away at a stretch (`away`): one that is late by that is blamed. Medians are compared, so
    that a step that is slow now and then, inside or outside, explains nothing; nor does anything
    here where a run has no step logs outside its window. Assumes that the job does the same
    inside the window and around it.
    """
    slower = _slower(dataset)
    may_be = [_may_be(dataset, f, slower) for f in found]
    explained = [_explained(f, slower) for f, may in zip(found, may_be, strict=True) if may]
    return [*(f for f, may in zip(found, may_be, strict=True) if not may), *explained]


def _slower(dataset: Dataset) -> float:
    """How much longer the median settled step is than one outside the window (ns), 0 if not."""
    cost = dataset.capture
    if cost is None or not len(dataset.durations):
        return 0.0
    times = [cost["profiled"]["before_ns"], cost["profiled"]["after_ns"]]
    known = [ns for ns in times if ns is not None]
    return max(0.0, float(np.median(dataset.durations)) - max(known)) if known else 0.0


def _may_be(dataset: Dataset, found: Finding, slower: float) -> bool:
    cost, rank = found["cost_ns_per_step"], found["rank"]
    if found["code"] != "straggler.host" or found["severity"] == "info" or rank is None:
        return False
    return 0 < cost <= slower and host_gaps.excess(dataset, rank) < _AWAY_FRAC * cost


def _explained(found: Finding, slower: float) -> Finding:
    """The finding as information, with the reason."""
    what = (
        f"outside the window steps are {ms(slower)} shorter: the capture itself may be what makes "
        f"this host late"
    )
    return {
        **found,
        "severity": "info",
        "confidence": round(0.5 * found["confidence"], 2),
        "summary": f"{found['summary']}; but {what}",
        "evidence": [*found["evidence"], {"slower_ns": round(slower), "what": what}],
        "advice": "nothing yet: capture again with fewer ranks or less tracing "
        "(--trace cuda) and see whether it is late again",
    }
