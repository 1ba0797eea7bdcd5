"""Bounds on clock offsets that hold by causality.

In a synchronising collective no member ends before the last one has started. So for members
i and j of one call, with offset o (a rank's clock minus the reference's):
`end_i - o_i >= start_j - o_j`, hence `o_i - o_j <= end_i - start_j`. Every call of every pair
gives such a bound, and bounds chain through ranks as distances do in a graph.

Clocks drift. A bound taken at time t holds at time T to within the drift limit times |T - t|:
the bounds are evaluated at a few times over the window, the drift they allow is narrowed, and
that tightens them again. Assumes a constant drift within the window, of at most
`DRIFT_LIMIT_PPM` against the reference, and time stamps good to `STAMP_ERROR_NS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.clock.blocks import Block, Floats

#: two crystals of 50 ppm each, and something for a clock that is being slewed
DRIFT_LIMIT_PPM = 150.0
#: the profilers' own error of a time stamp
STAMP_ERROR_NS = 1_000.0
#: times over the window at which the bounds are evaluated
_TIMES = 9


@dataclass(frozen=True)
class Bounds:
    """Bounds of each rank's offset against the reference at `times`: arrays [times, ranks].

    `drift_low`/`drift_high` [ranks] bound the drift (ns per ns). Infinite where nothing ties a
    rank to the reference; `consistent` is false where the bounds contradict each other.
    """

    times: Floats
    low: Floats
    high: Floats
    drift_low: Floats
    drift_high: Floats
    consistent: bool


def bound(blocks: Sequence[Block], ranks: int, reference: int, begin: float, end: float) -> Bounds:
    """Bound every rank's offset over the window `begin`..`end` (ns, the blocks' own time)."""
    times = np.linspace(begin, end, _TIMES)
    high = np.full((_TIMES, ranks), np.inf)
    low = np.full((_TIMES, ranks), -np.inf)
    consistent = True
    for k, time in enumerate(times):
        edges = [(np.asarray(b.members), _differences(b, time)) for b in blocks]
        high[k], fine = _chain(edges, ranks, reference, upper=True)
        under, also_fine = _chain(edges, ranks, reference, upper=False)
        low[k] = -under
        consistent &= fine and also_fine
    limit = DRIFT_LIMIT_PPM * 1e-6
    drift_low, drift_high = np.full(ranks, -limit), np.full(ranks, limit)
    for i in range(_TIMES):
        for j in range(i + 1, _TIMES):
            gap = times[j] - times[i]
            if gap > 0:
                drift_high = np.minimum(drift_high, (high[j] - low[i]) / gap)
                drift_low = np.maximum(drift_low, (low[j] - high[i]) / gap)
    apart = times[:, None] - times[None, :]
    for_high = np.maximum(apart[..., None] * drift_high, apart[..., None] * drift_low)
    high = np.min(high[None] + for_high, axis=1)
    for_low = np.minimum(apart[..., None] * drift_high, apart[..., None] * drift_low)
    low = np.max(low[None] + for_low, axis=1)
    consistent &= bool((high >= low).all() and (drift_high >= drift_low).all())
    low[:, reference] = high[:, reference] = 0.0
    drift_low[reference] = drift_high[reference] = 0.0
    return Bounds(times, low, high, drift_low, drift_high, consistent)


def _differences(block: Block, time: float) -> Floats:
    """For each pair (i, j) of members: the least upper bound of `o_i - o_j` at `time`."""
    away = np.abs(np.nanmax(block.start, axis=1) - time)
    slack = DRIFT_LIMIT_PPM * 1e-6 * away + STAMP_ERROR_NS
    ends = np.where(block.held, block.end, np.inf) + slack[:, None]
    starts = np.where(block.holds, block.start, -np.inf)
    ends = np.where(np.isnan(ends), np.inf, ends)
    starts = np.where(np.isnan(starts), -np.inf, starts)
    out = np.empty((len(block.members), len(block.members)))
    for i in range(len(block.members)):
        out[i] = (ends[:, i, None] - starts).min(axis=0)
    np.fill_diagonal(out, 0.0)
    return out


def _chain(
    edges: list[tuple[np.ndarray, Floats]], ranks: int, reference: int, *, upper: bool
) -> tuple[Floats, bool]:
    """Shortest distances from the reference over all blocks (Bellman and Ford).

    Upper: bounds of `o_i - o_ref`; else of `o_ref - o_i`. Also whether they are consistent.
    """
    distance = np.full(ranks, np.inf)
    distance[reference] = 0.0
    for _ in range(ranks + 1):
        before = distance.copy()
        for members, difference in edges:
            step = difference if upper else difference.T
            reached = (step + distance[members][None, :]).min(axis=1)
            distance[members] = np.minimum(distance[members], reached)
        if distance[reference] < 0:
            distance[reference] = 0.0
            return distance, False
        if np.array_equal(before, distance):
            break
    return distance, True
