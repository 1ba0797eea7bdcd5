"""What NCCL attaches to its NVTX ranges: communicator, message size, root, peer, ranks.

nsys 2025 exports the raw bytes (`binaryData`, with `--include-blobs=true`) and the layout
(`NVTX_PAYLOAD_SCHEMA_ENTRIES`); from 2024.6 `--include-json=true` gives `jsonText`; older
exports have neither. Communicator ids are in the payload from NCCL 2.25.1 on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from clusterprof.ingest.columns import Bools, Ints
from clusterprof.ingest.export import Export

#: A payload begins with four words of eight bytes: version, schema id, size, offset.
_HEADER = struct.Struct("<QQQQ")

#: the entries' names in NCCL's schemas -> ours
FIELDS = {
    "NCCL communicator ID": "communicator",
    "Message size [bytes]": "bytes",
    "Root": "root",
    "Peer rank": "peer",
    "No. of ranks": "ranks",
    "Rank": "rank",
}

#: NVTX payload entry types -> little-endian numpy types (nvToolsExtPayload.h)
_TYPES = {
    3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<i8", 8: "<u8", 9: "<i8", 10: "<u8",
    11: "<i1", 12: "<u1", 13: "<i2", 14: "<u2", 15: "<i4", 16: "<u4", 17: "<i8", 18: "<u8",
    22: "<u8", 23: "<u8",
}  # fmt: skip

#: NCCL 2.25 to 2.28, for exports that lost their schemas: size in bytes -> field, offset, type.
#: The last word is a root, a peer or a reduction, by the call: `last` is given to the caller.
_MEASURED = {
    8: (("bytes", 0, "<u8"),),
    16: (("communicator", 0, "<u8"), ("bytes", 8, "<u8")),
    24: (("communicator", 0, "<u8"), ("bytes", 8, "<u8"), ("last", 16, "<i4")),
}

Layout = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Payloads:
    """Decoded payloads by NVTX row: `row` ascending, and per field a value and its presence.

    Communicator ids are the same 64 bits as int64.
    """

    row: Ints
    values: dict[str, Ints]
    present: dict[str, Bools]

    def at(self, rows: Ints, name: str) -> tuple[Ints, Bools]:
        """Return field `name` for NVTX rows `rows`, and where it is present."""
        if name not in self.values or not self.row.size:
            return np.zeros(rows.size, np.int64), np.zeros(rows.size, bool)
        place = np.minimum(np.searchsorted(self.row, rows), self.row.size - 1)
        present = (self.row[place] == rows) & self.present[name][place]
        return np.where(present, self.values[name][place], 0), present


def read(export: Export, first_row: int, last_row: int) -> Payloads:
    """Return the payloads of the NVTX rows `first_row` to `last_row` (the range that has NCCL)."""
    limits = f"n.rowid BETWEEN {first_row} AND {last_row}"
    if export.has("NVTX_EVENTS", "binaryData"):
        table = export.arrow(
            f"SELECT n.rowid AS row, CAST(n.binaryData AS BLOB) AS payload FROM {{0}} n"
            f" WHERE n.binaryData IS NOT NULL AND {limits} ORDER BY n.rowid",
            "NVTX_EVENTS",
        )
        if table.num_rows:
            rows = table.column("row").to_numpy()
            return _decoded(rows, table.column("payload"), _layouts(export))
    if export.has("NVTX_EVENTS", "jsonText"):
        return _from_json(export, limits)
    return Payloads(np.empty(0, np.int64), {}, {})


def _layouts(export: Export) -> dict[int, Layout]:
    """Return schema id -> the fields we know, from the export's own description."""
    entries = export.rows(
        'SELECT "schemaId", name, coalesce("offset", 0), type FROM {0}',
        "NVTX_PAYLOAD_SCHEMA_ENTRIES",
    )
    layouts: dict[int, Layout] = {}
    for schema, name, offset, kind in entries:
        if name in FIELDS and kind in _TYPES:
            layouts[schema] = (*layouts.get(schema, ()), (FIELDS[name], offset, _TYPES[kind]))
    return layouts


def _decoded(rows: Ints, payloads: pa.ChunkedArray, layouts: dict[int, Layout]) -> Payloads:
    blobs = payloads.cast(pa.binary()).combine_chunks()
    if isinstance(blobs, pa.ChunkedArray):
        blobs = pa.concat_arrays(blobs.chunks)
    ends = np.frombuffer(blobs.buffers()[1], np.int32)[blobs.offset :][: len(blobs) + 1]
    content = np.frombuffer(blobs.buffers()[2] or b"", np.uint8)
    lengths = np.diff(ends)
    values = {name: np.zeros(rows.size, np.int64) for name in (*FIELDS.values(), "last")}
    present = {name: np.zeros(rows.size, bool) for name in values}
    for length in np.unique(lengths[lengths > _HEADER.size]):
        same = np.flatnonzero(lengths == length)
        block = content[ends[same][:, None] + np.arange(length)]
        _decode_block(block, same, layouts, values, present)
    return Payloads(rows, values, present)


def _decode_block(
    block: npt.NDArray[np.uint8],
    places: Ints,
    layouts: dict[int, Layout],
    values: dict[str, Ints],
    present: dict[str, Bools],
) -> None:
    """Decode payloads of one length (rows of `block`) into `values` and `present` at `places`."""
    header = np.ascontiguousarray(block[:, : _HEADER.size]).view("<u8")
    for schema, offset in np.unique(header[:, (1, 3)], axis=0).tolist():
        mine = np.flatnonzero((header[:, 1] == schema) & (header[:, 3] == offset))
        body = block[mine, offset:] if offset < block.shape[1] else block[:0]
        for name, begin, kind in layouts.get(schema) or _MEASURED.get(body.shape[1], ()):
            stop = begin + np.dtype(kind).itemsize
            if stop <= body.shape[1]:
                column = np.ascontiguousarray(body[:, begin:stop]).view(kind)[:, 0]
                values[name][places[mine]] = column.astype(np.int64)
                present[name][places[mine]] = True


def _from_json(export: Export, limits: str) -> Payloads:
    strings = export.has("NVTX_EVENTS", "jsonTextId")
    text = "coalesce(n.jsonText, s.value)" if strings else "n.jsonText"
    join = "LEFT JOIN {1} s ON s.id = n.jsonTextId" if strings else ""
    found = export.rows(
        f"SELECT n.rowid, {text} FROM {{0}} n {join}"
        f" WHERE {text} IS NOT NULL AND {limits} ORDER BY n.rowid",
        "NVTX_EVENTS",
        "StringIds",
    )
    values = {name: np.zeros(len(found), np.int64) for name in FIELDS.values()}
    present = {name: np.zeros(len(found), bool) for name in FIELDS.values()}
    for place, (_, content) in enumerate(found):
        for name, value in _numbers(content).items():
            values[name][place] = value
            present[name][place] = True
    return Payloads(np.array([row for row, _ in found], np.int64), values, present)


def _numbers(content: str) -> dict[str, int]:
    """Return the fields that we know of one JSON payload; none where it is no JSON object."""
    try:
        payload = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    found = {}
    for name, value in payload.items() if isinstance(payload, dict) else ():
        try:
            # Some versions write large numbers as text, with separators or in hexadecimal.
            number = int(value) if not isinstance(value, str) else int(value.replace(",", ""), 0)
        except (ValueError, TypeError):
            continue
        if name in FIELDS:
            found[FIELDS[name]] = (number + (1 << 63)) % (1 << 64) - (1 << 63)
    return found
