"""A large report made of a small recording: its steps, again and again.

All ranks are enlarged by one and the same period, so their collectives still match and their
clocks still agree; steps and correlation ids go on counting.
"""

from __future__ import annotations

import lzma
import re
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

_STEP = re.compile(r"step (\d+)")


def enlarge(recordings: Sequence[Path], folder: Path, times: int) -> list[Path]:
    """Write each `.sqlite.xz` into `folder`, its steps repeated until there are `times` of them."""
    reports = []
    for path in recordings:
        report = folder / path.stem
        with lzma.open(path) as packed, report.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
        reports.append(report)
    begins = {report: _first_step(report) for report in reports}
    period = max(_last_end(report) - begin for report, begin in begins.items()) + 1_000_000
    for report, begin in begins.items():
        _repeat(report, begin, period, times)
    return reports


def _events(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """Each table of events with times, and its columns."""
    tables = {}
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
        columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')]
        if {"start", "end"} <= set(columns):
            tables[name] = columns
    return tables


def _first_step(report: Path) -> int:
    with sqlite3.connect(report) as connection:
        (begin,) = connection.execute(
            "SELECT min(start) FROM NVTX_EVENTS WHERE text LIKE 'step %'"
        ).fetchone()
    return int(begin)


def _last_end(report: Path) -> int:
    with sqlite3.connect(report) as connection:
        ends = [
            connection.execute(f'SELECT max("end") FROM "{name}"').fetchone()[0]
            for name in _events(connection)
        ]
    return max(filter(None, ends))


def _repeat(report: Path, begin: int, period: int, times: int) -> None:
    with sqlite3.connect(report) as connection:
        tables = _events(connection)
        per_turn = 1 + max(
            connection.execute(f'SELECT max(correlationId) FROM "{name}"').fetchone()[0] or 0
            for name, columns in tables.items()
            if "correlationId" in columns
        )
        texts = [row[0] or "" for row in connection.execute("SELECT text FROM NVTX_EVENTS")]
        numbers = {int(found[1]) for text in texts if (found := _STEP.fullmatch(text))}
        for name, columns in tables.items():
            every = f'SELECT * FROM "{name}" WHERE start >= ?'
            rows = connection.execute(every, (begin,)).fetchall()
            marks = ",".join("?" * len(columns))
            for turn in range(1, times):
                by = {
                    "start": turn * period,
                    "end": turn * period,
                    "correlationId": turn * per_turn,
                }
                moved = (
                    _moved(dict(zip(columns, row, strict=True)), by, turn * len(numbers))
                    for row in rows
                )
                connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', moved)


def _moved(row: dict[str, object], by: dict[str, int], steps: int) -> tuple[object, ...]:
    for name, distance in by.items():
        value = row.get(name)
        if isinstance(value, int) and value > 0:
            row[name] = value + distance
    text = row.get("text")
    if isinstance(text, str) and (found := _STEP.fullmatch(text)):
        row["text"] = f"step {int(found[1]) + steps}"
    return tuple(row.values())
