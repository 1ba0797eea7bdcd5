"""Matched calls as matrices: one block for each communicator, calls by members."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Block:
    """The calls of one communicator (or of one pair of it), on clocks made roughly equal.

    `start`/`end` are float ns since the rank's own `base`, NaN where a member lacks the call.
    `holds` says whose start the others' ends cannot precede, `held` who cannot end before.
    """

    members: tuple[int, ...]
    start: Floats
    end: Floats
    holds: Bools
    held: Bools

    @property
    def both_ways(self) -> bool:
        """Whether each member waits for each other one."""
        return bool(self.holds.all() and self.held.all())

    def take(self, calls: npt.NDArray[np.intp] | Bools) -> Block:
        """Return the block of some of its calls (indices or a mask)."""
        return Block(
            self.members, self.start[calls], self.end[calls], self.holds[calls], self.held[calls]
        )


def bases(matched: pa.Table, ranks: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return for each rank a wall time inside its window: float arithmetic starts from there.

    Times of 10^18 ns do not fit a double to the nanosecond; differences to a base do.
    """
    out = np.zeros(len(ranks), dtype=np.int64)
    rank = matched["rank"].to_numpy()
    start = np.asarray(pc.fill_null(matched["start_ns"], 0).to_numpy())
    for k, one in enumerate(ranks):
        mine = start[(rank == one) & (start > 0)]
        out[k] = int(mine.min()) if len(mine) else 0
    return out


def blocks(matched: pa.Table, ranks: tuple[int, ...], base: npt.NDArray[np.int64]) -> list[Block]:
    """Split matched calls (schema MATCHED) into blocks; members are indices into `ranks`."""
    usable = pc.and_(
        pc.and_(pc.is_valid(matched["start_ns"]), pc.is_valid(matched["end_ns"])),
        pc.not_equal(matched["role"].cast(pa.string()), "none"),
    )
    usable = pc.and_(usable, pc.not_equal(matched["state"].cast(pa.string()), "unmatched"))
    table = matched.filter(usable)
    if not table.num_rows:
        return []
    index = {rank: k for k, rank in enumerate(ranks)}
    rank = np.asarray([index[r] for r in table["rank"].to_pylist()], dtype=np.intp)
    collective = table["collective"].to_numpy()
    role = np.asarray(table["role"].cast(pa.string()).to_pylist(), dtype=object)
    start = (table["start_ns"].to_numpy() - base[rank]).astype(np.float64)
    end = (table["end_ns"].to_numpy() - base[rank]).astype(np.float64)
    # calls of one communicator with the same members stand together; pairs are pairs both ways
    name = np.asarray(table["communicator"].to_pylist(), dtype=object)
    first, last = _extremes(collective, rank)
    key = np.asarray(
        [f"{n}|{a}|{b}" if p else n for n, a, b, p in _pairs(name, first, last, role)],
        dtype=object,
    )
    out = []
    for one in dict.fromkeys(key):
        rows = np.flatnonzero(key == one)
        members, column = np.unique(rank[rows], return_inverse=True)
        if len(members) < 2:
            continue
        calls, line = np.unique(collective[rows], return_inverse=True)
        shape = (len(calls), len(members))
        s, e = np.full(shape, np.nan), np.full(shape, np.nan)
        holds, held = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        s[line, column], e[line, column] = start[rows], end[rows]
        holds[line, column] = np.isin(role[rows].astype(str), ["both", "source"])
        held[line, column] = np.isin(role[rows].astype(str), ["both", "sink"])
        out.append(Block(tuple(int(m) for m in members), s, e, holds, held))
    return out


def _extremes(
    collective: npt.NDArray[np.int64], rank: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Lowest and highest rank of each row's collective."""
    ids, line = np.unique(collective, return_inverse=True)
    low = np.full(len(ids), np.iinfo(np.intp).max, dtype=np.intp)
    high = np.full(len(ids), -1, dtype=np.intp)
    np.minimum.at(low, line, rank)
    np.maximum.at(high, line, rank)
    return low[line], high[line]


def _pairs(
    name: npt.NDArray[np.object_],
    first: npt.NDArray[np.intp],
    last: npt.NDArray[np.intp],
    role: npt.NDArray[np.object_],
) -> zip[tuple[object, int, int, bool]]:
    return zip(name, first, last, role != "both", strict=True)
