"""Where each step's time went on each rank: an account that closes to the nanosecond.

And which call it went to: each moment of communication belongs to one call. And why each GPU does
not compute, after NVIDIA's analysis of Megatron-Bridge: exposed communication is an upper bound of
what overlapping could save; blocking, beside a compute kernel that was launched already, is saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import threads
from clusterprof.align.clock import Clock
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE, COPY, MEMSET, Timelines, union
from clusterprof.columns import (
    ActivityRows,
    Ints,
    PlacedRows,
    first_places,
    order_by,
    places,
    preceding,
    row_of,
    rows_between,
    sum_by,
    where_known,
)
from clusterprof.results import ComputeAbsent
from clusterprof.tables import required

#: One row per rank and step. `duration = compute + exposed_communication + exposed_copy + idle`.
#: `begin_ns` and `end_ns` are on the rank's own wall clock, `aligned_begin_ns` on the reference
#: rank's. Without compute no kernel is launched (`unlaunched_ns`), or one is and waits, and
#: communication runs (`blocking_ns`).
ACCOUNTS = pa.schema(
    [required("rank", pa.int32())]
    + [
        required(name, pa.int64())
        for name in (
            "step", "begin_ns", "end_ns", "aligned_begin_ns", "duration_ns", "compute_ns",
            "exposed_communication_ns", "exposed_copy_ns", "idle_ns", "communication_ns",
            "exposed_wait_ns", "unlaunched_ns", "blocking_ns",
        )
    ]
)  # fmt: skip


def accounts(d: Timelines, ranks: Sequence[int], placed: pa.Table, clock: Clock) -> pa.Table:
    """Return the account (schema ACCOUNTS) of each of `ranks`, whose devices did `d`, and step.

    Compute is the union of all kernels that do not communicate; exposed communication the union
    of communicating kernels minus compute; exposed copies the union of copies and memsets minus
    both; idle the rest. Each is a difference of unions of one growing set, so they add up
    exactly, with any number of concurrent streams. Exposed wait is the part of the exposed
    communication before the last arrival of its collective (`placed`: schema PLACED).
    """
    if not len(ranks):
        return ACCOUNTS.empty_table()
    numbers = np.asarray(ranks)
    member = row_of(numbers, placed["rank"].to_numpy())
    start = d.axis.of(member, pc.fill_null(placed["start_ns"], 0).to_numpy())
    stop = start + pc.fill_null(placed["wait_ns"], 0).to_numpy()

    def spent(block: tuple[int, int]) -> dict[str, Ints]:
        """What the steps of some ranks last, and what is spent in them."""
        steps, rows = rows_between(d.rank, *block), (member >= block[0]) & (member < block[1])
        compute, communication, copies = d.ran(*block, (COMPUTE,), (COLLECTIVE,), (COPY, MEMSET))
        # when compute kernels started and when they were launched: rows 0 and 3 of four times
        started, launch = d.on_axis((0, 3), *block)[:, d.kind[d.rows(*block)] == COMPUTE]
        launched, waits = union(launch, started) | compute, union(start[rows], stop[rows])
        either = compute | communication
        sets = (compute, either, either | copies, compute | waits, launched)
        begin, end = d.begin[steps], d.end[steps]
        computes, both, busy, waiting, launched_ns = (ran.within(begin, end) for ran in sets)
        # communication while no compute kernel is launched keeps none waiting
        blocks_none = (launched | communication).within(begin, end) - launched_ns
        return {
            "duration_ns": end - begin,
            "compute_ns": computes,
            "exposed_communication_ns": both - computes,
            "exposed_copy_ns": busy - both,
            "idle_ns": end - begin - busy,
            "communication_ns": communication.within(begin, end),
            "exposed_wait_ns": waiting - computes,
            "unlaunched_ns": end - begin - launched_ns,
            "blocking_ns": both - computes - blocks_none,
        }

    parts, (_, begin) = threads.each(spent, d.blocks()), d.axis.back(d.begin)
    columns = {
        "rank": numbers[d.rank],
        "step": d.step,
        "begin_ns": begin,
        "end_ns": begin + d.end - d.begin,
        "aligned_begin_ns": clock.align(numbers[d.rank], begin),
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    }
    return pa.table(columns).select(ACCOUNTS.names).cast(ACCOUNTS)


def compute_absent(dataset: Dataset) -> list[ComputeAbsent]:
    """Each rank's time without compute per steady-state step (ns), as in its accounts."""
    table, entries = dataset.accounts, list[ComputeAbsent]()
    table = table.filter(pc.is_in(table["step"], pa.array(dataset.steady_steps, pa.int64())))
    names = [name for name in ACCOUNTS.names if name.endswith("_ns")]
    means = table.group_by("rank", use_threads=False).aggregate([(n, "mean") for n in names])
    for mean in means.to_pylist():
        absent = mean["duration_ns_mean"] - mean["compute_ns_mean"]
        unlaunched, blocking = mean["unlaunched_ns_mean"], mean["blocking_ns_mean"]
        # a processor runs its operators itself: none is launched before it runs
        on_host = dataset.timelines.on_host[dataset.place[mean["rank"]]]
        entries.append({
            "rank": mean["rank"],
            "compute_absent_ns": round(absent),
            "communication_ns": round(mean["communication_ns_mean"]),
            "exposed_communication_ns": round(mean["exposed_communication_ns_mean"]),
            "launch_bound_ns": None if on_host else round(unlaunched),
            "blocking_ns": None if on_host else round(blocking),
            "dependency_stalled_ns": None if on_host else round(absent - unlaunched - blocking),
        })  # fmt: skip
    return entries


#: columns of `by_call`
COMMUNICATION, EXPOSED, WAITING = range(3)


@once
def call_of(dataset: Dataset) -> PlacedRows:
    """The row of the placed table of each of `dataset.activities`, -1 where it has none.

    Of several calls in one kernel the first.
    """
    activity = activity_of(dataset)
    rows = np.flatnonzero(activity >= 0)[::-1]
    call: PlacedRows = np.full(len(dataset.activities.rank), -1, dtype=np.int32)
    call[activity[rows]] = rows
    return call


@once
def activity_of(dataset: Dataset) -> ActivityRows:
    """The activity of each row of the placed table, -1 where it has none.

    It is the kernel that begins when the row does; of several the one on its stream, if one is: a
    report may name gloo's streams by their threads, and calls' by their groups.
    """
    c, a, axis = dataset.collectives, dataset.activities, dataset.axis
    kernels = np.flatnonzero(a.kind == COLLECTIVE)
    starts = axis.of(a.rank[kernels], a.start[kernels])
    wanted = axis.of(row_of(dataset.ranks, c.rank), c.aligned_start)
    streams = a.column("stream")[kernels]
    _, start = places(np.concatenate((starts, wanted)))
    different, stream = places(np.concatenate((streams, c.stream)))
    both = start * different.size + stream
    exact, begun = (first_places(*np.split(keys, [kernels.size])) for keys in (both, start))
    kernel = np.where(exact >= 0, exact, begun)
    return np.where(c.has, where_known(kernels, kernel, -1), -1)


@once
def by_call(dataset: Dataset) -> Ints:
    """Communication, its exposed part, and the waiting in that (ns), of the evidence steps.

    [rows of the placed table + 1, 3]: the last row is of kernels without a call. Each moment is
    counted once, in the call that began first, so that sums over a rank's calls are what its
    accounts say.
    """
    c, d, call = dataset.collectives, dataset.activities.lines, call_of(dataset)
    member = row_of(dataset.ranks, c.rank)
    waits, steady = d.axis.of(member, c.start), np.isin(d.step, dataset.evidence_steps)

    def spent(ranks: tuple[int, int]) -> Ints:
        k, until = ranks
        (start, stop), kind = d.on_axis((0, 1), k, until), d.kind[d.rows(k, until)]
        rows = np.flatnonzero(kind == COLLECTIVE)
        rows = rows[order_by(start[rows])]
        end = np.maximum.accumulate(stop[rows])
        begin = np.minimum(np.maximum(start[rows], preceding(end, 0)), end)
        # what is of no step, what computes, and what waits, one after the other, is left out
        steps, calls = steady & (d.rank >= k) & (d.rank < until), (member >= k) & (member < until)
        no_step = union(np.append(0, d.end[steps]), np.append(d.begin[steps], 2**62))
        computes = no_step | union(start[kind == COMPUTE], stop[kind == COMPUTE])
        waiting = computes | union(waits[calls], (waits + c.wait)[calls])
        left_out = (no_step, computes, waiting)
        ran, exposed, moved = (end - begin - without.within(begin, end) for without in left_out)
        return np.stack([call[d.rows(k, until)][rows], ran, exposed, exposed - moved])

    every = [np.zeros((4, 0), dtype=np.int64), *threads.each(spent, d.blocks())]
    row, *spans = np.concatenate(every, axis=1)
    # kernels without a call (-1) are in the last row
    size = len(c.rank) + 1
    return np.stack([sum_by(row % size, ns, size) for ns in spans], axis=1).astype(np.int64)
