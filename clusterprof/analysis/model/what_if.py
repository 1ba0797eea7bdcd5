"""What-ifs: how long a step would be if somebody's hosts, kernels or transfers took less.

Who (a rank, several, all) times what (the host's own time, kernels and copies, transfers, waits).
A what-if is a `Lengths` for the job's `Replay`; what it saves is the step's length without it less
the step's length with it. Two views: inside the window, as recorded, and in the long run, where
the window comes again and again, so that queues cover nothing for ever.

The base is the job as it runs without the profiler, where the step logs tell its pace: tracing
makes each of a host's moments some microseconds longer, as many as make the long run's step what
it was before the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from clusterprof.analysis.groups.peers import Peers, peers
from clusterprof.analysis.groups.stages import stage_of
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.dataset import Dataset, Floats, Ints
from clusterprof.analysis.model.recorded import replay
from clusterprof.analysis.model.replay import Lengths, Replay
from clusterprof.analysis.model.timeline import COLLECTIVE

Part = Literal["host", "gpu"]
#: rounds of the window in the long run, and those that do not count: queues hold a few steps
_ROUNDS, _SETTLE = 8, 4
#: steps vary by 1% from before the window to inside it
_CLOSE = 0.01
#: what tracing adds to a launch with what lies around it: 14 and 24 µs in two launch-bound programs
#: on H200s under nsys (`tests/data/recordings/pairs`, small-late-host and eager)
_TRACING_NS = 19_000
#: and at most so much: a pause (`limits.LAUNCH_GAP_NS`) is not the profiler's
_MOST_TRACING_NS = limits.LAUNCH_GAP_NS
#: input takes at most so many times as long outside the window: more is not its doing
_MOST_PREFETCHED = 4.0


@dataclass(frozen=True)
class Saved:
    """What a what-if saves a step (ns): in the window, by steady step, and in the long run."""

    each: Floats
    long_ns: float
    #: the step without the what-if: in the window (mean), and in the long run
    base_ns: float
    base_long_ns: float
    #: the stragglers (code, ranks) that are repaired with and without it
    net_of: tuple[tuple[str, tuple[int, ...]], ...]
    #: the saving is stated for the long run without the profiler, rather than for the window
    without_profiler: bool

    @property
    def window_ns(self) -> float:
        """The mean over the window's steady-state steps."""
        return float(self.each.mean()) if len(self.each) else 0.0

    @property
    def ns(self) -> float:
        """The stated saving, of the pace without the profiler where that is known."""
        return self.long_ns if self.without_profiler else self.window_ns

    @property
    def uncertainty_ns(self) -> float:
        """How far the two views are apart: what the window's queues hide or reveal."""
        return abs(self.long_ns - self.window_ns)

    @property
    def most_ns(self) -> float:
        """The larger of both views."""
        return max(self.window_ns, self.long_ns)


class WhatIfs:
    """All what-ifs of one job."""

    def __init__(self, dataset: Dataset, job: Replay) -> None:
        self.dataset, self.job = dataset, job
        self.peers: Peers = peers(dataset, stage_of(dataset))
        self.stage = stage_of(dataset)
        places = range(len(dataset.ranks))
        #: ranks that are compared with other stages only
        self.alone = np.asarray(
            [not (self.stage[self.peers.others(k)] == self.stage[k]).any() for k in places]
        )
        self.step_of_host = np.clip(job.host_step, 0, len(job.steps) - 1)
        #: activities that are no member of a collective, in the order of their launches
        work = np.flatnonzero(~job.joined & (job.kind != COLLECTIVE))
        self.work = work[np.argsort(job.launch_moment[work], kind="stable")]
        self.host_phase, self.phase = self._phases()
        capture = dataset.capture
        before = capture["profiled"]["before_ns"] if capture else None
        usual = dataset.usual_step_ns or before
        self.overhead_ns, self.base = self._without_profiler(usual) if usual else (0, job.lengths)
        #: the hosts' own time without tracing (ns)
        self.untraced = self.base.own
        self.base = self._without_prefetching(usual, self.base) if usual else self.base
        self.known = usual is not None
        self._base_each = self._each(self.base)
        self._base_long = float(job.pace(self.base, _ROUNDS, _SETTLE))

    @property
    def step_ns(self) -> float:
        """The base's step: the long run without the profiler, or the window's mean step."""
        return self._base_long if self.known else float(self._base_each.mean())

    def _phases(self) -> tuple[Ints, Ints]:
        """How many collectives each moment's host has launched before it in its step."""
        job = self.job
        launches = np.zeros(len(job.host_rank), dtype=np.int64)
        launches[job.launch_moment[job.kind == COLLECTIVE]] = 1
        key = job.host_rank * (self.step_of_host.max(initial=0) + 1) + self.step_of_host
        first = np.maximum.accumulate(
            np.where(np.r_[True, key[1:] != key[:-1]], np.arange(len(key)), 0)
        )
        before = np.cumsum(launches) - launches
        phase = before - before[first]
        return phase, phase[job.launch_moment]

    def _without_profiler(self, usual: int) -> tuple[int, Lengths]:
        """What tracing adds to each moment of a host (ns), and the lengths without it.

        What is typical, or the nearest with which a step takes as long as it usually does. GPUs are
        not slowed: where hosts do not explain the rest, the shortest step that they allow.
        """

        def lengths(ns: int) -> Lengths:
            own = self.job.lengths.own
            return replace(
                self.job.lengths, own=np.where(own > 0, np.maximum(own - ns, own // 5), own)
            )

        def pace(ns: int) -> float:
            return float(self.job.pace(lengths(ns), _ROUNDS, _SETTLE))

        def first(step_ns: float) -> int:
            """The least overhead without which a step takes no longer than this."""
            low, high = 0, _MOST_TRACING_NS
            while high - low > 200:
                middle = (low + high) // 2
                low, high = (low, middle) if pace(middle) <= step_ns else (middle, high)
            return high

        slow, fast = pace(0), pace(_MOST_TRACING_NS)
        aim = max(usual, fast)
        least = 0 if slow <= aim * (1 + _CLOSE) else first(aim * (1 + _CLOSE))
        most = _MOST_TRACING_NS if fast >= aim * (1 - _CLOSE) else first(aim * (1 - _CLOSE))
        ns = min(max(_TRACING_NS, least), max(most, least)) if slow > usual else 0
        return ns, lengths(ns)

    def _without_prefetching(self, usual: int, base: Lengths) -> Lengths:
        """Lengths with input as slow as it is outside the window, where steps take longer there.

        While the profiler's start stalls a rank, its loader goes on: the window then begins with
        batches that were fetched ahead. Nothing else makes steps shorter inside a window, so
        that fetching takes so many times longer that the step is the usual one.
        """
        if float(self.job.pace(base, _ROUNDS, _SETTLE)) >= usual * (1 - _CLOSE):
            return base
        end = self.job.recorded[: len(self.job.host_rank)]
        begin = end - self.job.lengths.own
        fetching = host_activity.named_time(self.dataset, self.job.host_rank, begin, end)
        part = fetching["input.stall"] * (base.own / np.maximum(self.job.lengths.own, 1))

        def lengths(times: float) -> Lengths:
            return replace(base, own=base.own + (part * (times - 1)).astype(np.int64))

        low, high = 1.0, _MOST_PREFETCHED
        if float(self.job.pace(lengths(high), _ROUNDS, _SETTLE)) < usual * (1 - _CLOSE):
            return base
        while high - low > 0.01:
            middle = (low + high) / 2
            enough = float(self.job.pace(lengths(middle), _ROUNDS, _SETTLE)) >= usual
            low, high = (low, middle) if enough else (middle, high)
        return lengths(high)

    def _each(self, lengths: Lengths) -> Floats:
        times = self.job.times(lengths)
        each = np.diff(times[self.job.marks], axis=1).mean(axis=0)
        # a steady-state step apart from the others is taken to be as long as they are
        out = np.full(len(self.dataset.steady_steps), each.mean())
        out[np.searchsorted(self.dataset.steady_steps, self.job.steps)] = each
        return out

    def saved(self, lengths: Lengths, base: Lengths | None = None) -> Saved:
        """What `lengths` saves against `base` (the job's own, where none is given)."""
        before = self._base_each if base is None else self._each(base)
        long = self._base_long if base is None else float(self.job.pace(base, _ROUNDS, _SETTLE))
        return Saved(
            before - self._each(lengths),
            long - float(self.job.pace(lengths, _ROUNDS, _SETTLE)),
            float(before.mean()),
            long,
            (base or self.base).repaired,
            self.known,
        )

    def excess(self, part: Part) -> Floats:
        """How much more than its middle peer each rank takes a step, [ranks, steps] (ns)."""
        job, shape = self.job, (len(self.dataset.ranks), len(self.job.steps))
        total = np.full(shape, np.nan)
        known = np.unique(job.host_rank)
        total[known] = 0.0
        if part == "host":
            own = self.base.own - self._in_common()
            np.add.at(total, (job.host_rank, self.step_of_host), own)
        else:
            rows = self.work
            free = np.minimum(self.base.run, job.freely)
            np.add.at(total, (job.rank[rows], job.step[rows]), free[rows])
        # a rank that is its stage's only one is compared by what each launch takes
        count = np.maximum(np.bincount(job.host_rank, minlength=len(total)), 1)[:, None]
        each = self.peers.excess(total / count)[0] * count
        mine = np.where(self.alone[:, None], each, self.peers.excess(total)[0])
        out = np.zeros((len(total), len(self.dataset.steady_steps)))
        out[:, np.searchsorted(self.dataset.steady_steps, job.steps)] = mine
        return out

    def _in_common(self) -> Ints:
        """Each host moment's time in what most hosts do as long (fetching, collecting, the GIL).

        In turn it makes another rank late in each step, and none of them a straggler.
        """
        job, common = self.job, np.zeros(len(self.job.host_rank), dtype=np.int64)
        end = job.recorded[: len(common)]
        parts = host_activity.named_time(self.dataset, job.host_rank, end - job.lengths.own, end)
        share = self.base.own / np.maximum(job.lengths.own, 1)
        for part in parts.values():
            spent = np.bincount(job.host_rank, part, len(self.dataset.ranks))
            each = np.sort(spent[np.unique(job.host_rank)])
            if len(each) and each[(len(each) - 1) // 2] >= limits.SHARED_FRAC * each[-1] > 0:
                common += (part * share).astype(np.int64)
        return common

    def like_peers(self, lengths: Lengths, ranks: Sequence[int], part: Part) -> Lengths:
        """`lengths` with each of `ranks` (places) as fast as its middle peer, in one part.

        The peer is one of those not in `ranks`: the one whose step takes the middle time, with its
        own lengths, as noisy as they are. Where both do the same things in the same order, each
        thing takes what it takes the peer; else, between two collectives, the longest are cut
        until the sum is the peer's: what a rank does besides is one long thing, not many.
        """
        values = (lengths.own if part == "host" else lengths.run).copy()
        rank = self.job.host_rank if part == "host" else self.job.rank
        step = self.step_of_host if part == "host" else self.job.step
        phase = self.host_phase if part == "host" else self.phase
        chosen = np.arange(len(values)) if part == "host" else self.work
        # a peer's kernels as they would be without its waiting for these ranks
        source = values if part == "host" else np.minimum(values, self.job.freely)
        source = source.copy()
        for k in ranks:
            others = np.setdiff1d(self.peers.others(k), ranks)
            if not len(others):
                continue
            rows = {int(q): chosen[rank[chosen] == q] for q in (k, *others[:_MOST_PEERS])}
            for s in range(len(self.job.steps)):
                here = {q: r[step[r] == s] for q, r in rows.items()}
                total = {q: int(source[r].sum()) for q, r in here.items() if q != k}
                peer = sorted(total, key=lambda q: total[q])[len(total) // 2]
                mine, its = here[k], here[peer]
                if not self.alone[k]:
                    values[mine] = _as_long(source[mine], phase[mine], source[its], phase[its])
                elif len(its):
                    # another stage has another number of launches: as long for each of them
                    values[mine] = cut(source[mine], total[peer] * len(mine) // len(its))
        return replace(lengths, **{"own" if part == "host" else "run": values})


#: with more peers than these, only so many are compared with
_MOST_PEERS = 16


def _as_long(mine: Ints, my_phase: Ints, its: Ints, its_phase: Ints) -> Ints:
    """`mine` with the sums of `its`, phase by phase; element by element where they are alike."""
    if len(mine) == len(its) and (my_phase == its_phase).all():
        return its
    out: Ints = mine.copy()
    for phase in np.unique(my_phase).tolist():
        here, there = my_phase == phase, its_phase == phase
        if here.sum() == there.sum():
            out[here] = its[there]
        else:
            out[here] = cut(mine[here], int(its[there].sum()))
    return out


def cut(values: Ints, total: int) -> Ints:
    """`values` that add up to `total`: the greatest cut down to one level, or all scaled up."""
    have = int(values.sum())
    if have <= total:
        return np.asarray(values * total // max(have, 1))
    order = np.sort(values)[::-1]
    level = (total - (have - np.cumsum(order))) // np.arange(1, len(order) + 1)
    fits = np.flatnonzero(level >= np.r_[order[1:], 0])
    return np.asarray(np.minimum(values, max(int(level[fits[0]]) if len(fits) else 0, 0)))


def what_ifs(dataset: Dataset) -> WhatIfs | None:
    """The job's what-ifs, once; None where it has no steady-state steps."""

    def make() -> WhatIfs | None:
        job = replay(dataset)
        return WhatIfs(dataset, job) if job is not None else None

    return dataset.cached("what-ifs", make)
