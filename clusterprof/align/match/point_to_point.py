"""Sends and receives, paired: the k-th Send of a to b with the k-th Recv of b from a."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.align.match.calls import UNKNOWN, Calls, MatchedRows
from clusterprof.align.match.communicators import Fit
from clusterprof.align.match.shift import (
    CERTAIN,
    ContradictoryIdsError,
    KnownOffsets,
    Shift,
    find_shift,
    identified,
)
from clusterprof.align.time_stamps import ENDS_NS
from clusterprof.columns import Ints, RankNumbers, first_at_or_after, order_by, where_known


def _peers(members: Sequence[Calls], world_size: int | None) -> list[RankNumbers]:
    """Each rank's peers.

    Reports give the peer as the communicator's own rank. Where the communicator spans the
    world that is the global rank; where all its members have a report it is the place among
    them. Which of the two holds is read off the counts: Sends and Recvs must balance.
    """
    as_global = [calls.peer for calls in members]
    # Kineto gives the list of ranks and, beside it, peers that are global already
    if len(members) == world_size or all(calls.members[0] for calls in members):
        return as_global
    ranks = np.asarray([calls.rank for calls in members], dtype=np.int64)
    as_place = [where_known(ranks, peer.clip(-1, len(ranks)), UNKNOWN) for peer in as_global]
    return min((as_global, as_place), key=lambda peers: _imbalance(members, peers))


def _imbalance(members: Sequence[Calls], peers: Sequence[RankNumbers]) -> int:
    """How many Sends and Recvs between ranks with a report would lack their other side."""
    by_rank = {calls.rank: (calls, peer) for calls, peer in zip(members, peers, strict=True)}
    missing = 0
    for rank, (calls, peer) in by_rank.items():
        for other in np.unique(peer).tolist():
            sends = int(np.count_nonzero((calls.operation == "Send") & (peer == other)))
            back = 0
            if other != rank and other in by_rank:
                theirs, their_peer = by_rank[other]
                received = (theirs.operation == "Recv") & (their_peer == rank)
                back = int(np.count_nonzero(received))
            missing += abs(sends - back)
    return missing


def pair_by_id(
    rows: MatchedRows, name: str, members: Sequence[Calls], world: int | None, clocks: KnownOffsets
) -> None:
    """Pair the point-to-point calls of one communicator, in order, by sender and receiver.

    `members` are by rank, each with calls; `world` is the number of the job's ranks.
    """
    with_peer = {
        (calls.rank, other): calls.take(peer == other)
        for calls, peer in zip(members, _peers(members, world), strict=True)
        for other in np.unique(peer).tolist()
    }
    by_rank = {calls.rank: calls for calls in members}
    undecided = []
    for (rank, other), calls in with_peer.items():
        if other not in by_rank:
            rows.unmatched(calls, name, f"the other side, rank {other}, has no report")
            continue
        if rank > other and (other, rank) in with_peer:
            continue
        theirs = with_peer.get((other, rank), by_rank[other].take(slice(0)))
        # an all-to-all has each rank send to itself too: that is one way
        for a, b in [(calls, theirs), (theirs, calls)][: 1 if rank == other else 2]:
            send, recv = a.take(a.operation == "Send"), b.take(b.operation == "Recv")
            if not _pair(rows, name, send, recv, clocks):
                undecided.append((send, recv))
    for send, recv in undecided:
        _pair(rows, name, send, recv, clocks, final=True)


def _pair(
    rows: MatchedRows,
    name: str,
    send: Calls,
    recv: Calls,
    clocks: KnownOffsets,
    *,
    final: bool = False,
) -> bool:
    """Pair one rank's Sends with another's Recvs, both in order of issue, as communicator `name`.

    By the profiler's ids where both have them; else by the one shift that sizes, steps and clocks
    allow: by how many calls one side's recording begins after the other's. `clocks` are the offsets
    between ranks (ns) known so far: they decide between several shifts, and learn from those that
    are CERTAIN. Returns True when all calls are in `rows`, what has no other side as unmatched with
    a reason; and False, with no row written, where the shift is not certain and no offset is known,
    which other pairs may yet tell. `final`: they are paired all the same.
    """
    if not len(send) and not len(recv):
        return True
    expected_ns, by_id = clocks.between(send.rank, recv.rank), None
    try:
        by_id = identified(send, recv, directed=True)
    except ContradictoryIdsError as error:
        rows.contradicted[name] = str(error)
    shift = by_id or find_shift(send, recv, directed=True, expected_ns=expected_ns)
    if shift is None:
        for calls, other in ((send, recv), (recv, send)):
            rows.unmatched(calls, name, f"no order of calls fits those of rank {other.rank}")
        return True
    if shift.confidence >= CERTAIN:
        clocks.add(send.rank, recv.rank, shift.offset_ns)
    elif expected_ns is None and not final:
        return False
    in_send, in_recv = shift.overlap(send, recv)
    rows.pairs(name, send.take(in_send), recv.take(in_recv), shift.confidence)
    _without_other_side(rows, name, send, recv, shift)
    return True


def _without_other_side(rows: MatchedRows, name: str, a: Calls, b: Calls, shift: Shift) -> None:
    """Add what stands beside no call of the other side."""
    for calls, inside, rank in zip((a, b), shift.overlap(a, b), (b.rank, a.rank), strict=True):
        window, by_id = (
            f"not within the window of rank {rank}",
            f"no call of rank {rank} has its id",
        )
        rows.unmatched(calls.without(inside), name, window if shift.paired is None else by_id)


def pair_by_time(rows: MatchedRows, members: Sequence[Calls]) -> None:
    """Pair Sends and Recvs of reports without ids: mirrored sequences first, then ends."""
    nodes = [stream for calls in members for stream in calls.streams()]
    fits = {
        (i, j): mirrored
        for i, a in enumerate(nodes)
        for j in range(i + 1, len(nodes))
        if nodes[j].rank != a.rank and (mirrored := _mirrored(a, nodes[j])) is not None
    }
    taken: set[int] = set()
    for (i, j), pair in sorted(fits.items(), key=lambda item: item[1].spread_ns):
        if taken & {i, j}:
            continue
        taken |= {i, j}
        a, b = nodes[i], nodes[j]
        in_a, in_b = pair.shift.overlap(a, b)
        first, second = a.take(in_a), b.take(in_b)
        sent = first.operation == "Send"
        for send, recv, rows_sent in ((first, second, sent), (second, first, ~sent)):
            name = _name(a.rank, b.rank)
            rows.pairs(name, send.take(rows_sent), recv.take(rows_sent), pair.confidence)
        _without_other_side(rows, "inferred", a, b, pair.shift)
    left = []
    for calls in members:
        paired = [nodes[k].stream[0] for k in taken if nodes[k].rank == calls.rank]
        rest = calls.take(~np.isin(calls.stream, paired))
        left.append(rest.take(order_by(rest.stream)))
    _by_ends(rows, left)


def _mirrored(a: Calls, b: Calls) -> Fit | None:
    """Return how well each Send of one stream goes with a Recv of the other; None if not at all.

    A Recv ends when its Send has ended, a dozen microseconds later where the receiver was
    waiting, never before. So over both directions the least times from a Send's end to its
    Recv's end add up to next to nothing, whatever the clocks say; of other streams they do not.
    """
    operation = np.where(b.operation == "Send", "Recv", "Send").astype(object)
    shift = find_shift(a, replace(b, operation=operation))
    if shift is None:
        return None
    in_a, in_b = shift.overlap(a, b)
    timed = a.has[in_a] & b.has[in_b]
    later = (b.end[in_b] - a.end[in_a])[timed]
    sent = a.operation[in_a][timed] == "Send"
    if not sent.any() or sent.all():
        return None
    forth, back = later[sent], -later[~sent]
    closing = int(forth.min() + back.min())
    soon = (way - way.min() < ENDS_NS for way in (forth, back))
    at_once = float(np.concatenate([*soon]).mean())
    if not -ENDS_NS < closing < 2 * ENDS_NS or at_once < 0.2:
        return None
    return Fit(shift, float(abs(closing)), 0.8 * shift.confidence)


def _name(a: int, b: int) -> str:
    return f"inferred:{min(a, b)},{max(a, b)}"


def _by_ends(rows: MatchedRows, members: Sequence[Calls]) -> None:
    """Pair what is left where a Send and a Recv of two ranks end together, mutually nearest."""
    rank = np.concatenate([np.full(len(calls), calls.rank) for calls in members])
    row = np.concatenate([np.arange(len(calls)) for calls in members])
    end, has = (np.concatenate([getattr(c, name) for c in members]) for name in ("end", "has"))
    sends = np.concatenate([calls.operation == "Send" for calls in members])
    send, recv = np.flatnonzero(sends & has), np.flatnonzero(~sends & has)
    mate = np.full(len(rank), UNKNOWN, dtype=np.int64)
    if len(send) and len(recv):
        to_recv, to_send = _nearest(end[send], end[recv]), _nearest(end[recv], end[send])
        good = to_send[to_recv] == np.arange(len(send))
        good &= np.abs(end[send] - end[recv[to_recv]]) <= ENDS_NS
        good &= rank[send] != rank[recv[to_recv]]
        mate[send[good]], mate[recv[to_recv[good]]] = recv[to_recv[good]], send[good]
    by_rank = {calls.rank: calls for calls in members}
    paired = np.flatnonzero(sends & (mate >= 0))
    for a, b in sorted({(int(rank[k]), int(rank[mate[k]])) for k in paired}):
        pair = paired[(rank[paired] == a) & (rank[mate[paired]] == b)]
        send_calls, recv_calls = by_rank[a].take(row[pair]), by_rank[b].take(row[mate[pair]])
        rows.pairs(_name(a, b), send_calls, recv_calls, 0.5)
    for calls in members:
        left = calls.take(mate[rank == calls.rank] < 0)
        rows.unmatched(left, "inferred", "no other rank's call ends with it")


def _nearest(values: Ints, among: Ints) -> Ints:
    """Which of `among` (indices) is nearest to each value."""
    order = order_by(among)
    right = first_at_or_after(among[order], values).clip(max=len(among) - 1)
    left = np.maximum(right - 1, 0)
    nearer = values - among[order[left]] <= among[order[right]] - values
    return np.asarray(order[np.where(nearer, left, right)])
