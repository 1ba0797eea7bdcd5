"""What each rank's host did: the calls it waited in, and those that name a cause."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, Ints
from clusterprof.analysis.model.intervals import Intervals, union
from clusterprof.analysis.model.timeline import Timeline
from clusterprof.tables import GARBAGE, RankTables

#: CUDA calls that wait for the device by their nature, and from which length on they do
_WAITS = r"(?i)synchronize|memcpy|memset|cudafree|eventquery"
#: a launch waits where 1,024 are queued (in the recordings nine in ten of the launches
#: longer than 50 µs begin with 1,024 to 1,066 that have not ended, and hardly any with fewer)
_QUEUE = 1_000


def spans(tables: RankTables, kind: str, pattern: str = "") -> Intervals:
    """A rank's host calls of one kind, of those whose name matches `pattern` (a regex)."""
    table = _chosen(tables, kind, pattern)
    return union(table["start_ns"].to_numpy(), table["end_ns"].to_numpy())


def _chosen(tables: RankTables, kind: str, pattern: str) -> pa.Table:
    table = tables.host_calls
    kept = table.filter(pc.equal(table["kind"], kind))
    if pattern:
        kept = kept.filter(pc.match_substring_regex(kept["name"].cast(pa.string()), pattern))
    return kept


def wait_calls(tables: RankTables, line: Timeline) -> Intervals:
    """Calls in which the host may have waited for the device; on gloo its collectives.

    A long CUDA call that waits by its nature, a launch into a full queue, and any that is too long.
    """
    table = tables.host_calls
    cuda = np.asarray(pc.equal(table["kind"], "cuda").to_numpy(), dtype=bool)
    if not cuda.any():
        return line.communication
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    rows = np.flatnonzero(cuda & (end - start >= limits.WAITING_CALL_NS))
    names = table["name"].take(pa.array(rows)).cast(pa.string())
    waits = np.array(pc.match_substring_regex(names, _WAITS).to_numpy(), dtype=bool)
    start, end = start[rows], end[rows]
    launched, of = np.unique(line.launch, return_inverse=True)
    finished = np.zeros(len(launched), dtype=np.int64)
    np.maximum.at(finished, of, line.stop)
    queued = np.searchsorted(launched, start) - np.searchsorted(np.sort(finished), start)
    waits |= (queued >= _QUEUE) | (end - start >= limits.BLOCKED_CALL_NS)
    return union(start[waits], end[waits])


#: Python's garbage collector, as the agent notes it
COLLECTING = f"^{GARBAGE}"
#: the name of what the host does there
COLLECTOR = "the garbage collector"

#: the names that nsys and others give a wait for Python's interpreter lock
GIL_WAIT = r"(?i)wait.*gil"

#: calls by what they cost the host, in the order in which they are looked for: kind and name
NAMED = {
    "host.gil": (("python", GIL_WAIT),),
    "host.gc": (("python", COLLECTING),),
    "input.stall": (
        ("range", r"(?i)^(data|input|batch|fetch|dataload)|dataloader|next_batch|get_batch"),
        ("op", "(?i)dataloader"),
    ),
}


def named_time(dataset: Dataset, place: Ints, begin: Ints, end: Ints) -> dict[str, Ints]:
    """How much of each span lies in calls of each code of `NAMED`, each ns in one of them.

    `place` is each span's rank; `begin` and `end` are on the reference rank's clock.
    """
    out = {code: np.zeros(len(place), dtype=np.int64) for code in NAMED}
    for k in np.unique(place).tolist():
        mine, rank = place == k, dataset.ranks[k]
        start, stop = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        before = np.zeros(int(mine.sum()), dtype=np.int64)
        for code, kinds in NAMED.items():
            for kind, pattern in kinds:
                calls = spans(dataset.tables[k], kind, pattern)
                start = np.r_[start, dataset.clock.align(rank, calls.start)]
                stop = np.r_[stop, dataset.clock.align(rank, calls.end)]
            covered = union(start, stop).within(begin[mine], end[mine])
            out[code][mine] = covered - before
            before = covered
    return out


#: ranges of whole steps, of communication, and our own: they do not tell what the program does
_STEP_RANGES = r"^(step\b|ProfilerStep|nccl|gloo|clusterprof:)"


def _threads(tables: RankTables) -> pa.Array:
    """Threads whose work the device waits for: they launch, or mark the program's ranges."""
    table = tables.activity
    launching = pc.drop_null(pc.unique(table["launch_thread"]))
    if len(launching):
        return launching
    marks = tables.host_calls.filter(pc.equal(tables.host_calls["kind"], "range"))
    return pc.unique(marks["thread"])


def doing(tables: RankTables, begin: int, end: int) -> dict[str, object] | None:
    """What the host was doing between two times: the innermost call that covers most of it.

    Only calls of threads that launch work count. Returns name, kind and length, or None where
    nothing covers half of the span.
    """
    table = tables.host_calls
    start, stop = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    overlap = np.minimum(stop, end) - np.maximum(start, begin)
    lock = np.asarray(pc.equal(table["kind"], "python").to_numpy(), dtype=bool) & (overlap > 0)
    if lock.any():
        # many short waits for the interpreter lock are one long one
        waits = table.filter(pa.array(lock))
        of_it = pc.match_substring_regex(waits["name"].cast(pa.string()), GIL_WAIT)
        of_it = pc.and_(of_it, pc.is_in(waits["thread"], value_set=_threads(tables)))
        total = int(overlap[lock][np.asarray(of_it.to_numpy(), dtype=bool)].sum())
        if total * 2 >= end - begin:
            return {"name": "waiting for the GIL", "kind": "python", "duration_ns": total}
        collecting = pc.match_substring_regex(waits["name"].cast(pa.string()), COLLECTING)
        total = int(overlap[lock][np.asarray(collecting.to_numpy(), dtype=bool)].sum())
        if total * 2 >= end - begin:
            return {"name": COLLECTOR, "kind": "python", "duration_ns": total}
    enough = np.flatnonzero(overlap * 2 >= max(end - begin, 1))
    if not len(enough):
        return None
    rows = table.take(pa.array(enough))
    mine = pc.is_in(rows["thread"], value_set=_threads(tables))
    named = pc.invert(pc.match_substring_regex(rows["name"].cast(pa.string()), _STEP_RANGES))
    rows = rows.filter(pc.and_(mine, named))
    if not rows.num_rows:
        return None
    length = rows["end_ns"].to_numpy() - rows["start_ns"].to_numpy()
    best = int(np.argmin(length))
    return {
        "name": str(rows["name"][best].as_py()),
        "kind": str(rows["kind"][best].as_py()),
        "duration_ns": int(length[best]),
    }


def between(tables: RankTables, begin: int, end: int) -> dict[str, object] | None:
    """Between which ranges the program is at a time that no call or range covers."""
    table = tables.host_calls
    named = pc.invert(pc.match_substring_regex(table["name"].cast(pa.string()), _STEP_RANGES))
    mine = pc.is_in(table["thread"], value_set=_threads(tables))
    rows = table.filter(pc.and_(pc.and_(pc.equal(table["kind"], "range"), named), mine))
    middle = (begin + end) // 2
    start, stop = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    before, after = np.flatnonzero(stop <= middle), np.flatnonzero(start >= middle)
    if not len(before) or not len(after):
        return None
    one = rows["name"][int(before[np.argmax(stop[before])])].as_py()
    other = rows["name"][int(after[np.argmin(start[after])])].as_py()
    name = f"between '{one}' and '{other}'"
    return {"name": name, "kind": "between", "duration_ns": end - begin}
