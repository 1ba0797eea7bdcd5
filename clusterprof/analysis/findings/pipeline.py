"""Pipelines: bubbles, and stages of unequal work."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from clusterprof.agent.contracts.words import ms, percent
from clusterprof.analysis.findings.finding import (
    Code,
    exposed_by_step,
    finding,
    of_step,
    straggler_ns,
)
from clusterprof.analysis.groups.schedule import Schedule, schedule
from clusterprof.analysis.groups.stages import Stages, stages
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, Floats, Ints
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

#: waiting this many times the ideal is more than a schedule's bubble
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
        line = dataset.line(rank)
        until = np.maximum(c.end[mine] - int(quick), c.start[mine])
        out[dataset.place[rank]] = exposed_by_step(
            dataset, line, line.compute, c.start[mine], until
        )
    return out


def find(dataset: Dataset, found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `pipeline.bubble` and `pipeline.imbalance`.

    Waiting for a straggler, in whatever receive, is no bubble.
    """
    if not dataset.pipelined or not dataset.steady_steps:
        return []
    known = stages(dataset)
    if known is None or len(known.groups) < 2:
        return []
    uneven = _imbalance(dataset, known)
    # waiting for a stage with more work is the imbalance's cost
    already = float(uneven["cost_ns_per_step"]) if uneven else 0.0
    both = [_bubble(dataset, known, already + straggler_ns(found)), uneven]
    return [f for f in both if f is not None]


def _bubble(dataset: Dataset, known: Stages, already: float) -> Finding | None:
    waits = waiting(dataset)
    rows = [k for group in known.groups for k in _places(dataset, group)]
    cost = np.maximum(waits[rows].mean(axis=0) - already, 0.0)
    per_step = float(cost.mean())
    share = per_step / dataset.step_ns
    if share < limits.LEAST_FRAC:
        return None
    plan = schedule(dataset, known)
    per_stage = [float(waits[_places(dataset, group)].mean()) for group in known.groups]
    evidence = [
        {
            "stage": number,
            "ranks": list(group),
            "steps": list(dataset.steady_steps),
            "wait_ns_per_step": round(wait),
            "what": f"stage {number} waits {ms(wait)} per step",
        }
        for number, group, wait in zip(known.numbers, known.groups, per_stage, strict=True)
    ]
    if plan is None:
        evidence.append(
            {"schedule": None, "what": "the order of its messages matches no known schedule"}
        )
    else:
        evidence.append(
            {
                "schedule": plan.name,
                "stages": plan.stages,
                "microbatches": plan.microbatches,
                "chunks": plan.chunks,
                "ideal_share": round(plan.ideal, 4),
                "what": f"the order of its messages matches {plan.name}",
            }
        )
    return finding(
        dataset,
        "pipeline.bubble",
        ranks=sorted(r for group in known.groups for r in group),
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.85,
        summary=f"Pipeline bubble: each rank waits {of_step(dataset, per_step)} in receives. "
        f"{_ideal(plan)}"
        + (" Waiting that other findings explain is not included." if already else ""),
        evidence=evidence,
        advice=_advice(plan, share),
    )


def _ideal(plan: Schedule | None) -> str:
    if plan is None:
        return "Its schedule is not recognised."
    chunks = f" in {plan.chunks} chunks each" if plan.chunks > 1 else ""
    return (
        f"The ideal of its schedule ({plan.name}, {plan.microbatches} microbatches over "
        f"{plan.stages} stages{chunks}) is {percent(plan.ideal)}."
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
        more + "; beyond the ideal, stages wait for each other's hosts or transfers: use larger "
        "microbatches and fewer launches"
    )


def _places(dataset: Dataset, group: Sequence[int]) -> Ints:
    """The places of a stage's ranks among all ranks."""
    return np.searchsorted(dataset.ranks, group)


def _imbalance(dataset: Dataset, known: Stages) -> Finding | None:
    """A stage that computes more than the others, which wait for it in each microbatch.

    A stage's work is what all of its ranks have; more on one of them is that rank's own.
    Saved by equal stages: the part of its own time (computing, and idle until its host has
    launched, which takes longer with more layers too) beyond the stages' mean.
    """
    rows = [_places(dataset, group) for group in known.groups]
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
    heavy = known.groups[most]
    slow, fast = (f"stage {known.numbers[at]}" for at in (most, least))
    return finding(
        dataset,
        "pipeline.imbalance",
        rank=heavy[0],
        ranks=heavy,
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.9,
        summary=f"{slow.capitalize()} computes {ms(float(usual[most]))} per step, {fast} "
        f"{ms(float(usual[least]))}. Equal stages would save up to {of_step(dataset, per_step)}.",
        evidence=[
            {
                "stage": number,
                "ranks": list(group),
                "steps": list(dataset.steady_steps),
                "compute_ns_per_step": round(float(usual[k])),
                "idle_ns_per_step": round(float(np.nanmean(own[k])) - float(usual[k])),
                "what": f"stage {number} computes {ms(float(usual[k]))} per step",
            }
            for k, (number, group) in enumerate(zip(known.numbers, known.groups, strict=True))
        ],
        advice=f"move layers from {slow} to {fast}, or give {slow} more ranks",
    )
