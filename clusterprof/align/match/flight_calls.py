"""Which entries of the ranks' flight recorders are one collective, or a send and its receive.

As torch's own analyser matches them: a group is its name and its ranks; within it a collective is
its sequence number, and a send belongs to the first receive of the same source, destination and
size. Unlike it this goes on after a mismatch. What ranks called before any of their recorders
begins is left out: there it cannot be told who lacks a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterprof.columns import (
    Bools,
    CallPlaces,
    EntryRows,
    GroupPlaces,
    Ints,
    MemberPlaces,
    RankNumbers,
    Stretches,
    begins,
    combined,
    first_of,
    integers,
    least_by,
    order_by,
    places,
    sum_by,
    texts,
)
from clusterprof.ingest.flight.all_dumps import Flight


@dataclass(frozen=True)
class FlightCalls:
    """Matched entries: the rows of a call follow each other, by rank.

    `begins` is the first row of each call, in the order of group, restarts, kind and sequence.
    """

    flight: Flight
    #: `ENTRIES` without those that are too early, sorted by call and rank
    entries: pa.Table
    begins: EntryRows
    #: of each call, and of how many members it is (two for a send and its receive)
    group: GroupPlaces
    restarts: Ints
    sequence: Ints
    p2p: Bools
    expected: Ints
    #: whose recorders begin too late to know a group's calls: (group, restarts) -> ranks
    unknown: dict[tuple[int, int], frozenset[int]]

    @cached_property
    def stretches(self) -> Stretches:
        """The rows in calls."""
        return Stretches(self.begins, self.entries.num_rows)

    @property
    def counts(self) -> Ints:
        """How many entries each call has."""
        return self.stretches.size

    @property
    def of_row(self) -> CallPlaces:
        """The call of each row."""
        return self.stretches.of_row

    def rows(self, call: int) -> EntryRows:
        """The rows of one call."""
        until = self.begins[call + 1] if call + 1 < self.begins.size else self.entries.num_rows
        return np.arange(self.begins[call], until)


def match(flight: Flight) -> FlightCalls:
    """Return which entries are one call."""
    lane = _Lanes.of(flight)
    kept = np.flatnonzero(lane.known())
    sequence, part_number = (integers(flight.entries, name)[kept] for name in ("sequence", "part"))
    p2p, lanes = lane.p2p[kept], lane.lane[kept]
    pair, turn, tag = _pairs(flight, kept, lanes, p2p, lane.truncated)
    first, second = np.where(p2p, pair, sequence), np.where(p2p, turn, part_number)
    call = _as_one(lanes, p2p, first, second, tag)
    # entries are by rank and record
    order = order_by(call)
    first_row = np.flatnonzero(begins(call[order]))
    entries = flight.entries.take(pa.array(kept[order]))
    group = integers(entries, "group")[first_row]
    sizes = np.array([process_group.size or 0 for process_group in flight.groups], np.int64)
    direct = p2p[order][first_row]
    return FlightCalls(
        flight,
        entries,
        begins=first_row,
        group=group,
        restarts=integers(entries, "restarts")[first_row],
        sequence=sequence[order][first_row],
        p2p=direct,
        expected=np.where(direct, 2, sizes[group]) if group.size else group,
        unknown=lane.unknown(),
    )


def _as_one(*keys: npt.NDArray[Any]) -> Ints:
    """Return numbers that compare as the tuples of all keys do, the first key first; none below 0.

    Keys that together need more than 63 bits, as no recorder's do, are ranked.
    """
    packed, span = np.zeros(keys[0].size, np.int64), 1
    for key in keys:
        values = key.astype(np.int64)
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        if span * (high - low + 1) >= 1 << 63:
            packed, values = (np.unique(each, return_inverse=True)[1] for each in (packed, values))
            span, low, high = packed.size, 0, packed.size - 1
        packed = packed * (high - low + 1) + (values - low)
        span *= high - low + 1
    return packed


@dataclass(frozen=True)
class _Lanes:
    """The entries of all recorders by lane: a group between two times that its numbers began anew,
    the same on all ranks. `lane`, `rank`, `sequence` and `p2p` are of each entry.
    """

    lane: Ints
    #: of each lane its group, and how often its numbers began anew after it: counted from the end,
    #: which every recorder has
    names: list[tuple[int, int]]
    rank: RankNumbers
    sequence: Ints
    p2p: Bools
    #: which ranks' recorders have dropped entries, by rank
    truncated: Bools

    @classmethod
    def of(cls, flight: Flight) -> _Lanes:
        group, restarts, rank, record, sequence = (
            integers(flight.entries, name)
            for name in ("group", "restarts", "rank", "record", "sequence")
        )
        span = int(restarts.max(initial=0)) + 1
        names, lane = places(group * span + restarts)
        truncated = np.zeros(max(flight.ranks, default=-1) + 1, bool)
        by_rank = Stretches.of(rank)
        truncated[rank[by_rank.first]] = by_rank.least(record) > 0
        p2p = np.asarray(flight.entries["p2p"].to_numpy(), bool)
        pairs = [divmod(name, span) for name in names.tolist()]
        return cls(lane, pairs, rank, sequence, p2p, truncated)

    def known(self) -> Bools:
        """Return which entries are not before the first of a recorder that dropped some."""
        shape, never = (len(self.names), self.truncated.size), np.iinfo(np.int64).max
        chosen = np.flatnonzero(~self.p2p)
        chosen = chosen[self.truncated[self.rank[chosen]]]
        place = self.lane[chosen] * self.truncated.size + self.rank[chosen]
        first = least_by(place, self.sequence[chosen], np.full(math.prod(shape), never))
        start = np.where(first == never, 0, first).reshape(shape).max(axis=1, initial=0)
        return np.asarray(self.p2p | (self.sequence >= start[self.lane]))

    def unknown(self) -> dict[tuple[int, int], frozenset[int]]:
        """Return of each lane the ranks whose recorders would not show what they called in it."""
        has_calls = np.zeros((len(self.names), self.truncated.size), bool)
        has_calls[self.lane, self.rank] = True
        silent = ~has_calls & self.truncated
        return {
            name: frozenset(np.flatnonzero(ranks).tolist())
            for name, ranks in zip(self.names, silent, strict=True)
        }


def _pairs(
    flight: Flight, kept: EntryRows, lanes: Ints, p2p: Bools, truncated: Bools
) -> tuple[Ints, Ints, Ints]:
    """Return of each send and receive its kind (source, destination, size), and its turn in it.

    One value for each of the rows that are `kept`. Turns count from the first one, or, where one
    side's recorder has dropped some, from the last that both have ended. The third is 0, or of
    what has no other side an own number.
    """
    pair, turn, tag = np.zeros((3, p2p.size), np.int64)
    rows = np.flatnonzero(p2p)
    some = flight.entries.take(pa.array(kept[rows]))
    own, peer = integers(some, "rank"), integers(some, "peer", -1)
    peer = _global_ranks(flight, integers(some, "group"), peer)
    send = texts(some, "operation") == "Send"
    source, target = np.where(send, own, peer), np.where(send, peer, own)
    kind = combined(lanes[rows], source, target, integers(some, "bytes", -1))
    order = order_by(kind, send, integers(some, "record"))
    side = (kind * 2 + send)[order]
    place = np.arange(side.size) - first_of(begins(side))
    ended = np.asarray(some["finished"].to_numpy(), bool)[order]
    total = sum_by(side, ended).astype(np.int64)[side]
    ranks = np.clip(np.stack([source, target]), 0, truncated.size - 1)
    dropped = truncated[ranks].any(axis=0)[order]
    pair[rows] = kind
    turn[rows[order]] = np.where(dropped, place - total, place)
    tag[rows[peer < 0]] = rows[peer < 0] + 1
    return pair, turn, tag


def _global_ranks(flight: Flight, group: GroupPlaces, peer: MemberPlaces) -> RankNumbers:
    """Return the ranks of other sides that are given in their groups' ranks; -1 if unknown."""
    ranks = np.full(peer.size, -1, np.int64)
    for number in np.unique(group).tolist():
        members = np.array(flight.groups[number].ranks or (), np.int64)
        in_group = (group == number) & (peer >= 0) & (peer < members.size)
        ranks[in_group] = members[peer[in_group]]
    return ranks
