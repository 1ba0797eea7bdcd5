"""A recording as a `Replay`: which moments it has, and what each of them waited for.

What a rank's own report tells comes from `by_report`; what its collectives waited for is added.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from clusterprof import threads
from clusterprof.analysis.model import by_report, host_activity, limits, replay
from clusterprof.analysis.model.accounts import activity_of
from clusterprof.analysis.model.by_report import NEVER
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.replay import Contention, Graph, Lengths, Replay, depths
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE, union
from clusterprof.columns import (
    CollectiveNumbers,
    Ints,
    Moments,
    ReplayRows,
    StepNumbers,
    Stretches,
    begins,
    count_by,
    first_after,
    first_at_or_after,
    first_of,
    first_places,
    greatest_by,
    last_at_or_before,
    order_by,
    preceding,
    row_of,
    sum_by,
    sums,
    where_known,
)
from clusterprof.mapped import trim

#: makes one number of several: other ones are alike by chance of 2^-64
_MIXES = np.int64(6_364_136_223_846_793_005)

_Values = Ints | int


def contradictions(dataset: Dataset) -> list[str]:
    """Warnings about recorded times and collectives that contradict each other."""
    job = replay_of(dataset)
    if job is None and dataset.steady_steps:
        return ["the recorded times contradict each other: no repair's saving can be determined"]
    if job and job.apart:
        text = f"{job.apart} collectives are matched in orders that contradict each other: "
        return [text + "what their members wait for cannot be determined"]
    return []


@once
def replay_of(dataset: Dataset) -> Replay | None:
    """The replay of the steady-state steps; None where there are none, or times that cannot be."""
    steady, d = np.asarray(dataset.steady_steps, dtype=np.int64), dataset.timelines
    # the longest run of steady-state steps with no other step of any rank between them
    apart = np.diff(row_of(dataset.steps, steady)) > 1
    steps = max(np.split(steady, np.flatnonzero(apart) + 1), key=len)
    has = count_by(d.rank[np.isin(d.step, steps)], len(dataset.ranks))
    chosen = np.flatnonzero(has == len(steps))
    if not len(steps) or not len(chosen):
        return None
    # what all parts ask for, before several threads do
    _ = host_activity.long_calls(dataset), host_activity.ends(dataset), activity_of(dataset)
    ranges = dataset.activities.lines.blocks(threads.AT_ONCE)
    parts = threads.each(partial(by_report.part_of, dataset, steps, chosen), ranges)
    if any(part is None for part in parts):
        return None
    every = by_report.joined([reports for reports in parts if reports])
    del parts
    trim()
    none = np.zeros(0, dtype=np.int64)
    moments = _Moments(dataset, every, none, none)
    job = moments.made(steps)
    if len(job.graph.circular):
        # members of collectives that wait for each other in a circle wait for no other
        job = _Moments(dataset, every, *moments.on_circles(job.graph)).made(steps)
    return None if len(job.graph.circular) else job


class _Calls:
    """Members of collectives that are whole in the window."""

    def __init__(self, j: _Moments) -> None:
        c, start, stop = j.dataset.collectives, j.start, j.stop
        place = first_places(j.part.activity, activity_of(j.dataset))
        usable = (c.synchronising | c.point_to_point) & ~np.isin(c.collective, j.apart)
        rows = np.flatnonzero(c.matched & c.has)
        ids, number = np.unique(c.collective[rows], return_inverse=True)
        whole = sum_by(number, place[rows] < 0, len(ids)) == 0
        whole &= sum_by(number, usable[rows], len(ids)) >= 2
        rows, number = rows[whole[number]], number[whole[number]]
        member, gates = place[rows], usable[rows]
        arrival = greatest_by(number[gates], start[member[gates]], np.full(len(ids), NEVER))
        # calls of one group share a kernel, which ends a transfer after the last of them can begin
        latest = greatest_by(member, arrival[number], np.full(j.n, NEVER))
        transfer = stop[member] - latest[member]
        # a member that has left before the last one came did not wait for it
        held = gates & (transfer >= -limits.REACTS_NS)
        # Sends end without waiting for their Recvs where none was seen to wait for one
        sends = c.operation[rows] == "Send"
        late = sends & (arrival[number] - start[member] > limits.REACTS_NS)
        left = late & (stop[member] < arrival[number] - limits.REACTS_NS)
        if left.sum() > limits.WARNING_FRAC * late.sum() or not late.any():
            held &= ~sends
        #: the members' activities
        self.member: ReplayRows = member
        #: those that the others wait for, and the numbers of their collectives from 0
        self.gating, self.gating_in = member[gates], number[gates]
        #: those that wait for the others, and how long after the last start each ends
        self.held, self.held_in, self.transfer = member[held], number[held], transfer[held]
        #: of each collective: its number in the placed table, and when its last member starts
        self.ids, self.arrival = ids, arrival


def _edges(
    source: Moments,
    target: Moments,
    kind: int,
    pick: _Values = 0,
    plus: _Values = 0,
    loose: _Values = 0,
) -> Ints:
    """Edges as columns, [6, edges]: `pick` of a kind of length, and `plus`, `loose` unexplained."""
    return np.stack(np.broadcast_arrays(source, target, kind, pick, plus, loose))


class _Moments:
    """All moments, numbered; each kind of moment begins at a place of its own.

    First the hosts' moments, then starts and ends of activities, ends of what was launched before
    the window, the streams' begins, the collectives' last arrivals, and the steps' ends.
    """

    def __init__(
        self,
        dataset: Dataset,
        part: by_report.Part,
        apart: CollectiveNumbers,
        waiting: Moments,
    ) -> None:
        #: collectives and assumed waits that are left out
        self.apart, self.not_waiting = apart, waiting
        self.dataset, self.part = dataset, part
        self.n_host, self.n = len(part.host_at), len(part.activity)
        self.start = dataset.activities.start[part.activity]
        self.stop = np.maximum(host_activity.ends(dataset)[part.activity], self.start)
        self.calls = _Calls(self)
        counts = (
            self.n_host, self.n, self.n, len(part.early), len(part.stream_rank),
            len(self.calls.arrival), part.step_begins.size,
        )  # fmt: skip
        (
            self.starts, self.ends, self.earlies, self.begins, self.arrivals, self.marks,
            self.moments,
        ) = np.cumsum(counts).tolist()  # fmt: skip
        #: the moments at which steps begin, and the last ends, [ranks, steps + 1]
        self.step_ends = np.arange(self.marks, self.moments).reshape(part.step_begins.shape)
        #: the moments at which activities of the dataset end; -1: launched after the window
        self.end_of: Moments = np.full(len(dataset.activities.rank), -1, dtype=np.int32)
        self.end_of[part.activity] = self.ends + np.arange(self.n)
        self.end_of[part.early] = self.earlies + np.arange(len(part.early))
        #: waits of hosts that end after something known
        self.wakes = np.flatnonzero(self.end_of[part.woken_by] >= 0)
        #: host moments at which a wait ended, or the window began, and the last one up to each
        self.root = np.zeros(self.n_host, dtype=bool)
        self.root[part.woken[self.wakes]] = self.root[part.step_begins[:, 0]] = True
        self.root_of = first_of(self.root)
        #: activities that wait for the other members, and those that wait for more than queues
        self.joined, self.special = np.zeros((2, self.n), dtype=bool)
        self.joined[self.calls.held] = True
        self.special[self.calls.member] = self.special[part.waiting] = True
        #: where a run of activities begins that wait for nothing else
        self.first_of_stream = begins(part.stream)
        self.fresh = begins(part.stream, self.root_of[part.launch_moment])
        self.fresh |= self.special | preceding(self.special, False)

    def made(self, steps: StepNumbers) -> Replay:
        """The graph with its lengths."""
        part, calls = self.part, self.calls
        own = np.where(self.root, 0, np.diff(part.host_at, prepend=part.host_at[:1]))
        woken = np.zeros(self.n_host, dtype=np.int64)
        woken[part.woken[self.wakes]] = part.woken_ns[self.wakes]
        run = self.stop - self.start
        run[calls.held] = calls.transfer
        first, first_ns, again = self._begins()
        edges = np.concatenate([*self._hosts(), *self._specials()], axis=1)
        needed = np.zeros(self.moments, dtype=bool)
        needed[edges[0]] = needed[again[again >= 0]] = True
        # of the other activities those that anything waits for end after their queue's begin
        queued = np.flatnonzero(~self.special)
        before = self._prior(first_of(self.fresh)[queued])
        needed[before] = True
        wanted = needed[self.ends + queued]
        queued, before = queued[wanted], before[wanted]
        launch, end = self.root_of[part.launch_moment[queued]], self.ends + queued
        follows = _edges(before, end, replay.QUEUED, queued)
        launched = _edges(launch, end, replay.LAUNCHED, queued)
        edges = np.concatenate([edges, follows, launched], axis=1)
        self.waits_for = source, target = edges[:2]
        graph = Graph(self.moments, source, target, first)
        kind, pick, plus, loose = edges[2:, graph.edge]
        return Replay(
            **vars(self.part), graph=graph, steps=steps, lengths=Lengths(own, run, woken),
            kind_of_edge=kind.astype(np.int8), pick=pick, plus=plus, loose=loose,
            host_root=self.root, joined=self.joined, fresh=self.fresh, first=graph.place(first),
            first_ns=first_ns, again=graph.place(again), marks=self.step_ends,
            contention=self._contention(graph, run), apart=len(self.apart),
        )  # fmt: skip

    def _begins(self) -> tuple[Moments, Ints, Moments]:
        """Moments before the window, when they were, and which stand for them a round later.

        For what was launched before it stands what was launched in it, from the last one on.
        """
        part, hosts = self.part, self.part.step_begins
        last = self.ends + Stretches.of(part.stream).last
        launched = self.ends + order_by(part.launch_moment)
        rank = self.dataset.activities.rank[part.early]
        left = first_after(rank, rank) - np.arange(len(rank))
        row = first_after(part.rank, rank) - left
        # more may have been launched before the window than in it
        row[row < first_at_or_after(part.rank, rank)] = -1
        streams_and_early = np.concatenate(
            (self.begins + np.arange(len(last)), self.earlies + np.arange(len(rank)))
        )
        return (
            np.concatenate((hosts[:, 0], streams_and_early)),
            np.concatenate((part.host_at[hosts[:, 0]], part.stream_free, part.early_stop)),
            np.concatenate((hosts[:, -1], last, where_known(launched, row, -1))),
        )

    def _hosts(self) -> list[Ints]:
        """A host's wait ends after what it waited for; its steps begin after its own time.

        A step ends with the host and, on each stream, with the last that it has launched.
        """
        part, step_begins, woken = self.part, self.part.step_begins, self.part.woken[self.wakes]
        inner = np.unique(step_begins[:, 1:])
        inner = inner[~self.root[inner]]
        ranks = row_of(part.host_rank[step_begins[:, 0]], part.stream_rank)
        # how many were launched on each stream before each step began, and the last of these
        shape = len(part.stream_rank), step_begins.shape[1]
        launched = sums(shape, (part.stream, part.step + 1)).cumsum(axis=1).astype(np.int64)
        before = np.flatnonzero(self.first_of_stream)[:, None] - 1
        free = self.begins + np.arange(shape[0])[:, None]
        last = np.where(launched > 0, self.ends + before + launched, free)
        return [
            _edges(self.end_of[part.woken_by[self.wakes]], woken, replay.WAKING, woken),
            _edges(self.root_of[woken - 1], woken, replay.SINCE, woken - 1),
            _edges(self.root_of[inner], inner, replay.SINCE, inner),
            _edges(step_begins.ravel(), self.step_ends.ravel(), replay.NONE),
            _edges(last.ravel(), self.step_ends[ranks].ravel(), replay.NONE),
        ]

    def _specials(self) -> list[Ints]:
        """What waits for more than queues starts after its stream, its launch, other streams.

        A collective transfers once its last member has come; what waits for none just runs.
        """
        calls, alone = self.calls, np.flatnonzero(self.special & ~self.joined)
        last = self.arrivals + calls.held_in
        part, rows = self.part, np.flatnonzero(self.special)
        starts, launch, loose = self.starts + rows, part.launch_moment[rows], part.unexplained[rows]
        latency, unexplained_in = part.latency[rows], part.unexplained_in[rows]
        follows = np.where(unexplained_in == by_report.FOLLOWING, loose, 0)
        launched = np.where(unexplained_in == by_report.LAUNCHING, loose, 0)
        other, waiting = self.end_of[part.other], self.starts + part.waiting
        true = (other >= 0) & ~np.isin(waiting, self.not_waiting)
        after, unexplained = part.after[true], part.after_unexplained[true]
        return [
            _edges(self._prior(rows), starts, replay.NONE, 0, part.before[rows], follows),
            _edges(self.root_of[launch], starts, replay.SINCE, launch, latency, launched),
            _edges(other[true], waiting[true], replay.NONE, 0, after, unexplained),
            _edges(self.starts + alone, self.ends + alone, replay.RUNNING, alone),
            _edges(self.starts + calls.gating, self.arrivals + calls.gating_in, replay.NONE),
            _edges(last, self.ends + calls.held, replay.RUNNING, calls.held),
        ]

    def _prior(self, rows: ReplayRows) -> Moments:
        """The moment before each of these on its stream: the end of another, or the begin."""
        free = self.begins + self.part.stream[rows]
        return np.asarray(np.where(self.first_of_stream[rows], free, self.ends + rows - 1))

    def on_circles(self, graph: Graph) -> tuple[CollectiveNumbers, Moments]:
        """The collectives and the activities' starts that wait for each other in circles."""
        source, target = self.waits_for
        before = np.flatnonzero(depths(self.moments, target, source) < 0)
        moments = np.intersect1d(graph.circular, before)
        calls = moments[(moments >= self.arrivals) & (moments < self.marks)] - self.arrivals
        starts = moments[(moments >= self.starts) & (moments < self.ends)]
        return self.calls.ids[calls], starts

    def _contention(self, graph: Graph, run: Ints) -> Contention:
        """Which kernels ran beside waits in collectives, and how long they run without (`run`)."""
        part, calls, axis = self.part, self.calls, self.dataset.axis
        starts = axis.of(part.rank[calls.held], self.start[calls.held])
        ends = axis.of(part.rank[calls.held], calls.arrival[calls.held_in])
        waits = order_by(starts)
        waits = waits[(ends - starts)[waits] > limits.REACTS_NS]
        starts, ends = starts[waits], ends[waits]
        kernels = [np.zeros((4, 0), dtype=np.int64)]
        first = np.append(Stretches.of(part.rank).first, self.n)
        for k, until in threads.blocks(first, threads.AT_ONCE):
            rows = slice(*first[[k, until]])
            begin, end = (axis.of(part.rank[rows], t[rows]) for t in (self.start, self.stop))
            busy = part.kind[rows] == COLLECTIVE
            kernel = np.flatnonzero((part.kind[rows] == COMPUTE) & (end > begin))
            kernel = kernel[order_by(begin[kernel])]
            covered = union(begin[busy], end[busy]).within(begin[kernel], end[kernel])
            # equal for those of a rank that do the same, in any layer and step: by their names,
            # and those of two before and two behind each
            name = self.dataset.activities.name[part.activity[rows][kernel]]
            alike = part.rank[rows][kernel].astype(np.int64)
            for apart in range(-2, 3):
                alike = alike * _MIXES + np.roll(name, apart)
            middle = (begin[kernel] + end[kernel]) // 2
            wait = last_at_or_before(starts, middle)
            wait = np.where(middle < where_known(ends, wait, 0), wait, -1)
            kernels.append(np.stack([rows.start + kernel, alike, covered, wait]))
        kernel, alike, covered, wait = np.concatenate(kernels, axis=1)
        took, beside, freely = run[kernel], wait >= 0, run.copy()
        freely[kernel[beside]] = took[beside] / _times_longer(alike, took, covered)
        moments = self.starts + calls.held[waits], self.arrivals + calls.held_in[waits]
        places = graph.place(np.stack(moments))
        return Contention(freely, kernel[beside], wait[beside], places, ends - starts)


def _times_longer(alike: Ints, took: Ints, covered: Ints) -> float:
    """How many times as long a kernel runs beside a collective as the same one does beside none.

    The middle one of all, by time and the root of how many tell it; at least 1. Kernels are the
    same where `alike` is; `covered` is how long collectives run beside each (ns).
    """
    crowded = covered == took
    others, longer, count = by_report.quantiles(alike[crowded], took[crowded], limits.HALF)
    free = (covered == 0) & np.isin(alike, others)
    keys, alone, times = by_report.quantiles(alike[free], took[free], limits.HALF)
    if not len(keys):
        return 1.0
    same = row_of(others, keys)
    factor = longer[same] / alone
    weight = np.minimum(alone, longer[same]) * np.sqrt(np.minimum(times, count[same]))
    order = order_by(factor)
    until = np.cumsum(weight[order])
    middle = first_at_or_after(until, limits.HALF * until[-1])
    return max(float(factor[order][middle]), 1.0)
