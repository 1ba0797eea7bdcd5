"""What the matching and the clocks both take for granted of time stamps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.columns import Bools, Ints, order_by

#: two clocks differ in rate by no more: crystals of 50 ppm each, and one that is being slewed
DRIFT_LIMIT_PPM = 150.0
#: the profilers' own error of a time stamp
STAMP_ERROR_NS = 1_000
#: the confidence in a match that the wall clocks had to decide: that adds nothing about them
BY_WALL_CLOCK = 0.5


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
