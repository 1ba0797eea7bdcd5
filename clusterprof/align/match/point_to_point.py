"""Sends and receives, paired: the k-th Send of a to b with the k-th Recv of b from a."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from clusterprof.align.match.calls import UNKNOWN, Calls, Ints, take
from clusterprof.align.match.communicators import Fit, Stream, streams
from clusterprof.align.match.matched import MatchedRows
from clusterprof.align.match.shift import CERTAIN, KnownOffsets, find_shift

#: a waiting Recv ends together with its Send: to within this the two are taken for a pair
_ENDS_NS = 50_000


def peers(calls: Sequence[Calls], members: list[int], world_size: int | None) -> list[Ints]:
    """Return each rank's peers as global ranks.

    Reports give the peer as the communicator's own rank. Where the communicator spans the
    world that is the global rank; where all its members have a report it is the place among
    them. Which of the two holds is read off the counts: Sends and Recvs must balance.
    """
    as_global = [c.peer for c in calls]
    if all(m is not None for c in calls for m in c.members[:1]) and len(calls[0].members):
        listed = np.asarray(calls[0].members[0], dtype=np.int64)
        if len(listed):
            # Kineto: the list of ranks and, beside it, peers that are global already
            return as_global
    place = np.asarray(members, dtype=np.int64)
    as_place = [
        np.where((p >= 0) & (p < len(place)), place[np.clip(p, 0, len(place) - 1)], UNKNOWN)
        for p in as_global
    ]
    if world_size is not None and len(members) == world_size:
        return as_global
    return min((as_global, as_place), key=lambda peer: _imbalance(calls, peer))


def _imbalance(calls: Sequence[Calls], peer: Sequence[Ints]) -> int:
    """How many Sends and Recvs between ranks with a report would lack their other side."""
    at = {c.rank: i for i, c in enumerate(calls)}
    missing = 0
    for i, c in enumerate(calls):
        for other in np.unique(peer[i]):
            sends = int(((c.operation == "Send") & (peer[i] == other)).sum())
            if int(other) == c.rank or int(other) not in at:
                missing += sends
                continue
            j = at[int(other)]
            back = (calls[j].operation == "Recv") & (peer[j] == c.rank)
            missing += abs(sends - int(back.sum()))
    return missing


@dataclass(frozen=True)
class _OneWay:
    """The Sends (rows) of `a` to `b`, and the Recvs of `b` from `a`."""

    a: Calls
    send: Ints
    b: Calls
    recv: Ints


def pair_by_id(
    rows: MatchedRows,
    name: str,
    calls: Sequence[Calls],
    picked: Sequence[Ints],
    world: int | None,
    clocks: KnownOffsets,
) -> None:
    """Pair the point-to-point calls of one communicator, in order, by sender and receiver."""
    chosen = [take(c, p) for c, p in zip(calls, picked, strict=True)]
    peer = peers(chosen, sorted(c.rank for c in chosen), world)
    at = {c.rank: i for i, c in enumerate(chosen)}
    undecided = []
    for i, c in enumerate(chosen):
        for other in np.unique(peer[i]).tolist():
            towards = peer[i] == other
            if other not in at:
                why = f"the other side, rank {other}, has no report"
                rows.unmatched(calls[i], picked[i][towards], name, why)
                continue
            if c.rank > other:
                continue
            j = at[other]
            back = peer[j] == c.rank
            ways = ((i, j, towards, back), (j, i, back, towards))
            # an all-to-all has each rank send to itself too: that is one way
            for one, two, first, second in ways[: 1 if i == j else 2]:
                send = picked[one][first & (chosen[one].operation == "Send")]
                recv = picked[two][second & (chosen[two].operation == "Recv")]
                way = _OneWay(calls[one], send, calls[two], recv)
                if not _pair(rows, name, way, clocks):
                    undecided.append(way)
    for way in undecided:
        _pair(rows, name, way, clocks, final=True)


def _pair(
    rows: MatchedRows, name: str, way: _OneWay, clocks: KnownOffsets, *, final: bool = False
) -> bool:
    """Pair one direction; False, and nothing is done, where other pairs may yet decide it."""
    a, send, b, recv = way.a, way.send, way.b, way.recv
    if not len(send) and not len(recv):
        return True
    expected = clocks.between(a.rank, b.rank)
    shift = find_shift(take(a, send), take(b, recv), directed=True, expected_ns=expected)
    if shift is None:
        rows.unmatched(a, send, name, f"no order of calls fits those of rank {b.rank}")
        rows.unmatched(b, recv, name, f"no order of calls fits those of rank {a.rank}")
        return True
    if shift.confidence >= CERTAIN:
        clocks.add(a.rank, b.rank, shift.offset_ns)
    elif expected is None and not final:
        return False
    in_a, in_b = shift.overlap(len(send), len(recv))
    rows.pairs(name, a, send[in_a], b, recv[in_b], shift.confidence)
    _not_in_both_windows(rows, name, way, in_a, in_b)
    return True


def _not_in_both_windows(
    rows: MatchedRows, name: str, way: _OneWay, in_a: slice, in_b: slice
) -> None:
    """Add what stands beside no call of the other side."""
    for calls, mine, inside, other in (
        (way.a, way.send, in_a, way.b.rank), (way.b, way.recv, in_b, way.a.rank)
    ):  # fmt: skip
        rest = np.delete(mine, inside)
        rows.unmatched(calls, rest, name, f"not within the window of rank {other}")


def pair_by_time(rows: MatchedRows, calls: Sequence[Calls], picked: Sequence[Ints]) -> None:
    """Pair Sends and Recvs of reports without ids: mirrored sequences first, then ends."""
    nodes = [s for c, p in zip(calls, picked, strict=True) for s in streams(c, p)]
    by_rank = {c.rank: c for c in calls}
    found = {
        (i, j): mirrored
        for i, a in enumerate(nodes)
        for j in range(i + 1, len(nodes))
        if nodes[j].rank != a.rank and (mirrored := _mirrored(a, nodes[j])) is not None
    }
    taken: set[int] = set()
    for (i, j), pair in sorted(found.items(), key=lambda each: each[1].spread_ns):
        if i in taken or j in taken:
            continue
        taken |= {i, j}
        one, two = nodes[i], nodes[j]
        a, b = by_rank[one.rank], by_rank[two.rank]
        in_a, in_b = pair.shift.overlap(len(one.rows), len(two.rows))
        first, second = one.rows[in_a], two.rows[in_b]
        out = a.operation[first] == "Send"
        name = _name(a.rank, b.rank)
        rows.pairs(name, a, first[out], b, second[out], pair.confidence)
        rows.pairs(name, b, second[~out], a, first[~out], pair.confidence)
        _not_in_both_windows(rows, "inferred", _OneWay(a, one.rows, b, two.rows), in_a, in_b)
    _by_ends(rows, by_rank, [nodes[k] for k in range(len(nodes)) if k not in taken])


def _mirrored(a: Stream, b: Stream) -> Fit | None:
    """Return how well each Send of one stream goes with a Recv of the other; None if not at all.

    A Recv ends when its Send has ended, a dozen microseconds later where the receiver was
    waiting, never before. So over both directions the least times from a Send's end to its
    Recv's end add up to next to nothing, whatever the clocks say; of other streams they do not.
    """
    operation = np.where(b.calls.operation == "Send", "Recv", "Send").astype(object)
    shift = find_shift(a.calls, replace(b.calls, operation=operation))
    if shift is None:
        return None
    in_a, in_b = shift.overlap(len(a.rows), len(b.rows))
    timed = a.calls.has[in_a] & b.calls.has[in_b]
    later = (b.calls.end[in_b] - a.calls.end[in_a])[timed]
    out = a.calls.operation[in_a][timed] == "Send"
    if not out.any() or out.all():
        return None
    there, back = later[out], -later[~out]
    closing = int(there.min() + back.min())
    at_once = float(np.r_[there - there.min() < _ENDS_NS, back - back.min() < _ENDS_NS].mean())
    if not -_ENDS_NS < closing < 2 * _ENDS_NS or at_once < 0.2:
        return None
    return Fit(shift, float(abs(closing)), 0.8 * shift.confidence)


def _name(a: int, b: int) -> str:
    return f"inferred:{min(a, b)},{max(a, b)}"


def _by_ends(rows: MatchedRows, calls: dict[int, Calls], nodes: list[Stream]) -> None:
    """Pair what is left where a Send and a Recv of two ranks end together, mutually nearest."""
    if not nodes:
        return
    rank = np.concatenate([np.full(len(n.rows), n.rank) for n in nodes])
    row = np.concatenate([n.rows for n in nodes])
    end = np.concatenate([n.calls.end for n in nodes])
    has = np.concatenate([n.calls.has for n in nodes])
    sends = np.concatenate([n.calls.operation == "Send" for n in nodes])
    send, recv = np.flatnonzero(sends & has), np.flatnonzero(~sends & has)
    mate = np.full(len(rank), UNKNOWN, dtype=np.int64)
    if len(send) and len(recv):
        one, two = _nearest(end[send], end[recv]), _nearest(end[recv], end[send])
        mutual = two[one] == np.arange(len(send))
        close = np.abs(end[send] - end[recv[one]]) <= _ENDS_NS
        apart = rank[send] != rank[recv[one]]
        good = mutual & close & apart
        mate[send[good]] = recv[one[good]]
        mate[recv[one[good]]] = send[good]
    paired = np.flatnonzero(sends & (mate >= 0))
    for a, b in sorted({(int(rank[k]), int(rank[mate[k]])) for k in paired}):
        of = paired[(rank[paired] == a) & (rank[mate[paired]] == b)]
        rows.pairs(_name(a, b), calls[a], row[of], calls[b], row[mate[of]], 0.5)
    for a in sorted(calls):
        left = row[(rank == a) & (mate < 0)]
        rows.unmatched(calls[a], left, "inferred", "no other rank's call ends with it")


def _nearest(values: Ints, among: Ints) -> Ints:
    order = np.argsort(among)
    at = np.clip(np.searchsorted(among[order], values), 1, max(1, len(among) - 1))
    if len(among) == 1:
        return np.zeros(len(values), dtype=np.int64)
    left, right = among[order[at - 1]], among[order[at]]
    return np.asarray(order[np.where(values - left <= right - values, at - 1, at)])
