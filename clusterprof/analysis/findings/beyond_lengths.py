"""What a rank's GPU takes longer than its peers' that batches of another length do not explain.

Longer samples lengthen the kernels that work on samples, and not those that work on parameters (an
optimizer's), and they add no kernels. So a GPU is slower by what all of its kernels are, and has
another program by the kernels that it runs besides its peers'; what is left may be the batches'.
"""

from __future__ import annotations

import re

import numpy as np

from clusterprof.analysis.findings.finding import job_of
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.timeline import COMPUTE, COPY
from clusterprof.analysis.model.what_if import WhatIfs
from clusterprof.columns import Bools, Floats, Ints, sums
from clusterprof.words import base_name

#: what names of copies begin with
COPIES = re.compile("(?i)mem(cpy|set)")


@once
def beyond_lengths(dataset: Dataset) -> Floats:
    """By how much more than its middle peer's each rank's GPU computes at any length of batches.

    [ranks, steady-state steps] (ns), nowhere below 0.
    """
    job = job_of(dataset)
    rows = job.work[job.job.kind[job.work] == COMPUTE]
    _, took, calls = by_name(job, rows, np.minimum(job.base.run, job.job.contention.freely))
    more, longer = job.peers.differences(calls), job.peers.differences(took)
    alike = ((more == 0) | job.alone[:, None, None]) & (calls > 0)
    slower = _slower(job, took, calls, alike.all(axis=2))[:, None] * took.sum(axis=1)
    # of what it has more of, as many are other forms of the same work as it has less of others
    net = more.sum(axis=1).clip(0.0) / np.maximum(more.clip(0.0).sum(axis=1), 1.0)
    added = net * np.where(more > 0, longer, 0.0).sum(axis=1).clip(0.0)
    added[job.alone] = 0.0
    # copies of as many bytes as the middle peer's
    rows = job.work[job.job.kind[job.work] == COPY]
    values = job.base.run[rows], job.dataset.activities.size[job.job.activity[rows]]
    one_kind = np.zeros_like(rows)
    longer, size = (job.peers.differences(_sums(job, rows, v, one_kind, 1))[:, 0] for v in values)
    return job.by_steady_step(slower + added + np.where(size == 0, longer.clip(0.0), 0.0))


def by_name(job: WhatIfs, rows: Ints, lengths: Ints) -> tuple[list[str], Floats, Floats]:
    """What activities of each name take each rank in each step (ns), and how many there are.

    Of the activities `rows` of the replay, whose `lengths` are. Both [ranks, names, steps].
    """
    activities = job.dataset.activities
    names = list(activities.names)
    if job.dataset.unlike_profilers:  # as all profilers of the job write them
        names = [name if COPIES.match(name) else base_name(name) for name in names]
    every, code = np.unique(np.asarray(names, dtype=object), return_inverse=True)
    used, kind = np.unique(code[activities.name[job.job.activity[rows]]], return_inverse=True)
    took, calls = (_sums(job, rows, values, kind, len(used)) for values in (lengths[rows], None))
    return every[used].tolist(), took, calls


def _sums(job: WhatIfs, rows: Ints, values: Ints | None, kind: Ints, count: int) -> Floats:
    """The sums of `values` of the activities `rows`, or how many, [ranks, `count` kinds, steps]."""
    shape = len(job.dataset.ranks), count, len(job.job.steps)
    return sums(shape, (job.job.rank[rows], kind, job.job.step[rows]), values)


def _slower(job: WhatIfs, took: Floats, calls: Floats, alike: Bools) -> Floats:
    """The part of its kernels' time by which each GPU is slower, whatever it works on, [ranks].

    Of those kernels that it and its middle peer both run as often (`alike`). None where those of a
    name are not slower: as long as the peer's is likelier, by a hundred times the number of names
    that are asked, than as much longer as all of them are (as steps vary, normally).
    """
    count, steps = calls.sum(axis=2), took.shape[2]
    call_ns = np.where(calls > 0, took, np.nan) / np.maximum(calls, 1)
    longer = job.peers.differences(np.log(np.maximum(call_ns, 1.0)))
    mean, apart = longer.mean(axis=2), longer.var(axis=2, ddof=1) / steps
    weight = np.where(alike, took.sum(axis=2), 0.0)
    slower = ((weight * mean).sum(axis=1) / np.maximum(weight.sum(axis=1), 1.0)).clip(0.0)
    # shorter kernels take what it takes to start one, however fast the GPU is
    asked = alike & (took.sum(axis=2) >= 10_000 * count)
    enough = np.log(np.maximum(asked.sum(axis=1), 1) / limits.CHANCE)
    # the logarithm of how much likelier, times `apart`
    likelier = slower[:, None] * (slower[:, None] / 2 - mean)
    as_long = (asked & (likelier > apart * enough[:, None])).any(axis=1)
    share = weight.sum(axis=1) / np.maximum(took.sum(axis=(1, 2)), 1.0)
    return np.asarray(np.where(as_long, 0.0, share * (1 - np.exp(-slower))))
