"""What NCCL attaches to its NVTX ranges: communicator, message size, root, peer, ranks.

nsys 2025 exports the raw bytes (`binaryData`, with `--include-blobs=true`) and the layout
(`NVTX_PAYLOAD_SCHEMA_ENTRIES`); from 2024.6 `--include-json=true` gives `jsonText`; nsys 2022.4 to
2024.5 put the bytes only into `nsys export --type=json`, without their layout (`read_json`).
Communicator ids are in the payload from NCCL 2.25.1 on. Advanced tracing (nsys 2025.6) has others,
read as the user guide describes them.
"""

from __future__ import annotations

import contextlib
from binascii import a2b_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from clusterprof.agent.contracts import files
from clusterprof.columns import Bools, Ints, integers, row_among, where_known
from clusterprof.errors import ReportError
from clusterprof.ingest.nsys import schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.events import Ranges
from clusterprof.ingest.opening import unreadable

#: bytes of a JSON export that are read at once
_PIECE = 8 << 20
_MARK = b'"BinaryData"'

#: A payload begins with four words of eight bytes: version, schema id, size, offset.
_HEADER_BYTES = 32

#: the entries' names in NCCL's schemas -> ours
FIELDS = {
    "NCCL communicator ID": "communicator",
    "Message size [bytes]": "bytes",
    "Root": "root",
    "Peer rank": "peer",
    "No. of ranks": "ranks",
    "Rank": "rank",
    # of nsys' advanced tracing: as its user guide names them, and NCCL's profiler interface
    "commHash": "communicator",
    "nRanks": "ranks",
    "commRank": "rank",
    "rank": "rank",
    "root": "root",
    "peer": "peer",
    "count": "count",
    "apiId": "api",
    "localId": "on_device",
    "seqNumber": "sequence",
    "operationId": "operation",
}

#: bytes of one element by the names of NCCL's types without their prefix, and by their numbers
_ELEMENT_BYTES = {
    "char": 1, "half": 2, "int": 4, "float": 4, "double": 8, "bfloat16": 2, "float8e4m3": 1,
    "float8e5m2": 1, **{f"{kind}{8 * size}": size for kind in ("int", "uint", "float")
                        for size in (1, 2, 4, 8)},
}  # fmt: skip
_ELEMENT_BYTES |= {str(n): size for n, size in enumerate((1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1))}

#: NVTX payload entry types -> little-endian numpy types (nvToolsExtPayload.h)
_TYPES = {
    3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<i8", 8: "<u8", 9: "<i8", 10: "<u8",
    11: "<i1", 12: "<u1", 13: "<i2", 14: "<u2", 15: "<i4", 16: "<u4", 17: "<i8", 18: "<u8",
    22: "<u8", 23: "<u8",
}  # fmt: skip

#: NCCL numbers its layouts itself, from NVTX's first static schema id on (nvToolsExtPayload.h)
_FIRST_STATIC = 1 << 24
#: For exports without their schemas, as measured on NCCL 2.21, 2.25 and 2.28: the number -> what
#: follows the message size, where anything does (of a reduction its operator, which is not read).
#: AllGather (4) and AllToAll (16) end with it. Before 2.25 no communicator precedes it.
_FOLLOWED_BY = {5: "", 6: "root", 7: "", 8: "root", 9: "peer", 10: "peer", 17: "root", 18: "root"}
_NOT_FOLLOWED = (4, 16)
_COMMUNICATOR_INIT = 11

Layout = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Payloads:
    """Decoded payloads by NVTX row: `row` ascending, and per field its values and their presence.

    Communicator ids are the same 64 bits as int64.
    """

    row: Ints
    values: dict[str, Ints]
    present: dict[str, Bools]

    @classmethod
    def of(cls, row: Ints | Sequence[int] = ()) -> Payloads:
        """Return payloads of these rows in which every field is still missing."""
        row = np.asarray(row, np.int64)
        names = set(FIELDS.values())
        values = {name: np.zeros(row.size, np.int64) for name in names}
        return cls(row, values, {name: np.zeros(row.size, bool) for name in names})

    def at(self, rows: Ints, name: str) -> tuple[Ints, Bools]:
        """Return field `name` for NVTX rows `rows`, and where it is present."""
        place = row_among(self.row, rows)
        present = where_known(self.present[name], place, False)
        return np.where(present, where_known(self.values[name], place, 0), 0), present


@dataclass(frozen=True)
class Bodies:
    """Payloads as bytes, by NVTX row (ascending): `length[i]` of `content` from `begin[i]` on."""

    row: Ints
    schema: Ints
    begin: Ints
    length: Ints
    content: npt.NDArray[np.uint8]


def read(export: Export, rows: Ints, *, advanced: bool = False) -> Payloads:
    """Return the payloads of the NVTX rows from the first to the last of `rows`.

    `advanced`: of advanced tracing, whose documented form is the text.
    """
    if not rows.size:
        return Payloads.of()
    limits = f"n.rowid BETWEEN {rows.min()} AND {rows.max()}"
    has_text = export.has(schema.NVTX, "jsonText")
    of_text = _from_json(export, limits) if has_text else Payloads.of()
    if (advanced and of_text.row.size) or not export.has(schema.NVTX, "binaryData"):
        return of_text
    table = export.arrow(
        f"SELECT n.rowid AS row, CAST(n.binaryData AS BLOB) AS payload FROM {{0}} n"
        f" WHERE n.binaryData IS NOT NULL AND {limits} ORDER BY n.rowid",
        schema.NVTX,
    )
    if not table.num_rows:
        return of_text
    bodies = _bodies(table.column("row").to_numpy(), table.column("payload"))
    return decoded(bodies, _layouts(export))


def _layouts(export: Export) -> dict[int, Layout]:
    """Return schema id -> the fields we know, from the export's own description."""
    sql = 'SELECT "schemaId", name, coalesce("offset", 0), type FROM {0}'
    layouts: dict[int, Layout] = {}
    for number, name, offset, kind in export.rows(sql, schema.PAYLOAD_ENTRIES):
        if name in FIELDS and kind in _TYPES:
            layouts[number] = (*layouts.get(number, ()), (FIELDS[name], offset, _TYPES[kind]))
    return layouts


def _bodies(rows: Ints, payloads: pa.ChunkedArray) -> Bodies:
    """Return the payloads without the header that nsys puts before each in SQLite."""
    begin, length, content = _places(payloads)
    whole = length > _HEADER_BYTES
    rows, begin, length = rows[whole], begin[whole], length[whole]
    header = content[begin[:, None] + np.arange(_HEADER_BYTES)].view("<u8")
    offset = np.clip(header[:, 3].astype(np.int64), 0, length)
    return Bodies(rows, header[:, 1].astype(np.int64), begin + offset, length - offset, content)


def _places(payloads: pa.ChunkedArray) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
    """Return where each payload begins in their content, its length, and the content."""
    blobs = payloads.cast(pa.binary()).combine_chunks()
    ends = np.frombuffer(blobs.buffers()[1], np.int32)[blobs.offset :][: len(blobs) + 1]
    content = np.frombuffer(blobs.buffers()[2] or b"", np.uint8)
    return ends[:-1].astype(np.int64), np.diff(ends).astype(np.int64), content


def decoded(bodies: Bodies, layouts: Mapping[int, Layout] | None = None) -> Payloads:
    """Return what the bytes hold, by `layouts` (schema id -> fields), else as NCCL's are known."""
    payloads = Payloads.of(bodies.row)
    kinds = np.stack([bodies.schema, bodies.length], axis=1)
    for number, length in np.unique(kinds, axis=0).tolist() if bodies.row.size else ():
        rows = np.flatnonzero((bodies.schema == number) & (bodies.length == length))
        body = bodies.content[bodies.begin[rows][:, None] + np.arange(length)]
        for name, begin, kind in (layouts or {}).get(number) or _known_layout(number, length):
            stop = begin + np.dtype(kind).itemsize
            if stop <= length:
                column = np.ascontiguousarray(body[:, begin:stop]).view(kind)[:, 0]
                payloads.values[name][rows] = column.astype(np.int64)
                payloads.present[name][rows] = True
    return payloads


def _known_layout(schema_id: int, length: int) -> Layout:
    """Return the layout of one of NCCL's own schemas, by its number and its length in bytes.

    A number that is not known is of a newer NCCL, which begins with communicator and size.
    """
    number = schema_id - _FIRST_STATIC
    if number == _COMMUNICATOR_INIT:
        fields = ("communicator", 0, "<u8"), ("ranks", 8, "<i4"), ("rank", 12, "<i4")
        return fields if length == 24 else ()
    followed = number in _FOLLOWED_BY
    size_alone = length == (16 if followed else 8)
    offset = 0 if size_alone and (followed or number in _NOT_FOLLOWED) else 8
    layout: Layout = (("communicator", 0, "<u8"),) if offset else ()
    layout = (*layout, ("bytes", offset, "<u8"))
    last = _FOLLOWED_BY.get(number)
    return (*layout, (last, offset + 8, "<i4")) if last else layout


def _from_json(export: Export, condition: str) -> Payloads:
    """The payloads that nsys writes as text (2024.6 on), of ranges that meet a condition of SQL."""
    text, join = export.text(schema.NVTX, "jsonText", "jsonTextId")
    rows = export.rows(
        f"SELECT n.rowid, {text} FROM {{0}} n {join}"
        f" WHERE {text} IS NOT NULL AND {condition} ORDER BY n.rowid",
        *(schema.NVTX, schema.STRINGS),
    )
    payloads = Payloads.of([row for row, _ in rows])
    for place, (_, content) in enumerate(rows):
        for name, value in _numbers(content).items():
            payloads.values[name][place] = value
            payloads.present[name][place] = True
    return payloads


def _numbers(content: str) -> dict[str, int]:
    """Return the fields that we know of one JSON payload; none where it is no JSON object."""
    try:
        payload = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    payload = payload if isinstance(payload, dict) else {}
    fields = {}
    for name, value in ((name, payload[name]) for name in payload if name in FIELDS):
        # Some versions write large numbers as text, with separators or in hexadecimal.
        with contextlib.suppress(ValueError, TypeError):
            number = int(value.replace(",", ""), 0) if isinstance(value, str) else int(value)
            fields[FIELDS[name]] = _signed(number)
    size = _ELEMENT_BYTES.get(str(payload.get("dataType")).lower().removeprefix("nccl"))
    if "count" in fields and size:
        fields["bytes"] = fields["count"] * size
    return fields


def _signed(number: Any) -> int:
    """Return the 64 bits of a number as the signed one that SQLite has for it."""
    return (int(number) + (1 << 63)) % (1 << 64) - (1 << 63)


def read_json(path: Path, ranges: Ranges) -> Payloads:
    """Return the payloads of `ranges` in the JSON export `path` of the same report.

    One event a line, some 230 bytes, of which a payload is `"Payload":{"BinaryData":[{"SchemaId":
    "16777221","Data":"base64"}]}`: only lines with one are parsed. It belongs to the range of its
    thread and domain that begins when it does. Raises `ReportError` where the file cannot be read
    or is no such export.
    """
    try:
        events = pa.concat_tables([_events([]), *map(_events, _lines(path))])
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        text = f"{path} is not as nsys writes JSON: {type(error).__name__} {error}"
        raise ReportError(text) from error
    keys = ["start", "process", "thread", "domain"]
    range_keys = pa.table({name: getattr(ranges, name) for name in (*keys, "row")})
    event_keys = events.select(keys).append_column("place", pa.array(np.arange(events.num_rows)))
    both = range_keys.join(event_keys, keys, join_type="inner")
    row, once = np.unique(integers(both, "row"), return_index=True)
    chosen = events.take(pa.array(integers(both, "place")[once]))
    return decoded(Bodies(row, integers(chosen, "schema"), *_places(chosen["body"])))


def _lines(path: Path) -> Iterator[list[bytes]]:
    """Yield the lines that have a payload, of a piece of the file at a time."""
    rest = b""
    with files.opened(path) as file:
        while piece := file.read(_PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            yield [line for line in lines if _MARK in line]
    if _MARK in rest:
        yield [rest]


def _events(lines: list[bytes]) -> pa.Table:
    """Return the payloads in these lines: whose they are, their schema's id, and their bytes."""
    events = [line["NvtxEvent"] for line in orjson.loads(b"[" + b",".join(lines) + b"]")]
    payloads = [event["Payload"]["BinaryData"][0] for event in events]

    def numbers(objects: list[Any], name: str) -> Ints:
        # A number that is 0 is left out.
        return np.array([_signed(item.get(name, 0)) for item in objects], np.int64)

    tid = numbers(events, "GlobalTid")
    return pa.table(
        {
            "start": numbers(events, "Timestamp"),
            "process": schema.process_of(tid),
            "thread": schema.thread_of(tid),
            "domain": numbers(events, "DomainId"),
            "schema": numbers(payloads, "SchemaId"),
            "body": pa.array([a2b_base64(payload["Data"]) for payload in payloads], pa.binary()),
        }
    )
