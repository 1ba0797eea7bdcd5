"""How much a packed file may hold, and how much a Parquet file does: a kilobyte may be a gigabyte.

Arrow allocates memory for a page by what the page's header says, whatever the file's footer says.
Source: parquet.thrift (PageHeader), and Thrift's compact protocol.
"""

from __future__ import annotations

import os
import re
from typing import IO, Any

from clusterprof.errors import UsageError

#: how many bytes a packed report may hold, in place of what follows from its size: `8G`
VARIABLE = "CLUSTERPROF_MAX_UNPACKED"

#: Traces of torch.profiler pack to a 26th with xz, exports of nsys to an 8th, tables to a 40th.
#: What packs to less than a hundredth was made to; a small file is no danger.
_RATIO = 100
_HARMLESS = 64 << 20

_SIZE = re.compile(r"([0-9]{1,15})([kKMGT]?)i?B?")
_UNITS = {"": 0, "k": 10, "K": 10, "M": 20, "G": 30, "T": 40}


def most(packed: int) -> int:
    """Return how many bytes may be unpacked of so many. Raises UsageError."""
    given = os.environ.get(VARIABLE)
    if not given:
        return max(_HARMLESS, _RATIO * packed)
    match = _SIZE.fullmatch(given.strip())
    if match is None:
        raise UsageError(
            f"{VARIABLE}={given!r} is no size", "write bytes, or for instance 500M, 8G"
        )
    return int(match[1]) << _UNITS[match[2]]


# -- the pages of a Parquet file, by their own headers

#: bytes of one header; with the least and greatest text of its page it has a few thousand
_HEADER_BYTES = 1 << 14
#: bytes that a page counts for at least: a file of millions of empty ones is no table
_LEAST_PAGE_BYTES = 1 << 10
#: the fields of a header that are read, and how deep what it holds is nested
_UNPACKED, _PACKED = 2, 3
_DEEPEST = 8
#: Thrift's types that a header may have: numbers, those of so many bytes (true and false are in
#: the type), and the others
_NUMBERS = (4, 5, 6)
_FIXED_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
_BINARY, _STRUCT = 8, 12


def unpacked_size(file: IO[bytes], column: Any) -> int:
    """How many bytes a column's packed pages are to take, by its metadata. Raises ValueError."""
    if column.compression == "UNCOMPRESSED":
        return 0
    # An empty column has a dictionary alone.
    pages = column.data_page_offset, column.dictionary_page_offset or 0
    place, total = min(filter(None, pages), default=0), 0
    end = place + column.total_compressed_size
    while place < end:
        file.seek(place)
        header = _Header(file.read(_HEADER_BYTES))
        total += max(_LEAST_PAGE_BYTES, header.unpacked)
        place += header.place + header.packed
    return total


class _Header:
    """A page's header, at the beginning of `content`. Raises ValueError where there is none."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0
        try:
            numbers = self._struct(_DEEPEST)
        except IndexError:
            raise ValueError("a page has no header") from None
        self.unpacked, self.packed = numbers.get(_UNPACKED, -1), numbers.get(_PACKED, -1)
        if min(self.unpacked, self.packed) < 0:
            raise ValueError("a page has no size")

    def _struct(self, depth: int) -> dict[int, int]:
        """Go past a struct; returns its fields, 0 for one that is no number."""
        if not depth:
            raise ValueError("a page's header is nested too deeply")
        field, numbers = 0, {}
        while head := self._byte():
            kind = head & 15
            field = field + (head >> 4) if head >> 4 else self._number()
            numbers[field] = self._number() if kind in _NUMBERS else 0
            if kind == _STRUCT:
                self._struct(depth - 1)
            elif kind == _BINARY:
                size = self._unsigned()
                self.place += size
            elif kind in _FIXED_SIZES:
                self.place += _FIXED_SIZES[kind]
            elif kind not in _NUMBERS:
                raise ValueError("a page has no header")
        return numbers

    def _byte(self) -> int:
        self.place += 1
        return self.content[self.place - 1]

    def _unsigned(self) -> int:
        number = 0
        for shift in range(0, 64, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise ValueError("a page has no header")

    def _number(self) -> int:
        number = self._unsigned()
        return number >> 1 ^ -(number & 1)
