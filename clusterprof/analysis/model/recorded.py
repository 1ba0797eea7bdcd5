"""A recording as a `Replay`: which moments it has, and what each of them waited for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.analysis.model import host_activity
from clusterprof.analysis.model.dataset import Bools, Collectives, Dataset, Ints
from clusterprof.analysis.model.graph import NEVER, graph
from clusterprof.analysis.model.replay import Lengths, Replay
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE, Timeline

#: a queued kernel starts this long after the one before it, at most (1 to 2 µs on an H200)
_FOLLOWS_NS = 2_000
#: a kernel or a host goes on at most this long after what it waited for
REACTS_NS = 30_000
#: time stamps of one device may overlap by so much
_STAMP_NS = 2_000
#: kernels of another stream may occupy all multiprocessors for so long once a wait is over
_OCCUPIED_NS = 1_000_000
#: so many activities that ended before one are looked at for what it waited for
_LOOKED_AT = 8
#: from a launch to the start of its kernel on an idle device: this quantile of all, else so long
_PROMPT, _LAUNCH_NS = 0.25, 5_000
#: an assumed dependency that more than this part of the calls contradict is none
_CONTRADICTED = 0.05

#: a window of 13 days is none; sums of such times fit into 64 bits
_LONGEST_NS = 2**50

_NONE = np.zeros(0, dtype=np.int64)


class _Host(NamedTuple):
    """One host's moments in order: launches, begins and ends of waits, begins of steps."""

    at: Ints
    #: the activity of the report that a wait's end waited for, else -1
    woken_by: Ints
    #: of each launched activity (in the order given): its moment
    launched: Ints
    #: moments of the steps' begins, and of the window's end
    marks: Ints


class _Device(NamedTuple):
    """One rank's activities launched in the window, by stream and start."""

    row: Ints
    step: Ints
    stream: Ints
    start: Ints
    stop: Ints
    #: the place of the activity before it on its stream, -1 for a stream's first
    previous: Ints
    #: the length to it, and from the launch
    follow: Ints
    latency: Ints
    unexplained: Ints
    #: what else it waits for: the waiting one, the other's row in the report, how long after it
    waiting: Ints
    other: Ints
    after: Ints
    #: the unexplained parts of `follow`, `latency` and `after`
    loose: tuple[Ints, Ints, Ints]


class _Report:
    """One rank's report on the reference clock, around the steady-state steps."""

    def __init__(self, dataset: Dataset, k: int, steps: Ints) -> None:
        line, rank = dataset.timelines[k], dataset.ranks[k]

        def aligned(times: Ints) -> Ints:
            return np.asarray(dataset.clock.align(rank, times), dtype=np.int64)

        at = int(np.searchsorted(line.step, steps[0]))
        begins = aligned(np.r_[line.host_begin, line.host_end[-1:]])[at : at + len(steps) + 1]
        self.begins = np.maximum.accumulate(begins)
        self.start = aligned(line.start)
        self.stop = np.maximum(aligned(line.stop), self.start)
        issue, issued = aligned(line.launch), aligned(line.launch_end)
        self.launch = np.where(issued <= self.start, issued, np.minimum(issue, self.start))
        self.kind = line.kind
        table = dataset.tables[k].activity
        self.stream = np.asarray(table["stream"].to_numpy(), dtype=np.int64)
        self.by_stop = np.argsort(self.stop, kind="stable")
        self.stops = self.stop[self.by_stop]
        # a launch that ends as a step begins is of the step before
        inside = (self.launch > self.begins[0]) & (self.launch <= self.begins[-1])
        row = np.flatnonzero(inside)
        self.row = row[np.lexsort((self.start[row], self.stream[row]))]
        self.row_by_launch = row[np.argsort(self.launch[row], kind="stable")]
        #: launched before the window, in the order of their launches
        early = np.flatnonzero(self.launch <= self.begins[0])
        self.early = early[np.argsort(self.launch[early], kind="stable")]
        calls = host_activity.wait_calls(dataset.tables[k], line)
        self.waits = aligned(calls.start), aligned(calls.end)
        if calls is line.communication:
            # a host without CUDA calls waits in its collectives, in each of several at once
            mine = self.kind == COLLECTIVE
            self.waits = self.start[mine], self.stop[mine]
        self.host = self._host()
        self.device = self._device()

    def reach(self) -> float:
        """How far from the window's begin a time of this report is (ns)."""
        times = [self.host.at, self.device.start, self.device.stop, self.stop[self.early]]
        return float(max(
            np.abs(t.astype(float) - float(self.begins[0])).max(initial=0.0) for t in times
        ))  # fmt: skip

    def _ended_by(self, time: Ints, launched_by: Ints | None = None) -> Ints:
        """The activity that ended last by each time (and was launched by then), or -1."""
        at = np.searchsorted(self.stops, time, side="right") - 1
        for _ in range(_LOOKED_AT if launched_by is not None and len(self.stop) else 0):
            later = (at >= 0) & (self.launch[self.by_stop[np.maximum(at, 0)]] >= launched_by)
            at = np.where(later, at - 1, at)
        return np.where(at < 0, -1, self.by_stop[np.maximum(at, 0)])

    def _host(self) -> _Host:
        begin, end = self.waits
        inside = (begin >= self.begins[0]) & (end <= self.begins[-1])
        # who launches nothing waits for nothing
        inside &= len(self.row) > 0
        begin, end = begin[inside], end[inside]
        by = self._ended_by(end + _STAMP_NS)
        # a copy from pageable memory may end a little after the call that makes it
        at = np.minimum(np.searchsorted(self.launch[self.row_by_launch], begin), len(self.row) - 1)
        copy = self.row_by_launch[at]
        made = (self.launch[copy] == begin) & (self.start[copy] < end)
        made &= np.abs(self.stop[copy] - end) <= REACTS_NS
        by = np.where(made, copy, by)
        # a call that no activity's end explains has cost the host its own time
        waited = (by >= 0) & (self.stop[by] > begin) & (self.launch[by] < end)
        begin, end, by = begin[waited], end[waited], by[waited]
        parts = [self.begins, self.launch[self.row], begin, end]
        at = np.concatenate(parts)
        kind = np.repeat([2, 1, 3, 0], [len(p) for p in parts])
        order = np.lexsort((kind, at))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        first = np.cumsum([0, *(len(p) for p in parts)])
        woken = np.full(len(at), -1, dtype=np.int64)
        woken[place[first[3] :]] = by
        return _Host(at[order], woken, place[first[1] : first[2]], place[: first[1]])

    def _device(self) -> _Device:
        row, stream = self.row, self.stream[self.row]
        start, stop, launch = self.start[row], self.stop[row], self.launch[row]
        n = len(row)
        fresh = np.r_[True, stream[1:] != stream[:-1]] if n else np.zeros(0, dtype=bool)
        previous = np.where(fresh, -1, np.arange(n) - 1)
        before = np.where(fresh, self.free(stream), np.r_[0, stop[:-1]] if n else _NONE)
        follow, latency = start - before, start - launch
        waiting, other = self._queued_behind(stream, start, launch)
        ready = before.copy()
        np.maximum.at(ready, waiting, self.stop[other])
        usual = latency[launch > ready + REACTS_NS]
        # an idle device begins at once: whatever takes longer waits for something else
        least = int(np.quantile(usual, _PROMPT)) if len(usual) else _LAUNCH_NS
        queued, launched = before + _FOLLOWS_NS, launch + least
        after_stream = np.full(n, NEVER)
        np.maximum.at(after_stream, waiting, self.stop[other] + _FOLLOWS_NS)
        ready = np.maximum.reduce([queued, launched, after_stream])
        late = np.flatnonzero(start - ready > REACTS_NS // 2)
        by = self._ended_by(start[late], launch[late])
        found = (by >= 0) & (self.stop[by] > ready[late] - 2 * _FOLLOWS_NS)
        found &= start[late] - self.stop[by] <= _OCCUPIED_NS
        late, by = late[found], by[found]
        unexplained = np.maximum(start - ready, 0)
        unexplained[late] = start[late] - self.stop[by]
        unexplained[unexplained <= REACTS_NS // 2] = 0
        # what is left of an activity's delay is on the edge that comes last
        explained = np.zeros(n, dtype=bool)
        explained[late] = True
        last = np.argmax(np.stack([queued, launched, after_stream]), axis=0)
        follow = np.where((last == 0) & ~explained, follow, np.minimum(follow, _FOLLOWS_NS))
        latency = np.where((last == 1) & ~explained, latency, np.minimum(latency, least))
        after = start[waiting] - self.stop[other]
        loose = (last[waiting] != 2) | explained[waiting]
        after[loose] = np.minimum(after[loose], _FOLLOWS_NS)
        step = np.searchsorted(self.begins, launch) - 1
        on = [np.where((last == edge) & ~explained, unexplained, 0) for edge in range(3)]
        return _Device(
            row, step, stream, start, stop, previous, follow, latency, unexplained,
            np.r_[waiting, late], np.r_[other, by], np.r_[after, start[late] - self.stop[by]],
            (on[0], on[1], np.r_[on[2][waiting], unexplained[late]]),
        )  # fmt: skip

    def free(self, stream: Ints) -> Ints:
        """Of each activity's stream: when it became free of what was launched earlier."""
        names, place = np.unique(stream, return_inverse=True)
        free = np.full(len(names), int(self.begins[0]) - 10**12, dtype=np.int64)
        early = self.early[np.isin(self.stream[self.early], names)]
        np.maximum.at(free, np.searchsorted(names, self.stream[early]), self.stop[early])
        return free[place]

    def _queued_behind(self, stream: Ints, start: Ints, launch: Ints) -> tuple[Ints, Ints]:
        """Which activities wait for all that was launched before them on the computing stream.

        Collectives, by stream, unless the recording contradicts. Places and the others' rows.
        """
        kind = self.kind[self.row]
        if not (kind == COMPUTE).any() or not (kind == COLLECTIVE).any():
            return _NONE, _NONE
        names, counts = np.unique(self.stream[self.kind == COMPUTE], return_counts=True)
        main = names[np.argmax(counts)]
        computing = np.flatnonzero(self.stream == main)
        computing = computing[np.argsort(self.launch[computing], kind="stable")]
        waiting = np.flatnonzero((kind == COLLECTIVE) & (stream != main))
        at = np.searchsorted(self.launch[computing], launch[waiting], side="left") - 1
        waiting, at = waiting[at >= 0], at[at >= 0]
        other = computing[at]
        true = self.stop[other] <= start[waiting] + _STAMP_NS
        keep = np.zeros(len(waiting), dtype=bool)
        for name in np.unique(stream[waiting]):
            mine = stream[waiting] == name
            keep |= mine & true & ((~true[mine]).mean() <= _CONTRADICTED)
        return waiting[keep], other[keep]


def replay(dataset: Dataset) -> Replay | None:
    """The replay of the steady-state steps; None where there are none, or times that cannot be."""
    return _replayed(dataset)[0]


def contradictions(dataset: Dataset) -> list[str]:
    """Warnings about recorded times and collectives that contradict each other."""
    job, apart = _replayed(dataset)
    if job is None and apart is not None:
        return ["the recorded times contradict each other: no repair's saving can be determined"]
    if apart:
        text = f"{apart} collectives are matched in orders that contradict each other: "
        return [text + "what their members wait for cannot be determined"]
    return []


def _replayed(dataset: Dataset) -> tuple[Replay | None, int | None]:
    """The replay, and how many collectives were taken apart for it; None: there are no steps."""
    return dataset.cached("replay", lambda: _replay(dataset))


def _replay(dataset: Dataset) -> tuple[Replay | None, int | None]:
    steps = _longest_run(dataset)
    chosen = [k for k, line in enumerate(dataset.timelines) if _has(line, steps)]
    if not len(steps) or not chosen:
        return None, None
    reports = [_Report(dataset, k, steps) for k in chosen]
    if any(report.reach() > _LONGEST_NS for report in reports):
        return None, 0
    joined = _Joined(dataset, steps, chosen, reports)
    job = joined.made()
    if not len(job.graph.circular):
        return job, 0
    # members of collectives that wait for each other in a circle wait for no other
    apart, waits = joined.on_circles()
    joined = _Joined(dataset, steps, chosen, reports, apart, waits)
    job = joined.made()
    return (None if len(job.graph.circular) else job), len(apart)


def _has(line: Timeline, steps: Ints) -> bool:
    """Whether a rank's report has all of `steps`, and no other between them."""
    at = int(np.searchsorted(line.step, steps[0])) if len(steps) else 0
    return np.array_equal(line.step[at : at + len(steps)], steps)


def _longest_run(dataset: Dataset) -> Ints:
    """The longest run of steady-state steps with no other step of any rank between them."""
    steady = np.asarray(dataset.steady_steps, dtype=np.int64)
    if not len(steady):
        return steady
    every = np.asarray(dataset.steps)
    apart = np.diff(np.searchsorted(every, steady)) > 1
    runs = np.split(steady, np.flatnonzero(apart) + 1)
    return max(runs, key=len)


class _Calls(NamedTuple):
    """Members of collectives that are whole in the window, one element per call."""

    #: the activity's place, the collective's number from 0
    member: Ints
    number: Ints
    #: whether the others wait for it, and whether it waits for them
    gates: Bools
    held: Bools
    #: from the last start to this member's end
    transfer: Ints


class _Edges:
    """Edges as they are found: source, target, place of a length, what is added to it, and the
    unexplained part of that."""

    def __init__(self) -> None:
        self.parts: list[tuple[Ints, ...]] = []

    def add(
        self,
        source: Ints,
        target: Ints,
        pick: Ints | int,
        plus: Ints | int = 0,
        loose: Ints | int = 0,
    ) -> None:
        shape = np.shape(source)
        self.parts.append(
            (source, target, *(np.broadcast_to(v, shape) for v in (pick, plus, loose)))
        )

    def columns(self) -> list[Ints]:
        return [np.concatenate(c) for c in zip(*self.parts, strict=True)]


class _Joined:
    """All ranks' moments, numbered; each kind of moment begins at a place of its own.

    First the hosts' moments, then starts and ends of activities, ends of what was launched before
    the window, the streams' begins, the collectives' last arrivals, and the steps' ends.
    """

    def __init__(
        self, dataset: Dataset, steps: Ints, chosen: list[int], reports: list[_Report],
        apart: Ints = _NONE, waiting: Ints = _NONE,
    ) -> None:  # fmt: skip
        #: collectives (numbers of the dataset's) and assumed waits (moments) that are left out
        self.apart, self.not_waiting = apart, waiting
        self.dataset, self.chosen, self.reports = dataset, chosen, reports
        self.steps = steps
        hosts, devices = [r.host for r in reports], [r.device for r in reports]
        self.hosts, self.devices = hosts, devices
        self.host_first = np.cumsum([0, *(len(h.at) for h in hosts)])
        self.first = np.cumsum([0, *(len(d.row) for d in devices)])
        self.early_first = np.cumsum([0, *(len(r.early) for r in reports)])
        self.names = [np.unique(d.stream) for d in devices]
        self.stream_first = np.cumsum([0, *(len(s) for s in self.names)])
        self.n_host, self.n = int(self.host_first[-1]), int(self.first[-1])
        self.starts = self.n_host
        self.ends = self.starts + self.n
        self.earlies = self.ends + self.n
        self.streams = self.earlies + int(self.early_first[-1])
        self.arrivals = self.streams + int(self.stream_first[-1])
        self.start = self._all([d.start for d in devices])
        self.stop = self._all([d.stop for d in devices])
        self.at = self._all([h.at for h in hosts])
        #: when each collective's last member starts
        self.arrival_ns = self.ids = _NONE
        self.calls = self._calls()
        self.marks = self.arrivals + int(self.calls.number.max(initial=-1)) + 1
        self.moments = self.marks + len(reports) * (len(steps) + 1)
        #: places of lengths: queued and launched ends, hosts' time, running time, wakes,
        #: none
        self.launched, self.since = self.n, 2 * self.n
        self.running = self.since + self.n_host
        self.waking = self.running + self.n
        self.none = self.waking + self.n_host

    @staticmethod
    def _all(parts: list[Ints], offset: Ints | None = None) -> Ints:
        """All ranks' parts as one, each raised by its offset where it is not negative."""
        if offset is not None:
            pairs = zip(parts, offset, strict=False)
            parts = [np.where(p < 0, -1, p + o) for p, o in pairs]
        return np.concatenate(parts).astype(np.int64)

    def _end_of(self, p: int, rows: Ints) -> Ints:
        """The moments at which activities (rows of the p-th report) end; -1: launched later."""
        report = self.reports[p]
        out = np.full(len(report.start), -1, dtype=np.int64)
        out[report.row] = self.ends + self.first[p] + np.arange(len(report.row))
        out[report.early] = self.earlies + self.early_first[p] + np.arange(len(report.early))
        return np.where(rows < 0, -1, out[rows])

    def _calls(self) -> _Calls:
        """The collectives of which every member was launched in the window."""
        c = self.dataset.collectives
        place = np.full(len(c.rank), -1, dtype=np.int64)
        for p, k in enumerate(self.chosen):
            rank, row = self.dataset.ranks[k], self.reports[p].row
            collective = np.flatnonzero(self.reports[p].kind[row] == COLLECTIVE)
            starts = self.dataset.timelines[k].start[row[collective]]
            order = np.argsort(starts, kind="stable")
            mine = c.of(rank)
            mine = mine[c.has[mine] & c.matched[mine]]
            if not len(order) or not len(mine):
                continue
            at = np.minimum(np.searchsorted(starts[order], c.start[mine]), len(order) - 1)
            found = starts[order[at]] == c.start[mine]
            place[mine[found]] = self.first[p] + collective[order[at[found]]]
        usable = c.matched & (c.synchronising | c.point_to_point)
        usable &= ~np.isin(c.collective, self.apart)
        rows = np.flatnonzero(c.matched & c.has)
        if not len(rows):
            return _Calls(_NONE, _NONE, _NONE > 0, _NONE > 0, _NONE)
        ids, number = np.unique(c.collective[rows], return_inverse=True)
        whole = np.bincount(number, place[rows] < 0, len(ids)) == 0
        whole &= np.bincount(number, usable[rows], len(ids)) >= 2
        keep = whole[number]
        rows = rows[keep]
        self.ids, number = np.unique(c.collective[rows], return_inverse=True)
        member, gates = place[rows], usable[rows]
        count = int(number.max(initial=-1)) + 1
        arrival = np.full(count, -(2**62), dtype=np.int64)
        np.maximum.at(arrival, number[gates], self.start[member[gates]])
        # calls of one group share a kernel, which ends a transfer after the last of them can begin
        latest = np.full(self.n, -(2**62), dtype=np.int64)
        np.maximum.at(latest, member, arrival[number])
        transfer = self.stop[member] - latest[member]
        # a member that has left before the last one came did not wait for it
        held = gates & (transfer >= -REACTS_NS)
        held &= ~((c.operation[rows] == "Send") & self._eager(c, rows, member, number, arrival))
        self.arrival_ns = arrival
        return _Calls(member, number, gates, held, transfer)

    def _eager(self, c: Collectives, rows: Ints, member: Ints, number: Ints, arrival: Ints) -> bool:
        """Whether Sends end without waiting for their Recvs: none was seen to wait for one."""
        waited = arrival[number] - self.start[member] > REACTS_NS
        late = np.flatnonzero(waited & (c.operation[rows] == "Send"))
        left = self.stop[member[late]] < arrival[number[late]] - REACTS_NS
        return not len(late) or bool(left.mean() > _CONTRADICTED)

    def made(self) -> Replay:
        """The graph with its lengths."""
        hosts, devices, calls, n = self.hosts, self.devices, self.calls, self.n
        offset = self.first[:-1]
        woken = self._all([self._end_of(p, h.woken_by) for p, h in enumerate(hosts)])
        root = woken >= 0
        root[self.host_first[:-1]] = True
        own = np.where(root, 0, np.diff(self.at, prepend=self.at[:1]))
        root_of = np.maximum.accumulate(np.where(root, np.arange(self.n_host), 0))
        launch = self._all([h.launched for h in hosts], self.host_first)
        marks = np.stack([self.host_first[p] + h.marks for p, h in enumerate(hosts)])
        previous = self._all([d.previous for d in devices], offset)
        begin_of = np.concatenate([
            self.streams + self.stream_first[p] + np.searchsorted(self.names[p], d.stream)
            for p, d in enumerate(devices)
        ])  # fmt: skip
        prior = np.where(previous >= 0, self.ends + previous, begin_of)
        waiting = self._all([d.waiting for d in devices], offset)
        other = self._all([self._end_of(p, d.other) for p, d in enumerate(devices)])
        after = self._all([d.after for d in devices])
        loose = [self._all([d.loose[edge] for d in devices]) for edge in range(3)]
        follow = self._all([d.follow for d in devices])
        latency = self._all([d.latency for d in devices])
        joins = np.zeros(n, dtype=bool)
        joins[calls.member] = joins[waiting] = True
        joined = np.zeros(n, dtype=bool)
        joined[calls.member[calls.held]] = True
        fresh = (previous < 0) | joins
        fresh[1:] |= joins[:-1] | (root_of[launch][1:] != root_of[launch][:-1])
        part = np.cumsum(fresh) - 1
        run = self.stop - self.start
        run[calls.member[calls.held]] = calls.transfer[calls.held]

        edges = _Edges()
        wakes = np.flatnonzero(woken >= 0)
        ended = self._recorded()[woken[wakes]]
        after_wait = np.zeros(self.n_host, dtype=np.int64)
        after_wait[wakes] = np.maximum(self.at[wakes] - ended, -REACTS_NS)
        edges.add(woken[wakes], wakes, self.waking + wakes)
        edges.add(root_of[wakes - 1], wakes, self.since + wakes - 1)
        inner = np.unique(marks[:, 1:])
        inner = inner[~root[inner]]
        edges.add(root_of[inner], inner, self.since + inner)
        special = np.flatnonzero(joins)
        edges.add(
            prior[special], self.starts + special, self.none, follow[special], loose[0][special]
        )
        edges.add(
            root_of[launch[special]], self.starts + special, self.since + launch[special],
            latency[special], loose[1][special],
        )  # fmt: skip
        known = (other >= 0) & ~np.isin(self.starts + waiting, self.not_waiting)
        edges.add(
            other[known], self.starts + waiting[known], self.none, after[known], loose[2][known]
        )
        alone = np.flatnonzero(joins & ~joined)
        edges.add(self.starts + alone, self.ends + alone, self.running + alone)
        gate = np.flatnonzero(calls.gates)
        edges.add(self.starts + calls.member[gate], self.arrivals + calls.number[gate], self.none)
        held = np.flatnonzero(calls.held)
        member = calls.member[held]
        edges.add(self.arrivals + calls.number[held], self.ends + member, self.running + member)
        ends = self._step_ends(edges, marks, launch)
        first, first_ns, again = self._begins(marks, launch)
        plain = np.flatnonzero(~joins)
        prior_of = prior[np.flatnonzero(fresh)[part]]
        needed = np.zeros(self.moments, dtype=bool)
        needed[np.concatenate([e[0] for e in edges.parts])] = True
        needed[again[again >= 0]] = True
        needed[prior_of[plain]] = True
        plain = plain[needed[self.ends + plain]]
        edges.add(prior_of[plain], self.ends + plain, plain)
        edges.add(root_of[launch[plain]], self.ends + plain, self.launched + plain)
        source, target, pick, plus, loose_plus = edges.columns()
        self.waits_for = source, target
        sizes = [len(d.row) for d in devices]
        host_sizes = [len(h.at) for h in hosts]
        wait_beside, waits = self._beside_waits()
        return Replay(
            graph=graph(self.moments, source, target),
            steps=self.steps,
            lengths=Lengths(own, run, after_wait),
            pick=pick, plus=plus, host_root=root, launch_moment=launch,
            host_rank=np.repeat(self.chosen, host_sizes),
            host_step=np.concatenate([
                np.searchsorted(h.at[h.marks], h.at, side="right") - 1 for h in hosts
            ]),
            rank=np.repeat(self.chosen, sizes), row=self._all([d.row for d in devices]),
            step=self._all([d.step for d in devices]), kind=self._all([
                r.kind[d.row] for r, d in zip(self.reports, devices, strict=True)
            ]),
            joined=joined, before=follow, latency=latency, fresh=fresh, part=part,
            first=first, first_ns=first_ns, again=again, marks=ends, recorded=self._recorded(),
            unexplained=self._all([d.unexplained for d in devices]),
            wait_beside=wait_beside, freely=self._freely(wait_beside, run), waits=waits,
            loose=(loose[0], loose[1], loose_plus),
        )  # fmt: skip

    def on_circles(self) -> tuple[Ints, Ints]:
        """The collectives and the activities' starts that wait for each other in circles."""
        source, target = self.waits_for
        circles = graph(self.moments, source, target).circular
        moments = np.intersect1d(circles, graph(self.moments, target, source).circular)
        calls = moments[(moments >= self.arrivals) & (moments < self.marks)] - self.arrivals
        starts = moments[(moments >= self.starts) & (moments < self.ends)]
        return self.ids[calls], starts

    def _beside_waits(self) -> tuple[Ints, Ints]:
        """Beside which wait in a collective each kernel ran (else -1), and the waits' moments.

        A collective that waits occupies multiprocessors and memory, and slows what runs beside it.
        """
        calls, out = self.calls, np.full(self.n, -1, dtype=np.int64)
        begin, until = self.start[calls.member], self.arrival_ns[calls.number]
        waits = np.flatnonzero(calls.held & (until - begin > REACTS_NS))
        of = np.searchsorted(self.first, calls.member[waits], side="right") - 1
        for p, device in enumerate(self.devices):
            mine = np.flatnonzero(of == p)
            mine = mine[np.argsort(begin[waits[mine]], kind="stable")]
            if not len(mine):
                continue
            middle = (device.start + device.stop) // 2
            at = np.searchsorted(begin[waits[mine]], middle, side="right") - 1
            inside = (at >= 0) & (middle < until[waits[mine[np.maximum(at, 0)]]])
            here = np.flatnonzero(inside & (self.reports[p].kind[device.row] == COMPUTE))
            out[self.first[p] + here] = mine[at[here]]
        moments = [self.starts + calls.member[waits], self.arrivals + calls.number[waits]]
        return out, np.stack(moments, axis=1)

    def _freely(self, wait_beside: Ints, run: Ints) -> Ints:
        """How long each activity runs where its rank waits in no collective beside it (ns).

        Of a beside kernel the median of the same kernels (by name, and how many-th of its name in
        the step), over ranks and steps in which they were not beside; at most its own.
        """
        beside = np.flatnonzero(wait_beside >= 0)
        if not len(beside):
            return run
        key = self._same_kernels()
        free = np.flatnonzero((wait_beside < 0) & (key >= 0))
        free = free[np.lexsort((run[free], key[free]))]
        keys, first, count = np.unique(key[free], return_index=True, return_counts=True)
        middle = run[free[first + (count - 1) // 2]] if len(free) else run[:0]
        at = np.minimum(np.searchsorted(keys, key[beside]), max(len(keys) - 1, 0))
        out = run.copy()
        if len(keys):
            known = keys[at] == key[beside]
            out[beside[known]] = np.minimum(run[beside[known]], middle[at[known]])
        return np.asarray(out)

    def _same_kernels(self) -> Ints:
        """A number for each kernel: equal for the same kernel of any rank and step; else -1."""
        codes: dict[str, int] = {}
        name = np.full(self.n, -1, dtype=np.int64)
        for p, (k, device) in enumerate(zip(self.chosen, self.devices, strict=True)):
            line = self.dataset.timelines[k]
            code = np.asarray([codes.setdefault(n, len(codes)) for n in line.names] or [0])
            kernel = self.reports[p].kind[device.row] == COMPUTE
            name[self.first[p] : self.first[p + 1]] = np.where(
                kernel, code[line.name[device.row]], -1
            )
        of = np.searchsorted(self.first, np.arange(self.n), side="right") - 1
        step = self._all([d.step for d in self.devices])
        order = np.lexsort((self.start, name, step, of))
        parts = np.stack([of, step, name])[:, order]
        fresh = np.r_[True, (parts[:, 1:] != parts[:, :-1]).any(axis=0)]
        since = np.arange(self.n) - np.maximum.accumulate(np.where(fresh, np.arange(self.n), 0))
        out = np.full(self.n, -1, dtype=np.int64)
        out[order] = np.where(parts[2] >= 0, parts[2] * self.n + since, -1)
        return out

    def _step_ends(self, edges: _Edges, marks: Ints, launch: Ints) -> Ints:
        """Moments of the steps' ends, [ranks, steps + 1]: of the host and all that it launched."""
        ends = self.marks + np.arange(marks.size).reshape(marks.shape)
        edges.add(marks.ravel(), ends.ravel(), self.none)
        for p, device in enumerate(self.devices):
            at = launch[self.first[p] : self.first[p + 1]]
            for s, name in enumerate(self.names[p]):
                mine = np.flatnonzero(device.stream == name)
                mine = mine[np.argsort(at[mine], kind="stable")]
                count = np.searchsorted(at[mine], marks[p])
                begin = np.full(len(count), self.streams + self.stream_first[p] + s)
                last = np.where(
                    count > 0, self.ends + self.first[p] + mine[np.maximum(count - 1, 0)], begin
                )
                edges.add(last, ends[p], self.none)
        return ends

    def _begins(self, marks: Ints, launch: Ints) -> tuple[Ints, Ints, Ints]:
        """Moments before the window, when they were, and which stand for them a round later."""
        first, when, again = [], [], []
        for p, (report, device) in enumerate(zip(self.reports, self.devices, strict=True)):
            first += [self.host_first[p : p + 1]]
            when += [report.begins[:1]]
            again += [marks[p, -1:]]
            _, one = np.unique(device.stream, return_index=True)
            last = np.r_[one[1:], len(device.row)][: len(one)] - 1
            first += [self.streams + self.stream_first[p] + np.arange(len(one))]
            when += [report.free(device.stream[one])]
            again += [self.ends + self.first[p] + last]
            early = len(report.early)
            order = np.argsort(launch[self.first[p] : self.first[p + 1]], kind="stable")
            same = len(order) - early + np.arange(early)
            first += [self.earlies + self.early_first[p] + np.arange(early)]
            when += [report.stop[report.early]]
            later = np.full(early, -1, dtype=np.int64)
            later[same >= 0] = self.ends + self.first[p] + order[same[same >= 0]]
            again += [later]
        return self._all(first), self._all(when), self._all(again)

    def _recorded(self) -> Ints:
        """When each moment was; the streams' begins and the steps' ends are left out (0)."""
        out = np.zeros(self.moments, dtype=np.int64)
        out[: self.n_host] = self.at
        out[self.starts : self.starts + self.n] = self.start
        out[self.ends : self.ends + self.n] = self.stop
        for p, report in enumerate(self.reports):
            low = self.earlies + self.early_first[p]
            out[low : low + len(report.early)] = report.stop[report.early]
        out[self.arrivals : self.marks] = self.arrival_ns
        return out
