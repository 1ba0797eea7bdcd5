"""Training steps: which ranges are steps, and the step log that overrides them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from clusterprof.errors import ReportError
from clusterprof.ingest.columns import Bools, Ints, fill
from clusterprof.ingest.nsys.database import FARTHEST, unreadable
from clusterprof.tables import empty

#: The names under which programs mark their steps, most trusted first. Of the last, where one
#: report has several kinds (`step 6` and `global_step 6`), the kind with most ranges is taken.
STEP_NAMES = (
    re.compile(r"(?P<kind>clusterprof[ :._-]?step)[ #:=._-]*(?P<step>[0-9]{1,12})"),
    re.compile(r"(?P<kind>ProfilerStep)#(?P<step>[0-9]{1,12})"),
    re.compile(
        r"(?P<kind>(?:(?:global|train|training|optimizer)[ ._-]?)?(?:step|iteration|iter))"
        r"[ #:=._-]*(?P<step>[0-9]{1,12})",
        re.IGNORECASE,
    ),
)

#: a step that ends this much after the last event of a capture still belongs to it
_SLACK_NS = 1_000_000
#: what a step usually takes: of so many before the capture, the job's first ones left out
_USUAL, _WARM_UP, _ENOUGH = 20, 3, 5

LOG_COLUMNS = ("step", "begin_ns", "end_ns")
PACE_COLUMNS = (
    "first_step", "count", "begin_ns", "end_ns", "median_ns", "q1_ns", "q3_ns", "longest_ns",
)  # fmt: skip


def from_ranges(
    names: Sequence[str], codes: Ints, start: Ints, end: Ints, thread: Ints, source: str
) -> pa.Table:
    """Return the STEPS table of those ranges that are named as steps.

    `names[codes[i]]` is the name of range i; times are wall-clock ns, `end` negative for a
    range that was never closed. Ranges of one thread count: that which marks most steps.
    """
    numbered = _step_numbers(names)
    if not numbered:
        return empty("steps")
    step_of = np.full(len(names), -1, np.int64)
    step_of[list(numbered)] = list(numbered.values())
    chosen = (step_of[codes] >= 0) & (end >= start) & (end > 0)
    if not chosen.any():
        return empty("steps")
    threads, counts = np.unique(thread[chosen], return_counts=True)
    chosen &= thread == threads[np.argmax(counts)]
    order = np.flatnonzero(chosen)
    order = order[np.argsort(start[order], kind="stable")]
    return steps_table(step_of[codes[order]], start[order], end[order], source)


def names_steps(names: Sequence[str]) -> Bools:
    """Return for each of `names` whether it numbers a step, in the kind of name that counts."""
    found = np.zeros(len(names), bool)
    found[list(_step_numbers(names))] = True
    return found


def steps_table(step: Ints, begin: Ints, end: Ints, source: str) -> pa.Table:
    """Return a STEPS table. Numbers that repeat (each epoch from 0) are counted on instead."""
    if np.unique(step).size != step.size:
        step = step[0] + np.arange(step.size)
    columns = {"step": step, "begin_ns": begin, "end_ns": end, "source": source}
    return fill("steps", step.size, columns)


def _step_numbers(names: Sequence[str]) -> dict[int, int]:
    """Return place in `names` -> step, for the one kind of step name that counts."""
    for pattern in STEP_NAMES:
        kinds: dict[str, dict[int, int]] = {}
        for place, name in enumerate(names):
            match = pattern.fullmatch(name.strip())
            if match:
                kinds.setdefault(match["kind"], {})[place] = int(match["step"])
        if kinds:
            return max(kinds.values(), key=len)
    return {}


def read_log(path: Path, begin_ns: int | None = None, end_ns: int | None = None) -> pa.Table:
    """Return the steps of a step log (CSV `step,begin_ns,end_ns`, wall-clock ns) in a capture.

    A log has every step near the window; the capture from `begin_ns` to `end_ns` a few of them.
    A step belongs if it ends inside the capture; without one all do. A last line cut short by a
    kill is left out. Raises `ReportError` where the log cannot be read or has no such columns.
    """
    table = _table(path, LOG_COLUMNS)
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
    table = _table(path, PACE_COLUMNS) if path.exists() else np.empty((0, 8), np.int64)
    return dict(zip(PACE_COLUMNS, table.T, strict=True))


def beside_log(log: Path) -> Path:
    """Return where the summaries beside a step log are: `pace.csv` beside `steps.csv`."""
    before, _, after = log.name.rpartition("steps")
    return log.with_name(f"{before}pace{after}")


def _table(path: Path, columns: Sequence[str]) -> Ints:
    """Return the rows of a log of integers; a last line cut short by a kill is left out."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ReportError(f"{path} is not a step log: {error}") from error
    if not lines or lines[0][: len(columns)] != list(columns):
        raise ReportError(
            f"{path} is not a step log",
            f"expected a first line of {','.join(columns)}",
        )
    rows = [_row(path, number, line, columns) for number, line in enumerate(lines[1:], 2) if line]
    if rows and rows[-1] is None:
        rows.pop()
    whole = [row for row in rows if row is not None]
    if len(whole) != len(rows):
        place = rows.index(None) + 2
        raise ReportError(f"{path} is damaged at line {place}", "expected integers")
    return np.array(whole, np.int64).reshape(-1, len(columns))


def _row(path: Path, number: int, line: list[str], columns: Sequence[str]) -> list[int] | None:
    try:
        row = [int(line[place]) for place in range(len(columns))]
    except (ValueError, IndexError):
        return None
    begin, end = columns.index("begin_ns"), columns.index("end_ns")
    what = ""
    if max(map(abs, row)) > FARTHEST:
        what = "a number is none of a step log"
    elif row[end] < row[begin]:
        what = f"step {row[0]} ends before it begins"
    if what:
        raise ReportError(f"{path} is damaged at line {number}: {what}")
    return row
