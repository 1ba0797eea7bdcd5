"""NVTX payloads out of `nsys export --type=json`, for nsys that puts them nowhere else.

nsys 2022.4 to 2024.5 leave the payload out of every table and keep it in the JSON dump: one event
a line, of which a payload is `"Payload":{"BinaryData":[{"SchemaId":"16777221","Data":"base64"}]}`,
without a description of its layout. Some 230 bytes for each event of the whole report, so the file
is read in pieces, and only lines with a payload are parsed.
"""

from __future__ import annotations

from array import array
from binascii import a2b_base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from clusterprof.errors import ReportError
from clusterprof.ingest.columns import Ints, ints
from clusterprof.ingest.nsys.database import unreadable
from clusterprof.ingest.nsys.nccl_payload import Bodies
from clusterprof.ingest.nsys.nvtx import Ranges, process_of, thread_of

_PIECE = 8 << 20
_MARK = b'"BinaryData"'


@dataclass
class _Found:
    """The payloads of a report in the file's order."""

    start: array[int] = field(default_factory=lambda: array("q"))
    tid: array[int] = field(default_factory=lambda: array("q"))
    domain: array[int] = field(default_factory=lambda: array("q"))
    schema: array[int] = field(default_factory=lambda: array("q"))
    length: array[int] = field(default_factory=lambda: array("q"))
    content: bytearray = field(default_factory=bytearray)

    def take(self, lines: list[bytes]) -> None:
        """Add the events of these lines."""
        events = [each["NvtxEvent"] for each in orjson.loads(b"[" + b",".join(lines) + b"]")]
        first = [each["Payload"]["BinaryData"][0] for each in events]
        bodies = [a2b_base64(each["Data"]) for each in first]
        # A number that is 0 is left out.
        self.start.extend([int(each.get("Timestamp", 0)) for each in events])
        self.tid.extend([_signed(each.get("GlobalTid", 0)) for each in events])
        self.domain.extend([_signed(each.get("DomainId", 0)) for each in events])
        self.schema.extend([_signed(each.get("SchemaId", 0)) for each in first])
        self.length.extend([len(each) for each in bodies])
        self.content += b"".join(bodies)


def _signed(number: Any) -> int:
    """Return the 64 bits of a number as the signed one that SQLite has for it."""
    return (int(number) + (1 << 63)) % (1 << 64) - (1 << 63)


def read(path: Path, ranges: Ranges) -> Bodies:
    """Return the payloads of `ranges` in the JSON export `path` of the same report.

    A payload belongs to the range of its thread and domain that begins when it does. Raises
    `ReportError` where the file cannot be read or is no such export.
    """
    found = _Found()
    try:
        _fill(path, found)
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ReportError(
            f"{path} is not as nsys writes JSON: {type(error).__name__} {error}"
        ) from error
    return _joined(found, ranges)


def _fill(path: Path, found: _Found) -> None:
    rest = b""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            lines = (rest + piece).split(b"\n")
            rest = lines.pop()
            if chosen := [line for line in lines if _MARK in line]:
                found.take(chosen)
    if _MARK in rest:
        found.take([rest])


def _joined(found: _Found, ranges: Ranges) -> Bodies:
    """Return the payloads that belong to one of `ranges`, by its NVTX row."""
    tid = np.array(found.tid, np.int64)
    length = np.array(found.length, np.int64)
    keys = ["start", "process", "thread", "domain"]
    theirs = pa.table(
        {
            "start": np.array(found.start, np.int64),
            "process": process_of(tid),
            "thread": thread_of(tid),
            "domain": np.array(found.domain, np.int64),
            "place": np.arange(tid.size),
        }
    )
    mine = pa.table({name: getattr(ranges, name) for name in (*keys, "row")})
    both = mine.join(theirs, keys, join_type="inner")
    row, once = np.unique(ints(both, "row"), return_index=True)
    place: Ints = ints(both, "place")[once]
    begin = np.cumsum(length) - length
    content = np.frombuffer(found.content, np.uint8)
    return Bodies(
        row, np.array(found.schema, np.int64)[place], begin[place], length[place], content
    )
