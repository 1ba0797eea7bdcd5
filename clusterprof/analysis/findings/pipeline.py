"""Pipelines: bubbles, and stages of unequal work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.agent.contracts.words import ms, percent
from clusterprof.analysis.findings.finding import Code, Evidence, finding, of_step
from clusterprof.analysis.findings.straggler import repaired, stragglers
from clusterprof.analysis.groups.schedule import Schedule, schedule
from clusterprof.analysis.groups.stages import Stages, stages
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import EXPOSED, WAITING, activities_of, by_call
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE
from clusterprof.analysis.model.what_if import WhatIfs, what_ifs
from clusterprof.results import Finding

#: place among the modules of findings (`registry`)
ORDER = 15

CODES = (
    Code(
        "pipeline.bubble",
        "Pipeline stages wait for each other",
        "Ranks of a pipeline wait in receives. Each schedule has an ideal bubble, which the "
        "finding states where it recognises the schedule: that much is information. Saved: what "
        "transfers between stages of no time would, with hosts that launch at once.",
        "The ideal assumes stages of equal work. What more microbatches would save assumes that "
        "smaller ones compute as efficiently.",
        "Use more microbatches per step or an interleaved schedule; beyond the ideal, look at the "
        "stages' hosts and transfers.",
    ),
    Code(
        "pipeline.imbalance",
        "One pipeline stage computes more than the others",
        "The ranks of one stage compute longer than those of the others, which wait for it in "
        "each microbatch. Saved: all stages launch and compute as much as the mean of them.",
        "A layer is the smallest unit that can move, so the full saving may be out of reach. "
        "Stages without a profiled rank are not compared.",
        "Move layers from the slowest stage to the fastest, or give the slowest more ranks.",
    ),
)


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `pipeline.bubble` and `pipeline.imbalance`."""
    job, even, uneven = what_ifs(dataset), evened(dataset), _imbalance(dataset)
    known = _known(dataset)
    if known is None or job is None or even is None:
        return []
    bubble = _bubble(dataset, known, job, even, explained=bool(uneven or stragglers(dataset)))
    return [f for f in (bubble, uneven) if f is not None]


def evened(dataset: Dataset) -> Lengths | None:
    """The lengths without stragglers and with equal stages, where these are a finding.

    What findings on all ranks alike are weighed on.
    """
    job, base, uneven = what_ifs(dataset), repaired(dataset), _imbalance(dataset)
    if job is None or base is None or uneven is None:
        return base
    named = ("pipeline.imbalance", tuple(uneven["ranks"]))
    return replace(_even(job, base), repaired=(*base.repaired, named))


def _known(dataset: Dataset) -> Stages | None:
    known = stages(dataset) if dataset.pipelined else None
    return known if known is not None and len(known.groups) > 1 else None


def _even(job: WhatIfs, base: Lengths) -> Lengths:
    """The lengths where all stages compute and launch as much as the mean of them."""
    replayed, ranks, count = job.job, np.unique(job.job.host_rank), len(job.stage)
    passed = activities_of(job.dataset, replayed, _between_stages(job.dataset))
    shares = (replayed.kind == COMPUTE, (replayed.kind == COLLECTIVE) & ~passed)
    _, of = np.unique(job.stage[ranks], return_inverse=True)

    def of_stages(total: np.ndarray) -> Floats:
        return np.asarray(np.bincount(of, total[ranks]) / np.bincount(of), dtype=float)

    launches = of_stages(np.bincount(replayed.rank[shares[0]], minlength=count))
    hosts = of_stages(np.bincount(replayed.host_rank, base.own, count))
    more = launches - launches.mean()
    # what a launch takes: by how much more the hosts that launch more take
    each = max(float(more @ hosts) / max(float(more @ more), 1.0), 0.0)
    own, run = np.ones(count), base.run.astype(float)
    own[ranks] = 1 - np.minimum(each * more / np.maximum(hosts, 1), 1)[of]
    # a stage's own collectives grow with its layers as its kernels do
    for share in shares:
        took = of_stages(np.bincount(replayed.rank[share], run[share], count))
        times = np.ones(count)
        times[ranks] = (took.mean() / np.maximum(took, 1))[of]
        run[share] *= times[replayed.rank[share]]
    hosts_own = base.own * own[replayed.host_rank]
    return replace(base, own=hosts_own.astype(np.int64), run=run.astype(np.int64))


def _between_stages(dataset: Dataset) -> Bools:
    """Which calls of the placed table hand something from stage to stage."""
    return dataset.collectives.point_to_point & ~dataset.collectives.exchange


def waiting(dataset: Dataset) -> Floats:
    """What each rank waits in Sends and Recvs, exposed, per evidence step (ns).

    Of a call without its other side: what it takes beyond the quickest of its kind.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.point_to_point & c.has)
    spent = by_call(dataset)[rows]
    quick = float(np.quantile((c.end - c.start)[rows], 0.1)) if len(rows) else 0.0
    waits = np.where(c.matched[rows], spent[:, WAITING], np.maximum(spent[:, EXPOSED] - quick, 0))
    place = np.searchsorted(dataset.ranks, c.rank[rows])
    total = np.bincount(place, waits, len(dataset.ranks))
    return np.asarray(total / max(len(dataset.evidence_steps), 1))


def _bubble(
    dataset: Dataset, known: Stages, job: WhatIfs, even: Lengths, *, explained: bool
) -> Finding | None:
    """Waiting in receives: information at its schedule's ideal.

    Beyond that: what free transfers would save where hosts launch at once; what the hosts cost is
    a finding of its own.
    """
    waits = waiting(dataset)
    per_stage = [float(waits[np.searchsorted(dataset.ranks, g)].mean()) for g in known.groups]
    per_step = float(waits.mean())
    if per_step < limits.LEAST_FRAC * dataset.step_ns:
        return None
    plan = schedule(dataset, known)
    sent = activities_of(dataset, job.job, _between_stages(dataset))
    prompt = replace(even, own=np.zeros_like(even.own))
    # without its other side a call's waiting cannot be told from its transfer
    free = replace(prompt, run=np.where(sent & job.job.joined, 0, even.run))
    saved, hosts = job.saved(free, prompt), job.saved(prompt, even)
    evidence: Evidence = [
        {
            "stage": number,
            "ranks": list(group),
            "steps": list(dataset.steady_steps),
            "wait_ns_per_step": round(wait),
            "what": f"stage {number} waits {ms(wait)} per step",
        }
        for number, group, wait in zip(known.numbers, known.groups, per_stage, strict=True)
    ]
    summary = f"Pipeline bubble: each rank waits {of_step(dataset, per_step)} in receives."
    if explained:
        summary += " Other findings explain a part of it."
    more = "more microbatches per step, or an interleaved schedule, shrink the bubble"
    if plan is None:
        evidence.append(
            {"schedule": None, "what": "the order of its messages matches no known schedule"}
        )
        summary += " Its schedule is not recognised."
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
        summary += _ideal(dataset, plan, per_step, hosts.window_ns)
        if plan.chunks > 1:
            more = "more microbatches per step, or more chunks per rank, shrink the bubble"
        if per_step > plan.ideal * dataset.step_ns:
            more += "; beyond the ideal: fewer launches, larger microbatches, quicker transfers"
    return finding(
        dataset,
        "pipeline.bubble",
        ranks=sorted(r for group in known.groups for r in group),
        cost=np.maximum(saved.each, 0.0),
        saved=saved,
        uncertainty_ns=saved.uncertainty_ns,
        confidence=0.85 if plan else 0.6,
        summary=summary,
        evidence=evidence,
        advice=more,
    )


def _ideal(dataset: Dataset, plan: Schedule, waits: float, hosts: float) -> str:
    """The schedule's ideal, what twice the microbatches would save, and what is beyond it."""
    chunks = f" in {plan.chunks} chunks each" if plan.chunks > 1 else ""
    ideal = plan.ideal * dataset.step_ns
    # (p - 1) / (v m) of the work is the bubble: with twice the microbatches it is half of it
    text = (
        f" The ideal of its schedule ({plan.name}, {plan.microbatches} microbatches over "
        f"{plan.stages} stages{chunks}) is {percent(plan.ideal)}; twice as many microbatches, "
        f"each half as large, would save up to {ms(min(waits, ideal) / 2)}."
    )
    if waits > ideal and hosts >= limits.LEAST_FRAC * dataset.step_ns:
        text += f" Beyond the ideal: hosts that launch at once would save {ms(hosts)}."
    return text


def _imbalance(dataset: Dataset) -> Finding | None:
    """A stage that computes more than the others, which wait for it in each microbatch."""
    return dataset.cached("imbalance", lambda: _imbalanced(dataset))


def _imbalanced(dataset: Dataset) -> Finding | None:
    known, job, base = _known(dataset), what_ifs(dataset), repaired(dataset)
    if known is None or job is None or base is None:
        return None
    work = job.job.kind == COMPUTE
    computes = np.bincount(job.job.rank[work], base.run[work], len(job.stage)) / len(job.job.steps)
    usual = np.asarray([computes[np.searchsorted(dataset.ranks, g)].mean() for g in known.groups])
    most, least = int(np.argmax(usual)), int(np.argmin(usual))
    if usual[most] - usual[least] < limits.UNEQUAL_FRAC * usual[most]:
        return None
    saved = job.saved(_even(job, base), base)
    if saved.most_ns < limits.LEAST_FRAC * dataset.step_ns:
        return None
    cost = np.maximum(saved.each, 0.0)
    slow, fast = (f"stage {known.numbers[at]}" for at in (most, least))
    return finding(
        dataset,
        "pipeline.imbalance",
        rank=known.groups[most][0],
        ranks=known.groups[most],
        cost=cost,
        saved=saved,
        uncertainty_ns=saved.uncertainty_ns,
        confidence=0.9,
        summary=f"{slow.capitalize()} computes {ms(float(usual[most]))} per step, {fast} "
        f"{ms(float(usual[least]))}. Equal stages would save up to "
        f"{of_step(dataset, float(cost.mean()))}.",
        evidence=[
            {
                "stage": number,
                "ranks": list(group),
                "steps": list(dataset.steady_steps),
                "compute_ns_per_step": round(float(computes_ns)),
                "what": f"stage {number} computes {ms(float(computes_ns))} per step",
            }
            for number, group, computes_ns in zip(known.numbers, known.groups, usual, strict=True)
        ],
        advice=f"move layers from {slow} to {fast}, or give {slow} more ranks",
    )
