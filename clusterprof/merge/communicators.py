"""Communicators of reports that name none, inferred from what their calls did.

Exports of nsys before 2025 carry no communicator id. What is left: every communicator of
PyTorch has a CUDA stream of its own, and the members of one collective end together, to
within tens of microseconds, whatever their clocks say: the difference of two members' ends is
constant, that of strangers is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.merge.calls import Calls, Ints, take
from clusterprof.merge.shift import Shift, find_shift

#: the ends of one collective's members scatter by less than this, or by this part of its length
_END_SPREAD_NS = 50_000
_END_SPREAD_FRAC = 0.25
#: with so few calls a constant difference may be chance: then the wall clocks must agree too
_FEW_CALLS = 3
_NEAR_NS = 1_000_000
#: with more streams than these not all pairs are compared (their number grows with the square)
_MANY_STREAMS = 128


@dataclass(frozen=True)
class Stream:
    """The calls of one rank on one stream, and which rows of the rank's calls they are."""

    rank: int
    rows: Ints
    calls: Calls


@dataclass(frozen=True)
class Partner:
    """Two streams of two ranks that may belong to one communicator."""

    a: int
    b: int
    shift: Shift
    spread_ns: float
    confidence: float


def streams(calls: Calls, rows: Ints) -> list[Stream]:
    """Split `rows` of one rank's calls by stream."""
    return [
        Stream(calls.rank, chosen, take(calls, chosen))
        for stream in np.unique(calls.stream[rows])
        for chosen in [rows[calls.stream[rows] == stream]]
    ]


def partner(a: Stream, b: Stream, index_a: int, index_b: int, slack: float = 1.0) -> Partner | None:
    """Return how well two streams go together; None if they cannot be of one communicator.

    Ends may scatter by `slack` times what is seen among members.
    """
    shift = find_shift(a.calls, b.calls)
    if shift is None:
        return None
    first = max(0, -shift.by)
    last = min(len(b.calls), len(a.calls) - shift.by)
    in_a, in_b = slice(first + shift.by, last + shift.by), slice(first, last)
    timed = a.calls.has[in_a] & b.calls.has[in_b]
    if not timed.any():
        return None
    apart = (a.calls.end[in_a] - b.calls.end[in_b])[timed]
    length = np.minimum(
        (a.calls.end - a.calls.start)[in_a][timed], (b.calls.end - b.calls.start)[in_b][timed]
    )
    spread = _spread((apart - apart[0]).astype(float), b.calls.end[in_b][timed])
    if spread > slack * max(_END_SPREAD_NS, _END_SPREAD_FRAC * float(np.median(length))):
        return None
    if len(apart) <= _FEW_CALLS:
        if abs(int(np.median(apart))) > _NEAR_NS:
            return None
        return Partner(index_a, index_b, shift, spread, 0.4 * shift.confidence)
    return Partner(index_a, index_b, shift, spread, 0.8 * shift.confidence)


def _spread(apart: np.ndarray, when: Ints) -> float:
    """Width of the middle nine tenths of `apart` (ns) once a constant drift is taken off."""
    if len(apart) >= 8:
        time = (when - when[0]).astype(float)
        apart = apart - np.polyval(np.polyfit(time, apart, 1), time)
    low, high = np.quantile(apart, [0.05, 0.95])
    return float(high - low)


def infer(nodes: list[Stream]) -> list[tuple[list[int], float]]:
    """Group streams of different ranks into communicators: (indices into `nodes`, confidence).

    Complete linkage, tightest pair first: each member must go together with each other one.
    With very many streams each is compared with one member of each group only.
    """
    if len(nodes) > _MANY_STREAMS:
        return _infer_many(nodes)
    pairs = {
        (i, j): found
        for i in range(len(nodes))
        for j in range(i + 1, len(nodes))
        if nodes[i].rank != nodes[j].rank
        and (found := partner(nodes[i], nodes[j], i, j)) is not None
    }
    group = {i: [i] for i in range(len(nodes))}
    for i, j in sorted(pairs, key=lambda pair: pairs[pair].spread_ns):
        one, other = group[i], group[j]
        if one is other:
            continue
        ranks = [nodes[k].rank for k in one + other]
        linked = all((min(k, m), max(k, m)) in pairs for k in one for m in other)
        if linked and len(set(ranks)) == len(ranks):
            one.extend(other)
            for k in other:
                group[k] = one
    seen: list[tuple[list[int], float]] = []
    for i, members in group.items():
        if members[0] == i:
            sure = [pairs[p].confidence for p in pairs if p[0] in members and p[1] in members]
            ordered = sorted(members, key=lambda k: nodes[k].rank)
            seen.append((ordered, min(sure, default=0.0)))
    return seen


def _infer_many(nodes: list[Stream]) -> list[tuple[list[int], float]]:
    """As `infer`: each stream joins the group whose first member it goes with most tightly."""
    groups: list[list[int]] = []
    sure: list[float] = []
    for i, node in enumerate(nodes):
        found = [
            (pair.spread_ns, k, pair.confidence)
            for k, members in enumerate(groups)
            if all(nodes[m].rank != node.rank for m in members)
            and (pair := partner(nodes[members[0]], node, members[0], i)) is not None
        ]
        if not found:
            groups.append([i])
            sure.append(1.0)
            continue
        _, k, confidence = min(found)
        groups[k].append(i)
        sure[k] = min(sure[k], 0.9 * confidence)
    ordered = [sorted(members, key=lambda m: nodes[m].rank) for members in groups]
    return [
        (members, c if len(members) > 1 else 0.0) for members, c in zip(ordered, sure, strict=True)
    ]
