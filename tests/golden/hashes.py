"""Hashes by key and by column: the same on every machine, processor and Python hash seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: a value that is as short as this is readable, and stored as it is
_SHORT = 40
#: of a float as many bits count: some nine digits, as `_rounded` leaves of one in JSON
_BITS = 2.0**30


def digest(pieces: Iterable[bytes]) -> str:
    """A hash of bytes, cut where no two in one file will be alike by chance."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(len(piece).to_bytes(8, "little"))
        whole.update(piece)
    return whole.hexdigest()[:12]


def of_value(value: Any) -> str:
    """A value of JSON: itself where it is short, else its hash."""
    text = json.dumps(_rounded(value), sort_keys=True)
    return text if len(text) <= _SHORT else digest([text.encode()])


def by_key(name: str, value: Any, levels: int = 2) -> dict[str, str]:
    """A value's hash for each key, of lists of objects for each key of these: `name.key[].key`."""
    if levels and isinstance(value, Mapping) and value:
        inner = {f"{name}.{key}": inner_value for key, inner_value in value.items()}
    elif levels and _is_table(value):
        keys = dict.fromkeys(key for row in value for key in row)
        inner = {f"{name}[].{key}": [row.get(key) for row in value] for key in keys}
    else:
        return {name: of_value(value)}
    hashes: dict[str, str] = {}
    for key, inner_value in inner.items():
        hashes |= by_key(key, inner_value, levels - 1)
    return hashes


def by_column(name: str, tables: Sequence[pa.Table]) -> dict[str, str]:
    """Of tables with one schema (each rank's, say) the number of rows, and each column's hash."""
    columns = dict.fromkeys(column for table in tables for column in table.column_names)
    hashes = {
        f"{name}.{column}": digest(
            piece for table in tables for piece in _column_bytes(table.column(column))
        )
        for column in columns
    }
    return {f"{name} rows": str(sum(table.num_rows for table in tables)), **hashes}


def lines(hashes: Mapping[str, str]) -> str:
    """One line for each key, sorted: so `git diff` shows those that have changed, and no others."""
    return "".join(f"{key}: {value}\n" for key, value in sorted(hashes.items()))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _column_bytes(column: pa.ChunkedArray) -> Iterable[bytes]:
    kind = column.type
    yield str(kind).encode()
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        column = column.cast(kind)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        yield column.is_valid().to_numpy().tobytes()
        yield _plain(column.fill_null(False if pa.types.is_boolean(kind) else 0).to_numpy())
    elif pa.types.is_string(kind):
        # numbered as they come, whatever dictionary they had before
        coded = pc.dictionary_encode(column, null_encoding="encode").combine_chunks()
        yield json.dumps(coded.dictionary.to_pylist()).encode()
        yield coded.indices.to_numpy().tobytes()
    else:
        yield json.dumps(_rounded(column.to_pylist())).encode()


def _plain(values: np.ndarray[Any, Any]) -> bytes:
    if values.dtype.kind == "f":
        mantissa, exponent = np.frexp(values)
        values = np.ldexp(np.round(mantissa * _BITS) / _BITS, exponent) + 0.0
    return values.tobytes()
