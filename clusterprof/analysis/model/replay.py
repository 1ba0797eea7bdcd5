"""The job as a graph that replays: its hosts, its kernels and its collectives, with their lengths.

Moments and what each waits for:

- a host's moments (launches, waits, steps) follow each other, with the host's own time between;
- a kernel starts after its launch, after the kernel before it on its stream, and after what
  its stream waits for; it ends when it has run;
- a collective's members end a transfer after the last of them has started, a Recv after its Send;
- a host's wait ends with the kernel that it waited for.

Each edge has the length that was recorded, so that a replay of unchanged lengths gives the
recording again. Reports do not hold what streams wait for: it is assumed that a collective waits
for all kernels that its program launched before it on the stream that computes (PyTorch does
so), where the recording does not contradict; and that a kernel which starts without another
reason right after a kernel of another stream ended has waited for that one. What neither explains
stays as it was recorded, and is counted as unexplained.

Runs of kernels that only wait for their stream and their launches are one edge each: in a queue
the end of the i-th is the later of (a) the stream's earlier end plus all running times and (b) the
latest over j of launch j plus the running times from j on (Lindley 1952).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clusterprof.analysis.model.dataset import Bools, Ints
from clusterprof.analysis.model.graph import NEVER, Graph, running_maximum, running_sum


@dataclass(frozen=True)
class Lengths:
    """What a what-if changes, each [n] or [n, what-ifs] (ns)."""

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


@dataclass(frozen=True)
class Replay:
    """A job's graph, and where each length is from. Times on the reference rank's clock (ns)."""

    graph: Graph
    #: the steady-state steps that it replays, one after the other
    steps: Ints
    lengths: Lengths
    #: of each edge: the place of its length among `values`, and what is added to it
    pick: Ints
    plus: Ints
    #: host moments: place of the rank, of the step, and whether a wait ended there
    host_rank: Ints
    host_step: Ints
    host_root: Bools
    #: activities: the moment of the launch, place of the rank, of the step, row in its own table
    launch_moment: Ints
    rank: Ints
    step: Ints
    row: Ints
    kind: Ints
    #: whether it is a member of a collective that waits for the others
    joined: Bools
    #: the length from the activity before it on its stream, and from its launch
    before: Ints
    latency: Ints
    #: where a run of activities begins that wait for nothing else, and the run's number
    fresh: Bools
    part: Ints
    #: moments before the window: when they were, and which one stands for each a round later
    first: Ints
    first_ns: Ints
    again: Ints
    #: moments at which each rank's steps begin, and the last ends, [ranks, steps + 1]
    marks: Ints
    #: when each moment was
    recorded: Ints
    #: what no recorded length explains, of each activity (ns)
    unexplained: Ints
    #: activities that ran while their rank waited in a collective: which wait, else -1
    wait_beside: Ints
    #: how long each runs where nothing waits beside it
    freely: Ints
    #: waits: the moments of the member's start and of the last arrival, [waits, 2]
    waits: Ints
    #: the parts of `before`, `latency` and `plus` that are unexplained
    loose: tuple[Ints, Ints, Ints]

    def values(self, lengths: Lengths) -> Ints:
        """Return the lengths that edges pick from.

        The ends of queued activities, and of launched ones, the hosts' times since they were
        woken, running times, what a wake takes, and none.
        """
        own, run, woken = lengths.own, lengths.run, lengths.woken
        width = max(v.shape[1] if v.ndim == 2 else 0 for v in (own, run, woken))

        def column(values: Ints) -> Ints:
            return values[:, None] if width and values.ndim == 1 else values

        if width:
            own, run, woken = (
                np.broadcast_to(column(v), (len(v), width)) for v in (own, run, woken)
            )
        before, latency = self.before, self.latency
        if lengths.explained:
            before, latency = before - self.loose[0], latency - self.loose[1]
        since = running_sum(own, self.host_root)
        queue = running_sum(run + column(before), self.fresh)
        launched = since[self.launch_moment] + column(latency)
        launched_end = running_maximum(launched + run - queue, self.part) + queue
        return np.concatenate([queue, launched_end, since, run, woken, np.zeros_like(own[:1])])

    def times(self, lengths: Lengths, begin: Ints | None = None) -> Ints:
        """Return all moments' times with these lengths, [moments] or [moments, what-ifs]."""
        return self.one_pass(self.eased(lengths, begin), begin)

    def eased(self, lengths: Lengths, begin: Ints | None = None) -> Lengths:
        """Return the lengths where what ran beside a wait runs faster by the part that is gone.

        A wait in a collective occupies multiprocessors and memory; one pass tells its length.
        """
        if not len(self.waits):
            return lengths
        times = self.one_pass(lengths, begin)
        recorded = np.diff(self.recorded[self.waits])[:, 0]
        left = times[self.waits[:, 1]] - times[self.waits[:, 0]]
        recorded = recorded if left.ndim == 1 else recorded[:, None]
        part = np.clip(left / recorded, 0.0, 1.0)
        beside = np.flatnonzero(self.wait_beside >= 0)
        run = lengths.run[beside]
        faster = run - np.minimum(run, _like(self.freely[beside], run))
        saved = (1 - part[self.wait_beside[beside]]) * _like(faster, part)
        shorter = np.array(
            np.broadcast_to(_like(lengths.run, part), (len(self.rank), *part.shape[1:]))
        )
        shorter[beside] -= saved.astype(np.int64)
        return replace(lengths, run=shorter)

    def edges(self, lengths: Lengths) -> Ints:
        """Return each edge's length, [edges] or [edges, what-ifs]."""
        values = self.values(lengths)
        plus = self.plus - self.loose[2] if lengths.explained else self.plus
        return np.asarray(values[self.pick] + _like(plus, values))

    def one_pass(self, lengths: Lengths, begin: Ints | None = None) -> Ints:
        """Return all moments' times with just these lengths."""
        length = self.edges(lengths)
        known = np.full((self.graph.moments, *length.shape[1:]), NEVER)
        start = self.first_ns if begin is None else begin
        known[self.first] = _like(start, known)
        return self.graph.times(length, known)

    def pace(self, lengths: Lengths, rounds: int = 8, settle: int = 4) -> np.ndarray:
        """Return the mean step (ns), [what-ifs], where the window's steps come again and again.

        The window is replayed `rounds` times, each from where the one before has left hosts and
        queues; the first `settle` do not count.
        """
        begin, ends = None, []
        last = self.marks[:, -1]
        for _ in range(rounds):
            times = self.times(lengths, begin)
            ends.append(times[last])
            later = np.maximum(self.again, 0)
            moved = times[later]
            lost = self.again < 0
            moved[lost] = NEVER
            begin = moved
        steps = max(self.marks.shape[1] - 1, 1)
        took = (ends[-1] - ends[settle - 1]).mean(axis=0) / ((rounds - settle) * steps)
        return np.asarray(took, dtype=float)


def _like(values: Ints, other: np.ndarray) -> Ints:
    """`values` with a column for the what-ifs where `other` has them."""
    return values[:, None] if values.ndim == 1 and other.ndim == 2 else values
