"""One rank's collective calls as arrays, ready to be compared with another rank's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.align.time_stamps import issue_times, timed
from clusterprof.columns import (
    Bools,
    Ints,
    Objects,
    integers,
    last_at_or_before,
    least_by,
    order_by,
    places,
    texts,
    where_known,
)
from clusterprof.ingest.operations import SYNCHRONISING
from clusterprof.tables import RankTables

#: stands for "not in the report" in integer arrays
UNKNOWN = -1

#: operations whose message size may differ between the members of one call
_UNEVEN = ("AllToAll", "Gather", "Scatter", "SendRecv", "Barrier")
_POINT_TO_POINT = ("Send", "Recv")


@dataclass(frozen=True)
class Calls:
    """One rank's collective calls, one element per call, in issue order.

    `start`/`end` are 0 where `has` is false (no device kernel was found).
    """

    rank: int
    call: Ints
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
    step: Ints
    #: the step where the program numbered it, else -1: what may show which call is which
    marked: Ints
    source: Objects
    reason: Objects

    def __len__(self) -> int:
        return len(self.call)

    def take(self, rows: Ints | Bools) -> Calls:
        """Return the calls of `rows` (indices or a mask), in that order."""
        names = [name for name in self.__dataclass_fields__ if name != "rank"]
        return Calls(rank=self.rank, **{name: getattr(self, name)[rows] for name in names})

    @property
    def every(self) -> Part:
        """The part with all calls."""
        return Part(self, np.arange(len(self)))

    @cached_property
    def synchronising(self) -> Bools:
        """Which calls no member can end before all have started."""
        return np.isin(self.operation, SYNCHRONISING)

    @cached_property
    def directed(self) -> Bools:
        """Which calls are sends and receives."""
        return np.isin(self.operation, _POINT_TO_POINT)


@dataclass(frozen=True)
class Part:
    """Some calls (`rows`) of one rank: of one communicator, stream or direction."""

    whole: Calls
    rows: Ints

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rank(self) -> int:
        """The rank whose calls they are."""
        return self.whole.rank

    @cached_property
    def calls(self) -> Calls:
        """The calls themselves."""
        return self.whole.take(self.rows)

    def some(self, which: Bools | Ints | slice) -> Part:
        """Return the part of some of its rows."""
        return Part(self.whole, self.rows[which])

    def split(self) -> tuple[Part, Part]:
        """Return the collectives, and the sends and receives."""
        directed = self.whole.directed[self.rows]
        return self.some(~directed), self.some(directed)

    def by(self, name: str) -> dict[Any, Part]:
        """Return the rows of each value of a column of `Calls`, in order of appearance."""
        values = getattr(self.whole, name)[self.rows]
        return {value: self.some(values == value) for value in dict.fromkeys(values.tolist())}

    @cached_property
    def most_members(self) -> float:
        """How many members its communicator has at most: infinite where no call tells."""
        stated = int(self.whole.count[self.rows].max(initial=UNKNOWN))
        return stated if stated > 0 else math.inf

    def streams(self) -> list[Part]:
        """Return the rows of each stream."""
        return [calls for _, calls in sorted(self.by("stream").items())]


def steps_of(steps: pa.Table, times: Ints) -> Ints:
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
    count = integers(table, "communicator_size", UNKNOWN)
    operation, step = texts(table, "operation"), steps_of(tables.steps, issue)
    columns: dict[str, Any] = {
        **{n: integers(table, n, UNKNOWN) for n in ("call", "root", "peer", "group")},
        **{n: texts(table, n) for n in ("source", "reason")},
        "identity": integers(table, "operation_id", UNKNOWN),
        "size": np.where(
            np.isin(operation, _UNEVEN), UNKNOWN, integers(table, "message_bytes", -1)
        ),
        "end": integers(table, "end_ns"),
        "marked": np.full(len(step), UNKNOWN) if is_counted(tables) else step,
    }
    calls = Calls(
        rank=tables.rank,
        operation=operation,
        communicator=communicator,
        members=members,
        count=count,
        stream=stream,
        issue=issue,
        start=start,
        has=timed(table),
        step=step,
        **columns,
    )
    return calls.take(order_by(issue, start))
