"""What the ranks' devices did, cut into steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.columns import Ints, coded
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.intervals import Axis, union
from clusterprof.tables import RankTables, empty

#: codes of `Timelines.kind`
KINDS = ("compute", "collective", "copy", "memset")
COMPUTE, COLLECTIVE, COPY, MEMSET = range(4)


class Timelines:
    """All ranks' activities and steps, one rank after the other, as arrays.

    Each rank is on its own wall clock (ns), and all of them on one `axis`.

    Step k begins at max(its host begin, end of the last activity launched before that begin):
    work that was queued before belongs to the step before, and a GPU that idles at the
    beginning of a step idles in that step. The steps follow each other without a gap; the last
    ends at max(its host end, end of the last activity launched in it), or with that activity
    where the host then drained the device: what follows is the profiler's stop.
    """

    def __init__(self, tables: Sequence[RankTables]) -> None:
        columns = ["start_ns", "end_ns", "launch_start_ns", "launch_end_ns", "kind"]
        every = [t.activity.select(columns) for t in tables]
        table = pa.concat_tables([empty("activity").select(columns), *every])
        counts = [t.num_rows for t in every]
        start, stop, launch, launch_end = (table[name] for name in columns[:4])
        #: when each activity starts and stops, and its launch does, on its rank's own wall clock
        self.times: Ints = np.stack(
            [
                start.to_numpy(), stop.to_numpy(),
                pc.coalesce(launch, start).to_numpy(), pc.coalesce(launch_end, start).to_numpy(),
            ]
        )  # fmt: skip
        kinds, kind = coded(table, "kind")
        self.kind = np.asarray([KINDS.index(each) for each in kinds], dtype=np.int64)[kind]
        of_ranks = np.split(self.times, np.cumsum(counts), axis=1)
        cut = [_cut(t, times) for t, times in zip(tables, of_ranks, strict=False)]
        none = np.zeros(0, dtype=np.int64)
        #: of each step: its number, when its host and its device begin and end it; and for each
        #: activity the number of the step that launched it, or -1
        self.step, self.host_begin, self.host_end, begin, end, self.step_of = (
            np.concatenate(each)
            for each in zip([none] * 6, *(steps for steps, _ in cut), strict=True)
        )
        #: of each rank: whether its report has steps
        self.has_steps = np.asarray([has for _, has in cut], dtype=bool)
        #: and whether it computes and communicates on CPU threads (gloo): there is no GPU
        self.on_host = np.asarray([_on_host(t) for t in tables], dtype=bool)
        #: the place of the rank of each step, and of each activity
        self.rank = np.repeat(np.arange(len(cut)), [len(steps[0]) for steps, _ in cut])
        self.of = np.repeat(np.arange(len(cut)), counts)
        #: on the axis
        self.axis = Axis(begin[np.diff(self.rank, prepend=-1) != 0])
        self.begin, self.end = (self.axis.of(self.rank, each) for each in (begin, end))
        self.start, self.stop, _, self.launched = self.axis.of(self.of, self.times)
        computes, communicates = self.kind == COMPUTE, self.kind == COLLECTIVE
        self.compute, self.communication, self.either, self.busy = (
            union(self.start[rows], self.stop[rows])
            for rows in (computes, communicates, computes | communicates, slice(None))
        )

    def steps_of(self, k: int, steps: Sequence[int]) -> Ints:
        """The rows of those of `steps` that the k-th rank has."""
        return np.flatnonzero((self.rank == k) & np.isin(self.step, steps))


def _on_host(tables: RankTables) -> bool:
    correlation = tables.activity["correlation"]
    return tables.info.backend == "gloo" or not correlation.null_count < len(correlation)


def _cut(tables: RankTables, times: Ints) -> tuple[tuple[Ints, ...], bool]:
    """Cut one rank's report into steps. Assumes that `steps` are the program's own, in order.

    Returns what `Timelines` has of steps and of their launches, and whether there are steps.
    """
    start, stop, launch, launch_end = times
    step, host_begin, host_end = _host_steps(tables, launch)
    has_steps = bool(len(step))
    if not has_steps:
        first = min([tables.info.begin_ns or 2**62, *start[:1].tolist()])
        last = max([tables.info.end_ns, *([int(stop.max())] if len(stop) else [])])
        # one step, number 0, stands for the whole window
        step = np.zeros(1, dtype=np.int64)
        host_begin = np.array([min(first, last)], dtype=np.int64)
        host_end = np.array([last], dtype=np.int64)
    drains = _drains(tables)
    kept = _until_the_stop(drains[0], host_begin, host_end)
    step, host_begin, host_end = step[:kept], host_begin[:kept], host_end[:kept]
    # a window's stop waits for an idle device with nothing launched behind it, and takes 10 ms and
    # more after it; no step's time is that
    last = (drains[0] >= launch_end.max(initial=0)) & (drains[1] >= stop.max(initial=0))
    drained = int(drains[0][last].min(initial=host_end[-1]))
    if len(stop) and host_begin[-1] < drained < host_end[-1]:
        host_end = np.r_[host_end[:-1], drained]
    begin, end, of = _device_steps(host_begin, host_end, launch, stop)
    return (step, host_begin, host_end, begin, end, np.r_[step, -1][of]), has_steps


def _host_steps(tables: RankTables, launch: Ints) -> tuple[Ints, Ints, Ints]:
    """Steps of which the report holds something; fragments at the window's edges left out.

    A fragment has less than half of the activities that steps usually have.
    """
    table = tables.steps
    step, begin, end = (table[c].to_numpy() for c in ("step", "begin_ns", "end_ns"))
    if not len(step):
        return step, begin, end
    ordered = np.sort(launch)
    count = np.searchsorted(ordered, np.r_[begin[1:], end[-1:]]) - np.searchsorted(ordered, begin)
    inside = np.flatnonzero(count > 0)
    if not len(inside):
        return step[:0], begin[:0], end[:0]
    first, last = inside[0], inside[-1]
    most = limits.HALF * float(np.median(count[first : last + 1]))
    if last - first >= 2:
        first += int(count[first] < most)
        last -= int(count[last] < most)
    chosen = slice(first, last + 1)
    return step[chosen], begin[chosen], end[chosen]


def _drains(tables: RankTables) -> tuple[Ints, Ints]:
    """The calls in which the host waited until its device was idle: when they began and ended."""
    calls = tables.host_calls
    named = pc.match_substring_regex(calls["name"].cast(pa.string()), r"(?i)devicesynchronize")
    found = calls.filter(named)
    return found["start_ns"].to_numpy(), found["end_ns"].to_numpy()


def _until_the_stop(start: Ints, host_begin: Ints, host_end: Ints) -> int:
    """How many steps there are before the one place between two steps where the host drains.

    A window's stop drains the device between two steps; the report may hold some steps after it,
    which begin with empty queues. Programs that drain between their steps do so at each of them.
    """
    after = np.searchsorted(host_end, start, side="right")
    inside = (after > 0) & (after < len(host_begin))
    after, start = after[inside], start[inside]
    between = np.unique(after[start < host_begin[after]])
    return int(between[0]) if len(between) == 1 else len(host_begin)


def _device_steps(
    host_begin: Ints, host_end: Ints, launch: Ints, stop: Ints
) -> tuple[Ints, Ints, Ints]:
    order = np.argsort(launch, kind="stable")
    launched, reach = launch[order], np.maximum.accumulate(stop[order]) if len(stop) else stop
    before = np.searchsorted(launched, host_begin)
    begin = host_begin.copy()
    some = before > 0
    begin[some] = np.maximum(host_begin[some], reach[before[some] - 1])
    begin = np.maximum.accumulate(begin)
    of = np.searchsorted(host_begin, launch, side="right") - 1
    of[launch > host_end[-1]] = -1
    mine = of == len(host_begin) - 1
    last = max(int(host_end[-1]), int(stop[mine].max()) if mine.any() else 0, int(begin[-1]))
    return begin, np.r_[begin[1:], last].astype(np.int64), of
