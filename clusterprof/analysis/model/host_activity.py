"""What each rank's host did: the calls it waited in, and those that name a cause."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from clusterprof.align.columns import coded, matched
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Ints, once
from clusterprof.analysis.model.graph import ranges
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE
from clusterprof.mapped import release
from clusterprof.tables import GARBAGE

#: CUDA calls that wait for the device by their nature, and from which length on they do
WAITS = r"(?i)synchronize|memcpy|memset|cudafree|eventquery"
#: a launch waits where 1,024 are queued (in the recordings nine in ten of the launches
#: longer than 50 µs begin with 1,024 to 1,066 that have not ended, and hardly any with fewer)
_QUEUE = 1_000


class HostCalls:
    """The hosts' calls that are looked for, one rank after the other, on the reference clock (ns).

    Those of CUDA that are long, those of `NAMED`, and operators where there is no GPU: a report
    has ten times as many that nothing asks for.
    """

    def __init__(self, dataset: Dataset) -> None:
        chosen = [
            _looked_for(tables.host_calls, on_host=bool(on_host))
            for tables, on_host in zip(dataset.tables, dataset.timelines.on_host, strict=True)
        ]
        self.rank = np.repeat(np.arange(len(chosen)), [calls.num_rows for calls, _ in chosen])
        #: whether each rank's report has calls of CUDA
        self.has_cuda = np.asarray([cuda for _, cuda in chosen], dtype=bool)
        table = pa.concat_tables([calls for calls, _ in chosen])
        times = np.stack([table[name].to_numpy() for name in ("start_ns", "end_ns")])
        self.start, self.stop = dataset.aligned(self.rank, times)
        self.kinds, self.kind = coded(table, "kind")
        self.names, self.name = coded(table, "name")

    def called(self, kind: str, pattern: str) -> Bools:
        """Which calls are of a kind, with a name that a regular expression finds something in."""
        of_kind = np.asarray([one == kind for one in self.kinds], dtype=bool)
        return np.asarray(of_kind[self.kind] & matched(self.names, pattern)[self.name])


def _looked_for(calls: pa.Table, *, on_host: bool) -> tuple[pa.Table, bool]:
    """The rows of one rank's calls that `HostCalls` has, and whether there are any of CUDA."""
    (kinds, kind), (names, name) = coded(calls, "kind"), coded(calls, "name")
    of = {one: np.asarray([each == one for each in kinds], dtype=bool)[kind] for one in set(kinds)}
    none = np.zeros(len(kind), dtype=bool)
    cuda, length = of.get("cuda", none), calls["end_ns"].to_numpy() - calls["start_ns"].to_numpy()
    # clocks differ in pace by millionths: what is long on one is half as long on any
    wanted = cuda & (2 * length >= limits.WAITING_CALL_NS)
    if on_host:
        wanted = wanted | of.get("op", none)
    for one, pattern in (each for several in NAMED.values() for each in several):
        if one in of:
            wanted = wanted | (of[one] & matched(names, pattern)[name])
    columns = calls.select(["start_ns", "end_ns", "kind", "name"])
    chosen = columns.take(pa.array(np.flatnonzero(wanted))), bool(cuda.any())
    release()
    return chosen


host_calls = once(HostCalls)


def wait_calls(dataset: Dataset, k: int, until: int) -> tuple[Ints, Ints, Ints]:
    """Calls in which hosts of the ranks `k` to before `until` may have waited for their devices.

    A long CUDA call that waits by its nature, a launch into a full queue, and any that is too long;
    calls that overlap are one; on gloo collectives. Returns the rank's place, begin and end
    (reference clock).
    """
    a, calls, axis = dataset.activities, host_calls(dataset), dataset.axis
    rows, waits = long_calls(dataset)
    here = slice(*np.searchsorted(calls.rank[rows], (k, until)))
    rows, waits = rows[here], waits[here].copy()
    begin, end = (axis.of(calls.rank[rows], t[rows]) for t in (calls.start, calls.stop))
    waits |= _queued(dataset, k, until, begin) >= _QUEUE
    found = union(begin[waits], end[waits])
    (rank, start), (_, stop) = axis.back(found.start), axis.back(found.end)
    # a host without CUDA calls waits in its collectives, in each of several at once
    mine = a.lines.rows(k, until)
    own = mine.start + np.flatnonzero((a.kind[mine] == COLLECTIVE) & ~calls.has_cuda[a.rank[mine]])
    return np.r_[rank, a.rank[own]], np.r_[start, a.start[own]], np.r_[stop, ends(dataset)[own]]


@once
def long_calls(dataset: Dataset) -> tuple[Ints, Bools]:
    """The CUDA calls that are long, and which of them wait by their nature or their length."""
    calls = host_calls(dataset)
    cuda, length = calls.called("cuda", ""), calls.stop - calls.start
    rows = np.flatnonzero(cuda & (length >= limits.WAITING_CALL_NS))
    return rows, calls.called("cuda", WAITS)[rows] | (length[rows] >= limits.PAUSE_NS)


def _queued(dataset: Dataset, k: int, until: int, time: Ints) -> Ints:
    """How many launches of a rank of `k` to before `until` have not ended at times on the axis."""
    a, axis = dataset.activities, dataset.axis
    rows = a.lines.rows(k, until)
    launched, stop = (axis.of(a.rank[rows], t) for t in (a.launches(k, until)[0], a.stop[rows]))
    order = np.argsort(launched, kind="stable")
    launched, stop = launched[order], stop[order]
    fresh = np.flatnonzero(np.diff(launched, prepend=-1))
    if not len(fresh):
        return np.zeros_like(time)
    finished = np.sort(np.maximum.reduceat(stop, fresh))
    return np.searchsorted(launched[fresh], time) - np.searchsorted(finished, time)


@once
def ends(dataset: Dataset) -> Ints:
    """When each activity ended, [activities] (reference clock); on gloo as its host went on.

    A thread of gloo's stamps a call's end after it has woken the host: at load milliseconds later,
    when the host may be in its next step. So the end is the stamp, or the end of one of the gaps
    between what the host did during the call: of that which it waited in. That is the one which
    leaves the least time unexplained, as the host's pauses in the other gaps and as lateness.
    """
    a, axis, d = dataset.activities, dataset.axis, dataset.timelines
    if not d.on_host.any():
        return a.stop
    on_host, calls = d.on_host[a.rank], host_calls(dataset)
    rows = np.flatnonzero(on_host & (a.kind == COLLECTIVE) & (a.stop > a.start))
    out: Ints = a.stop.copy()
    if not len(rows):
        return out
    does, op = on_host & (a.kind == COMPUTE), calls.called("op", "")
    of, marks = np.r_[d.rank, d.rank], np.r_[d.host_begin, d.host_end]
    marks = axis.of(of, dataset.aligned(of, marks))
    # steps, and operators that hand a call over or wait for one, are no work: they only begin
    began = np.r_[axis.of(calls.rank[op], calls.start[op]), marks]
    done = union(
        np.r_[axis.of(a.rank[does], a.start[does]), began],
        np.r_[axis.of(a.rank[does], a.stop[does]), began + 1],
    )
    start, stop = (axis.of(a.rank[rows], t[rows]) for t in (a.start, a.stop))
    # gap i lies between what the host did i-th, from 0, and what it did before
    first = np.searchsorted(done.start, start, side="right")
    count = np.maximum(np.searchsorted(done.end, stop) + 1 - first, 0)
    call, gap = np.repeat(np.arange(len(rows)), count), ranges(first, count)
    until = np.minimum(np.r_[done.start, 2**62][gap], stop[call])
    since = np.maximum(np.r_[-1, done.end][gap], start[call])
    explained = (until - since) - (stop[call] - until)
    best = np.lexsort((explained, call))
    best = best[np.diff(call[best], append=-1) != 0]
    best = best[explained[best] > 0]
    out[rows[call[best]]] -= (stop[call] - until)[best]
    return out


#: Python's garbage collector, as the agent notes it
COLLECTING = f"^{GARBAGE}"
#: the name of what the host does there
COLLECTOR = "the garbage collector"

#: the names that nsys and others give a wait for Python's interpreter lock
GIL_WAIT = r"(?i)wait.*gil"

#: calls by what they cost the host, in the order in which they are looked for: kind and name
NAMED = {
    "host.gil": (("python", GIL_WAIT),),
    "host.gc": (("python", COLLECTING),),
    "input.stall": (
        ("range", r"(?i)^(data|input|batch|fetch|dataload)|dataloader|next_batch|get_batch"),
        ("op", "(?i)dataloader"),
    ),
}


def named_time(dataset: Dataset, place: Ints, begin: Ints, end: Ints) -> dict[str, Ints]:
    """How much of each span lies in calls of each code of `NAMED`, each ns in one of them.

    `place` is each span's rank; `begin` and `end` are on the reference rank's clock.
    """
    calls, axis = host_calls(dataset), dataset.axis
    before = np.broadcast_to(np.int64(0), place.shape)
    out, chosen = dict.fromkeys(NAMED, before), np.zeros(len(calls.rank), dtype=bool)
    for code, wanted in NAMED.items():
        mine = np.logical_or.reduce([calls.called(*one) for one in wanted])
        if mine.any():
            chosen |= mine
            spans = (axis.of(calls.rank[chosen], t[chosen]) for t in (calls.start, calls.stop))
            covered = union(*spans).within(axis.of(place, begin), axis.of(place, end))
            out[code], before = covered - before, covered
    return out


def quiet(dataset: Dataset, place: Ints, begin: Ints, end: Ints) -> Ints:
    """How much of each span are pauses in which nothing that its host records begins or ends (ns).

    `place` is each span's rank; `begin` and `end` are on the reference rank's clock, and no two
    spans of a rank overlap.
    """
    out = np.zeros_like(begin)
    for k in np.unique(place).tolist():
        mine, calls = place == k, dataset.tables[k].host_calls
        marks = np.r_[calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()]
        marks = dataset.aligned(np.full(len(marks), k), marks)
        times = np.unique(np.r_[marks, begin[mine], end[mine]])
        edges = np.searchsorted(times, np.stack((begin[mine], end[mine]), axis=1))
        apart = np.diff(times, append=times[-1])
        apart[apart < limits.PAUSE_NS] = 0
        out[mine] = np.add.reduceat(apart, edges.ravel())[::2]
    return out
