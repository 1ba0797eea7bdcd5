"""What profilers add to recorded times: the job without it, and hosts under unlike profilers.

Tracing makes hosts slower in the window, and GPUs that wait for them clock higher there. Both
explain a pace between the window's and what the GPUs need; which one it is decides what a late host
costs, and reports do not tell (`docs/findings.md`, step 3).

A profiler lengthens what it records, each in its own way, and nothing that a host does in between.
So of two hosts at the same place of a step one is later by what its quiet time, in which nothing
begins or ends, exceeds all of the other's time there: less would be the profilers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.replay import EVERY, Lengths, Replay, Some
from clusterprof.analysis.model.timeline import COMPUTE
from clusterprof.analysis.model.topology import Peers
from clusterprof.columns import (
    Bools,
    Floats,
    HostPlaces,
    Ints,
    RankPlaces,
    StepPlaces,
    Stretches,
    count_by,
    sums,
)

#: what tracing adds to a launch with what lies around it: the least and the most that was measured
#: (bare launches under torch.profiler, eager training under nsys), and what is typical between 14
#: and 24 µs in two launch-bound programs under nsys (`bench/README.md`, "What tracing costs")
_TRACING_NS = 4_000, 19_000, 24_000
#: kernels take at most so many times as long where GPUs no longer wait: H200s that always computed
#: ran at 1.74 GHz, at their power limit, those that waited at up to 1.96, and kernels wait for
#: memory, too (`tests/data/README.md`; 1.07 to 1.10 in four of its pairs)
MOST_SLOWER = 1.1
#: input takes at most so many times as long outside the window (1.6 to 2.1 times in the recordings
#: that tell it): more is not its doing
_MOST_PREFETCHED = 4.0


# --- the job as it runs without the profiler, by the pace of its step logs


@dataclass(frozen=True)
class Untraced:
    """A job without the profiler: one that explains the pace of its step logs."""

    job: Replay
    lengths: Lengths
    #: what tracing adds to each moment of a host (ns), and the hosts' own time without it
    overhead_ns: int
    own: Ints
    #: by how many times kernels take longer than in the window
    slower: float

    def pace(self, lengths: Lengths | None = None, ranks: Some = EVERY) -> float:
        """The step of some ranks (ns) in the long run, with the lengths of a what-if."""
        return float(self.job.pace(lengths or self.lengths, ranks))

    def pace_as_in(self, other: Untraced, lengths: Lengths, ranks: Some = EVERY) -> float:
        """Some ranks' step (ns) in the long run with a what-if's lengths of another explanation."""
        scaled = {}
        for name in ("own", "run"):
            what_if, to, base = (vars(ns)[name] for ns in (lengths, self.lengths, other.lengths))
            # a transfer that ends before its last member has come (by their clocks) takes less
            # than no time
            times = np.divide(to, base, out=np.ones(len(base)), where=base > 0)
            scaled[name] = (what_if * times).astype(np.int64)
        return self.pace(replace(lengths, **scaled), ranks)


def explanations(
    job: Replay, usual_ns: int | None, fetching: Ints, outside_ns: Floats
) -> list[Untraced]:
    """Return the jobs whose steps take `usual_ns`, the likeliest first.

    `fetching` is each host moment's own time in input (ns), `outside_ns` the lengths of the steps
    outside the window, where many are known. Tracing adds what the pace tells where
    GPUs are as fast as in the window; or what is typical, or the least or the most of what was
    measured. Hosts alone are likelier where at least half of what the window's hosts delay its GPUs
    by is left outside. Without a pace it is the window's job, or what typical tracing leaves of it.
    """
    low, typical_ns, high = _TRACING_NS
    if usual_ns is None:
        return [_made(job, 0), _made(job, typical_ns)]
    job = _as_often(job, usual_ns, outside_ns)
    window = _made(job, 0)
    slow, fast = window.pace(), _made(job, limits.PAUSE_NS).pace()
    usual_ns = max(usual_ns, math.ceil(fast))
    faster = slow <= usual_ns * (1 - limits.VARIES_FRAC)
    least, ns = (0, 0) if faster else _overhead(job, usual_ns, slow, fast)
    overheads = (ns, typical_ns, max(low, least), high)
    jobs = {added: _at_pace(job, added, usual_ns, fetching * faster) for added in overheads}
    jobs[ns] = jobs[ns] or window
    # GPUs and transfers alone
    idle = replace(job.lengths, own=np.minimum(job.lengths.own, 0))
    if faster and jobs[typical_ns]:
        # that tracing costs nothing was never measured
        del jobs[ns]
    elif usual_ns - (needed_ns := window.pace(idle)) < (slow - needed_ns) / 2:
        jobs = {typical_ns: jobs[typical_ns]} | jobs
    return [explained for explained in jobs.values() if explained]


def _as_often(job: Replay, usual_ns: int, outside_ns: Floats) -> Replay:
    """The job whose long steps come as often as outside the window.

    A stall may fall into a window once, or more long steps of a pattern than short ones. Steps
    outside tell how often such a long one comes. Where the mean takes longer than the pace even so,
    and without the most that tracing costs, longer steps count less, by the shares that differ
    least from those (the greatest relative entropy: Jaynes, Information theory and statistical
    mechanics, 1957). Where even the shortest takes longer, how often they come is not why: then the
    mean is no shorter than the middle step.
    """
    steps_ns = job.long_run(_made(job, _TRACING_NS[2]).lengths)[1].mean(axis=0)
    often = _seen_outside(steps_ns, outside_ns)
    usual = float(usual_ns if steps_ns.min() <= usual_ns else np.median(steps_ns))
    if often @ steps_ns <= usual * (1 + limits.VARIES_FRAC):
        return replace(job, shares=often) if np.ptp(often) else job
    longer = (steps_ns - steps_ns.min()) / steps_ns.std()

    def shares(steepness: float) -> Floats:
        weights = often * np.exp(-steepness * longer)
        return np.asarray(weights / weights.sum())

    def enough(steepness: float) -> bool:
        return bool(shares(steepness) @ steps_ns <= usual)

    # the greater, the fewer steps are left: to the shortest alone
    most = next((2.0**k for k in range(len(longer)) if enough(2.0**k)), 2.0 ** len(longer))
    return replace(job, shares=shares(_least(enough, 0.0, most, most * limits.VARIES_FRAC)))


def _seen_outside(steps_ns: Floats, outside_ns: Floats) -> Floats:
    """How often each of the window's steps comes, by the steps outside: all as often without any.

    A long one, by half longer than those outside usually are, comes as often as there are steps
    more than half way to it; not more often than in the window, where loaders may be ahead.
    """
    equal = np.full(len(steps_ns), 1 / len(steps_ns))
    if not len(outside_ns):
        return equal
    usual = max(float(np.median(outside_ns)), float(steps_ns.min()))
    long = steps_ns > usual * (1 + limits.HALF)
    if not long.any():
        return equal
    often = float((outside_ns > (usual + steps_ns[long].min()) / 2).mean())
    if often >= long.mean():
        return equal
    return np.asarray(np.where(long, often / long.sum(), (1 - often) / (~long).sum()))


def _at_pace(job: Replay, tracing_ns: int, usual_ns: int, fetching: Ints) -> Untraced | None:
    """The job with so much tracing and the usual step; None where it can have no such step.

    Where its steps are too short input is slower outside the window: while the profiler's start
    stalls a rank its loader goes on, so that the window begins with batches that were fetched
    ahead. Where that would be too much kernels are slower there.
    """
    traced, least_ns = _made(job, tracing_ns), usual_ns * (1 - limits.VARIES_FRAC)
    pace = traced.pace()
    if pace >= least_ns:
        return traced if pace <= usual_ns * (1 + limits.VARIES_FRAC) else None

    def fetched(times: float) -> Untraced:
        own = traced.lengths.own + (fetching * (times - 1)).astype(np.int64)
        return replace(traced, lengths=replace(traced.lengths, own=own))

    def enough(times: float) -> bool:
        return longer(times).pace() >= usual_ns

    clocked = partial(_made, job, tracing_ns)
    for longer, most, within in ((fetched, _MOST_PREFETCHED, 0.01), (clocked, MOST_SLOWER, 0.002)):
        if longer(most).pace() >= least_ns:
            return longer(_least(enough, 1.0, most, within))
    return None


def _made(job: Replay, tracing_ns: int, slower: float = 1.0) -> Untraced:
    own, run = job.lengths.own, job.lengths.run
    if tracing_ns:
        own = np.where(own > 0, np.maximum(own - tracing_ns, own // 5), own)
    if slower > 1:
        times = np.where(job.kind == COMPUTE, slower, 1.0)
        freely = (job.contention.freely * times).astype(np.int64)
        run = (run * times).astype(np.int64)
        job = replace(job, contention=replace(job.contention, freely=freely))
    return Untraced(job, replace(job.lengths, own=own, run=run), tracing_ns, own, slower)


def _least(enough: Callable[[float], bool], low: float, high: float, within: float) -> float:
    """The least value, within an error, that is `enough`: as `high` is."""
    while high - low > within:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _overhead(job: Replay, usual_ns: int, slow: float, fast: float) -> tuple[int, int]:
    """What tracing adds to each moment of a host (ns) where GPUs are as fast as in the window.

    `slow` and `fast` are what a step takes (ns) as recorded, and if tracing had added all that it
    may (`limits.PAUSE_NS`). Returns the least without which a step takes what it usually does; and
    what is typical if it then does, else the middle of all without which it does.
    """
    resolution_ns = 200

    def first(step_ns: float) -> float:
        """The least overhead without which a step takes no longer than this."""
        return _least(
            lambda ns: _made(job, int(ns)).pace() <= step_ns, 0, limits.PAUSE_NS, resolution_ns
        )

    long, short = usual_ns * (1 + limits.VARIES_FRAC), usual_ns * (1 - limits.VARIES_FRAC)
    least = 0 if slow <= long else first(long)
    most = limits.PAUSE_NS if fast >= short else first(short)
    typical = _TRACING_NS[1]
    ns = typical if least <= typical <= most else (least + max(most, least)) / 2
    return int(least), int(ns)


# --- hosts under unlike profilers: by how much one is later, whatever these lengthen


@dataclass(frozen=True)
class Hosts:
    """The hosts' moments by their places in the steps, and what profilers may lengthen of each."""

    peers: Peers
    rank: RankPlaces
    #: the place of each moment, and the step of each place
    place: HostPlaces
    step: StepPlaces
    #: of each moment's own time that which profilers may lengthen (ns)
    traced: Ints

    def later(self, own: Ints) -> Floats:
        """By how much each host is later than its middle peer, [ranks, steps] (ns): or earlier."""
        _, late, early = self._compared(own)
        return Stretches.of(self.step).sum(late - early)

    def in_time(self, own: Ints, ranks: RankPlaces) -> Ints:
        """The hosts' own times where `ranks` are no later than the others, step by step.

        Where one is later, by so much less as it is earlier elsewhere in the step.
        """
        quiet, late, early = self._compared(own, ranks)
        early, all_late = Stretches.of(self.step).sum(np.stack([early, late]))
        kept = np.clip(early / np.maximum(all_late, 1), 0, 1)
        less = late / np.maximum(quiet, 1) * (1 - kept[:, self.step])
        spent = np.maximum(own - self.traced, 0) * np.isin(self.rank, ranks)
        return np.asarray(own - (spent * less[self.rank, self.place]).astype(np.int64))

    def _compared(self, own: Ints, ranks: Sequence[int] | RankPlaces = ()) -> Floats:
        """How long hosts are quiet, and by how much they are later and earlier than their peers.

        [3, ranks, places] (ns). The peers are those that are not in `ranks`.
        """
        places = self.rank, self.place, len(self.peers.circle_of)
        quiet, whole = _at_places(*places, np.maximum(own - self.traced, 0), own)
        usual_quiet, usual = (self.peers.usual(each, ranks) for each in (quiet, whole))
        late, early = np.maximum(quiet - usual, 0), np.maximum(usual_quiet - whole, 0)
        return np.asarray(np.nan_to_num([quiet, late, early]))


def _at_places(rank: RankPlaces, place: HostPlaces, ranks: int, *values: Ints) -> list[Floats]:
    """The sums of the moments' `values`, [ranks, places] each; NaN for ranks that have none."""
    shape = ranks, int(place.max(initial=0)) + 1
    there = count_by(rank, ranks)[:, None] > 0
    return [np.where(there, sums(shape, (rank, place), each), np.nan) for each in values]


def host_places(job: Replay, step: StepPlaces, phase: Ints) -> tuple[HostPlaces, StepPlaces]:
    """Each host moment's place, a number of all ranks, and the step of each place.

    Moments are of a `step` and a `phase` (collectives launched before it). They are at the same
    place between the same two launches where all hosts have as many of these in a phase; else all
    of a phase are.
    """
    phases = int(phase.max(initial=0)) + 1
    among = step.astype(np.int64) * phases + phase
    shape = int(job.host_rank.max(initial=0)) + 1, int(among.max(initial=0)) + 1
    turn = job.launched_before(np.ravel_multi_index((job.host_rank, among), shape))
    count = sums(shape, (job.host_rank[job.launch_moment], among[job.launch_moment]))
    alike = (count[job.ranks] == count[job.ranks[:1]]).all(axis=0)
    pairs = np.stack([among, np.where(alike[among], turn, 0)])
    distinct, place = np.unique(pairs, axis=1, return_inverse=True)
    return place.reshape(-1), distinct[0] // phases


def as_others(job: Replay, place: HostPlaces, unnamed: Bools, part: Ints) -> Ints:
    """Each moment's time in something of which reports of `unnamed` [ranks] tell nothing.

    `part` is that of the others (ns): at its place a program does the same on all ranks, and an
    unnamed one no more of it than it takes there.
    """
    own, rank = job.lengths.own, job.host_rank
    named = np.setdiff1d(job.ranks, np.flatnonzero(unnamed))
    spent, whole = _at_places(rank, place, len(unnamed), part, own)
    usual = np.median(spent[named], axis=0)
    share = np.minimum(usual[place] / np.maximum(whole[rank, place], 1), 1)
    return np.asarray(np.where(unnamed[rank], (own * share).astype(np.int64), part))
