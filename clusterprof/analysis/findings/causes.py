"""Why a rank is late: what its host does meanwhile, or what its GPU has more of."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.analysis.findings.finding import Evidence, job_of, named
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.host_activity import COLLECTING, COLLECTOR, GIL_WAIT, STEP_RANGES
from clusterprof.analysis.model.recorded import replay_of
from clusterprof.analysis.model.timeline import COMPUTE, COPY, Axis, union
from clusterprof.analysis.model.what_if import WhatIfs
from clusterprof.columns import (
    Bools,
    Floats,
    Ints,
    ReplayRows,
    called,
    coded,
    last_at_or_before,
    order_by,
    parts,
    places,
    row_of,
    sums,
    texts,
)
from clusterprof.mapped import release
from clusterprof.words import base_name, ms

#: what waits for the interpreter's lock are called together, whatever the profiler calls each
_LOCKED = "the GIL"
#: what calls of Python are summed up as, by a pattern of their names
_ALIKE = {COLLECTING: COLLECTOR, GIL_WAIT: _LOCKED}
#: the kind of what no range covers: it lies between two
_BETWEEN = "between"
#: what names of copies begin with
_COPIES = re.compile("(?i)mem(cpy|set)")
#: what to do about the garbage collector, and about the interpreter lock, on one rank or on all
COLLECT_TOGETHER = (
    "Switch automatic collection off (gc.disable()) and collect at the same step on all ranks; "
    "gc.freeze() after the set-up excludes long-lived objects."
)
LEAVE_THE_LOCK = (
    "Move the other threads' work into processes, or into native code that releases the GIL."
)
#: why a host is late that is in these for longest, and what to do about it
_SPECIAL = {
    COLLECTOR: ("the garbage collector runs", COLLECT_TOGETHER),
    _LOCKED: (f"its host waits for {_LOCKED}", LEAVE_THE_LOCK),
}
#: why a GPU takes longer (its copies, more work, or the same work), and what to do about it
_BUSY = (
    ("its copies take longer", "Look at what it copies, and from which memory."),
    (
        "its GPU has more work than its peers'",
        "Balance the work between the ranks: samples of equal length, the same layers.",
    ),
    (
        "its GPU is slower than its peers'",
        ("Look at that GPU's clocks, temperature and throttling (nvidia-smi -q -d "
         "PERFORMANCE,CLOCK) and at other processes on it."),
    ),
)  # fmt: skip


class Reason(NamedTuple):
    """Why a rank is late (a clause without a full stop), and what shows it."""

    why: str
    evidence: Evidence
    #: what to do, where it is not what the finding's code recommends
    advice: str = ""
    #: it may be work that other ranks could do
    movable: bool = False


def pause(dataset: Dataset, k: int, paused: Ints) -> tuple[float, str]:
    """The k-th rank's longest times on its own, one a step: their mean (ns), and what they are in.

    `paused` is each host moment's own time that counts (ns): what it waits for its GPU is none of
    it. Those of less than half of the longest are others. The name is empty where no call or range
    in the report covers most of it.
    """
    job, time = job_of(dataset), host_time(dataset, k)
    pauses = np.flatnonzero((job.job.host_rank == k) & (paused > 0))
    steps = parts(pauses, job.step_of_host[pauses])
    longest = np.asarray([rows[np.argmax(paused[rows])] for rows in steps], dtype=np.int64)
    longest = longest[paused[longest] >= limits.HALF * paused[longest].max(initial=0)]
    lengths = job.job.lengths.own[longest]
    end = own_clock(dataset, k, job.job.host_at[longest])
    mean = float(lengths.mean()) if len(longest) else 0.0
    cause = time.cause(time.within(end - lengths, end).sum(axis=1) / max(len(longest), 1), mean)
    return mean, "" if cause is None else _where(time.names[cause])[1]


def late_host(dataset: Dataset, k: int, late_ns: Floats) -> Reason:
    """Why a host was late: in what it spends most more than its middle peer, and how much.

    `late_ns` is by how much it was late in each steady-state step. Those in which it was tell.
    """
    late = np.flatnonzero(late_ns > limits.WARNING_FRAC * late_ns.max(initial=0.0))
    job, spans, time = job_of(dataset), step_spans(dataset, k), host_time(dataset, k)
    if len(spans[0]) != len(late_ns):
        return Reason("cannot be determined: its report has not all of the steps", [])
    others = job.peers.others(k)[: limits.MOST].tolist()
    whole = [place for place in (k, *others) if len(step_spans(dataset, place)[0]) == len(late_ns)]
    own, *theirs = (_time_in(dataset, place, time.names, k)[:, late] for place in whole)
    usual = np.median(theirs, axis=0)
    cause = time.cause((own - usual).mean(axis=1), float(late_ns[late].mean()))
    if cause is None and job.unlike and len(dataset.profilers([k, *others])) > 1:
        # of its peers another profiler records other calls: a pause of its own may still tell
        own_ns = job.base.own
        length, where = pause(dataset, k, own_ns - job.unlike.in_time(own_ns, np.array([k])))
        if not where:
            return Reason("cannot be determined: another profiler records its peers", [])
        return Reason(f"its host pauses {where} ({ms(length)})", [])
    if cause is None:
        return Reason("cannot be determined: no call, range or operator explains half of it", [])
    began = [time.when(cause, *span) for span in np.stack(spans, axis=1)[late].tolist()]
    aligned = dataset.clock.align(dataset.ranks[k], np.asarray(began, dtype=np.int64))
    call, took, peers_took = time.names[cause], own[cause], usual[cause]
    rows: Evidence = [
        {
            "rank": dataset.ranks[k], "step": dataset.steady_steps[step],
            "time_ns": int(aligned[n]), "host": {**call._asdict(), "duration_ns": took[n].item()},
            "peers_ns": round(peers_took[n]),
        }
        for n, step in enumerate(late[: limits.MOST])
    ]  # fmt: skip
    why, advice = _SPECIAL.get(call.name, (f"its host {' '.join(_where(call))}", ""))
    numbers = f"{ms(took.mean())}, its peers {ms(peers_took.mean())}"
    return Reason(f"{why} ({numbers})", rows, advice)


def _time_in(dataset: Dataset, k: int, names: list[Named], like: int) -> Floats:
    """How long the k-th rank's host is in each of `names` in each steady-state step (ns).

    Infinitely long in what may be any part of its time: a gap between ranges that it has not, or
    any call where another profiler than that of the rank `like` is at work, which may not record
    it, and lengthens it in another way.
    """
    unlike = len(dataset.profilers([k, like])) > 1
    rows = {} if unlike else dict(zip(host_time(dataset, k).names, spent(dataset, k), strict=True))
    for name in set(names) - rows.keys():
        unknown = unlike or name.kind == _BETWEEN
        rows[name] = np.full(len(dataset.steady_steps), np.inf if unknown else 0)
    return np.stack([rows[name] for name in names])


def _where(call: Named) -> tuple[str, str]:
    """What a host does, and in what, as a sentence says it."""
    if call.kind == _BETWEEN:
        # it has two names (`between 'a' and 'b'`): the first 23 of one that is longer than 24
        return "pauses", re.sub(r"(?<=')([^']{23})[^']{2,}(?=')", r"\1…", call.name)
    name = named(call.name)
    return ("blocks", f"in {name}") if call.kind in ("os", "cuda") else ("is", f"in '{name}'")


# --- what a host spends its time in: the calls, ranges and operators of its report


class Named(NamedTuple):
    """A kind of calls (as in `tables.KINDS`, or `_BETWEEN`), and their name."""

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
        innermost = sorted((self.names[k].kind == _BETWEEN, self.total[k], k) for k in enough)
        return innermost[0][-1] if innermost else None


host_time = once(HostTime)


@once
def spent(dataset: Dataset, k: int) -> Ints:
    """What the k-th rank's host spends in each name, its waits left out, [names, steady steps]."""
    time, (begin, end), job = host_time(dataset, k), step_spans(dataset, k), replay_of(dataset)
    in_names = time.within(begin, end)
    if job is not None and len(begin) == len(dataset.steady_steps):
        waits = np.flatnonzero(job.host_root & (job.host_rank == k))[1:]
        low, high = (own_clock(dataset, k, job.host_at[at]) for at in (waits - 1, waits))
        step = np.maximum(last_at_or_before(begin, low), 0)
        inside = (np.clip(each, begin[step], end[step]) for each in (low, high))
        np.subtract.at(in_names.T, step, time.within(*inside).T)
    return in_names


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
    columns = [covered.end[:-1], covered.start[1:], [_BETWEEN] * len(gaps), gaps]
    return pa.table(dict(zip(ranges.column_names, columns, strict=True)), schema=ranges.schema)


# --- what a GPU takes longer


@once
def busy_gpu(dataset: Dataset, k: int) -> Reason:
    """Which kernels the rank has more of, or longer, than its middle peer."""
    job = job_of(dataset)
    names, *by_step = by_name(job, job.work, job.job.lengths.run)
    took, calls = (values.mean(axis=2) for values in by_step)
    more, more_calls = job.peers.differences(took)[k], job.peers.differences(calls)[k].round(1)
    copies = np.asarray([bool(_COPIES.match(name)) for name in names])
    work = ~copies & (np.round(more_calls) >= 1)
    ways, half = (copies, work, ~copies), limits.HALF * more.clip(0).sum()
    which = next((k for k in (0, 1) if more[ways[k]].sum() >= half), 2)
    chosen, (why, advice) = ways[which], _BUSY[which]
    worst = int(np.argmax(np.where(chosen, more, -np.inf)))
    row = {
        "rank": dataset.ranks[k], "kernel": names[worst],
        "more_ns_per_step": round(float(more[worst])),
        "more_calls_per_step": float(more_calls[worst]) + 0.0,  # none, and not minus none
    }  # fmt: skip
    # what it has less of may be other forms of the same work: longer batches run other kernels
    shown = chosen | ~copies & (np.round(more_calls) <= -1) if chosen is work else chosen
    own_ns, peers_ns = took[k, shown].sum(), (took[k] - more)[shown].sum()
    if own_ns <= peers_ns:
        return Reason("cannot be determined: its kernels take no longer than its peers'", [row])
    numbers = f"{ms(own_ns)}, its peers {ms(peers_ns)}"
    return Reason(f"{why} ({numbers})", [row], advice, movable=chosen is work)


@once
def beyond_lengths(dataset: Dataset) -> Floats:
    """By how much more than its middle peer's each rank's GPU computes at any length of batches.

    [ranks, steady-state steps] (ns), nowhere below 0. Longer samples lengthen the kernels that work
    on samples, and not those that work on parameters (an optimizer's), and they add no kernels. So
    a GPU is slower by what all of its kernels are, and has another program by the kernels that it
    runs besides its peers'; what is left may be the batches'.
    """
    job = job_of(dataset)
    rows = job.work[job.job.kind[job.work] == COMPUTE]
    _, took, calls = by_name(job, rows, np.minimum(job.base.run, job.job.contention.freely))
    more, longer = job.peers.differences(calls), job.peers.differences(took)
    alike = ((more == 0) | job.alone[:, None, None]) & (calls > 0)
    slower = _slower(job, took, calls, alike.all(axis=2))[:, None] * took.sum(axis=1)
    # of what it has more of, as many are other forms of the same work as it has less of others
    net = more.sum(axis=1).clip(0.0) / np.maximum(more.clip(0.0).sum(axis=1), 1.0)
    added = net * np.where(more > 0, longer, 0.0).sum(axis=1).clip(0.0)
    added[job.alone] = 0.0
    # copies of as many bytes as the middle peer's
    rows = job.work[job.job.kind[job.work] == COPY]
    values = job.base.run[rows], job.dataset.activities.size[job.job.activity[rows]]
    one_kind = np.zeros_like(rows)
    longer, size = (job.peers.differences(_sums(job, rows, v, one_kind, 1))[:, 0] for v in values)
    return job.by_steady_step(slower + added + np.where(size == 0, longer.clip(0.0), 0.0))


def by_name(job: WhatIfs, rows: ReplayRows, lengths: Ints) -> tuple[list[str], Floats, Floats]:
    """What activities of each name take each rank in each step (ns), and how many there are.

    Of the activities `rows`; `lengths` are of all of the replay. Both [ranks, names, steps].
    """
    activities = job.dataset.activities
    names = list(activities.names)
    if job.dataset.unlike_profilers:  # as all profilers of the job write them
        names = [name if _COPIES.match(name) else base_name(name) for name in names]
    every, code = np.unique(np.asarray(names, dtype=object), return_inverse=True)
    used, kind = np.unique(code[activities.name[job.job.activity[rows]]], return_inverse=True)
    took, calls = (_sums(job, rows, values, kind, len(used)) for values in (lengths[rows], None))
    return every[used].tolist(), took, calls


def _sums(job: WhatIfs, rows: ReplayRows, values: Ints | None, kind: Ints, count: int) -> Floats:
    """The sums of `values` of the activities `rows`, or how many, [ranks, `count` kinds, steps]."""
    shape = len(job.dataset.ranks), count, len(job.job.steps)
    return sums(shape, (job.job.rank[rows], kind, job.job.step[rows]), values)


def _slower(job: WhatIfs, took: Floats, calls: Floats, alike: Bools) -> Floats:
    """The part of its kernels' time by which each GPU is slower, whatever it works on, [ranks].

    Of those kernels that it and its middle peer both run as often (`alike`, [ranks, names]). 0
    where those of a name contradict it: that they take as long as the peer's is likelier, by a
    hundred times the number of names asked, than that they are slower as all are (normal errors).
    """
    count, steps = calls.sum(axis=2), took.shape[2]
    call_ns = np.where(calls > 0, took, np.nan) / np.maximum(calls, 1)
    # of a call the logarithm over the middle peer's, [ranks, names, steps], 0 where one has none;
    # of their mean over the steps the variance
    longer = job.peers.differences(np.log(np.maximum(call_ns, 1.0)))
    mean, error = longer.mean(axis=2), longer.var(axis=2, ddof=1) / steps
    weight = np.where(alike, took.sum(axis=2), 0.0)
    slower = ((weight * mean).sum(axis=1) / np.maximum(weight.sum(axis=1), 1.0)).clip(0.0)
    # shorter kernels take what it takes to start one, however fast the GPU is
    asked = alike & (took.sum(axis=2) >= 10_000 * count)
    enough = np.log(np.maximum(asked.sum(axis=1), 1) / limits.CHANCE)
    # the logarithm of how much likelier, times `error`
    likelier = slower[:, None] * (slower[:, None] / 2 - mean)
    as_long = (asked & (likelier > error * enough[:, None])).any(axis=1)
    share = weight.sum(axis=1) / np.maximum(took.sum(axis=(1, 2)), 1.0)
    return np.asarray(np.where(as_long, 0.0, share * (1 - np.exp(-slower))))
