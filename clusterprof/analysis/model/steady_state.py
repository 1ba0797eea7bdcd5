"""Which steps are evidence: those in which the profiler's start or stop does not show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from clusterprof.analysis.model.dataset import connected
from clusterprof.analysis.model.timeline import Timeline

#: steps; profilers of one window begin in one step, or in the next
_APART = 2
#: a window of more steady-state steps is judged by so many of them, the most typical ones on end:
#: every step is replayed for each what-if, and 5 to 10 are enough
_MOST = 32


def steady_steps(timelines: Sequence[Timeline], placed: pa.Table) -> tuple[int, ...]:
    """Return the steady-state steps, ascending.

    Starting a profiler stalls each rank for another time: the ranks resume 50 to 190 ms apart,
    in the midst of the first step of the window, which is therefore never evidence on any
    rank. The first synchronising collectives after it bring the GPUs together again; until each
    rank has been through one (and from communicator to communicator all ranks through each
    other's), later steps are not evidence either. A report without steps has none in steady state.
    Windows that begin some steps apart have only the steps in common to compare the ranks by.
    Stopping shows too: in the step after a rank's last one, as all wait for that rank, and
    in the last step of all where a rank's report ends before its collectives do. A step in
    which no time passes on some rank (of a report whose times are wrong) shows nothing.
    """
    lines = [line for line in timelines if line.has_steps]
    if not lines:
        return ()
    steps, counts = np.unique(np.concatenate([line.step for line in lines]), return_counts=True)
    # a rank whose window has none of the steps that most have is compared with no other
    most = counts == counts.max()
    lines = [line for line in lines if np.isin(line.step, steps[most]).any()]
    first = {line.rank: int(line.step[0]) for line in lines}
    synchronised = _synchronised(placed, max(first.values()))
    disturbed = _disturbed_by_the_stop(lines, placed)
    disturbed.update(int(s) for line in lines for s in line.step[line.end <= line.begin])
    apart = max(first.values()) - min(first.values()) >= _APART
    steady = [
        int(s)
        for s in steps
        if s > synchronised
        and (not apart or all(s in line.step for line in lines))
        and s not in disturbed
        and all(first[line.rank] < s for line in lines if s in line.step)
    ]
    return tuple(_typical(steady, lines) if len(steady) > _MOST else steady)


def _typical(steps: Sequence[int], lines: Sequence[Timeline]) -> Sequence[int]:
    """Of many steps `_MOST` on end whose mean length is nearest to that of all of them."""
    total, count = np.zeros(len(steps)), np.zeros(len(steps))
    for line in lines:
        mine = np.isin(line.step, steps)
        at = np.searchsorted(steps, line.step[mine])
        total[at] += (line.end - line.begin)[mine]
        count[at] += 1
    took = total / count
    means = np.convolve(took, np.full(_MOST, 1 / _MOST), mode="valid")
    nearest = int(np.argmin(np.abs(means - took.mean())))
    return steps[nearest : nearest + _MOST]


def _disturbed_by_the_stop(lines: Sequence[Timeline], placed: pa.Table) -> set[int]:
    """Steps in which the stop of a profiler shows."""
    last = {int(line.step[-1]) for line in lines}
    end = max(last)
    # those that others went on with
    disturbed = {step + 1 for step in last if step < end}
    step = np.asarray(placed["step"].fill_null(-1).to_numpy())
    state = np.asarray(placed["state"].cast(pa.string()).to_pylist(), dtype=object)
    if bool(((step == end) & (state == "incomplete")).any()):
        disturbed.add(end)
    return disturbed


def _synchronised(placed: pa.Table, start: int) -> int:
    """The first step, from `start` on, by whose end the ranks that can have synchronised."""
    role = np.asarray(placed["role"].cast(pa.string()).to_pylist(), dtype=object)
    step = np.asarray(placed["step"].fill_null(-1).to_numpy())
    rank, collective = placed["rank"].to_numpy(), placed["collective"].to_numpy()
    usable = (role != "none") & (step >= 0)
    if not usable.any():
        return start
    count, ranks = _components(rank[usable], collective[usable]), np.unique(rank[usable])
    for last in np.unique(step[usable & (step >= start)]):
        upto = usable & (step <= last)
        whole = _components(rank[upto], collective[upto]) <= count
        if whole and np.isin(ranks, rank[upto]).all():
            return int(last)
    return start


def _components(rank: np.ndarray, collective: np.ndarray) -> int:
    """How many sets of ranks there are that no collective connects with each other."""
    order = np.lexsort((rank, collective))
    same = collective[order][1:] == collective[order][:-1]
    one, other = rank[order][:-1][same], rank[order][1:][same]
    return len(np.unique(connected(np.unique(rank), one, other)))
