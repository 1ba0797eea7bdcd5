"""One clock for all ranks: bounds from causality, an estimate within them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.align.clock.blocks import LONGEST_NS, Block, astray, bases, blocks
from clusterprof.align.clock.bounds import Bounds, bound, contradicting, delivered, middle_of
from clusterprof.align.clock.estimates import Combined, Estimate, combine, estimate
from clusterprof.align.clock.measured import ANCHOR_NS, PairBound, as_blocks
from clusterprof.columns import Bools, Floats, Ints, integers, places
from clusterprof.results import UNBOUNDED_NS, ClockEntry, RankClock
from clusterprof.tables import RankTables

#: an uncertainty from here on is narrowed by assumptions, where there are some: a straggler that
#: costs a millisecond could hide in it
COARSE_NS = 1_000_000

#: two ranks that read one clock agree to within this: five times the largest difference between the
#: reports of one host (4 µs, over 24 recordings by nsys and torch.profiler). Likely, no proof
SHARED_CLOCK_NS = 20_000

#: what the offsets rest on, as `Clock.method` says it
BY_WALL_CLOCKS = "host wall clocks only"
BY_CALLS = "collective timing"
BY_PROBE = "measured host clocks"
BY_REPORT = "the clock of a shared report"
_MEASUREMENTS_REJECTED = (
    "the measurements of the hosts' clocks contradict the collectives (a clock that was set, or "
    "shifted for one process) and are ignored"
)
_CONTRADICTION = (
    "the ranks' collectives contradict each other in time (a clock that jumped, a drift beyond "
    "150 ppm, or a wrong match): the clocks cannot be bounded, so stragglers cannot be determined"
)
_UNBOUNDED = (
    "the clock offset to the reference rank is unbounded (no chain of collectives that can be "
    "matched without knowing it): the wall clock is taken as it is, and waits and transfers rest "
    "on it"
)
_CONTRADICTING = (
    "excluded from the clock alignment, because the times contradict those of the other ranks' "
    "collectives (a clock that jumped, a drift beyond 150 ppm, or a wrong match)"
)
#: of a `Clock`, one value for each rank
_COLUMNS = ("offset_ns", "drift_ppm", "uncertainty_ns")
#: an offset of zero on one host is contradicted by an estimate this many errors away
_ERRORS = 4.0
#: the bounds' half-width is so many standard errors of their middle
_THIRDS = 3.0


@dataclass(frozen=True)
class Clock:
    """Every rank's wall clock against the reference rank's.

    `aligned = wall - offset_ns - drift_ppm * 1e-6 * (wall - middle_ns)` is the reference
    rank's wall time; the truth lies within `uncertainty_ns` of it over the whole window.
    """

    reference_rank: int
    middle_ns: int
    method: str
    ranks: tuple[int, ...]
    offset_ns: npt.NDArray[np.int64]
    drift_ppm: npt.NDArray[np.float64]
    uncertainty_ns: npt.NDArray[np.int64]
    warnings: tuple[str, ...] = ()
    #: ranks that very likely read the reference rank's own clock: one host, and nothing in the
    #: data against an offset of zero
    same_clock: tuple[int, ...] = ()
    #: ranks whose bound rests on an assumption (see `measured`), and is no guarantee
    assumed: tuple[int, ...] = ()

    @cached_property
    def _place(self) -> dict[int, int]:
        return {rank: k for k, rank in enumerate(self.ranks)}

    def align(
        self, rank: int | npt.NDArray[np.int64], wall: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return `wall` (ns, the rank's own wall clock) on the reference rank's clock.

        `rank` is one for all of `wall`, or each one's.
        """
        if isinstance(rank, np.ndarray):
            numbers, number = places(rank)
            k: Any = np.asarray([self._place[r] for r in numbers.tolist()], dtype=np.int64)[number]
        else:
            k = self._place[rank]
        aligned = wall - self.offset_ns[k]
        if np.any(self.drift_ppm) and np.any(self.drift_ppm[k]):
            since = (wall - self.middle_ns).astype(np.float64)
            aligned = aligned - np.rint(self.drift_ppm[k] * 1e-6 * since).astype(np.int64)
        return np.asarray(aligned, dtype=np.int64)

    def uncertainty(self, rank: int) -> int:
        """Return the bound on the error of this rank's aligned times (ns)."""
        return int(self.uncertainty_ns[self._place[rank]])

    def of(self, places: Sequence[int], ranks: tuple[int, ...]) -> Clock:
        """Return the clock of `ranks`, each of which reads the clock of the rank at its place."""
        columns = {name: getattr(self, name)[np.array(places, np.intp)] for name in _COLUMNS}
        return replace(self, ranks=ranks, **columns)

    def entry(self) -> ClockEntry:
        """Return the clock as it stands in results.json."""
        columns = (getattr(self, name).tolist() for name in _COLUMNS)
        ranks: list[RankClock] = [
            {"rank": rank, "offset_ns": offset, "drift_ppm": drift, "uncertainty_ns": bound}
            for rank, offset, drift, bound in zip(self.ranks, *columns, strict=True)
        ]
        return {
            "reference_rank": self.reference_rank,
            "middle_ns": self.middle_ns,
            "method": self.method,
            "ranks": ranks,
            "assumed": list(self.assumed),
        }


def align(
    ranks: Sequence[RankTables], matched: pa.Table, measured: Sequence[PairBound] = ()
) -> Clock:
    """Put all ranks on the clock of the lowest rank that a collective or a measurement connects.

    `matched` has the schema `clusterprof.align.match.MATCHED`; `measured` are bounds from outside
    of the reports (see `measured`). Where the two contradict each other the measurements are
    ignored, with a warning. What rests on an assumption (such measurements, and how long a message
    is on its way) counts only for ranks that nothing else bounds to within `COARSE_NS`, and a
    warning names those. A rank that no chain of either connects with the reference keeps its wall
    clock, with `UNBOUNDED_NS` and a warning.
    """
    clock = _consistent(ranks, matched, [pair for pair in measured if not pair.assumed])
    coarse = _coarse(clock)
    if not coarse:
        return clock
    # a named assumption is better than nothing, and only for those who need it
    fine = set(clock.ranks) - coarse
    pairs = [pair for pair in measured if not pair.assumed or not {pair.rank, pair.other} <= fine]
    assuming = _consistent(ranks, matched, pairs, coarse)
    resting = tuple(sorted(coarse - _coarse(assuming)))
    if not resting:
        return clock
    warning = (
        f"{words.ranks(resting)}: the clock's bound assumes that a message is received within ten "
        "times what sending it took, or a report without marks within "
        f"{ANCHOR_NS // 1000} µs of its host's clock: likely, no proof"
    )
    return replace(assuming, warnings=(*assuming.warnings, warning), assumed=resting)


def _coarse(clock: Clock) -> set[int]:
    return set(np.asarray(clock.ranks)[clock.uncertainty_ns >= COARSE_NS].tolist())


def _consistent(
    ranks: Sequence[RankTables],
    matched: pa.Table,
    measured: Sequence[PairBound],
    assume: Collection[int] = (),
) -> Clock:
    """As `align`; without `measured` where those make the bounds contradict each other.

    Of the ranks `assume` also what `delivered` assumes.
    """
    clock, consistent = _aligned(ranks, matched, measured, assume)
    if consistent or not measured:
        return clock
    without, also_consistent = _aligned(ranks, matched, (), assume)
    if not also_consistent:
        return clock
    return replace(without, warnings=(*without.warnings, _MEASUREMENTS_REJECTED))


@dataclass(frozen=True)
class _Ranks:
    """The ranks to align, by index, and the time axes that the arithmetic is done on."""

    numbers: tuple[int, ...]
    #: each rank's own origin of time (see `blocks.bases`), ns
    base: Ints
    #: the index of the reference rank
    reference: int
    #: the middle of the reference's window (its wall clock), and half the longest rank's window
    middle: int
    half: float
    #: on the reference's host
    same_host: Bools

    @classmethod
    def of(cls, tables: Sequence[RankTables], base: Ints, reference: int) -> _Ranks:
        """Return the ranks of these tables, which are in ascending order."""
        # what ran on the device; without any, the capture's own limits
        spans = [
            (pc.min(t.activity["start_ns"]).as_py(), pc.max(t.activity["end_ns"]).as_py())
            if t.activity.num_rows
            else (t.info.begin_ns, t.info.end_ns)
            for t in tables
        ]
        begin, end = spans[reference]
        if end <= begin or abs(begin - int(base[reference])) > LONGEST_NS:
            begin = end = int(base[reference])
        half = max(0, end - begin, *(last - first for first, last in spans)) / 2
        host = tables[reference].info.host
        same_host = np.array([bool(host) and t.info.host == host for t in tables])
        numbers = tuple(t.rank for t in tables)
        return cls(numbers, base, reference, (begin + end) // 2, half, same_host)

    def named(self, which: Bools) -> tuple[int, ...]:
        """The ranks' numbers of a mask."""
        return tuple(self.numbers[k] for k in np.flatnonzero(which))


def _aligned(
    ranks: Sequence[RankTables],
    matched: pa.Table,
    measured: Sequence[PairBound],
    assume: Collection[int] = (),
) -> tuple[Clock, bool]:
    """The clock, and whether what it rests on agrees with itself."""
    tables = sorted(ranks, key=lambda t: t.rank)
    numbers = tuple(t.rank for t in tables)
    if not numbers:
        nothing = np.zeros(0, dtype=np.int64)
        return Clock(0, 0, BY_WALL_CLOCKS, (), nothing, np.zeros(0), nothing), True
    base = bases(matched, numbers)
    of_measured = [rank for pair in measured for rank in (pair.rank, pair.other)]
    begins = np.array([t.info.begin_ns for t in tables])
    base = np.where((base == 0) & np.isin(numbers, of_measured), begins, base)
    lost = astray(matched, numbers, base)
    calls = blocks(matched.filter(pa.array(~lost)), numbers, base)
    odd = contradicting(calls, len(numbers))
    # without one bad clock the others can be aligned; if most are bad, which ones is unknown
    odd = odd if len(odd) < len(numbers) / 2 else []
    calls = _without(calls, odd)
    pairs = _without(as_blocks(measured, numbers, base), odd)
    reference = min((m for b in (*calls, *pairs) for m in b.members), default=0)
    some = np.isin(numbers, list(assume))
    arrivals = delivered([b for b in calls if some[list(b.members)].any()])
    clock, consistent = _refined(_Ranks.of(tables, base, reference), calls, pairs, arrivals)
    warnings = []
    if lost.any():
        ranks_lost = np.unique(integers(matched, "rank")[lost]).tolist()
        warnings.append(
            f"{words.ranks(ranks_lost)}: {words.counted(int(lost.sum()), 'call')} more than a day "
            "from the others of the same report: broken time stamps, left out of the clock"
        )
    if odd:
        warnings.append(f"{words.ranks(numbers[k] for k in odd)}: {_CONTRADICTING}")
    method = _method(measured, calls, pairs)
    return replace(clock, method=method, warnings=(*warnings, *clock.warnings)), consistent


def _method(measured: Sequence[PairBound], calls: list[Block], pairs: list[Block]) -> str:
    """What a clock of these measurements and calls rests on."""
    if not calls and not pairs:
        return BY_WALL_CLOCKS
    by_report = {pair.source == "report" for pair in measured}
    methods = [BY_CALLS] if calls or not measured else []
    methods += [BY_REPORT] if True in by_report else []
    methods += [BY_PROBE] if False in by_report else []
    return words.listed(methods)


def _without(blocks_: list[Block], odd: Sequence[int]) -> list[Block]:
    """The blocks without the ranks `odd` (indices), and without blocks of one member left."""
    if not odd:
        return blocks_
    left = [np.flatnonzero(~np.isin(block.members, odd)) for block in blocks_]
    return [block.of(some) for block, some in zip(blocks_, left, strict=True) if len(some) >= 2]


def _refined(
    who: _Ranks, calls: Sequence[Block], pairs: Sequence[Block], arrivals: Sequence[Block]
) -> tuple[Clock, bool]:
    """The clock from calls and measured pairs, and whether its bounds are consistent.

    `arrivals` bound it too, but are no observations of their own.
    """
    count, reference = len(who.numbers), who.reference
    first = _first_offsets((*calls, *pairs), count, reference)
    moved = [b.moved(first) for b in calls]
    centre = float(who.middle - who.base[reference])
    # a measurement may lie long before or after the window, which is what the bound is for
    begin = min([float(np.nanmin(b.start)) for b in moved] + [centre - who.half])
    end = max([float(np.nanmax(b.end)) for b in moved] + [centre + who.half])
    moved += [b.moved(first) for b in pairs]
    limits = bound([*moved, *(b.moved(first) for b in arrivals)], count, reference, begin, end)
    best = combine(_estimates(moved, centre), count, reference)
    # what the offset is where the wall clocks agree: ranks of one host read one clock
    equal = (who.base[reference] - who.base).astype(np.float64) - first
    same = who.same_host & _fits(equal, best, limits)
    offset, drift = _chosen(best, limits, np.where(same, equal, np.nan), centre)
    uncertainty = _uncertainty(offset, drift, limits, centre)
    warnings: tuple[str, ...] = ()
    if (uncertainty >= UNBOUNDED_NS).any():
        free = words.ranks(who.named(uncertainty >= UNBOUNDED_NS))
        warnings = (f"{free}: {_UNBOUNDED}",)
    if not limits.consistent:
        warnings += (_CONTRADICTION,)
        uncertainty = np.where(np.arange(count) != reference, UNBOUNDED_NS, 0)
    nothing = np.isinf(limits.low[0]) & np.isinf(limits.high[0])
    # of wall clocks, from those of times relative to the ranks' bases
    whole = who.base + np.rint(first + offset).astype(np.int64)
    whole -= whole[reference]
    # the drift counts from `middle` on the rank's own clock, which may be an hour off
    clock = Clock(
        reference_rank=who.numbers[reference],
        middle_ns=who.middle,
        method=BY_CALLS,
        ranks=who.numbers,
        offset_ns=np.where(nothing, 0, whole - np.rint(drift * whole).astype(np.int64)),
        drift_ppm=np.round(drift * 1e6, 6) + 0.0,  # none, and not minus none
        uncertainty_ns=uncertainty,
        warnings=warnings,
        same_clock=who.named(same & limits.consistent),
    )
    return clock, limits.consistent


def _first_offsets(observed: Sequence[Block], ranks: int, reference: int) -> Floats:
    """Offsets of the ranks' bases good enough to put all calls on one time axis (ns).

    From the calls themselves and not from the wall clocks, which may be an hour apart.
    """
    offset = combine(_estimates(observed, 0.0), ranks, reference).offset
    if np.isnan(offset).any():
        # one-way traffic only: causality's own bounds are finite on one side at least
        limits = bound(observed, ranks, reference, 0.0, 0.0)
        low, high = limits.low[0], limits.high[0]
        for guess in (middle_of(low, high), high, low, np.zeros(ranks)):
            offset = np.where(np.isfinite(offset), offset, guess)
    return np.asarray(offset)


def _estimates(observed: Sequence[Block], middle: float) -> list[Estimate]:
    return [e for block in observed if (e := estimate(block, middle)) is not None]


def _fits(equal: Floats, best: Combined, limits: Bounds) -> Bools:
    """Whether nothing in the data contradicts one clock: the offset `equal`, no drift.

    Neither the bounds at any time of the window, nor the estimate by more than its own error
    leaves open. That two ranks of one host read one clock is likely and no proof, because each
    report is tied to the host's clock by itself: over 24 recordings of two to four ranks of one
    host (nsys and torch.profiler) small collectives put the ranks' reports within 4 µs of each
    other, while single nsys reports were up to 130 µs off their host's clock.
    """
    inside = (limits.low <= equal).all(axis=0) & (equal <= limits.high).all(axis=0)
    half = (limits.times[-1] - limits.times[0]) / 2
    slope = np.abs(best.raw_drift)
    leave = _ERRORS * best.error + 1_000.0
    with np.errstate(invalid="ignore"):
        near = (np.abs(best.offset - equal) <= leave) | np.isnan(best.offset)
        still = (slope <= _ERRORS * best.drift_error) | (slope * half <= leave) | np.isnan(slope)
    return np.asarray(inside & near & still, dtype=np.bool_)


def _chosen(best: Combined, limits: Bounds, equal: Floats, centre: float) -> tuple[Floats, Floats]:
    """Offset and drift within the bounds: `equal` and none, where it is known.

    Else the mean of the estimate and the bounds' middle, weighed by their errors, or that of both
    which there is. The middle counts where ends show little (between processors): it is what the
    fastest calls of either side leave, and the bound is shortest from there.
    """
    low, high = limits.at(centre)
    middle = middle_of(low, high)
    with np.errstate(invalid="ignore"):
        middle_error = np.maximum((high - low) / 2 / _THIRDS, 1.0)
        share = best.error**2 / (best.error**2 + middle_error**2)
        both = best.offset + share * (middle - best.offset)
    offset = np.nan_to_num(middle)
    for better in (best.offset, np.where(np.isfinite(both), both, np.nan), equal):
        offset = np.where(np.isnan(better), offset, better)
    inside = np.clip(offset, np.minimum(low, high), np.maximum(low, high))
    drift = np.where(np.isnan(equal), np.nan_to_num(best.drift), 0.0)
    drift = np.clip(drift, limits.drift_low, limits.drift_high)
    return np.where(np.isnan(middle), offset, inside), drift


def _uncertainty(offset: Floats, drift: Floats, limits: Bounds, centre: float) -> Ints:
    """The farthest that the truth can be from the estimate anywhere in the window.

    Truth and estimate are both lines over time, so their distance is greatest at an end.
    """
    ends = [0, -1]
    line = offset + drift * (limits.times[ends, None] - centre)
    apart = np.maximum(limits.high[ends] - line, line - limits.low[ends]).max(axis=0, initial=0.0)
    return np.asarray(np.ceil(np.minimum(apart, UNBOUNDED_NS)), dtype=np.int64)
