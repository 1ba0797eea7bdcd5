"""The pages of an SQLite file: each belongs to one place in one table.

A page that several others name, or that is below itself, gives its rows any number of times: SQLite
follows it, and a few kilobytes take hours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

#: kinds of pages that name others below them
_INNER = (2, 5)
#: of the file's header, which stands before the first page's own
_HEADER = 100


class Pages:
    """The pages of an open file, of which each may be looked at once."""

    def __init__(self, file: int) -> None:
        self._file = file
        size = int.from_bytes(os.pread(file, 2, 16), "big")
        self._size = 65536 if size == 1 else size
        count = os.fstat(file).st_size // max(self._size, 1)
        self._free = bytearray(b"\1" * (count + 1))
        self._free[0] = 0

    def check(self, roots: Iterable[int]) -> None:
        """Raise ValueError where a page below these belongs to another place as well."""
        waiting = list(roots)
        while waiting:
            number = waiting.pop()
            if not 0 <= number < len(self._free) or not self._free[number]:
                raise ValueError(f"page {number} belongs to no place, or to two")
            self._free[number] = 0
            waiting += self._below(number)

    def _below(self, number: int) -> list[int]:
        """The pages that a page names: of one that has rows none."""
        begin = _HEADER if number == 1 else 0
        place = (number - 1) * self._size
        kind = os.pread(self._file, 1, place + begin)
        if not kind or kind[0] not in _INNER:
            return []
        page = os.pread(self._file, self._size, place)
        count = int.from_bytes(page[begin + 3 : begin + 5], "big")
        cells = page[begin + 12 : begin + 12 + 2 * count]
        at = [int.from_bytes(cells[k : k + 2], "big") for k in range(0, len(cells), 2)]
        named = [page[begin + 8 : begin + 12], *(page[cell : cell + 4] for cell in at)]
        return [int.from_bytes(each, "big") for each in named]
