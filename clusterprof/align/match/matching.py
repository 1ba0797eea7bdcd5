"""Which call of one rank is which call of another: collectives across ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.match.calls import POINT_TO_POINT, UNKNOWN, Calls, Ints, read, take
from clusterprof.align.match.communicators import infer, streams
from clusterprof.align.match.naming import named_alike
from clusterprof.align.match.point_to_point import pair_by_id, pair_by_time
from clusterprof.align.match.rough_clocks import RoughClocks
from clusterprof.align.match.rows import Rows
from clusterprof.align.match.shift import SURE, Shift, agree, find_shift
from clusterprof.tables import RankTables

#: in the metadata of what `match` returns: see `tolerance`
TOLERANCE = b"tolerance_ns"


def match(ranks: Sequence[RankTables]) -> pa.Table:
    """Match the collective calls of all ranks; schema `clusterprof.merge.MATCHED`.

    By communicator and order where the reports have ids, those first that leave no choice, since
    they tell how the clocks lie for the others; else by stream, order and times, with less
    confidence. Every call of every rank is in the result exactly once; what has no
    counterpart stays, with its reason. Assumes that a communicator's members issue its calls in
    the same order, which NCCL and gloo require themselves. `tolerance` reads what the table's
    metadata have.
    """
    rows = Rows()
    calls, sure = named_alike([read(tables) for tables in sorted(ranks, key=lambda r: r.rank)])
    sizes = {t.info.world_size for t in ranks if t.info.world_size is not None}
    world = sizes.pop() if len(sizes) == 1 else None
    named: dict[str, list[tuple[Calls, Ints]]] = {}
    nameless: list[tuple[Calls, Ints]] = []
    for c in calls:
        none = np.asarray([name is None for name in c.communicator], dtype=bool)
        nameless.append((c, np.flatnonzero(none)))
        for name in dict.fromkeys(c.communicator[~none]):
            named.setdefault(name, []).append((c, np.flatnonzero(c.communicator == name)))
    clocks = RoughClocks()
    directed: list[tuple[str, list[tuple[Calls, Ints]]]] = []
    unsure: list[tuple[str, list[tuple[Calls, Ints]]]] = []
    for name, parts in named.items():
        pairs = [np.isin(c.operation[r].astype(str), list(POINT_TO_POINT)) for c, r in parts]
        whole = [(c, r[~p]) for (c, r), p in zip(parts, pairs, strict=True)]
        if not _collectives(rows, name, whole, clocks, sure.get(name, 1.0)):
            unsure.append((name, whole))
        there = [(c, r[p]) for (c, r), p in zip(parts, pairs, strict=True) if p.any()]
        if there:
            directed.append((name, there))
    for name, parts in unsure:
        _collectives(rows, name, parts, clocks, sure.get(name, 1.0), final=True)
    for name, parts in directed:
        pair_by_id(rows, name, [c for c, _ in parts], [r for _, r in parts], world, clocks)
    within = _nameless(rows, nameless, world)
    return rows.table().replace_schema_metadata({TOLERANCE: str(round(within))})


def tolerance(matched: pa.Table) -> int | None:
    """Return within how many ns members end whose communicators `match` inferred; None without."""
    names = pc.starts_with(pc.unique(matched["communicator"]), "inferred:")
    inferred = pc.any(pc.and_(names, pc.match_substring(pc.unique(matched["communicator"]), ",")))
    return int((matched.schema.metadata or {})[TOLERANCE]) if inferred.as_py() else None


def _nameless(rows: Rows, parts: list[tuple[Calls, Ints]], world: int | None) -> float:
    """Match calls of inferred communicators; returns within what their members end (ns)."""
    pairs = [np.isin(c.operation[r].astype(str), list(POINT_TO_POINT)) for c, r in parts]
    there = [(c, r[p]) for (c, r), p in zip(parts, pairs, strict=True) if p.any()]
    if there:
        pair_by_time(rows, [c for c, _ in there], [r for _, r in there])
    nodes = [s for (c, r), p in zip(parts, pairs, strict=True) for s in streams(c, r[~p])]
    by_rank = {c.rank: c for c, _ in parts}
    used: dict[str, int] = {}
    alone = not there and all(len(r) == len(c) > 0 for c, r in parts)
    inferred, within = infer(nodes, whole=alone and len(parts) == world)
    for group, confidence in inferred:
        name = "inferred:" + ",".join(str(nodes[k].rank) for k in group)
        used[name] = used.get(name, 0) + 1
        if used[name] > 1:
            name += f"#{used[name]}"
        members = [(by_rank[nodes[k].rank], nodes[k].rows) for k in group]
        _collectives(rows, name, members, RoughClocks(), confidence, final=True)
    return within


def _collectives(
    rows: Rows,
    name: str,
    parts: list[tuple[Calls, Ints]],
    clocks: RoughClocks,
    confidence: float = 1.0,
    *,
    final: bool = False,
) -> bool:
    """Match one communicator's collectives (no point-to-point) in order.

    False, and nothing is done, where `clocks` may come to know what would settle it; never with
    `final`.
    """
    parts = [(c, r) for c, r in parts if len(r)]
    if len(parts) < 2:
        for c, r in parts:
            rows.alone(c, r, name, "single member profiled")
        return True
    base = max(range(len(parts)), key=lambda k: len(parts[k][1]))
    whole = take(parts[base][0], parts[base][1])
    shifts: list[Shift | None] = [
        Shift(0, 1.0, 0) if k == base else _shift(whole, take(c, r), clocks)
        for k, (c, r) in enumerate(parts)
    ]
    for (c, _), s in zip(parts, shifts, strict=True):
        if s is not None and s.confidence >= SURE:
            clocks.tell(whole.rank, c.rank, s.offset_ns)
    if not final and any(s is not None and s.confidence < SURE for s in shifts):
        return False
    if any(s is None for s in shifts):
        _step_by_step(rows, name, parts, base, shifts, confidence)
    else:
        placed = [(s.by, s.confidence) for s in shifts if s is not None]
        _add(rows, name, parts, placed, confidence)
    return True


def _shift(a: Calls, b: Calls, clocks: RoughClocks) -> Shift | None:
    return find_shift(a, b, expected_ns=clocks.between(a.rank, b.rank))


def _add(
    rows: Rows,
    name: str,
    parts: list[tuple[Calls, Ints]],
    shifts: list[tuple[int, float]],
    confidence: float,
) -> None:
    least = min(by for by, _ in shifts)
    order = [np.arange(len(r)) + by - least for (_, r), (by, _) in zip(parts, shifts, strict=True)]
    kept = _agreeing(rows, name, parts, order)
    sure = confidence * min(s for _, s in shifts)
    rows.collectives(
        name,
        [c for c, _ in parts],
        [r[k] for (_, r), k in zip(parts, kept, strict=True)],
        [o[k] for o, k in zip(order, kept, strict=True)],
        sure,
        _roots(parts),
    )


def _agreeing(
    rows: Rows, name: str, parts: list[tuple[Calls, Ints]], order: list[Ints]
) -> list[np.ndarray]:
    """Which rows stand opposite the same operation everywhere; the others are set aside."""
    length = 1 + max(int(o.max()) for o in order)
    good = np.ones(length, dtype=bool)
    (first, first_rows), first_order = parts[0], order[0]
    at = np.full(length, UNKNOWN, dtype=np.int64)
    at[first_order] = first_rows
    for (c, r), o in zip(parts[1:], order[1:], strict=True):
        both = at[o] >= 0
        same = agree(take(first, at[o][both]), take(c, r[both]))
        good[o[both]] &= same
        unseen = o[~both]
        good[unseen] &= True
    kept = [good[o] for o in order]
    for (c, r), k in zip(parts, kept, strict=True):
        rows.alone(c, r[~k], name, "operations or sizes disagree at this place")
    return kept


def _roots(parts: list[tuple[Calls, Ints]]) -> dict[int, int]:
    """Global ranks of the communicator's ranks, where they can be known."""
    listed = next((m for c, r in parts for m in c.members[r][:1] if m is not None), None)
    ranks = list(listed) if listed is not None else sorted(c.rank for c, _ in parts)
    return dict(enumerate(ranks)) if listed is not None or ranks == list(range(len(ranks))) else {}


def _without_strangers(
    rows: Rows,
    name: str,
    parts: list[tuple[Calls, Ints]],
    base: int,
    shifts: list[Shift | None],
    confidence: float,
) -> None:
    """Match members that fit each other; those whose window has nothing in common are alone."""
    fit = [s is not None for s in shifts]
    if 2 * sum(fit) < len(parts):  # the longest is the one that fits none
        fit = [k != base for k in range(len(parts))]
    for (c, r), good in zip(parts, fit, strict=True):
        if not good:
            rows.alone(c, r, name, "its window has no step in common with the others'")
    rest = [part for part, good in zip(parts, fit, strict=True) if good]
    _collectives(rows, name, rest, RoughClocks(), confidence, final=True)


def _step_by_step(
    rows: Rows,
    name: str,
    parts: list[tuple[Calls, Ints]],
    base: int,
    shifts: list[Shift | None],
    confidence: float,
) -> None:
    """Match where no single displacement holds (a call was lost on the way): step by step.

    Members without steps, and steps in which the members differ in number or kind of calls,
    are left unmatched: better a hole than a misalignment by one.
    """
    steps = [np.unique(c.marked[r]) for c, r in parts]
    common = steps[0]
    for other in steps[1:]:
        common = np.intersect1d(common, other)
    common = common[common != UNKNOWN]
    if not len(common):
        _without_strangers(rows, name, parts, base, shifts, confidence)
        return
    matched = [np.zeros(len(r), dtype=bool) for _, r in parts]
    for step in common:
        inside = [np.flatnonzero(c.marked[r] == step) for c, r in parts]
        if len({len(i) for i in inside}) != 1:
            continue
        here = [take(c, r[i]) for (c, r), i in zip(parts, inside, strict=True)]
        if not all(bool(agree(here[base], h).all()) for h in here):
            continue
        chosen = [(c, r[i]) for (c, r), i in zip(parts, inside, strict=True)]
        _add(rows, name, chosen, [(0, 0.8)] * len(parts), confidence)
        for m, i in zip(matched, inside, strict=True):
            m[i] = True
    odd = [c.rank for (c, _), s in zip(parts, shifts, strict=True) if s is None]
    reason = f"order and times do not fit those of rank {', '.join(map(str, odd))}"
    for (c, r), m in zip(parts, matched, strict=True):
        rows.alone(c, r[~m], name, reason)
