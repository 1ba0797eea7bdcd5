"""What profiling cost the training, from the step logs that every rank of the job writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterprof.results import CaptureCost, StepTimes

#: Steps before the window that are compared: enough for a median, late enough to have warmed up.
_BEFORE = 20
#: Steps after the window that are left out: queues fill up again, and nsys is still writing.
_RECOVERY = 8
#: Fewer steps than this make no median.
_ENOUGH = 3

Ints = npt.NDArray[np.int64]
#: The columns of blocks of steps, `first_step`, `count`, `median_ns` among them.
Pace = Mapping[str, Ints]


def capture_cost(
    logs: Mapping[int, pa.Table],
    profiled: Collection[int],
    first: int,
    end: int,
    pace: Mapping[int, Pace] | None = None,
) -> CaptureCost | None:
    """Compare the ranks' steps before, inside and after the window [first, end).

    `logs` are STEPS tables by rank, of the steps near the window; `pace` summarises the others
    (see `read_pace`); `profiled` the ranks with a profiler.
    None where no profiled rank logged the window's first step. The stalls are the longest of any
    profiled rank, taken between two steps of its log, where the agent puts the profiler's start
    and stop. Assumption: a step is what the host sees, so single steps of a host that runs ahead
    of its GPU vary; the median over ranks and steps does not.
    """
    with_profiler = [log for rank, log in logs.items() if rank in profiled]
    starts = [gap for log in with_profiler if (gap := _gap(log, first)) is not None]
    if not starts:
        return None
    stops = [gap for log in with_profiler if (gap := _gap(log, end)) is not None]
    known = {rank: (log, pace.get(rank, {}) if pace else {}) for rank, log in logs.items()}
    ours = [both for rank, both in known.items() if rank in profiled]
    others = [both for rank, both in known.items() if rank not in profiled]
    return {
        "stall_start_ns": max(starts),
        "stall_stop_ns": max(stops, default=None),
        "profiled": _times(ours, first, end),
        "unprofiled": _times(others, first, end) if others else None,
    }


def _gap(log: pa.Table, step: int) -> int | None:
    """What lies between the end of the step before `step` and its own begin, ns."""
    numbers = log["step"].to_numpy()
    here, before = np.flatnonzero(numbers == step), np.flatnonzero(numbers == step - 1)
    if not here.size or not before.size:
        return None
    return max(
        0, int(log["begin_ns"][int(here[0])].as_py() - log["end_ns"][int(before[0])].as_py())
    )


def _times(logs: list[tuple[pa.Table, Pace]], first: int, end: int) -> StepTimes:
    # the profiler's start shows in the window's first step, which is never evidence
    return {
        "before_ns": _median(logs, max(1, first - _BEFORE), first),
        "inside_ns": _median(logs, first + 1, end),
        "after_ns": _median(logs, end + _RECOVERY, None),
    }


def _median(logs: list[tuple[pa.Table, Pace]], low: int, high: int | None) -> int | None:
    """The median of the steps [low, high); each of a block counts as the block's median."""
    values: list[Ints] = []
    weights: list[Ints] = []
    for log, pace in logs:
        step = log["step"].to_numpy()
        wanted = step >= low if high is None else (step >= low) & (step < high)
        values.append((log["end_ns"].to_numpy() - log["begin_ns"].to_numpy())[wanted])
        weights.append(np.ones(len(values[-1]), np.int64))
        if pace:
            last = pace["first_step"] + pace["count"]
            inside = (pace["first_step"] >= low) & ((high is None) | (last <= (high or 0)))
            values.append(pace["median_ns"][inside])
            weights.append(pace["count"][inside])
    count = sum(int(each.sum()) for each in weights)
    if count < _ENOUGH:
        return None
    every, weight = np.concatenate(values), np.concatenate(weights)
    order = np.argsort(every, kind="stable")
    upto = np.cumsum(weight[order])
    middle = np.searchsorted(upto, [(count - 1) // 2, count // 2], side="right")
    return int(every[order][middle].mean())
