"""The job as a graph that replays: its hosts, its kernels and its collectives, with their lengths.

In a `Graph` of moments each is as late as the latest that it waits for, plus that edge's length.
`docs/findings.md` says what waits for what, and what is assumed where reports do not tell. Each
edge has the length that was recorded: a replay of unchanged lengths gives the recording again, and
one with other lengths what would have been (a what-if), of which it takes any number side by side.

Runs of kernels that only wait for their stream and their launches are one edge each: in a queue
the end of the i-th is the later of (a) the stream's earlier end plus all running times and (b) the
latest over j of launch j plus the running times from j on (Lindley 1952).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha1
from itertools import pairwise
from weakref import finalize

import numpy as np

from clusterprof import threads
from clusterprof.analysis.model.by_report import FOLLOWING, LAUNCHING, NEVER, Part
from clusterprof.columns import (
    BlockRows,
    Bools,
    EdgeRows,
    Floats,
    HostMoments,
    Ints,
    MomentPlaces,
    Moments,
    RankPlaces,
    ReplayRanks,
    ReplayRows,
    Small,
    StepNumbers,
    Stretches,
    begins,
    count_by,
    first_at_or_after,
    first_of,
    first_places,
    inverse,
    order_by,
    places,
    ranges,
    rows_between,
    running_maximum,
    running_sum,
    where_known,
)

#: until queues have filled, so many steps do not count: with 4 a step of the recording
#: pipeline-1f1b takes 47.7 ms, with 12 48.8, and with four times as many as well
SETTLE_STEPS = 12

#: some of the ranks that are replayed, by their places; and all of them
Some = ReplayRanks | slice
EVERY = slice(None)

#: kinds of lengths that edges pick from: the ends of queued activities, and of launched ones, the
#: hosts' times since they were woken, running times, what a wake takes, and none
QUEUED, LAUNCHED, SINCE, RUNNING, WAKING, NONE = range(6)


class Graph:
    """Moments in the order in which they are computed: all that it waits for before each.

    `order` is by level, and has the moments of edges and `others` alone, which are few where most
    activities only queue; moments on a circle, and those behind one, are in no level. `edge` is the
    place of each edge among those given. Each of `levels` is its edges, its targets, and the
    stretches of its edges that each target has.
    """

    order: Moments
    edge: Ints
    source: MomentPlaces
    target: MomentPlaces

    def __init__(
        self, moments: int, source: Moments, target: Moments, others: Sequence[int] | Moments = ()
    ) -> None:
        self.moments = moments
        others = np.asarray(others, dtype=np.int64)
        used, where = places(np.concatenate((source, target, others)))
        self._used = used
        #: how many places there are: one for each in `order`, and one for all other moments
        self.size = len(used) + 1
        source, target, _ = np.split(where, [len(source), 2 * len(source)])
        depth = depths(len(used), source, target)
        order = order_by(np.maximum(depth, 0))
        place = inverse(order)
        self.order, self._place = used[order], place
        edge = np.flatnonzero(depth[target] > 0)
        edge = edge[order_by(place[target[edge]])]
        to = place[target[edge]]
        self.levels = list[tuple[slice, slice, Stretches]]()
        ends = np.cumsum(count_by(depth[target[edge]])[1:]).tolist()
        for low, high in pairwise([0, *ends]):
            of_targets = Stretches.of(to[low:high])
            self.levels.append((slice(low, high), slice(to[low], to[high - 1] + 1), of_targets))
        self.edge, self.source, self.target = edge, place[source[edge]], to
        #: moments on or behind a circle: they have no time
        self.circular: Moments = used[depth < 0]

    def place(self, moments: Moments) -> MomentPlaces:
        """Return where these moments, of any shape, are in `order`; of others the last place."""
        return where_known(self._place, first_places(self._used, moments), self.size - 1)

    def one_pass(self, length: Ints, times: Ints) -> Ints:
        """Return when each moment is, in `times`: which may have more, and is written to.

        `length` is [edges] or [what-ifs, edges] (ns), in the order of `edge`; `times` is [moments]
        or [what-ifs, moments], in `order`, with the times of moments that wait for nothing, and
        NEVER for all others, or the least time of a moment that also waits.
        """
        for edges, targets, of_targets in self.levels:
            reached: Ints = times.take(self.source[edges], axis=-1)
            reached += length[..., edges]
            latest = times[..., targets]
            np.maximum(latest, of_targets.greatest(reached), out=latest)
        return times


def depths(moments: int, source: Moments, target: Moments) -> Ints:
    """How many edges lie on the longest way to each moment; -1 where it is on or behind a circle.

    Kahn's method (Topological sorting of large networks, CACM 1962), a whole level at a time.
    """
    depth = np.full(moments, -1, dtype=np.int64)
    waiting = count_by(target, moments)
    order = order_by(source)
    out_of, leads = first_at_or_after(source[order], np.arange(moments + 1)), target[order]
    now, level = np.flatnonzero(waiting == 0), 0
    while len(now):
        depth[now] = level
        low, count = out_of[now], out_of[now + 1] - out_of[now]
        reached = leads[ranges(low, count)]
        if not len(reached):
            break
        nodes, arrived = np.unique(reached, return_counts=True)
        waiting[nodes] -= arrived
        now, level = nodes[waiting[nodes] == 0], level + 1
    return depth


@dataclass(frozen=True, eq=False)
class Lengths:
    """What a what-if changes (ns), each [n]; where several side by side differ [what-ifs, n]."""

    #: each host moment: the host's own time since the moment before it
    own: Ints
    #: each activity: how long it runs, of a collective without its waiting
    run: Ints
    #: each host moment at which a wait ends: how long after what it waited for; NEVER: no wait
    woken: Ints
    #: the stragglers (code, ranks) that are repaired in it
    repaired: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: whether the delays that no recorded length explains are left out
    explained: bool = False


@dataclass(frozen=True, eq=False)
class Contention:
    """What ran beside a collective that waits, which occupies multiprocessors and memory."""

    #: how long each activity runs where nothing waits beside it (ns)
    freely: Ints
    #: activities that ran while their rank waited in a collective, and the place of that wait
    beside: ReplayRows
    wait_beside: Ints
    #: waits: the member's start and the last arrival, [2, waits], and the length
    waits: MomentPlaces
    waits_ns: Ints

    def eased(self, run: Ints, times: Ints) -> Ints:
        """Return running times that are shorter as waits beside them are; `run` if none is.

        `times` are those of a pass with `run`, in the graph's order.
        """
        left = times[..., self.waits[1]] - times[..., self.waits[0]]
        share = np.clip(left / self.waits_ns, 0.0, 1.0)[..., self.wait_beside]
        crowded = run[..., self.beside]
        faster = crowded - np.minimum(crowded, self.freely[self.beside])
        saved = ((1 - share) * faster).astype(np.int64)
        if not saved.any():
            return run
        eased = np.array(np.broadcast_to(run, (*saved.shape[:-1], run.shape[-1])))
        eased[..., self.beside] -= saved
        return eased


#: of arrays that are still there, by their `id`; what-ifs share most of theirs
_DIGESTS = dict[int, bytes]()


def _digest(array: Ints) -> bytes:
    """The same for the same array; processors have instructions for SHA-1."""
    key = id(array)
    if key not in _DIGESTS:
        hashed = sha1(f"{array.dtype} {array.shape}".encode(), usedforsecurity=False)
        hashed.update(np.ascontiguousarray(array).data)
        _DIGESTS[key] = hashed.digest()
        finalize(array, _DIGESTS.pop, key)
    return _DIGESTS[key]


@dataclass(eq=False, kw_only=True)
class Replay(Part):
    """A job's graph, and where each length is from."""

    graph: Graph
    #: the steady-state steps that it replays, one after the other
    steps: StepNumbers
    lengths: Lengths
    #: of each edge of `graph`: its kind of length, whose length of that kind, and what is added
    kind_of_edge: Small
    pick: ReplayRows | HostMoments
    plus: Ints
    #: host moments at which a wait ended
    host_root: Bools
    #: activities that are members of a collective that waits for the others
    joined: Bools
    #: where a run of activities begins that wait for nothing else
    fresh: Bools
    #: moments before the window, when they were, and what stands for each a round later
    first: MomentPlaces
    first_ns: Ints
    again: MomentPlaces
    #: moments at which each rank's steps begin, and the last ends, [ranks, steps + 1]
    marks: Moments
    contention: Contention
    #: the part of `plus` that is unexplained
    loose: Ints
    #: how many collectives were taken apart, since they wait for each other in circles
    apart: int
    #: each step's share of the long run, [steps]; None: all come equally often
    shares: Floats | None = None
    #: what was replayed already (`long_run`), by the lengths
    _known: dict[tuple[object, ...], tuple[Ints, Floats]] = field(default_factory=dict, init=False)

    @property
    def host_spans(self) -> tuple[Ints, Ints]:
        """When each host moment's own time began and ended in the recording."""
        return self.host_at - self.lengths.own, self.host_at

    def __post_init__(self) -> None:
        #: the first moment of each rank's host, and these ranks, ascending
        self.first_of_host: HostMoments = Stretches.of(self.host_rank).first
        self.ranks: RankPlaces = self.host_rank[self.first_of_host]

    def launched_before(self, group: Ints, which: Bools | slice = EVERY) -> Small:
        """How many of these activities its host has launched before each host moment of a group.

        Groups follow each other: `group` [host moments] is the same in each.
        """
        launches = np.zeros(len(self.host_rank), dtype=np.int32)
        launches[self.launch_moment[which]] = 1
        so_far = running_sum(launches, first_of(begins(group)))
        return (so_far - launches).astype(np.int32)

    @cached_property
    def blocks(self) -> list[Block]:
        """The job's ranks in parts, none of which has many activities."""
        rows = np.append(first_at_or_after(self.rank, self.ranks), len(self.rank))
        hosts = np.append(self.first_of_host, len(self.host_rank))
        return [
            Block(self, slice(*hosts[[k, until]]), slice(*rows[[k, until]]))
            for k, until in threads.blocks(rows, threads.AT_ONCE)
        ]

    def times(self, lengths: Lengths) -> Ints:
        """Return all moments' times with these lengths, [moments] or [what-ifs, moments]."""
        times = self._passes(lengths)(self.first_ns)[-1]
        return times[..., self.graph.place(np.arange(self.graph.moments))]

    def _passes(self, lengths: Lengths) -> Callable[[Ints], list[Ints]]:
        """A function from when what came before the window was (`first_ns`) to all times.

        Of two passes where waits are shorter than recorded: what ran beside them is `eased` then.
        """
        plain = eased = self.edges(lengths)
        run = lengths.run

        def times(begin: Ints) -> list[Ints]:
            nonlocal eased, run
            first = self.one_pass(plain, begin)
            shorter = self.contention.eased(lengths.run, first)
            if shorter is lengths.run:
                return [first]
            # from round to round the waits soon remain as they are
            if not np.array_equal(shorter, run):
                eased, run = self.edges(replace(lengths, run=shorter)), shorter
            return [first, self.one_pass(eased, begin)]

        return times

    def edges(self, lengths: Lengths) -> Ints:
        """Return each edge's length, [edges] or [what-ifs, edges]."""
        plus = self.plus - self.loose if lengths.explained else self.plus
        changed = lengths.own, lengths.run, lengths.woken
        side_by_side = np.broadcast_shapes(*(values.shape[:-1] for values in changed))
        edges = np.array(np.broadcast_to(plus, (*side_by_side, len(plus))))
        threads.each(lambda block: block.add_to(edges, lengths), self.blocks)
        return edges

    @cached_property
    def picked(self) -> list[tuple[EdgeRows, ReplayRows | HostMoments]]:
        """Which edges pick a length of each kind that has any, and whose length; by the latter."""
        order = order_by(self.pick)
        by_kind = [order[self.kind_of_edge[order] == kind] for kind in range(NONE)]
        return [(edges, self.pick[edges]) for edges in by_kind]

    def one_pass(self, length: Ints, begin: Ints | None = None) -> Ints:
        """Return all moments' times with these lengths of edges, in the graph's order."""
        times = np.full((*length.shape[:-1], self.graph.size), NEVER)
        times[..., self.first] = self.first_ns if begin is None else begin
        return self.graph.one_pass(length, times)

    def pace(self, lengths: Lengths, ranks: Some = EVERY) -> np.ndarray:
        """Return some ranks' mean step (ns), [what-ifs], where the window comes again and again."""
        steps = self.long_run(lengths)[1][..., ranks, :].mean(axis=-2)
        return np.asarray(steps.mean(axis=-1) if self.shares is None else steps @ self.shares)

    def long_run(self, lengths: Lengths) -> tuple[Ints, Floats]:
        """Return when the window's steps begin and the last ends (as `marks`), and their long run.

        That is how long each is (ns) where they come again and again, [what-ifs,] ranks, steps. It
        begins with empty queues: so it shows at once how much slower a host is than its GPU. Each
        round goes on from where the one before has left hosts and queues, and as many steps count
        as do not. Once all moments go on as they do, and the next round begins so, those that are
        left are known. The same lengths are replayed once.
        """
        key = (lengths.explained, *map(_digest, (lengths.own, lengths.run, lengths.woken)))
        if key in self._known:
            return self._known[key]
        passes, rounds, earlier = self._passes(lengths), list[Ints](), list[Ints]()
        marks = self.graph.place(self.marks)
        window = passes(self.first_ns)[-1]
        begin, change = window[..., self.again], np.zeros(0, dtype=np.int64)
        # no GPU has more to do when the first host goes on
        hosts = len(self.first_of_host)
        goes_on = begin[..., :hosts].min(axis=-1, keepdims=True)
        begin[..., hosts:] = np.minimum(begin[..., hosts:], goes_on)
        steps = max(self.marks.shape[1] - 1, 1)
        settled = math.ceil(SETTLE_STEPS / steps)
        for _ in range(2 * settled):
            times = passes(begin)
            rounds.append(times[-1][..., marks])
            left = times[-1][..., self.again]
            later = left - begin
            if np.array_equal(change, later) and self._goes_on(earlier, times):
                break
            begin, earlier, change = left, times, later
        while len(rounds) < 2 * settled:
            rounds.append(2 * rounds[-1] - rounds[-2])
        # a round begins where the one before has ended
        ends = [rounds[settled - 1][..., -1:], *(times[..., 1:] for times in rounds[settled:])]
        took = np.diff(np.concatenate(ends, axis=-1))
        took = took.reshape(*took.shape[:-1], settled, steps).mean(axis=-2)
        return self._known.setdefault(key, (window[..., marks], took))

    def _goes_on(self, before: list[Ints], now: list[Ints]) -> bool:
        """Whether each moment is as much later in all rounds to come as it is in this one.

        That of two rounds' passes, of which the next begins as much later as this one did: so it is
        where no moment gets later than one that waits for it, and waits stay as long as they are.
        """
        if len(before) != len(now):
            return False
        change = np.stack(now) - np.stack(before)
        began, ended = (change[0][..., places] for places in self.contention.waits)
        edges = self.graph.source, self.graph.target
        sources, targets = (change.take(places, axis=-1) for places in edges)
        return np.array_equal(began, ended) and bool((sources <= targets).all())


class Block:
    """Some of a job's ranks, one after the other: their host moments and their activities.

    What is computed of all lengths is computed of one block after the other: so it stays in the
    processor's cache, and of a large job is never all there.
    """

    def __init__(self, job: Replay, hosts: slice, rows: slice) -> None:
        self.job, self.hosts, self.rows = job, hosts, rows
        #: of each activity: its run's first one, and the number of its run, both in this block
        fresh = job.fresh[rows]
        self.begin, self.run = first_of(fresh), np.cumsum(fresh, dtype=np.int32) - 1
        #: each host moment's last one at which a wait ended, or the window began
        self.root = first_of(job.host_root[hosts])
        #: of each kind: which edges pick a length of this block, and whose (host moments, too)
        self._picks = list[tuple[EdgeRows, BlockRows]]()
        for (edges, place), among in zip(job.picked, (rows, rows, hosts, rows, hosts), strict=True):
            inside = rows_between(place, among.start, among.stop)
            self._picks.append((edges[inside], place[inside] - among.start))
        self._ends, self._end = np.unique(self._picks[LAUNCHED][1], return_inverse=True)
        begin = self.begin[self._ends]
        begin[1:] = np.maximum(begin[1:], self._ends[:-1] + 1)
        # between an end and the next run's begin nothing is looked for
        bounds = np.stack([begin, self._ends + 1], axis=1).ravel()
        self._runs_and_others = Stretches(bounds[bounds < len(self.run)], len(self.run))

    def since(self, lengths: Lengths) -> Ints:
        """Return each host moment's own time of its host since it was woken (ns)."""
        return running_sum(lengths.own[..., self.hosts], self.root)

    def launched(self, lengths: Lengths, since: Ints) -> tuple[Ints, Ints]:
        """Return what the ends of queued activities are made of (ns).

        Before each activity, and behind the last, the sum of all times in the queues so far; and of
        each its host's time until its launch (`since` it was woken) and its own, beyond that sum.
        """
        job, rows, run = self.job, self.rows, lengths.run[..., self.rows]
        before, latency = job.before[rows], job.latency[rows]
        if lengths.explained:
            much, where = job.unexplained[rows], job.unexplained_in[rows]
            before = before - np.where(where == FOLLOWING, much, 0)
            latency = latency - np.where(where == LAUNCHING, much, 0)
        total = np.zeros((*run.shape[:-1], run.shape[-1] + 1), dtype=np.int64)
        np.cumsum(run + before, axis=-1, out=total[..., 1:])
        launched = since.take(job.launch_moment[rows] - self.hosts.start, axis=-1)
        launched = launched + latency + run - total[..., 1:]
        return total, launched

    def add_to(self, edges: Ints, lengths: Lengths) -> None:
        """Add the lengths of this block to those `edges` that pick them."""
        since = self.since(lengths)
        total, launched = self.launched(lengths, since)
        (queued, last), (by_launch, end), (own, moment), (running, row), (woken, wait) = self._picks
        edges[..., own] += since.take(moment, axis=-1)
        edges[..., woken] += lengths.woken[..., self.hosts].take(wait, axis=-1)
        edges[..., queued] += total.take(last + 1, axis=-1) - total.take(self.begin[last], axis=-1)
        edges[..., running] += lengths.run[..., self.rows].take(row, axis=-1)
        if len(end):
            latest = self._runs_and_others.greatest(launched)[..., ::2]
            latest = running_maximum(latest, self.run[self._ends])
            edges[..., by_launch] += total.take(end + 1, axis=-1) + latest.take(self._end, axis=-1)
