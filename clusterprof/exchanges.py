"""All-to-alls that reports give as Sends and Recvs: one kernel for all of a rank's calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: the operation of what `whole` puts together, and its `source`
OPERATION, MADE = "AllToAll", "exchange"


def kernels(rank: Ints, start: Ints, stream: Ints) -> Ints:
    """Each call's kernel as a number, from 0: calls of one NCCL group share one."""
    _, number = np.unique(np.stack([rank, start, stream]), axis=1, return_inverse=True)
    return np.asarray(number.reshape(-1), dtype=np.int64)


def exchanges(rank: Ints, kernel: Ints, is_send: Bools, collective: Ints, matched: Bools) -> Bools:
    """Which of these Sends and Recvs with a kernel are an all-to-all's.

    Its kernel sends to many, or to its own rank too. A pipeline's stage sends to two at most, the
    ones before and behind it.
    """
    many = np.bincount(kernel, is_send) > 2
    pairs = np.flatnonzero(matched)
    pairs = pairs[np.argsort(collective[pairs], kind="stable")]
    one, other = pairs[:-1], pairs[1:]
    own = (collective[one] == collective[other]) & (rank[one] == rank[other])
    many[kernel[other[own]]] = True
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
        _ints(calls, name) for name in ("rank", "start_ns", "stream", "collective")
    )
    is_send = np.asarray(pc.equal(calls["operation"].cast(pa.string()), "Send").to_numpy())
    matched = np.asarray(pc.equal(calls["state"].cast(pa.string()), "matched").to_numpy())
    kernel = kernels(rank, start, stream)
    mine = exchanges(rank, kernel, is_send, collective, matched)
    if not mine.any():
        return table
    rest = np.setdiff1d(np.arange(table.num_rows), rows[mine])
    chosen, number = rows[mine], np.unique(kernel[mine], return_inverse=True)[1].reshape(-1)
    count = int(number.max()) + 1
    waits = _ints(table, "wait_ns", -1)[chosen]
    order = np.lexsort((-waits, number))
    longest = chosen[order[np.searchsorted(number[order], np.arange(count))]]
    size, is_send = _ints(table, "message_bytes")[chosen], is_send[mine]
    sent, received = (np.bincount(number, size * each) for each in (is_send, ~is_send))
    joined = _joined(number, collective[mine], count) + _ints(table, "collective").max() + 1
    made = table.take(pa.array(longest))
    columns = {
        "collective": pa.array(joined),
        "operation": pa.array([OPERATION] * count),
        "source": pa.array([MADE] * count),
        "message_bytes": pa.array(np.maximum(sent, received).astype(np.int64)),
    }
    for name, values in columns.items():
        field = table.schema.field(name)
        at = table.schema.get_field_index(name)
        made = made.set_column(at, field, _cast(values, field.type))
    return pa.concat_tables([table.take(pa.array(rest)), made]).unify_dictionaries()


def certain_waits(table: pa.Table, uncertainties: Mapping[int, int]) -> Ints:
    """How long (ns) each row of a placed table waits, of each kernel that which waits longest.

    Zero elsewhere, and where it is no longer than the two clocks may err (`uncertainties`, ns).
    """
    rank, last, start = (_ints(table, name) for name in ("rank", "last_rank", "start_ns"))
    wait, kernel = _ints(table, "wait_ns", -1), kernels(rank, start, _ints(table, "stream"))
    order = np.lexsort((-wait, kernel))
    longest = np.zeros(table.num_rows, dtype=bool)
    longest[order[np.unique(kernel[order], return_index=True)[1]]] = True
    highest = int(max(rank.max(), last.max()))
    bound = np.array([uncertainties.get(rank, 0) for rank in range(highest + 1)], dtype=np.int64)
    return np.where(longest & (wait > bound[rank] + bound[last]), wait, 0)


def _joined(kernel: Ints, collective: Ints, count: int) -> Ints:
    """For each kernel the first of those that its calls join it with, directly or not."""
    pair = np.unique(collective, return_inverse=True)[1].reshape(-1)
    out = np.arange(count)
    while True:
        least = np.full(int(pair.max()) + 1, count)
        np.minimum.at(least, pair, out[kernel])
        now = out.copy()
        np.minimum.at(now, kernel, least[pair])
        if np.array_equal(now, out):
            return out
        out = now


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    return (
        values.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else values.cast(kind)
    )


def _ints(table: pa.Table, name: str, missing: int = 0) -> Ints:
    return np.asarray(pc.fill_null(table[name], missing).to_numpy(), dtype=np.int64)
