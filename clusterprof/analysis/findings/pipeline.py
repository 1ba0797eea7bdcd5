"""Pipelines: stages of unequal work, and bubbles, beside the ideal of the schedule that they run.

Which schedule it is follows from the order of each stage's Sends and Recvs. GPipe (Huang et al.
2019) sends all forwards before the first gradient comes back; 1F1B (Narayanan et al. 2019) has
stage s of p send p - s of them before; the interleaved schedule (Narayanan et al. 2021,
Megatron-LM) gives each rank v chunks, so that the last stage sends to the first one too. With m
microbatches the ideal bubble is (p - 1) / (m + p - 1) of the step for the first two and
(p - 1) / (v m + p - 1) for the third. Assumes one message for each microbatch and direction.
Schedules that split the backward (zero bubble) send in the order of 1F1B and are taken for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from clusterprof.analysis.findings.causes import by_name
from clusterprof.analysis.findings.finding import (
    Code,
    Evidence,
    Repair,
    Tier,
    Words,
    finding,
    job_of,
    of_step,
    of_window,
)
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import EXPOSED, WAITING, by_call, call_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.profiler_bias import MOST_SLOWER
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE
from clusterprof.analysis.model.topology import Stages, stages, traffic
from clusterprof.analysis.model.what_if import Saved, WhatIfs
from clusterprof.columns import (
    Floats,
    Ints,
    Stretches,
    begins,
    count_by,
    first_of,
    order_by,
    parts,
    row_of,
    running_sum,
    sum_by,
)
from clusterprof.results import Finding
from clusterprof.words import ms, percent

TIER = Tier.STAGES

CODES = (
    Code(
        "pipeline.bubble",
        "Pipeline stages wait for each other",
        "Ranks of a pipeline wait in receives. Each schedule has an ideal bubble, which the "
        "finding states where it recognises the schedule. It is information: what lies beyond the "
        "ideal is due to hosts, stages and transfers, which have findings of their own.",
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


def repairs(dataset: Dataset, lengths: Lengths, *_: object) -> list[Repair]:
    """Propose `pipeline.imbalance`: a stage that computes more than the others, if one does."""
    pipeline = stages(dataset)
    if pipeline is None or len(pipeline.groups) < 2:
        return []
    job = job_of(dataset)
    work = job.job.kind == COMPUTE
    computes = sum_by(job.job.rank, lengths.run * work, len(job.stage)) / len(job.job.steps)
    usual, rows = _by_stage(dataset, pipeline, "compute_ns_per_step", computes)
    most, least = int(np.argmax(usual)), int(np.argmin(usual))
    if usual[most] - float(np.mean(usual)) < limits.LEAST_FRAC * dataset.step_ns:
        return []
    slow, fast = (f"stage {pipeline.numbers[stage]}" for stage in (most, least))

    def words(saved: Saved) -> Words:
        return Words(
            rank=pipeline.groups[most][0],
            summary=f"{slow.capitalize()} computes {ms(usual[most])} per step, {fast} "
            f"{ms(usual[least])}. Equal stages would save up to {of_step(dataset, saved)}.",
            evidence=rows,
            advice=f"Move layers from {slow} to {fast}, or give {slow} more ranks.",
        )

    return [Repair(CODES[1], tuple(pipeline.groups[most]), partial(_even, job), words)]


def _even(job: WhatIfs, base: Lengths) -> Lengths:
    """The lengths where all stages compute and launch as much as the mean of them."""
    replayed, stage = job.job, np.zeros_like(job.stage)
    stage[replayed.ranks] = np.unique(job.stage[replayed.ranks], return_inverse=True)[1]
    count = count_by(stage[replayed.ranks])
    host_stage, stages_of = stage[replayed.host_rank], stage[replayed.rank]
    compute = replayed.kind == COMPUTE
    launches = count_by(stages_of[compute], len(count)) / count
    hosts = sum_by(host_stage, base.own) / count
    more = launches - launches.mean()
    # what a launch takes: by how much more the hosts that launch more take
    launch_ns = max(float(more @ hosts) / max(float(more @ more), 1.0), 0.0)
    own = base.own * (1 - np.minimum(launch_ns * more / np.maximum(hosts, 1), 1))[host_stage]
    # a stage's own collectives grow with its layers as its kernels do
    call, passed = call_of(job.dataset)[replayed.activity], job.dataset.collectives.between_stages
    inside = (replayed.kind == COLLECTIVE) & ~((call >= 0) & passed[call])
    run, alike = base.run.astype(float), np.ones(len(count))
    for rows, slower in ((compute, _slower(job, base, stage)), (inside, alike)):
        took = sum_by(stages_of[rows], run[rows], len(count)) / count
        equal = (took / slower).sum() / (1 / slower).sum()
        run[rows] *= (equal / np.maximum(took, 1))[stages_of[rows]]
    return replace(base, own=own.astype(np.int64), run=run.astype(np.int64))


def _slower(job: WhatIfs, base: Lengths, stage: Ints) -> Floats:
    """How many times as long each stage takes for the same kernels as all do, [stages].

    A layer that moves takes what layers take there: a GPU that waits more clocks higher. By at most
    as much as clocks differ. `stage` is that of each profiled rank.
    """
    _, *values = by_name(job, np.flatnonzero(job.job.kind == COMPUTE), base.run)
    members = np.arange(stage.max() + 1)[:, None] == stage
    took, calls = (members.astype(float) @ by_step.sum(axis=2) for by_step in values)
    mean = took / np.maximum(calls, 1)
    everywhere = (mean > 0).all(axis=0)
    if not everywhere.any():
        return np.ones(len(mean))
    relative = mean[:, everywhere] / mean[:, everywhere].mean(axis=0)
    slower = np.average(relative, axis=1, weights=took[:, everywhere].min(axis=0))
    return np.clip(slower, 1 / MOST_SLOWER, MOST_SLOWER)


def find(dataset: Dataset, earlier: Sequence[Finding] = ()) -> list[Finding]:
    """Return `pipeline.bubble`: waiting in receives, and the ideal of its schedule."""
    pipeline, step_ns = stages(dataset), dataset.step_ns
    if pipeline is None or len(pipeline.groups) < 2:
        return []
    waits = _waiting(dataset)
    per_step = float(waits.mean())
    if per_step < limits.LEAST_FRAC * step_ns:
        return []
    _, evidence = _by_stage(dataset, pipeline, "wait_ns_per_step", waits)
    text = f"Pipeline bubble: each rank waits {of_window(dataset, per_step)} in receives."
    if any(f["saved_ns_per_step"] > 0 for f in earlier):
        text += " Other findings explain a part of it."
    plan = schedule(dataset, pipeline)
    if plan is None:
        text += " Its schedule is not recognised."
        evidence.append({"schedule": None})
    else:
        evidence.append({**plan._asdict(), "ideal_share": round(plan.ideal, 4)})
        ideal, chunks = plan.ideal * step_ns, f" in {plan.chunks} chunks each"
        # (p - 1) / (v m) of the work is the bubble: with twice the microbatches it is half of it
        text += (
            f" The ideal of its schedule ({plan.schedule}, {plan.microbatches} microbatches over "
            f"{plan.stages} stages{chunks if plan.chunks > 1 else ''}) is {percent(plan.ideal)}; "
            "twice as many microbatches, each half as large, would save up to "
            f"{ms(min(per_step, ideal) / 2)}."
        )
    ranks, confidence = sorted(pipeline.ranks.tolist()), limits.MEASURED if plan else limits.ASSUMED
    return [finding(dataset, CODES[0], ranks, Words(text, evidence, confidence))]


def _waiting(dataset: Dataset) -> Floats:
    """What each rank waits in Sends and Recvs, exposed, per evidence step (ns).

    Of a call without its other side: what it takes beyond the quickest of all.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.point_to_point & c.has)
    spent = by_call(dataset)[rows]
    quick = (c.end - c.start)[rows].min(initial=np.iinfo(np.int64).max)
    waits = np.where(c.matched[rows], spent[:, WAITING], np.maximum(spent[:, EXPOSED] - quick, 0))
    total = sum_by(row_of(dataset.ranks, c.rank[rows]), waits, len(dataset.ranks))
    return np.asarray(total / max(len(dataset.evidence_steps), 1))


def _by_stage(
    dataset: Dataset, pipeline: Stages, name: str, values_ns: Floats
) -> tuple[list[float], Evidence]:
    """The mean of `values_ns` [ranks] over the ranks of each stage, and as rows of evidence."""
    places = [[dataset.place[rank] for rank in group] for group in pipeline.groups]
    means = [float(values_ns[group].mean()) for group in places]
    return means, [
        {"stage": number, "ranks": list(ranks), name: round(ns)}
        for number, ranks, ns in zip(pipeline.numbers, pipeline.groups, means, strict=True)
    ]


# --- the schedule


class Schedule(NamedTuple):
    """A recognised schedule; `ideal` is the share of the step that its bubble takes at best."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int = 1

    @property
    def ideal(self) -> float:
        """(p - 1) / (v m + p - 1)."""
        idle = self.stages - 1
        return idle / (self.chunks * self.microbatches + idle)


def schedule(dataset: Dataset, pipeline: Stages) -> Schedule | None:
    """The schedule that all profiled ranks agree on, or None: not recognised."""
    sent, depth = traffic(dataset), pipeline.count or len(pipeline.numbers)
    # only where every call's other side is profiled is the last profiled stage the last one
    others = sent.other[np.isin(sent.step, dataset.steady_steps)]
    if pipeline.count is None and not np.isin(others, dataset.ranks).all():
        return None
    counts = _usual(dataset, pipeline, depth)
    if counts is None:
        return None
    stage, forward, _, around, ahead = counts
    count, around = int(forward[0]), np.unique(around[(stage == 0) | (stage == depth - 1)])
    if around.any():
        return _sent_around(depth, count, around)
    all_first = bool((ahead == count).all())
    # receives may be posted one microbatch ahead
    by_turns = bool((np.abs(ahead - np.minimum(count, depth - stage)) <= 1).all())
    if by_turns and not all_first and depth == 2 and not _whole_turns(dataset, pipeline):
        # of two stages each microbatch passes 2 v - 1 times each way, onward or around
        passes = [n for n in range(3, count // 2 + 1, 2) if count % n == 0]
        if len(passes) != 1:
            return None
        return Schedule("interleaved 1F1B", 2, count // passes[0], (passes[0] + 1) // 2)
    names = {(True, True): "GPipe or 1F1B", (True, False): "GPipe", (False, True): "1F1B"}
    name = names.get((all_first, by_turns))
    return Schedule(name, depth, count) if name else None


def _sent_around(depth: int, count: int, around: Ints) -> Schedule | None:
    """Of v chunks each microbatch passes v times from stage to stage (`count` in all), and v - 1
    times around: from the last stage to the first.
    """
    microbatches = count - int(around[0])
    if len(around) > 1 or microbatches < 1 or count % microbatches:
        return None
    return Schedule("interleaved 1F1B", depth, microbatches, count // microbatches)


def _usual(dataset: Dataset, pipeline: Stages, depth: int) -> Ints | None:
    """What most steady-state steps of each rank count; None where they differ or go elsewhere, or
    where not all ranks have as many forwards and gradients.

    A column for each rank; rows are its stage, its messages to and from its neighbours (forwards
    and gradients), those round from the last stage to the first, and how many forwards it has
    passed on (of the last stage: taken) before the first gradient came back (left).
    """
    sent, ranks = traffic(dataset), np.sort(pipeline.ranks)
    rows = np.flatnonzero(np.isin(sent.step, dataset.steady_steps) & np.isin(sent.rank, ranks))
    rows = rows[order_by(sent.rank[rows], sent.step[rows])]
    rank, step, sends = sent.rank[rows], sent.step[rows], sent.sends[rows]
    stage, other = pipeline.stages_of(rank), pipeline.stages_of(sent.other[rows])
    last = stage == depth - 1
    to_next, to_before = other == stage + 1, other == stage - 1
    around = ((stage == 0) | last) & (other == np.where(last, 0, depth - 1)) & (depth > 2)
    # each of these twice a microbatch: activations one way, gradients the other
    neighbour, forward = np.where(last, to_before, to_next), sends != last
    onward, back, turned = neighbour & forward, neighbour & ~forward, around & ~forward
    came_back = running_sum(back, first_of(begins(rank, step)))
    ahead = onward & (came_back == 0)
    elsewhere = ~(to_next | to_before | around)
    sent_as = np.stack([onward, back, turned, ahead, elsewhere]).astype(np.int64)
    steps = Stretches.of(rank, step)
    counts = np.stack([rank[steps.first], stage[steps.first], *steps.sum(sent_as)])
    kinds, number = np.unique(counts, axis=1, return_counts=True)
    steps_of = count_by(row_of(ranks, counts[0]), len(ranks))
    most = kinds[:, 2 * number > steps_of[row_of(ranks, kinds[0])]]
    if most.shape[1] < len(ranks) or most[-1].any():
        return None
    count = most[2, 0]
    return most[1:-1] if count and (most[2:4] == count).all() else None


def _whole_turns(dataset: Dataset, pipeline: Stages) -> bool:
    """Whether the last of two stages does a forward and a backward in its first turn too.

    Between two stages the interleaved schedule's messages may come in 1F1B's order; but its first
    turn is a forward only: a third of both, or a quarter where it is done twice.
    """
    sent, c, d = traffic(dataset), dataset.collectives, dataset.timelines
    if pipeline.numbers[-1] != 1:
        return False
    for rank in pipeline.groups[-1]:
        rows = sent.row[(sent.rank == rank) & np.isin(sent.step, dataset.steady_steps)]
        rows = rows[c.has[rows]]
        place = dataset.place[rank]
        (compute,) = d.ran(place, place + 1, (COMPUTE,))
        for calls in parts(rows, c.step[rows]):
            sends = c.operation[calls] == "Send"
            turns = np.flatnonzero(sends[1:] & ~sends[:-1])
            if len(turns) < 2:
                return False
            came, went = c.end[calls[turns]], c.start[calls[turns + 1]]
            times = np.stack([came, np.maximum(went, came)])
            work = compute.within(*d.axis.of(place, times))
            if work[0] < limits.HALF * float(np.median(work)):
                return False
    return True
