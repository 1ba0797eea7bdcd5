"""Which call of one rank is which call of another: collectives across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import words
from clusterprof.align.match.calls import POINT_TO_POINT, UNKNOWN, Bools, Calls, Ints, read, take
from clusterprof.align.match.communicators import infer, streams
from clusterprof.align.match.matched import MatchedRows
from clusterprof.align.match.naming import named_alike
from clusterprof.align.match.point_to_point import pair_by_id, pair_by_time
from clusterprof.align.match.shift import CERTAIN, KnownOffsets, Shift, agree, find_shift
from clusterprof.tables import RankTables

#: in the metadata of what `match` returns: see `tolerance`
TOLERANCE = b"tolerance_ns"
#: confidence in a match within one step, where a call is missing from the window
_STEP_BY_STEP = 0.8


@dataclass(frozen=True)
class Part:
    """One rank's part of a communicator: some rows of its calls."""

    calls: Calls
    rows: Ints

    @property
    def rank(self) -> int:
        """The rank whose calls they are."""
        return self.calls.rank

    def split(self) -> tuple[Part, Part]:
        """Return the collectives, and the sends and receives."""
        directed = np.isin(self.calls.operation[self.rows].astype(str), list(POINT_TO_POINT))
        return self.some(~directed), self.some(directed)

    def some(self, which: Bools | Ints) -> Part:
        """Return the part of some of its rows."""
        return Part(self.calls, self.rows[which])

    def taken(self) -> Calls:
        """Return the calls themselves."""
        return take(self.calls, self.rows)


def match(ranks: Sequence[RankTables]) -> pa.Table:
    """Match the collective calls of all ranks; schema `clusterprof.align.match.MATCHED`.

    By communicator and order where the reports have ids, those first that leave no choice, since
    they determine the clock offsets for the others; else by stream, order and times, with less
    confidence. Every call of every rank is in the result exactly once; what has no
    counterpart stays, with its reason. Assumes that a communicator's members issue its calls in
    the same order, which NCCL and gloo require themselves. `tolerance` reads what the table's
    metadata have.
    """
    rows, clocks = MatchedRows(), KnownOffsets()
    calls, confidence = named_alike(
        [read(tables) for tables in sorted(ranks, key=lambda r: r.rank)]
    )
    sizes = {t.info.world_size for t in ranks if t.info.world_size is not None}
    world = sizes.pop() if len(sizes) == 1 else None
    named: dict[str, list[Part]] = {}
    nameless: list[Part] = []
    for c in calls:
        none = np.asarray([name is None for name in c.communicator], dtype=bool)
        nameless.append(Part(c, np.flatnonzero(none)))
        for name in dict.fromkeys(c.communicator[~none]):
            named.setdefault(name, []).append(Part(c, np.flatnonzero(c.communicator == name)))
    directed: list[tuple[str, list[Part]]] = []
    undecided: list[tuple[str, list[Part]]] = []
    for name, parts in named.items():
        both = [part.split() for part in parts]
        whole = [collectives for collectives, _ in both]
        if not _collectives(rows, name, whole, clocks, confidence.get(name, 1.0)):
            undecided.append((name, whole))
        there = [sends for _, sends in both if len(sends.rows)]
        if there:
            directed.append((name, there))
    for name, parts in undecided:
        _collectives(rows, name, parts, clocks, confidence.get(name, 1.0), final=True)
    for name, parts in directed:
        pair_by_id(rows, name, [p.calls for p in parts], [p.rows for p in parts], world, clocks)
    within = _nameless(rows, nameless, world)
    return rows.table().replace_schema_metadata({TOLERANCE: str(round(within))})


def tolerance(matched: pa.Table) -> int | None:
    """Return within how many ns members end whose communicators `match` inferred; None without."""
    names = pc.unique(matched["communicator"])
    inferred = pc.and_(pc.starts_with(names, "inferred:"), pc.match_substring(names, ","))
    return int((matched.schema.metadata or {})[TOLERANCE]) if pc.any(inferred).as_py() else None


def _nameless(rows: MatchedRows, parts: Sequence[Part], world: int | None) -> float:
    """Match calls of inferred communicators; returns within what their members end (ns)."""
    both = [part.split() for part in parts]
    there = [sends for _, sends in both if len(sends.rows)]
    if there:
        pair_by_time(rows, [p.calls for p in there], [p.rows for p in there])
    nodes = [s for whole, _ in both for s in streams(whole.calls, whole.rows)]
    by_rank = {part.rank: part.calls for part in parts}
    used: dict[str, int] = {}
    alone = not there and all(len(part.rows) == len(part.calls) > 0 for part in parts)
    inferred, within = infer(nodes, whole=alone and len(parts) == world)
    for group, confidence in inferred:
        name = "inferred:" + ",".join(str(nodes[k].rank) for k in group)
        used[name] = used.get(name, 0) + 1
        if used[name] > 1:
            name += f"#{used[name]}"
        members = [Part(by_rank[nodes[k].rank], nodes[k].rows) for k in group]
        _collectives(rows, name, members, KnownOffsets(), confidence, final=True)
    return within


def _collectives(
    rows: MatchedRows,
    name: str,
    parts: Sequence[Part],
    clocks: KnownOffsets,
    confidence: float = 1.0,
    *,
    final: bool = False,
) -> bool:
    """Match one communicator's collectives (no point-to-point) in order.

    False, and nothing is done, where `clocks` may come to know what would decide it; never with
    `final`.
    """
    parts = [part for part in parts if len(part.rows)]
    if len(parts) < 2:
        for part in parts:
            rows.unmatched(part.calls, part.rows, name, "single member profiled")
        return True
    longest = max(range(len(parts)), key=lambda k: len(parts[k].rows))
    whole = parts[longest].taken()
    shifts: list[Shift | None] = [
        Shift(0, 1.0, 0)
        if k == longest
        else find_shift(whole, part.taken(), expected_ns=clocks.between(whole.rank, part.rank))
        for k, part in enumerate(parts)
    ]
    for part, s in zip(parts, shifts, strict=True):
        if s is not None and s.confidence >= CERTAIN:
            clocks.add(whole.rank, part.rank, s.offset_ns)
    if not final and any(s is not None and s.confidence < CERTAIN for s in shifts):
        return False
    known = [s for s in shifts if s is not None]
    if len(known) < len(shifts):
        _step_by_step(rows, name, parts, longest, shifts, confidence)
    else:
        _add(
            rows, name, parts, [s.by for s in known], confidence * min(s.confidence for s in known)
        )
    return True


def _add(
    rows: MatchedRows, name: str, parts: Sequence[Part], by: Sequence[int], confidence: float
) -> None:
    """Add members' calls that are displaced by so many against each other."""
    order = [np.arange(len(part.rows)) + k - min(by) for part, k in zip(parts, by, strict=True)]
    kept = _agreeing(rows, name, parts, order)
    rows.collectives(
        name,
        [part.calls for part in parts],
        [part.rows[k] for part, k in zip(parts, kept, strict=True)],
        [o[k] for o, k in zip(order, kept, strict=True)],
        confidence,
        _roots(parts),
    )


def _agreeing(
    rows: MatchedRows, name: str, parts: Sequence[Part], order: Sequence[Ints]
) -> list[Bools]:
    """Which rows stand opposite the same operation everywhere; the others are unmatched."""
    good = np.ones(1 + max(int(o.max()) for o in order), dtype=bool)
    at = np.full(len(good), UNKNOWN, dtype=np.int64)
    at[order[0]] = parts[0].rows
    for part, o in zip(parts[1:], order[1:], strict=True):
        both = at[o] >= 0
        good[o[both]] &= agree(take(parts[0].calls, at[o][both]), take(part.calls, part.rows[both]))
    kept = [good[o] for o in order]
    for part, mine in zip(parts, kept, strict=True):
        reason = "operations or sizes disagree at this place"
        rows.unmatched(part.calls, part.rows[~mine], name, reason)
    return kept


def _roots(parts: Sequence[Part]) -> dict[int, int]:
    """Global ranks of the communicator's ranks, where they can be known."""
    listed = next((m for p in parts for m in p.calls.members[p.rows][:1] if m is not None), None)
    if listed is not None:
        return dict(enumerate(listed))
    ranks = sorted(part.rank for part in parts)
    return dict(enumerate(ranks)) if ranks == list(range(len(ranks))) else {}


def _step_by_step(
    rows: MatchedRows,
    name: str,
    parts: Sequence[Part],
    longest: int,
    shifts: Sequence[Shift | None],
    confidence: float,
) -> None:
    """Match where no single displacement holds (a call was lost on the way): step by step.

    Members without steps, and steps in which the members differ in number or kind of calls,
    are left unmatched: better unmatched than misaligned by one.
    """
    marked = [part.calls.marked[part.rows] for part in parts]
    common = marked[0]
    for other in marked[1:]:
        common = np.intersect1d(common, other)
    common = np.unique(common[common != UNKNOWN])
    if not len(common):
        _without_other_windows(rows, name, parts, longest, shifts, confidence)
        return
    matched = [np.zeros(len(part.rows), dtype=bool) for part in parts]
    for step in common:
        inside = [np.flatnonzero(mine == step) for mine in marked]
        if len({len(i) for i in inside}) != 1:
            continue
        here = [part.some(i) for part, i in zip(parts, inside, strict=True)]
        if not all(bool(agree(here[longest].taken(), part.taken()).all()) for part in here):
            continue
        _add(rows, name, here, [0] * len(parts), confidence * _STEP_BY_STEP)
        for m, i in zip(matched, inside, strict=True):
            m[i] = True
    odd = words.ranks(part.rank for part, s in zip(parts, shifts, strict=True) if s is None)
    for part, m in zip(parts, matched, strict=True):
        reason = f"order and times do not fit those of {odd}"
        rows.unmatched(part.calls, part.rows[~m], name, reason)


def _without_other_windows(
    rows: MatchedRows,
    name: str,
    parts: Sequence[Part],
    longest: int,
    shifts: Sequence[Shift | None],
    confidence: float,
) -> None:
    """Match members that fit each other; those whose window has nothing in common are unmatched."""
    fits = [s is not None for s in shifts]
    if 2 * sum(fits) < len(parts):  # the longest is the one that fits none
        fits = [k != longest for k in range(len(parts))]
    for part, good in zip(parts, fits, strict=True):
        if not good:
            reason = "its window has no step in common with the others'"
            rows.unmatched(part.calls, part.rows, name, reason)
    rest = [part for part, good in zip(parts, fits, strict=True) if good]
    _collectives(rows, name, rest, KnownOffsets(), confidence, final=True)
