"""Input copied from pageable memory: slow, and the host waits for it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from clusterprof.analysis.findings.finding import Code, Repair, Tier, Words, job_of, of_step
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.by_report import NEVER
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved
from clusterprof.columns import sum_by
from clusterprof.words import ms, size

TIER = Tier.EVERYONE

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


def repairs(dataset: Dataset, *_: object) -> list[Repair]:
    """Propose `input.pageable_copy`: pinned copies that the host does not wait for."""
    job, a = job_of(dataset).job, dataset.activities
    pageable, volume = (a.to_gpu & a.pageable)[job.activity], a.size[job.activity].astype(float)
    if not pageable.any():
        return []
    # the speed of pinned copies (bytes per ns)
    fast = np.flatnonzero(a.to_gpu & ~a.pageable & (a.size >= limits.LARGE_BYTES))
    if assumed := not len(fast):
        # that of 16 lanes of PCIe 4.0, less a fifth; twice as many from Hopper on, which has 5.0
        # (nvbandwidth measures 25 and 55 GB/s)
        newer = all(re.search(r"\b(GH|GB|H|B)\d{2,3}", t.info.device or "") for t in dataset.tables)
        rate = (1 + newer) * 25.0
    else:
        rate = float(np.median(a.size[fast] / np.maximum((a.stop - a.start)[fast], 1)))
    taken, copied = (
        sum_by(job.rank[pageable], values[pageable], len(dataset.ranks)) / len(job.steps)
        for values in (job.lengths.run, volume)
    )
    doing = np.flatnonzero(taken > 0)
    ranks = tuple(dataset.ranks[k] for k in doing)

    def pinned(lengths: Lengths) -> Lengths:
        run, woken = lengths.run.copy(), lengths.woken.copy()
        run[pageable] = np.minimum(run[pageable], volume[pageable] / rate)
        # the host's wait for a copy begins at the moment after its launch, and ends at the next one
        woken[np.minimum(job.launch_moment[pageable, None] + [1, 2], len(woken) - 1)] = NEVER
        return replace(lengths, run=run, woken=woken)

    def words(saved: Saved) -> Words:
        per_step, sent = float(taken[doing].mean()), float(copied[doing].mean())
        # what is saved beyond the copies themselves
        queued = " for them and for what is queued before them" if saved.ns > 2 * per_step else ""
        speed = f"{'assumed' if assumed else 'recorded'} {size(rate * 1e9)}/s of pinned memory"
        return Words(
            summary=f"Copying the batch from pageable memory costs {of_step(dataset, saved)}. "
            f"{size(sent)} per step take {ms(per_step)} ({size(sent / per_step * 1e9)}/s), and the "
            f"host waits{queued}; compared with the {speed}.",
            evidence=[
                {
                    "rank": dataset.ranks[k], "copy_ns_per_step": round(float(taken[k])),
                    "bytes_per_step": round(float(copied[k])),
                }
                for k in doing[: limits.MOST]
            ],
            confidence=limits.ASSUMED if assumed else limits.MEASURED,
        )  # fmt: skip

    return [Repair(CODES[0], ranks, pinned, words)]
