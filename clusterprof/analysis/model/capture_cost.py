"""What profiling cost the training, from the step logs that every rank of the job writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.replay import SETTLE_STEPS
from clusterprof.analysis.model.shallow import half_width
from clusterprof.analysis.model.timeline import TYPICAL_STEPS
from clusterprof.columns import Floats, Ints, first_after, order_by
from clusterprof.ingest.rank_steps import WARM_UP, patterns, period, stretches
from clusterprof.results import CaptureCost, StepTimes


def capture_cost(
    logs: Mapping[int, pa.Table],
    profiled: Collection[int],
    first: int,
    end: int,
    paces: Mapping[int, Mapping[str, Ints]],
) -> CaptureCost | None:
    """Compare the ranks' steps before, inside and after the window [first, end).

    `logs` are STEPS tables by rank, of the steps near the window; `paces` are of the others
    (`read_pace`), where there are any; `profiled` are the ranks with a profiler. None where no
    profiled rank logged the window's first step. The stalls are the longest of any profiled rank,
    taken between two steps of its log, where the agent puts the profiler's start and stop.
    Assumption: a step is what the host sees, so single steps of a host that runs ahead of its GPU
    vary; the median over ranks and steps does not. Where steps repeat a pattern, whole patterns
    count.
    """
    starts, stops = list[int](), list[int]()
    for log in (logs[rank] for rank in logs if rank in profiled):
        number, begin_ns, end_ns = (log[k].to_numpy() for k in ("step", "begin_ns", "end_ns"))
        for step, stalls_ns in ((first, starts), (end, stops)):
            gap_ns = begin_ns[number == step][:1] - end_ns[number == step - 1][:1]
            stalls_ns += np.maximum(gap_ns, 0).tolist()
    if not starts:
        return None
    steps = {rank: stretches(log, paces.get(rank, {})) for rank, log in logs.items()}
    others = [steps[rank] for rank in steps if rank not in profiled]
    return {
        "stall_start_ns": max(starts),
        "stall_stop_ns": max(stops, default=None),
        "profiled": _times([steps[rank] for rank in steps if rank in profiled], first, end),
        "unprofiled": _times(others, first, end) if others else None,
    }


def _times(ranks: list[Ints], first: int, end: int) -> StepTimes:
    # queues fill up again behind the window, and nsys is still writing; the profiler's start shows
    # in its first step, which is never evidence
    spans = (max(1, first - TYPICAL_STEPS), first), (first + 1, end), (end + SETTLE_STEPS, np.inf)
    parts = [_between(ranks, *span) for span in spans]
    repeats = max((period(_single(log)) for log in _between(ranks, WARM_UP, first)), default=1)
    if repeats > 1:
        means = [np.concatenate([patterns(_single(log), repeats) for log in p]) for p in parts]
        middles = [int(np.median(steps)) if len(steps) else None for steps in means]
        uncertainty = _by_chance(len(means[0]), means[2])
    else:
        every = [np.concatenate(logs, axis=1) for logs in parts]
        middles = [_median(steps) for steps in every]
        # neighbouring steps are alike, so that stretches, each of as many steps as are before the
        # window, vary by more than single steps tell
        single, blocks = (every[2][:, chosen] for chosen in (every[2][1] == 1, every[2][1] > 1))
        steps, place = np.unique(single[0], return_inverse=True)
        length = min(len(np.unique(every[0][0])), len(steps) // limits.FEW)
        place = place // max(length, 1)
        after = [
            *(single[3, place == k] for k in range(len(steps) // max(length, 1))),
            *(blocks[3, blocks[0] == begin] for begin in np.unique(blocks[0])),
        ]
        medians_ns = np.asarray([np.median(lengths_ns) for lengths_ns in after])
        uncertainty = _by_chance(min(length, 1), medians_ns)
    return {
        "before_ns": middles[0],
        "inside_ns": middles[1],
        "after_ns": middles[2],
        "after_uncertainty_ns": uncertainty,
    }


def _between(ranks: list[Ints], low: int, high: float) -> list[Ints]:
    """The steps [low, high) of each rank, and blocks that are whole in it."""
    return [log[:, (log[0] >= low) & (log[0] + log[1] <= high)] for log in ranks]


def _single(steps: Ints) -> Ints:
    """How long those take that are no blocks (ns)."""
    return np.asarray(steps[3, steps[1] == 1])


def _median(steps: Ints) -> int | None:
    """The median of these steps, a block being so many of its own (ns); None: they are too few."""
    _, weight, _, values = steps
    count = int(weight.sum())
    if count <= 2:  # of two none is in the middle
        return None
    order = order_by(values)
    middle = first_after(np.cumsum(weight[order]), np.array([count - 1, count]) // 2)
    return int(values[order][middle].mean())


def _by_chance(before: int, after: Floats) -> int | None:
    """How far the mean of so many such values may lie below that of these (ns); None: too few."""
    if not before or len(after) < limits.FEW:
        return None
    return round(half_width(after, limits.CHANCE) * float(np.sqrt(1 + len(after) / before)))
