"""Matched collectives on the reference rank's clock: arrival, last arrival, wait, transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from clusterprof.align.match import PLACED
from clusterprof.align.time_stamps import timed
from clusterprof.columns import Stretches, integers, order_by, texts

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
    collective, rank = integers(matched, "collective"), integers(matched, "rank")
    has = timed(matched)
    start, end = (clock.align(rank, integers(matched, name)) for name in ("start_ns", "end_ns"))
    whole = (texts(matched, "state") == "matched") & has
    columns = _arrivals(collective, rank, start, end, whole)
    columns |= {"aligned_start_ns": start, "aligned_end_ns": end}
    for field in list(PLACED)[len(matched.schema) :]:
        mask = ~has if field.name.startswith("aligned_") else ~whole
        matched = matched.append_column(field, pa.array(columns[field.name], field.type, mask=mask))
    return matched


def _arrivals(
    collective: np.ndarray, rank: np.ndarray, start: np.ndarray, end: np.ndarray, whole: np.ndarray
) -> dict[str, np.ndarray]:
    """Per row: last arrival, its rank, lateness, wait, transfer; 0 for rows that are not `whole`,
    that is matched, and with times.

    Lateness is by how much the last came later than the last but one: what that rank alone costs.
    """
    columns = {
        name: np.zeros(len(start), dtype=np.int64)
        for name in ("last_arrival_ns", "last_rank", "lateness_ns", "wait_ns", "transfer_ns")
    }
    rows = np.flatnonzero(whole)
    if not len(rows):
        return columns
    order = rows[order_by(collective[rows], start[rows])]
    calls = Stretches.of(collective[order])
    call = calls.of_row
    late, before = order[calls.last], order[np.maximum(calls.last - 1, calls.first)]
    columns["last_arrival_ns"][order] = start[late][call]
    columns["last_rank"][order] = rank[late][call]
    columns["lateness_ns"][order] = (start[late] - start[before])[call]
    length = end[order] - start[order]
    wait = np.minimum(start[late][call] - start[order], length)
    columns["wait_ns"][order] = wait
    columns["transfer_ns"][order] = length - wait
    return columns
