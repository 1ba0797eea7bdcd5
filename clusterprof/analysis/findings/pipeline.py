"""Pipelines: bubbles, and stages of unequal work."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from clusterprof.analysis.findings.finding import Code, finding, ms, percent, straggler_ns
from clusterprof.analysis.groups.schedule import Schedule, schedule
from clusterprof.analysis.groups.stages import Stages, stages
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, Floats, Ints
from clusterprof.analysis.model.intervals import union
from clusterprof.results import Finding

#: place among the modules of findings (`registry`)
ORDER = 30

CODES = (
    Code(
        "pipeline.bubble",
        "Pipeline stages wait for each other",
        "Ranks of a pipeline wait in receives. Each schedule has an ideal bubble, which the "
        "finding states where it recognises the schedule.",
        "The ideal assumes stages of equal work and free transfers: a bubble near it is the price "
        "of the schedule and no fault.",
        "Use more microbatches per step or an interleaved schedule; beyond the ideal, look at the "
        "stages' hosts and transfers.",
    ),
    Code(
        "pipeline.imbalance",
        "One pipeline stage computes more than the others",
        "The ranks of one stage compute longer than those of the others, which wait for it in "
        "each microbatch. The cost is its time beyond the stages' mean.",
        "A layer is the smallest unit that can move, so the full saving may be out of reach. "
        "Stages without a profiled rank are not compared.",
        "Move layers from the slowest stage to the fastest, or give the slowest more ranks.",
    ),
)

#: waiting so many times the ideal is more than a schedule's bubble
_BEYOND = 1.3


def waiting(dataset: Dataset) -> Floats:
    """Exposed time inside Sends and Recvs beyond the quickest of its size, [ranks, steps] (ns).

    A Recv that has been posted early waits inside its kernel: that is the bubble. A GPU that
    idles because its host has not posted anything is not counted here.
    """
    c = dataset.collectives
    out = np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    rows = np.flatnonzero(c.point_to_point & c.has)
    if not len(rows):
        return out
    quick = float(np.quantile((c.end - c.start)[rows], 0.1))
    for rank, mine in c.each_rank(rows):
        k, line = dataset.place[rank], dataset.line(rank)
        until = np.maximum(c.end[mine] - int(quick), c.start[mine])
        covered = union(
            np.r_[line.compute.start, c.start[mine]].astype(np.int64),
            np.r_[line.compute.end, until].astype(np.int64),
        )
        each = covered.within(line.begin, line.end) - line.compute.within(line.begin, line.end)
        known = np.isin(line.step, dataset.steady_steps)
        out[k, np.searchsorted(dataset.steady_steps, line.step[known])] = each[known]
    return out


def find(dataset: Dataset, found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `pipeline.bubble` and `pipeline.imbalance`.

    Waiting for a straggler, in whatever receive, is no bubble.
    """
    if not dataset.pipelined or not dataset.steady_steps:
        return []
    seen = stages(dataset)
    if seen is None or len(seen.groups) < 2:
        return []
    uneven = _imbalance(dataset, seen)
    # what waits only for a stage with more work is that one's matter
    already = float(uneven["cost_ns_per_step"]) if uneven else 0.0
    both = [_bubble(dataset, seen, already + straggler_ns(found)), uneven]
    return [f for f in both if f is not None]


def _bubble(dataset: Dataset, seen: Stages, already: float) -> Finding | None:
    waits = waiting(dataset)
    rows = [k for group in seen.groups for k in _places(dataset, group)]
    cost = np.maximum(waits[rows].mean(axis=0) - already, 0.0)
    per_step = float(cost.mean())
    share = per_step / dataset.step_ns
    if share < limits.LEAST_FRAC:
        return None
    plan = schedule(dataset, seen)
    per_stage = [float(waits[_places(dataset, group)].mean()) for group in seen.groups]
    evidence = [
        {
            "stage": number,
            "ranks": list(group),
            "steps": list(dataset.steady_steps),
            "wait_ns_per_step": round(wait),
            "what": f"stage {number} waits {ms(wait)} a step",
        }
        for number, group, wait in zip(seen.numbers, seen.groups, per_stage, strict=True)
    ]
    if plan is None:
        evidence.append({"schedule": None, "what": "the order of its messages is no known one"})
    else:
        evidence.append(
            {
                "schedule": plan.name,
                "stages": plan.stages,
                "microbatches": plan.microbatches,
                "chunks": plan.chunks,
                "ideal_share": round(plan.ideal, 4),
                "what": f"the order of its messages is that of {plan.name}",
            }
        )
    return finding(
        dataset,
        "pipeline.bubble",
        rank=None,
        ranks=sorted(r for group in seen.groups for r in group),
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.85,
        summary=f"pipeline bubble: each rank waits {ms(per_step)} of each step ({percent(share)}) "
        "in receives" + (", beyond what is named already" if already else "") + f"; {_said(plan)}",
        evidence=evidence,
        advice=_advice(plan, share),
    )


def _said(plan: Schedule | None) -> str:
    if plan is None:
        return "its schedule is not recognised"
    chunks = f" in {plan.chunks} chunks each" if plan.chunks > 1 else ""
    return (
        f"the ideal of its schedule ({plan.name}, {plan.microbatches} microbatches over "
        f"{plan.stages} stages{chunks}) is {percent(plan.ideal)}"
    )


def _advice(plan: Schedule | None, share: float) -> str:
    more = "more microbatches per step, or an interleaved schedule, shrink the bubble"
    if plan is None:
        return more
    if plan.chunks > 1:
        more = "more microbatches per step, or more chunks per rank, shrink the bubble"
    if share < _BEYOND * plan.ideal:
        return more
    return (
        more + "; beyond the ideal, stages wait for each other's hosts or transfers: larger "
        "microbatches, fewer launches"
    )


def _places(dataset: Dataset, group: Sequence[int]) -> Ints:
    """Where the ranks of a stage stand among all ranks."""
    return np.searchsorted(dataset.ranks, group)


def _imbalance(dataset: Dataset, seen: Stages) -> Finding | None:
    """A stage with more to compute than the others: all wait for it, each microbatch anew.

    A stage's work is what all of its ranks have: more on one of them is that rank's matter.
    Saved by even stages: the part of its own time (computing, and idle until its host has
    launched, which takes longer with more layers too) that it has beyond the stages' mean.
    """
    rows = [_places(dataset, group) for group in seen.groups]
    compute, idle = dataset.account("compute_ns"), dataset.account("idle_ns")
    with warnings.catch_warnings():
        # a stage may lack a step on all of its ranks
        warnings.simplefilter("ignore", RuntimeWarning)
        per_stage = np.stack([np.nanmin(compute[at], axis=0) for at in rows])
        own = np.stack([np.nanmin((compute + idle)[at], axis=0) for at in rows])
        usual = np.nanmean(per_stage, axis=1)
    if np.isnan(usual).any():
        return None
    most, least = int(np.argmax(usual)), int(np.argmin(usual))
    if usual[most] - usual[least] < limits.UNEQUAL_FRAC * usual[most]:
        return None
    surplus = 1 - float(usual.mean()) / float(usual[most])
    cost = np.minimum(np.nan_to_num(own[most]) * surplus, dataset.durations)
    per_step = float(cost.mean())
    if per_step < limits.LEAST_FRAC * dataset.step_ns:
        return None
    heavy, light = seen.groups[most], f"stage {seen.numbers[least]}"
    named = f"rank{'s' if len(heavy) > 1 else ''} {', '.join(map(str, heavy[:8]))}"
    relieved = f"stage {seen.numbers[most]}"
    return finding(
        dataset,
        "pipeline.imbalance",
        rank=heavy[0],
        ranks=heavy,
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.9,
        summary=f"pipeline {relieved} ({named}) computes {ms(float(usual[most]))} a step, {light} "
        f"{ms(float(usual[least]))}: relieve {relieved}; even stages would save up to "
        f"{ms(per_step)} of each step ({percent(per_step / dataset.step_ns)})",
        evidence=[
            {
                "stage": number,
                "ranks": list(group),
                "steps": list(dataset.steady_steps),
                "compute_ns_per_step": round(float(usual[k])),
                "idle_ns_per_step": round(float(np.nanmean(own[k])) - float(usual[k])),
                "what": f"stage {number} computes {ms(float(usual[k]))} a step",
            }
            for k, (number, group) in enumerate(zip(seen.numbers, seen.groups, strict=True))
        ],
        advice=f"move layers from {relieved} to {light}, or give {relieved} more ranks",
    )
