"""Steps of a report in which nobody marked any: each ends with the optimizer's kernels."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from clusterprof.ingest.columns import Bools, Ints, matching
from clusterprof.ingest.step_ranges import steps_table
from clusterprof.tables import empty

#: PyTorch's optimizers work on many tensors a kernel (`foreach`, `fused`), as do those of Apex,
#: Transformer Engine and DeepSpeed. Copies of many tensors (FSDP's AllGather) are no update.
_UPDATE = r"(?i)multi_tensor_apply|adam|adagrad|adafactor|rmsprop|lamb_|fused_?sgd|muon"
_COPY = r"at::native::Copy<"

#: between two updates lie forward and backward: at least so many kernels, and at least this part
#: of the most that lie anywhere between two of the optimizer's kernels
_LEAST_BETWEEN = 8
_BETWEEN_FRAC = 0.25
#: fewer updates tell no rhythm, and updates that differ by more are not all steps
_LEAST_STEPS = 3
_ALIKE = 1.5


def updates(names: pa.Array) -> Bools:
    """Return for each kernel name (with its template arguments) whether it is an optimizer's."""
    return matching(names, _UPDATE) & ~matching(names, _COPY)


def from_kernels(
    launch_start: Ints, launch_end: Ints, of_optimizer: Bools, begin_ns: int
) -> pa.Table:
    """Return the STEPS table of a rank's compute kernels; empty where they tell no steps.

    Times are wall-clock ns of the launching calls, one element per kernel. A step ends when its
    last optimizer kernel has been launched; the first one begins with the capture, at `begin_ns`.
    Numbers count from 0 within the report: `clusterprof.align.match.numbering` makes them agree.
    Assumes that every step updates alike: where updates differ in kernels by half, nothing is
    returned (two models trained by turns, updates in one step of four).
    """
    order = np.argsort(launch_start, kind="stable")
    place = np.flatnonzero(of_optimizer[order])
    if len(place) < _LEAST_STEPS:
        return empty("steps")
    between = np.diff(place) - 1
    breaks = np.flatnonzero(between >= max(_LEAST_BETWEEN, _BETWEEN_FRAC * between.max()))
    ends = np.r_[place[breaks], place[-1]]
    size = np.diff(np.r_[-1, breaks, len(place) - 1])
    if len(ends) < _LEAST_STEPS or not _alike(size) or not _alike(between[breaks]):
        return empty("steps")
    end = launch_end[order][ends]
    begin = np.r_[begin_ns, end[:-1]]
    return steps_table(np.arange(len(ends), dtype=np.int64), begin, end, "optimizer")


def _alike(counts: Ints) -> bool:
    """Whether whole steps have about as many; the window may have cut the first and the last."""
    whole = counts[1:-1] if len(counts) > _LEAST_STEPS else counts
    return bool(len(whole) and whole.max() <= _ALIKE * max(int(whole.min()), 1))
