"""Collective calls as the matching takes and gives them: each rank's arrays, and one table.

A rank's `Calls` are arrays, ready to be compared with another rank's. What is found goes into
`MatchedRows`, which makes the table `MATCHED` of all ranks' calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof import words
from clusterprof.align.time_stamps import issue_times, timed
from clusterprof.columns import (
    Bools,
    CallPlaces,
    CallRows,
    CollectiveNumbers,
    CommonPlaces,
    Ints,
    Objects,
    StepNumbers,
    integers,
    last_at_or_before,
    least_by,
    order_by,
    places,
    texts,
    where_known,
)
from clusterprof.ingest.operations import SYNCHRONISING
from clusterprof.tables import NAME, RankTables, required

#: stands for "not in the report" in integer arrays
UNKNOWN = -1

#: operations whose message size may differ between the members of one call
_UNEVEN = ("AllToAll", "Gather", "Scatter", "SendRecv", "Barrier")


@dataclass(frozen=True)
class Calls:
    """One rank's collective calls, one element per call, in issue order.

    `start`/`end` are 0 where `has` is false (no device kernel was found).
    """

    rank: int
    call: CallRows
    operation: Objects
    #: communicator id (with its members where listed), None where the report has none
    communicator: Objects
    #: global ranks of the communicator, None where not listed
    members: Objects
    #: how many members the communicator has, by the report; -1 where it does not tell
    count: Ints
    stream: Ints
    size: Ints
    root: Ints
    peer: Ints
    group: Ints
    #: the profiler's id of the operation, -1 where it gives none
    identity: Ints
    issue: Ints
    start: Ints
    end: Ints
    has: Bools
    step: StepNumbers
    #: the step where the program numbered it, else -1: what may show which call is which
    marked: StepNumbers
    source: Objects
    reason: Objects

    def __len__(self) -> int:
        return len(self.call)

    def take(self, rows: CallPlaces | Bools | slice) -> Calls:
        """Return some of the calls, in the order of `rows`."""
        names = [name for name in self.__dataclass_fields__ if name != "rank"]
        return Calls(rank=self.rank, **{name: getattr(self, name)[rows] for name in names})

    def without(self, rows: CallPlaces | slice) -> Calls:
        """Return the calls but those of `rows`."""
        return self.take(np.delete(np.arange(len(self)), rows))

    def by(self, name: str) -> dict[Any, Calls]:
        """Return the calls of each value of a column, in order of appearance."""
        values = getattr(self, name)
        return {value: self.take(values == value) for value in dict.fromkeys(values.tolist())}

    def streams(self) -> list[Calls]:
        """Return the calls of each stream, the lowest first."""
        return [calls for _, calls in sorted(self.by("stream").items())]

    @cached_property
    def most_members(self) -> float:
        """How many members the communicator of these calls has at most; infinite if none tells."""
        stated = int(self.count.max(initial=UNKNOWN))
        return stated if stated > 0 else math.inf

    @cached_property
    def synchronising(self) -> Bools:
        """Which calls no member can end before all have started."""
        return np.isin(self.operation, SYNCHRONISING)

    @cached_property
    def directed(self) -> Bools:
        """Which calls are sends and receives."""
        return np.isin(self.operation, ("Send", "Recv"))


def steps_of(steps: pa.Table, times: Ints) -> StepNumbers:
    """Return the step (of `STEPS`) in which each of `times` (ns, the rank's clock) lies, or -1."""
    if not steps.num_rows:
        return np.full(len(times), UNKNOWN, dtype=np.int64)
    begin, end, number = (integers(steps, n) for n in ("begin_ns", "end_ns", "step"))
    row = last_at_or_before(begin, times)
    row[times > where_known(end, row, 0)] = -1
    return where_known(number, row, UNKNOWN)


def is_counted(tables: RankTables) -> bool:
    """Return whether the steps were found by the optimizer's work, and not numbered by the program.

    Those count from 0 in each report; once they are numbered alike it is by the very matches that
    they would confirm.
    """
    return bool(tables.steps.num_rows) and tables.steps["source"][0].as_py() == "optimizer"


def read(tables: RankTables) -> Calls:
    """Return the collective calls of one rank, sorted by issue (by start where not issued)."""
    table = tables.collective_calls
    start, stream = integers(table, "start_ns"), integers(table, "stream")
    stated = integers(table, "issue_start_ns")
    issue, is_stated = issue_times(stated, start, stream), stated > 0
    if is_stated.any() and not is_stated.all():
        # what nothing known comes before on its stream was issued before the window and its steps
        _, lane = places(stream)
        none = np.full(lane.max() + 1, np.iinfo(np.int64).max)
        first = least_by(lane[is_stated], start[is_stated], none)
        before = min([stated[is_stated].min(), *integers(tables.steps, "begin_ns")[:1]]) - 1
        head = ~is_stated & (start < first[lane])
        issue[head] = np.minimum(issue[head], before)
    communicator, lists = texts(table, "communicator"), table["members"]
    members = np.full(len(issue), None, dtype=object)
    for k, listed in enumerate(lists.to_pylist() if lists.null_count < len(lists) else ()):
        members[k] = None if listed is None else tuple(sorted(listed))
        # a process group's name ("1") may mean other ranks elsewhere: its members identify it
        if not (communicator[k] is None or listed is None or "[" in communicator[k]):
            communicator[k] += str(sorted(listed))
    operation, step = texts(table, "operation"), steps_of(tables.steps, issue)
    calls = Calls(
        rank=tables.rank,
        operation=operation,
        communicator=communicator,
        members=members,
        count=integers(table, "communicator_size", UNKNOWN),
        stream=stream,
        size=np.where(np.isin(operation, _UNEVEN), UNKNOWN, integers(table, "message_bytes", -1)),
        identity=integers(table, "operation_id", UNKNOWN),
        issue=issue,
        start=start,
        end=integers(table, "end_ns"),
        has=timed(table),
        step=step,
        marked=np.full(len(step), UNKNOWN) if is_counted(tables) else step,
        source=texts(table, "source"),
        reason=texts(table, "reason"),
        **{name: integers(table, name, UNKNOWN) for name in ("call", "root", "peer", "group")},
    )
    return calls.take(order_by(issue, start))


# -- what the matching gives ---------------------------------------------------------------------

#: One row per collective and rank. Times are still each rank's own wall clock.
MATCHED = pa.schema(
    [
        #: number of the logical operation; rows of one collective share it
        required("collective", pa.int64()),
        #: the report's id, or `inferred:<ranks>` where the reports have none
        required("communicator", pa.string()),
        required("operation", NAME),
        #: position within the communicator (point-to-point: within the pair), from 0
        required("order", pa.int64()),
        required("rank", pa.int32()),
        #: the row of this rank's `collective_calls`
        required("call", pa.int32()),
        #: `matched`: every profiled member has it; `incomplete`: a profiled member lacks it;
        #: `unmatched`: no other rank has it. The last two have a `reason`.
        required("state", NAME),
        pa.field("reason", pa.string()),
        #: confidence in the match, 0 to 1: 1.0 for ids with steps and times that agree
        required("confidence", pa.float64()),
        #: what the data dependency allows the clock to conclude. `both`: cannot end before
        #: every `both` and `source` member has started; `sink`: the same, but delays no member;
        #: `source`: may end at any time; `none`: nothing is known
        required("role", NAME),
        required("stream", pa.int64()),
        pa.field("message_bytes", pa.int64()),
        #: the step in whose host range the call was issued; null outside any step
        pa.field("step", pa.int64()),
        pa.field("group", pa.int32()),
        pa.field("issue_start_ns", pa.int64()),
        pa.field("start_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        required("source", NAME),
    ]
)

#: `MATCHED` with times on the reference rank's clock. `wait_ns` and `transfer_ns` are null
#: where the collective is not `matched` or has a single member: its last arrival is unknown.
PLACED = pa.schema(
    [
        *MATCHED,
        pa.field("aligned_start_ns", pa.int64()),
        pa.field("aligned_end_ns", pa.int64()),
        pa.field("last_arrival_ns", pa.int64()),
        pa.field("last_rank", pa.int32()),
        #: last arrival minus the second-to-last: what the last rank alone has cost
        pa.field("lateness_ns", pa.int64()),
        pa.field("wait_ns", pa.int64()),
        pa.field("transfer_ns", pa.int64()),
    ]
)

_ROOTED = {"Broadcast": ("source", "sink"), "Scatter": ("source", "sink")}
_ROOTED |= {"Reduce": ("sink", "source"), "Gather": ("sink", "source")}
#: columns of MATCHED that come from `Calls`, where their names differ
_FIELDS = {"message_bytes": "size", "issue_start_ns": "issue", "start_ns": "start", "end_ns": "end"}


class MatchedRows:
    """Collects the rows of a matched table; every call of every rank goes in exactly once."""

    def __init__(self) -> None:
        self._added: list[tuple[Calls, dict[str, Any]]] = []
        self._next = 0
        #: the communicators whose operations' ids contradict each other, and how
        self.contradicted: dict[str, str] = {}

    def _fresh(self, count: int) -> CollectiveNumbers:
        self._next += count
        return np.arange(self._next - count, self._next)

    def _add(
        self,
        calls: Calls,
        name: str,
        collective: CollectiveNumbers,
        order: CommonPlaces,
        **cells: Any,
    ) -> None:
        """Add calls with their `cells`: by column of MATCHED an array, or one value for all."""
        if len(calls):
            names = np.asarray(name, dtype=object)
            own = {"communicator": names, "collective": collective, "order": order}
            self._added.append((calls, {"rank": calls.rank, **own, **cells}))

    def unmatched(self, calls: Calls, name: str, reason: str) -> None:
        """Add calls that are matched with no other rank's, with the reason."""
        own = calls.reason
        self._add(
            calls,
            name,
            self._fresh(len(calls)),
            np.arange(len(calls)),
            state="unmatched",
            reason=np.where(own == None, reason, own),  # noqa: E711  (elementwise)
            confidence=0.0,
            role="none",
        )

    def pairs(self, name: str, send: Calls, recv: Calls, confidence: float) -> None:
        """Add Sends with the Recvs of another rank, one to one."""
        fresh, order, whole = self._fresh(len(send)), np.arange(len(send)), send.has & recv.has
        cells = {
            "state": np.where(whole, "matched", "incomplete"),
            "reason": np.where(whole, None, "one side has no device kernel"),  # type: ignore[call-overload]
            "confidence": confidence,
        }
        for calls, role in ((send, "source"), (recv, "sink")):
            self._add(calls, name, fresh, order, role=role, **cells)

    def collectives(
        self,
        name: str,
        members: Sequence[Calls],
        order: Sequence[CommonPlaces],
        confidence: float,
        roots: dict[int, int],
    ) -> None:
        """Add one communicator's calls, given where each member's are in the common `order`.

        `roots` turns the communicator's rank of a root into a global rank.
        """
        length = 1 + max((int(o.max()) for o in order if len(o)), default=-1)
        present, kernel = np.zeros((2, len(members), length), dtype=bool)
        for m, (calls, o) in enumerate(zip(members, order, strict=True)):
            present[m, o], kernel[m, o] = True, calls.has
        whole = kernel.all(axis=0)
        # a call that only one of several members has cannot be compared with anything
        single = present.sum(axis=0) == 1
        state = np.where(whole, "matched", np.where(single, "unmatched", "incomplete"))
        reason = np.full(length, None, dtype=object)
        ranks = np.asarray([calls.rank for calls in members])
        for k in np.flatnonzero(~whole):
            absent = ranks[~present[:, k]].tolist()
            problem = "not captured on" if absent else "no device kernel on"
            reason[k] = f"{problem} {words.ranks(absent or ranks[~kernel[:, k]].tolist())}"
        fresh = self._fresh(length)
        for calls, o in zip(members, order, strict=True):
            role = _roles(calls, roots)
            role[state[o] == "unmatched"] = "none"
            cells = {"state": state[o], "reason": reason[o], "confidence": confidence, "role": role}
            self._add(calls, name, fresh[o], o, **cells)

    def table(self) -> pa.Table:
        """Return everything collected so far, schema `MATCHED`, sorted by collective and rank."""
        if not self._added:
            return MATCHED.empty_table()
        table = pa.table({name: self._column(name) for name in MATCHED.names}, schema=MATCHED)
        order = order_by(table["collective"].to_numpy(), table["rank"].to_numpy())
        return table.take(pa.array(order))

    def _column(self, name: str) -> pa.Array:
        field = MATCHED.field(name)
        values = np.concatenate(
            [
                np.broadcast_to(cells[name], calls.call.shape)
                if name in cells
                else getattr(calls, _FIELDS.get(name, name))
                for calls, cells in self._added
            ]
        )
        if values.dtype.kind in "OU":
            plain = pa.array(values.astype(object), pa.string())
            return plain.dictionary_encode() if pa.types.is_dictionary(field.type) else plain
        mask = (values == UNKNOWN) & field.nullable
        if name in ("start_ns", "end_ns"):
            mask = ~np.concatenate([calls.has for calls, _ in self._added])
        return pa.array(values, field.type, mask=mask)


def _roles(calls: Calls, roots: dict[int, int]) -> Objects:
    """What each call's data dependency is: see `MATCHED`."""
    role = np.where(calls.synchronising, "both", "none").astype(object)
    for name, (at_root, elsewhere) in _ROOTED.items():
        for root in np.unique(calls.root[calls.operation == name]).tolist():
            if root in roots:
                of_root = (calls.operation == name) & (calls.root == root)
                role[of_root] = at_root if roots[root] == calls.rank else elsewhere
    return role
