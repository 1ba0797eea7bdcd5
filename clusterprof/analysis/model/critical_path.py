"""The critical path: from the end of the last steady-state step back to what it waited for.

One walk back in time over all ranks. What ended last is explained by what it waited for:

- a collective (or receive) that waited for another rank: on with that rank's call;
- a kernel that was launched only after the device had run dry: the host, back to where that
  host last waited for its device, and on with what the device did then;
- any other kernel: what ended just before it, on its own stream if that was busy until then.

So the walk leads from a rank that waits, through communicators and pipeline stages, to the rank
that caused the wait. What is not on the path has cost nothing: it is slack. Assumes that a
kernel depends on what ended just before it, since reports do not hold the events that streams
wait for; and that a host without a wait for its device since then was busy with its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.model import host_activity
from clusterprof.analysis.model.dataset import Dataset, Floats, Ints
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE, Timeline

#: a kernel follows its stream's last one this closely if it waited for nothing else
_FOLLOWS_NS = 20_000
#: time stamps of one device may overlap by so much
_STAMP_NS = 2_000


@dataclass(frozen=True)
class Segment:
    """A piece of the path: `what` is `host`, `gpu` (kernels), `copy` or `transfer`.

    Times in ns on the reference rank's clock.
    """

    rank: int
    begin: int
    end: int
    what: str


@dataclass
class _Rank:
    """One rank's activities on the reference clock, and how to go back from each one."""

    line: Timeline
    start: Ints
    stop: Ints
    launched: Ints
    before: Ints
    by_stop: Ints
    stops: Ints
    waits: Ints
    #: by aligned start: the row of the placed table, the activity of a collective
    rows: dict[int, int]
    of_start: dict[int, int]


def path(dataset: Dataset) -> list[Segment]:
    """The critical path through the steady-state steps, last piece first; empty without any."""
    if not dataset.steady_steps or len(dataset.ranks) < 2:
        return []
    edges = _edges(dataset)
    if edges is None:
        return []
    begin, rank, end = edges
    k = dataset.place[rank]
    at = _last_before(_rank(dataset, k), end + _STAMP_NS)
    out: list[Segment] = []
    now = end
    been: set[tuple[int, int]] = set()
    while at >= 0 and now > begin:
        here = _rank(dataset, k)
        if (k, at) in been:
            # clocks that contradict each other lead in a circle: back in time on this rank
            at = _last_before(here, now - 1)
            if at >= 0:
                out.append(Segment(dataset.ranks[k], int(here.stop[at]), now, "host"))
                now, been = int(here.stop[at]), set()
            continue
        been.add((k, at))
        k, at, until = _explain(dataset, here, k, at, now, begin, out)
        if until < now:
            now, been = until, set()
    return out


def _edges(dataset: Dataset) -> tuple[int, int, int] | None:
    """When the steady state begins, and on which rank it ends last, and when."""
    first, last = dataset.steady_steps[0], dataset.steady_steps[-1]
    begins, ends = [], []
    for line in dataset.timelines:
        if first in line.step and last in line.step:
            a, b = np.searchsorted(line.step, [first, last])
            times = np.asarray([line.begin[a], line.end[b]], dtype=np.int64)
            one, other = dataset.clock.align(line.rank, times).tolist()
            begins.append(one)
            ends.append((other, line.rank))
    return (min(begins), max(ends)[1], max(ends)[0]) if begins else None


def _rank(dataset: Dataset, k: int) -> _Rank:
    return dataset.cached(("critical path", k), lambda: _read(dataset, k))


def _read(dataset: Dataset, k: int) -> _Rank:
    line, rank = dataset.timelines[k], dataset.ranks[k]
    start, stop = dataset.clock.align(rank, line.start), dataset.clock.align(rank, line.stop)
    stream = dataset.tables[k].activity["stream"].to_numpy()
    order = np.lexsort((start, stream))
    before = np.full(len(start), -1, dtype=np.int64)
    same = stream[order][1:] == stream[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    by_stop = np.argsort(stop, kind="stable")
    waits = dataset.clock.align(rank, host_activity.waits(dataset, k).end)
    c = dataset.collectives
    mine = c.of(rank)
    mine = mine[c.has[mine] & c.matched[mine]]
    collective = np.flatnonzero(line.kind == COLLECTIVE)
    of_start = {int(t): int(i) for t, i in zip(start[collective], collective, strict=True)}
    # calls of one group share a kernel: the one that waited longest explains it
    mine = mine[np.argsort(c.last_arrival[mine], kind="stable")]
    rows = {int(t): int(row) for t, row in zip(c.aligned_start[mine], mine, strict=True)}
    return _Rank(
        line, start, stop, dataset.clock.align(rank, line.launch_end), before, by_stop,
        stop[by_stop], waits, rows, of_start,
    )  # fmt: skip


def _last_before(here: _Rank, time: int) -> int:
    """The activity that ended last by `time`, or -1."""
    at = int(np.searchsorted(here.stops, time, side="right")) - 1
    return int(here.by_stop[at]) if at >= 0 else -1


def _explain(
    dataset: Dataset, here: _Rank, k: int, at: int, now: int, begin: int, out: list[Segment]
) -> tuple[int, int, int]:
    """Add the piece that ends at `now` with activity `at`; where and when to go on from."""
    what = _WHAT.get(int(here.line.kind[at]), "copy")
    ended = int(here.stop[at])
    if now - ended > _FOLLOWS_NS:
        # nothing ran: whatever made the device wait was not on it
        out.append(Segment(dataset.ranks[k], ended, now, "host"))
        now = ended
    row = here.rows.get(int(here.start[at]), -1) if here.line.kind[at] == COLLECTIVE else -1
    start = min(int(here.start[at]), now)
    late = _waited_for(dataset, row) if row >= 0 else -1
    if late < 0:
        out.append(Segment(dataset.ranks[k], start, now, what))
        return (k, *_begun(here, dataset.ranks[k], at, start, begin, out))
    c = dataset.collectives
    arrival = min(max(int(c.aligned_start[late]), start), now)
    out.append(Segment(dataset.ranks[k], arrival, now, what))
    k = dataset.place[int(c.rank[late])]
    here = _rank(dataset, k)
    at = here.of_start.get(int(c.aligned_start[late]), -1)
    if at < 0:
        return k, -1, arrival
    return (k, *_begun(here, dataset.ranks[k], at, arrival, begin, out))


def _waited_for(dataset: Dataset, row: int) -> int:
    """The call of the same collective that this one waited for, or -1 if for none.

    Members end together: the one that came last has the shortest call, whatever the clocks say,
    and the others waited for as long as theirs are longer. (A Recv that waits is longer than its
    Send, a Send that waits is longer than its Recv.) A member that left early, as the root
    of a small Broadcast does, was not waited for.
    """
    c = dataset.collectives
    order, ids = c.by_collective
    first, last = np.searchsorted(ids, [c.collective[row], c.collective[row] + 1])
    rows = order[first:last]
    rows = rows[c.has[rows]]
    if c.synchronising[row]:
        rows = rows[c.synchronising[rows]]
    length = (c.end - c.start)[rows]
    shortest = int(np.argmin(length))
    waited = int(c.end[row] - c.start[row]) - int(length[shortest])
    return int(rows[shortest]) if waited > _FOLLOWS_NS else -1


def _begun(
    here: _Rank, rank: int, at: int, start: int, begin: int, out: list[Segment]
) -> tuple[int, int]:
    """Why activity `at` began when it did: the activity before it, or its host."""
    own = int(here.before[at])
    if own < 0 or here.stop[own] > start + _STAMP_NS or start - here.stop[own] > _FOLLOWS_NS:
        own = _last_before(here, start + _STAMP_NS)
        if own == at or (own >= 0 and here.start[own] >= start):
            own = _last_before(here, start - 1)
    if own >= 0 and here.launched[at] <= here.stop[own]:
        return own, min(int(here.stop[own]), start)
    # the device had run dry: back to where this host last waited for it
    last = int(np.searchsorted(here.waits, min(int(here.launched[at]), start), side="right")) - 1
    until = max(int(here.waits[last]) if last >= 0 else begin, begin)
    out.append(Segment(rank, until, start, "host"))
    if until <= begin:
        return -1, begin
    # a synchronising call may return some microseconds before the device's own time stamp
    back = _last_before(here, until + _FOLLOWS_NS)
    return (back if here.start[back] < until else _last_before(here, until)), until


_WHAT = {COMPUTE: "gpu", COLLECTIVE: "transfer"}


def on_path(dataset: Dataset, found: list[Segment]) -> Floats:
    """How long each rank is on the path in each steady-state step, [ranks, steps] (ns).

    With its host, kernels and copies; not with transfers, which need all members.
    """
    out = np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    for k, line in enumerate(dataset.timelines):
        mine = [s for s in found if s.rank == line.rank and s.what != "transfer"]
        if not mine:
            continue
        covered = union(
            np.asarray([s.begin for s in mine], dtype=np.int64),
            np.asarray([s.end for s in mine], dtype=np.int64),
        )
        begin = dataset.clock.align(line.rank, line.begin)
        each = covered.within(begin, dataset.clock.align(line.rank, line.end))
        inside = np.isin(line.step, dataset.steady_steps)
        out[k, np.searchsorted(dataset.steady_steps, line.step[inside])] = each[inside]
    return out
