"""How long each test took: written after each run, so that the next reader sees where time goes.

`build/durations.tsv` has the last run; `tests/durations.tsv` has the one that is kept, by file,
and by it pytest-xdist is given the longest files first (`lab.side_by_side`).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

#: of a run of all tests, committed
KEPT = Path("tests/durations.tsv")
_LAST = Path("build/durations.tsv")


def write(reporter: pytest.TerminalReporter, root: Path) -> None:
    """Write the seconds of each file and each test that ran, the longest first."""
    by_test: dict[str, float] = defaultdict(float)
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                by_test[report.nodeid] += report.duration
    if not by_test:
        return
    by_file: dict[str, float] = defaultdict(float)
    for nodeid, seconds in by_test.items():
        by_file[nodeid.partition("::")[0]] += seconds
    (root / _LAST.parent).mkdir(exist_ok=True)
    (root / _LAST).write_text("\n".join([_speed(), *_lines(by_file), *_lines(by_test), ""]))
    reporter.line(f"seconds of {len(by_test)} tests: {_LAST}")


def kept(root: Path) -> dict[str, float]:
    """The seconds of each file in the run that is kept; {} where there is none."""
    try:
        lines = (root / KEPT).read_text().splitlines()
    except OSError:
        return {}
    rows = (line.partition("\t") for line in lines if not line.startswith("#"))
    return {name: float(seconds) for seconds, _, name in rows}


def _lines(seconds_by_name: dict[str, float]) -> Iterable[str]:
    longest_first = sorted(seconds_by_name.items(), key=lambda row: (-row[1], row[0]))
    return (f"{seconds:.2f}\t{name}" for name, seconds in longest_first)


def _speed() -> str:
    """What tells one machine's seconds from another's."""
    began = time.perf_counter()
    for _ in range(10_000_000):
        pass
    took_s = time.perf_counter() - began
    return f"# {os.cpu_count()} processors, {took_s:.2f} s for ten million empty loops of Python"
