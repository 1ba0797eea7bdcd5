"""The verdict's first line: at most two sentences of at most `SENTENCE_LENGTH` characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from clusterprof.agent.contracts.words import ms
from clusterprof.agent.contracts.words import ranks as rank_list
from clusterprof.analysis.findings.finding import sentences
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.results import Finding

#: a straggler is the verdict where it costs this part of what costs most
_LEADS_FRAC = 0.5
#: the parts of a step's account, as a single step is described by them
_PARTS = {
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed communication",
    "exposed_copy_ns": "copies",
    "idle_ns": "idle",
}


def verdict(dataset: Dataset, findings: Sequence[Finding]) -> str:
    """Who delays the other ranks and why; else that no rank does, and what costs most."""
    if not dataset.ranks:
        return "No report could be read."
    if len(dataset.steady_steps) < LEAST_STEADY:
        few = f"Not enough steady-state steps ({len(dataset.steady_steps)} of {LEAST_STEADY})."
        return f"{few}{_single_step(dataset)}"
    costly = [f for f in findings if f["severity"] != "info"]
    stragglers = [f for f in costly if f["code"].startswith("straggler.")]
    if stragglers:
        first, most = stragglers[0], costly[0]
        if first["cost_ns_per_step"] >= _LEADS_FRAC * most["cost_ns_per_step"]:
            return sentences(first["summary"], 2)
        # the straggler comes first, but not where something else costs many times as much
        also = sentences(first["summary"], 1)
        return f"{sentences(most['summary'], 1)} Also, {also[0].lower()}{also[1:]}"
    start = _no_straggler(dataset)
    if costly:
        return f"{start or 'No stragglers.'} {sentences(costly[0]['summary'], 1)}"
    steps = f"in {len(dataset.steady_steps)} steady-state steps of {ms(dataset.step_ns)}."
    return f"{start} No other findings {steps}" if start else f"No findings {steps}"


def _no_straggler(dataset: Dataset) -> str:
    """Why no straggler is named, as far as ranks can be compared; empty where there is none."""
    if len(dataset.ranks) < 2:
        only = f"Only rank {dataset.ranks[0]} was profiled"
        return f"{only}, so stragglers cannot be determined; profile two or more (--ranks)."
    apart = incomparable(dataset)
    if len(apart) > len(dataset.ranks) - 2:
        why = "no collectives of these ranks match"
        return f"Stragglers cannot be determined: {why}; profile ranks of one communicator."
    if apart:
        return (
            f"No stragglers among {len(dataset.ranks) - len(apart)} ranks; cannot be determined "
            f"for {rank_list(apart, 2)} (no matched collectives)."
        )
    last = always_last(dataset)
    if last is None:
        return ""
    rank, wait = last
    return (
        f"The other ranks wait {ms(wait)} of each {ms(dataset.step_ns)} step for rank {rank}, but "
        "fixing it saves little."
    )


def incomparable(dataset: Dataset) -> list[int]:
    """Ranks without a collective that is matched with another rank's."""
    c = dataset.collectives
    several = c.matched & (np.bincount(c.collective, minlength=1)[c.collective] > 1)
    matched = set(np.unique(c.rank[several]).tolist())
    return [rank for rank in dataset.ranks if rank not in matched]


def always_last(dataset: Dataset) -> tuple[int, float] | None:
    """The rank that arrives last wherever others wait, and how long they wait per step (ns).

    None where no single one does, or where they wait for less than `limits.WAITED_FRAC` of it.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.matched & c.synchronising & np.isin(c.step, dataset.steady_steps))
    waited = np.zeros(len(dataset.ranks))
    np.add.at(waited, np.searchsorted(dataset.ranks, c.last_rank[rows]), c.wait[rows])
    if not waited.any():
        return None
    k = int(np.argmax(waited))
    wait = float(np.nanmean(np.delete(dataset.account("exposed_wait_ns"), k, axis=0)))
    wait = min(wait, dataset.step_ns)
    # no rank may have an account of these steps: then the wait is not a number
    long = wait >= limits.WAITED_FRAC * dataset.step_ns
    if waited[k] < limits.LAST_FRAC * waited.sum() or not long:
        return None
    return dataset.ranks[k], wait


def _single_step(dataset: Dataset) -> str:
    """Where the time of a single step goes, which is no evidence; empty where none is known."""
    if not dataset.steps:
        return ""
    step = (*dataset.steps[-1:], *dataset.steady_steps)[-1]
    rows = dataset.accounts.filter(pc.equal(dataset.accounts["step"], step))
    whole = pc.sum(rows["duration_ns"]).as_py()
    if not whole:
        return ""
    parts = [
        f"{what} {100 * pc.sum(rows[name]).as_py() / whole:.0f}%" for name, what in _PARTS.items()
    ]
    typical = ms(float(np.median(rows["duration_ns"].to_numpy())))
    stepped = any(line.has_steps for line in dataset.timelines)
    what = "One step" if stepped else "The window"
    return f" {what} ({typical}, no evidence): {', '.join(parts)}."
