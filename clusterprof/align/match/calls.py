"""One rank's collective calls as arrays, ready to be compared with another rank's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.tables import RankTables

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: stands for "not in the report" in integer arrays
UNKNOWN = -1

#: operations whose member cannot end before every member has started, because each member's
#: output depends on each member's input
SYNCHRONISING = frozenset({"AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Barrier"})
#: operations whose message size may differ between the members of one call
UNEVEN = frozenset({"AllToAll", "Gather", "Scatter", "SendRecv", "Barrier"})
POINT_TO_POINT = frozenset({"Send", "Recv"})


@dataclass(frozen=True)
class Calls:
    """One rank's collective calls, one element per call, in issue order.

    `start`/`end` are 0 where `has` is false (no device kernel was found).
    """

    rank: int
    call: Ints
    operation: npt.NDArray[np.object_]
    #: communicator id (with its members where listed), None where the report has none
    communicator: npt.NDArray[np.object_]
    #: global ranks of the communicator, None where not listed
    members: npt.NDArray[np.object_]
    stream: Ints
    size: Ints
    root: Ints
    peer: Ints
    group: Ints
    issue: Ints
    start: Ints
    end: Ints
    has: Bools
    step: Ints
    #: the step where the program numbered it, else -1: what may show which call is which
    marked: Ints
    source: npt.NDArray[np.object_]
    reason: npt.NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.call)


def _ints(table: pa.Table, name: str, missing: int = UNKNOWN) -> Ints:
    column = pc.fill_null(table[name], pa.scalar(missing, table.schema.field(name).type))
    return np.asarray(column.to_numpy(), dtype=np.int64)


def _objects(values: list[Any]) -> npt.NDArray[np.object_]:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def steps_of(tables: RankTables, times: Ints) -> Ints:
    """Return the step in whose host range each of `times` (ns, the rank's clock) lies, or -1."""
    if not tables.steps.num_rows or not len(times):
        return np.full(len(times), UNKNOWN, dtype=np.int64)
    begin, end = _ints(tables.steps, "begin_ns"), _ints(tables.steps, "end_ns")
    number = _ints(tables.steps, "step")
    at = np.searchsorted(begin, times, side="right") - 1
    inside = (at >= 0) & (times <= end[np.maximum(at, 0)])
    return np.where(inside, number[np.maximum(at, 0)], UNKNOWN)


def _marked(tables: RankTables) -> bool:
    """Whether the program numbered the steps. Those found by the optimizer's work count from 0 in
    each report; once they are numbered alike it is by the very matches that they would confirm.
    """
    sources = tables.steps["source"].cast(pa.string())
    return bool(len(sources)) and sources[0].as_py() != "optimizer"


def _issued(issue: Ints, start: Ints, stream: Ints, steps: Ints) -> Ints:
    """Return when each call was issued (ns); where that is unknown (0), by its stream.

    A stream runs in the order of issue: a call was issued before the next one on its stream, and
    one with none before it that is known, before the window and its steps. Where the report knows
    of none (gloo) the start is all there is.
    """
    known = issue > 0
    if not known.any() or known.all():
        return np.where(known, issue, start)
    before = int(min([issue[known].min(), *steps[:1]])) - 1
    out = np.where(known, issue, start)
    for one in np.unique(stream[~known]):
        rows = np.flatnonzero(stream == one)
        rows = rows[np.argsort(start[rows], kind="stable")]
        later = np.minimum.accumulate(np.where(known, issue, out)[rows][::-1])[::-1]
        head = np.cumsum(known[rows]) == 0
        out[rows] = np.where(
            known[rows], out[rows], np.where(head, np.minimum(later, before), later)
        )
    return out


def read(tables: RankTables) -> Calls:
    """Return the collective calls of one rank, sorted by issue (by start where not issued)."""
    table = tables.collective_calls
    start, end = _ints(table, "start_ns", 0), _ints(table, "end_ns", 0)
    has = np.asarray(
        pc.and_(pc.is_valid(table["start_ns"]), pc.is_valid(table["end_ns"])).to_numpy()
    )
    stream = _ints(table, "stream")
    issue = _issued(
        _ints(table, "issue_start_ns", 0), start, stream, _ints(tables.steps, "begin_ns")
    )
    members = _objects(
        [None if m is None else tuple(sorted(m)) for m in table["members"].to_pylist()]
    )
    communicator = _objects(
        [
            # a process group's name ("1") may mean other ranks elsewhere: its members identify it
            name if name is None or m is None or "[" in name else f"{name}{list(m)}"
            for name, m in zip(table["communicator"].to_pylist(), members, strict=True)
        ]
    )
    operation = _objects(table["operation"].cast(pa.string()).to_pylist())
    size = _ints(table, "message_bytes")
    size = np.where(np.isin(operation.astype(str), list(UNEVEN)), UNKNOWN, size)
    order = np.lexsort((start, issue))
    step = steps_of(tables, issue)
    whole = Calls(
        rank=tables.rank,
        call=_ints(table, "call"),
        operation=operation,
        communicator=communicator,
        members=members,
        stream=stream,
        size=size,
        root=_ints(table, "root"),
        peer=_ints(table, "peer"),
        group=_ints(table, "group"),
        issue=issue,
        start=start,
        end=end,
        has=has,
        step=step,
        marked=step if _marked(tables) else np.full(len(issue), UNKNOWN),
        source=_objects(table["source"].cast(pa.string()).to_pylist()),
        reason=_objects(table["reason"].to_pylist()),
    )
    return take(whole, order)


def take(calls: Calls, rows: Ints | Bools) -> Calls:
    """Return the calls of `rows` (indices or a mask), in that order."""
    fields = {
        name: getattr(calls, name)[rows] for name in calls.__dataclass_fields__ if name != "rank"
    }
    return Calls(rank=calls.rank, **fields)
