"""Matched calls as matrices: one block for each communicator, calls by members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterprof.align.time_stamps import BY_WALL_CLOCK, timed
from clusterprof.columns import (
    Bools,
    CallPlaces,
    Floats,
    Ints,
    MemberPlaces,
    Objects,
    PlacedRows,
    RankPlaces,
    Stretches,
    combined,
    count_by,
    greatest_by,
    integers,
    least_by,
    order_by,
    places,
    row_of,
    rows_by,
    texts,
)

#: how the members of a call end (`Block.kind`; see `estimates`): on a processor (gloo), together,
#: or in a wave around a ring
ON_HOST, AT_ONCE, ALL_REDUCE, SHARDED = -1, 0, 1, 2
_KINDS = {"AllReduce": ALL_REDUCE, "AllGather": SHARDED, "ReduceScatter": SHARDED}
#: no window lasts a day: a call farther than that from its rank's middle one is a broken record
LONGEST_NS = 86_400_000_000_000
#: the members of a smaller AllReduce end together, bytes: seen to at 12.6 MB, a third of a large
#: one's wave at 19 MB, all of it from 33.6 MB on
_WAVE_FROM_BYTES = 16 << 20


@dataclass(frozen=True)
class Block:
    """The calls of one communicator (or of one pair of it), on clocks made roughly equal.

    Matrices are [calls, members], the other arrays [calls]. Times are float ns since the rank's
    own `base`, NaN where a member lacks the call.
    """

    members: tuple[int, ...]
    start: Floats
    end: Floats
    #: whose start the others' ends cannot precede, and whose end cannot precede the others' starts
    holds: Bools
    held: Bools
    #: equal for calls of one operation and size, -1 where the size is unknown
    sort: Ints
    kind: Ints
    #: how many calls the fuller of its kernels carries: one, one each way, an exchange of all
    carried: Ints

    @classmethod
    def plain(
        cls, members: tuple[int, ...], start: Floats, end: Floats, holds: Bools, held: Bools
    ) -> Block:
        """Return a block of calls that are alike and whose members end together."""
        none = np.zeros(len(start), dtype=np.int64)
        return cls(members, start, end, holds, held, none, none + AT_ONCE, none + 1)

    @property
    def one_way(self) -> bool:
        """Whether the data of every call go one way: no member both waits and is waited for."""
        return not (self.holds & self.held).any()

    def take(self, calls: CallPlaces | Bools) -> Block:
        """Return the block of some of its calls."""
        return self._part(self.members, calls, np.arange(len(self.members)))

    def of(self, members: MemberPlaces) -> Block:
        """Return the block of some of its members."""
        ranks = tuple(self.members[int(k)] for k in members)
        return self._part(ranks, np.arange(len(self.start)), members)

    def _part(
        self, ranks: tuple[int, ...], calls: CallPlaces | Bools, columns: MemberPlaces
    ) -> Block:
        arrays = {f.name: getattr(self, f.name)[calls] for f in fields(self)[1:]}
        return Block(ranks, **{k: v[:, columns] if v.ndim > 1 else v for k, v in arrays.items()})

    def moved(self, by: Floats) -> Block:
        """Return the block with `by` [all ranks] (ns) taken off each rank's times."""
        of_members = by[list(self.members)]
        return replace(self, start=self.start - of_members, end=self.end - of_members)


def bases(matched: pa.Table, ranks: tuple[int, ...]) -> Ints:
    """Return for each rank the wall time of its middle call: float arithmetic starts from there.

    Times of 10^18 ns do not fit a double to the nanosecond; differences to a base do. Zero for
    a rank without any call.
    """
    start, rank = integers(matched, "start_ns"), row_of(ranks, integers(matched, "rank"))
    begun = np.flatnonzero(start > 0)
    order = begun[order_by(rank[begun], start[begun])]
    of_rank = Stretches.of(rank[order])
    base = np.zeros(len(ranks), dtype=np.int64)
    base[rank[order][of_rank.first]] = start[order[of_rank.first + of_rank.size // 2]]
    return base


def astray(matched: pa.Table, ranks: tuple[int, ...], base: Ints) -> Bools:
    """Return which rows have times that cannot be of their rank's window (`LONGEST_NS`)."""
    middle = base[row_of(ranks, integers(matched, "rank"))]
    edges = (integers(matched, name) for name in ("start_ns", "end_ns"))
    apart = np.max([np.abs(edge - middle) for edge in edges], axis=0)
    return np.asarray((apart > LONGEST_NS) & timed(matched), dtype=np.bool_)


def blocks(matched: pa.Table, ranks: tuple[int, ...], base: Ints) -> list[Block]:
    """Split matched calls (schema MATCHED) into blocks; members are indices into `ranks`.

    Collectives of one communicator stand together; pairs of it are pairs whichever way they go.
    Calls with an empty message are left out: they move nothing and delay no member.
    """
    # a call that ends before it starts, or that has not begun, is a broken record
    usable = timed(matched) & (integers(matched, "end_ns") >= integers(matched, "start_ns"))
    usable &= (texts(matched, "role") != "none") & (texts(matched, "state") != "unmatched")
    # a match that the wall clocks decided says nothing about them
    usable &= matched["confidence"].to_numpy() > BY_WALL_CLOCK
    table = matched.filter(pa.array(usable & (integers(matched, "message_bytes", -1) != 0)))
    if not table.num_rows:
        return []
    rank_of_row, began, ended = (integers(table, name) for name in ("rank", "start_ns", "end_ns"))
    rank, (_, call) = row_of(ranks, rank_of_row), places(integers(table, "collective"))
    start, end = ((time - base[rank]).astype(np.float64) for time in (began, ended))
    role, kernel = texts(table, "role"), combined(rank_of_row, began, ended)
    carried, (sort, kind) = count_by(kernel)[kernel], _sorts(table)
    split = []
    for rows in _groups(table, call, rank, role):
        members, column = np.unique(rank[rows], return_inverse=True)
        _, line = np.unique(call[rows], return_inverse=True)
        if len(members) < 2:
            continue
        split.append(
            Block(
                members=tuple(members.tolist()),
                start=_filled(start[rows], np.nan, line, column),
                end=_filled(end[rows], np.nan, line, column),
                holds=_filled(role[rows] != "sink", False, line, column),
                held=_filled(role[rows] != "source", False, line, column),
                sort=_filled(sort[rows], -1, line),
                kind=_filled(kind[rows], -1, line),
                carried=greatest_by(line, carried[rows], np.zeros(line.max() + 1, np.int64)),
            )
        )
    return split


def _filled(values: npt.NDArray[Any], missing: float, *places: CallPlaces | MemberPlaces) -> Any:
    """An array with the values at these places and `missing` elsewhere."""
    filled = np.full([along.max() + 1 for along in places], missing, dtype=values.dtype)
    filled[places] = values
    return filled


def _sorts(table: pa.Table) -> tuple[Ints, Ints]:
    """Per row: a number for operation and size (-1: size unknown), and how its members end."""
    size, names = integers(table, "message_bytes", -1), texts(table, "operation").astype(str)
    names = np.where(names == "Recv", "Send", names)  # two ends of one call
    operations, operation = np.unique(names, return_inverse=True)
    kind = np.array([_KINDS.get(name, AT_ONCE) for name in operations])[operation]
    kind[(kind == ALL_REDUCE) & (size >= 0) & (size < _WAVE_FROM_BYTES)] = AT_ONCE
    kind[texts(table, "source") == "gloo"] = ON_HOST
    return np.where(size < 0, -1, combined(operation, size)), kind


def _groups(
    table: pa.Table, call: CallPlaces, rank: RankPlaces, role: Objects
) -> Iterable[PlacedRows]:
    """Rows of each block: by communicator, and where data go one way also by the pair."""
    name = table["communicator"].combine_chunks().dictionary_encode().indices.to_numpy()
    calls = int(call.max()) + 1
    low = least_by(call, rank, np.full(calls, np.iinfo(np.int64).max))
    high = greatest_by(call, rank, np.full(calls, -1))
    one_way = np.zeros(calls, dtype=bool)
    one_way[call[role != "both"]] = True
    pair = one_way[call]
    sides = (np.where(pair, side[call], -1) for side in (low, high))
    return rows_by(combined(name, *sides)).values()
