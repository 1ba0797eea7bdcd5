"""What the matching and the clocks both take for granted of time stamps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.columns import Bools, Floats, Ints, first_at_or_after, order_by

#: two clocks differ in rate by no more: crystals of 50 ppm each, and one that is being slewed
DRIFT_LIMIT_PPM = 150.0
#: the profilers' own error of a time stamp
STAMP_ERROR_NS = 1_000
#: the confidence in a match that the wall clocks had to decide: that adds nothing about them
BY_WALL_CLOCK = 0.5
#: members of one collective end within this of each other (with NVLink; an AllReduce of four V100s
#: without it 100 to 400 µs), but for one call in ten; those that waited for one another begin so
#: many times as far apart
ENDS_NS, MOST_FRAC, WAITS = 50_000, 0.9, 4.0
#: what is more regular than any device's ends is only chance
FINEST_NS = 3_000.0
#: so many differences show a drift
_SHOWING_DRIFT = 3


def issue_times(issue: Ints, start: Ints, stream: Ints) -> Ints:
    """Return when each call or activity was issued (ns), where that is unknown (0) by its stream.

    A stream runs in the order of issue: it was issued by its start, and before the next one on its
    stream.
    """
    has_time = issue > 0
    if has_time.all():
        return issue
    times = np.where(has_time, issue, start)
    for number in np.unique(stream[~has_time]):
        rows = np.flatnonzero(stream == number)
        rows = rows[order_by(start[rows])]
        earliest = np.minimum.accumulate(times[rows][::-1])[::-1]
        times[rows] = np.where(has_time[rows], times[rows], earliest)
    return times


def timed(table: pa.Table) -> Bools:
    """Return which rows have a start and an end."""
    start, end = table["start_ns"], table["end_ns"]
    if not (start.null_count or end.null_count):
        return np.ones(table.num_rows, dtype=np.bool_)
    return np.asarray(pc.and_(start.is_valid(), end.is_valid()).to_numpy(), dtype=np.bool_)


def deviations(
    apart: Ints, time: Ints, weight: Floats | None = None, limit_ppm: float = DRIFT_LIMIT_PPM
) -> Floats:
    """Return how far differences `apart` of two ranks' times are from the one of their clocks (ns).

    Two ranks' calls end together where these are near zero, whatever their clocks say: they differ
    by a constant or, where that explains more, by a constant and a drift of at most `limit_ppm`.
    All are [calls], `time` (ns) is when they were; of a greater `weight` is what is more exact.
    """
    weight = np.ones(len(apart)) if weight is None else weight
    rest: Floats = (apart - apart[0]).astype(np.float64)
    order = order_by(rest)
    half = int(first_at_or_after(np.cumsum(weight[order]), weight.sum() / 2))
    rest -= rest[order[min(half, len(order) - 1)]]
    usual = np.abs(rest) <= np.quantile(np.abs(rest), MOST_FRAC)
    if len(rest) < _SHOWING_DRIFT or np.ptp(time[usual]) == 0:
        return rest
    exact = np.where(usual, weight**2, 0.0)
    exact /= exact.sum()
    since = (time - time[0]).astype(np.float64)
    since, drifting = (value - exact @ value for value in (since, rest))
    slope = exact @ (since * drifting) / (exact @ since**2)
    straight: Floats = drifting - np.clip(slope, -limit_ppm * 1e-6, limit_ppm * 1e-6) * since
    return straight if spread(straight) < spread(rest) else rest


def spread(deviations_ns: Floats, most: float = MOST_FRAC) -> float:
    """Return the width (ns) of what holds this part of such `deviations`, by default 9 in 10."""
    return 2 * float(np.quantile(np.abs(deviations_ns), most))
