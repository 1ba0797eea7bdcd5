"""Sets of time intervals, and how much of a span they cover. No loop over intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.align.columns import Ints


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals in order, and the length covered before each of them (ns)."""

    start: Ints
    end: Ints
    before: Ints

    def covered(self, times: Ints) -> Ints:
        """Return for each time how much of the axis before it is covered."""
        if not len(self.start):
            return np.zeros(np.shape(times), dtype=np.int64)
        at = np.searchsorted(self.start, times, side="right") - 1
        known = np.maximum(at, 0)
        inside = np.minimum(times, self.end[known]) - self.start[known]
        return np.where(at < 0, 0, self.before[known] + np.maximum(inside, 0)).astype(np.int64)

    def within(self, begin: Ints, end: Ints) -> Ints:
        """Return for each span `begin`..`end` how much of it is covered."""
        return self.covered(end) - self.covered(begin)


def union(start: Ints, end: Ints) -> Intervals:
    """Return the union of intervals that may overlap and stand in any order."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        empty = np.zeros(0, dtype=np.int64)
        return Intervals(empty, empty, empty)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    fresh = np.r_[True, start[1:] > reach[:-1]]
    first = np.flatnonzero(fresh)
    last = np.r_[first[1:], len(start)] - 1
    begin, stop = start[first], reach[last]
    before = np.r_[0, np.cumsum(stop - begin)[:-1]]
    return Intervals(begin, stop, before.astype(np.int64))


@dataclass(frozen=True)
class Axis:
    """One axis for all ranks: the times of each lie behind those of the rank before it.

    So one search or one `union` serves all ranks. `origin` is a time of each rank, around which
    its others lie: with 4,096 ranks those further off than six days count as six days off.
    """

    origin: Ints

    @property
    def width(self) -> int:
        """What each rank has of the axis (ns)."""
        return 2**62 // max(len(self.origin), 1)

    def of(self, rank: Ints, time: Ints) -> Ints:
        """Return the place on the axis of each `time` (ns) of a rank (its place)."""
        half = self.width // 2
        since = np.clip(time - self.origin[rank], -half, self.width - half - 1)
        return np.asarray(since + half + rank * self.width)

    def back(self, place: Ints) -> tuple[Ints, Ints]:
        """Return the rank and the time of each place on the axis."""
        rank = place // self.width
        return rank, place % self.width - self.width // 2 + self.origin[rank]
