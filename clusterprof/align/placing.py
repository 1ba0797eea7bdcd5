"""Matched collectives on the reference rank's clock: arrival, last arrival, wait, transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.match.matched import PLACED

if TYPE_CHECKING:
    from clusterprof.align.clock import Clock


def place(matched: pa.Table, clock: Clock) -> pa.Table:
    """Add aligned times to `matched` (schema MATCHED); gives the schema PLACED.

    A collective's arrival on a rank is the aligned start of its device kernel (gloo: of its
    span); its last arrival the latest over the members; a member's wait its last arrival minus
    its own arrival, at most its own duration (clocks are known to within a bound only);
    transfer is what follows the last arrival. Assumes that all members that matter have a
    report: the arrival of one that has none counts as transfer here.
    """
    collective = matched["collective"].to_numpy()
    rank = matched["rank"].to_numpy()
    has = np.asarray(
        pc.and_(pc.is_valid(matched["start_ns"]), pc.is_valid(matched["end_ns"])).to_numpy()
    )
    start = np.asarray(pc.fill_null(matched["start_ns"], 0).to_numpy()).copy()
    end = np.asarray(pc.fill_null(matched["end_ns"], 0).to_numpy()).copy()
    for one in np.unique(rank):
        at = rank == one
        start[at], end[at] = clock.align(int(one), start[at]), clock.align(int(one), end[at])
    whole = np.asarray(pc.equal(matched["state"].cast(pa.string()), "matched").to_numpy()) & has
    columns = _arrivals(collective, rank, start, end, whole)
    added = {
        "aligned_start_ns": pa.array(start, pa.int64(), mask=~has),
        "aligned_end_ns": pa.array(end, pa.int64(), mask=~has),
        **{
            name: pa.array(values, PLACED.field(name).type, mask=~whole)
            for name, values in columns.items()
        },
    }
    table = matched
    for name in PLACED.names[len(matched.schema) :]:
        table = table.append_column(PLACED.field(name), added[name])
    return table


def _arrivals(
    collective: np.ndarray, rank: np.ndarray, start: np.ndarray, end: np.ndarray, whole: np.ndarray
) -> dict[str, np.ndarray]:
    """Per row: last arrival, its rank, lateness, wait, transfer; all zero where not `whole`."""
    out = {
        name: np.zeros(len(start), dtype=np.int64)
        for name in ("last_arrival_ns", "last_rank", "lateness_ns", "wait_ns", "transfer_ns")
    }
    rows = np.flatnonzero(whole)
    if not len(rows):
        return out
    order = rows[np.lexsort((start[rows], collective[rows]))]
    ids, first = np.unique(collective[order], return_index=True)
    last = np.r_[first[1:], len(order)] - 1
    size = last - first + 1
    late = order[last]
    before = order[np.maximum(last - 1, first)]
    of = np.repeat(np.arange(len(ids)), size)
    arrival = start[late][of]
    out["last_arrival_ns"][order] = arrival
    out["last_rank"][order] = rank[late][of]
    out["lateness_ns"][order] = (start[late] - start[before])[of]
    wait = np.minimum(arrival - start[order], end[order] - start[order])
    out["wait_ns"][order] = wait
    out["transfer_ns"][order] = end[order] - start[order] - wait
    return out
