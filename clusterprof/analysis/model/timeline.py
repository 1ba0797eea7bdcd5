"""One rank's device timeline, cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.analysis.model.intervals import Axis, Intervals, union
from clusterprof.tables import RankTables

Ints = npt.NDArray[np.int64]

#: the number of the one step that stands for the whole window where a report has no steps
WHOLE_WINDOW = 0
#: a step at the window's edge with less than this part of the usual activities is a fragment
_FRAGMENT = 0.5


@dataclass(frozen=True)
class Timeline:
    """One rank's activities as arrays (own wall clock, ns) and its steps on the device.

    Step k begins at max(its host begin, end of the last activity launched before that begin):
    work that was queued before belongs to the step before, and a GPU that idles at the
    beginning of a step idles in that step. The steps follow each other without a gap; the last
    ends at max(its host end, end of the last activity launched in it), or with that activity
    where the host then drained the device: what follows is the profiler's stop. `step_of` is for
    each activity the index of the step that launched it, or -1.
    """

    rank: int
    has_steps: bool
    step: Ints
    begin: Ints
    end: Ints
    host_begin: Ints
    host_end: Ints
    start: Ints
    stop: Ints
    launch: Ints
    launch_end: Ints
    kind: npt.NDArray[np.int64]
    name: npt.NDArray[np.int64]
    names: tuple[str, ...]
    step_of: Ints
    #: computes and communicates on CPU threads (gloo): there is no GPU
    on_host: bool

    @cached_property
    def compute(self) -> Intervals:
        """When it computes."""
        return union(self.start[self.kind == COMPUTE], self.stop[self.kind == COMPUTE])

    @cached_property
    def busy(self) -> Intervals:
        """When it does anything."""
        return union(self.start, self.stop)


#: codes of `Timeline.kind`
KINDS = ("compute", "collective", "copy", "memset")
COMPUTE, COLLECTIVE, COPY, MEMSET = range(4)


def timeline(tables: RankTables) -> Timeline:
    """Cut one rank's report into steps. Assumes that `steps` are the program's own, in order."""
    table = tables.activity
    start = table["start_ns"].to_numpy()
    stop = table["end_ns"].to_numpy()
    launch = pc.coalesce(table["launch_start_ns"], table["start_ns"]).to_numpy()
    launch_end = pc.coalesce(table["launch_end_ns"], table["start_ns"]).to_numpy()
    kind, _ = codes(table["kind"], KINDS)
    name, names = codes(table["name"])
    step, host_begin, host_end = _host_steps(tables, launch)
    has_steps = bool(len(step))
    if not has_steps:
        first = min([tables.info.begin_ns or 2**62, *start[:1].tolist()])
        last = max([tables.info.end_ns, *([int(stop.max())] if len(stop) else [])])
        step = np.array([WHOLE_WINDOW], dtype=np.int64)
        host_begin = np.array([min(first, last)], dtype=np.int64)
        host_end = np.array([last], dtype=np.int64)
    kept = _until_the_stop(tables, host_begin, host_end)
    step, host_begin, host_end = step[:kept], host_begin[:kept], host_end[:kept]
    drained = _drain(tables, launch_end, stop)
    if drained is not None and host_begin[-1] < drained < host_end[-1]:
        host_end = np.r_[host_end[:-1], drained]
    begin, end, step_of = _device_steps(host_begin, host_end, launch, stop)
    return Timeline(
        rank=tables.rank, has_steps=has_steps, step=step, begin=begin, end=end,
        host_begin=host_begin, host_end=host_end, start=start, stop=stop,
        launch=launch, launch_end=launch_end, kind=kind, name=name, names=names, step_of=step_of,
        on_host=tables.info.backend == "gloo" or not table["correlation"].null_count < len(start),
    )  # fmt: skip


class Devices:
    """What the devices of some ranks did, each on its own wall clock, all on one `axis` (ns)."""

    def __init__(self, lines: Sequence[Timeline]) -> None:
        def every(name: str) -> Ints:
            return np.concatenate([getattr(line, name) for line in lines])

        self.axis = Axis(np.asarray([line.begin[0] for line in lines]))
        #: of each activity
        of = np.repeat(np.arange(len(lines)), [len(line.start) for line in lines])
        self.start, self.stop, self.launched = (
            self.axis.of(of, every(name)) for name in ("start", "stop", "launch_end")
        )
        self.kind = every("kind")
        #: of each rank's steps: the place of the rank, the step's number, begin and end
        self.rank = np.repeat(np.arange(len(lines)), [len(line.step) for line in lines])
        self.step = every("step")
        self.begin, self.end = (self.axis.of(self.rank, every(name)) for name in ("begin", "end"))
        computes, communicates = self.kind == COMPUTE, self.kind == COLLECTIVE
        self.compute, self.communication, self.either, self.busy = (
            union(self.start[rows], self.stop[rows])
            for rows in (computes, communicates, computes | communicates, slice(None))
        )


def codes(
    column: pa.ChunkedArray, order: tuple[str, ...] | None = None
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """A dictionary column as integer codes and their names (in `order` where given)."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_dictionary(whole.type):
        whole = whole.dictionary_encode()
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.unify_dictionaries().combine_chunks()
    names = tuple(whole.dictionary.to_pylist())
    codes = np.asarray(whole.indices.to_numpy(zero_copy_only=False), dtype=np.int64)
    if order is None:
        return codes, names
    place = np.array([order.index(n) if n in order else len(order) for n in names] or [0])
    return np.asarray(place[codes] if len(codes) else codes, dtype=np.int64), order


def _host_steps(tables: RankTables, launch: Ints) -> tuple[Ints, Ints, Ints]:
    """Steps of which the report holds something; fragments at the window's edges left out."""
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
    usual = _FRAGMENT * float(np.median(count[first : last + 1]))
    if last - first >= 2:
        first += int(count[first] < usual)
        last -= int(count[last] < usual)
    chosen = slice(first, last + 1)
    return step[chosen], begin[chosen], end[chosen]


def _until_the_stop(tables: RankTables, host_begin: Ints, host_end: Ints) -> int:
    """How many steps there are before the one place between two steps where the host drains.

    A window's stop drains the device between two steps; the report may hold some steps after it,
    which begin with empty queues. Programs that drain between their steps do so at each of them.
    """
    calls = tables.host_calls
    named = pc.match_substring_regex(calls["name"].cast(pa.string()), r"(?i)devicesynchronize")
    start = calls.filter(named)["start_ns"].to_numpy()
    after = np.searchsorted(host_end, start, side="right")
    inside = (after > 0) & (after < len(host_begin))
    after, start = after[inside], start[inside]
    between = np.unique(after[start < host_begin[after]])
    return int(between[0]) if len(between) == 1 else len(host_begin)


def _drain(tables: RankTables, launch_end: Ints, stop: Ints) -> int | None:
    """When the host began to wait for an idle device with nothing launched behind it (ns).

    A window's stop does so, and takes 10 ms and more after it; no step's time is that.
    """
    if not len(stop):
        return None
    calls = tables.host_calls
    last = pa.scalar(int(launch_end.max()), pa.int64())
    after = pc.and_(
        pc.greater_equal(calls["start_ns"], last),
        pc.greater_equal(calls["end_ns"], pa.scalar(int(stop.max()), pa.int64())),
    )
    named = pc.match_substring_regex(calls["name"].cast(pa.string()), r"(?i)devicesynchronize")
    found = calls.filter(pc.and_(after, named))["start_ns"]
    return int(pc.min(found).as_py()) if len(found) else None


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
