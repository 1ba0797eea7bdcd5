"""From numpy columns to canonical tables: one place that knows how a schema is filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.tables import SCHEMAS

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: what a column may be given as: an array, a constant, or null throughout
Column: TypeAlias = "pa.Array | pa.ChunkedArray | npt.NDArray[Any] | Sequence[object] | str | None"


def nullable(values: npt.NDArray[Any], valid: Bools) -> pa.Array:
    """Return `values` as an Arrow array that is null where `valid` is false."""
    return pa.array(values, mask=~valid)


def encoded(codes: npt.NDArray[Any], names: Sequence[str]) -> pa.DictionaryArray:
    """Return a name column: `names[codes[i]]`, null where the code is negative."""
    small = codes.astype(np.int32, copy=False)
    indices = pa.array(small, mask=small < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(names), pa.string()))


def fill(table: str, rows: int, columns: Mapping[str, Column]) -> pa.Table:
    """Return a table of the schema `table` with `rows` rows; columns not given are null."""
    schema = SCHEMAS[table]
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise KeyError(f"{table} has no column {sorted(unknown)}")
    arrays = [_column(columns.get(field.name), field.type, rows) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(value: Column, kind: pa.DataType, rows: int) -> pa.Array | pa.ChunkedArray:
    if value is None:
        return pa.nulls(rows, kind)
    if isinstance(value, str):
        return _constant(value, kind, rows)
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return value if value.type == kind else value.cast(kind)
    return pa.array(value, kind)


def _constant(value: str, kind: pa.DataType, rows: int) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return encoded(np.zeros(rows, np.int32), [value])
    return pa.repeat(pa.scalar(value, kind), rows)


def joined(table: str, parts: Sequence[pa.Table], by: str) -> pa.Table:
    """Return the rows of all `parts` (of one schema), sorted by the column `by`, in one chunk."""
    whole = pa.concat_tables([SCHEMAS[table].empty_table(), *parts])
    whole = whole.unify_dictionaries().combine_chunks()
    keys = whole.column(by).to_numpy()
    if keys.size and not (keys[1:] >= keys[:-1]).all():
        whole = whole.take(pa.array(np.argsort(keys, kind="stable")))
    return whole


def ints(table: pa.Table, name: str) -> Ints:
    """Return the column `name`, which must have no nulls, as int64."""
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"column {name} has nulls")
    values: Ints = column.to_numpy()
    return values.astype(np.int64, copy=False)


def matching(names: pa.Array, pattern: str) -> Bools:
    """Return for each of `names` whether the regular expression `pattern` is found in it."""
    found: Bools = pc.match_substring_regex(names, pattern).to_numpy(zero_copy_only=False)
    return found.astype(np.bool_)
