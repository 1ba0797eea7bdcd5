"""Pipelines: stages of unequal work, and bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

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
from clusterprof.analysis.groups.schedule import schedule
from clusterprof.analysis.groups.stages import Stages, stages
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import EXPOSED, WAITING, by_call, call_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE
from clusterprof.analysis.model.untraced import MOST_SLOWER
from clusterprof.analysis.model.what_if import Saved, WhatIfs
from clusterprof.columns import Floats, Ints, count_by, row_of, sum_by
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
    usual = _stage_means(dataset, pipeline, computes)
    most, least = int(np.argmax(usual)), int(np.argmin(usual))
    if usual[most] - float(np.mean(usual)) < limits.LEAST_FRAC * dataset.step_ns:
        return []
    slow, fast = (f"stage {pipeline.numbers[stage]}" for stage in (most, least))

    def words(saved: Saved) -> Words:
        return Words(
            rank=pipeline.groups[most][0],
            summary=f"{slow.capitalize()} computes {ms(usual[most])} per step, {fast} "
            f"{ms(usual[least])}. Equal stages would save up to {of_step(dataset, saved)}.",
            evidence=_stage_rows(pipeline, "compute_ns_per_step", usual),
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


def find(dataset: Dataset, earlier: Sequence[Finding] = ()) -> list[Finding]:
    """Return `pipeline.bubble`: waiting in receives, and the ideal of its schedule."""
    pipeline, step_ns = stages(dataset), dataset.step_ns
    if pipeline is None or len(pipeline.groups) < 2:
        return []
    waits = _waiting(dataset)
    per_step = float(waits.mean())
    if per_step < limits.LEAST_FRAC * step_ns:
        return []
    per_stage = _stage_means(dataset, pipeline, waits)
    evidence = _stage_rows(pipeline, "wait_ns_per_step", per_stage)
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


def _stage_means(dataset: Dataset, pipeline: Stages, values: Floats) -> list[float]:
    """The mean of `values` [ranks] over the ranks of each stage."""
    groups = ([dataset.place[rank] for rank in group] for group in pipeline.groups)
    return [float(values[group].mean()) for group in groups]


def _stage_rows(pipeline: Stages, name: str, values_ns: Sequence[float]) -> Evidence:
    """A row for each stage with what it waits or computes."""
    return [
        {"stage": number, "ranks": list(ranks), name: round(ns)}
        for number, ranks, ns in zip(pipeline.numbers, pipeline.groups, values_ns, strict=True)
    ]
