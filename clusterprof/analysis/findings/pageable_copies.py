"""Input copied from pageable memory: slow, and the host waits for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.analysis.findings.finding import Code, finding, job_of, of_step
from clusterprof.analysis.findings.pipeline import evened
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats
from clusterprof.analysis.model.graph import NEVER
from clusterprof.analysis.model.replay import Replay
from clusterprof.results import Finding
from clusterprof.words import ms, size

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

#: bytes per ns of a pinned copy where none is recorded: 16 lanes of PCIe 4.0, less a fifth; twice
#: as many from Hopper on, which has 5.0 (nvbandwidth measures 25 and 55 GB/s)
_PCIE_4 = 25.0
_PCIE_5_GPUS = re.compile(r"\b(GH|GB|H|B)\d{2,3}")


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `input.pageable_copy` where pinned copies that the host does not wait for save."""
    job, base = job_of(dataset), evened(dataset)
    replayed = job.job
    pageable, volume, rate, assumed = _copies(dataset, replayed)
    run, woken = base.run.copy(), base.woken.copy()
    run[pageable] = np.minimum(run[pageable], volume[pageable] / rate)
    # the host's wait for a copy begins at the moment after its launch, and ends at the next one
    after = np.minimum(replayed.launch_moment[pageable, None] + [1, 2], len(woken) - 1)
    woken[after] = NEVER
    saved = job.saved(replace(base, run=run, woken=woken), base)
    if not pageable.any() or saved.most_ns < limits.LEAST_FRAC * dataset.step_ns:
        return []
    taken, copied = (
        np.bincount(replayed.rank[pageable], each[pageable], len(dataset.ranks))
        / len(replayed.steps)
        for each in (replayed.lengths.run, volume)
    )
    doing = np.flatnonzero(taken > 0)
    per_step, each = float(taken[doing].mean()), float(copied[doing].mean())
    # what is saved beyond the copies themselves
    queued = " for them and for what is queued before them" if saved.ns > 2 * per_step else ""
    speed = f"{'assumed' if assumed else 'recorded'} {size(rate * 1e9)}/s of pinned memory"
    return [
        finding(
            dataset,
            CODES[0],
            ranks=[dataset.ranks[k] for k in doing],
            saved=saved,
            confidence=limits.ASSUMED if assumed else limits.MEASURED,
            summary=f"Copying the batch from pageable memory costs "
            f"{of_step(dataset, saved.ns)}. {size(each)} per step take {ms(per_step)} "
            f"({size(each / per_step * 1e9)}/s), and the host waits{queued}; compared with the "
            f"{speed}.",
            evidence=[
                {
                    "rank": dataset.ranks[k], "copy_ns_per_step": round(float(taken[k])),
                    "bytes_per_step": round(float(copied[k])),
                }
                for k in doing[: limits.MOST]
            ],
        )
    ]  # fmt: skip


def _copies(dataset: Dataset, job: Replay) -> tuple[Bools, Floats, float, bool]:
    """Which activities of the replay are pageable copies to the GPU, and the bytes of each.

    Also the speed of pinned copies (bytes per ns), and whether that is assumed.
    """
    a = dataset.activities
    rows = job.activity
    size = a.size
    pageable, volume = (a.to_gpu & a.pageable)[rows], size[rows].astype(float)
    pinned = np.flatnonzero(a.to_gpu & ~a.pageable & (size >= limits.LARGE_BYTES))
    if len(pinned):
        speeds = size[pinned] / np.maximum((a.stop - a.start)[pinned], 1)
        return pageable, volume, float(np.median(speeds)), False
    newer = all(_PCIE_5_GPUS.search(t.info.device or "") for t in dataset.tables)
    return pageable, volume, (1 + newer) * _PCIE_4, True
