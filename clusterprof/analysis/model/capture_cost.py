"""What profiling cost the training, from the step logs that every rank of the job writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa

from clusterprof.align.columns import Floats, Ints
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.replay import SETTLE_STEPS
from clusterprof.analysis.model.shallow import half_width
from clusterprof.analysis.model.steady_state import TYPICAL_STEPS
from clusterprof.ingest.rank_steps import WARM_UP, patterns, period
from clusterprof.results import CaptureCost, StepTimes

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
    of its GPU vary; the median over ranks and steps does not. Where steps repeat a pattern, whole
    patterns count.
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
    begin = log["begin_ns"].to_numpy()[numbers == step]
    end = log["end_ns"].to_numpy()[numbers == step - 1]
    return max(0, int(begin[0] - end[0])) if begin.size and end.size else None


def _times(logs: list[tuple[pa.Table, Pace]], first: int, end: int) -> StepTimes:
    before = _steps(logs, max(1, first - TYPICAL_STEPS), first)
    # queues fill up again, and nsys is still writing
    after = _steps(logs, end + SETTLE_STEPS, None)
    # the profiler's start shows in the window's first step, which is never evidence
    inside = _steps(logs, first + 1, end)
    if (repeats := _period(logs, first)) > 1:
        parts = [_patterns(each, repeats) for each in (before, inside, after)]
        middles = [int(np.median(each)) if len(each) else None for each in parts]
        uncertainty = _apart(parts[0], parts[2])
    else:
        middles = [_median(each) for each in (before, inside, after)]
        uncertainty = _by_chance(before, after)
    return {
        "before_ns": middles[0],
        "inside_ns": middles[1],
        "after_ns": middles[2],
        "after_uncertainty_ns": uncertainty,
    }


def _steps(logs: list[tuple[pa.Table, Pace]], low: int, high: int | None) -> Ints:
    """The steps [low, high) of all ranks: first step, count and median (ns) of each, [3, n].

    A block of steps counts as so many of its median.
    """
    rows = []
    for log, pace in logs:
        step = log["step"].to_numpy()
        length = log["end_ns"].to_numpy() - log["begin_ns"].to_numpy()
        rows.append(np.stack([step, np.ones_like(step), length]))
        if pace:
            rows.append(np.stack([pace[name] for name in ("first_step", "count", "median_ns")]))
    every = np.concatenate(rows, axis=1)
    last = every[0] + every[1]
    return np.asarray(every[:, (every[0] >= low) & (high is None or last <= high)])


def _period(logs: list[tuple[pa.Table, Pace]], first: int) -> int:
    """After how many steps the pattern of the steps before the window repeats; 1: it does not."""
    lengths = [
        (log["end_ns"].to_numpy() - log["begin_ns"].to_numpy())[
            (log["step"].to_numpy() >= WARM_UP) & (log["step"].to_numpy() < first)
        ]
        for log, _ in logs
    ]
    return max(map(period, lengths), default=1)


def _patterns(steps: Ints, repeats: int) -> Floats:
    """The mean step (ns) of each whole pattern of the ranks' single steps, rank by rank."""
    single = steps[:, steps[1] == 1]
    begins = np.r_[0, 1 + np.flatnonzero(np.diff(single[0]) <= 0)]
    return np.concatenate([patterns(each, repeats) for each in np.split(single[2], begins[1:])])


def _apart(before: Floats, after: Floats) -> int | None:
    """How far the mean before may lie below the one after by chance (ns); None: too few."""
    if not len(before) or len(after) <= limits.FEW:
        return None
    of_mean = half_width(after, limits.CHANCE)
    return round(of_mean * float(np.sqrt(1 + len(after) / len(before))))


def _median(steps: Ints) -> int | None:
    """The median of these steps (ns); None where they are too few."""
    _, weight, values = steps
    count = int(weight.sum())
    if count <= 2:  # of two none is in the middle
        return None
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(weight[order])
    middle = np.searchsorted(upto, [(count - 1) // 2, count // 2], side="right")
    return int(values[order][middle].mean())


def _by_chance(before: Ints, after: Ints) -> int | None:
    """How far the median of the steps before the window may lie below the one after, by chance.

    As far as that of another stretch of as many steps after it would (ns): neighbouring steps are
    alike, so that their stretches vary by more than single steps tell. None: too few steps.
    """
    single, blocks = after[:, after[1] == 1], after[:, after[1] > 1]
    known, place = np.unique(single[0], return_inverse=True)
    length = min(len(np.unique(before[0])), len(known) // limits.FEW)
    if not length:
        return None
    stretches = [
        *(single[2, place // length == k] for k in range(len(known) // length)),
        *(blocks[2, blocks[0] == first] for first in np.unique(blocks[0])),
    ]
    medians = np.asarray([np.median(each) for each in stretches])
    return round(half_width(medians, limits.CHANCE) * float(np.sqrt(len(medians) + 1)))
