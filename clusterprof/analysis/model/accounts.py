"""Where each step's time went on each rank: an account that closes to the nanosecond.

And which call it went to: each moment of communication belongs to one call, so that the calls add
up to the accounts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock import Clock
from clusterprof.analysis.model.dataset import Bools, Dataset
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.replay import Replay
from clusterprof.analysis.model.timeline import COLLECTIVE, Ints, Timeline

#: One row per rank and step. `duration = compute + exposed_communication + exposed_copy + idle`.
ACCOUNTS = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in [
            ("rank", pa.int32()),
            ("step", pa.int64()),
            #: on the rank's own wall clock
            ("begin_ns", pa.int64()),
            ("end_ns", pa.int64()),
            #: on the reference rank's clock
            ("aligned_begin_ns", pa.int64()),
            ("duration_ns", pa.int64()),
            ("compute_ns", pa.int64()),
            ("exposed_communication_ns", pa.int64()),
            ("exposed_copy_ns", pa.int64()),
            ("idle_ns", pa.int64()),
            ("communication_ns", pa.int64()),
            ("exposed_wait_ns", pa.int64()),
        ]
    ]
)


def accounts(timelines: Sequence[Timeline], placed: pa.Table, clock: Clock) -> pa.Table:
    """Return each rank's and step's account (schema ACCOUNTS).

    Compute is the union of all kernels that do not communicate; exposed communication the union
    of communicating kernels minus compute; exposed copies the union of copies and memsets minus
    both; idle the rest. Each is a difference of unions of one growing set, so they add up
    exactly, with any number of concurrent streams. Exposed wait is the part of the exposed
    communication before the last arrival of its collective (`placed`: schema PLACED).
    """
    ranks = np.asarray(placed["rank"].to_numpy())
    start = np.asarray(pc.fill_null(placed["start_ns"], 0).to_numpy())
    wait = np.asarray(pc.fill_null(placed["wait_ns"], 0).to_numpy())
    each = ((line, ranks == line.rank) for line in timelines)
    return pa.concat_tables(
        [ACCOUNTS.empty_table(), *(_rank(line, start[m], wait[m], clock) for line, m in each)]
    )


def _rank(line: Timeline, start: np.ndarray, wait: np.ndarray, clock: Clock) -> pa.Table:
    waiting = union(
        np.r_[line.compute.start, start].astype(np.int64),
        np.r_[line.compute.end, start + wait].astype(np.int64),
    )
    begin, end = line.begin, line.end
    compute = line.compute.within(begin, end)
    with_communication = line.compute_or_communication.within(begin, end)
    busy = line.busy.within(begin, end)
    columns = {
        "rank": np.full(len(begin), line.rank),
        "step": line.step,
        "begin_ns": begin,
        "end_ns": end,
        "aligned_begin_ns": clock.align(line.rank, begin),
        "duration_ns": end - begin,
        "compute_ns": compute,
        "exposed_communication_ns": with_communication - compute,
        "exposed_copy_ns": busy - with_communication,
        "idle_ns": end - begin - busy,
        "communication_ns": line.communication.within(begin, end),
        "exposed_wait_ns": waiting.within(begin, end) - compute,
    }
    return pa.table({k: pa.array(v, ACCOUNTS.field(k).type) for k, v in columns.items()}).cast(
        ACCOUNTS
    )


#: columns of `by_call`
COMMUNICATION, EXPOSED, WAITING = range(3)


def calls(dataset: Dataset) -> list[Ints]:
    """For each rank: the row of the placed table of each activity, -1 where it has none.

    Of several calls in one kernel the first.
    """
    return dataset.cached("calls", lambda: [_calls(dataset, line) for line in dataset.timelines])


def _calls(dataset: Dataset, line: Timeline) -> Ints:
    c = dataset.collectives
    mine = c.of(line.rank)
    mine = mine[c.has[mine]]
    starts, first = np.unique(c.start[mine], return_index=True)
    out = np.full(len(line.start), -1, dtype=np.int64)
    if len(starts):
        at = np.minimum(np.searchsorted(starts, line.start), len(starts) - 1)
        known = (line.kind == COLLECTIVE) & (starts[at] == line.start)
        out[known] = mine[first[at[known]]]
    return out


def activities_of(dataset: Dataset, job: Replay, rows: Bools) -> Bools:
    """Which activities of the replay are calls among `rows` (a mask of the placed table)."""
    call = call_of(dataset, job)
    return np.asarray((call >= 0) & rows[call])


def call_of(dataset: Dataset, job: Replay) -> Ints:
    """The row of the placed table of each activity of the replay, -1 where it has none."""
    out = np.full(len(job.row), -1, dtype=np.int64)
    for k, each in enumerate(calls(dataset)):
        mine = job.rank == k
        out[mine] = each[job.row[mine]]
    return out


def by_call(dataset: Dataset) -> Ints:
    """Communication, its exposed part, and the waiting in that (ns), of the evidence steps.

    [rows of the placed table + 1, 3]: the last row is of kernels without a call. Each moment is
    counted once, in the call that began first, so that sums over a rank's calls are what its
    accounts say.
    """
    return dataset.cached("by call", lambda: _by_call(dataset))


def _by_call(dataset: Dataset) -> Ints:
    c = dataset.collectives
    out = np.zeros((len(c.rank) + 1, 3), dtype=np.int64)
    for line, call in zip(dataset.timelines, calls(dataset), strict=True):
        rows = np.flatnonzero(line.kind == COLLECTIVE)
        rows = rows[np.argsort(line.start[rows], kind="stable")]
        until = np.maximum.accumulate(line.stop[rows])
        begin = np.maximum(line.start[rows], np.r_[line.start[rows][:1], until[:-1]])
        rows, begin, until = (v[begin < until] for v in (rows, begin, until))
        mine = c.of(line.rank)
        waits = union(c.start[mine], c.start[mine] + c.wait[mine])
        edges = np.unique(np.r_[begin, until, line.begin, line.end, waits.start, waits.end])
        low, high = edges[:-1], edges[1:]
        at = np.searchsorted(begin, low, side="right") - 1
        step = np.searchsorted(line.begin, low, side="right") - 1
        keep = (at >= 0) & (step >= 0) & (low < line.end[-1])
        keep[keep] &= low[keep] < until[at[keep]]
        keep[keep] &= np.isin(line.step[step[keep]], dataset.evidence_steps)
        low, high, of = low[keep], high[keep], call[rows[at[keep]]]
        exposed = high - low - line.compute.within(low, high)
        waiting = np.where(waits.within(low, high) > 0, exposed, 0)
        np.add.at(out, of, np.stack([high - low, exposed, waiting], axis=1))
    return out
