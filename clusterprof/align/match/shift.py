"""By how many calls two ranks' windows are displaced against each other.

Few reports number the calls (`identified` uses those that do), and the k-th call of one rank need
not be the k-th of another: a window may begin a call later. A displacement is accepted only if
operations and message sizes agree all along and if *one* clock offset explains all times (no member
of a synchronising collective ends before the last has started). Where several are left, steps
decide, if both ranks have them; else the rhythm does: members of one collective end together, to
within tens of microseconds, so rightly placed calls differ by a constant, while the training's own
unevenness shows where they are a step apart. In 177 of 180 pairs of ranks and communicators of
recordings whose steps were hidden the right displacement was the most regular one, as a rule a
hundred times; the three were sends that did not wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterprof.align.match.calls import UNKNOWN, Calls
from clusterprof.align.time_stamps import (
    BY_WALL_CLOCK,
    DRIFT_LIMIT_PPM,
    FINEST_NS,
    STAMP_ERROR_NS,
    deviations,
    spread,
)
from clusterprof.columns import Bools, CallPlaces, Ints, order_by

#: displacements that are tried where neither lengths nor steps say
_REACH = 512
#: of so many calls' times, evenly spread, most displacements are seen to be impossible
_GLANCES = (32, 512)
#: one that is more regular than all others by this factor is the right one; and so many calls have
#: a rhythm
_REGULAR, _FEW = 3.0, 3
#: of the calls' differences this part has to be regular
RHYTHM_FRAC = 0.8
#: of directed calls this part was waited for: a Recv that waits ends as soon as its Send
_WAITED = 0.25
#: from this confidence on a displacement determines the clock offset
CERTAIN = 0.9


@dataclass(frozen=True)
class Shift:
    """Call `j` of b is call `j + by` of a; `offset_ns` is then a's clock minus b's, roughly."""

    by: int
    confidence: float
    offset_ns: int
    #: where calls were lost on the way: which of a are which of b, both ascending, whatever `by`
    paired: tuple[CallPlaces, CallPlaces] | None = None

    def overlap(self, a: Calls, b: Calls) -> tuple[CallPlaces | slice, CallPlaces | slice]:
        """Return which of the calls `a` and `b` stand side by side."""
        if self.paired is not None:
            return self.paired
        first, last = max(0, -self.by), min(len(b), len(a) - self.by)
        return slice(first + self.by, last + self.by), slice(first, last)


class KnownOffsets:
    """Rough clock offsets between pairs of ranks, carried on through chains of ranks."""

    def __init__(self) -> None:
        #: a rank -> one nearer to the chain's end, and how far its clock is ahead of that one's
        self._next: dict[int, tuple[int, int]] = {}

    def add(self, a: int, b: int, offset_ns: int) -> None:
        """Note that a's clock is ahead of b's by about `offset_ns`; the first value is kept."""
        (end_a, ahead_a), (end_b, ahead_b) = self._end(a), self._end(b)
        if end_a != end_b:
            self._next[end_b] = end_a, ahead_a - ahead_b - offset_ns

    def between(self, a: int, b: int) -> int | None:
        """Return by how much a's clock is ahead of b's (ns); None where no chain leads there."""
        (end_a, ahead_a), (end_b, ahead_b) = self._end(a), self._end(b)
        return ahead_a - ahead_b if end_a == end_b else None

    def _end(self, rank: int) -> tuple[int, int]:
        """The rank where the chain ends, and by how much the rank's clock is ahead of its."""
        ahead = 0
        while rank in self._next:
            rank, more = self._next[rank]
            ahead += more
        return rank, ahead


class ContradictoryIdsError(Exception):
    """Why the ids of operations cannot be right."""


def identified(a: Calls, b: Calls, *, directed: bool = False) -> Shift | None:
    """Return how two ranks' calls are displaced by their operations' ids; None without such ids.

    Ids of two profilers mean nothing to each other. Raises ContradictoryIdsError where ids call
    two operations one: an id twice on a rank, another order on the other rank, another kind or
    size, or times that no clock offset explains. `directed`: a's Sends against b's Recvs.
    """
    rows_a, rows_b = (np.flatnonzero(calls.identity != UNKNOWN) for calls in (a, b))
    if len({*a.source[rows_a].tolist(), *b.source[rows_b].tolist()}) > 1:
        return None
    for calls, rows in ((a, rows_a), (b, rows_b)):
        if len(np.unique(calls.identity[rows])) < len(rows):
            raise ContradictoryIdsError(f"rank {calls.rank} has one id on two calls")
    _, at_a, at_b = np.intersect1d(a.identity[rows_a], b.identity[rows_b], return_indices=True)
    order = order_by(rows_a[at_a])
    in_a, in_b = rows_a[at_a][order], rows_b[at_b][order]
    if not len(in_a):
        return None
    ranks = f"ranks {a.rank} and {b.rank}"
    if (np.diff(in_b) < 0).any():
        raise ContradictoryIdsError(f"{ranks} have them in two orders")
    if not agree(a, in_a, b, in_b, sizes_only=directed).all():
        raise ContradictoryIdsError(f"{ranks} have one id on two different operations")
    offset = offset_between(a, in_a, b, in_b, directed=directed)
    if offset is None:
        raise ContradictoryIdsError(f"{ranks} have one id on calls that cannot be the same")
    shift = Shift(int(in_a[0] - in_b[0]), 1.0, offset)
    beside_a, beside_b = shift.overlap(a, b)
    one_by = (in_a - in_b == shift.by).all()
    if one_by and _alike(a.identity[beside_a], b.identity[beside_b], UNKNOWN).all():
        return shift
    return replace(shift, paired=(in_a, in_b))


@dataclass(frozen=True)
class _Trial(Shift):
    """A displacement that is possible; its confidence is not known yet."""

    overlapping: int = 0
    #: calls side by side that have times on both
    timed: int = 0
    #: parts of the calls side by side that agree in kind, and in step (-1: steps are unknown)
    agreement: float = 1.0
    steps: float = -1.0


def agree(
    a: Calls,
    in_a: CallPlaces | slice,
    b: Calls,
    in_b: CallPlaces | slice,
    *,
    sizes_only: bool = False,
) -> Bools:
    """Return for calls side by side whether operation and size (where known) are the same."""
    same = _alike(a.size[in_a], b.size[in_b], UNKNOWN)
    return same if sizes_only else same & _alike(a.operation[in_a], b.operation[in_b], "Unknown")


def _alike(a: npt.NDArray[Any], b: npt.NDArray[Any], unknown: object) -> Bools:
    return np.asarray((a == b) | (a == unknown) | (b == unknown), dtype=np.bool_)


def _try(a: Calls, b: Calls, by: int, directed: bool) -> _Trial | None:
    """Weigh one displacement of b against a; None if it is impossible.

    So it is where one of ten calls differs, as damaged ones may, where most steps (`marked`, as the
    program numbers them) do, or where no offset of the clocks explains the times.

    `directed`: a's Sends against b's Recvs. A Send may end long before its Recv begins (NCCL
    buffers it), so there only sizes and steps count, and that no Recv ends before its Send.
    """
    in_a, in_b = Shift(by, 0.0, 0).overlap(a, b)
    agreement = float(agree(a, in_a, b, in_b, sizes_only=directed).mean())
    steps_a, steps_b = a.marked[in_a], b.marked[in_b]
    labelled = (steps_a != UNKNOWN) & (steps_b != UNKNOWN)
    steps = float((steps_a == steps_b)[labelled].mean()) if labelled.any() else -1.0
    if agreement < 0.9 or 0 <= steps < 0.5:
        return None
    timed = _timed(a, in_a, b, in_b, directed)
    offset = offset_between(a, in_a, b, in_b, directed=directed)
    if offset is None:
        return None
    return _Trial(
        by, 0.0, offset,
        overlapping=len(timed), timed=int(timed.sum()), agreement=agreement, steps=steps,
    )  # fmt: skip


def offset_between(
    a: Calls,
    in_a: CallPlaces | slice,
    b: Calls,
    in_b: CallPlaces | slice,
    *,
    directed: bool = False,
) -> int | None:
    """Return a's clock minus b's (ns), roughly, by calls side by side: 0 where none has times.

    None where no offset explains them all. `directed`: a's Sends beside b's Recvs.
    """
    timed = _timed(a, in_a, b, in_b, directed)
    if not timed.any():
        return 0
    end_a, end_b = a.end[in_a][timed], b.end[in_b][timed]
    if directed:
        # the shortest time from a Send's end to its Recv's end is next to nothing
        return int((end_a - end_b).max())
    start_a, start_b = a.start[in_a][timed], b.start[in_b][timed]
    upper, lower = int((end_a - start_b).min()), int((start_a - end_b).max())
    return None if upper - lower < -_slack(start_b) else (upper + lower) // 2


def _slack(times: Ints) -> float:
    """By how much two clocks may drift apart over `times`, and their stamps be wrong, ns."""
    return DRIFT_LIMIT_PPM * 1e-6 * int(np.ptp(times)) + 2 * STAMP_ERROR_NS


def _timed(
    a: Calls, in_a: CallPlaces | slice, b: Calls, in_b: CallPlaces | slice, directed: bool
) -> Bools:
    """Which calls side by side have times that show how the clocks differ."""
    timed = a.has[in_a] & b.has[in_b]
    return timed if directed else timed & a.synchronising[in_a]


def _by_steps(a: Calls, b: Calls) -> int | None:
    """The displacement by the steps, or None: where the first common step begins."""
    common = np.intersect1d(a.marked[a.marked != UNKNOWN], b.marked[b.marked != UNKNOWN])
    for step in common:
        in_a, in_b = np.flatnonzero(a.marked == step), np.flatnonzero(b.marked == step)
        if len(in_a) == len(in_b):
            return int(in_a[0] - in_b[0])
    return None


def _at_a_glance(a: Calls, b: Calls, by: Ints) -> Ints:
    """The displacements `by` that no few calls rule out by their times: `_try` refuses the others.

    Weighing a displacement takes as long as the calls are many, and where the reports' lengths
    differ there are as many displacements.
    """
    if not b.has.any():
        return by
    slack = _slack(b.start[b.has])
    # no two times are so far apart
    far = 1 << 61
    shorter = min(len(a), len(b))
    for count in _GLANCES:
        rows = np.unique(np.linspace(0, shorter - 1, count).astype(np.int64))
        kept = [by[:0]]
        for some in np.array_split(by, 1 + by.size * rows.size // (1 << 18)):
            more = some[:, None]
            in_a, in_b = (rows + more, rows) if shorter == len(b) else (rows, rows - more)
            both = (in_a >= 0) & (in_a < len(a)) & (in_b >= 0) & (in_b < len(b))
            in_a, in_b = np.where(both, in_a, 0), np.where(both, in_b, 0)
            both &= _timed(a, in_a, b, in_b, directed=False)
            upper = np.where(both, a.end[in_a] - b.start[in_b], far).min(axis=1)
            lower = np.where(both, a.start[in_a] - b.end[in_b], -far).max(axis=1)
            kept.append(some[upper - lower >= -slack])
        by = np.concatenate(kept)
    return by


def find_shift(
    a: Calls, b: Calls, *, directed: bool = False, expected_ns: int | None = None
) -> Shift | None:
    """Return how `b` is displaced against `a`, or None if no displacement explains the two.

    `expected_ns` is a's clock minus b's where other calls determine it, to a few milliseconds.
    Confidence: 1.0 where the steps' numbers, operations and sizes all agree, 0.8 where these
    numbers pair calls of unlike operation or size; 0.9 where most steps agree, or only one
    displacement is possible, or regular; 0.8 where the expected offset had to decide between
    several, 0.5 where the wall clocks or the greatest overlap had to: that adds nothing about the
    clocks. Where by these the windows do not overlap in time nothing decides, and there is none.
    """
    if not len(a) or not len(b):
        return None
    by_steps = _by_steps(a, b)
    if by_steps is not None:
        trial = _try(a, b, by_steps, directed)
        if trial is not None and trial.steps > 0.99:
            return replace(trial, confidence=1.0 if trial.agreement == 1.0 else 0.8)
    possible = _possible(a, b, by_steps or 0, directed)
    best = max(possible, key=lambda t: (t.steps, t.overlapping), default=None)
    if best is None or best.steps > 0.5:
        return best and replace(best, confidence=0.9)
    regular = _regular(a, b, possible, directed)
    if regular is not None:
        return replace(regular, confidence=0.9)
    if expected_ns is not None:
        return _nearest(possible, expected_ns, 0.8)
    return _nearest(possible, 0, BY_WALL_CLOCK) if _at_one_time(a, b) else None


def _possible(a: Calls, b: Calls, around: int, directed: bool) -> list[_Trial]:
    """The displacements that are possible, `around` and the ends of the windows being tried."""
    # at least a quarter of the shorter window's calls stand beside one of the other's
    least = -(-min(len(a), len(b)) // 4)
    low = max(least - len(b), min(around, len(a) - len(b)) - _REACH)
    high = min(len(a) - least, max(around, len(a) - len(b)) + _REACH)
    within = np.arange(low, high + 1)
    likely = within if directed else _at_a_glance(a, b, within)
    trials = (_try(a, b, by, directed) for by in likely.tolist())
    possible = [trial for trial in trials if trial is not None]
    # calls without a kernel (the capture ended before it) agree with anything: times must decide
    most = max((t.timed for t in possible), default=0)
    return [t for t in possible if t.timed * 4 >= most]


def _at_one_time(a: Calls, b: Calls) -> bool:
    """Whether the two windows overlap by the wall clocks; so they do where no call has times."""
    if not a.has.any() or not b.has.any():
        return True
    begins, ends = zip(*((c.start[c.has].min(), c.end[c.has].max()) for c in (a, b)), strict=True)
    return bool(max(begins) <= min(ends))


def _regular(a: Calls, b: Calls, possible: list[_Trial], directed: bool) -> _Trial | None:
    """The only trial, or the one in whose rhythm the calls fit; None where several fit as well."""
    # where less than half of the shorter window overlaps, calls soon agree by chance
    half, most = min(len(a), len(b)) / 2, max(t.timed for t in possible)
    trials = [t for t in possible if t.overlapping >= half and t.timed * 2 >= most]
    if len(trials) == 1 and trials[0].overlapping > 2:
        return trials[0]
    if not trials or min(trial.timed for trial in trials) < _FEW:
        return None
    rhythms: list[tuple[float, _Trial]] = []
    for trial in trials:
        in_a, in_b = trial.overlap(a, b)
        timed = _timed(a, in_a, b, in_b, directed)
        apart, time = (a.end[in_a] - b.end[in_b])[timed], b.end[in_b][timed]
        if directed:
            uneven = float(np.quantile((apart.max() - apart).astype(np.float64), _WAITED))
        else:
            uneven = spread(deviations(apart, time), RHYTHM_FRAC)
        rhythms.append((uneven, trial))
    (finest, best), *others = sorted(rhythms, key=lambda rhythm: rhythm[0])
    # the fewer calls stand side by side, the rather they are regular by chance
    by_chance = max(trial.timed for trial in trials) / best.timed
    if others and others[0][0] < _REGULAR * by_chance * max(finest, 2 * FINEST_NS):
        return None
    return best


def _nearest(possible: list[_Trial], expected_ns: int, confidence: float) -> Shift:
    """The trial whose clocks are nearest to what is expected; where none is within a second of it,
    the one that overlaps most, as sure as by the wall clocks.
    """
    nearest = min(possible, key=lambda t: abs(t.offset_ns - expected_ns))
    if abs(nearest.offset_ns - expected_ns) < 1_000_000_000:
        return replace(nearest, confidence=confidence)
    return replace(max(possible, key=lambda t: t.overlapping), confidence=BY_WALL_CLOCK)
