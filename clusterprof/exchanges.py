"""All-to-alls that reports give as Sends and Recvs: one kernel for all of a rank's calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.columns import (
    Bools,
    Ints,
    begins,
    combined,
    connected,
    first_at_or_after,
    first_by,
    integers,
    order_by,
    preceding,
    running_maximum,
    sum_by,
)

#: the operation of what `whole` puts together, and its `source`
OPERATION, MADE = "AllToAll", "exchange"


def exchanges(rank: Ints, kernel: Ints, is_send: Bools, collective: Ints, matched: Bools) -> Bools:
    """Which of these Sends and Recvs with a kernel are an all-to-all's.

    Its kernel sends to many, or to its own rank too. A pipeline's stage sends to two at most, the
    ones before and behind it.
    """
    many = sum_by(kernel, is_send) > 2
    pairs = np.flatnonzero(matched)
    pairs = pairs[order_by(collective[pairs])]
    first, second = pairs[:-1], pairs[1:]
    own = (collective[first] == collective[second]) & (rank[first] == rank[second])
    many[kernel[second[own]]] = True
    return np.asarray(many[kernel], dtype=bool)


def whole(table: pa.Table) -> pa.Table:
    """A placed table in which each rank's part of an all-to-all is one row and not many.

    The row has the longest of its calls' waits, with the rank that it is for; its bytes are all
    that the rank sends, or receives where that is more. What belongs together has one new number.
    """
    names = table["operation"].cast(pa.string())
    candidate = pc.and_(
        pc.is_in(names, pa.array(["Send", "Recv"])), pc.is_valid(table["start_ns"])
    ).to_numpy()
    rows = np.flatnonzero(candidate)
    if not rows.size:
        return table
    calls = table.take(pa.array(rows))
    rank, start, stream, collective = (
        integers(calls, name) for name in ("rank", "start_ns", "stream", "collective")
    )
    is_send = np.asarray(pc.equal(calls["operation"].cast(pa.string()), "Send").to_numpy())
    matched = np.asarray(pc.equal(calls["state"].cast(pa.string()), "matched").to_numpy())
    # calls of one NCCL group share one kernel
    kernel = combined(rank, start, stream)
    exchanged = exchanges(rank, kernel, is_send, collective, matched)
    if not exchanged.any():
        return table
    rest = np.setdiff1d(np.arange(table.num_rows), rows[exchanged])
    rows, is_send = rows[exchanged], is_send[exchanged]
    number = np.unique(kernel[exchanged], return_inverse=True)[1]
    waits, size = integers(table, "wait_ns", -1)[rows], integers(table, "message_bytes")[rows]
    longest = rows[first_by(number, -waits)]
    count = len(longest)
    sent, received = (sum_by(number, size * way) for way in (is_send, ~is_send))
    joined = connected(number, np.unique(collective[exchanged], return_inverse=True)[1], count)
    columns = {
        "collective": pa.array(joined + integers(table, "collective").max() + 1),
        "operation": pa.array([OPERATION] * count),
        "source": pa.array([MADE] * count),
        "message_bytes": pa.array(np.maximum(sent, received).astype(np.int64)),
    }
    parts = table.take(pa.array(longest))
    arrays = [columns.get(name, parts[name]) for name in table.column_names]
    parts = pa.table(arrays, table.column_names).cast(table.schema)
    return pa.concat_tables([table.take(pa.array(rest)), parts]).unify_dictionaries()


def certain_waits(table: pa.Table, uncertainties: Mapping[int, int]) -> Ints:
    """How long (ns) each row of a placed table waits, of each kernel that which waits longest.

    Zero elsewhere, and where it is no longer than the two clocks may err (`uncertainties`, ns).
    """
    rank, last, start = (integers(table, name) for name in ("rank", "last_rank", "start_ns"))
    wait, kernel = integers(table, "wait_ns", -1), combined(rank, start, integers(table, "stream"))
    longest = np.zeros(table.num_rows, dtype=bool)
    longest[first_by(kernel, -wait)] = True
    highest = int(max(rank.max(), last.max()))
    bound = np.array([uncertainties.get(rank, 0) for rank in range(highest + 1)], dtype=np.int64)
    return np.where(longest & (wait > bound[rank] + bound[last]), wait, 0)


def within_steps(
    start: Ints, wait: Ints, step: Ints, began_ns: Mapping[int, int]
) -> tuple[Ints, Ints]:
    """Begin and length (ns) of each wait from the begin of its step on, all that is of the step.

    A receive may be posted long before its step; of a step without a begin the wait is as it was.
    """
    numbers = np.array(sorted(began_ns), np.int64)
    if not len(numbers):
        return start, wait
    began = np.array([began_ns[number] for number in numbers.tolist()], np.int64)
    row = first_at_or_after(numbers, step).clip(max=len(numbers) - 1)
    early = np.where(numbers[row] == step, np.clip(began[row] - start, 0, wait), 0)
    return start + early, wait - early


def counted_once(start: Ints, wait: Ints, *keys: Ints) -> Ints:
    """What each wait (ns, from `start` on) adds to the time that those of equal `keys` take.

    A rank waits for several calls at the same time: no moment of it counts twice.
    """
    group = combined(*keys)
    order = order_by(group, start)
    group, begin, end = group[order], start[order], (start + wait)[order]
    latest_end = running_maximum(end, group)
    reached = np.where(begins(group), begin, preceding(latest_end, 0))
    added = np.empty_like(wait)
    added[order] = np.maximum(end - np.maximum(begin, reached), 0)
    return added
