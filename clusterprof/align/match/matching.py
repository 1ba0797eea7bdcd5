"""Which call of one rank is which call of another: collectives across ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.align.match.calls import UNKNOWN, Calls, MatchedRows, read
from clusterprof.align.match.communicators import infer, named_alike
from clusterprof.align.match.point_to_point import pair_by_id, pair_by_time
from clusterprof.align.match.shift import (
    CERTAIN,
    ContradictoryIdsError,
    KnownOffsets,
    Shift,
    agree,
    find_shift,
    identified,
)
from clusterprof.columns import CommonPlaces, StepNumbers, inverse, least_by, order_by, places
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
    sizes = {t.info.world_size for t in ranks} - {None}
    world = sizes.pop() if len(sizes) == 1 else None
    named, nameless = _by_name(calls)
    # streams of all ranks of a job, and nothing else: its communicators divide them evenly
    whole = not named and len(calls) == world and all(map(len, calls))
    # NCCL's own ids are the same on all members
    ids = any(name.startswith("0x") for name in named)
    unprofiled = math.inf if ids or world is None else max(world - len(ranks), 0)
    communicators, directed = [], []
    for name, of_name in named.items():
        members, sends = _split(of_name)
        if _share_no_name(members, unprofiled):
            nameless += members
            members = []
        communicators.append(_Communicator(rows, name, members, confidence.get(name, 1.0)))
        directed.append((name, sends))
    undecided = [communicator for communicator in communicators if not communicator.match(clocks)]
    for communicator in undecided:
        communicator.match(clocks, final=True)
    for name, sends in directed:
        pair_by_id(rows, name, sends, world, clocks)
    within = _nameless(rows, nameless, whole=whole)
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


def _by_name(calls: Sequence[Calls]) -> tuple[dict[str, list[Calls]], list[Calls]]:
    """The ranks' calls of each communicator, and of each rank those without one."""
    named: dict[str, list[Calls]] = {}
    nameless = []
    for own in calls:
        by_name = own.by("communicator")
        nameless.append(by_name.pop(None, own.take(slice(0))))
        for name, member in by_name.items():
            named.setdefault(name, []).append(member)
    return named, nameless


def _share_no_name(members: Sequence[Calls], unprofiled: float) -> bool:
    """Whether the members of a communicator, of one name, cannot be those of one communicator.

    They are more than it has members, or fewer than it has among the profiled ranks: several
    communicators have one name, or one has several. Those of a list of ranks are what it says.
    """
    most = min((calls.most_members for calls in members), default=0)
    listed = any(calls.members[0] is not None for calls in members)
    fewer = most < math.inf and not listed and most - len(members) > unprofiled
    return len(members) > most or fewer


def _split(members: Sequence[Calls]) -> tuple[list[Calls], list[Calls]]:
    """The ranks' collectives, and their sends and receives: of those that have any."""
    collectives = [calls.take(~calls.directed) for calls in members if not calls.directed.all()]
    return collectives, [calls.take(calls.directed) for calls in members if calls.directed.any()]


def _nameless(rows: MatchedRows, members: Sequence[Calls], *, whole: bool) -> float:
    """Match calls of inferred communicators; returns within what their members end (ns).

    `whole`: they are all calls of all ranks.
    """
    collectives, sends = _split(members)
    if sends:
        pair_by_time(rows, sends)
    nodes = [stream for calls in collectives for stream in calls.streams()]
    used: Counter[str] = Counter()
    inferred, within = infer(nodes, whole=whole and not sends)
    for group, confidence in inferred:
        name = "inferred:" + ",".join(str(nodes[k].rank) for k in group)
        used[name] += 1
        unique = name if used[name] == 1 else f"{name}#{used[name]}"
        communicator = _Communicator(rows, unique, [nodes[k] for k in group], confidence)
        communicator.match(KnownOffsets(), final=True)
    return within


@dataclass(frozen=True)
class _Communicator:
    """The collectives (no point-to-point) of one communicator, by rank, to go into `rows`."""

    rows: MatchedRows
    name: str
    members: Sequence[Calls]
    confidence: float

    def match(self, clocks: KnownOffsets, *, final: bool = False) -> bool:
        """Match the calls in order.

        False, and nothing is done, where `clocks` may come to know what would decide it; never
        with `final`.
        """
        if len(self.members) < 2:
            self._unmatched(self.members, "single member profiled")
            return True
        longest = max(self.members, key=len)
        by_id = self._identified(longest)
        if all(by_id) and any(shift.paired for shift in by_id if shift):
            self._by_ids([shift.offset_ns for shift in by_id if shift])
            return True
        shifts = [
            (shift if shift and not shift.paired else None)
            or find_shift(longest, calls, expected_ns=clocks.between(longest.rank, calls.rank))
            for calls, shift in zip(self.members, by_id, strict=True)
        ]
        for calls, shift in zip(self.members, shifts, strict=True):
            if shift is not None and shift.confidence >= CERTAIN:
                clocks.add(longest.rank, calls.rank, shift.offset_ns)
        return self._in_order(longest, shifts, final=final)

    def _in_order(self, longest: Calls, shifts: Sequence[Shift | None], *, final: bool) -> bool:
        """As `match`, each member displaced against the longest by its shift, where it has one."""
        fitting = [shift for shift in shifts if shift is not None]
        confidence = min(shift.confidence for shift in fitting)
        if confidence < CERTAIN and not final:
            return False
        if len(fitting) < len(shifts):
            self._where_some_do_not_fit(longest, [shift is not None for shift in shifts])
            return True
        least = min(shift.by for shift in fitting)
        by = [shift.by - least for shift in fitting]
        self._add(
            [np.arange(len(m)) + k for m, k in zip(self.members, by, strict=True)], confidence
        )
        return True

    def _unmatched(self, members: Sequence[Calls], reason: str) -> None:
        for calls in members:
            self.rows.unmatched(calls, self.name, reason)

    def _identified(self, longest: Calls) -> list[Shift | None]:
        """How each member is displaced against the longest by the ids of operations."""
        itself = Shift(0, 1.0, 0)
        try:
            return [itself if m is longest else identified(longest, m) for m in self.members]
        except ContradictoryIdsError as error:
            self.rows.contradicted[self.name] = str(error)
        return [itself if m is longest else None for m in self.members]

    def _by_ids(self, offsets_ns: Sequence[int]) -> None:
        """Match by the ids of operations alone, where calls were lost on the way.

        `offsets_ns`: the longest member's clock minus each one's, which gives the calls' order.
        """
        has_id = [calls.identity != UNKNOWN for calls in self.members]
        with_ids = [calls.take(has) for calls, has in zip(self.members, has_id, strict=True)]
        ids = np.concatenate([calls.identity for calls in with_ids])
        issued = [calls.issue + by for calls, by in zip(with_ids, offsets_ns, strict=True)]
        distinct, place = places(ids)
        last = np.full(len(distinct), np.iinfo(np.int64).max)
        first_issued = least_by(place, np.concatenate(issued), last)
        order = inverse(order_by(first_issued))[place]
        of_members = np.split(order, np.cumsum([len(calls) for calls in with_ids])[:-1])
        replace(self, members=with_ids)._add(of_members, 1.0)
        rest = [calls.take(~has) for calls, has in zip(self.members, has_id, strict=True)]
        self._unmatched(rest, "it has no id, and the order of those that have one has gaps")

    def _add(self, order: Sequence[CommonPlaces], confidence: float) -> None:
        """Add the members' calls at these places of their common order.

        Not those that stand opposite another operation somewhere: they are unmatched.
        """
        good = np.ones(1 + max(int(o.max()) for o in order), dtype=bool)
        first = self.members[0]
        row_at = np.full(len(good), UNKNOWN, dtype=np.int64)
        row_at[order[0]] = np.arange(len(first))
        for calls, o in zip(self.members[1:], order[1:], strict=True):
            both = np.flatnonzero(row_at[o] >= 0)
            good[o[both]] &= agree(first, row_at[o[both]], calls, both)
        members = [(calls, good[o]) for calls, o in zip(self.members, order, strict=True)]
        odd = [calls.take(~kept) for calls, kept in members]
        self._unmatched(odd, "operations or sizes disagree at this place")
        # global ranks of the communicator's ranks, where they can be known
        listed = [calls.members[0] for calls in self.members if calls.members[0] is not None]
        ranks = sorted(calls.rank for calls in self.members)
        if ranks == list(range(len(ranks))):
            listed.append(ranks)
        self.rows.collectives(
            self.name,
            [calls.take(kept) for calls, kept in members],
            [o[good[o]] for o in order],
            self.confidence * confidence,
            dict(enumerate(listed[0] if listed else ())),
        )

    def _where_some_do_not_fit(self, longest: Calls, fits: Sequence[bool]) -> None:
        """Match where no single displacement holds (a call was lost on the way): step by step.

        Members without steps, and steps in which the members differ in number or kind of calls,
        are left unmatched: better unmatched than misaligned by one. Where the members have no step
        in common those are matched that fit each other.
        """
        steps: StepNumbers = reduce(np.intersect1d, [calls.marked for calls in self.members])
        steps = steps[steps != UNKNOWN]
        if not len(steps):
            if 2 * sum(fits) < len(fits):  # the longest is the one that fits none
                fits = [calls is not longest for calls in self.members]
            odd = [calls for calls, fit in zip(self.members, fits, strict=True) if not fit]
            self._unmatched(odd, "its window has no step in common with the others'")
            rest = [calls for calls, fit in zip(self.members, fits, strict=True) if fit]
            replace(self, members=rest).match(KnownOffsets(), final=True)
            return
        good = [step for step in steps.tolist() if self._in_step(step, longest)]
        odd_ranks = words.ranks(
            c.rank for c, fit in zip(self.members, fits, strict=True) if not fit
        )
        rest = [calls.take(~np.isin(calls.marked, good)) for calls in self.members]
        self._unmatched(rest, f"order and times do not fit those of {odd_ranks}")

    def _in_step(self, step: int, longest: Calls) -> bool:
        """Match the calls of one step, if the members have the same ones in it."""
        inside = [calls.take(calls.marked == step) for calls in self.members]
        whole = longest.take(longest.marked == step)
        alike = all(
            len(calls) == len(whole) and agree(whole, slice(None), calls, slice(None)).all()
            for calls in inside
        )
        if alike:
            order = [np.arange(len(whole)) for _ in inside]
            replace(self, members=inside)._add(order, _STEP_BY_STEP)
        return alike
