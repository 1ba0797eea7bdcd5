"""Bounds on clock offsets that hold by causality.

In a synchronising collective no member ends before the last one has started. So for members
i and j of one call, with offset o (a rank's clock minus the reference's):
`end_i - o_i >= start_j - o_j`, hence `o_i - o_j <= end_i - start_j`. Every call of every pair
gives such a bound, and bounds chain through ranks as distances do in a graph.

Why it holds, whatever algorithm and protocol the library takes: a member of AllReduce,
AllGather, ReduceScatter, AllToAll or Barrier returns data that depend on every other member's,
and no member's data leave it before its own kernel runs. A Broadcast or Scatter only says so of
the root's start, a Reduce or Gather only of the root's end, a Send and its Recv only of the
Recv's end. What it takes: every member sends something (an empty AllToAll between two members
would delay neither), and the calls are matched rightly. Seen to hold in every call of all
recordings of the tests, and in 12 000 calls on 2, 4 and 8 GPUs (rings; LL, LL128 and Simple;
2 KB to 32 MB; each rank last): the least `end_i - start_j` was 4.0 µs. For gloo the span of a
call on its worker thread stands for the kernel.

A Recv gives the other side only by an assumption (`delivered`), which is named wherever a bound
rests on it: once both its Recv runs and its Send is over, a message is there within `_ARRIVAL`
times what the Send took. Then `end_recv <= max(start_recv, end_send) + that`, and a Recv that
lasted longer, which needs no clock, waited: `o_recv - o_send >= end_recv - end_send - that`. With
causality each direction alone bounds the offset from both sides, as far apart as the transfer takes
and not the waiting: of one-way delays the least count (Moon, Skelly and Towsley, INFOCOM 1999).

Clocks drift. A bound taken at time t holds at time T to within the drift limit times |T - t|:
the bounds are evaluated at a few times over the window, the drift they allow is narrowed, and
that tightens them again. Assumes a constant drift within the window, of at most
`DRIFT_LIMIT_PPM` between any two ranks, and time stamps good to `STAMP_ERROR_NS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from clusterprof.align.clock.blocks import ON_HOST, Block
from clusterprof.align.time_stamps import DRIFT_LIMIT_PPM, STAMP_ERROR_NS
from clusterprof.columns import Bools, Floats, least_by

#: times over the window at which the bounds are evaluated
_TIMES = 9
#: a message is on its way for at most so many times what its Send took. Over the recordings of the
#: tests (one message a kernel, 3 to 12 MB within a host) it was at most 0.7 times; the rest is for
#: networks slower than the sender's copies into their buffers
_ARRIVAL = 10.0
#: in a larger communicator each member is compared with so many only
_MOST_COMPARED = 32


@dataclass(frozen=True)
class Bounds:
    """Bounds of each rank's offset against the reference at `times`: arrays [times, ranks].

    `drift_low`/`drift_high` [ranks] bound the drift (ns per ns). Infinite where no chain of calls
    connects a rank with the reference; `contradicted` [ranks] is true where the bounds contradict
    each other.
    """

    times: Floats
    low: Floats
    high: Floats
    drift_low: Floats
    drift_high: Floats
    contradicted: Bools

    @property
    def consistent(self) -> bool:
        """Whether there are clocks that obey all bounds, as far as the bounds show."""
        return not self.contradicted.any()

    def at(self, time: float) -> tuple[Floats, Floats]:
        """Return the least and the greatest offset of each rank at one time (ns)."""
        low = np.array([np.interp(time, self.times, column) for column in self.low.T])
        return low, np.array([np.interp(time, self.times, column) for column in self.high.T])


def middle_of(low: Floats, high: Floats) -> Floats:
    """Return the middle between two bounds; NaN where one of them is infinite."""
    with np.errstate(invalid="ignore"):
        middle = (low + high) / 2
    return np.where(np.isfinite(middle), middle, np.nan)


def bound(blocks: Sequence[Block], ranks: int, reference: int, begin: float, end: float) -> Bounds:
    """Bound every rank's offset over the window `begin`..`end` (ns, the blocks' own time)."""
    times = np.linspace(begin, end, _TIMES)
    edges = _Edges(blocks)
    chains = np.array([edges.chain(ranks, reference, time) for time in times.tolist()])
    high, low = chains[:, 0], -chains[:, 1]
    contradicted = (low > high).any(axis=0)
    limit = DRIFT_LIMIT_PPM * 1e-6
    drift_low, drift_high = np.full(ranks, -limit), np.full(ranks, limit)
    if end > begin:
        i, j = np.triu_indices(_TIMES, 1)
        gap = (times[j] - times[i])[:, None]
        drift_high = np.minimum(drift_high, ((high[j] - low[i]) / gap).min(axis=0))
        drift_low = np.maximum(drift_low, ((low[j] - high[i]) / gap).max(axis=0))
    apart = (times[:, None] - times[None, :])[..., None]
    high = np.min(high + np.maximum(apart * drift_high, apart * drift_low), axis=1)
    low = np.max(low + np.minimum(apart * drift_high, apart * drift_low), axis=1)
    contradicted |= (high < low).any(axis=0) | (drift_high < drift_low)
    low[:, reference] = high[:, reference] = 0.0
    drift_low[reference] = drift_high[reference] = 0.0
    return Bounds(times, low, high, drift_low, drift_high, contradicted)


def delivered(blocks: Sequence[Block]) -> list[Block]:
    """What Recvs that waited say besides causality: see above. Assumed, no proof.

    Each as a call that goes back from the Recv's end to the latest that its Send can have left it.
    Only of messages between devices that have their kernels for themselves.
    """
    assumed = []
    for block in blocks:
        if not block.one_way or len(block.members) != 2:
            continue
        length = block.end - block.start
        sent, received = (
            np.where(role, length, 0.0).sum(axis=1) for role in (block.holds, block.held)
        )
        late = _ARRIVAL * sent
        waited = (received > late) & (block.carried == 1) & (block.kind != ON_HOST)
        start = np.where(block.held, block.end, block.start)
        end = np.where(block.holds, block.end + late[:, None], block.end)
        back = replace(block, start=start, end=end, holds=block.held, held=block.holds)
        if waited.any():
            assumed.append(back.take(waited))
    return assumed


class _Edges:
    """All calls' bounds, not as pairs of members but through each call: linear in the rows.

    `o_i - o_j <= end_i - start_j` over all i, j of a call is `o_i <= end_i + x` and
    `x <= o_j - start_j` with one x for the call. A row is a member of a call.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        entries, self._calls = [np.empty((5, 0))], 0
        for block in blocks:
            line, column = has_call = np.nonzero(~np.isnan(block.start))
            last = np.where(np.isnan(block.start), -np.inf, block.start).max(axis=1)
            # no bound comes from the end where not held, from the start where it holds no other
            end = np.where(block.held[has_call], block.end[has_call], np.inf)
            start = np.where(block.holds[has_call], block.start[has_call], -np.inf)
            rank = np.asarray(block.members)[column]
            entries.append(np.stack([self._calls + line, rank, end, start, last[line]]))
            self._calls += len(block.start)
        call, rank, self._end, self._start, self._time = np.concatenate(entries, axis=1)
        self._call, self._rank = call.astype(np.intp), rank.astype(np.intp)

    def chain(self, ranks: int, reference: int, time: float) -> tuple[Floats, Floats]:
        """Least bounds of `o_i - o_ref` and of `o_ref - o_i` at `time` (Bellman and Ford).

        Stops early where they contradict each other: every distance on the way is a bound.
        """
        slack = DRIFT_LIMIT_PPM * 1e-6 * np.abs(self._time - time) + STAMP_ERROR_NS
        end = self._end + slack
        up, down = np.full((2, ranks), np.inf)
        up[reference] = down[reference] = 0.0
        for _ in range(ranks + 1):
            before = up, down
            up = np.minimum(up, self._step(up, -self._start, end))
            down = np.minimum(down, self._step(down, end, -self._start))
            unchanged = np.array_equal(up, before[0]) and np.array_equal(down, before[1])
            if unchanged or (up + down < 0).any():
                break
        return up, down

    def _step(self, distance: Floats, to_call: Floats, from_call: Floats) -> Floats:
        """One hop from every rank through every call to every rank."""
        far_calls, far_ranks = np.full(self._calls, np.inf), np.full(len(distance), np.inf)
        of_call = least_by(self._call, distance[self._rank] + to_call, far_calls)
        return least_by(self._rank, of_call[self._call] + from_call, far_ranks)


def contradicting(blocks: Sequence[Block], ranks: int) -> list[int]:
    """Return the fewest ranks (greedily) without which no two ranks contradict each other.

    Two members of one communicator contradict each other if no offset, with any drift within the
    limit, obeys both sides of what their calls say: a clock jumped, or calls are matched wrongly.
    One rank that contradicts many is the culprit; the others' clocks can be aligned without it.
    """
    against = np.zeros((ranks, ranks), dtype=bool)
    for block in blocks:
        members = np.asarray(block.members)
        last = np.nanmax(block.start, axis=1)
        middle = (np.nanmin(last) + np.nanmax(last)) / 2
        slack = (DRIFT_LIMIT_PPM * 1e-6 * np.abs(last - middle) + STAMP_ERROR_NS)[:, None]
        end = np.where(block.held & ~np.isnan(block.end), block.end, np.inf) + slack
        start = np.where(block.holds & ~np.isnan(block.start), block.start, -np.inf)
        count = min(len(members), _MOST_COMPARED)
        for k in np.linspace(0, len(members) - 1, count).astype(np.intp):
            # the two bounds of their offset cross; no member contradicts itself
            crossed = (end - start[:, [k]]).min(axis=0) + (end[:, [k]] - start).min(axis=0) < 0
            bad = members[crossed & (members != members[k])]
            against[members[k], bad] = against[bad, members[k]] = True
    excluded = []
    while against.any():
        worst = int(against.sum(axis=0).argmax())
        against[worst] = against[:, worst] = False
        excluded.append(worst)
    return sorted(excluded)
