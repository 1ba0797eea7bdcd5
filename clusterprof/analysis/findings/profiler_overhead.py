"""Profiler overhead: what the profiler itself caused, kept apart from the job's own costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from clusterprof.agent.contracts.words import counted, duration, ms, percent
from clusterprof.align.clock import UNBOUNDED_NS
from clusterprof.analysis.findings.finding import Code, Evidence, finding
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.what_if import what_ifs
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

#: the ranks' spread after the start is reported from this many usual steps on
_LEAST_STEPS = 0.5
#: a stall shorter than this is not reported
_STALL_NS = 1_000_000

_NO_ACTION = (
    "no action: the job does not cause this, and it ends with the window; a longer window has a "
    "larger steady-state part"
)
_LENGTHEN = "too few steady-state steps are left: lengthen the window by {} steps or more (--steps)"

#: sentences, and the evidence for them
Parts = tuple[list[str], Evidence]


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `profiler.perturbation`: what the profiler did to the training, as far as measured.

    Once: stalls at its start and stop (by the step logs of a run, `dataset.capture`), and how far
    the start desynchronised the ranks (the spread of the aligned begins of the first step that all
    ranks have). In each step of the window: what it took longer than before. The steady-state
    steps exclude the desynchronised ones, so its cost to them is 0; what tracing adds to hosts is
    left out of all savings (`WhatIfs`). Information, unless too few steps are left.
    """
    if not dataset.ranks:
        return []
    parts = [part(dataset) for part in (_stalls, _longer_steps, _desynchronised, _slower_hosts)]
    texts = [text for some, _ in parts for text in some]
    too_few = len(dataset.steady_steps) < LEAST_STEADY
    if not texts:
        return []
    return [
        finding(
            dataset,
            "profiler.perturbation",
            ranks=dataset.ranks,
            cost=np.zeros(len(dataset.steady_steps)),
            confidence=0.9,
            at_most="info",
            at_least="warning" if too_few else "info",
            summary="Profiler overhead: " + "; ".join(texts) + ".",
            evidence=[row for _, rows in parts for row in rows],
            advice=_LENGTHEN.format(missing(dataset)) if too_few else _NO_ACTION,
        )
    ]


def missing(dataset: Dataset) -> int:
    """By how many steps a window must be longer to hold enough steady-state ones."""
    return max(LEAST_STEADY + 1 - len(dataset.steady_steps), 1)


def _stalls(dataset: Dataset) -> Parts:
    cost = dataset.capture
    if cost is None:
        return [], []
    at = {"start": cost["stall_start_ns"], "stop": cost["stall_stop_ns"] or 0}
    long = {when: ns for when, ns in at.items() if ns >= _STALL_NS}
    if not long:
        return [], []
    text = " and ".join(f"{ns / 1e6:.0f} ms at its {when}" for when, ns in long.items())
    what = "the longest stall of a profiled rank, once; all other ranks wait for it"
    row = {**{f"stall_{when}_ns": ns for when, ns in long.items()}, "what": what}
    return [f"a profiled rank stalled once for {text}"], [row]


def _longer_steps(dataset: Dataset) -> Parts:
    """Steps inside the window and around it, of profiled ranks and of others."""
    if dataset.capture is None:
        return _longer_than_usual(dataset)
    texts, rows = [], []
    for whose, times in _groups(dataset.capture):
        around = [t for t in (times["before_ns"], times["after_ns"]) if t is not None]
        inside = times["inside_ns"]
        if inside is None or not around:
            continue
        usual = min(around)
        rows.append(
            {
                "whose": whose,
                **{name: ns for name, ns in times.items() if ns is not None},
                "more_ns_per_step": inside - usual,
                "what": f"steps of {whose}: {ms(inside)} inside the window, {ms(usual)} outside",
            }
        )
        if inside - usual >= limits.LEAST_FRAC * usual:
            texts.append(_longer(whose, inside - usual, usual))
    return texts, rows


def _groups(cost: CaptureCost) -> Iterator[tuple[str, StepTimes]]:
    yield "profiled ranks", cost["profiled"]
    if cost["unprofiled"] is not None:
        yield "unprofiled ranks", cost["unprofiled"]


def _longer_than_usual(dataset: Dataset) -> Parts:
    """The same where only the steps before the window are known.

    The median inside, and before it the larger of median and mean: pauses in some steps are the
    job's.
    """
    usual = dataset.usual_step_ns
    inside = float(np.median(dataset.durations)) if len(dataset.durations) else 0.0
    more = inside - usual if usual else 0.0
    if not usual or more < limits.WARNING_FRAC * usual:
        return [], []
    row = {
        "before_ns": usual,
        "inside_ns": round(inside),
        "more_ns_per_step": round(more),
        "what": f"steps take {ms(inside)} inside the window, {ms(usual)} before it",
    }
    return [_longer("profiled ranks", more, usual)], [row]


def _longer(whose: str, more: float, usual: float) -> str:
    return f"each step of {whose} takes {ms(more)} ({percent(more / usual)}) longer in the window"


def _desynchronised(dataset: Dataset) -> Parts:
    """How far the start desynchronised the ranks, and the steps that show start or stop."""
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
    out = len(dataset.steps) - len(dataset.steady_steps)
    text = (
        f"its start desynchronised the ranks by {ms(last - first)}; {counted(out, 'step')} of "
        f"{len(dataset.steps)} excluded from findings"
    )
    row = {
        "step": step,
        "rank": late,
        "time_ns": last,
        "spread_ns": last - first,
        "excluded_steps": [s for s in dataset.steps if s not in dataset.steady_steps],
        "what": f"rank {early} begins step {step} first, rank {late} last",
    }
    return [text], [row]


def _slower_hosts(dataset: Dataset) -> Parts:
    """What tracing adds to the hosts, by which the usual step explains the window's."""
    job = what_ifs(dataset)
    if job is None or not job.overhead_ns:
        return [], []
    more = np.zeros(len(dataset.ranks))
    np.add.at(more, job.job.host_rank, (job.job.lengths.own - job.untraced).astype(float))
    more /= len(job.job.steps)
    text = f"tracing adds about {duration(job.overhead_ns)} to each launch, left out of savings"
    rows = [
        {
            "rank": rank,
            "slower_ns_per_step": round(float(more[k])),
            "what": f"tracing takes its host {ms(float(more[k]))} per step",
        }
        for k, rank in enumerate(dataset.ranks[:16])
    ]
    return [text], rows
