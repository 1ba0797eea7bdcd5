"""The CSV files that the agent writes of a rank: its steps, its pace, its garbage collections."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import paths
from clusterprof.errors import ReportError
from clusterprof.ingest.opening import FARTHEST, unreadable
from clusterprof.ingest.recording import Ints, fill, joined
from clusterprof.ingest.report_steps import steps_table
from clusterprof.tables import GARBAGE, RankTables

#: a step that ends this much after the last event of a capture still belongs to it
_SLACK_NS = 1_000_000
#: what a step usually takes: of so many before the capture, the job's first ones left out
_USUAL, _WARM_UP, _ENOUGH = 20, 3, 5

STEP_COLUMNS = ("step", "begin_ns", "end_ns")
PACE_COLUMNS = (
    "first_step", "count", "begin_ns", "end_ns", "median_ns", "q1_ns", "q3_ns", "longest_ns",
)  # fmt: skip
GARBAGE_COLUMNS = ("begin_ns", "end_ns", "generation", "collected")


def read_log(path: Path, begin_ns: int | None = None, end_ns: int | None = None) -> pa.Table:
    """Return the steps of a step log (CSV `step,begin_ns,end_ns`, wall-clock ns) in a capture.

    A log has every step near the window; the capture from `begin_ns` to `end_ns` a few of them.
    A step belongs if it ends inside the capture; without one all do. Raises `ReportError` where
    the log cannot be read or has no such columns.
    """
    table = _read(path, STEP_COLUMNS)
    if begin_ns is not None and end_ns is not None:
        inside = (table[:, 2] > begin_ns) & (table[:, 2] <= end_ns + _SLACK_NS)
        table = table[inside]
    table = table[np.argsort(table[:, 1], kind="stable")]
    return steps_table(table[:, 0], table[:, 1], table[:, 2], "steplog")


def usual_step(log: pa.Table, begin_ns: int) -> int | None:
    """Return what a step took before a capture that began at `begin_ns`: of the mean and the
    median of the last twenty the larger (ns); None where there are too few.

    The first steps of a job are warming up; a step in which the capture began is not before it.
    """
    begin, end = log["begin_ns"].to_numpy(), log["end_ns"].to_numpy()
    before = np.flatnonzero(end <= begin_ns)[_WARM_UP:][-_USUAL:]
    if len(before) < _ENOUGH:
        return None
    length = (end - begin)[before]
    return int(max(length.mean(), np.median(length)))


def read_pace(path: Path) -> dict[str, Ints]:
    """Return the columns of a `pace.csv`: blocks of steps that are in no step log, in order.

    One value a block: its `first_step`, `count` of steps, `begin_ns` and `end_ns` (wall clock), and
    the `median_ns`, `q1_ns`, `q3_ns` and `longest_ns` of its steps. Without such a file, no blocks.
    Raises `ReportError` where it cannot be read or has other columns.
    """
    table = _read(path, PACE_COLUMNS) if path.exists() else np.empty((0, 8), np.int64)
    return dict(zip(PACE_COLUMNS, table.T, strict=True))


def with_collections(tables: RankTables, path: Path) -> RankTables:
    """Return `tables` with the garbage collections of `path` among the host's calls.

    Without such a file, as it is; a damaged one is left out with a warning. Whichever thread
    collects, no other one of the program runs: so it is the launching thread's call.
    """
    if not path.is_file():
        return tables
    try:
        rows = _read(path, GARBAGE_COLUMNS)
    except ReportError as error:
        return tables.warned(f"{error.what}: it was left out")
    names = [f"{GARBAGE} (generation {g})" for g in rows[:, 2].tolist()]
    calls = fill(
        "host_calls",
        len(rows),
        {
            "start_ns": rows[:, 0],
            "end_ns": rows[:, 1],
            "kind": "python",
            "name": pa.array(names, pa.string()),
            "thread": np.full(len(rows), _thread(tables), dtype=np.int64),
        },
    )
    return replace(tables, host_calls=joined("host_calls", [tables.host_calls, calls], "start_ns"))


def _thread(tables: RankTables) -> int:
    """The thread that launches most, or has most calls; 0 where there is none."""
    for column in (tables.activity["launch_thread"], tables.host_calls["thread"]):
        if counted := pc.value_counts(column.drop_null()).to_pylist():
            return int(max(counted, key=lambda each: each["counts"])["values"])
    return 0


def beside_log(log: Path, name: str) -> Path:
    """Return the other log of a step log's rank: `paths.PACE` or `paths.GARBAGE`."""
    return log.with_name(paths.beside_steps(log.name, name))


def _read(path: Path, columns: Sequence[str]) -> Ints:
    """Return the rows of a log of integers; a last line cut short by a kill is left out."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ReportError(f"{path} is not a log of clusterprof's: {error}") from error
    if not lines or lines[0][: len(columns)] != list(columns):
        raise ReportError(
            f"{path} is not a log of clusterprof's",
            f"expected a first line of {','.join(columns)}",
        )
    rows = [_row(path, number, line, columns) for number, line in enumerate(lines[1:], 2) if line]
    if rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        raise ReportError(f"{path} is damaged at line {rows.index(None) + 2}", "expected integers")
    return np.array(rows, np.int64).reshape(-1, len(columns))


def _row(path: Path, number: int, line: list[str], columns: Sequence[str]) -> list[int] | None:
    try:
        row = [int(line[place]) for place in range(len(columns))]
    except (ValueError, IndexError):
        return None
    if max(map(abs, row)) > FARTHEST:
        raise ReportError(f"{path} is damaged at line {number}: a number is too large")
    if row[columns.index("end_ns")] < row[columns.index("begin_ns")]:
        raise ReportError(f"{path} is damaged at line {number}: its end is before its begin")
    return row
