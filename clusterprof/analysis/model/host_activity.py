"""What each rank's host did: the calls it waited in, and those that name a cause."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pyarrow as pa

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE, Intervals, union
from clusterprof.columns import (
    Bools,
    HostCallRows,
    Ints,
    RankPlaces,
    Stretches,
    coded,
    first_after,
    first_at_or_after,
    greatest_by,
    group_of_rows,
    matched,
    order_by,
    places,
    ranges,
    rows_between,
    where_known,
)
from clusterprof.mapped import release
from clusterprof.tables import GARBAGE

#: ranges of whole steps, of communication, and our own: they do not tell what the program does
STEP_RANGES = r"^(step\b|ProfilerStep|nccl|gloo|clusterprof:)"
#: CUDA calls that wait for the device by their nature, and from which length on they do
WAITS = r"(?i)synchronize|memcpy|memset|cudafree|eventquery"


class HostCalls:
    """The hosts' calls that are looked for, one rank after the other, on the axis of all ranks.

    Those of CUDA that are long, those of `NAMED`, and operators where there is no GPU: a report
    has ten times as many that nothing asks for.
    """

    def __init__(self, dataset: Dataset) -> None:
        tables = []
        #: whether each rank's report has calls of CUDA
        self.has_cuda = np.zeros(len(dataset.tables), dtype=bool)
        for k, report in enumerate(dataset.tables):
            calls = report.host_calls.select(["start_ns", "end_ns", "kind", "name"])
            start, stop = (calls[name].to_numpy() for name in ("start_ns", "end_ns"))
            cuda = _called(calls, ("cuda", ""))
            # clocks differ in pace by millionths: what is long on one is half as long on any
            wanted = cuda & (2 * (stop - start) >= limits.WAITING_CALL_NS)
            operators = [("op", "")] if dataset.timelines.on_host[k] else []
            wanted |= _called(calls, *chain(*NAMED.values(), operators))
            tables.append(calls.take(pa.array(np.flatnonzero(wanted))))
            self.has_cuda[k] = cuda.any()
            release()
        self.rank: RankPlaces = group_of_rows([table.num_rows for table in tables])
        self.table = pa.concat_tables(tables)
        times = np.stack([self.table[name].to_numpy() for name in ("start_ns", "end_ns")])
        self.start, self.stop = dataset.axis.of(self.rank, dataset.aligned(self.rank, times))


def _called(calls: pa.Table, *wanted: tuple[str, str]) -> Bools:
    """Which calls are of one of these kinds, with a name in which its pattern matches."""
    (kinds, kind), (names, name) = coded(calls, "kind"), coded(calls, "name")
    named = np.zeros(calls.num_rows, dtype=bool)
    for of, pattern in wanted:
        named |= np.equal(kinds, of)[kind] & matched(names, pattern)[name]
    return named


host_calls = once(HostCalls)


def wait_calls(dataset: Dataset, k: int, until: int) -> tuple[RankPlaces, Ints, Ints]:
    """Calls in which hosts of the ranks `k` to before `until` may have waited for their devices.

    A long CUDA call that waits by its nature, a launch into a full queue, and any that is too long;
    calls that overlap are one; on gloo collectives. Returns the rank, begin and end (reference
    clock).
    """
    a, calls, axis = dataset.activities, host_calls(dataset), dataset.axis
    rows, waits = long_calls(dataset)
    of_ranks = rows_between(calls.rank[rows], k, until)
    rows, waits = rows[of_ranks], waits[of_ranks].copy()
    begin, end = calls.start[rows], calls.stop[rows]
    # a launch waits where 1,024 are queued (in the recordings nine in ten of those longer than
    # 50 µs begin with 1,024 to 1,066 that have not ended, and hardly any with fewer)
    among = a.lines.rows(k, until)
    launched, stop = (axis.of(a.rank[among], t) for t in (a.launches(k, until)[0], a.stop[among]))
    launched, launch = places(launched)
    finished = np.sort(greatest_by(launch, stop, np.zeros_like(launched)))
    queued = first_at_or_after(launched, begin) - first_at_or_after(finished, begin)
    waits |= queued >= 1_000
    waited = union(begin[waits], end[waits])
    (rank, start), (_, stop) = axis.back(waited.start), axis.back(waited.end)
    # a host without CUDA calls waits in its collectives, in each of several at once
    on_threads = (a.kind[among] == COLLECTIVE) & ~calls.has_cuda[a.rank[among]]
    own = among.start + np.flatnonzero(on_threads)
    pairs = (rank, a.rank), (start, a.start), (stop, ends(dataset))
    ranks, begins, stops = (np.concatenate((waits, column[own])) for waits, column in pairs)
    return ranks, begins, stops


@once
def long_calls(dataset: Dataset) -> tuple[HostCallRows, Bools]:
    """The CUDA calls that are long, and which of them wait by their nature or their length."""
    calls = host_calls(dataset)
    length = calls.stop - calls.start
    rows = np.flatnonzero(_called(calls.table, ("cuda", "")) & (length >= limits.WAITING_CALL_NS))
    return rows, _called(calls.table, ("cuda", WAITS))[rows] | (length[rows] >= limits.PAUSE_NS)


@once
def ends(dataset: Dataset) -> Ints:
    """When each activity ended, [activities] (reference clock); on gloo as its host went on.

    A thread of gloo's stamps a call's end after it has woken the host: at load milliseconds later,
    when the host may be in its next step. So the end is the stamp, or the end of one of the gaps
    between what the host did during the call: of that which it waited in. That is the one which
    leaves the least time unexplained, as the host's pauses in the other gaps and as lateness.
    """
    a, axis, d = dataset.activities, dataset.axis, dataset.timelines
    on_host, calls = d.on_host[a.rank], host_calls(dataset)
    end: Ints = a.stop.copy()
    rows = np.flatnonzero(on_host & (a.kind == COLLECTIVE) & (a.stop > a.start))
    if not len(rows):
        return end
    rank, marks = np.tile(d.rank, 2), np.concatenate((d.host_begin, d.host_end))
    marks = axis.of(rank, dataset.aligned(rank, marks))
    # steps, and operators that hand a call over or wait for one, are no work: they only begin
    began = np.concatenate((calls.start[_called(calls.table, ("op", ""))], marks))
    does = on_host & (a.kind == COMPUTE)
    work = union(*(axis.of(a.rank[does], times[does]) for times in (a.start, a.stop)))
    done = work | union(began, began + 1)
    start, stop = (axis.of(a.rank[rows], times[rows]) for times in (a.start, a.stop))
    # gap i lies between what the host did i-th, from 0, and what it did before
    first = first_after(done.start, start)
    count = np.maximum(first_at_or_after(done.end, stop) + 1 - first, 0)
    call, gap = group_of_rows(count), ranges(first, count)
    until = np.minimum(where_known(done.start, gap, 2**62), stop[call])
    since = np.maximum(where_known(done.end, gap - 1, -1), start[call])
    explained = (until - since) - (stop[call] - until)
    best = order_by(call, explained)
    best = best[Stretches.of(call[best]).last]
    best = best[explained[best] > 0]
    end[rows[call[best]]] -= (stop[call] - until)[best]
    return end


#: Python's garbage collector, as the agent notes it, and the name of what the host does there
COLLECTING, COLLECTOR = f"^{GARBAGE}", "the garbage collector"
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


def named_time(dataset: Dataset, place: RankPlaces, begin: Ints, end: Ints) -> dict[str, Ints]:
    """How much of each span lies in calls of each code of `NAMED`, each ns in one of them.

    `place` is each span's rank; `begin` and `end` are on the reference rank's clock.
    """
    calls = host_calls(dataset)
    begin, end = (dataset.axis.of(place, time) for time in (begin, end))
    named, before, times = np.zeros(len(calls.rank), dtype=bool), np.zeros_like(begin), {}
    for code, wanted in NAMED.items():
        named |= _called(calls.table, *wanted)
        covered = union(calls.start[named], calls.stop[named]).within(begin, end)
        times[code], before = covered - before, covered
    return times


def quiet(dataset: Dataset, place: RankPlaces, begin: Ints, end: Ints) -> Ints:
    """How much of each span are pauses in which nothing that its host records begins or ends (ns).

    `place` is each span's rank; `begin` and `end` are on the reference rank's clock, and no two
    spans of a rank overlap.
    """
    quiet_ns = np.zeros_like(begin)
    for k in np.unique(place).tolist():
        spans, calls = place == k, dataset.tables[k].host_calls
        marks = np.concatenate([calls[name].to_numpy() for name in ("start_ns", "end_ns")])
        marks = dataset.clock.align(dataset.ranks[k], marks)
        times = np.unique(np.concatenate((marks, begin[spans], end[spans])))
        paused = np.diff(times) >= limits.PAUSE_NS
        pauses = Intervals(times[:-1][paused], times[1:][paused])
        quiet_ns[spans] = pauses.within(begin[spans], end[spans])
    return quiet_ns
