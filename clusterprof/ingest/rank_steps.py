"""Training steps of a rank: by its report's ranges or its optimizer's work, or by the agent's logs.

The logs are CSV files beside the report: of steps, of the job's pace, of garbage collections.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import files, paths
from clusterprof.columns import Bools, Ints, Stretches, order_by, preceding
from clusterprof.errors import ReportError
from clusterprof.folders import beside_steps
from clusterprof.ingest.opening import FARTHEST, unreadable
from clusterprof.ingest.recording import Calls, fill, joined, matching
from clusterprof.tables import GARBAGE, RankTables, empty

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

#: PyTorch's optimizers work on many tensors a kernel (`foreach`, `fused`), as do those of Apex,
#: Transformer Engine and DeepSpeed. Copies of many tensors (FSDP's AllGather) are no update.
_UPDATE = r"(?i)multi_tensor_apply|adam|adagrad|adafactor|rmsprop|lamb_|fused_?sgd|muon"
_COPY = r"at::native::Copy<"

#: between two updates lie forward and backward: at least so many kernels, and at least this part
#: of the most that lie anywhere between two of the optimizer's kernels
_LEAST_BETWEEN = 8
_BETWEEN_FRAC = 0.25
#: fewer updates have no rhythm, and updates that differ by more are not all steps
_LEAST_STEPS = 3
_ALIKE = 1.5

#: a step that ends this much after the last event of a capture still belongs to it
_SLACK_NS = 1_000_000
#: steps repeat a pattern where half of what they vary by comes again, and eight times; the first
#: lag that is nearly as good as the best is the pattern's length, the others are multiples of it
_REPEATED, _REPEATS, _TIMES = 0.5, 0.9, 8
#: what a step usually takes: of so many before the capture, the job's first ones left out, which
#: compile, allocate and fill queues
_USUAL, WARM_UP, _ENOUGH = 20, 3, 5

#: bytes of a log: of a million steps it has 50 million
_MOST = 256 << 20

STEP_COLUMNS = ("step", "begin_ns", "end_ns")
PACE_COLUMNS = (
    "first_step", "count", "begin_ns", "end_ns", "median_ns", "q1_ns", "q3_ns", "longest_ns",
)  # fmt: skip
PAUSE_COLUMNS = ("step", "begin_ns", "end_ns", "usual_ns", "made_up_ns")
GARBAGE_COLUMNS = ("begin_ns", "end_ns", "generation", "collected")


def from_ranges(ranges: Calls, source: str) -> pa.Table:
    """Return the STEPS table of those ranges that are named as steps and were closed.

    Ranges of one thread count: that which marks most steps.
    """
    start, end, step = ranges.start, ranges.end, step_numbers(ranges.names)[ranges.name]
    chosen = (step >= 0) & (end >= start) & (end > 0)
    if not chosen.any():
        return empty("steps")
    threads, counts = np.unique(ranges.thread[chosen], return_counts=True)
    order = np.flatnonzero(chosen & (ranges.thread == threads[np.argmax(counts)]))
    order = order[order_by(start[order])]
    return steps_table(step[order], start[order], end[order], source)


def from_ends(ends: Ints, begin_ns: int) -> pa.Table:
    """Return the STEPS table of the optimizer's steps; the first begins with the capture.

    Numbers count from 0 within the report: `clusterprof.align.match.numbering` makes them agree.
    """
    steps = np.arange(ends.size, dtype=np.int64)
    return steps_table(steps, preceding(ends, begin_ns), ends, "optimizer")


def steps_table(step: Ints, begin: Ints, end: Ints, source: str) -> pa.Table:
    """Return a STEPS table. Numbers that repeat (each epoch from 0) are counted on instead."""
    if np.unique(step).size != step.size:
        step = step[0] + np.arange(step.size)
    columns = {"step": step, "begin_ns": begin, "end_ns": end, "source": source}
    return fill("steps", step.size, columns)


def step_numbers(names: Sequence[str]) -> Ints:
    """Return which step each of `names` numbers, in the one kind of name that counts; else -1."""
    steps = np.full(len(names), -1, np.int64)
    for pattern in STEP_NAMES:
        kinds: dict[str, dict[int, int]] = {}
        for place, name in enumerate(names):
            if match := pattern.fullmatch(name.strip()):
                kinds.setdefault(match["kind"], {})[place] = int(match["step"])
        if kinds:
            numbered = max(kinds.values(), key=len)
            steps[list(numbered)] = list(numbered.values())
            break
    return steps


def updates(names: Sequence[str]) -> Bools:
    """Return for each kernel name (with its template arguments) whether it is an optimizer's."""
    return matching(names, _UPDATE) & ~matching(names, _COPY)


def ends_of_updates(launch_start: Ints, launch_end: Ints, of_optimizer: Bools) -> Ints:
    """Return when steps end, by a rank's compute kernels; nothing where they show no steps.

    Times are those of the launching calls, one element per kernel. A step ends when its last
    optimizer kernel has been launched. Assumes that every step updates alike: where updates
    differ in kernels by half, nothing is returned (two models trained by turns, updates in one
    step of four).
    """
    none = np.empty(0, np.int64)
    order = order_by(launch_start)
    kernel = np.flatnonzero(of_optimizer[order])
    if len(kernel) < _LEAST_STEPS:
        return none
    between = np.diff(kernel) - 1
    breaks = np.flatnonzero(between >= max(_LEAST_BETWEEN, _BETWEEN_FRAC * between.max()))
    of_update = Stretches(np.append(0, breaks + 1), len(kernel))
    few = len(of_update.first) < _LEAST_STEPS
    if few or not _alike(of_update.size) or not _alike(between[breaks]):
        return none
    return np.asarray(launch_end[order[kernel[of_update.last]]])


def _alike(counts: Ints) -> bool:
    """Whether whole steps have about as many; the window may have cut the first and the last."""
    whole = counts[1:-1] if len(counts) > _LEAST_STEPS else counts
    return bool(len(whole) and whole.max() <= _ALIKE * max(int(whole.min()), 1))


def read_log(path: Path, begin_ns: int | None = None, end_ns: int | None = None) -> pa.Table:
    """Return the steps of a step log (CSV `step,begin_ns,end_ns`, wall-clock ns) in a capture.

    A log has every step near the window; the capture from `begin_ns` to `end_ns` a few of them.
    A step belongs if it ends inside the capture; without one all do. Raises `ReportError` where
    the log cannot be read or has no such columns.
    """
    table = _read(path, STEP_COLUMNS)
    if begin_ns is not None and end_ns is not None:
        table = table[(table[:, 2] > begin_ns) & (table[:, 2] <= end_ns + _SLACK_NS)]
    table = table[order_by(table[:, 1])]
    return steps_table(table[:, 0], table[:, 1], table[:, 2], "steplog")


def usual_step(log: pa.Table, begin_ns: int) -> int | None:
    """Return what a step took before a capture that began at `begin_ns` (ns); None where there are
    too few.

    Where steps repeat a pattern, the median of all patterns; else of the last twenty the mean or
    the median, whichever is larger. The longest counts as the second longest: what happened once
    (a checkpoint was written) does not tell the pace. The first steps of a job are warming up; a
    step in which the capture began is not before it.
    """
    begin, end = log["begin_ns"].to_numpy(), log["end_ns"].to_numpy()
    length = (end - begin)[np.flatnonzero(end <= begin_ns)[WARM_UP:]]
    if len(length) < _ENOUGH:
        return None
    if (after := period(length)) > 1:
        return int(np.median(patterns(length, after)))
    length = np.sort(length[-_USUAL:])
    length[-1] = length[-2]
    return int(max(length.mean(), np.median(length)))


def patterns(took: Ints, after: int) -> npt.NDArray[np.float64]:
    """The mean step (ns) of each whole pattern of `after` steps, of the last ones."""
    return np.asarray(took[len(took) % after :].reshape(-1, after).mean(axis=1))


def period(took: Ints) -> int:
    """After how many steps (lengths in ns) their pattern repeats; 1 where it does not.

    A host that runs ahead of its GPU and reads a loss every ten steps has short steps until its
    queue is full, and a long one where it waits; four processes that fetch one batch each hand over
    four at a time. Neither the median of such steps is their pace, nor the mean of any few of them.
    Of logarithms, so that one long stall does not outweigh the pattern.
    """
    longest = len(took) // _TIMES
    if longest < 2:
        return 1
    size = np.log(np.maximum(took, 1))
    size -= size.mean()
    total = float((size**2).sum())
    if not total:
        return 1
    alike = np.array([(size[lag:] * size[:-lag]).sum() for lag in range(1, longest + 1)]) / total
    best = alike.max()
    return int(np.argmax(alike >= best * _REPEATS)) + 1 if best >= _REPEATED else 1


def read_pace(path: Path) -> dict[str, Ints]:
    """Return the columns of a `pace.csv`: blocks of steps that are in no step log, in order.

    One value a block: its `first_step`, `count` of steps, `begin_ns` and `end_ns` (wall clock), and
    the `median_ns`, `q1_ns`, `q3_ns` and `longest_ns` of its steps. Without such a file, no blocks.
    Raises `ReportError` where it cannot be read or has other columns.
    """
    table = _read(path, PACE_COLUMNS) if path.exists() else np.empty((0, 8), np.int64)
    return dict(zip(PACE_COLUMNS, table.T, strict=True))


def read_pauses(path: Path) -> dict[str, Ints]:
    """Return the columns of a `pauses.csv`: the steps of a rank that took far longer than usual.

    Of each its `step`, `begin_ns` and `end_ns` (wall clock), the `usual_ns` of the steps before it,
    and how much shorter than that the steps after it were, `made_up_ns`. Without such a file, none.
    Raises `ReportError` where it cannot be read or has other columns.
    """
    table = _read(path, PAUSE_COLUMNS) if path.exists() else np.empty((0, 5), np.int64)
    return dict(zip(PAUSE_COLUMNS, table.T, strict=True))


def stretches(log: pa.Table, pace: Mapping[str, Ints]) -> Ints:
    """Return the steps of a log (`STEPS`), and the blocks of the others (`read_pace`), in order.

    Rows are the first step, how many there are, their length in all and that of the middle one
    (ns), [4, n]: a step of the log is a block of one.
    """
    step, begin, end = (log[name].to_numpy() for name in STEP_COLUMNS)
    entries = np.stack([step, np.ones_like(step), end - begin, end - begin])
    if pace:
        taken = pace["end_ns"] - pace["begin_ns"]
        blocks = np.stack([pace["first_step"], pace["count"], taken, pace["median_ns"]])
        entries = np.concatenate([entries, blocks], axis=1)
    return np.asarray(entries[:, order_by(entries[0])])


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
    # the thread that launches most, or has most calls
    columns = (tables.activity["launch_thread"], tables.host_calls["thread"])
    threads = next((some for column in columns if len(some := column.drop_null())), pa.array([0]))
    counts = pc.value_counts(threads).to_pylist()
    thread = max(counts, key=lambda thread: thread["counts"])["values"]
    names = [f"{GARBAGE} (generation {g})" for g in rows[:, 2].tolist()]
    calls = {
        "start_ns": rows[:, 0],
        "end_ns": rows[:, 1],
        "kind": "python",
        "name": pa.array(names, pa.string()),
        "thread": np.full(len(rows), thread, dtype=np.int64),
    }
    both = [tables.host_calls, fill("host_calls", len(rows), calls)]
    return replace(tables, host_calls=joined("host_calls", both, "start_ns"))


def collections_of(report: Path, steps: Path) -> Path:
    """Return the list of garbage collections of a report's window.

    A window captured later has it beside its report, while the step log is that of the whole run.
    """
    beside_report = report.with_name(beside_steps(steps.name, paths.GARBAGE))
    return beside_report if beside_report.is_file() else beside_log(steps, paths.GARBAGE)


def beside_log(log: Path, name: str) -> Path:
    """Return the other log of a step log's rank: `paths.PACE`, PAUSES or GARBAGE."""
    return log.with_name(beside_steps(log.name, name))


def _read(path: Path, columns: Sequence[str]) -> Ints:
    """Return the rows of a log of integers; a last line cut short by a kill is left out."""
    try:
        content = files.content(path, _MOST).decode()
        lines = list(csv.reader(io.StringIO(content, newline="")))
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ReportError(f"{path} is not a log of clusterprof's: {error}") from error
    if not lines or lines[0][: len(columns)] != list(columns):
        raise ReportError(
            f"{path} is not a log of clusterprof's",
            f"expected a first line of {','.join(columns)}",
        )
    numbered = [(number, line) for number, line in enumerate(lines[1:], 2) if line]
    rows = [_row(path, number, line, columns) for number, line in numbered]
    if rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        number, _ = numbered[rows.index(None)]
        raise ReportError(f"{path} is damaged at line {number}", "expected integers")
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
