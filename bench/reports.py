"""Merging large reports: how long it takes, and how much memory all of its processes hold."""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tempfile
from pathlib import Path

from engines import make
from enlarge import enlarge
from figure import Figure, median
from process import Failed, run

_ROOT = Path(__file__).resolve().parents[1]
_RECORDING = _ROOT / "tests" / "data" / "recordings" / "nsys-2025.3" / "ddp"
#: 240 steps: some 68 000 kernels and 245 000 runtime calls a rank
_TIMES = 60
#: Not measured here: an nsys of NVIDIA's site has the recipes, Debian's has none.
_RECIPES_S = 3.0
_RECIPES = "stated, not measured: nsys's three NCCL recipes took 3.0 s for LARGE's two reports"
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
        times, peaks, reads, whole = [], [], [], []
        _checked(run([program, "merge", "--json", *reports]).stdout, len(reports))
        for turn in range(rounds):
            reading = run([sys.executable, "-c", _READ, *reports])
            reads.append(reading.seconds)
            merging = run([program, "merge", "--json", *reports], memory=True)
            times.append(merging.seconds)
            peaks.append(merging.peak_bytes / 1e6)
            written = run([program, "merge", "-o", work / f"merged-{turn}", *reports])
            whole.append(written.seconds)
            shutil.rmtree(work / f"merged-{turn}")
        events = int(reading.stdout)
    what = f"{len(reports)} reports, {events} events, {size:.0f} MB"
    baseline = f"reading all their rows with sqlite3: {median(reads):.2f} s"
    return [
        Figure("merge of two large reports, time", "s", 3.0, median(times), baseline, what, times),
        Figure(
            "the same with tables and page",
            "s",
            _RECIPES_S / 5,
            median(whole),
            _RECIPES,
            "",
            whole,
            floor="numpy and pyarrow take 0.2 s, SQLite a third of a second for each report",
        ),
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


def many(reports: int, rounds: int) -> list[Figure]:
    """Time and peak memory of merging many reports of one job, over reading all their rows."""
    with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as name:
        work = Path(name)
        make(work / "reports", reports, _TIMES)
        program = Path(sys.executable).parent / "clusterprof"
        paths = sorted((work / "reports").iterdir())
        merging, reading = [], []
        for turn in range(rounds):
            reading.append(run([sys.executable, "-c", _READ, *paths], timeout=1800))
            line = [program, "merge", "-o", work / f"merged-{turn}", work / "reports"]
            merging.append(run(line, memory=True, timeout=1800))
        results = (work / "merged-0" / "merged" / "results.json").read_text()
        _checked(results, reports)
        size = sum(path.stat().st_size for path in paths) / 1e6
    ratios = [mine.seconds / rows.seconds for mine, rows in zip(merging, reading, strict=True)]
    took, rows_took = (median([each.seconds for each in of]) for of in (merging, reading))
    peaks = [each.peak_bytes / 1e6 for each in merging]
    events = int(reading[0].stdout)
    return [
        Figure(
            f"merge of {reports} reports, time", "of the rows' reading", 0.6, median(ratios),
            f"one process reading all rows with sqlite3: {rows_took:.1f} s",
            f"{events} events, {size:.0f} MB: {took:.1f} s, with tables and page", ratios,
            floor="reading takes a third of it, on all processors; the rest is one pass",
        ),
        Figure(
            f"merge of {reports} reports, memory", "MB", 1074.0, median(peaks), "",
            "resident, summed over processes", peaks,
            floor="80 MB of modules, and of each kernel 110 bytes and what is computed of all",
        ),
    ]  # fmt: skip


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
