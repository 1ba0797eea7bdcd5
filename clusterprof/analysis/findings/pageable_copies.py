"""Input copied from pageable memory: slow, and the host waits for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from clusterprof.agent.contracts.words import ms, size
from clusterprof.analysis.findings.finding import Code, finding, of_step
from clusterprof.analysis.findings.pipeline import evened
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats
from clusterprof.analysis.model.graph import NEVER
from clusterprof.analysis.model.replay import Replay
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.results import Finding

#: place among the modules of findings (`registry`)
ORDER = 40

CODES = (
    Code(
        "input.pageable_copy",
        "The batch is copied from pageable memory",
        "Copies from the host to the GPU come from memory that is not pinned: they are slow, and "
        "the host waits for them. Saved: the host does not wait, and they run at the speed of "
        "copies from pinned memory.",
        "Where the reports have no copy from pinned memory, its speed is assumed, and the finding "
        "says so.",
        "Pin the batch (DataLoader(pin_memory=True)) and copy it with to(device, "
        "non_blocking=True).",
    ),
)

#: bytes per ns of a pinned copy where none is recorded: 16 lanes of PCIe 4.0, of 5.0 from Hopper
#: on, less a fifth (nvbandwidth measures 25 and 55 GB/s)
_PCIE_4, _PCIE_5, _PCIE_5_GPUS = 25.0, 50.0, re.compile(r"\b(GH|GB|H|B)\d{2,3}")
#: smaller copies do not show the speed of the bus
_LARGE_BYTES = 1 << 20


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `input.pageable_copy` where pinned copies that the host does not wait for save."""
    job, base = what_ifs(dataset), evened(dataset)
    if job is None or base is None:
        return []
    replayed = job.job
    pageable, volume, rate, assumed = _copies(dataset, replayed)
    if not pageable.any():
        return []
    run, woken = base.run.copy(), base.woken.copy()
    run[pageable] = np.minimum(run[pageable], volume[pageable] / rate)
    # the host's wait for a copy ends at the moment after its launch
    after = np.minimum(replayed.launch_moment[pageable] + 1, len(woken) - 1)
    woken[after] = NEVER
    saved = job.saved(replace(base, run=run, woken=woken), base)
    if saved.most_ns < limits.LEAST_FRAC * dataset.step_ns:
        return []
    cost = np.maximum(saved.each, 0.0)
    steps = len(replayed.steps)
    count = len(dataset.ranks)
    taken = np.bincount(replayed.rank[pageable], replayed.lengths.run[pageable], count) / steps
    copied = np.bincount(replayed.rank[pageable], volume[pageable], count) / steps
    doing = np.flatnonzero(taken > 0)
    per_step, each = float(taken[doing].mean()), float(copied[doing].mean())
    speed = f"{'assumed' if assumed else 'recorded'} {size(rate * 1e9)}/s of pinned memory"
    evidence = [
        {
            "rank": int(dataset.ranks[k]),
            "steps": list(dataset.steady_steps),
            "copy_ns_per_step": round(float(taken[k])),
            "bytes_per_step": round(float(copied[k])),
            "what": f"{size(float(copied[k]))} per step in {ms(taken[k])}",
        }
        for k in doing[:16]
    ]
    return [
        finding(
            dataset,
            "input.pageable_copy",
            ranks=[dataset.ranks[k] for k in doing],
            cost=cost,
            saved=saved,
            uncertainty_ns=saved.uncertainty_ns,
            confidence=0.8 if assumed else 0.95,
            summary=f"Copying the batch from pageable memory costs "
            f"{of_step(dataset, float(cost.mean()))}. {size(each)} per step take {ms(per_step)} "
            f"({size(each / per_step * 1e9)}/s), and the host waits; compared with the {speed}.",
            evidence=evidence,
            advice="pin the batch (DataLoader(pin_memory=True)) and copy it with "
            "to(device, non_blocking=True): several times faster, and overlapped",
        )
    ]


def _copies(dataset: Dataset, job: Replay) -> tuple[Bools, Floats, float, bool]:
    """Which activities of the replay are pageable copies to the GPU, and the bytes of each.

    Also the speed of pinned copies (bytes per ns), and whether that is assumed.
    """
    pageable = np.zeros(len(job.row), dtype=bool)
    volume = np.zeros(len(job.row))
    speeds: list[Floats] = []
    for k, (tables, line) in enumerate(zip(dataset.tables, dataset.timelines, strict=True)):
        table = tables.activity
        inward = pc.fill_null(pc.equal(table["direction"], "host_to_device"), fill_value=False)
        unpinned = pc.fill_null(table["pageable"], fill_value=False)
        inward, unpinned = (
            np.asarray(c.to_numpy(zero_copy_only=False), dtype=bool) for c in (inward, unpinned)
        )
        count = np.asarray(pc.fill_null(table["size_bytes"], 0).to_numpy(), dtype=float)
        mine = job.rank == k
        rows = job.row[mine]
        pageable[mine], volume[mine] = (inward & unpinned)[rows], count[rows]
        pinned = inward & ~unpinned & (count >= _LARGE_BYTES)
        speeds.append(count[pinned] / np.maximum(line.stop - line.start, 1)[pinned])
    known = np.concatenate(speeds)
    if len(known):
        return pageable, volume, float(np.median(known)), False
    newer = all(_PCIE_5_GPUS.search(t.info.device or "") for t in dataset.tables)
    return pageable, volume, _PCIE_5 if newer else _PCIE_4, True
