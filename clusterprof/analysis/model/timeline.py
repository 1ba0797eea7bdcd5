"""What the ranks' devices did, cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import threads
from clusterprof.align.columns import Ints, called, coded
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.intervals import Axis, Intervals, union
from clusterprof.mapped import release, trim
from clusterprof.tables import KINDS as OF_TABLES
from clusterprof.tables import RankTables

#: codes of `Timelines.kind`
KINDS = OF_TABLES["activity"]
COMPUTE, COLLECTIVE, COPY, MEMSET = range(4)

#: integers of less than 64 bits: there are as many as activities of all ranks
Small = npt.NDArray[Any]


class Timelines:
    """All ranks' activities and steps, one rank after the other, as arrays.

    Each rank is on its own wall clock (ns), and all of them on one `axis`.

    Step k begins at max(its host begin, end of the last activity launched before that begin):
    work that was queued before belongs to the step before, and a GPU that idles at the
    beginning of a step idles in that step. The steps follow each other without a gap; the last
    ends at max(its host end, end of the last activity launched in it), or with that activity
    where the host then drained the device: what follows is the profiler's stop.
    """

    def __init__(self, tables: Sequence[RankTables]) -> None:
        self.tables = tables
        #: where each rank's activities begin, and the last one's end
        self.first = np.cumsum([0, *(t.activity.num_rows for t in tables)])
        #: of each rank: whether its report has steps
        self.has_steps = np.zeros(len(tables), dtype=bool)
        #: and whether it computes and communicates on CPU threads (gloo): there is no GPU
        self.on_host = np.asarray([_on_host(t) for t in tables], dtype=bool)
        #: of each activity: its kind (in KINDS), and the row of the step that launched it, or -1
        self.kind: Small = np.zeros(self.first[-1], dtype=np.int8)
        self.launched_in: Small = np.zeros(self.first[-1], dtype=np.int32)
        steps, count = [np.zeros((6, 0), dtype=np.int64)], 0
        for k, table in enumerate(tables):
            cut, of, self.has_steps[k] = _cut(table)
            steps.append(np.stack([np.full(len(cut[0]), k), *cut]))
            self.launched_in[self.rows(k)] = np.where(of < 0, -1, of + count)
            kinds, kind = coded(table.activity, "kind")
            self.kind[self.rows(k)] = np.asarray([KINDS.index(each) for each in kinds], int)[kind]
            count += len(cut[0])
            release()
        #: of each step: the place of its rank, its number, when its host and its device begin and
        #: end it
        self.rank, self.step, self.host_begin, self.host_end, begin, end = np.concatenate(
            steps, axis=1
        )
        #: the place of the rank of each activity
        self.of: Small = np.repeat(np.arange(len(tables), dtype=np.int32), np.diff(self.first))
        trim()
        #: on the axis
        self.axis = Axis(begin[np.diff(self.rank, prepend=-1) != 0])
        self.begin, self.end = (self.axis.of(self.rank, each) for each in (begin, end))

    def near(self, steps: Sequence[int]) -> Timelines:
        """The same with those activities alone that may show in `steps`.

        Those of each rank, in the order of their starts, from the first to the last that runs in
        these steps or was launched in them, the one before or the one behind. Of a rank that has
        none of them all stay, and so do all where no more than two other steps are known.
        """
        if len(np.unique(self.step)) <= len(steps) + 2:
            return self  # there is hardly anything else
        rows = [self._near(k, steps) for k in range(len(self.tables))]
        out = copy(self)
        out.tables = [
            replace(tables, activity=tables.activity.slice(here.start - first, len(here)))
            for tables, here, first in zip(self.tables, rows, self.first.tolist(), strict=False)
        ]
        out.first = np.cumsum([0, *map(len, rows)])
        out.kind, out.launched_in, out.of = (
            np.concatenate([each[:0], *(each[here.start : here.stop] for here in rows)])
            for each in (self.kind, self.launched_in, self.of)
        )
        return out

    def _near(self, k: int, steps: Sequence[int]) -> range:
        mine, at = self.rows(k), self.steps_of(k, steps)
        if not len(at):
            return range(mine.start, mine.stop)
        launched, (start, stop) = self.launched_in[mine], self.on_axis((0, 1), k, k + 1)
        near = (launched >= at[0] - 1) & (launched <= at[-1] + 1)
        # a host is steps ahead of its device
        begin = self.axis.of(k, self.host_begin[at[0]])
        near |= (stop > begin) & (start < self.end[at[-1]])
        found = mine.start + np.flatnonzero(near)
        return range(found[0], found[-1] + 1) if len(found) else range(0)

    def rows(self, k: int, until: int | None = None) -> slice:
        """Where the k-th rank's activities are, or those of all from it to before `until`."""
        return slice(int(self.first[k]), int(self.first[k + 1 if until is None else until]))

    def blocks(self, most: int = 500_000) -> list[tuple[int, int]]:
        """All ranks' places in ranges that begin within so many activities.

        What is computed of each activity of a range takes 150 bytes meanwhile.
        """
        return threads.blocks(self.first, most)

    def ran(self, k: int, until: int, *kinds: Sequence[int]) -> list[Intervals]:
        """When anything ran on the devices of the ranks `k` to before `until`, for each `kinds`."""
        start, stop, kind = (*self.on_axis((0, 1), k, until), self.kind[self.rows(k, until)])
        chosen = (np.isin(kind, each) for each in kinds)
        return [union(start[each], stop[each]) for each in chosen]

    def on_axis(self, which: Sequence[int], k: int, until: int) -> Ints:
        """Those of the `wall_times` of these ranks' activities, on the axis."""
        rows = self.rows(k, until)
        out = np.empty((len(which), rows.stop - rows.start), dtype=np.int64)
        for place in range(k, until):
            here = slice(self.first[place] - rows.start, self.first[place + 1] - rows.start)
            times = wall_times(self.tables[place])
            for line, each in zip(out, which, strict=True):
                line[here] = self.axis.of(place, times[each])
            release()
        return out

    def steps_of(self, k: int, steps: Sequence[int]) -> Ints:
        """The rows of those of `steps` that the k-th rank has."""
        return np.flatnonzero((self.rank == k) & np.isin(self.step, steps))


def wall_times(tables: RankTables) -> tuple[Ints, ...]:
    """When each activity starts and stops, and its launch does, on its rank's own wall clock.

    What a report has no launch of was launched by its start, and before what follows it on its
    stream: so that work queued before the window's begin is not taken for a step's own.
    """
    names = ("start_ns", "end_ns", "launch_start_ns", "launch_end_ns")
    start, stop, *launches = (tables.activity[name] for name in names)
    return start.to_numpy(), stop.to_numpy(), *(_launched(tables, start, each) for each in launches)


def _launched(tables: RankTables, start: pa.ChunkedArray, launch: pa.ChunkedArray) -> Ints:
    """Launches, the unknown ones as late as can be: a stream runs in the order of its launches."""
    if not launch.null_count:
        return np.asarray(launch.to_numpy())
    known = np.asarray(pc.is_valid(launch).to_numpy())
    stream = tables.activity["stream"].to_numpy()
    out = pc.coalesce(launch, start).to_numpy().copy()
    for one in np.unique(stream[~known]):
        rows = np.flatnonzero(stream == one)[::-1]
        earliest = np.minimum.accumulate(np.where(known[rows], out[rows], np.iinfo(np.int64).max))
        out[rows] = np.where(known[rows], out[rows], np.minimum(out[rows], earliest))
    return np.asarray(out)


def _on_host(tables: RankTables) -> bool:
    correlation = tables.activity["correlation"]
    return tables.info.backend == "gloo" or not correlation.null_count < len(correlation)


def _cut(tables: RankTables) -> tuple[tuple[Ints, ...], Ints, bool]:
    """Cut one rank's report into steps. Assumes that `steps` are the program's own, in order.

    Returns of each step its number, begin and end by the host, begin and end by the device; of each
    activity the place of the step that launched it, or -1; and whether the report has steps.
    """
    start, stop, launch, launch_end = wall_times(tables)
    step, host_begin, host_end = _host_steps(tables, launch)
    has_steps = bool(len(step))
    if not has_steps:
        first = start[:1].min(initial=tables.info.begin_ns or 2**62)
        last = stop.max(initial=tables.info.end_ns)
        # one step, number 0, stands for the whole window
        step = np.zeros(1, dtype=np.int64)
        host_begin = np.array([min(first, last)], dtype=np.int64)
        host_end = np.array([last], dtype=np.int64)
    drains = _drains(tables)
    kept = _until_the_stop(drains[0], host_begin, host_end)
    step, host_begin, host_end = step[:kept], host_begin[:kept], host_end[:kept]
    # a window's stop waits for an idle device with nothing launched behind it, and takes 10 ms and
    # more after it; no step's time is that
    last = (drains[0] >= launch_end.max(initial=0)) & (drains[1] >= stop.max(initial=0))
    drained = int(drains[0][last].min(initial=host_end[-1]))
    if len(stop) and host_begin[-1] < drained < host_end[-1]:
        host_end = np.r_[host_end[:-1], drained]
    begin, end, of = _device_steps(host_begin, host_end, launch, stop)
    return (step, host_begin, host_end, begin, end), of, has_steps


def _host_steps(tables: RankTables, launch: Ints) -> tuple[Ints, Ints, Ints]:
    """Steps of which the report holds something; fragments at the window's edges left out.

    A fragment has less than half of the activities that steps usually have.
    """
    table = tables.steps
    step, begin, end = (table[c].to_numpy() for c in ("step", "begin_ns", "end_ns"))
    ordered = np.sort(launch)
    count = np.searchsorted(ordered, np.r_[begin[1:], end[-1:]]) - np.searchsorted(ordered, begin)
    inside = np.flatnonzero(count > 0)
    if not len(inside):
        return step[:0], begin[:0], end[:0]
    first, last = inside[0], inside[-1]
    most = limits.HALF * float(np.median(count[first : last + 1]))
    if last - first >= 2:
        first += int(count[first] < most)
        last -= int(count[last] < most)
    chosen = slice(first, last + 1)
    return step[chosen], begin[chosen], end[chosen]


def _drains(tables: RankTables) -> tuple[Ints, Ints]:
    """The calls in which the host waited until its device was idle: when they began and ended."""
    calls = tables.host_calls
    rows = np.flatnonzero(called(calls, r"(?i)devicesynchronize"))
    return calls["start_ns"].to_numpy()[rows], calls["end_ns"].to_numpy()[rows]


def _until_the_stop(start: Ints, host_begin: Ints, host_end: Ints) -> int:
    """How many steps there are before the one place between two steps where the host drains.

    A window's stop drains the device between two steps; the report may hold some steps after it,
    which begin with empty queues. Programs that drain between their steps do so at each of them.
    """
    after = np.searchsorted(host_end, start, side="right")
    inside = (after > 0) & (after < len(host_begin))
    after, start = after[inside], start[inside]
    between = np.unique(after[start < host_begin[after]])
    return int(between[0]) if len(between) == 1 else len(host_begin)


def _device_steps(
    host_begin: Ints, host_end: Ints, launch: Ints, stop: Ints
) -> tuple[Ints, Ints, Ints]:
    order = np.argsort(launch, kind="stable")
    reach = np.maximum.accumulate(np.r_[-(2**63), stop[order]])
    begin = np.maximum(host_begin, reach[np.searchsorted(launch[order], host_begin)])
    begin = np.maximum.accumulate(begin)
    of = np.searchsorted(host_begin, launch, side="right") - 1
    of[launch > host_end[-1]] = -1
    mine = of == len(host_begin) - 1
    last = stop[mine].max(initial=max(host_end[-1], begin[-1]))
    return begin, np.r_[begin[1:], last], of
