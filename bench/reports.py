"""Merging large reports: how long it takes, and how much memory all of its processes hold."""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tempfile
from pathlib import Path

from enlarge import enlarge
from figure import Figure, median
from process import Failed, run

_ROOT = Path(__file__).resolve().parents[1]
_RECORDING = _ROOT / "tests" / "data" / "recordings" / "nsys-2025.3" / "ddp"
#: 240 steps: some 68 000 kernels and 245 000 runtime calls a rank
_TIMES = 60
#: what a program would at least have to do: every row of every event table, through sqlite3
_READ = """
import sqlite3, sys
rows = 0
for path in sys.argv[1:]:
    with sqlite3.connect(path) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')}
            if {"start", "end"} <= columns:
                rows += len(connection.execute(f'SELECT * FROM "{name}"').fetchall())
print(rows)
"""


def merge(folder: Path | None, rounds: int) -> list[Figure]:
    """Wall time and peak memory of `clusterprof merge` over the reports of `folder`.

    Without a folder, over a recording of the tests enlarged until it has as many events.
    """
    with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as name:
        work = Path(name)
        reports = _unpacked(folder, work) if folder else _enlarged(work)
        size = sum(path.stat().st_size for path in reports) / 1e6
        program = Path(sys.executable).parent / "clusterprof"
        times, peaks, reads = [], [], []
        _checked(run([program, "merge", "--json", *reports]).stdout, len(reports))
        for _ in range(rounds):
            reading = run([sys.executable, "-c", _READ, *reports])
            reads.append(reading.seconds)
            merging = run([program, "merge", "--json", *reports], memory=True)
            times.append(merging.seconds)
            peaks.append(merging.peak_bytes / 1e6)
        events = int(reading.stdout)
    what = f"{len(reports)} reports, {events} events, {size:.0f} MB"
    baseline = f"reading all their rows with sqlite3: {median(reads):.2f} s"
    return [
        Figure("merge of two large reports, time", "s", 3.0, median(times), baseline, what, times),
        Figure(
            "merge of two large reports, memory",
            "MB",
            600.0,
            median(peaks),
            "",
            "resident, summed over processes",
            peaks,
        ),
    ]


def _enlarged(work: Path) -> list[Path]:
    return enlarge([_RECORDING / f"rank{rank}.sqlite.xz" for rank in (0, 1)], work, _TIMES)


def _checked(printed: str, count: int) -> None:
    results = json.loads(printed)
    if len(results["ranks"]) != count or not results["collectives"]["matched"]:
        raise Failed(f"the merge did not take in {count} reports: {results['warnings']}")


def _unpacked(folder: Path, work: Path) -> list[Path]:
    reports = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(".sqlite.xz"):
            target = work / path.stem
            with lzma.open(path) as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
            reports.append(target)
        elif path.suffix in {".sqlite", ".nsys-rep"}:
            reports.append(path)
    if len(reports) < 2:
        raise Failed(f"{folder} holds no two reports (.sqlite, .sqlite.xz, .nsys-rep)")
    return reports
