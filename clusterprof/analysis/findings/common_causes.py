"""What all ranks' hosts spend their time in alike: fetching, the interpreter lock, launching.

A rank whose GPU idles in such a cause is no straggler for it unless its own host spends more time
there than the others' do: one that resumed last after the profiler's start idles in every fetch,
the others' queues cover theirs, and yet all fetch equally slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.findings.finding import by_steady_step
from clusterprof.analysis.groups.peers import median_of_others
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints
from clusterprof.analysis.model.intervals import Intervals, union
from clusterprof.analysis.model.timeline import COMPUTE, Timeline

_INPUT = r"(?i)^(data|input|batch|fetch|dataload)|dataloader|next_batch|get_batch"


@dataclass(frozen=True)
class Cause:
    """One cause. `idle` [ranks, steps]: the GPU's time without work in it; `spent` the host's."""

    where: list[Intervals]
    idle: Floats
    spent: Floats

    def is_common(self) -> bool:
        """Whether the middle rank's host spends half as long there as the worst one's, or more."""
        own = np.sort(self.spent.mean(axis=1))
        return (
            bool(len(own)) and float(own[(len(own) - 1) // 2]) >= limits.SHARED_FRAC * own[-1] > 0
        )

    def own(self) -> Floats:
        """Idle time that is a rank's own: as far as its host spends more there in most steps."""
        total = self.idle.mean(axis=1)
        if not self.spent.size:
            return self.idle
        more = self.spent - np.nan_to_num(median_of_others(self.spent))
        steady = np.maximum(np.median(more, axis=1), 0.0)
        part = np.divide(steady, total, out=np.zeros(len(total)), where=total > 0)
        return np.asarray(self.idle * np.minimum(part, 1.0)[:, None])


def idle_gaps(line: Timeline) -> Intervals:
    """When the rank's device idled, between the first step's begin and the last one's end."""
    start = np.r_[line.begin[0], line.busy.end]
    end = np.r_[line.busy.start, line.end[-1]]
    keep = (end > start) & (end > line.begin[0]) & (start < line.end[-1])
    return union(
        np.maximum(start[keep], line.begin[0]).astype(np.int64),
        np.minimum(end[keep], line.end[-1]).astype(np.int64),
    )


def _filled(gaps: Intervals, spans: Intervals) -> Intervals:
    """Gaps that `spans` fill by half or more, whole; of the others what they have in common.

    A fetch is followed by the first launches: that gap belongs to the fetch.
    """
    most = 2 * spans.within(gaps.start, gaps.end) >= gaps.end - gaps.start
    part = host_activity.both(union(gaps.start[~most], gaps.end[~most]), spans)
    return union(np.r_[gaps.start[most], part.start], np.r_[gaps.end[most], part.end])


def _cause(dataset: Dataset, gaps: list[Intervals], spans: list[Intervals]) -> Cause:
    where = [_filled(g, s) for g, s in zip(gaps, spans, strict=True)]
    shape = (len(dataset.ranks), len(dataset.steady_steps))
    idle, spent = np.zeros(shape), np.zeros(shape)
    for k, line in enumerate(dataset.timelines):
        idle[k] = by_steady_step(dataset, line, where[k].within(line.begin, line.end))
        until = np.r_[line.host_begin[1:], line.host_end[-1:]]
        # a copy inside it may have waited for the device, which is no fetching
        waited = host_activity.both(spans[k], host_activity.waits(dataset, k))
        own = spans[k].within(line.host_begin, until) - waited.within(line.host_begin, until)
        spent[k] = by_steady_step(dataset, line, own)
    return Cause(where, idle, spent)


def locked(dataset: Dataset, gaps: list[Intervals]) -> Cause | None:
    """Waiting for Python's interpreter lock, where the reports have it."""
    spans = [host_activity.spans(t, "python", host_activity.GIL_WAIT) for t in dataset.tables]
    return _cause(dataset, gaps, spans) if any(len(s.start) for s in spans) else None


def collecting(dataset: Dataset, gaps: list[Intervals]) -> Cause | None:
    """Python's garbage collector, where the agent recorded it."""
    spans = [host_activity.spans(t, "python", host_activity.COLLECTING) for t in dataset.tables]
    return _cause(dataset, gaps, spans) if any(len(s.start) for s in spans) else None


def fetching(dataset: Dataset, gaps: list[Intervals]) -> Cause | None:
    """Fetching the batch: ranges and operators named for it."""
    spans = []
    for tables in dataset.tables:
        ranges = host_activity.spans(tables, "range", _INPUT)
        ops = host_activity.spans(tables, "op", r"(?i)dataloader")
        spans.append(union(np.r_[ranges.start, ops.start], np.r_[ranges.end, ops.end]))
    return _cause(dataset, gaps, spans) if any(len(s.start) for s in spans) else None


def launching(
    dataset: Dataset, gaps: list[Intervals], pace: Floats, *, long: bool = False
) -> Cause:
    """Gaps before kernels that were launched only after the GPU had run dry.

    Short ones, as launching itself makes them, or `long` ones, in which hosts do something else.
    """
    where = []
    for line, gap in zip(dataset.timelines, gaps, strict=True):
        late = _launched_after(line, gap.end, gap.start)
        chosen = late & ((gap.end - gap.start > limits.LAUNCH_GAP_NS) == long)
        where.append(union(gap.start[chosen], gap.end[chosen]))
    return Cause(where, _idle(dataset, where), np.nan_to_num(pace))


def queued(dataset: Dataset, gaps: list[Intervals]) -> Cause:
    """Gaps before kernels that had been launched before the GPU ran dry."""
    where = []
    for line, gap in zip(dataset.timelines, gaps, strict=True):
        last = gap.end >= (line.start[-1] if len(line.start) else 0)
        ready = ~_launched_after(line, gap.end, gap.start) & ~last
        chosen = ready & (gap.end - gap.start > limits.QUEUED_GAP_NS)
        where.append(union(gap.start[chosen], gap.end[chosen]))
    return Cause(
        where, _idle(dataset, where), np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    )


def _launched_after(line: Timeline, next_start: Ints, time: Ints) -> Bools:
    """Whether the kernel that starts at `next_start` was launched after `time`."""
    following = np.searchsorted(line.start, next_start)
    known = following < len(line.start)
    late = np.zeros(len(time), dtype=bool)
    late[known] = line.launch_end[following[known]] > time[known]
    return late


def _idle(dataset: Dataset, where: list[Intervals]) -> Floats:
    """How much of each steady-state step lies in the gaps `where`, [ranks, steps] (ns)."""
    out = np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    for k, line in enumerate(dataset.timelines):
        out[k] = by_steady_step(dataset, line, where[k].within(line.begin, line.end))
    return out


def typical_kernel(dataset: Dataset) -> float:
    """The median kernel's length, over ranks (ns)."""
    middle = [
        float(np.median((line.stop - line.start)[line.kind == COMPUTE]))
        for line in dataset.timelines
        if (line.kind == COMPUTE).any()
    ]
    return float(np.median(middle)) if middle else 0.0


def left(gaps: list[Intervals], taken: list[Intervals]) -> list[Intervals]:
    """Gaps that do not touch those taken by a cause."""
    out = []
    for gap, used in zip(gaps, taken, strict=True):
        free = used.within(gap.start, gap.end) == 0
        out.append(union(gap.start[free], gap.end[free]))
    return out


def common_idle(dataset: Dataset, pace: Floats) -> Floats:
    """Idle time in causes that all hosts have alike, [ranks, steady-state steps] (ns)."""
    out = np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    if len(dataset.ranks) < 2 or not dataset.steady_steps:
        return out
    gaps = [idle_gaps(line) for line in dataset.timelines]
    for find in (locked, collecting, fetching):
        cause = find(dataset, gaps)
        if cause is not None and cause.is_common():
            out += cause.idle - cause.own()
            gaps = left(gaps, cause.where)
    if 0 < typical_kernel(dataset) <= limits.SHORT_KERNEL_NS:
        cause = launching(dataset, gaps, pace)
        if cause.is_common():
            out += cause.idle - cause.own()
    return out
