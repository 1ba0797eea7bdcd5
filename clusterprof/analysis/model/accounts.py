"""Where each step's time went on each rank: an account that closes to the nanosecond."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock import Clock
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.timeline import Timeline

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
