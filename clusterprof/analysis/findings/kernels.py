"""Whether a rank's GPU had more kernels than its peers', or slower ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.groups.peers import Peers
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints
from clusterprof.analysis.model.timeline import COMPUTE, Timeline

#: with more peers than these, only so many are compared with
_MOST_PEERS = 8


@dataclass(frozen=True)
class _Kernels:
    """One rank's kernels in the steady-state steps.

    `key` numbers (step, name, how many-th of its name in the step): the same kernel of the same
    program has the same key on all ranks. `clean`: overlapped with no collective.
    """

    key: Ints
    step: Ints
    length: Ints
    clean: Bools
    calls: Floats
    time: Floats


def _read(dataset: Dataset, line: Timeline, code: dict[str, int]) -> _Kernels:
    shape = (len(dataset.steady_steps), len(code))
    number = np.r_[line.step, -1][line.step_of]
    use = np.flatnonzero((line.kind == COMPUTE) & np.isin(number, dataset.steady_steps))
    name = np.asarray([code.get(n, 0) for n in line.names] or [0])[line.name[use]]
    step = np.searchsorted(dataset.steady_steps, number[use])
    length = line.stop[use] - line.start[use]
    group = step * shape[1] + name
    order = np.lexsort((line.launch[use], group))
    first = np.r_[True, group[order][1:] != group[order][:-1]]
    since = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    clean = line.communication.within(line.start[use], line.stop[use]) == 0
    size = shape[0] * shape[1]
    return _Kernels(
        key=group[order] * (1 << 24) + since,
        step=step[order],
        length=length[order],
        clean=clean[order],
        calls=np.bincount(group, minlength=size).reshape(shape).astype(float),
        time=np.bincount(group, length, size).reshape(shape).astype(float),
    )


def excess(dataset: Dataset, circle: Peers, stage: Ints) -> Floats:
    """Kernel time beyond the peers' (ns), [ranks, steady-state steps]: more calls, or slower ones.

    More calls of a name count with all the time they add. Of names with equal calls the same
    kernels are compared one by one, and only those that overlapped with no collective on either
    rank: waiting inside a collective slows a rank's own kernels, which says nothing of its GPU.
    `circle` says whom to compare.
    Between pipeline stages (`stage` [ranks]) only speed is compared: a stage that has more to do
    is not slow.
    """
    # of kernels only: a trace of many steps has a name for each of them, too
    names = sorted({
        line.names[n]
        for line in dataset.timelines
        for n in np.unique(line.name[line.kind == COMPUTE]).tolist()
    })  # fmt: skip
    code = {n: k for k, n in enumerate(names)}
    out = np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    if not names or not dataset.steady_steps:
        return out
    read = [_read(dataset, line, code) for line in dataset.timelines]
    for k, mine in enumerate(read):
        compared = circle.others(k)
        others = [read[j] for j in compared[:_MOST_PEERS]]
        if others:
            calls = np.median([o.calls for o in others], axis=0)
            time = np.median([o.time for o in others], axis=0)
            more = np.where(mine.calls > calls, np.maximum(mine.time - time, 0.0), 0.0).sum(axis=1)
            if (stage[compared] != stage[k]).any():
                more = np.zeros_like(more)
            slow = np.median([_slower(mine, o) for o in others], axis=0)
            if dataset.timelines[k].on_host:
                # cores that ranks share make any of them slow for a while
                slow = np.minimum(slow, np.quantile(slow, 0.25))
            out[k] = more + slow
    return out


def _slower(mine: _Kernels, other: _Kernels) -> Floats:
    """Time per step that equal, undisturbed kernels cost more than the other rank's (ns)."""
    width = mine.calls.shape[1]
    equal = (mine.calls == other.calls).ravel()
    _, a, b = np.intersect1d(mine.key, other.key, assume_unique=True, return_indices=True)
    good = mine.clean[a] & other.clean[b] & equal[mine.key[a] >> 24]
    a, b = a[good], b[good]
    steps = mine.calls.shape[0]
    own = np.bincount(mine.step[a], mine.length[a], steps)
    theirs = np.bincount(mine.step[a], other.length[b], steps)
    whole = np.where(equal.reshape(steps, width), mine.time, 0.0).sum(axis=1)
    ratio = np.divide(own, theirs, out=np.ones(steps), where=theirs > 0)
    enough = own >= limits.COMPARED_FRAC * whole
    beyond = np.maximum(1 - (1 + limits.SLOWER_FRAC) / ratio, 0.0)
    return np.asarray(np.where(enough, beyond * whole, 0.0))
