"""Which call of one rank is which call of another: collectives across ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.align.match.calls import UNKNOWN, MatchedRows, Part, read
from clusterprof.align.match.communicators import infer, named_alike
from clusterprof.align.match.point_to_point import pair_by_id, pair_by_time
from clusterprof.align.match.shift import (
    CERTAIN,
    ContradictoryIdsError,
    Identified,
    KnownOffsets,
    Shift,
    agree,
    find_shift,
    identified,
)
from clusterprof.columns import Ints, inverse, least_by, order_by, places
from clusterprof.tables import RankTables

#: in the metadata of what `match` returns: see `tolerance` and `contradicted`
TOLERANCE, CONTRADICTED = b"tolerance_ns", b"contradicted"
#: confidence in a match within one step, where a call is missing from the window
_STEP_BY_STEP = 0.8


def match(ranks: Sequence[RankTables]) -> pa.Table:
    """Match the collective calls of all ranks; schema `clusterprof.align.match.MATCHED`.

    By the profiler's ids of operations where the reports have them, else by communicator and order
    where they have its id, those first that leave no choice, since
    they determine the clock offsets for the others; else by stream, order and times, with less
    confidence. Every call of every rank is in the result exactly once; what has no
    counterpart stays, with its reason. Assumes that a communicator's members issue its calls in
    the same order, which NCCL and gloo require themselves. `tolerance` and `contradicted` read what
    the table's metadata have.
    """
    rows, clocks = MatchedRows(), KnownOffsets()
    calls, confidence = named_alike([read(t) for t in sorted(ranks, key=lambda r: r.rank)])
    sizes = {t.info.world_size for t in ranks if t.info.world_size is not None}
    world = sizes.pop() if len(sizes) == 1 else None
    named: dict[str, list[Part]] = {}
    nameless: list[Part] = []
    for c in calls:
        parts = c.every.by("communicator")
        nameless.append(parts.pop(None, c.every.some(slice(0))))
        for name, member in parts.items():
            named.setdefault(name, []).append(member)
    # NCCL's own ids are the same on all members
    ids = any(name.startswith("0x") for name in named)
    unprofiled = math.inf if ids or world is None else max(world - len(ranks), 0)
    undecided: list[_Communicator] = []
    directed: dict[str, list[Part]] = {}
    for name, of_name in named.items():
        collectives, sends = _split(of_name)
        if _share_no_name(collectives, unprofiled):
            nameless += collectives
            collectives = []
        communicator = _Communicator(rows, name, collectives, confidence.get(name, 1.0))
        if not communicator.match(clocks):
            undecided.append(communicator)
        if sends:
            directed[name] = sends
    for communicator in undecided:
        communicator.match(clocks, final=True)
    for name, sends in directed.items():
        pair_by_id(rows, name, sends, world, clocks)
    within = _nameless(rows, nameless, world)
    metadata = {TOLERANCE: str(round(within)), CONTRADICTED: json.dumps(rows.contradicted)}
    return rows.table().replace_schema_metadata(metadata)


def tolerance(matched: pa.Table) -> int | None:
    """Return within how many ns members end whose communicators `match` inferred; None without."""
    names = pc.unique(matched["communicator"])
    inferred = pc.and_(pc.starts_with(names, "inferred:"), pc.match_substring(names, ","))
    return int((matched.schema.metadata or {})[TOLERANCE]) if pc.any(inferred).as_py() else None


def contradicted(matched: pa.Table) -> dict[str, str]:
    """Return the communicators whose operations' ids contradict each other, and how."""
    reasons: dict[str, str] = json.loads((matched.schema.metadata or {}).get(CONTRADICTED, b"{}"))
    return reasons


def _share_no_name(parts: Sequence[Part], unprofiled: float) -> bool:
    """Whether the members of a communicator, of one name, cannot be those of one communicator.

    They are more than it has members, or fewer than it has among the profiled ranks: several
    communicators have one name, or one has several. Those of a list of ranks are what it says.
    """
    most = min((member.most_members for member in parts), default=0)
    listed = any(member.whole.members[member.rows[0]] is not None for member in parts)
    fewer = most < math.inf and not listed and most - len(parts) > unprofiled
    return len(parts) > most or fewer


def _split(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """The ranks' collectives, and their sends and receives: of those that have any."""
    both = [member.split() for member in parts]
    return [c for c, _ in both if len(c)], [s for _, s in both if len(s)]


def _nameless(rows: MatchedRows, parts: Sequence[Part], world: int | None) -> float:
    """Match calls of inferred communicators; returns within what their members end (ns)."""
    collectives, sends = _split(parts)
    if sends:
        pair_by_time(rows, sends)
    nodes = [stream for calls in collectives for stream in calls.streams()]
    used: dict[str, int] = {}
    alone = not sends and all(len(calls) == len(calls.whole) > 0 for calls in parts)
    inferred, within = infer(nodes, whole=alone and len(parts) == world)
    for group, confidence in inferred:
        name = "inferred:" + ",".join(str(nodes[k].rank) for k in group)
        used[name] = used.get(name, 0) + 1
        if used[name] > 1:
            name += f"#{used[name]}"
        members = [nodes[k] for k in group]
        _Communicator(rows, name, members, confidence).match(KnownOffsets(), final=True)
    return within


@dataclass(frozen=True)
class _Communicator:
    """The collectives (no point-to-point) of one communicator, by rank, to go into `rows`."""

    rows: MatchedRows
    name: str
    parts: Sequence[Part]
    confidence: float

    def match(self, clocks: KnownOffsets, *, final: bool = False) -> bool:
        """Match the calls in order.

        False, and nothing is done, where `clocks` may come to know what would decide it; never
        with `final`.
        """
        if len(self.parts) < 2:
            self._unmatched(self.parts, "single member profiled")
            return True
        longest = max(self.parts, key=len)
        same = self._identified(longest)
        if all(same) and not all(identity and identity.shift for identity in same):
            self._by_ids([identity.offset_ns for identity in same if identity])
            return True
        shifts = [
            (identity and identity.shift)
            or find_shift(
                longest.calls, member.calls, expected_ns=clocks.between(longest.rank, member.rank)
            )
            for member, identity in zip(self.parts, same, strict=True)
        ]
        fitting = [s for s in shifts if s is not None]
        for member, s in zip(self.parts, shifts, strict=True):
            if s is not None and s.confidence >= CERTAIN:
                clocks.add(longest.rank, member.rank, s.offset_ns)
        if not final and any(s.confidence < CERTAIN for s in fitting):
            return False
        if len(fitting) == len(shifts):
            by = [s.by for s in fitting]
            order = [np.arange(len(p)) + k - min(by) for p, k in zip(self.parts, by, strict=True)]
            self._add(order, min(s.confidence for s in fitting))
            return True
        fits = [s is not None for s in shifts]
        common: Ints = reduce(np.intersect1d, [p.whole.marked[p.rows] for p in self.parts])
        if (common != UNKNOWN).any():
            self._step_by_step(common[common != UNKNOWN], longest, fits)
        else:
            self._without_other_windows(longest, fits)
        return True

    def _unmatched(self, parts: Sequence[Part], reason: str) -> None:
        for member in parts:
            self.rows.unmatched(member, self.name, reason)

    def _identified(self, longest: Part) -> list[Identified | None]:
        """What the ids of operations say of each member beside the longest: None without ids."""
        calls = longest.calls
        itself = Identified(longest.rows[:0], longest.rows[:0], 0, Shift(0, 1.0, 0))
        try:
            return [
                itself if part is longest else identified(calls, part.calls) for part in self.parts
            ]
        except ContradictoryIdsError as error:
            self.rows.contradicted[self.name] = str(error)
        return [itself if member is longest else None for member in self.parts]

    def _by_ids(self, offsets_ns: Sequence[int]) -> None:
        """Match by the ids of operations alone, where calls were lost on the way.

        `offsets_ns`: the longest member's clock minus each one's, which gives the calls' order.
        """
        with_ids = [member.some(member.calls.identity != UNKNOWN) for member in self.parts]
        ids = np.concatenate([member.calls.identity for member in with_ids])
        issued = [member.calls.issue + by for member, by in zip(with_ids, offsets_ns, strict=True)]
        distinct, place = places(ids)
        last = np.full(len(distinct), np.iinfo(np.int64).max)
        first_issued = least_by(place, np.concatenate(issued), last)
        order = inverse(order_by(first_issued))[place]
        of_members = np.split(order, np.cumsum([len(member) for member in with_ids])[:-1])
        replace(self, parts=with_ids)._add(of_members, 1.0)
        rest = [member.some(member.calls.identity == UNKNOWN) for member in self.parts]
        self._unmatched(rest, "it has no id, and the order of those that have one has gaps")

    def _add(self, order: Sequence[Ints], confidence: float) -> None:
        """Add the members' calls at these places of their common order.

        Not those that stand opposite another operation somewhere: they are unmatched.
        """
        good = np.ones(1 + max(int(o.max()) for o in order), dtype=bool)
        first = self.parts[0]
        row_at = np.full(len(good), UNKNOWN, dtype=np.int64)
        row_at[order[0]] = first.rows
        for member, o in zip(self.parts[1:], order[1:], strict=True):
            both = row_at[o] >= 0
            good[o[both]] &= agree(first.whole, row_at[o][both], member.whole, member.rows[both])
        members = [(member, o, good[o]) for member, o in zip(self.parts, order, strict=True)]
        odd = [member.some(~kept) for member, _, kept in members]
        self._unmatched(odd, "operations or sizes disagree at this place")
        # global ranks of the communicator's ranks, where they can be known
        roots = [m for p in self.parts for m in p.whole.members[p.rows[:1]] if m is not None]
        ranks = sorted(member.rank for member in self.parts)
        if ranks == list(range(len(ranks))):
            roots.append(ranks)
        self.rows.collectives(
            self.name,
            [member.some(kept) for member, _, kept in members],
            [o[kept] for _, o, kept in members],
            self.confidence * confidence,
            dict(enumerate(roots[0] if roots else ())),
        )

    def _step_by_step(self, steps: Ints, longest: Part, fits: Sequence[bool]) -> None:
        """Match where no single displacement holds (a call was lost on the way): step by step.

        Members without steps, and steps in which the members differ in number or kind of calls,
        are left unmatched: better unmatched than misaligned by one.
        """
        place = next(k for k, member in enumerate(self.parts) if member is longest)
        matched: list[list[Ints]] = [[] for _ in self.parts]
        for step in steps:
            inside = [calls.some(calls.whole.marked[calls.rows] == step) for calls in self.parts]
            whole = inside[place]
            if all(
                len(calls) == len(whole)
                and agree(whole.whole, whole.rows, calls.whole, calls.rows).all()
                for calls in inside
            ):
                replace(self, parts=inside)._add([np.arange(len(p)) for p in inside], _STEP_BY_STEP)
                for rows, calls in zip(matched, inside, strict=True):
                    rows.append(calls.rows)
        odd = words.ranks(p.rank for p, good in zip(self.parts, fits, strict=True) if not good)
        rest = [
            member.some(~np.isin(member.rows, np.concatenate([member.rows[:0], *rows])))
            for member, rows in zip(self.parts, matched, strict=True)
        ]
        self._unmatched(rest, f"order and times do not fit those of {odd}")

    def _without_other_windows(self, longest: Part, fits: Sequence[bool]) -> None:
        """Match members that fit each other; those whose window has nothing in common are not."""
        if 2 * sum(fits) < len(fits):  # the longest is the one that fits none
            fits = [member is not longest for member in self.parts]
        members = list(zip(self.parts, fits, strict=True))
        reason = "its window has no step in common with the others'"
        self._unmatched([member for member, good in members if not good], reason)
        rest = replace(self, parts=[member for member, good in members if good])
        rest.match(KnownOffsets(), final=True)
