"""What the moments of some ranks waited for, by their own reports: their hosts' and their devices'.

A job is looked at part by part. A part's ranks lie one after the other in its arrays, and what is
searched by time lies on one `Axis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.accounts import activity_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE
from clusterprof.columns import (
    ActivityRows,
    BlockRows,
    Bools,
    HostMoments,
    Ints,
    RankPlaces,
    ReplayRows,
    Small,
    StepNumbers,
    StepPlaces,
    StreamPlaces,
    begins,
    count_by,
    first_after,
    first_by,
    first_places,
    greatest_by,
    inverse,
    last_at_or_before,
    narrow,
    order_by,
    places,
    preceding,
    row_of,
    sum_by,
    where_known,
)
from clusterprof.mapped import release

#: a moment that no edge leads to, or an edge that is cut: earlier than anything
NEVER = np.iinfo(np.int64).min >> 2
#: a queued kernel starts this long after the one before it, at most (1 to 2 µs on an H200), and the
#: time stamps of one device may overlap by as much
STAMP_NS = 2_000

#: codes of `Part.unexplained_in`: what lies before an activity from the one before it on its
#: stream, what does from its launch, and else
FOLLOWING, LAUNCHING, ELSEWHERE = range(3)


@dataclass(eq=False, kw_only=True)
class Part:
    """What some ranks' moments waited for: of the whole job once parts are joined.

    Times are on the reference clock (ns). There is one of each thing for each moment or activity of
    the job, so they are as narrow as they can be: nothing may be multiplied in their types.
    """

    #: activities launched in the window (the `ReplayRows`), by rank, stream and start
    activity: ActivityRows
    rank: RankPlaces
    step: StepPlaces
    stream: StreamPlaces
    kind: Small
    #: the moment at which the host launched each
    launch_moment: HostMoments
    #: the length from the activity before it on its stream, and from its launch
    before: Small
    latency: Small
    #: what no recorded length explains of each (ns), and in which of both it is, if in any
    unexplained: Small
    unexplained_in: Small
    #: what else waits: which of them, for which activity, how long after it, unexplained of that
    waiting: ReplayRows
    other: ActivityRows
    after: Ints
    after_unexplained: Ints
    #: hosts' moments: when each was, its rank and step; as the last step ends it is the next one
    host_at: Ints
    host_rank: RankPlaces
    host_step: StepPlaces
    #: hosts' moments at which a step begins, or the last ends, [ranks, steps + 1]
    step_begins: HostMoments
    #: those at which a wait ends, the activity that it waited for, and how long after that
    woken: HostMoments
    woken_by: ActivityRows
    woken_ns: Ints
    #: activities launched before the window, by rank and launch, and their ends
    early: ActivityRows
    early_stop: Ints
    #: streams that are used in the window: the rank, and when they became free
    stream_rank: RankPlaces
    stream_free: Ints


def joined(parts: Sequence[Part]) -> Part:
    """Return one part of all ranks; `parts` come in order, and are used up."""
    # fields that are places among streams, hosts' moments, or activities in the window: in a job
    # each is as much further on as its part is
    streams, moments, activities = (
        np.cumsum([0, *(len(vars(part)[name]) for part in parts)]).tolist()
        for name in ("stream_rank", "host_at", "rank")
    )
    further = {"stream": streams, "waiting": activities}
    further |= dict.fromkeys(("launch_moment", "step_begins", "woken"), moments)
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(Part)):
        # what is joined need not be there twice
        values = [vars(part).pop(name) for part in parts]
        for numbers, before in zip(values, further.get(name, ()), strict=False):
            np.add(numbers, before, out=numbers, where=numbers >= 0)
        columns[name] = np.concatenate(values)
    return Part(**columns)


def part_of(
    dataset: Dataset, steps: StepNumbers, chosen: RankPlaces, ranks: tuple[int, int]
) -> Part | None:
    """Return the part of those of `chosen` from one of `ranks` to before the other."""
    r = _Reports(dataset, steps, chosen, *ranks)
    row, early, first = r.row, r.early, r.rows.start
    near, begin = np.concatenate((row, early)), r.begins[:, 0].astype(float)
    far = np.stack([r.start[near], r.stop[near]]) - begin[r.rank[near]]
    window = r.begins[r.chosen] - begin[r.chosen, None]
    # times that are too far apart cannot be added up: a window of 13 days is none; two thousand
    # such times add up to a moment, and not to `NEVER`
    if max(np.abs(times).max(initial=0.0) for times in (far, window)) > -NEVER >> 11:
        return None
    streams, stream = np.unique(r.stream[row], return_inverse=True)
    of_ranks = Part(
        activity=(row + first).astype(np.int32), rank=r.rank[row], kind=r.kind[row],
        step=r.step(r.rank[row], r.launch[row] - 1).astype(np.int32),
        stream=stream.astype(np.int32),
        early=early + first, early_stop=r.stop[early], stream_rank=r.of_stream[streams],
        stream_free=r.free[streams], **_hosts(r), **_devices(r),
    )  # fmt: skip
    release()
    return of_ranks


class _Reports:
    """The reports of the ranks `k` to before `until`, around `steps`; `chosen` are to be replayed.

    Activities are `BlockRows`: `row` are those launched in the window, by rank, stream and start;
    `early` those launched before it, by rank and launch.
    """

    def __init__(
        self, dataset: Dataset, steps: StepNumbers, chosen: RankPlaces, k: int, until: int
    ) -> None:
        a = dataset.activities
        chosen = chosen[(chosen >= k) & (chosen < until)]
        self.dataset, self.ranks, self.chosen = dataset, (k, until), chosen
        rows = self.rows = a.lines.rows(k, until)
        self.rank, self.kind, self.start = (column[rows] for column in (a.rank, a.kind, a.start))
        self.launch = a.launches(k, until)[1]
        self.stop = np.maximum(host_activity.ends(dataset)[rows], self.start)
        #: all activities by rank and end
        self.by_stop = order_by(self.rank, self.stop)
        d = dataset.timelines
        lines = np.flatnonzero(np.isin(d.step, steps) & np.isin(d.rank, chosen))
        lines = lines.reshape(len(chosen), len(steps)).T
        # the last step ends where the next one begins, if the report has that
        following = lines[-1] + 1
        follows = where_known(d.rank, following, -1) == chosen
        end = np.where(follows, where_known(d.host_begin, following, 0), d.host_end[lines[-1]])
        marks = dataset.aligned(chosen, np.stack([*d.host_begin[lines], end]))
        #: when the steps begin, and the last ends, [ranks, steps + 1]; NEVER of ranks not chosen
        self.begins = np.full((len(dataset.ranks), len(steps) + 1), NEVER)
        self.begins[chosen] = np.maximum.accumulate(marks, axis=0).T
        # a launch that ends as a step begins is of the step before
        early = self.launch <= self.begins[self.rank, 0]
        row = np.flatnonzero(~early & (self.launch <= self.begins[self.rank, -1]))
        early = np.flatnonzero(early)
        names, name = places(a.column("stream", k, until))
        streams, self.stream = places(self.rank * np.int64(len(names)) + name)
        #: each stream's rank, and when it became free of what was launched before the window
        self.of_stream = streams // max(len(names), 1)
        long_before = self.begins[self.of_stream, 0] - 10**12
        self.free = greatest_by(self.stream[early], self.stop[early], long_before)
        self.row = row[order_by(self.stream[row], self.start[row])]
        self.early = early[order_by(self.rank[early], self.launch[early])]

    def step(self, rank: RankPlaces, time: Ints) -> StepPlaces:
        """The place among `steps` of each rank's `time`."""
        axis, steps = self.dataset.axis, self.begins.shape[1]
        marks = axis.of(self.chosen[:, None], self.begins[self.chosen]).ravel()
        return last_at_or_before(marks, axis.of(rank, time)) - steps * row_of(self.chosen, rank)

    def place(self, among: BlockRows, times: Ints, rank: RankPlaces, time: Ints) -> Ints:
        """How many of `among` (activities by rank and `times`) come up to a rank's `time`."""
        axis = self.dataset.axis
        return first_after(axis.of(self.rank[among], times[among]), axis.of(rank, time))

    def at(self, among: BlockRows, place: Ints, rank: RankPlaces) -> BlockRows:
        """The activities at these places of `among`, -1 where that is none of the rank's."""
        activity = where_known(among, place, -1)
        return np.where(where_known(self.rank, activity, -1) == rank, activity, -1)

    def ended_by(self, rank: RankPlaces, time: Ints, launched_by: Ints) -> BlockRows:
        """The rank's activity that ended last by each time and was launched by another, or -1."""
        place = self.place(self.by_stop, self.stop, rank, time) - 1
        # what one call launches, as a graph, is launched at once
        for _ in range(limits.MOST):
            ended = self.at(self.by_stop, place, rank)
            place = place - ((ended >= 0) & (self.launch[ended] > launched_by))
        return self.at(self.by_stop, place, rank)


def _hosts(r: _Reports) -> dict[str, Ints]:
    """The hosts' moments, by rank and time: launches, begins and ends of waits, begins of steps."""
    rank, begin, end = host_activity.wait_calls(r.dataset, *r.ranks)
    # a wait that ends with the last step may be stamped a little later
    closing = r.begins[rank, -1]
    inside = (begin >= r.begins[rank, 0]) & (end <= closing + STAMP_NS)
    end = np.minimum(end, closing)
    # who launches nothing waits for nothing
    inside &= np.isin(rank, r.rank[r.row])
    rank, begin, end = rank[inside], begin[inside], end[inside]
    by = r.ended_by(rank, end + STAMP_NS, end + STAMP_NS)
    # a copy from pageable memory may end a little after the call that makes it
    launched = r.row[order_by(r.rank[r.row], r.launch[r.row])]
    copy = r.at(launched, r.place(launched, r.launch, rank, begin - 1), rank)
    made = (copy >= 0) & (r.launch[copy] == begin) & (r.start[copy] < end)
    made &= np.abs(r.stop[copy] - end) <= limits.REACTS_NS
    by = np.where(made, copy, by)
    # a call that no activity's end explains has cost the host its own time
    waited = (by >= 0) & (r.stop[by] > begin) & (r.launch[by] < end)
    rank, begin, end, by = rank[waited], begin[waited], end[waited], by[waited]
    # moments of one time in this order: ends of waits, launches, begins of steps, of waits
    marks = r.begins[r.chosen]
    # of marks, each rank as often as it has some
    ranks = [rank, r.rank[r.row], np.repeat(r.chosen, marks.shape[1]), rank]
    times = [end, r.launch[r.row], marks.ravel(), begin]
    counts = [len(group) for group in times]
    of_moment, time = np.concatenate(ranks), np.concatenate(times)
    order = order_by(of_moment, time)
    ended, launches, marked, _ = np.split(inverse(order), np.cumsum(counts)[:-1])
    time, of_moment = time[order], of_moment[order]
    return {
        "host_at": time, "host_rank": of_moment.astype(np.int32),
        "host_step": r.step(of_moment, time).astype(np.int32),
        "step_begins": marked.reshape(marks.shape), "launch_moment": launches.astype(np.int32),
        "woken": ended, "woken_by": by + r.rows.start,
        "woken_ns": np.maximum(end - r.stop[by], -limits.REACTS_NS),
    }  # fmt: skip


def _devices(r: _Reports) -> dict[str, Ints]:
    """What the activities of `row` waited for, and how much of it no recorded length explains."""
    row, stream = r.row, r.stream[r.row]
    start, stop, launch = (v[row] for v in (r.start, r.stop, r.launch))
    fresh = begins(stream)
    before = np.where(fresh, r.free[stream], preceding(stop, 0))
    follow, latency = start - before, start - launch
    waiting, other = _queued_behind(r)
    never = np.full(len(row), NEVER)
    after_stream = greatest_by(waiting, r.stop[other] + STAMP_NS, never)
    # an idle device begins at once: whatever takes longer waits for something else
    idle = launch > np.maximum(before, after_stream - STAMP_NS) + limits.REACTS_NS
    # the lower quartile: others may have waited for something that is not known
    least = _by_rank(r, idle, latency, 1 - limits.STEADY_FRAC)
    # of a rank whose device hardly idles all may have
    least = np.where(least > limits.REACTS_NS, STAMP_NS, least)
    # kernels that waited for their launches would follow as those do that were queued
    busy = (launch < before) & (follow <= STAMP_NS) & ~fresh
    gap = _by_rank(r, busy, follow, limits.HALF)
    ready = np.stack([before + STAMP_NS, launch + least, after_stream])
    unexplained = np.maximum(start - ready.max(axis=0), 0)
    late, by = _behind_another(r, start - unexplained)
    unexplained[late] = start[late] - r.stop[by]
    unexplained[unexplained <= limits.REACTS_NS // 2] = 0
    # what is left of an activity's delay is on the edge that comes last
    last = np.argmax(ready, axis=0).astype(np.int8)
    last[late] = -1
    after, elsewhere = start[waiting] - r.stop[other], last[waiting] == ELSEWHERE
    after = np.where(elsewhere, after, np.minimum(after, STAMP_NS))
    after_unexplained = np.where(elsewhere, unexplained[waiting], 0)
    return {
        "before": narrow(np.where(last == FOLLOWING, follow, np.minimum(follow, gap))),
        "latency": narrow(np.where(last == LAUNCHING, latency, np.minimum(latency, least))),
        "unexplained": narrow(unexplained), "unexplained_in": last,
        "waiting": np.concatenate((waiting, late)),
        "other": np.concatenate((other, by)) + r.rows.start,
        "after": np.concatenate((after, start[late] - r.stop[by])),
        "after_unexplained": np.concatenate((after_unexplained, unexplained[late])),
    }  # fmt: skip


def _behind_another(r: _Reports, ready: Ints) -> tuple[ReplayRows, BlockRows]:
    """Which of `row` start later than expected (`ready`), as another one stops, and that one."""
    start, launch = r.start[r.row], r.launch[r.row]
    late = np.flatnonzero(start - ready > limits.REACTS_NS // 2)
    by = r.ended_by(r.rank[r.row[late]], start[late], launch[late])
    waited = (by >= 0) & (r.stop[by] > ready[late] - 2 * STAMP_NS) & (r.start[by] < start[late])
    # kernels of another stream may occupy all multiprocessors once a wait is over
    waited &= start[late] - r.stop[by] <= limits.PAUSE_NS
    return late[waited], by[waited]


def _by_rank(r: _Reports, chosen: Bools, values: Ints, quantile: float) -> Ints:
    """For each of `row` this quantile of its rank's `chosen` values; of none the stamps' error."""
    rank, by_rank = r.rank[r.row], np.full(len(r.begins), STAMP_NS)
    ranks, quantiles_ns, _ = quantiles(rank[chosen], values[chosen], quantile)
    by_rank[ranks] = quantiles_ns
    return by_rank[rank]


def _queued_behind(r: _Reports) -> tuple[ReplayRows, BlockRows]:
    """Which activities wait for what was launched before them on another stream.

    A collective is taken to wait for the kernel that was launched last before it on the stream
    that computes most, and the kernel launched next after a Recv for what that brings: what other
    collectives bring may be needed later. Where the recording contradicts this more often than
    rarely, it is not assumed of that stream (of Recvs: of that rank). With the other activities.
    """
    row = r.row
    counts = count_by(r.stream[r.kind == COMPUTE], len(r.of_stream))
    most = first_by(r.of_stream, -counts)
    main = np.isin(r.stream, most[counts[most] > 0])
    computing = np.flatnonzero(main)
    computing = computing[order_by(r.rank[computing], r.launch[computing])]
    calls = row[(r.kind[row] == COLLECTIVE) & ~main[row]]
    before = r.place(computing, r.launch, r.rank[calls], r.launch[calls] - 1) - 1
    received = activity_of(r.dataset)[r.dataset.collectives.operation == "Recv"]
    recvs = row[np.isin(row + r.rows.start, received) & ~main[row]]
    after = r.place(computing, r.launch, r.rank[recvs], r.launch[recvs])
    pairs = list[tuple[ReplayRows, BlockRows]]()
    for waiting, other, assumed_by in (
        (calls, r.at(computing, before, r.rank[calls]), r.stream),
        (r.at(computing, after, r.rank[recvs]), recvs, r.rank),
    ):
        place = first_places(row, waiting)
        both = (place >= 0) & (other >= 0)
        place, waiting, other = place[both], waiting[both], other[both]
        true, assumed = r.stop[other] <= r.start[waiting] + STAMP_NS, assumed_by[waiting]
        # hardly any other assumption about the same part of the recording is contradicted
        few = sum_by(assumed, ~true) <= limits.WARNING_FRAC * count_by(assumed)
        true &= few[assumed]
        pairs.append((place[true], other[true]))
    waiting, other = (np.concatenate(places) for places in zip(*pairs, strict=True))
    return waiting, other


def quantiles(key: Ints, values: Ints, quantile: float) -> tuple[Ints, Ints, Ints]:
    """All keys, ascending, a quantile of each one's values (of two the lower), and their number."""
    ordered = values[order_by(key, values)]
    keys, count = np.unique(key, return_counts=True)
    return keys, ordered[np.cumsum(count) - count + (quantile * (count - 1)).astype(int)], count
