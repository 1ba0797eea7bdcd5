"""A recording as a `Replay`: which moments it has, and what each of them waited for.

All ranks are looked at together: their activities are arrays, one rank after the other, and what
is searched by time lies on one `Axis`, each rank's times behind those of the rank before.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np

from clusterprof.align.columns import narrow, places
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.accounts import activity_of
from clusterprof.analysis.model.dataset import Bools, Dataset, Ints, once
from clusterprof.analysis.model.graph import NEVER, Graph, depths, first_of
from clusterprof.analysis.model.replay import (
    ELSEWHERE,
    FOLLOWING,
    LAUNCHING,
    Lengths,
    Replay,
    length_places,
)
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE
from clusterprof.mapped import trim

#: a queued kernel starts this long after the one before it, at most (1 to 2 µs on an H200), and the
#: time stamps of one device may overlap by as much
STAMP_NS = 2_000
#: a window of 13 days is none; two thousand such times add up to a moment, and not to `NEVER`
_LONGEST_NS = -NEVER >> 11

_Side = Literal["left", "right"]


class _Reports:
    """The reports of `chosen` (places of ranks) on the reference clock, around `steps`.

    Activities are places among `dataset.activities`: `row` those launched in the window, by rank,
    stream and start; `early` those launched before it, by rank and launch.
    """

    def __init__(self, dataset: Dataset, steps: Ints, chosen: Ints) -> None:
        a = dataset.activities
        self.dataset, self.steps, self.chosen = dataset, steps, chosen
        self.rank, self.kind, self.start = a.rank, a.kind, a.start
        self.launch, self.stop = a.launched, host_activity.ends(dataset)
        if (self.stop < a.start).any():
            self.stop = np.maximum(self.stop, a.start)
        d = dataset.timelines
        rows = np.flatnonzero(np.isin(d.step, steps) & np.isin(d.rank, chosen))
        rows = rows.reshape(len(chosen), len(steps)).T
        # the last step ends where the next one begins, if the report has that
        last = np.where(np.r_[d.rank, -1][rows[-1] + 1] == chosen, rows[-1] + 1, -1)
        end = np.where(last >= 0, d.host_begin[last], d.host_end[rows[-1]])
        begins = dataset.aligned(chosen, np.stack([*d.host_begin[rows], end]))
        #: when the steps begin, and the last ends, [ranks, steps + 1]; NEVER of ranks not chosen
        self.begins = np.full((len(dataset.ranks), len(steps) + 1), NEVER)
        self.begins[chosen] = np.maximum.accumulate(begins, axis=0).T
        # a launch that ends as a step begins is of the step before
        early = self.launch <= self.begins[a.rank, 0]
        row = np.flatnonzero(~early & (self.launch <= self.begins[a.rank, -1]))
        early = np.flatnonzero(early)
        names, name = places(a.stream)
        streams, self.stream = places(a.rank * np.int64(len(names)) + name)
        #: each stream's rank, and when it became free of what was launched before the window
        self.of_stream = streams // max(len(names), 1)
        self.free = self.begins[self.of_stream, 0] - 10**12
        np.maximum.at(self.free, self.stream[early], self.stop[early])
        self.row = row[np.lexsort((self.start[row], self.stream[row]))]
        self.early = early[np.lexsort((self.launch[early], a.rank[early]))]

    def reach(self) -> float:
        """How far from the window's begin a time of these reports is (ns)."""
        rows, begin = np.r_[self.row, self.early], self.begins[:, 0].astype(float)
        far = np.stack([self.start[rows], self.stop[rows]]) - begin[self.rank[rows]]
        steps = self.begins[self.chosen] - begin[self.chosen, None]
        return float(max(np.abs(each).max(initial=0.0) for each in (far, steps)))

    def step(self, rank: Ints, time: Ints, side: _Side) -> Ints:
        """The place among `steps` of each rank's `time`."""
        axis, steps = self.dataset.axis, self.begins.shape[1]
        begins = axis.of(self.chosen[:, None], self.begins[self.chosen]).ravel()
        place = np.searchsorted(begins, axis.of(rank, time), side=side)
        return place - 1 - steps * np.searchsorted(self.chosen, rank)

    def place(
        self, among: Ints, times: Ints, rank: Ints, time: Ints, side: _Side = "right"
    ) -> Ints:
        """How many of `among` (activities by rank and `times`) come before a rank's `time`."""
        axis = self.dataset.axis
        keys = axis.of(self.rank[among], times[among])
        return np.searchsorted(keys, axis.of(rank, time), side=side)

    def at(self, among: Ints, place: Ints, rank: Ints) -> Ints:
        """The activities at these places of `among`, -1 where that is none of the rank's."""
        found = np.r_[among, -1][place]
        return np.where(np.r_[self.rank, -1][found] == rank, found, -1)

    @cached_property
    def by_stop(self) -> Ints:
        """All activities by rank and end."""
        return np.lexsort((self.stop, self.rank))

    def ended_by(self, rank: Ints, time: Ints, launched_by: Ints | None = None) -> Ints:
        """The rank's activity that ended last by each time (and was launched by then), or -1."""
        place = self.place(self.by_stop, self.stop, rank, time) - 1
        found = self.at(self.by_stop, place, rank)
        if launched_by is None:
            return found
        for _ in range(limits.MOST):
            place = place - ((found >= 0) & (self.launch[found] >= launched_by))
            found = self.at(self.by_stop, place, rank)
        return found

    @cached_property
    def place_of(self) -> Ints:
        """The place in `row` of each activity; -1 of those launched at another time, and of -1."""
        place = np.full(len(self.rank) + 1, -1)
        place[self.row] = np.arange(len(self.row))
        return place


class _Hosts:
    """The hosts' moments, by rank and time: launches, begins and ends of waits, begins of steps."""

    def __init__(self, r: _Reports) -> None:
        rank, begin, end = host_activity.wait_calls(r.dataset)
        inside = (begin >= r.begins[rank, 0]) & (end <= r.begins[rank, -1])
        # who launches nothing waits for nothing
        inside &= np.isin(rank, r.rank[r.row])
        rank, begin, end = rank[inside], begin[inside], end[inside]
        by = r.ended_by(rank, end + STAMP_NS)
        # a copy from pageable memory may end a little after the call that makes it
        launched = r.row[np.lexsort((r.launch[r.row], r.rank[r.row]))]
        copy = r.at(launched, r.place(launched, r.launch, rank, begin, "left"), rank)
        made = (copy >= 0) & (r.launch[copy] == begin) & (r.start[copy] < end)
        made &= np.abs(r.stop[copy] - end) <= limits.REACTS_NS
        by = np.where(made, copy, by)
        # a call that no activity's end explains has cost the host its own time
        waited = (by >= 0) & (r.stop[by] > begin) & (r.launch[by] < end)
        rank, begin, end, by = rank[waited], begin[waited], end[waited], by[waited]
        marks = r.begins[r.chosen]
        parts = [marks.ravel(), r.launch[r.row], begin, end]
        of = [np.repeat(r.chosen, marks.shape[1]), r.rank[r.row], rank, rank]
        at, of_moment = np.concatenate(parts), np.concatenate(of)
        kind = np.repeat([2, 1, 3, 0], [len(p) for p in parts])
        order = np.lexsort((kind, at, of_moment))
        self.at, self.rank = at[order], of_moment[order]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        marked, launches, _, ended = np.split(place, np.cumsum([len(p) for p in parts])[:-1])
        #: the moment at which each activity of `row` was launched
        self.launch = launches
        #: moments of the steps' begins, and of the window's end, [`chosen`, steps + 1]
        self.marks = marked.reshape(marks.shape)
        #: the activity that a wait's end waited for, else -1
        self.woken_by = np.full(len(at), -1, dtype=np.int64)
        self.woken_by[ended] = by


class _Devices:
    """What the activities of `row` waited for; one element each, in that order."""

    def __init__(self, r: _Reports) -> None:
        row, stream = r.row, r.stream[r.row]
        rank, start, stop, launch = (v[row] for v in (r.rank, r.start, r.stop, r.launch))
        n = len(row)
        fresh = np.diff(stream, prepend=-1) != 0
        #: the place of the activity before it on its stream, -1 for a stream's first
        self.previous = np.where(fresh, -1, np.arange(n) - 1)
        before = np.where(fresh, r.free[stream], np.r_[0, stop][:-1])
        follow, latency = start - before, start - launch
        waiting, other = _queued_behind(r)
        ready = before.copy()
        np.maximum.at(ready, waiting, r.stop[other])
        # an idle device begins at once: whatever takes longer waits for something else
        idle = launch > ready + limits.REACTS_NS
        # the lower quartile: others may have waited for something that is not known
        least = _by_rank(r, idle, latency, 1 - limits.STEADY_FRAC, STAMP_NS)
        # of a rank whose device hardly idles all may have
        least = np.where(least > limits.REACTS_NS, STAMP_NS, least)
        # kernels that waited for their launches would follow as those do that were queued
        busy = (launch < before) & (follow <= STAMP_NS) & ~fresh
        gap = _by_rank(r, busy, follow, limits.HALF, STAMP_NS)
        queued, launched = before + STAMP_NS, launch + least
        after_stream = np.full(n, NEVER)
        np.maximum.at(after_stream, waiting, r.stop[other] + STAMP_NS)
        ready = np.maximum.reduce([queued, launched, after_stream])
        late = np.flatnonzero(start - ready > limits.REACTS_NS // 2)
        by = r.ended_by(rank[late], start[late], launch[late])
        found = (by >= 0) & (r.stop[by] > ready[late] - 2 * STAMP_NS)
        # kernels of another stream may occupy all multiprocessors once a wait is over
        found &= start[late] - r.stop[by] <= limits.PAUSE_NS
        late, by = late[found], by[found]
        unexplained = np.maximum(start - ready, 0)
        unexplained[late] = start[late] - r.stop[by]
        unexplained[unexplained <= limits.REACTS_NS // 2] = 0
        # what is left of an activity's delay is on the edge that comes last
        last = np.argmax(np.stack([queued, launched, after_stream]), axis=0).astype(np.int8)
        last[late] = -1
        #: the length to it, and from the launch
        self.follow = np.where(last == FOLLOWING, follow, np.minimum(follow, gap))
        self.latency = np.where(last == LAUNCHING, latency, np.minimum(latency, least))
        self.unexplained = unexplained
        after = start[waiting] - r.stop[other]
        after = np.where(last[waiting] == ELSEWHERE, after, np.minimum(after, STAMP_NS))
        #: the edge that `unexplained` is on
        self.last = last
        #: what else waits: the place of the waiting one, the other activity, how long after it, and
        #: how much of that is unexplained
        self.waiting, self.other = np.r_[waiting, late], np.r_[other, by]
        self.after = np.r_[after, start[late] - r.stop[by]]
        on_other = np.where(last[waiting] == ELSEWHERE, unexplained[waiting], 0)
        self.after_unexplained = np.r_[on_other, unexplained[late]]

    def loose(self, rows: Ints, edge: int) -> Ints:
        """How much of what lies before these activities on an edge is unexplained."""
        return np.where(self.last[rows] == edge, self.unexplained[rows], 0)


def _by_rank(r: _Reports, chosen: Bools, values: Ints, part: float, otherwise: int) -> Ints:
    """For each of `row` this quantile of its rank's `chosen` values; of none `otherwise`."""
    rank = r.rank[r.row]
    out = np.full(len(r.begins), otherwise)
    known, found = _quantiles(rank[chosen], values[chosen], part)
    out[known] = found
    return out[rank]


def _queued_behind(r: _Reports) -> tuple[Ints, Ints]:
    """Which activities wait for what was launched before them on another stream.

    Collectives for all on the computing stream, and what is computed next for a Recv: by
    stream, unless the recording contradicts. Places in `row`, and the other activities.
    """
    row, rank = r.row, r.rank[r.row]
    counts = np.bincount(r.stream[r.kind == COMPUTE], minlength=len(r.of_stream))
    most = np.lexsort((-counts, r.of_stream))
    most = most[np.diff(r.of_stream[most], prepend=-1) != 0]
    main = np.zeros(len(counts), dtype=bool)
    main[most] = counts[most] > 0
    main = main[r.stream]
    computing = np.flatnonzero(main)
    computing = computing[np.lexsort((r.launch[computing], r.rank[computing]))]
    waiting = np.flatnonzero((r.kind[row] == COLLECTIVE) & ~main[row])
    of, launch = rank[waiting], r.launch[row[waiting]]
    other = r.at(computing, r.place(computing, r.launch, of, launch, "left") - 1, of)
    waiting, other = waiting[other >= 0], other[other >= 0]
    true = r.stop[other] <= r.start[row[waiting]] + STAMP_NS
    true &= _believed(r.stream[row[waiting]], true)
    got = row[_received(r)[row] & ~main[row]]
    of, launch = r.rank[got], r.launch[got]
    after = r.at(computing, r.place(computing, r.launch, of, launch), of)
    after = r.place_of[after]
    got, after = got[after >= 0], after[after >= 0]
    next_ = r.stop[got] <= r.start[row[after]] + STAMP_NS
    next_ &= _believed(r.rank[got], next_)
    return np.r_[waiting[true], after[next_]], np.r_[other[true], got[next_]]


def _received(r: _Reports) -> Bools:
    """Which activities are Recvs."""
    out = np.zeros(len(r.rank) + 1, dtype=bool)
    out[activity_of(r.dataset)[r.dataset.collectives.operation == "Recv"]] = True
    return out[:-1]


def _believed(part: Ints, true: Bools) -> Bools:
    """Whether hardly any other assumption about the same part of the recording is contradicted."""
    few: Bools = np.bincount(part, ~true) <= limits.WARNING_FRAC * np.bincount(part)
    return few[part]


def _quantiles(key: Ints, values: Ints, part: float) -> tuple[Ints, Ints]:
    """All keys, ascending, and a quantile of each one's values: one of them, of two the lower."""
    ordered = values[np.lexsort((values, key))]
    known, count = np.unique(key, return_counts=True)
    return known, ordered[np.cumsum(count) - count + (part * (count - 1)).astype(int)]


def replay(dataset: Dataset) -> Replay | None:
    """The replay of the steady-state steps; None where there are none, or times that cannot be."""
    return _replay(dataset)[0]


def contradictions(dataset: Dataset) -> list[str]:
    """Warnings about recorded times and collectives that contradict each other."""
    job, apart = _replay(dataset)
    if job is None and apart is not None:
        return ["the recorded times contradict each other: no repair's saving can be determined"]
    if apart:
        text = f"{apart} collectives are matched in orders that contradict each other: "
        return [text + "what their members wait for cannot be determined"]
    return []


@once
def _replay(dataset: Dataset) -> tuple[Replay | None, int | None]:
    """The replay, and how many collectives were taken apart for it; None: there are no steps."""
    steps, d = _longest_run(dataset), dataset.timelines
    has = np.bincount(d.rank[np.isin(d.step, steps)], minlength=len(dataset.ranks))
    chosen = np.flatnonzero(has == len(steps))
    if not len(steps) or not len(chosen):
        return None, None
    reports = _Reports(dataset, steps, chosen)
    if reports.reach() > _LONGEST_NS:
        return None, 0
    trim()
    hosts, devices, none = _Hosts(reports), _Devices(reports), np.zeros(0, dtype=np.int64)
    joined = _Joined(reports, hosts, devices, none, none)
    job = joined.made()
    if not len(job.graph.circular):
        return job, 0
    # members of collectives that wait for each other in a circle wait for no other
    apart, waits = joined.on_circles(job.graph)
    job = _Joined(reports, hosts, devices, apart, waits).made()
    return (None if len(job.graph.circular) else job), len(apart)


def _longest_run(dataset: Dataset) -> Ints:
    """The longest run of steady-state steps with no other step of any rank between them."""
    steady = np.asarray(dataset.steady_steps, dtype=np.int64)
    if not len(steady):
        return steady
    every = np.asarray(dataset.steps)
    apart = np.diff(np.searchsorted(every, steady)) > 1
    runs = np.split(steady, np.flatnonzero(apart) + 1)
    return max(runs, key=len)


class _Calls:
    """Members of collectives that are whole in the window, one element per call."""

    def __init__(self, j: _Joined) -> None:
        c = j.reports.dataset.collectives
        activity = activity_of(j.reports.dataset)
        place = np.where(c.matched, j.reports.place_of[activity], -1)
        usable = c.matched & (c.synchronising | c.point_to_point)
        usable &= ~np.isin(c.collective, j.apart)
        rows = np.flatnonzero(c.matched & c.has)
        ids, number = np.unique(c.collective[rows], return_inverse=True)
        whole = np.bincount(number, place[rows] < 0, len(ids)) == 0
        whole &= np.bincount(number, usable[rows], len(ids)) >= 2
        rows = rows[whole[number]]
        ids, number = np.unique(c.collective[rows], return_inverse=True)
        member, gates = place[rows], usable[rows]
        arrival = np.full(len(ids), NEVER)
        np.maximum.at(arrival, number[gates], j.start[member[gates]])
        # calls of one group share a kernel, which ends a transfer after the last of them can begin
        latest = np.full(j.n, NEVER)
        np.maximum.at(latest, member, arrival[number])
        transfer = j.stop[member] - latest[member]
        # a member that has left before the last one came did not wait for it
        held = gates & (transfer >= -limits.REACTS_NS)
        # Sends end without waiting for their Recvs where none was seen to wait for one
        sends = c.operation[rows] == "Send"
        late = sends & (arrival[number] - j.start[member] > limits.REACTS_NS)
        left = late & (j.stop[member] < arrival[number] - limits.REACTS_NS)
        if left.sum() > limits.WARNING_FRAC * late.sum() or not late.any():
            held &= ~sends
        #: the member's place in `row`, the collective's number from 0
        self.member, self.number = member, number
        #: whether the others wait for it, and whether it waits for them
        self.gates, self.held = gates, held
        #: from the last start to this member's end
        self.transfer = transfer
        #: of each collective: its number in the placed table, and when its last member starts
        self.ids, self.arrival = ids, arrival


class _Edges(list[tuple[Ints, ...]]):
    """Edges as they are found: source, target, place of a length, what is added to it, and the
    unexplained part of that."""

    def add(self, source: Ints, target: Ints, *length: Ints | int) -> None:
        length = (*length, 0, 0)[:3]
        self.append((source, target, *(np.broadcast_to(v, source.shape) for v in length)))

    def joined(self) -> tuple[Ints, ...]:
        """All of them, one array for each of the five."""
        return tuple(np.concatenate(each) for each in zip(*self, strict=True))


class _Joined:
    """All moments, numbered; each kind of moment begins at a place of its own.

    First the hosts' moments, then starts and ends of activities, ends of what was launched before
    the window, the streams' begins, the collectives' last arrivals, and the steps' ends.
    """

    def __init__(
        self, reports: _Reports, hosts: _Hosts, devices: _Devices, apart: Ints, waiting: Ints
    ) -> None:
        #: collectives (numbers of the dataset's) and assumed waits (moments) that are left out
        self.apart, self.not_waiting = apart, waiting
        self.reports, self.hosts, self.devices = reports, hosts, devices
        row = reports.row
        self.rank = reports.rank[row].astype(np.int64)
        self.start, self.stop = reports.start[row], reports.stop[row]
        self.step = reports.step(self.rank, reports.launch[row], "left")
        #: the streams that are used in the window, by number, and the place of each activity's
        self.streams, self.stream = np.unique(reports.stream[row], return_inverse=True)
        self.n_host, self.n = len(hosts.at), len(row)
        self.calls = _Calls(self)
        counts = (
            self.n_host, self.n, self.n, len(reports.early), len(self.streams),
            len(self.calls.arrival), hosts.marks.size,
        )  # fmt: skip
        (
            self.starts, self.ends, self.earlies, self.begins, self.arrivals, self.marks,
            self.moments,
        ) = np.cumsum(counts).tolist()  # fmt: skip
        #: the moments at which steps begin, and the last ends, [`chosen`, steps + 1]
        self.step_ends = np.arange(self.marks, self.moments).reshape(hosts.marks.shape)
        #: places of lengths (`Replay.places`)
        _, self.launched, self.since, self.running, self.waking, self.none = length_places(
            self.n_host, self.n
        ).tolist()
        #: the moment before each activity on its stream
        self.prior = np.where(
            devices.previous >= 0, self.ends + devices.previous, self.begins + self.stream
        )
        #: the moments at which activities end; -1: launched after the window
        self.end_of = np.full(len(reports.rank) + 1, -1)
        self.end_of[row] = self.ends + np.arange(self.n)
        self.end_of[reports.early] = self.earlies + np.arange(len(reports.early))

    def made(self) -> Replay:
        """The graph with its lengths."""
        reports, hosts, devices, calls = self.reports, self.hosts, self.devices, self.calls
        woken = self.end_of[hosts.woken_by]
        root = woken >= 0
        root[hosts.marks[:, 0]] = True
        own = np.where(root, 0, np.diff(hosts.at, prepend=hosts.at[:1]))
        wakes = np.flatnonzero(woken >= 0)
        after_wait = np.zeros(self.n_host, dtype=np.int64)
        after_wait[wakes] = np.maximum(
            hosts.at[wakes] - reports.stop[hosts.woken_by[wakes]], -limits.REACTS_NS
        )
        held = calls.member[calls.held]
        run = self.stop - self.start
        run[held] = calls.transfer[calls.held]
        joins, joined = np.zeros((2, self.n), dtype=bool)
        joins[calls.member] = joins[devices.waiting] = True
        joined[held] = True
        root_of = first_of(root)
        fresh = (devices.previous < 0) | joins
        fresh[1:] |= joins[:-1] | (np.diff(root_of[hosts.launch]) != 0)
        first, first_ns, again = self._begins()
        edges = _Edges()
        self._add_hosts(edges, woken, root_of)
        self._add_starts(edges, np.flatnonzero(joins), root_of)
        self._add_collectives(edges, np.flatnonzero(joins & ~joined))
        self._add_step_ends(edges)
        self._add_queues(edges, fresh, np.flatnonzero(~joins), root_of, again)
        source, target, *lengths = edges.joined()
        self.waits_for = source, target
        graph = Graph(self.moments, source, target, first)
        pick, plus, loose = (each[graph.edge] for each in lengths)
        beside, wait_beside, waits, waits_ns = self._beside_waits()
        return Replay(
            graph=graph, steps=reports.steps, lengths=Lengths(own, run, after_wait),
            pick=pick, plus=plus, host_root=root, host_rank=hosts.rank.astype(np.int32),
            host_step=reports.step(hosts.rank, hosts.at, "right").astype(np.int16),
            host_at=hosts.at, launch_moment=hosts.launch.astype(np.int32),
            rank=self.rank.astype(np.int32), step=self.step.astype(np.int16),
            activity=reports.row.astype(np.int32), kind=reports.kind[reports.row], joined=joined,
            before=narrow(devices.follow), latency=narrow(devices.latency),
            unexplained=narrow(devices.unexplained), unexplained_in=devices.last, fresh=fresh,
            first=first, first_ns=first_ns, again=again, marks=self.step_ends,
            beside=beside, wait_beside=wait_beside, freely=self._freely(beside, run),
            waits=waits, waits_ns=waits_ns, loose=loose,
        )  # fmt: skip

    def _add_hosts(self, edges: _Edges, woken: Ints, root_of: Ints) -> None:
        """A host's wait ends after what it waited for; its steps begin after its own time."""
        wakes = np.flatnonzero(woken >= 0)
        edges.add(woken[wakes], wakes, self.waking + wakes)
        edges.add(root_of[wakes - 1], wakes, self.since + wakes - 1)
        inner = np.unique(self.hosts.marks[:, 1:])
        inner = inner[root_of[inner] != inner]
        edges.add(root_of[inner], inner, self.since + inner)

    def _add_starts(self, edges: _Edges, special: Ints, root_of: Ints) -> None:
        """`special` activities start after their stream, their launch and other streams."""
        devices, launch = self.devices, self.hosts.launch[special]
        edges.add(
            self.prior[special], self.starts + special, self.none,
            devices.follow[special], devices.loose(special, FOLLOWING),
        )  # fmt: skip
        edges.add(
            root_of[launch], self.starts + special, self.since + launch,
            devices.latency[special], devices.loose(special, LAUNCHING),
        )  # fmt: skip
        other, waiting = self.end_of[devices.other], self.starts + devices.waiting
        known = (other >= 0) & ~np.isin(waiting, self.not_waiting)
        edges.add(
            other[known], waiting[known], self.none,
            devices.after[known], devices.after_unexplained[known],
        )  # fmt: skip

    def _add_collectives(self, edges: _Edges, alone: Ints) -> None:
        """A collective transfers once its last member has come; those `alone` wait for none."""
        calls = self.calls
        edges.add(self.starts + alone, self.ends + alone, self.running + alone)
        last = self.arrivals + calls.number
        edges.add(self.starts + calls.member[calls.gates], last[calls.gates], self.none)
        held = calls.member[calls.held]
        edges.add(last[calls.held], self.ends + held, self.running + held)

    def _add_queues(
        self, edges: _Edges, fresh: Bools, plain: Ints, root_of: Ints, again: Ints
    ) -> None:
        """Of the `plain` activities those that anything waits for end after their queue's begin."""
        prior, launch = self.prior[first_of(fresh)], self.hosts.launch
        needed = np.zeros(self.moments, dtype=bool)
        needed[np.concatenate([source for source, *_ in edges])] = True
        needed[again[again >= 0]] = needed[prior[plain]] = True
        plain = plain[needed[self.ends + plain]]
        edges.add(prior[plain], self.ends + plain, plain)
        edges.add(root_of[launch[plain]], self.ends + plain, self.launched + plain)

    def on_circles(self, graph: Graph) -> tuple[Ints, Ints]:
        """The collectives and the activities' starts that wait for each other in circles."""
        source, target = self.waits_for
        before = np.flatnonzero(depths(self.moments, target, source) < 0)
        moments = np.intersect1d(graph.circular, before)
        calls = moments[(moments >= self.arrivals) & (moments < self.marks)] - self.arrivals
        starts = moments[(moments >= self.starts) & (moments < self.ends)]
        return self.calls.ids[calls], starts

    def _beside_waits(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Which kernels ran beside a wait in a collective, and which; all waits, and their lengths.

        A collective that waits occupies multiprocessors and memory, and slows what runs beside it.
        """
        calls, axis = self.calls, self.reports.dataset.axis
        begin, until = self.start[calls.member], calls.arrival[calls.number]
        waits = np.flatnonzero(calls.held & (until - begin > limits.REACTS_NS))
        rank = self.rank[calls.member[waits]]
        order = np.lexsort((begin[waits], rank))
        begins = axis.of(rank, begin[waits])[order]
        ends = axis.of(rank, until[waits])[order]
        kernels = np.flatnonzero(self.reports.kind[self.reports.row] == COMPUTE)
        middle = axis.of(self.rank, (self.start + self.stop) // 2)[kernels]
        at = np.searchsorted(begins, middle, side="right") - 1
        inside = (at >= 0) & (middle < np.r_[ends, 0][at])
        moments = [self.starts + calls.member[waits], self.arrivals + calls.number[waits]]
        return kernels[inside], order[at[inside]], np.stack(moments), (until - begin)[waits]

    def _freely(self, beside: Ints, run: Ints) -> Ints:
        """How long each activity runs where its rank waits in no collective beside it (ns).

        Of a beside kernel the median of the same kernels (by name, and how many-th of its name in
        the step), over ranks and steps in which they were not beside; at most its own.
        """
        if not len(beside):
            return run
        key = self._same_kernels()
        known = key >= 0
        known[beside] = False
        free = np.flatnonzero(known)
        keys, middle = _quantiles(key[free], run[free], 0.5)
        at = np.searchsorted(keys, key[beside])
        known = np.r_[keys, -1][at] == key[beside]
        out = run.copy()
        out[beside[known]] = np.minimum(run[beside[known]], middle[at[known]])
        return np.asarray(out)

    def _same_kernels(self) -> Ints:
        """A number for each kernel: equal for the same kernel of any rank and step; else -1."""
        reports = self.reports
        name = reports.dataset.activities.name[reports.row]
        name = np.where(reports.kind[reports.row] == COMPUTE, name, -1)
        order = np.lexsort((self.start, name, self.step, self.rank))
        parts = np.stack([self.rank, self.step, name])[:, order]
        fresh = np.r_[True, (parts[:, 1:] != parts[:, :-1]).any(axis=0)]
        since = np.arange(self.n) - first_of(fresh)
        out = np.full(self.n, -1, dtype=np.int64)
        out[order] = np.where(parts[2] >= 0, parts[2] * self.n + since, -1)
        return out

    def _add_step_ends(self, edges: _Edges) -> None:
        """A step ends with the host and, on each stream, with the last that it has launched."""
        marks, launch = self.hosts.marks, self.hosts.launch
        edges.add(marks.ravel(), self.step_ends.ravel(), self.none)
        chosen = np.searchsorted(self.reports.chosen, self.reports.of_stream[self.streams])
        order = np.lexsort((launch, self.stream))
        size = self.n_host + 1
        number = np.arange(len(self.streams))[:, None]
        last = np.searchsorted((self.stream * size + launch)[order], number * size + marks[chosen])
        last = np.r_[order, -1][last - 1]
        same = np.r_[self.stream, -1][last] == number
        last = np.where(same, self.ends + last, self.begins + number)
        edges.add(last.ravel(), self.step_ends[chosen].ravel(), self.none)

    def _begins(self) -> tuple[Ints, Ints, Ints]:
        """Moments before the window, when they were, and which stand for them a round later."""
        hosts, reports = self.hosts, self.reports
        last = np.flatnonzero(np.diff(self.stream, append=-1))
        # what is launched last of the window stands for what was launched before it
        order = np.argsort(hosts.launch, kind="stable")
        early = reports.rank[reports.early]
        ranks = np.arange(len(reports.begins))
        left = np.searchsorted(early, ranks, side="right")[early] - np.arange(len(early))
        same = np.searchsorted(self.rank, early, side="right") - left
        known = same >= np.searchsorted(self.rank, early)
        later = np.where(known, self.ends + np.r_[order, -1][np.where(known, same, -1)], -1)
        return (
            np.r_[
                hosts.marks[:, 0], self.begins + np.arange(len(self.streams)),
                self.earlies + np.arange(len(early)),
            ],
            np.r_[
                hosts.at[hosts.marks[:, 0]], reports.free[self.streams],
                reports.stop[reports.early],
            ],
            np.r_[hosts.marks[:, -1], self.ends + last, later],
        )  # fmt: skip
