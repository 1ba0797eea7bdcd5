"""Sets of time intervals, and how much of a span they cover. No loop over intervals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clusterprof.columns import Ints, last_at_or_before, order_by


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals in order."""

    start: Ints
    end: Ints

    @cached_property
    def _before(self) -> Ints:
        """The length covered before each of them (ns)."""
        length = self.end - self.start
        return np.asarray(np.cumsum(length) - length)

    def __or__(self, other: Intervals) -> Intervals:
        """Return what one of both covers."""
        start = np.concatenate((self.start, other.start))
        return union(start, np.concatenate((self.end, other.end)))

    def covered(self, times: Ints) -> Ints:
        """Return for each time how much of the axis before it is covered."""
        if not len(self.start):
            return np.zeros(np.shape(times), dtype=np.int64)
        row = last_at_or_before(self.start, times)
        inside = np.minimum(times, self.end[row]) - self.start[row]
        return np.where(row < 0, 0, self._before[row] + inside)

    def within(self, begin: Ints, end: Ints) -> Ints:
        """Return for each span `begin`..`end` how much of it is covered."""
        return self.covered(end) - self.covered(begin)


def union(start: Ints, end: Ints) -> Intervals:
    """Return the union of intervals that may overlap and stand in any order."""
    keep = end > start
    if not keep.all():
        start, end = start[keep], end[keep]
    if not len(start):
        return Intervals(start, end)
    if (start[1:] < start[:-1]).any():  # most come in order
        order = order_by(start)
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    apart = start[1:] > reach[:-1]
    return Intervals(start[np.append(True, apart)], reach[np.append(apart, True)])


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

    def of(self, rank: Ints | int, time: Ints) -> Ints:
        """Return the place on the axis of each `time` (ns) of a rank (its place)."""
        half = self.width // 2
        # in place: there are as many as activities of all ranks
        since = np.asarray(time - self.origin[rank])
        np.clip(since, -half, self.width - half - 1, out=since)
        since += np.multiply(rank, self.width, dtype=np.int64)
        since += half
        return since

    def back(self, place: Ints) -> tuple[Ints, Ints]:
        """Return the rank and the time of each place on the axis."""
        rank = place // self.width
        return rank, place % self.width - self.width // 2 + self.origin[rank]
