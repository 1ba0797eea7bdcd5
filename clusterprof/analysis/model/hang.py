"""What a job that hangs waits for, from the flight recorders of its ranks, or of a part of them.

A call hangs where members have not joined it, where they joined it otherwise, or where one left no
dump. A member that has not joined because it waits in another call is no cause: that call is. Where
calls wait for each other in a circle, each of them that lacks a member is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.align.columns import Ints, coded, integers, places
from clusterprof.align.match.flight_calls import FlightCalls
from clusterprof.results import CalledEntry, HangEntry


class Cause(str, Enum):
    """Why a call does not end, or is not what its members believe."""

    NEVER_JOINED = "never_joined"
    OTHER_OPERATION = "other_operation"
    OTHER_SIZE = "other_size"
    OTHER_TYPE = "other_type"
    NO_RECEIVE = "no_receive"
    NO_SEND = "no_send"
    NO_DUMP = "no_dump"
    #: all members joined it alike, and it does not end
    STALLED = "stalled"


_UNLIKE = {
    "operation": Cause.OTHER_OPERATION,
    "sizes": Cause.OTHER_SIZE,
    "types": Cause.OTHER_TYPE,
}

#: mistakes even where no rank waits: NCCL ends some, with wrong numbers
_CERTAIN = (*_UNLIKE.values(), Cause.NO_RECEIVE)

#: of these each member gives, or gets, another size
_UNEVEN_INPUT, _UNEVEN_OUTPUT = ("AllToAll", "Scatter"), ("AllToAll", "Gather")


@dataclass(frozen=True)
class Diagnosis:
    """What hangs: its causes, the likeliest first; none where no rank waits for another."""

    causes: list[HangEntry]
    #: ranks that wait for others, in any call
    waiting: list[int]


def diagnose(calls: FlightCalls) -> Diagnosis:
    """Return what the ranks wait for, and which calls are mistakes."""
    job = _Job(calls)
    found = {call: job.causes(call) for call in job.looked_at()}
    roots = job.roots({call for call, causes in found.items() if any(causes)})
    causes = [
        each
        for call in found
        for each in found[call]
        if (call in roots if each["waiting"] else each["cause"] in _CERTAIN)
    ]
    return Diagnosis(sorted(causes, key=job.order), sorted(job.stuck_in))


#: a cause, the ranks, and whether it is one of those
_Reason = tuple[Cause, set[int], bool]


class _Job:
    """The calls that are open, by the little that is looked at one by one."""

    def __init__(self, calls: FlightCalls) -> None:
        self.calls, self.flight = calls, calls.flight
        self.rank, self.record = (integers(calls.entries, name) for name in ("rank", "record"))
        self.of_row = calls.of_row
        self.finished = np.asarray(calls.entries["finished"].to_numpy(), bool)
        self.kinds, self.kind = _kinds(calls.entries)
        self.absent = {*self.flight.absent}
        last_first = np.where(self.finished, -self.record, self.record)
        order = np.lexsort((last_first, self.finished, self.rank))
        ranks, first = np.unique(self.rank[order], return_index=True)
        #: of each rank the first row that is not finished, else its last one
        self.at = dict(zip(ranks.tolist(), order[first].tolist(), strict=True))
        #: of each rank that waits the call
        self.stuck_in = {
            rank: int(self.of_row[row]) for rank, row in self.at.items() if not self.finished[row]
        }

    def order(self, each: HangEntry) -> tuple[Any, ...]:
        """What is likeliest comes first."""
        # a dump of few that is missing is most often of a process that died; of half of them, none
        few = 2 * len(self.absent) < len(self.flight.ranks)
        unsure = {Cause.NO_DUMP: 0 if few else 2, Cause.STALLED: 3}.get(Cause(each["cause"]), 1)
        return (not each["waiting"], unsure, -len(each["waiting"]), each["sequence"])

    def looked_at(self) -> list[int]:
        """Return the calls to look at: those in which a rank waits, each group's first that lacks a
        member or is not alike, and every send without its receive, and reverse.
        """
        calls = self.calls
        if not calls.begins.size:
            return []
        lowest = np.minimum.reduceat(self.kind, calls.begins)
        unlike = (np.maximum.reduceat(self.kind, calls.begins) != lowest) & ~calls.p2p
        lacking = (calls.counts < calls.expected) & ~calls.p2p
        first = []
        for rows in (np.flatnonzero(unlike), np.flatnonzero(lacking)):
            lanes = calls.group[rows] << 32 | calls.restarts[rows]
            first.append(rows[np.unique(lanes, return_index=True)[1]])
        alone = np.flatnonzero(calls.p2p & (calls.counts < 2) & (calls.restarts == 0))
        waiting = np.array([*self.stuck_in.values()], np.int64)
        return [int(each) for each in np.unique(np.concatenate([*first, alone, waiting]))]

    def causes(self, call: int) -> list[HangEntry]:
        """Return why a call is open: none where its members only have to come to it."""
        group = self.flight.groups[int(self.calls.group[call])]
        rows = np.array(self.calls.rows(call))
        joined = {*self.rank[rows].tolist()}
        waiting = {each for each in joined if self.stuck_in.get(each) == call}
        ((usual, _),) = Counter(self.kind[rows].tolist()).most_common(1)
        reasons = (
            self._direct(rows, joined, waiting)
            if self.calls.p2p[call]
            else self._collective(call, rows, joined, waiting)
        )
        return [
            HangEntry(
                cause=cause.value,
                group=group.name,
                description=group.description,
                sequence=int(self.calls.sequence[call]),
                operation=self.kinds["operation"][usual],
                ranks=sorted(ranks),
                one_of=one_of,
                waiting=sorted(waiting - ranks or waiting),
                called=[
                    self._called(each, rows) for each in sorted((joined | ranks) - self.absent)
                ],
            )
            for cause, ranks, one_of in reasons
        ]

    def _collective(
        self, call: int, rows: Ints, joined: set[int], waiting: set[int]
    ) -> list[_Reason]:
        """Return why a collective is open, who makes it so, and whether one of those does."""
        calls = self.calls
        group = self.flight.groups[int(calls.group[call])]
        lane = (int(calls.group[call]), int(calls.restarts[call]))
        lacking = {*(group.ranks or ())} - joined - calls.unknown.get(lane, frozenset())
        if unlike := self._unlike(call, rows):
            return [unlike]
        if not waiting:
            return []
        absent = lacking & self.absent if group.complete else self.absent
        reasons: list[_Reason] = []
        if present := lacking - self.absent:
            reasons.append((Cause.NEVER_JOINED, present, False))
        if absent:
            reasons.append((Cause.NO_DUMP, absent, len(absent) > 1))
        return reasons or [(Cause.STALLED, set(), False)]

    def _direct(self, rows: Ints, joined: set[int], waiting: set[int]) -> list[_Reason]:
        """Return what a send or a receive lacks, and whose it would be."""
        if rows.size > 1:
            return [(Cause.STALLED, set(), False)] if joined == waiting else []
        row = int(rows[0])
        other = self._other_side(row)
        if other is None or (other in self.absent and not waiting):
            return []
        if other in self.absent:
            return [(Cause.NO_DUMP, {other}, False)]
        # without a later call that has both ranks the other dump may only be older
        later = self.of_row[(self.rank == self.rank[row]) & (self.record > self.record[row])]
        if not waiting and not np.isin(later, self.of_row[self.rank == other]).any():
            return []
        sends = self.kinds["operation"][self.kind[row]] == "Send"
        return [(Cause.NO_RECEIVE if sends else Cause.NO_SEND, {other}, False)]

    def _other_side(self, row: int) -> int | None:
        """Return the rank to which a row sends or from which it receives, if that is known."""
        ranks = self.flight.groups[int(self.calls.group[self.of_row[row]])].ranks or ()
        peer = self.calls.entries["peer"][row].as_py()
        return ranks[peer] if peer is not None and peer < len(ranks) else None

    def _unlike(self, call: int, rows: Ints) -> _Reason | None:
        """Return in what, and who called otherwise than most, or of as many than before."""
        kinds = self.kind[rows]
        counts = Counter(kinds.tolist())
        differing = (
            cause
            for name, cause in _UNLIKE.items()
            if len({self.kinds[name][kind] for kind in counts}) > 1
        )
        if not (cause := next(differing, None)):
            return None
        (usual, most), (_, as_many) = counts.most_common(2)
        tie = most == as_many
        if tie and (expected := self._expected(call)) in counts:
            usual, tie = expected, False
        odd = rows if tie else rows[kinds != usual]
        return cause, {*self.rank[odd].tolist()}, tie

    def _expected(self, call: int) -> int | None:
        """Return the kind of call that came the last time after the same calls in this group.

        Training repeats itself: of the earlier places those are taken that agree longest with what
        came right before, and of these the last.
        """
        calls = self.calls
        lane = (calls.group == calls.group[call]) & (calls.restarts == calls.restarts[call])
        before = np.flatnonzero(lane[:call] & ~calls.p2p[:call])
        kinds = self.kind[calls.begins[before]]
        agreeing, found = np.arange(kinds.size - 1), False
        for back in range(kinds.size - 1):
            longer = agreeing[agreeing >= back]
            longer = longer[kinds[longer - back] == kinds[-1 - back]]
            if not longer.size:
                break
            agreeing, found = longer, True
        return int(kinds[agreeing[-1] + 1]) if found else None

    def _called(self, rank: int, rows: Ints) -> CalledEntry:
        """Return a rank's part of a call; where it has none, what it waits in, or its last call."""
        mine = rows[self.rank[rows] == rank].tolist()
        at = mine[0] if mine else self.at.get(rank)
        row = {} if at is None else self.calls.entries.slice(at, 1).to_pylist()[0]
        return CalledEntry(
            rank=rank, joined=bool(mine), operation=row.get("operation", ""),
            sequence=row.get("sequence", -1), input_sizes=row.get("input_sizes", ""),
            output_sizes=row.get("output_sizes", ""), input_types=row.get("input_types", ""),
            line=row.get("frame"),
        )  # fmt: skip

    def roots(self, calls: set[int]) -> list[int]:
        """Return those calls whose ranks wait in no other: or, in a circle, all that lack a member.

        A call waits for the calls in which its missing members wait, and for those in which
        members wait that have joined it and do not come to it.
        """
        after: dict[int, set[int]] = {}
        for call in calls:
            rows = np.array(self.calls.rows(call))
            members = self.flight.groups[int(self.calls.group[call])].ranks or ()
            sides = {*self.rank[rows].tolist(), self._other_side(int(rows[0]))}
            involved = sides if self.calls.p2p[call] else {*members}
            done = {*self.rank[rows[self.finished[rows]]].tolist()}
            elsewhere = {
                self.stuck_in.get(rank, call) for rank in involved - done if rank is not None
            }
            after[call] = elsewhere - {call}
        reached = {call: _reached(call, after) for call in {*after, *chain(*after.values())}}
        return [
            call
            for call in calls
            if all(call in reached[each] for each in reached[call])
            and (not reached[call] or self._lacks(call))
        ]

    def _lacks(self, call: int) -> bool:
        """Return whether a call has not all of its members, or not alike."""
        rows = np.array(self.calls.rows(call))
        return rows.size < self.calls.expected[call] or self._unlike(call, rows) is not None


def _reached(call: int, after: Mapping[int, set[int]]) -> set[int]:
    """Return what a call waits for, near or far."""
    found, waiting = set[int](), [call]
    while waiting:
        fresh = after.get(waiting.pop(), set()) - found
        found |= fresh
        waiting.extend(fresh)
    return found


def _kinds(entries: pa.Table) -> tuple[dict[str, list[str]], Ints]:
    """Return the operations, sizes and types that occur, and which of them each row is of."""
    names = ("operation", "input_sizes", "output_sizes", "input_types", "output_types")
    columns = [coded(entries, name) for name in names]
    kind = np.zeros(entries.num_rows, np.int64)
    for texts, code in columns:
        _, kind = places(kind * len(texts) + code)
    _, first = np.unique(kind, return_index=True)
    operation, inputs, outputs, input_types, output_types = (
        texts[code[first]].tolist() for texts, code in columns
    )
    sizes = [
        f"{'' if one in _UNEVEN_INPUT else given} {'' if one in _UNEVEN_OUTPUT else got}"
        for one, given, got in zip(operation, inputs, outputs, strict=True)
    ]
    types = [
        given if one == "Gather" else got if one in ("Scatter", "Broadcast") else f"{given}{got}"
        for one, given, got in zip(operation, input_types, output_types, strict=True)
    ]
    return {"operation": operation, "sizes": sizes, "types": types}, kind
