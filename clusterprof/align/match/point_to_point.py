"""Sends and receives, paired: the k-th Send of a to b with the k-th Recv of b from a."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.align.match.calls import UNKNOWN, Calls, Ints, take
from clusterprof.align.match.communicators import Partner, Stream, streams
from clusterprof.align.match.rough_clocks import RoughClocks
from clusterprof.align.match.rows import Rows
from clusterprof.align.match.shift import SURE, find_shift

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


def pair_by_id(
    rows: Rows,
    name: str,
    calls: Sequence[Calls],
    picked: Sequence[Ints],
    world: int | None,
    clocks: RoughClocks,
) -> None:
    """Pair the point-to-point calls of one communicator, in order, by sender and receiver."""
    unsure = []
    chosen = [take(c, p) for c, p in zip(calls, picked, strict=True)]
    there = sorted(c.rank for c in chosen)
    peer = peers(chosen, there, world)
    at = {c.rank: i for i, c in enumerate(chosen)}
    for i, c in enumerate(chosen):
        for other in np.unique(peer[i]):
            towards = peer[i] == other
            if int(other) not in at:
                why = f"the other side, rank {other}, has no report"
                rows.alone(calls[i], picked[i][towards], name, why)
                continue
            if (c.rank, int(other)) != tuple(sorted((c.rank, int(other)))):
                continue
            j = at[int(other)]
            back = peer[j] == c.rank
            ways = ((i, j, towards, back), (j, i, back, towards))
            # an all-to-all has each rank send to itself too: that is one way
            for one, two, first, second in ways[: 1 if i == j else 2]:
                send = picked[one][first & (chosen[one].operation == "Send")]
                recv = picked[two][second & (chosen[two].operation == "Recv")]
                each = (calls[one], send, calls[two], recv)
                if not _pair(rows, name, *each, clocks):
                    unsure.append(each)
    for each in unsure:
        _pair(rows, name, *each, clocks, final=True)


def _pair(
    rows: Rows,
    name: str,
    a: Calls,
    send: Ints,
    b: Calls,
    recv: Ints,
    clocks: RoughClocks,
    *,
    final: bool = False,
) -> bool:
    """Pair one direction; False, and nothing is done, where other pairs may yet settle it."""
    if not len(send) and not len(recv):
        return True
    expected = clocks.between(a.rank, b.rank)
    shift = find_shift(take(a, send), take(b, recv), directed=True, expected_ns=expected)
    if shift is None:
        rows.alone(a, send, name, f"no order of calls fits those of rank {b.rank}")
        rows.alone(b, recv, name, f"no order of calls fits those of rank {a.rank}")
        return True
    if shift.confidence >= SURE:
        clocks.tell(a.rank, b.rank, shift.offset_ns)
    elif expected is None and not final:
        return False
    by = shift.by
    first, last = max(0, -by), min(len(recv), len(send) - by)
    rows.pairs(name, a, send[first + by : last + by], b, recv[first:last], shift.confidence)
    outside = np.r_[send[: first + by], send[last + by :]].astype(np.int64)
    rows.alone(a, outside, name, f"outside the window of rank {b.rank}")
    outside = np.r_[recv[:first], recv[last:]].astype(np.int64)
    rows.alone(b, outside, name, f"outside the window of rank {a.rank}")
    return True


def pair_by_time(rows: Rows, calls: Sequence[Calls], picked: Sequence[Ints]) -> None:
    """Pair Sends and Recvs of reports without ids: mirrored sequences first, then ends."""
    nodes = [s for c, p in zip(calls, picked, strict=True) for s in streams(c, p)]
    by_rank = {c.rank: c for c in calls}
    found: list[Partner] = []
    for i, a in enumerate(nodes):
        for j in range(i + 1, len(nodes)):
            if nodes[j].rank != a.rank:
                mirrored = _mirrored(a, nodes[j], i, j)
                if mirrored is not None:
                    found.append(mirrored)
    taken: set[int] = set()
    for p in sorted(found, key=lambda f: f.spread_ns):
        if p.a in taken or p.b in taken:
            continue
        taken |= {p.a, p.b}
        a, b = nodes[p.a], nodes[p.b]
        first = max(0, -p.shift.by)
        last = min(len(b.rows), len(a.rows) - p.shift.by)
        in_a, in_b = a.rows[first + p.shift.by : last + p.shift.by], b.rows[first:last]
        _rows_of_pair(rows, by_rank[a.rank], in_a, by_rank[b.rank], in_b, p.confidence)
        left = np.r_[a.rows[: first + p.shift.by], a.rows[last + p.shift.by :]].astype(np.int64)
        rows.alone(by_rank[a.rank], left, "inferred", f"outside the window of rank {b.rank}")
        left = np.r_[b.rows[:first], b.rows[last:]].astype(np.int64)
        rows.alone(by_rank[b.rank], left, "inferred", f"outside the window of rank {a.rank}")
    rest = [nodes[k] for k in range(len(nodes)) if k not in taken]
    _by_ends(rows, by_rank, rest)


def _mirrored(a: Stream, b: Stream, index_a: int, index_b: int) -> Partner | None:
    """Return how well each Send of one stream goes with a Recv of the other; None if not at all.

    A Recv ends when its Send has ended, a dozen microseconds later where the receiver was
    waiting, never before. So over both directions the least times from a Send's end to its
    Recv's end add up to next to nothing, whatever the clocks say; of strangers they do not.
    """
    turned = take(b.calls, np.arange(len(b.calls)))
    operation = np.where(b.calls.operation == "Send", "Recv", "Send").astype(object)
    turned = replace(turned, operation=operation)
    shift = find_shift(a.calls, turned)
    if shift is None:
        return None
    first, last = max(0, -shift.by), min(len(b.rows), len(a.rows) - shift.by)
    in_a, in_b = slice(first + shift.by, last + shift.by), slice(first, last)
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
    return Partner(index_a, index_b, shift, float(abs(closing)), 0.8 * shift.confidence)


def _rows_of_pair(
    rows: Rows, a: Calls, in_a: Ints, b: Calls, in_b: Ints, confidence: float
) -> None:
    name = f"inferred:{min(a.rank, b.rank)},{max(a.rank, b.rank)}"
    out = a.operation[in_a] == "Send"
    rows.pairs(name, a, in_a[out], b, in_b[out], confidence)
    rows.pairs(name, b, in_b[~out], a, in_a[~out], confidence)


def _by_ends(rows: Rows, calls: dict[int, Calls], nodes: list[Stream]) -> None:
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
        name = f"inferred:{min(a, b)},{max(a, b)}"
        rows.pairs(name, calls[a], row[of], calls[b], row[mate[of]], 0.5)
    for a in sorted(calls):
        lonely = row[(rank == a) & (mate < 0)]
        rows.alone(calls[a], lonely, "inferred", "no other rank's call ends with it")


def _nearest(values: Ints, among: Ints) -> Ints:
    order = np.argsort(among)
    at = np.clip(np.searchsorted(among[order], values), 1, max(1, len(among) - 1))
    if len(among) == 1:
        return np.zeros(len(values), dtype=np.int64)
    left, right = among[order[at - 1]], among[order[at]]
    return np.asarray(order[np.where(values - left <= right - values, at - 1, at)])
