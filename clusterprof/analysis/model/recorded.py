"""A recording as a `Replay`: which moments it has, and what each of them waited for.

What a rank's own report tells comes from `by_report`; what its collectives waited for is added.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np

from clusterprof import threads
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.accounts import activity_of
from clusterprof.analysis.model.by_report import Part, joined, part_of, quantiles
from clusterprof.analysis.model.dataset import Bools, Dataset, Ints, once
from clusterprof.analysis.model.graph import NEVER, Graph, depths, first_of
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.replay import (
    FOLLOWING,
    LAUNCHED,
    LAUNCHING,
    NONE,
    QUEUED,
    RUNNING,
    SINCE,
    WAKING,
    Lengths,
    Recorded,
    Replay,
)
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE, Small
from clusterprof.mapped import trim

#: makes one number of several: other ones are alike by chance of 2^-64
_MIXES = np.int64(6_364_136_223_846_793_005)


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
    # what all parts ask for, before several threads do
    _ = host_activity.long_calls(dataset), host_activity.ends(dataset), activity_of(dataset)
    ranges = dataset.activities.lines.blocks(threads.AT_ONCE)
    parts = threads.each(partial(part_of, dataset, steps, chosen), ranges)
    if any(part is None for part in parts):
        return None, 0
    every, none = joined([part for part in parts if part]), np.zeros(0, dtype=np.int64)
    del parts
    trim()
    moments = _Moments(dataset, every, none, none)
    job = moments.made(steps)
    if not len(job.graph.circular):
        return job, 0
    # members of collectives that wait for each other in a circle wait for no other
    apart, waits = moments.on_circles(job.graph)
    job = _Moments(dataset, every, apart, waits).made(steps)
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

    def __init__(self, j: _Moments) -> None:
        c, start, stop = j.dataset.collectives, j.part.start, j.part.stop
        place_of: Small = np.full(j.part.activities + 1, -1, dtype=np.int32)
        place_of[j.part.activity] = np.arange(j.n)
        place = np.where(c.matched, place_of[activity_of(j.dataset)], -1)
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
        np.maximum.at(arrival, number[gates], start[member[gates]])
        # calls of one group share a kernel, which ends a transfer after the last of them can begin
        latest = np.full(j.n, NEVER)
        np.maximum.at(latest, member, arrival[number])
        transfer = stop[member] - latest[member]
        # a member that has left before the last one came did not wait for it
        held = gates & (transfer >= -limits.REACTS_NS)
        # Sends end without waiting for their Recvs where none was seen to wait for one
        sends = c.operation[rows] == "Send"
        late = sends & (arrival[number] - start[member] > limits.REACTS_NS)
        left = late & (stop[member] < arrival[number] - limits.REACTS_NS)
        if left.sum() > limits.WARNING_FRAC * late.sum() or not late.any():
            held &= ~sends
        #: the member's place among the activities, the collective's number from 0
        self.member, self.number = member, number
        #: whether the others wait for it, and whether it waits for them
        self.gates, self.held = gates, held
        #: from the last start to this member's end
        self.transfer = transfer
        #: of each collective: its number in the placed table, and when its last member starts
        self.ids, self.arrival = ids, arrival


class _Edges(list[tuple[Ints, ...]]):
    """Edges as they are found: source, target, kind of length, its place among those, what is added
    to it, and the unexplained part of that."""

    def add(self, source: Ints, target: Ints, kind: int, *length: Ints | int) -> None:
        length = (kind, *length, 0, 0, 0)[:4]
        self.append((source, target, *(np.broadcast_to(v, source.shape) for v in length)))

    def joined(self) -> tuple[Ints, ...]:
        """All of them, one array for each of the six."""
        return tuple(np.concatenate(each) for each in zip(*self, strict=True))


class _Moments:
    """All moments, numbered; each kind of moment begins at a place of its own.

    First the hosts' moments, then starts and ends of activities, ends of what was launched before
    the window, the streams' begins, the collectives' last arrivals, and the steps' ends.
    """

    def __init__(self, dataset: Dataset, part: Part, apart: Ints, waiting: Ints) -> None:
        #: collectives (numbers of the dataset's) and assumed waits (moments) that are left out
        self.apart, self.not_waiting = apart, waiting
        self.dataset, self.part = dataset, part
        self.n_host, self.n = len(part.host_at), len(part.activity)
        self.calls = _Calls(self)
        counts = (
            self.n_host, self.n, self.n, len(part.early), len(part.stream_rank),
            len(self.calls.arrival), part.marks.size,
        )  # fmt: skip
        (
            self.starts, self.ends, self.earlies, self.begins, self.arrivals, self.marks,
            self.moments,
        ) = np.cumsum(counts).tolist()  # fmt: skip
        #: the moments at which steps begin, and the last ends, [ranks, steps + 1]
        self.step_ends = np.arange(self.marks, self.moments).reshape(part.marks.shape)
        #: the moments at which activities end; -1: launched after the window
        self.end_of: Small = np.full(part.activities + 1, -1, dtype=np.int32)
        self.end_of[part.activity] = self.ends + np.arange(self.n)
        self.end_of[part.early] = self.earlies + np.arange(len(part.early))

    def prior(self, rows: Ints) -> Small:
        """The moment before each of these on its stream: the end of another, or the begin."""
        previous = self.part.previous[rows]
        begins = self.begins + self.part.stream[rows]
        return np.asarray(np.where(previous >= 0, self.ends + previous, begins))

    def loose(self, rows: Ints, edge: int) -> Ints:
        """How much of what lies before these activities on an edge is unexplained."""
        part = self.part
        return np.where(part.unexplained_in[rows] == edge, part.unexplained[rows], 0)

    def made(self, steps: Ints) -> Replay:
        """The graph with its lengths."""
        part, calls = self.part, self.calls
        by = self.end_of[part.woken_by]
        known = by >= 0
        wakes, by, after = (each[known] for each in (part.woken, by, part.woken_ns))
        root = np.zeros(self.n_host, dtype=bool)
        root[wakes] = root[part.marks[:, 0]] = True
        own = np.where(root, 0, np.diff(part.host_at, prepend=part.host_at[:1]))
        woken = np.zeros(self.n_host, dtype=np.int64)
        woken[wakes] = after
        held = calls.member[calls.held]
        run = part.stop - part.start
        run[held] = calls.transfer[calls.held]
        joins, joined = np.zeros((2, self.n), dtype=bool)
        joins[calls.member] = joins[part.waiting] = True
        joined[held] = True
        root_of = first_of(root)
        fresh = (part.previous < 0) | joins
        fresh[1:] |= joins[:-1] | (np.diff(root_of[part.launch_moment]) != 0)
        first, first_ns, again = self._begins()
        edges = _Edges()
        self._add_hosts(edges, wakes, by, root_of)
        self._add_starts(edges, np.flatnonzero(joins), root_of)
        self._add_collectives(edges, np.flatnonzero(joins & ~joined))
        self._add_step_ends(edges)
        self._add_queues(edges, fresh, np.flatnonzero(~joins), root_of, again)
        source, target, *lengths = edges.joined()
        self.waits_for = source, target
        graph = Graph(self.moments, source, target, first)
        kind, pick, plus, loose = (each[graph.edge] for each in lengths)
        beside, wait_beside, waits, waits_ns = self._beside_waits()
        return Replay(
            **{each.name: getattr(part, each.name) for each in fields(Recorded)},
            graph=graph, steps=steps, lengths=Lengths(own, run, woken),
            kind_of_edge=kind.astype(np.int8), pick=pick, plus=plus, loose=loose, host_root=root,
            joined=joined, fresh=fresh, first=first, first_ns=first_ns,
            again=graph.place(again), marks=self.step_ends, freely=self._freely(beside, run),
            beside=beside, wait_beside=wait_beside, waits=graph.place(waits), waits_ns=waits_ns,
        )  # fmt: skip

    def _add_hosts(self, edges: _Edges, wakes: Ints, by: Ints, root_of: Ints) -> None:
        """A host's wait ends after what it waited for; its steps begin after its own time."""
        edges.add(by, wakes, WAKING, wakes)
        edges.add(root_of[wakes - 1], wakes, SINCE, wakes - 1)
        inner = np.unique(self.part.marks[:, 1:])
        inner = inner[root_of[inner] != inner]
        edges.add(root_of[inner], inner, SINCE, inner)

    def _add_starts(self, edges: _Edges, special: Ints, root_of: Ints) -> None:
        """`special` activities start after their stream, their launch and other streams."""
        part, launch = self.part, self.part.launch_moment[special]
        edges.add(
            self.prior(special), self.starts + special, NONE, 0,
            part.before[special], self.loose(special, FOLLOWING),
        )  # fmt: skip
        edges.add(
            root_of[launch], self.starts + special, SINCE, launch,
            part.latency[special], self.loose(special, LAUNCHING),
        )  # fmt: skip
        other, waiting = self.end_of[part.other], self.starts + part.waiting
        known = (other >= 0) & ~np.isin(waiting, self.not_waiting)
        edges.add(
            other[known], waiting[known], NONE, 0,
            part.after[known], part.after_unexplained[known],
        )  # fmt: skip

    def _add_collectives(self, edges: _Edges, alone: Ints) -> None:
        """A collective transfers once its last member has come; those `alone` wait for none."""
        calls = self.calls
        edges.add(self.starts + alone, self.ends + alone, RUNNING, alone)
        last = self.arrivals + calls.number
        edges.add(self.starts + calls.member[calls.gates], last[calls.gates], NONE)
        held = calls.member[calls.held]
        edges.add(last[calls.held], self.ends + held, RUNNING, held)

    def _add_queues(
        self, edges: _Edges, fresh: Bools, plain: Ints, root_of: Ints, again: Ints
    ) -> None:
        """Of the `plain` activities those that anything waits for end after their queue's begin."""
        begin = first_of(fresh)
        needed = np.zeros(self.moments, dtype=bool)
        for source, *_ in edges:
            needed[source] = True
        needed[again[again >= 0]] = needed[self.prior(begin[plain])] = True
        plain = plain[needed[self.ends + plain]]
        edges.add(self.prior(begin[plain]), self.ends + plain, QUEUED, plain)
        edges.add(root_of[self.part.launch_moment[plain]], self.ends + plain, LAUNCHED, plain)

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
        part, calls, axis = self.part, self.calls, self.dataset.axis
        begin, until = part.start[calls.member], calls.arrival[calls.number]
        waits = np.flatnonzero(calls.held & (until - begin > limits.REACTS_NS))
        rank = part.rank[calls.member[waits]]
        order = np.lexsort((begin[waits], rank))
        begins = axis.of(rank, begin[waits])[order]
        ends = axis.of(rank, until[waits])[order]
        beside, which = [waits[:0]], [waits[:0]]
        for rows in self._some_ranks():
            middle = axis.of(part.rank[rows], (part.start[rows] + part.stop[rows]) // 2)
            at = np.searchsorted(begins, middle, side="right") - 1
            inside = (at >= 0) & (middle < np.r_[ends, 0][at]) & (part.kind[rows] == COMPUTE)
            beside.append(rows.start + np.flatnonzero(inside))
            which.append(order[at[inside]])
        moments = [self.starts + calls.member[waits], self.arrivals + calls.number[waits]]
        lengths = (until - begin)[waits]
        return np.concatenate(beside), np.concatenate(which), np.stack(moments), lengths

    def _some_ranks(self) -> list[slice]:
        """The rows of some ranks after those of others."""
        first = np.flatnonzero(np.diff(self.part.rank, prepend=-1, append=-1))
        return [slice(*first[[k, until]]) for k, until in threads.blocks(first, threads.AT_ONCE)]

    def _freely(self, beside: Ints, run: Ints) -> Ints:
        """How long each activity runs where its rank waits in no collective beside it (ns).

        By one factor: how many times as long a kernel runs beside a collective as the same one of
        its rank does beside none, of all the middle one, by time and the root of how many tell it.
        """
        alike, crowded, free = self._same_kernels()
        out, (others, longer, count) = run.copy(), quantiles(alike[crowded], run[crowded], 0.5)
        if len(others):
            free &= others[np.minimum(np.searchsorted(others, alike), len(others) - 1)] == alike
        if not len(others) or not free.any():
            return np.asarray(out)
        keys, alone, times = quantiles(alike[free], run[free], 0.5)
        other = np.searchsorted(others, keys)
        factor = longer[other] / alone
        weight = np.minimum(alone, longer[other]) * np.sqrt(np.minimum(times, count[other]))
        order = np.argsort(factor)
        until = np.cumsum(weight[order])
        middle = factor[order][np.searchsorted(until, limits.HALF * until[-1])]
        out[beside] = run[beside] / max(float(middle), 1.0)
        return np.asarray(out)

    def _same_kernels(self) -> tuple[Ints, Bools, Bools]:
        """A number for each kernel, and whether collectives run beside all of it, or none of it.

        Equal for those of a rank that do the same, in any layer and step: by their names, and those
        of two before and two behind each.
        """
        part, axis, names = self.part, self.dataset.axis, self.dataset.activities.name
        out = np.zeros(self.n, dtype=np.int64)
        crowded, free = np.zeros((2, self.n), dtype=bool)
        for rows in self._some_ranks():
            begin, end = (axis.of(part.rank[rows], t[rows]) for t in (part.start, part.stop))
            busy = part.kind[rows] == COLLECTIVE
            kernel = np.flatnonzero((part.kind[rows] == COMPUTE) & (end > begin))
            kernel = kernel[np.argsort(begin[kernel], kind="stable")]
            name = names[part.activity[rows][kernel]]
            alike = part.rank[rows][kernel].astype(np.int64)
            for apart in range(-2, 3):
                alike = alike * _MIXES + np.roll(name, apart)
            covered = union(begin[busy], end[busy]).within(begin[kernel], end[kernel])
            kernel += rows.start
            out[kernel], free[kernel] = alike, covered == 0
            crowded[kernel] = covered == part.stop[kernel] - part.start[kernel]
        return out, crowded, free

    def _add_step_ends(self, edges: _Edges) -> None:
        """A step ends with the host and, on each stream, with the last that it has launched."""
        part, marks = self.part, self.part.marks
        edges.add(marks.ravel(), self.step_ends.ravel(), NONE)
        ranks = np.searchsorted(part.host_rank[marks[:, 0]], part.stream_rank)
        begins = self.begins + np.arange(len(part.stream_rank))[:, None]
        last = np.where(part.stream_last >= 0, self.ends + part.stream_last, begins)
        edges.add(last.ravel(), self.step_ends[ranks].ravel(), NONE)

    def _begins(self) -> tuple[Ints, Ints, Ints]:
        """Moments before the window, when they were, and which stand for them a round later."""
        part, again = self.part, self.part.early_again
        streams = self.begins + np.arange(len(part.stream_rank))
        last = self.ends + np.flatnonzero(np.diff(part.stream, append=-1))
        return (
            np.r_[part.marks[:, 0], streams, self.earlies + np.arange(len(part.early))],
            np.r_[part.host_at[part.marks[:, 0]], part.stream_free, part.early_stop],
            np.r_[part.marks[:, -1], last, np.where(again >= 0, self.ends + again, -1)],
        )
