"""One clock for all ranks: bounds from causality, an estimate within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock.blocks import Block, Floats, bases, blocks
from clusterprof.align.clock.bounds import Bounds, bound
from clusterprof.align.clock.concurrent_copies import delays
from clusterprof.align.clock.contradictions import contradicting
from clusterprof.align.clock.estimates import Combined, Estimate, combine, estimate
from clusterprof.align.clock.model import UNBOUNDED_NS, Clock
from clusterprof.align.clock.readings import ANCHOR_NS, PairBound, as_blocks
from clusterprof.tables import RankTables

Ints = npt.NDArray[np.int64]
_WALL = "wall clock"
_BY_CALLS = "collectives (causality bounds, latency-bound ends)"
_BY_PROBE = "measuring the hosts' clocks"
_BY_REPORT = "one report's clock"
_METHOD = f"{_WALL}, refined by {_BY_CALLS}"
_DISBELIEVED = (
    "what was measured of the hosts' clocks contradicts the collectives (a clock that was set, or "
    "shifted for one process): it is left out"
)
_CONTRADICTION = (
    "the ranks' collectives contradict each other in time (a clock that jumped, a drift beyond "
    "150 ppm, or a wrong match): nothing bounds the clocks, and nobody is called late"
)
#: an offset of zero on one host is contradicted by an estimate this many errors away
_ERRORS = 4.0
#: the bounds' half-width is so many standard errors of their middle
_THIRDS = 3.0


def align(
    ranks: Sequence[RankTables], matched: pa.Table, measured: Sequence[PairBound] = ()
) -> Clock:
    """Put all ranks on the clock of the lowest rank that a collective or a measurement ties.

    `matched` has the schema `clusterprof.merge.MATCHED`; `measured` are bounds from outside of
    the reports (see `readings`). Where the two contradict each other the collectives are
    believed, and a warning says so. Measurements that rest on an assumption count only for ranks
    that nothing else bounds, and a warning names those. A rank that no chain of either ties to
    the reference keeps its wall clock, with `UNBOUNDED_NS` and a warning.
    """
    proven = [each for each in measured if not each.assumed]
    clock = _believing(ranks, matched, proven)
    loose = _loose(clock)
    if len(proven) == len(measured) or not loose:
        return clock
    # better an assumption that is named than nothing at all, and only for those who need it
    known = set(clock.ranks) - loose
    more = [e for e in measured if not e.assumed or not {e.rank, e.other} <= known]
    assuming = _believing(ranks, matched, more)
    resting = loose - _loose(assuming)
    if not resting:
        return clock
    return replace(
        assuming, warnings=(*assuming.warnings, _resting(sorted(resting))), assumed=tuple(resting)
    )


def _loose(clock: Clock) -> set[int]:
    """The ranks that nothing bounds."""
    free = clock.uncertainty_ns >= UNBOUNDED_NS
    return {rank for rank, is_free in zip(clock.ranks, free, strict=True) if is_free}


def _resting(ranks: Sequence[int]) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return (
        f"{who}: the clock's bound assumes that a report is within {ANCHOR_NS // 1000} µs of its "
        "host's clock (no mark in the report tells): it is likely and no proof"
    )


def _believing(
    ranks: Sequence[RankTables], matched: pa.Table, measured: Sequence[PairBound]
) -> Clock:
    """As `align`, of whatever kind the measurements are."""
    clock, consistent = _aligned(ranks, matched, measured)
    if consistent or not measured:
        return clock
    without, also_not = _aligned(ranks, matched, ())
    if not also_not:
        return clock
    return replace(without, warnings=(*without.warnings, _DISBELIEVED))


def _aligned(
    ranks: Sequence[RankTables], matched: pa.Table, measured: Sequence[PairBound]
) -> tuple[Clock, bool]:
    """The clock, and whether what it rests on agrees with itself."""
    numbers = tuple(sorted(t.rank for t in ranks))
    if not numbers:
        return Clock(0, 0, _WALL, (), *_nothing(0)), True
    base = bases(matched, numbers)
    no_call = base == 0
    begins = {t.rank: t.info.begin_ns for t in ranks}
    for each in measured:
        for rank in (each.rank, each.other):
            if rank in begins and no_call[numbers.index(rank)]:
                base[numbers.index(rank)] = begins[rank]
    found = blocks(matched, numbers, base, delays(matched, ranks))
    odd = contradicting(found, len(numbers))
    # one bad clock is left out and the others are told; if most are bad nobody knows which
    odd = odd if len(odd) < len(numbers) / 2 else []
    found = _without(found, odd)
    calls = len(found)
    found += _without(as_blocks(measured, numbers, base), odd)
    tied = sorted({m for b in found for m in b.members})
    reference = tied[0] if tied else 0
    middle, half = _window(ranks, numbers, base, reference)
    hosts = {t.rank: t.info.host for t in ranks}
    same = np.asarray([bool(hosts[r]) and hosts[r] == hosts[numbers[reference]] for r in numbers])
    if not found:
        offset, drift, uncertainty = _nothing(len(numbers))
        uncertainty[:] = UNBOUNDED_NS
        uncertainty[reference] = 0
        warnings = _untied([r for k, r in enumerate(numbers) if k != reference])
        one = tuple(numbers[k] for k in np.flatnonzero(same))
        clock = Clock(
            numbers[reference], middle, _WALL, numbers, offset, drift, uncertainty, warnings, one
        )
        return clock, True
    rough = _rough(found, len(numbers), reference)
    clock, consistent = _refined(
        numbers, base, found, calls, rough, reference, middle, half, same, no_call
    )
    if odd:
        clock = replace(clock, warnings=(_jumped([numbers[k] for k in odd]), *clock.warnings))
    if measured:
        shared = [each.source == "report" for each in measured]
        how = (
            [_BY_CALLS] * bool(calls) + [_BY_REPORT] * any(shared) + [_BY_PROBE] * (not all(shared))
        )
        clock = replace(clock, method=f"{_WALL}, refined by {' and by '.join(how)}")
    return clock, consistent


def _without(found: list[Block], odd: Sequence[int]) -> list[Block]:
    """The blocks without the ranks `odd` (indices), and without blocks of one member left."""
    if not odd:
        return found
    left = [np.flatnonzero(~np.isin(b.members, odd)) for b in found]
    return [b.of(some) for b, some in zip(found, left, strict=True) if len(some) >= 2]


def _jumped(ranks: Sequence[int]) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return (
        f"{who}: the times contradict those of the other ranks' collectives (a clock that jumped, "
        "a drift beyond 150 ppm, or a wrong match): left out of the clock"
    )


def _nothing(count: int) -> tuple[Ints, Floats, Ints]:
    return np.zeros(count, dtype=np.int64), np.zeros(count), np.zeros(count, dtype=np.int64)


def _window(
    ranks: Sequence[RankTables], numbers: tuple[int, ...], base: Ints, reference: int
) -> tuple[int, float]:
    """Middle of the reference's window (its wall clock), and half the longest rank's window."""
    spans = {t.rank: _span(t) for t in ranks}
    begin, end = spans[numbers[reference]]
    if end <= begin:
        begin = end = int(base[reference])
    longest = max(last - first for first, last in spans.values())
    return (begin + end) // 2, max(longest, end - begin, 0) / 2


def _span(tables: RankTables) -> tuple[int, int]:
    """First and last thing that ran on the device; without any, the capture's own limits."""
    if not tables.activity.num_rows:
        return tables.info.begin_ns, tables.info.end_ns
    ends = pc.max(tables.activity["end_ns"]).as_py()
    return int(pc.min(tables.activity["start_ns"]).as_py()), int(ends)


def _rough(found: list[Block], ranks: int, reference: int) -> Floats:
    """Offsets of the ranks' bases good enough to put all calls on one time axis (ns).

    From the calls themselves and not from the wall clocks, which may be an hour apart.
    """
    offset = combine(_estimates(found, 0.0), ranks, reference).offset
    if np.isnan(offset).any():
        # one-way traffic only: causality's own bounds are finite on one side at least
        raw = bound(found, ranks, reference, 0.0, 0.0)
        low, high = raw.low[0], raw.high[0]
        closed = np.isfinite(low) & np.isfinite(high)
        middle = np.full(ranks, np.nan)
        middle[closed] = (low[closed] + high[closed]) / 2
        one = np.where(np.isfinite(high), high, np.where(np.isfinite(low), low, 0.0))
        middle = np.where(np.isnan(middle), one, middle)
        offset = np.where(np.isnan(offset), middle, offset)
    return np.asarray(offset)


def _estimates(found: list[Block], middle: float) -> list[Estimate]:
    return [e for b in found if (e := estimate(b, middle)) is not None]


def _refined(
    numbers: tuple[int, ...],
    base: Ints,
    found: list[Block],
    calls: int,
    rough: Floats,
    reference: int,
    middle: int,
    half: float,
    same_host: npt.NDArray[np.bool_],
    no_call: npt.NDArray[np.bool_],
) -> tuple[Clock, bool]:
    moved = [b.moved(rough) for b in found]
    centre = float(middle - base[reference])
    # a measurement may lie long before or after the window, which is what the bound is for
    first = min([float(np.nanmin(b.start)) for b in moved[:calls]] + [centre - half])
    last = max([float(np.nanmax(b.end)) for b in moved[:calls]] + [centre + half])
    limits = bound(moved, len(numbers), reference, first, last)
    best = combine(_estimates(moved, centre), len(numbers), reference)
    offset, drift = _weighed(best, limits, centre), best.drift
    # what `offset` is where the wall clocks agree: ranks of one host read one clock
    equal = (base[reference] - base).astype(np.float64) - rough
    shared = same_host & _fits(equal, best, limits)
    offset, drift = np.where(shared, equal, offset), np.where(shared, 0.0, drift)
    offset, drift = _inside(offset, drift, limits, centre)
    uncertainty = _uncertainty(offset, drift, limits, centre)
    open_ended = [numbers[k] for k in np.flatnonzero(uncertainty >= UNBOUNDED_NS)]
    warnings = _untied(open_ended)
    if not limits.consistent:
        warnings += (_CONTRADICTION,)
        uncertainty = np.where(np.arange(len(numbers)) == reference, 0, UNBOUNDED_NS)
    one = tuple(numbers[k] for k in np.flatnonzero(shared & limits.consistent))
    clock = _as_clock(
        numbers, base, rough, reference, middle, offset, drift, uncertainty, warnings, one, no_call
    )
    return clock, limits.consistent


def _fits(equal: Floats, best: Combined, limits: Bounds) -> npt.NDArray[np.bool_]:
    """Whether nothing in the data speaks against one clock: the offset `equal`, no drift.

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


def _weighed(best: Combined, limits: Bounds, centre: float) -> Floats:
    """The estimate and the bounds' middle, by how well each knows.

    That counts where ends say little (between processors): the middle is what the fastest calls
    of either side leave, and the bound is shortest from there.
    """
    low = np.array([np.interp(centre, limits.times, column) for column in limits.low.T])
    high = np.array([np.interp(centre, limits.times, column) for column in limits.high.T])
    closed = np.isfinite(low) & np.isfinite(high) & np.isfinite(best.error)
    error = np.where(closed, best.error, 0.0)
    middle, doubt = np.zeros(len(low)), np.ones(len(low))
    middle[closed] = (low[closed] + high[closed]) / 2
    doubt[closed] = np.maximum((high[closed] - low[closed]) / 2 / _THIRDS, 1.0)
    share = error**2 / (error**2 + doubt**2)
    return np.asarray(best.offset + np.where(closed, share * (middle - best.offset), 0.0))


def _inside(offset: Floats, drift: Floats, limits: Bounds, centre: float) -> tuple[Floats, Floats]:
    """Move each estimate into its bounds; where there is none, take the bounds' middle."""
    low = np.array([np.interp(centre, limits.times, column) for column in limits.low.T])
    high = np.array([np.interp(centre, limits.times, column) for column in limits.high.T])
    closed = np.isfinite(low) & np.isfinite(high)
    middle = np.zeros(len(low))
    middle[closed] = (low[closed] + high[closed]) / 2
    offset = np.where(np.isnan(offset), middle, offset)
    inside = np.clip(offset, np.minimum(low, high), np.maximum(low, high))
    offset = np.where(closed, inside, offset)
    drift = np.clip(np.nan_to_num(drift), limits.drift_low, limits.drift_high)
    return offset, drift


def _uncertainty(offset: Floats, drift: Floats, limits: Bounds, centre: float) -> Ints:
    """The farthest that the truth can be from the estimate anywhere in the window.

    Truth and estimate are both lines over time, so their distance is greatest at an end.
    """
    worst = np.zeros(len(offset))
    for k in (0, -1):
        line = offset + drift * (limits.times[k] - centre)
        worst = np.maximum(worst, np.maximum(limits.high[k] - line, line - limits.low[k]))
    return np.asarray(
        np.minimum(np.ceil(np.nan_to_num(worst, posinf=UNBOUNDED_NS)), UNBOUNDED_NS), dtype=np.int64
    )


def _as_clock(
    numbers: tuple[int, ...],
    base: Ints,
    rough: Floats,
    reference: int,
    middle: int,
    offset: Floats,
    drift: Floats,
    uncertainty: Ints,
    warnings: tuple[str, ...],
    shared: tuple[int, ...],
    no_call: npt.NDArray[np.bool_],
) -> Clock:
    """Turn offsets of bases into offsets of wall clocks.

    So far: base-relative time minus (rough + offset) is time since the reference's base.
    """
    whole = base - base[reference] + np.rint(rough + offset).astype(np.int64)
    whole -= whole[reference]
    # the drift counts from `middle` on the rank's own clock, which may be an hour off
    whole = whole - np.rint(drift * whole).astype(np.int64)
    loose = uncertainty >= UNBOUNDED_NS
    loose[reference] = False
    whole = np.where(loose & no_call, 0, whole)
    return Clock(
        reference_rank=numbers[reference],
        middle_ns=middle,
        method=_METHOD,
        ranks=numbers,
        offset_ns=whole.astype(np.int64),
        drift_ppm=np.round(drift * 1e6, 6),
        uncertainty_ns=uncertainty,
        warnings=warnings,
        shared=shared,
    )


def _untied(ranks: Sequence[int]) -> tuple[str, ...]:
    if not ranks:
        return ()
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    text = (
        f"{who}: nothing bounds the clock against the reference rank (no chain of collectives that "
        "can be matched without it): wall clock only, nothing is said about who was late"
    )
    return (text,)
