"""Columns of tables as arrays, and what the matching and the clocks both take for granted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
Objects = npt.NDArray[np.object_]

#: two clocks differ in rate by no more: crystals of 50 ppm each, and one that is being slewed
DRIFT_LIMIT_PPM = 150.0
#: the profilers' own error of a time stamp
STAMP_ERROR_NS = 1_000
#: the confidence in a match that the wall clocks had to decide: that adds nothing about them
BY_WALL_CLOCK = 0.5


def integers(table: pa.Table, name: str, missing: int = 0) -> Ints:
    """Return a column of integers, with `missing` for null."""
    column = table[name]
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(missing, column.type))
    return np.asarray(column.to_numpy(), dtype=np.int64)


def texts(table: pa.Table, name: str) -> Objects:
    """Return a column of strings, with None for null."""
    column = table[name]
    if pa.types.is_dictionary(column.type) and not column.null_count:
        names, place = coded(table, name)
        return np.asarray(names[place])
    return np.asarray(column.cast(pa.string()).to_numpy(zero_copy_only=False), dtype=np.object_)


def coded(table: pa.Table, name: str) -> tuple[Objects, Index]:
    """Return the different values of a column of strings, and of each row the place of its own.

    No value may be null.
    """
    column = table[name].unify_dictionaries() if table.num_rows else table[name]
    chunks = column.chunks if pa.types.is_dictionary(column.type) else []
    if not chunks:
        chunks = [column.combine_chunks().dictionary_encode()]
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks]).astype(np.intp)
    return np.asarray(chunks[0].dictionary.to_numpy(zero_copy_only=False), np.object_), codes


def matched(names: Objects, pattern: str) -> Bools:
    """Return in which of `names` a regular expression finds something."""
    matches = pc.match_substring_regex(pa.array(names, pa.string()), pattern)
    return np.asarray(matches.to_numpy(zero_copy_only=False), dtype=np.bool_)


def called(table: pa.Table, pattern: str) -> Bools:
    """Return the rows with a name that a regular expression finds something in."""
    names, name = coded(table, "name")
    return np.asarray(matched(names, pattern)[name], dtype=np.bool_)


def places(values: Ints) -> tuple[Ints, Ints]:
    """Return the different values in ascending order, and of each value its place among them."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if high - low > 2 * values.size:
        distinct, place = np.unique(values, return_inverse=True)
        return distinct, place.astype(np.int64)
    # they lie close: without sorting
    occurs = np.bincount(values - low, minlength=1) > 0
    return np.flatnonzero(occurs) + low, (np.cumsum(occurs) - 1)[values - low]


def first_places(values: Ints, wanted: Ints) -> Ints:
    """Return the place in `values` of each one wanted, of several the first; -1 where none is."""
    order = np.argsort(values, kind="stable")
    position = np.searchsorted(values[order], wanted)
    return np.where(np.r_[values[order], -1][position] == wanted, np.r_[order, -1][position], -1)


def narrow(values: Ints) -> npt.NDArray[Any]:
    """Return values in 32 bits where all of them fit."""
    least, most = values.min(initial=0), values.max(initial=0)
    fits = least >= -(2**31) and most < 2**31
    return values.astype(np.int32) if fits else values


def timed(table: pa.Table) -> Bools:
    """Return which rows have a start and an end."""
    start, end = table["start_ns"], table["end_ns"]
    if not (start.null_count or end.null_count):
        return np.ones(table.num_rows, dtype=np.bool_)
    return np.asarray(pc.and_(start.is_valid(), end.is_valid()).to_numpy(), dtype=np.bool_)


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
        rows = rows[np.argsort(start[rows], kind="stable")]
        earliest = np.minimum.accumulate(times[rows][::-1])[::-1]
        times[rows] = np.where(has_time[rows], times[rows], earliest)
    return times


def rows_by(values: Ints) -> dict[int, Ints]:
    """Return the rows of each value, both in ascending order."""
    distinct, place = places(values)
    # numbers of 16 bits are sorted by their digits, in a tenth of the time
    order = np.argsort(place.astype(np.uint16) if distinct.size < 1 << 16 else place, kind="stable")
    counts = np.bincount(place, minlength=distinct.size)
    return dict(zip(distinct.tolist(), np.split(order, np.cumsum(counts))[:-1], strict=True))
