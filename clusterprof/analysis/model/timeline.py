"""What the ranks' devices did on one axis of time, cut into steps; which steps are evidence."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from clusterprof import threads
from clusterprof.align.time_stamps import issue_times
from clusterprof.analysis.model import limits
from clusterprof.columns import (
    Ints,
    RankPlaces,
    Small,
    StepNumbers,
    StepPlaces,
    StepRows,
    Stretches,
    begins,
    called,
    coded,
    connected,
    count_by,
    first_after,
    first_at_or_after,
    greatest_by,
    group_of_rows,
    integers,
    last_at_or_before,
    order_by,
    places,
    preceding,
    row_of,
    sum_by,
    texts,
)
from clusterprof.mapped import release, trim
from clusterprof.tables import KINDS as OF_TABLES, RankTables

#: codes of `Timelines.kind`
KINDS = OF_TABLES["activity"]
COMPUTE, COLLECTIVE, COPY, MEMSET = range(4)
#: so many steps tell a job's pace. A window of more steady-state ones is judged by the most typical
#: of them on end: every step is replayed for each what-if, and 5 to 10 are enough. Before a window
#: 32 would reach back into other paces (`pairs/small-late-host`: 59 ms a step, with 20 of them 54)
TYPICAL_STEPS = 20


# --- sets of intervals, and how much of a span they cover: no loop over intervals


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals in order."""

    start: Ints
    end: Ints

    def __or__(self, other: Intervals) -> Intervals:
        """Return what one of both covers."""
        start = np.concatenate((self.start, other.start))
        return union(start, np.concatenate((self.end, other.end)))

    def within(self, begin: Ints, end: Ints) -> Ints:
        """Return for each span `begin`..`end` how much of it is covered."""
        if not len(self.start):
            return np.zeros(np.shape(begin), dtype=np.int64)
        # how much is covered before each interval, and then before each time
        length = self.end - self.start
        before, covered = np.cumsum(length) - length, []
        for times in (begin, end):
            row = last_at_or_before(self.start, times)
            inside = np.minimum(times, self.end[row]) - self.start[row]
            covered.append(np.where(row < 0, 0, before[row] + inside))
        return covered[1] - covered[0]


def union(start: Ints, end: Ints) -> Intervals:
    """Return the union of intervals that may overlap and stand in any order."""
    keep = end > start
    if not keep.all():
        start, end = start[keep], end[keep]
    if not len(start):
        return Intervals(start, end)
    if (start[1:] < start[:-1]).any():  # most come in order
        order = order_by(start)
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    apart = start[1:] > reach[:-1]
    return Intervals(start[np.append(True, apart)], reach[np.append(apart, True)])


@dataclass(frozen=True)
class Axis:
    """One axis for all ranks: the times of each lie behind those of the rank before it.

    So one search or one `union` serves all ranks. `origin` is a time of each rank, around which
    its others lie: with 4,096 ranks those further off than six days count as six days off.
    """

    origin: Ints

    @property
    def width(self) -> int:
        """What each rank has of the axis (ns)."""
        return 2**62 // max(len(self.origin), 1)

    def of(self, rank: RankPlaces | int, time: Ints) -> Ints:
        """Return the place on the axis of each `time` (ns) of a rank."""
        half = self.width // 2
        # in place: there are as many as activities of all ranks
        since = np.asarray(time - self.origin[rank])
        np.clip(since, -half, self.width - half - 1, out=since)
        since += np.multiply(rank, self.width, dtype=np.int64)
        since += half
        return since

    def back(self, place: Ints) -> tuple[RankPlaces, Ints]:
        """Return the rank and the time of each place on the axis."""
        rank = place // self.width
        return rank, place % self.width - self.width // 2 + self.origin[rank]


# --- activities and steps


class Timelines:
    """All ranks' activities and steps, one rank after the other, as arrays.

    Each rank is on its own wall clock (ns), and all of them on one `axis`.

    Step k begins at max(its host begin, end of the last activity launched before that begin):
    work that was queued before belongs to the step before, and a GPU that idles at the
    beginning of a step idles in that step. The steps follow each other without a gap; the last
    ends at max(its host end, end of the last activity launched in it), or with that activity
    where the host then drained the device: what follows is the profiler's stop.
    """

    rank: RankPlaces
    step: StepNumbers

    def __init__(self, tables: Sequence[RankTables]) -> None:
        self.tables = tables
        #: where each rank's activities begin, and the last one's end
        self.first = np.cumsum([0, *(t.activity.num_rows for t in tables)])
        #: of each rank: whether its report has steps
        self.has_steps = np.zeros(len(tables), dtype=bool)
        #: and whether it computes and communicates on CPU threads (gloo): there is no GPU
        self.on_host = np.zeros(len(tables), dtype=bool)
        #: of each activity: its kind (in KINDS), and the row of the step that launched it, or -1
        self.kind: Small = np.zeros(self.first[-1], dtype=np.int8)
        self.launched_in: StepRows = np.zeros(self.first[-1], dtype=np.int32)
        steps, count = [np.zeros((6, 0), dtype=np.int64)], 0
        for k, table in enumerate(tables):
            correlation = table.activity["correlation"]
            no_launches = correlation.null_count == len(correlation)
            self.on_host[k] = table.info.backend == "gloo" or no_launches
            cut, launched_in, self.has_steps[k] = _cut(table)
            steps.append(np.stack([np.full(len(cut[0]), k), *cut]))
            self.launched_in[self.rows(k)] = np.where(launched_in < 0, -1, launched_in + count)
            kinds, kind = coded(table.activity, "kind")
            self.kind[self.rows(k)] = np.asarray([KINDS.index(each) for each in kinds], int)[kind]
            count += len(cut[0])
            release()
        columns = np.concatenate(steps, axis=1)
        #: of each step: its rank, its number, when its host and its device begin and end it, the
        #: last two on the axis
        self.rank, self.step, self.host_begin, self.host_end, begin, end = columns
        self.axis = Axis(begin[begins(self.rank)])
        self.begin, self.end = (self.axis.of(self.rank, times) for times in (begin, end))
        #: the place of the rank of each activity
        self.of: RankPlaces = group_of_rows(np.diff(self.first), np.int32)
        trim()

    def near(self, steps: Sequence[int]) -> Timelines:
        """The same with those activities alone that may show in `steps`.

        Those of each rank, in the order of their starts, from the first to the last that runs in
        these steps or was launched in them, the one before or the one behind. Of a rank that has
        none of them all stay, and so do all where no more than two other steps are known.
        """
        if len(np.unique(self.step)) <= len(steps) + 2:
            return self  # there is hardly anything else
        rows = []
        for k in range(len(self.tables)):
            kept, in_steps = self.rows(k), self.steps_of(k, steps)
            if len(in_steps):
                first, last = in_steps[[0, -1]].tolist()
                launched, (start, stop) = self.launched_in[kept], self.on_axis((0, 1), k, k + 1)
                # a host is steps ahead of its device
                begin = self.axis.of(k, self.host_begin[first])
                near = (stop > begin) & (start < self.end[last])
                near |= (launched >= first - 1) & (launched <= last + 1)
                shown = np.flatnonzero(near)
                low, high = (shown[0], shown[-1] + 1) if len(shown) else (0, 0)
                kept = slice(kept.start + int(low), kept.start + int(high))
            rows.append(kept)
        shorter = copy(self)
        shorter.tables = [
            replace(tables, activity=tables.activity[kept.start - first : kept.stop - first])
            for tables, kept, first in zip(self.tables, rows, self.first.tolist(), strict=False)
        ]
        shorter.first = np.cumsum([0, *(kept.stop - kept.start for kept in rows)])
        shorter.kind, shorter.launched_in, shorter.of = (
            np.concatenate([column[:0], *(column[kept] for kept in rows)])
            for column in (self.kind, self.launched_in, self.of)
        )
        return shorter

    def rows(self, k: int, until: int | None = None) -> slice:
        """Where the k-th rank's activities are, or those of all from it to before `until`."""
        return slice(int(self.first[k]), int(self.first[k + 1 if until is None else until]))

    def blocks(self, most: int = 500_000) -> list[tuple[int, int]]:
        """All ranks' places in ranges that begin within so many activities, of 150 bytes each."""
        return threads.blocks(self.first, most)

    def ran(self, k: int, until: int, *kinds: Sequence[int]) -> list[Intervals]:
        """When anything ran on the devices of the ranks `k` to before `until`, for each `kinds`."""
        start, stop, kind = (*self.on_axis((0, 1), k, until), self.kind[self.rows(k, until)])
        chosen = (np.isin(kind, each) for each in kinds)
        return [union(start[each], stop[each]) for each in chosen]

    def on_axis(self, which: Sequence[int], k: int, until: int) -> Ints:
        """Those of the `wall_times` of these ranks' activities, on the axis."""
        rows = self.rows(k, until)
        on_axis = np.empty((len(which), rows.stop - rows.start), dtype=np.int64)
        bounds = self.first - rows.start
        for rank in range(k, until):
            times = wall_times(self.tables[rank])
            for line, column in zip(on_axis, which, strict=True):
                line[bounds[rank] : bounds[rank + 1]] = self.axis.of(rank, times[column])
            release()
        return on_axis

    def steps_of(self, k: int, steps: Sequence[int]) -> StepRows:
        """Those of `steps` that the k-th rank has."""
        return np.flatnonzero((self.rank == k) & np.isin(self.step, steps))


def wall_times(tables: RankTables) -> tuple[Ints, ...]:
    """When each activity starts and stops, and its launch does, on its rank's own wall clock.

    What a report has no launch of was launched by its start, and before what follows it on its
    stream: so that work queued before the window's begin is not taken for a step's own.
    """
    names = ("start_ns", "end_ns", "launch_start_ns", "launch_end_ns", "stream")
    start, stop, *launches, stream = (integers(tables.activity, name) for name in names)
    return start, stop, *(issue_times(launch, start, stream) for launch in launches)


def _cut(tables: RankTables) -> tuple[Ints, StepPlaces, bool]:
    """Cut one rank's report into steps. Assumes that `steps` are the program's own, in order.

    Returns each step's number, and begin and end by the host and by the device, [5, steps]; of each
    activity the place of the step that launched it, or -1; and whether the report has steps: else
    one of number 0 stands for the whole window.
    """
    start, stop, launch, launch_end = wall_times(tables)
    steps = _host_steps(tables, launch)
    has_steps = bool(steps.size)
    if not has_steps:
        first = start[:1].min(initial=tables.info.begin_ns or 2**62)
        last = stop.max(initial=tables.info.end_ns)
        steps = np.array([[0], [min(first, last)], [last]])
    # when the host began to wait until its device was idle, and when it was
    drains = np.flatnonzero(called(tables.host_calls, r"(?i)devicesynchronize"))
    drain, idle = (tables.host_calls[name].to_numpy()[drains] for name in ("start_ns", "end_ns"))
    # A window's stop drains the device between two steps; the report may hold some steps after it,
    # which begin with empty queues. Programs that drain between their steps do so at each of them.
    begun, ended = (first_after(times, drain) for times in steps[1:])
    between = np.unique(ended[(ended == begun) & (ended > 0) & (ended < steps.shape[1])])
    if len(between) == 1:
        steps = steps[:, : between[0]]
    # It waits for an idle device with nothing launched behind it, and takes 10 ms and more after
    # it; no step's time is that.
    at_the_end = (drain >= launch_end.max(initial=0)) & (idle >= stop.max(initial=0))
    drained = drain[at_the_end].min(initial=steps[2, -1])
    if len(stop) and steps[1, -1] < drained:
        steps[2, -1] = drained
    _, begin, end = steps
    launched_in = last_at_or_before(begin, launch)
    launched_in[launch > end[-1]] = len(begin)
    # until when what was launched before the first step runs, and what was in each, and after them
    runs_until = greatest_by(launched_in + 1, stop, np.full(len(begin) + 2, -(2**63)))
    on_device = np.maximum(begin, np.maximum.accumulate(runs_until)[:-2])
    ends = np.append(on_device[1:], max(runs_until[-2], end[-1], on_device[-1]))
    launched_in[launched_in == len(begin)] = -1
    return np.stack([*steps, on_device, ends]), launched_in, has_steps


def _host_steps(tables: RankTables, launch: Ints) -> Ints:
    """Number, begin and end [3, steps] of the steps of which the report holds something.

    Fragments at the window's edges, with less than half of the usual activities, are left out.
    """
    steps = np.stack([tables.steps[name].to_numpy() for name in ("step", "begin_ns", "end_ns")])
    bounds = np.append(steps[1], steps[2, -1:])
    count = np.diff(first_at_or_after(np.sort(launch), bounds))
    inside = np.flatnonzero(count > 0)
    if not len(inside):
        return steps[:, :0]
    first, last = inside[[0, -1]]
    most = limits.HALF * float(np.median(count[first : last + 1]))
    if last - first >= 2:
        first += int(count[first] < most)
        last -= int(count[last] < most)
    return steps[:, first : last + 1]


# --- the steps in which the profiler's start or stop does not show


def steady_steps(d: Timelines, placed: pa.Table) -> tuple[int, ...]:
    """Return the steady-state steps, ascending.

    A profiler's start stalls each rank for another time, in the midst of the window's first step:
    that is never evidence, nor is a later one until synchronising collectives have brought all
    ranks together again. Windows that begin some steps apart, or that lack steps in their midst,
    have only the steps in common to compare ranks by.
    Stopping shows too: in the step after a rank's last one, as all wait for that rank, and in the
    last step of all where a rank's report ends before its collectives do. A step in which no time
    passes on some rank (of a report whose times are wrong) shows nothing.
    """
    reported = d.has_steps[d.rank]
    if not reported.any():
        return ()
    steps, counts = np.unique(d.step[reported], return_counts=True)
    # a rank whose window has none of the steps that most have is compared with no other
    usual = reported & np.isin(d.step, steps[counts == counts.max()])
    kept = reported & np.isin(d.rank, d.rank[usual])
    rank, step, took = d.rank[kept], d.step[kept], (d.end - d.begin)[kept]
    steps = np.unique(step)
    windows = Stretches.of(rank)
    first, last = step[windows.first], step[windows.last]
    column = row_of(steps, step)
    # a profiler that pauses on a rank starts once more
    starts = step[begins(rank) | (column - preceding(column, 0) > 1)]
    # others go on after a rank's stop; the last one cuts its own collectives off
    cut_off = integers(placed, "step", -1)[texts(placed, "state") == "incomplete"]
    stops = np.concatenate((last[last < last.max()] + 1, cut_off[cut_off == last.max()]))
    disturbed = np.concatenate((starts, stops, step[took <= 0]))
    steady = (steps > _synchronised(placed, int(first.max()))) & ~np.isin(steps, disturbed)
    ranks = count_by(column, len(steps))
    inside = (first[:, None] <= steps) & (steps <= last[:, None])
    # what few ranks have is of another window; profilers begin in one step, or in the next
    steady &= (ranks == inside.sum(axis=0)) & (2 * ranks > len(first))
    if first.max() - first.min() > 1:
        steady &= ranks == len(first)
    chosen = steps[steady].tolist()
    if len(chosen) > TYPICAL_STEPS:
        # those on end whose mean length is nearest to that of all of them
        lengths = sum_by(column, took, len(steps))[steady] / ranks[steady]
        means = np.convolve(lengths, np.full(TYPICAL_STEPS, 1 / TYPICAL_STEPS), mode="valid")
        nearest = int(np.argmin(np.abs(means - lengths.mean())))
        chosen = chosen[nearest : nearest + TYPICAL_STEPS]
    return tuple(chosen)


def _synchronised(placed: pa.Table, start: int) -> int:
    """The first step, from `start` on, by whose end the ranks that can have synchronised."""
    role, step = texts(placed, "role"), integers(placed, "step", -1)
    usable = (role != "none") & (step >= 0)
    step = step[usable]
    (ranks, member), (_, group) = (
        places(integers(placed, name)[usable]) for name in ("rank", "collective")
    )

    def apart(last: int) -> int:
        """How many sets of ranks no collective up to a step connects with each other."""
        rows = step <= last
        return len(np.unique(connected(member[rows], group[rows], len(ranks))))

    least, later = apart(step.max(initial=0)), np.unique(step[step >= start]).tolist()
    return next((last for last in later if apart(last) == least), start)
