"""Matched calls as matrices: one block for each communicator, calls by members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock.rings import ON_HOST, OPERATIONS, UNKNOWN, shapes, shown

#: a confidence of this or less means that the wall clocks decided (`merge.shift`)
BY_WALL_CLOCK = 0.5

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """The calls of one communicator (or of one pair of it), on clocks made roughly equal.

    `start`/`end` are float ns since the rank's own `base`, NaN where a member lacks the call.
    `holds` says whose start the others' ends cannot precede, `held` who cannot end before.
    `sort` [calls] is equal for calls of one operation and size, -1 where the size is unknown;
    `ring` [calls] says what is known of how members' ends differ, and `shows` (0 to 1) how much
    of that (see `rings`); `delay` [calls, members] is by how much later than the others a member
    ended for a reason of its own, ns (see `copies`); `crowded` [calls] is true where a kernel
    carries more calls than one each way (an exchange of all with all in one group).
    """

    members: tuple[int, ...]
    start: Floats
    end: Floats
    holds: Bools
    held: Bools
    sort: Ints | None = None
    ring: Ints | None = None
    shows: Floats | None = None
    delay: Floats | None = None
    crowded: Bools | None = None

    @property
    def directed(self) -> bool:
        """Whether the data of every call go one way: nobody both waits and is waited for."""
        return not (self.holds & self.held).any()

    @property
    def sorts(self) -> Ints:
        """`sort`, or all alike where it was not given."""
        return np.zeros(len(self.start), dtype=np.int64) if self.sort is None else self.sort

    @property
    def rings(self) -> Ints:
        """`ring`, or unknown where it was not given."""
        unknown = np.full(len(self.start), UNKNOWN, dtype=np.int64)
        return unknown if self.ring is None else self.ring

    @property
    def shown(self) -> Floats:
        """`shows`, or all of it where it was not given."""
        return np.ones(len(self.start)) if self.shows is None else self.shows

    @property
    def delays(self) -> Floats:
        """`delay`, or none where it was not given."""
        return np.zeros(self.start.shape) if self.delay is None else self.delay

    @property
    def crowds(self) -> Bools:
        """`crowded`, or nowhere where it was not given."""
        return np.zeros(len(self.start), dtype=bool) if self.crowded is None else self.crowded

    def take(self, calls: npt.NDArray[np.intp] | Bools) -> Block:
        """Return the block of some of its calls (indices or a mask)."""
        return self.of(np.arange(len(self.members)), calls)

    def of(
        self, members: npt.NDArray[np.intp], calls: npt.NDArray[np.intp] | Bools | None = None
    ) -> Block:
        """Return the block of some of its members (indices into `members`), and of some calls."""
        some = np.arange(len(self.start)) if calls is None else calls

        def part(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
            return values[some][:, members]

        return Block(
            tuple(self.members[int(k)] for k in members),
            np.asarray(part(self.start), dtype=np.float64),
            np.asarray(part(self.end), dtype=np.float64),
            np.asarray(part(self.holds), dtype=np.bool_),
            np.asarray(part(self.held), dtype=np.bool_),
            self.sorts[some],
            self.rings[some],
            self.shown[some],
            np.asarray(part(self.delays), dtype=np.float64),
            self.crowds[some],
        )

    def moved(self, by: Floats) -> Block:
        """Return the block with `by` [all ranks] (ns) taken off each rank's times."""
        mine = by[list(self.members)]
        return replace(self, start=self.start - mine, end=self.end - mine)


def bases(matched: pa.Table, ranks: tuple[int, ...]) -> Ints:
    """Return for each rank a wall time inside its window: float arithmetic starts from there.

    Times of 10^18 ns do not fit a double to the nanosecond; differences to a base do. Zero for
    a rank without any call.
    """
    out = np.zeros(len(ranks), dtype=np.int64)
    start = np.asarray(pc.fill_null(matched["start_ns"], 0).to_numpy())
    at = np.searchsorted(ranks, matched["rank"].to_numpy())
    has = start > 0
    first = np.full(len(ranks), np.iinfo(np.int64).max)
    np.minimum.at(first, at[has], start[has])
    seen = first < np.iinfo(np.int64).max
    out[seen] = first[seen]
    return out


def blocks(
    matched: pa.Table, ranks: tuple[int, ...], base: Ints, delays: Floats | None = None
) -> list[Block]:
    """Split matched calls (schema MATCHED) into blocks; members are indices into `ranks`.

    Collectives of one communicator stand together, pairs of it are pairs whichever way they
    go. An empty message moves nothing and holds nobody up: such calls are left out. `delays` are
    of the rows of `matched` (see `copies`), ns.
    """
    usable = _usable(matched)
    table = matched.filter(usable)
    if not table.num_rows:
        return []
    rank = np.searchsorted(ranks, table["rank"].to_numpy())
    sort, ring = _sorts(table)
    _, call = np.unique(table["collective"].to_numpy(), return_inverse=True)
    here = np.asarray(usable.to_numpy(), dtype=np.bool_)
    rows = _Rows(
        rank=rank,
        call=call,
        start=(table["start_ns"].to_numpy() - base[rank]).astype(np.float64),
        end=(table["end_ns"].to_numpy() - base[rank]).astype(np.float64),
        role=_codes(table["role"], {"both": 0, "source": 1, "sink": 2}),
        sort=sort,
        ring=ring,
        size=np.asarray(pc.fill_null(table["message_bytes"], -1).to_numpy(), dtype=np.int64),
        delay=np.zeros(len(rank)) if delays is None else delays[here],
        crowded=_crowded(table),
    )
    return [
        rows.block(some)
        for some in _groups(table, call, rank, rows.role)
        if (rank[some] != rank[some[0]]).any()
    ]


def _usable(matched: pa.Table) -> pa.ChunkedArray:
    """Rows with times, a known dependency and something to send, and a match of their own.

    A match that the wall clocks decided says nothing about them.
    """
    timed = pc.and_(pc.is_valid(matched["start_ns"]), pc.is_valid(matched["end_ns"]))
    known = pc.not_equal(matched["role"].cast(pa.string()), "none")
    told = pc.greater(matched["confidence"], BY_WALL_CLOCK)
    joined = pc.and_(told, pc.not_equal(matched["state"].cast(pa.string()), "unmatched"))
    sent = pc.not_equal(pc.fill_null(matched["message_bytes"], -1), 0)
    # a call that ends before it starts, or that has not begun, is a broken record
    whole = pc.greater_equal(matched["end_ns"], matched["start_ns"])
    usable = pc.and_(pc.and_(timed, known), pc.and_(joined, sent))
    return pc.fill_null(pc.and_(usable, whole), False)


def _codes(column: pa.ChunkedArray, codes: dict[str, int]) -> Ints:
    out = np.full(len(column), -1, dtype=np.int64)
    names = column.cast(pa.string())
    for name, code in codes.items():
        out[np.asarray(pc.equal(names, name).to_numpy(), dtype=np.bool_)] = code
    return out


def _sorts(table: pa.Table) -> tuple[Ints, Ints]:
    """Per row: a number for operation and size (-1: size unknown), and what ring it is."""
    operation = table["operation"].cast(pa.string())
    size = np.asarray(pc.fill_null(table["message_bytes"], -1).to_numpy())
    names = np.asarray(operation.to_numpy(zero_copy_only=False)).astype(str)
    names = np.where(names == "Recv", "Send", names)  # two ends of one call
    kinds, kind = np.unique(names, return_inverse=True)
    _, number = np.unique(np.stack([kind, size]), axis=1, return_inverse=True)
    ring = np.array([OPERATIONS.get(name, UNKNOWN) for name in kinds])[kind]
    host = np.asarray(pc.equal(table["source"].cast(pa.string()), "gloo").to_numpy())
    ring = np.where(host.astype(np.bool_), ON_HOST, ring).astype(np.int64)
    return np.where(size < 0, -1, np.ravel(number)).astype(np.int64), ring


def _crowded(table: pa.Table) -> Bools:
    """Per row: whether its kernel carries more than two calls."""
    names = ("rank", "start_ns", "end_ns")
    kernel = np.stack([np.asarray(table[name].to_numpy(), dtype=np.int64) for name in names])
    order = np.lexsort(kernel)
    first = np.r_[True, (np.diff(kernel[:, order], axis=1) != 0).any(axis=0)]
    number = np.cumsum(first) - 1
    out = np.zeros(len(order), dtype=bool)
    out[order] = np.bincount(number)[number] > 2
    return out


def _groups(
    table: pa.Table,
    call: npt.NDArray[np.intp],
    rank: npt.NDArray[np.intp],
    role: Ints,
) -> Iterator[npt.NDArray[np.intp]]:
    """Rows of each block: by communicator, and where data goes one way also by the pair."""
    name = np.asarray(
        table["communicator"].combine_chunks().dictionary_encode().indices.to_numpy(False)
    )
    low = np.full(call.max() + 1, np.iinfo(np.intp).max, dtype=np.intp)
    high = np.full(call.max() + 1, -1, dtype=np.intp)
    one_way = np.zeros(call.max() + 1, dtype=bool)
    np.minimum.at(low, call, rank)
    np.maximum.at(high, call, rank)
    one_way[call[role != 0]] = True
    apart = one_way[call]
    key = np.stack([name, np.where(apart, low[call], -1), np.where(apart, high[call], -1)])
    _, group = np.unique(key, axis=1, return_inverse=True)
    group = np.ravel(group)
    order = np.argsort(group, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


@dataclass(frozen=True)
class _Rows:
    """The usable rows of matched calls, as columns."""

    rank: npt.NDArray[np.intp]
    call: npt.NDArray[np.intp]
    start: Floats
    end: Floats
    role: Ints
    sort: Ints
    ring: Ints
    size: Ints
    delay: Floats
    crowded: Bools

    def block(self, rows: npt.NDArray[np.intp]) -> Block:
        """The block of some rows (indices)."""
        members, column = np.unique(self.rank[rows], return_inverse=True)
        calls, line = np.unique(self.call[rows], return_inverse=True)
        shape = (len(calls), len(members))
        start, end, delay = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape)
        holds, held = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        start[line, column], end[line, column] = self.start[rows], self.end[rows]
        delay[line, column] = self.delay[rows]
        holds[line, column] = self.role[rows] != 2
        held[line, column] = self.role[rows] != 1
        sort, ring, size = np.full((3, len(calls)), -1, dtype=np.int64)
        sort[line], ring[line], size[line] = self.sort[rows], self.ring[rows], self.size[rows]
        crowded = np.zeros(len(calls), dtype=bool)
        crowded[line[self.crowded[rows]]] = True
        ring = shapes(ring, len(members), size)
        shows = shown(ring, len(members), size)
        numbers = tuple(int(m) for m in members)
        return Block(numbers, start, end, holds, held, sort, ring, shows, delay, crowded)
