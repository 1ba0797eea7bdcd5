"""Pipelines whose stages wait for each other, and how long the best schedule would let them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from clusterprof.analysis.findings.finding import Code, Repair, Tier, finding, job_of, of_window
from clusterprof.analysis.findings.pipeline import stage_rows
from clusterprof.analysis.groups.schedule import schedule
from clusterprof.analysis.groups.stages import Stages, stages
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import EXPOSED, WAITING, activities_of, by_call
from clusterprof.analysis.model.dataset import Dataset, Floats
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved
from clusterprof.results import Finding
from clusterprof.words import ms, percent

TIER = Tier.REST

CODES = (
    Code(
        "pipeline.bubble",
        "Pipeline stages wait for each other",
        "Ranks of a pipeline wait in receives. Each schedule has an ideal bubble, which the "
        "finding states where it recognises the schedule: that much is information. Saved: what "
        "transfers between stages of no time would.",
        "The ideal assumes stages of equal work. What more microbatches would save assumes that "
        "smaller ones compute as efficiently.",
        "Use more microbatches per step or an interleaved schedule; beyond the ideal, look at the "
        "stages' hosts and transfers.",
    ),
)


def repairs(dataset: Dataset, _lengths: Lengths, _before: Sequence[Repair] = ()) -> list[Repair]:
    """Propose `pipeline.bubble`: transfers between the stages of no time."""
    known = stages(dataset) if dataset.pipelined else None
    if known is None or len(known.groups) < 2:
        return []
    waits = _waiting(dataset)
    if waits.mean() < limits.LEAST_FRAC * dataset.step_ns:
        return []
    job = job_of(dataset).job
    # without its other side a call's waiting cannot be told from its transfer
    sent = activities_of(dataset, job, dataset.collectives.between_stages) & job.joined
    return [
        Repair(
            CODES[0],
            tuple(sorted(known.of)),
            lambda lengths: replace(lengths, run=np.where(sent, 0, lengths.run)),
            partial(_finding, dataset, known, waits),
            limits.LEAST_FRAC * dataset.step_ns,
            always=True,
        )
    ]


def _waiting(dataset: Dataset) -> Floats:
    """What each rank waits in Sends and Recvs, exposed, per evidence step (ns).

    Of a call without its other side: what it takes beyond the quickest of all.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.point_to_point & c.has)
    spent = by_call(dataset)[rows]
    quick = (c.end - c.start)[rows].min(initial=np.iinfo(np.int64).max)
    waits = np.where(c.matched[rows], spent[:, WAITING], np.maximum(spent[:, EXPOSED] - quick, 0))
    total = np.bincount(np.searchsorted(dataset.ranks, c.rank[rows]), waits, len(dataset.ranks))
    return np.asarray(total / max(len(dataset.evidence_steps), 1))


def _finding(dataset: Dataset, known: Stages, waits: Floats, saved: Saved) -> Finding:
    """A bubble in words: information at its schedule's ideal. `waits` are those of each rank."""
    per_step, step_ns = float(waits.mean()), dataset.step_ns
    per_stage = [float(waits[np.searchsorted(dataset.ranks, g)].mean()) for g in known.groups]
    evidence = stage_rows(known, "wait_ns_per_step", per_stage)
    text = f"Pipeline bubble: each rank waits {of_window(dataset, per_step)} in receives."
    if saved.base.repaired:
        text += " Other findings explain a part of it."
    plan = schedule(dataset, known)
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
    return finding(
        dataset,
        CODES[0],
        ranks=sorted(known.of),
        saved=saved,
        confidence=limits.MEASURED if plan else limits.ASSUMED,
        summary=text,
        evidence=evidence,
    )
