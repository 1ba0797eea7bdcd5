"""Sends and receives, paired: the k-th Send of a to b with the k-th Recv of b from a."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.align.match.calls import UNKNOWN, MatchedRows, Part
from clusterprof.align.match.communicators import Fit
from clusterprof.align.match.shift import (
    CERTAIN,
    ContradictoryIdsError,
    KnownOffsets,
    Shift,
    find_shift,
    identified,
)
from clusterprof.columns import Ints, first_at_or_after, order_by

#: a waiting Recv ends together with its Send: to within this the two are taken for a pair
_ENDS_NS = 50_000


def _peers(parts: Sequence[Part], world_size: int | None) -> list[Ints]:
    """Each rank's peers as global ranks.

    Reports give the peer as the communicator's own rank. Where the communicator spans the
    world that is the global rank; where all its members have a report it is the place among
    them. Which of the two holds is read off the counts: Sends and Recvs must balance.
    """
    as_global = [member.calls.peer for member in parts]
    # Kineto gives the list of ranks and, beside it, peers that are global already
    if len(parts) == world_size or all(member.calls.members[0] for member in parts):
        return as_global
    ranks = np.asarray([member.rank for member in parts], dtype=np.int64)
    as_place = [
        np.where((p >= 0) & (p < len(ranks)), ranks[np.clip(p, 0, len(ranks) - 1)], UNKNOWN)
        for p in as_global
    ]
    return min((as_global, as_place), key=lambda peer: _imbalance(parts, peer))


def _imbalance(parts: Sequence[Part], peers: Sequence[Ints]) -> int:
    """How many Sends and Recvs between ranks with a report would lack their other side."""
    by_rank = {member.rank: place for place, member in enumerate(parts)}
    missing = 0
    for member, peer in zip(parts, peers, strict=True):
        for other in np.unique(peer).tolist():
            sends = int(((member.calls.operation == "Send") & (peer == other)).sum())
            back = 0
            if other != member.rank and other in by_rank:
                place = by_rank[other]
                theirs = parts[place].calls.operation == "Recv"
                back = int((theirs & (peers[place] == member.rank)).sum())
            missing += abs(sends - back)
    return missing


def pair_by_id(
    rows: MatchedRows, name: str, parts: Sequence[Part], world: int | None, clocks: KnownOffsets
) -> None:
    """Pair the point-to-point calls of one communicator, in order, by sender and receiver.

    `parts` are by rank, each with calls; `world` is the number of the job's ranks.
    """
    with_peer = {
        (member.rank, other): member.some(peer == other)
        for member, peer in zip(parts, _peers(parts, world), strict=True)
        for other in np.unique(peer).tolist()
    }
    by_rank = {member.rank: member for member in parts}
    undecided = []
    for (rank, other), calls in with_peer.items():
        if other not in by_rank:
            rows.unmatched(calls, name, f"the other side, rank {other}, has no report")
            continue
        if rank > other and (other, rank) in with_peer:
            continue
        theirs = with_peer.get((other, rank), by_rank[other].some(slice(0)))
        # an all-to-all has each rank send to itself too: that is one way
        for a, b in [(calls, theirs), (theirs, calls)][: 1 if rank == other else 2]:
            way = _of(a, "Send"), _of(b, "Recv")
            if not _pair(rows, name, *way, clocks):
                undecided.append(way)
    for send, recv in undecided:
        _pair(rows, name, send, recv, clocks, final=True)


def _of(calls: Part, operation: str) -> Part:
    return calls.some(calls.whole.operation[calls.rows] == operation)


def _pair(
    rows: MatchedRows,
    name: str,
    send: Part,
    recv: Part,
    clocks: KnownOffsets,
    *,
    final: bool = False,
) -> bool:
    """Pair one rank's Sends with another's Recvs, both in order of issue, as communicator `name`.

    By the profiler's ids where both have them; else by the one displacement of either side that
    sizes, steps and clocks allow. `clocks` are the offsets between ranks (ns) known so far: they
    decide between several displacements, and learn from those that are CERTAIN. Returns False where
    the displacement is not and no offset is known, which other pairs may yet tell; `final`: pair
    them all the same. What has no other side is unmatched, with a reason.
    """
    if not len(send) and not len(recv):
        return True
    expected_ns, by_id = clocks.between(send.rank, recv.rank), None
    try:
        by_id = identified(send.calls, recv.calls, directed=True)
    except ContradictoryIdsError as error:
        rows.contradicted[name] = str(error)
    if by_id is not None and by_id.shift is None:  # no one displacement: calls were lost on the way
        clocks.add(send.rank, recv.rank, by_id.offset_ns)
        rows.pairs(name, send.some(by_id.in_a), recv.some(by_id.in_b), 1.0)
        for side, inside, other in ((send, by_id.in_a, recv), (recv, by_id.in_b, send)):
            rest = replace(side, rows=np.delete(side.rows, inside))
            rows.unmatched(rest, name, f"no call of rank {other.rank} has its id")
        return True
    shift = (by_id and by_id.shift) or find_shift(
        send.calls, recv.calls, directed=True, expected_ns=expected_ns
    )
    if shift is None:
        for side, other in ((send, recv), (recv, send)):
            rows.unmatched(side, name, f"no order of calls fits those of rank {other.rank}")
        return True
    if shift.confidence >= CERTAIN:
        clocks.add(send.rank, recv.rank, shift.offset_ns)
    elif expected_ns is None and not final:
        return False
    in_send, in_recv = shift.overlap(send, recv)
    rows.pairs(name, send.some(in_send), recv.some(in_recv), shift.confidence)
    _not_in_both_windows(rows, name, send, recv, shift)
    return True


def _not_in_both_windows(rows: MatchedRows, name: str, a: Part, b: Part, shift: Shift) -> None:
    """Add what stands beside no call of the other side."""
    in_a, in_b = shift.overlap(a, b)
    for side, inside, other in ((a, in_a, b), (b, in_b, a)):
        rest = replace(side, rows=np.delete(side.rows, inside))
        rows.unmatched(rest, name, f"not within the window of rank {other.rank}")


def pair_by_time(rows: MatchedRows, parts: Sequence[Part]) -> None:
    """Pair Sends and Recvs of reports without ids: mirrored sequences first, then ends."""
    nodes = [stream for calls in parts for stream in calls.streams()]
    fits = {
        (i, j): mirrored
        for i, a in enumerate(nodes)
        for j in range(i + 1, len(nodes))
        if nodes[j].rank != a.rank and (mirrored := _mirrored(a, nodes[j])) is not None
    }
    taken: set[int] = set()
    for (i, j), pair in sorted(fits.items(), key=lambda item: item[1].spread_ns):
        if i in taken or j in taken:
            continue
        taken |= {i, j}
        a, b = nodes[i], nodes[j]
        in_a, in_b = pair.shift.overlap(a, b)
        first, second = a.some(in_a), b.some(in_b)
        sent = first.whole.operation[first.rows] == "Send"
        name = _name(a.rank, b.rank)
        rows.pairs(name, first.some(sent), second.some(sent), pair.confidence)
        rows.pairs(name, second.some(~sent), first.some(~sent), pair.confidence)
        _not_in_both_windows(rows, "inferred", a, b, pair.shift)
    _by_ends(rows, parts, [node for k, node in enumerate(nodes) if k not in taken])


def _mirrored(a: Part, b: Part) -> Fit | None:
    """Return how well each Send of one stream goes with a Recv of the other; None if not at all.

    A Recv ends when its Send has ended, a dozen microseconds later where the receiver was
    waiting, never before. So over both directions the least times from a Send's end to its
    Recv's end add up to next to nothing, whatever the clocks say; of other streams they do not.
    """
    operation = np.where(b.calls.operation == "Send", "Recv", "Send").astype(object)
    shift = find_shift(a.calls, replace(b.calls, operation=operation))
    if shift is None:
        return None
    in_a, in_b = shift.overlap(a, b)
    timed = a.calls.has[in_a] & b.calls.has[in_b]
    later = (b.calls.end[in_b] - a.calls.end[in_a])[timed]
    sent = a.calls.operation[in_a][timed] == "Send"
    if not sent.any() or sent.all():
        return None
    forth, back = later[sent], -later[~sent]
    closing = int(forth.min() + back.min())
    soon = (way - way.min() < _ENDS_NS for way in (forth, back))
    at_once = float(np.concatenate([*soon]).mean())
    if not -_ENDS_NS < closing < 2 * _ENDS_NS or at_once < 0.2:
        return None
    return Fit(shift, float(abs(closing)), 0.8 * shift.confidence)


def _name(a: int, b: int) -> str:
    return f"inferred:{min(a, b)},{max(a, b)}"


def _by_ends(rows: MatchedRows, parts: Sequence[Part], nodes: Sequence[Part]) -> None:
    """Pair what is left where a Send and a Recv of two ranks end together, mutually nearest."""
    if not nodes:
        return
    rank = np.concatenate([np.full(len(n), n.rank) for n in nodes])
    row = np.concatenate([n.rows for n in nodes])
    end = np.concatenate([n.calls.end for n in nodes])
    has = np.concatenate([n.calls.has for n in nodes])
    sends = np.concatenate([n.calls.operation == "Send" for n in nodes])
    send, recv = np.flatnonzero(sends & has), np.flatnonzero(~sends & has)
    mate = np.full(len(rank), UNKNOWN, dtype=np.int64)
    if len(send) and len(recv):
        to_recv, to_send = _nearest(end[send], end[recv]), _nearest(end[recv], end[send])
        good = to_send[to_recv] == np.arange(len(send))
        good &= np.abs(end[send] - end[recv[to_recv]]) <= _ENDS_NS
        good &= rank[send] != rank[recv[to_recv]]
        mate[send[good]], mate[recv[to_recv[good]]] = recv[to_recv[good]], send[good]
    whole = {member.rank: member.whole for member in parts}
    paired = np.flatnonzero(sends & (mate >= 0))
    for a, b in sorted({(int(rank[k]), int(rank[mate[k]])) for k in paired}):
        pair = paired[(rank[paired] == a) & (rank[mate[paired]] == b)]
        rows.pairs(_name(a, b), Part(whole[a], row[pair]), Part(whole[b], row[mate[pair]]), 0.5)
    for a, calls in whole.items():
        left = Part(calls, row[(rank == a) & (mate < 0)])
        rows.unmatched(left, "inferred", "no other rank's call ends with it")


def _nearest(values: Ints, among: Ints) -> Ints:
    """Which of `among` (indices) is nearest to each value."""
    order = order_by(among)
    right = first_at_or_after(among[order], values).clip(max=len(among) - 1)
    left = np.maximum(right - 1, 0)
    nearer = values - among[order[left]] <= among[order[right]] - values
    return np.asarray(order[np.where(nearer, left, right)])
