"""Input copied from pageable memory: slow, and the host waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from clusterprof.agent.contracts.words import ms, size
from clusterprof.analysis.findings.finding import Code, exposed_by_step, finding, of_step
from clusterprof.analysis.model.dataset import Dataset, Floats
from clusterprof.results import Finding

#: place among the modules of findings (`registry`)
ORDER = 40

CODES = (
    Code(
        "input.pageable_copy",
        "The batch is copied from pageable memory",
        "Copies from the host to the GPU come from memory that is not pinned: they are slow, and "
        "the host waits for them. The cost is the part that overlaps with nothing.",
        "The cost is an upper bound: pinned memory makes copies several times faster, not free.",
        "Pin the batch (DataLoader(pin_memory=True)) and copy it with to(device, "
        "non_blocking=True).",
    ),
)

#: below this share of the step copies are not reported
_LEAST_FRAC = 0.01


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `input.pageable_copy` where exposed host-to-device copies are from pageable memory.

    Cost: the exposed part of such copies per step, mean over the ranks that do it. Pinned
    memory would make them about as many times faster as the bus is; all of it is the bound.
    """
    if not dataset.step_ns:
        return []
    each, volume = _copies(dataset)
    doing = each.sum(axis=1) > 0
    if not doing.any():
        return []
    cost = each[doing].mean(axis=0)
    per_step = float(cost.mean())
    if per_step / dataset.step_ns < _LEAST_FRAC:
        return []
    ranks = [r for r, d in zip(dataset.ranks, doing, strict=True) if d]
    copied = float(volume[doing].mean())
    rate = size(copied / max(per_step / 1e9, 1e-12))
    evidence = [
        {
            "rank": int(rank),
            "steps": list(dataset.steady_steps),
            "copy_ns_per_step": round(float(each[k].mean())),
            "bytes_per_step": round(float(volume[k].mean())),
            "what": f"{size(float(volume[k].mean()))} per step in {ms(each[k].mean())}",
        }
        for k, rank in enumerate(dataset.ranks)
        if doing[k]
    ]
    return [
        finding(
            dataset,
            "input.pageable_copy",
            ranks=ranks,
            cost=cost,
            confidence=0.95,
            summary=f"Copying the batch from pageable memory takes {of_step(dataset, per_step)}. "
            f"It is {size(copied)} per step, at {rate}/s.",
            evidence=evidence[:16],
            advice="pin the batch (DataLoader(pin_memory=True)) and copy it with "
            "to(device, non_blocking=True): several times faster, and overlapped",
        )
    ]


def _copies(dataset: Dataset) -> tuple[Floats, Floats]:
    """Exposed copies from pageable memory (ns), and their bytes: [ranks, steady-state steps]."""
    each = np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    volume = np.zeros_like(each)
    for k, (tables, line) in enumerate(zip(dataset.tables, dataset.timelines, strict=True)):
        table = tables.activity
        wanted = pc.and_(
            pc.fill_null(table["pageable"], fill_value=False),
            pc.fill_null(pc.equal(table["direction"], "host_to_device"), fill_value=False),
        )
        rows = np.flatnonzero(np.asarray(wanted.to_numpy(zero_copy_only=False), dtype=bool))
        if not len(rows):
            continue
        work = line.compute_or_communication
        each[k] = exposed_by_step(dataset, line, work, line.start[rows], line.stop[rows])
        count = np.asarray(pc.fill_null(table["size_bytes"], 0).to_numpy())[rows]
        step = np.r_[line.step, -1][line.step_of[rows]]
        inside = np.isin(step, dataset.steady_steps)
        np.add.at(volume[k], np.searchsorted(dataset.steady_steps, step[inside]), count[inside])
    return each, volume
