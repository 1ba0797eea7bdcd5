"""Columns of tables as arrays, and what the matching and the clocks both take for granted."""

from __future__ import annotations

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
    column = pc.fill_null(table[name], pa.scalar(missing, table.schema.field(name).type))
    return np.asarray(column.to_numpy(), dtype=np.int64)


def texts(table: pa.Table, name: str) -> Objects:
    """Return a column of strings, with None for null."""
    column = table[name].cast(pa.string()).to_numpy(zero_copy_only=False)
    return np.asarray(column, dtype=np.object_)


def timed(table: pa.Table) -> Bools:
    """Return which rows have a start and an end."""
    both = pc.and_(pc.is_valid(table["start_ns"]), pc.is_valid(table["end_ns"]))
    return np.asarray(both.to_numpy(), dtype=np.bool_)


def rows_by(values: Ints) -> dict[int, Ints]:
    """Return the rows of each value, both in ascending order."""
    order = np.argsort(values, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
    return {int(values[rows[0]]): rows for rows in parts if len(rows)}
