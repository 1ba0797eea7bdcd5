"""Why each GPU does not compute: not launched yet, behind communication, or another dependency.

After NVIDIA's analysis of Megatron-Bridge: exposed communication is what no compute overlaps with,
an upper bound of what overlapping could save; blocking is what a compute kernel that the host had
already launched waits for, which overlapping would save.
"""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.model.dataset import Dataset, Ints
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.timeline import COMPUTE, Timeline
from clusterprof.results import ComputeAbsent


def compute_absent(dataset: Dataset) -> list[ComputeAbsent]:
    """Each rank's time without compute per steady-state step (ns), as in its accounts."""
    return [_mean(line, rows) for line in dataset.timelines if len(rows := _steady(dataset, line))]


def _steady(dataset: Dataset, line: Timeline) -> Ints:
    return np.flatnonzero(np.isin(line.step, dataset.steady_steps))


def _mean(line: Timeline, rows: Ints) -> ComputeAbsent:
    begin, end = line.begin[rows], line.end[rows]

    def mean(each: Ints) -> int:
        return round(float(each.mean()))

    compute, communication = line.compute.within(begin, end), line.communication.within(begin, end)
    both = line.compute_or_communication.within(begin, end)
    unlaunched, blocked = _unlaunched(line, begin, end)
    absent = end - begin - compute
    return {
        "rank": line.rank,
        "compute_absent_ns": mean(absent),
        "communication_ns": mean(communication),
        "exposed_communication_ns": mean(both - compute),
        # a processor runs its operators itself: none is launched before it runs
        "launch_bound_ns": None if line.on_host else mean(unlaunched),
        "blocking_ns": None if line.on_host else mean(blocked),
        "dependency_stalled_ns": None if line.on_host else mean(absent - unlaunched - blocked),
    }


def _unlaunched(line: Timeline, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """By span: how long the next compute kernel was not launched, and then communication ran."""
    kernels = np.flatnonzero(line.kind == COMPUTE)
    kernels = kernels[np.argsort(line.start[kernels], kind="stable")]
    after = kernels[np.searchsorted(line.start[kernels], line.compute.start)]
    first = min(int(line.begin[0]), *line.compute.start[:1].tolist(), 2**62)
    last = max(int(line.end[-1]), *line.compute.end[-1:].tolist(), -(2**62))
    idle, next_start = np.r_[first, line.compute.end], np.r_[line.compute.start, last]
    # what follows the last kernel was not launched in the report
    launched = np.clip(np.r_[line.launch_end[after], last], idle, next_start)
    waits = union(launched, next_start)
    waiting = waits.within(begin, end)
    either = union(
        np.r_[waits.start, line.communication.start], np.r_[waits.end, line.communication.end]
    )
    stalled = either.within(begin, end) - line.communication.within(begin, end)
    return union(idle, launched).within(begin, end), waiting - stalled
