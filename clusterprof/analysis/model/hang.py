"""What a job that hangs waits for, from the flight recorders of its ranks, or of a part of them.

A call hangs where members have not joined it, where they joined it otherwise, or where one left no
dump. A member that has not joined because it waits in another call is no cause: that call is. Where
calls wait for each other in a circle, each of them that lacks a member is one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from statistics import mode

import numpy as np
import pyarrow as pa

from clusterprof.align.match.flight_calls import FlightCalls
from clusterprof.columns import EntryRows, coded, combined, first_by, integers
from clusterprof.ingest.flight.dump import Group
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


#: in which columns of `ENTRIES` the members differ
_UNLIKE = {
    Cause.OTHER_OPERATION: ("operation",),
    Cause.OTHER_SIZE: ("input_sizes", "output_sizes"),
    Cause.OTHER_TYPE: ("input_types", "output_types"),
}
#: in which of them they may
_UNEVEN = {
    "AllToAll": ("input_sizes", "output_sizes"),
    "Scatter": ("input_sizes", "input_types"),
    "Gather": ("output_sizes", "output_types"),
    "Broadcast": ("input_types",),
}


@dataclass(frozen=True)
class Diagnosis:
    """What hangs: its causes, the likeliest first; none where no rank waits for another."""

    causes: list[HangEntry]
    #: ranks that wait for others, in any call
    waiting: list[int]


def diagnose(calls: FlightCalls) -> Diagnosis:
    """Return what the ranks wait for, and which calls are mistakes."""
    job, flight = _Job(calls), calls.flight
    by_call = {call: job.causes(call) for call in job.looked_at()}
    roots = job.roots([call for call, causes in by_call.items() if causes])
    # a dump of few that is missing is most often of a process that died; of half of them, none
    few = 2 * len(flight.absent) < len(flight.ranks)
    doubt = {Cause.NO_DUMP.value: 0 if few else 2, Cause.STALLED.value: 3}

    def order(entry: HangEntry) -> tuple[bool, int, int, int]:
        """What is likeliest comes first."""
        count = len(entry["waiting"])
        return not count, doubt.get(entry["cause"], 1), -count, entry["sequence"]

    # even where no rank waits: NCCL ends some, with wrong numbers
    mistakes = (*_UNLIKE, Cause.NO_RECEIVE)
    causes = [
        entry
        for call, causes in by_call.items()
        for entry in causes
        if (call in roots if entry["waiting"] else entry["cause"] in mistakes)
    ]
    return Diagnosis(sorted(causes, key=order), sorted(job.stuck_in))


#: a cause, the ranks, and whether it is one of those
_Reason = tuple[Cause, set[int], bool]


class _Job:
    """The calls that are open, by the little that is looked at one by one."""

    def __init__(self, calls: FlightCalls) -> None:
        self.calls, self.flight = calls, calls.flight
        self.rank, self.record = (integers(calls.entries, name) for name in ("rank", "record"))
        self.of_row = calls.of_row
        self.finished = np.asarray(calls.entries["finished"].to_numpy(), bool)
        names = ("operation", "input_sizes", "output_sizes", "input_types", "output_types")
        #: of each row the place of its kind in `kinds`: what members must agree in
        self.kind = combined(*(coded(calls.entries, name)[1] for name in names))
        _, first = np.unique(self.kind, return_index=True)
        self.kinds = calls.entries.select(names).take(pa.array(first)).to_pylist()
        for kind in self.kinds:
            kind.update(dict.fromkeys(_UNEVEN.get(kind["operation"], ()), ""))
        self.absent = {*self.flight.absent}
        last_first = np.where(self.finished, -self.record, self.record)
        rows = first_by(self.rank, self.finished, last_first)
        #: of each rank the first row that is not finished, else its last one
        self.row_of = dict(zip(self.rank[rows].tolist(), rows.tolist(), strict=True))
        #: of each rank that waits the call
        self.stuck_in = {
            k: int(self.of_row[row]) for k, row in self.row_of.items() if not self.finished[row]
        }

    def looked_at(self) -> list[int]:
        """Return the calls to look at: those in which a rank waits, each group's first that lacks a
        member or is not alike, and every send without its receive, and reverse.
        """
        calls, members = self.calls, self.calls.stretches
        unlike = members.least(self.kind) < members.greatest(self.kind)
        lanes, lacking = calls.group << 32 | calls.restarts, calls.counts < calls.expected
        looked_at = [*self.stuck_in.values()]
        for wrong in (unlike, lacking):
            collectives = np.flatnonzero(wrong & ~calls.p2p)
            first = np.unique(lanes[collectives], return_index=True)[1]
            looked_at += collectives[first].tolist()
        looked_at += np.flatnonzero(calls.p2p & lacking & (calls.restarts == 0)).tolist()
        return sorted({*looked_at})

    def causes(self, call: int) -> list[HangEntry]:
        """Return why a call is open: none where its members only have to come to it."""
        group, rows = self._group(call), self.calls.rows(call)
        joined = {*self.rank[rows].tolist()}
        waiting = {rank for rank in joined if self.stuck_in.get(rank) == call}
        return [
            HangEntry(
                cause=cause.value,
                group=group.name,
                description=group.description,
                sequence=int(self.calls.sequence[call]),
                operation=self.kinds[mode(self.kind[rows].tolist())]["operation"],
                ranks=sorted(ranks),
                one_of=one_of,
                waiting=sorted(waiting - ranks or waiting),
                called=[self._called(k, rows) for k in sorted((joined | ranks) - self.absent)],
            )
            for cause, ranks, one_of in self._reasons(call, joined, waiting)
        ]

    def _reasons(self, call: int, joined: set[int], waiting: set[int]) -> list[_Reason]:
        """Return why a call is open, who makes it so, and whether one of those does."""
        stalled: _Reason = (Cause.STALLED, set(), False)
        if self.calls.p2p[call]:
            row, *second = self.calls.rows(call).tolist()
            if second:
                return [stalled] if joined == waiting else []
            return self._lacks_other_side(row, bool(waiting))
        if unlike := self._unlike(call):
            return [unlike]
        if not waiting:
            return []
        group, lane = self._group(call), (self.calls.group[call], self.calls.restarts[call])
        lacking = {*(group.ranks or ())} - joined - self.calls.unknown.get(lane, frozenset())
        absent = lacking & self.absent if group.complete else self.absent
        reasons: list[_Reason] = [
            (Cause.NEVER_JOINED, lacking - self.absent, False),
            (Cause.NO_DUMP, absent, len(absent) > 1),
        ]
        return [reason for reason in reasons if reason[1]] or [stalled]

    def _lacks_other_side(self, row: int, is_waiting: bool) -> list[_Reason]:
        """Return why a send has no receive, or a receive no send; none where it may yet have."""
        other = self._other_side(row)
        # without a later call that has both ranks the other dump may only be older
        later = self.of_row[(self.rank == self.rank[row]) & (self.record > self.record[row])]
        certain = is_waiting or np.isin(later, self.of_row[self.rank == other]).any()
        if other is None or not certain:
            return []
        sends = self.kinds[self.kind[row]]["operation"] == "Send"
        present = Cause.NO_RECEIVE if sends else Cause.NO_SEND
        return [(Cause.NO_DUMP if other in self.absent else present, {other}, False)]

    def _group(self, call: int) -> Group:
        """Return the group that makes a call."""
        return self.flight.groups[int(self.calls.group[call])]

    def _other_side(self, row: int) -> int | None:
        """Return the rank to which a row sends or from which it receives, if that is known."""
        ranks = self._group(int(self.of_row[row])).ranks or ()
        peer = self.calls.entries["peer"][row].as_py()
        return ranks[peer] if peer is not None and peer < len(ranks) else None

    def _unlike(self, call: int) -> _Reason | None:
        """Return in what, and who called otherwise than most, or of as many than before."""
        rows = self.calls.rows(call)
        kinds = self.kind[rows]
        counts = Counter(kinds.tolist())
        differing = (
            cause
            for cause, names in _UNLIKE.items()
            if len({tuple(self.kinds[kind][name] for name in names) for kind in counts}) > 1
        )
        if not (cause := next(differing, None)):
            return None
        (usual, most), (_, as_many) = counts.most_common(2)
        tie = most == as_many
        if tie:
            # Training repeats itself: what most called is what came the last time after the same
            # calls. Of the earlier places those are taken that agree longest with what came right
            # before, and of these the last.
            calls = self.calls
            lane = (calls.group == calls.group[call]) & (calls.restarts == calls.restarts[call])
            before = self.kind[calls.begins[np.flatnonzero((lane & ~calls.p2p)[:call])]]
            agreeing, expected = np.arange(before.size - 1), None
            for back in range(before.size - 1):
                agreeing = agreeing[agreeing >= back]
                agreeing = agreeing[before[agreeing - back] == before[-1 - back]]
                if not agreeing.size:
                    break
                expected = int(before[agreeing[-1] + 1])
            if expected in counts:
                usual, tie = expected, False
        odd = rows if tie else rows[kinds != usual]
        return cause, {*self.rank[odd].tolist()}, tie

    def _called(self, rank: int, rows: EntryRows) -> CalledEntry:
        """Return a rank's part of a call; where it has none, what it waits in, or its last call."""
        of_rank = rows[self.rank[rows] == rank].tolist()
        entry = of_rank[0] if of_rank else self.row_of.get(rank)
        row = {} if entry is None else self.calls.entries.slice(entry, 1).to_pylist()[0]
        return CalledEntry(
            rank=rank, joined=bool(of_rank), operation=row.get("operation", ""),
            sequence=row.get("sequence", -1), input_sizes=row.get("input_sizes", ""),
            output_sizes=row.get("output_sizes", ""), input_types=row.get("input_types", ""),
            line=row.get("frame"),
        )  # fmt: skip

    def roots(self, calls: list[int]) -> list[int]:
        """Return those calls whose ranks wait in no other: or, in a circle, all that lack a member.

        A call waits for the calls in which its missing members wait, and for those in which
        members wait that have joined it and do not come to it.
        """
        after: dict[int, set[int]] = {}
        for call in calls:
            rows = self.calls.rows(call)
            members: set[int | None] = {*(self._group(call).ranks or ())}
            if self.calls.p2p[call]:
                members = {*self.rank[rows].tolist(), self._other_side(int(rows[0]))}
            waiting = members.difference(self.rank[rows[self.finished[rows]]].tolist())
            after[call] = {self.stuck_in[k] for k in self.stuck_in.keys() & waiting} - {call}
        # what each waits for, near or far
        reached: dict[int, set[int]] = {}
        for call in {*after, *chain(*after.values())}:
            reached[call], pending = set(), [call]
            while pending:
                fresh = after.get(pending.pop(), set()) - reached[call]
                reached[call] |= fresh
                pending.extend(fresh)
        circles = [call for call in calls if all(call in reached[k] for k in reached[call])]
        lacking = self.calls.counts < self.calls.expected
        return [k for k in circles if not reached[k] or lacking[k] or self._unlike(k)]
