"""Merging a report as nsys writes it, over `nsys export` of the same alone."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from figure import Figure, median
from process import Failed, run

from clusterprof.agent.nsys import Nsys
from clusterprof.ingest.nsys.exported import export_command
from clusterprof.installed_nsys import installed

_DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
#: ranges of NCCL and calls of the system, which an nsys records without a GPU, and kernels on one
_PROGRAM = """
import socket, sys
sys.path.insert(0, sys.argv[1])
import nccl_ranges
nccl_ranges.STEPS = int(sys.argv[2])
nccl_ranges.main()
one, other = socket.socketpair()
for _ in range(10 * int(sys.argv[2])):
    one.send(b"x" * 4096)
    other.recv(4096)
try:
    import torch
    one = torch.ones(1, device="cuda") if torch.cuda.is_available() else None
except ImportError:
    one = None
for _ in range(0 if one is None else 10 * int(sys.argv[2])):
    one.add_(1)
"""
_TRACE = "osrt,nvtx,cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "osrt,nvtx"
_LIMIT, _STEPS = 1.6, 10_000


def merge(rounds: int, part: int = 1) -> list[Figure]:
    """Time of `clusterprof merge -o` of a `.nsys-rep`, over that of exporting it, in turn.

    One rank's report: the calls of two that ran apart would have to be found in each other.
    """
    name = "merge of a .nsys-rep, time"
    found = installed()
    if not found:
        return [Figure(name, "of the export's", _LIMIT, None, remark="there is no nsys")]
    nsys = found[0].checked()
    program = Path(sys.executable).parent / "clusterprof"
    with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as folder:
        work = Path(folder)
        report = _recorded(nsys, work / "rank0", 0, _STEPS // part)
        alone, ours = [], []
        for turn in range(rounds):
            alone.append(_exported(nsys, report, work / "alone.sqlite"))
            ours.append(run([program, "merge", "-o", work / f"merged-{turn}", report]).seconds)
        size = report.stat().st_size / 1e6
        events = _rows(work / "alone.sqlite")
    ratios = [mine / other for mine, other in zip(ours, alone, strict=True)]
    return [
        Figure(
            name, "of the export's", _LIMIT, median(ratios),
            f"nsys {nsys.version} export alone: {median(alone):.2f} s",
            f"{size:.1f} MB, {events} rows: {median(ours):.2f} s", ratios,
            floor="the same export, and before nsys 2024.6 one to JSON for NCCL's payloads",
        )
    ]  # fmt: skip


def _recorded(nsys: Nsys, folder: Path, rank: int, steps: int) -> Path:
    folder.mkdir()
    report = folder / "report.nsys-rep"
    line = [
        nsys.path, "profile", f"--trace={_TRACE}", "--sample=none", "--cpuctxsw=none",
        f"--output={report.with_suffix('')}", sys.executable, "-c", _PROGRAM, _DATA, str(steps),
    ]  # fmt: skip
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    subprocess.run(line, env=environ, capture_output=True, check=False)
    left = report.with_suffix(".qdstrm")
    if not report.exists() and left.exists() and nsys.importer:
        subprocess.run([nsys.importer, "-i", left], capture_output=True, check=False)
    if not report.exists():
        raise Failed(f"nsys {nsys.version} left no report of rank {rank}")
    return report


def _rows(export: Path) -> int:
    with contextlib.closing(sqlite3.connect(export)) as database:
        tables = [name for (name,) in database.execute(
            "select name from sqlite_master where type = 'table' and name not like 'sqlite%'"
        )]  # fmt: skip
        counts = [database.execute(f'select count(*) from "{name}"').fetchone() for name in tables]
    return sum(count for (count,) in counts)


def _exported(nsys: Nsys, report: Path, target: Path) -> float:
    target.unlink(missing_ok=True)
    return run(export_command(nsys, report, target)).seconds
