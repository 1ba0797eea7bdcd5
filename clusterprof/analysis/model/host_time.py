"""What a rank's host spends its time in: the calls, ranges and operators of its report."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.host_activity import COLLECTING, COLLECTOR, GIL_WAIT
from clusterprof.analysis.model.intervals import Axis, union
from clusterprof.analysis.model.recorded import replay_of
from clusterprof.columns import (
    Floats,
    Ints,
    called,
    coded,
    last_at_or_before,
    order_by,
    places,
    row_of,
    texts,
)
from clusterprof.mapped import release

#: ranges of whole steps, of communication, and our own: they do not tell what the program does
STEP_RANGES = r"^(step\b|ProfilerStep|nccl|gloo|clusterprof:)"
#: what waits for the interpreter's lock are called together, whatever the profiler calls each
LOCKED = "the GIL"
#: what calls of Python are summed up as, by a pattern of their names
_ALIKE = {COLLECTING: COLLECTOR, GIL_WAIT: LOCKED}
#: the kind of what no range covers: it lies between two
BETWEEN = "between"


class Named(NamedTuple):
    """A kind of calls (as in `tables.KINDS`, or `BETWEEN`), and their name."""

    kind: str
    name: str


class HostTime:
    """How long the k-th rank's host is in calls of each name, on its own wall clock (ns).

    Of threads that launch work, and of the garbage collector on any, in the steady-state steps.
    Calls of one name that nest or overlap count once.
    """

    def __init__(self, dataset: Dataset, k: int) -> None:
        tables, spans = dataset.tables[k], np.concatenate(step_spans(dataset, k)).tolist() or [0]
        calls, begin, end = tables.host_calls, min(spans), max(spans)
        # threads whose work the device waits for: they launch, or mark the program's ranges
        threads = pc.drop_null(pc.unique(tables.activity["launch_thread"]))
        if not len(threads):
            threads = pc.unique(calls.filter(pc.equal(calls["kind"], "range"))["thread"])
        calls = calls.filter((pc.field("end_ns") > begin) & (pc.field("start_ns") < end))
        works = pc.is_in(calls["thread"], value_set=threads).to_numpy()
        collects = np.asarray(pc.equal(calls["kind"], "python")) & called(calls, COLLECTING)
        calls = calls.filter(pa.array((works & ~called(calls, STEP_RANGES)) | collects))
        calls = calls.select(["start_ns", "end_ns", "kind", "name"])
        table = pa.concat_tables([calls, _between(calls.filter(pc.equal(calls["kind"], "range")))])
        (kinds, kind), (names, name) = coded(table, "kind"), coded(table, "name")
        codes, of = places(kind * np.int64(len(names)) + name)
        summed_up = []
        for first, second in (divmod(code, len(names)) for code in codes.tolist()):
            alike = _ALIKE if kinds[first] == "python" else {}
            labels = (alike[pattern] for pattern in alike if re.search(pattern, names[second]))
            summed_up.append(Named(kinds[first], next(labels, names[second])))
        self.names = list(dict.fromkeys(summed_up))
        number = {call: place for place, call in enumerate(self.names)}
        of = np.asarray([number[call] for call in summed_up], dtype=np.int64)[of]
        start, stop = (table[column].to_numpy() for column in ("start_ns", "end_ns"))
        # many short waits for the interpreter's lock are one long one
        self._axis = Axis(np.full(max(len(self.names), 1), begin))
        self._covered = union(self._axis.of(of, start), self._axis.of(of, stop))
        #: how long it is in each in all, [names]
        self.total = self.within(np.array([begin]), np.array([end]))[:, 0]
        release()

    def within(self, begin: Ints, end: Ints) -> Ints:
        """How long it is in each name in each span, [names, spans]."""
        number = np.arange(len(self.names))[:, None]
        return self._covered.within(*(self._axis.of(number, each) for each in (begin, end)))

    def when(self, number: int, begin: int, end: int) -> int:
        """When what takes longest of a name within a span begins."""
        low, high = self._axis.of(number, np.array([begin, end])).tolist()
        start, stop = self._covered.start, self._covered.end
        length = np.minimum(stop, high) - np.maximum(start, low)
        longest = start[int(np.argmax(length))] if len(length) else low
        return int(self._axis.back(np.array([max(longest, low)]))[1][0])

    def cause(self, more: Floats, of_ns: float) -> int | None:
        """Which name explains half of a time; None where none does.

        `more` are what each name has of it (ns). Of several that one which is least else, the
        innermost; and a call before a gap, which tells only where it is.
        """
        enough = np.flatnonzero((more > 0) & (more >= limits.HALF * of_ns)).tolist()
        innermost = sorted((self.names[k].kind == BETWEEN, self.total[k], k) for k in enough)
        return innermost[0][-1] if innermost else None


host_time = once(HostTime)


@once
def spent(dataset: Dataset, k: int) -> Ints:
    """What the k-th rank's host spends in each name, its waits left out, [names, steady steps]."""
    time, (begin, end), job = host_time(dataset, k), step_spans(dataset, k), replay_of(dataset)
    out = time.within(begin, end)
    if job is not None and len(begin) == len(dataset.steady_steps):
        waits = np.flatnonzero(job.host_root & (job.host_rank == k))[1:]
        low, high = (own_clock(dataset, k, job.host_at[at]) for at in (waits - 1, waits))
        step = np.maximum(last_at_or_before(begin, low), 0)
        inside = (np.clip(each, begin[step], end[step]) for each in (low, high))
        np.subtract.at(out.T, step, time.within(*inside).T)
    return out


def own_clock(dataset: Dataset, k: int, aligned: Ints) -> Ints:
    """Times on the reference rank's clock (ns) on the k-th rank's own."""
    time = aligned
    for _ in range(3):  # clocks differ in pace by millionths
        time = time + aligned - dataset.clock.align(dataset.ranks[k], time)
    return time


def step_spans(dataset: Dataset, k: int) -> tuple[Ints, Ints]:
    """When the k-th rank's host begins and ends the steady-state steps (its own wall clock)."""
    d = dataset.timelines
    rows = d.steps_of(k, dataset.steady_steps)
    return d.host_begin[rows], d.host_end[rows]


def _between(ranges: pa.Table) -> pa.Table:
    """What lies between these ranges, one row for each gap: the host's own code."""
    start, stop = (ranges[column].to_numpy() for column in ("start_ns", "end_ns"))
    covered, names = union(start, stop), texts(ranges, "name")
    by_end = order_by(stop)
    before = by_end[row_of(stop[by_end], covered.end[:-1])]
    after = row_of(start, covered.start[1:])
    gaps = [
        f"between two of '{one}'" if one == other else f"between '{one}' and '{other}'"
        for one, other in zip(names[before], names[after], strict=True)
    ]
    columns = [covered.end[:-1], covered.start[1:], [BETWEEN] * len(gaps), gaps]
    return pa.table(dict(zip(ranges.column_names, columns, strict=True)), schema=ranges.schema)
