"""Training steps of a report: the ranges that mark them, else the ends of the optimizer's work."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from clusterprof.ingest.recording import Bools, Calls, Ints, fill, matching
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


def from_ranges(ranges: Calls, source: str) -> pa.Table:
    """Return the STEPS table of those ranges that are named as steps and were closed.

    Ranges of one thread count: that which marks most steps.
    """
    numbered = _step_numbers(ranges.names)
    if not numbered:
        return empty("steps")
    start, end = ranges.start, ranges.end
    step_of = np.full(len(ranges.names), -1, np.int64)
    step_of[list(numbered)] = list(numbered.values())
    chosen = (step_of[ranges.name] >= 0) & (end >= start) & (end > 0)
    if not chosen.any():
        return empty("steps")
    threads, counts = np.unique(ranges.thread[chosen], return_counts=True)
    chosen &= ranges.thread == threads[np.argmax(counts)]
    order = np.flatnonzero(chosen)
    order = order[np.argsort(start[order], kind="stable")]
    return steps_table(step_of[ranges.name[order]], start[order], end[order], source)


def from_ends(ends: Ints, begin_ns: int) -> pa.Table:
    """Return the STEPS table of the optimizer's steps; the first begins with the capture.

    Numbers count from 0 within the report: `clusterprof.align.match.numbering` makes them agree.
    """
    begins = np.r_[begin_ns, ends[:-1]] if ends.size else ends
    return steps_table(np.arange(ends.size, dtype=np.int64), begins, ends, "optimizer")


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
    order = np.argsort(launch_start, kind="stable")
    place = np.flatnonzero(of_optimizer[order])
    if len(place) < _LEAST_STEPS:
        return none
    between = np.diff(place) - 1
    breaks = np.flatnonzero(between >= max(_LEAST_BETWEEN, _BETWEEN_FRAC * between.max()))
    ends = np.r_[place[breaks], place[-1]]
    size = np.diff(np.r_[-1, breaks, len(place) - 1])
    if len(ends) < _LEAST_STEPS or not _alike(size) or not _alike(between[breaks]):
        return none
    found: Ints = launch_end[order][ends]
    return found


def _alike(counts: Ints) -> bool:
    """Whether whole steps have about as many; the window may have cut the first and the last."""
    whole = counts[1:-1] if len(counts) > _LEAST_STEPS else counts
    return bool(len(whole) and whole.max() <= _ALIKE * max(int(whole.min()), 1))
