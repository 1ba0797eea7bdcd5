"""One name for a communicator that the reports of its members name differently, or not at all.

nsys has NCCL's own id where its export holds the payload, torch.profiler the process group's name
and ranks, and other reports have none. Where one job's reports are of several kinds, what a rank's
calls did tells which of the others' communicators they are of: operations and sizes agree in order,
and the members of one collective end together, whatever their clocks say (see `communicators`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from clusterprof.merge.calls import POINT_TO_POINT, Calls
from clusterprof.merge.communicators import Stream, partner, streams

#: members of a communicator that a stranger's calls are compared with
_COMPARED = 3
#: comparisons of which each takes a millisecond; with more of them names are left as they are
_MOST = 5_000


def kind(name: object) -> str:
    """Return `nccl` for NCCL's id, `group` for a process group's name, empty for no name."""
    if name is None:
        return ""
    return "nccl" if str(name).startswith("0x") else "group"


def named_alike(calls: Sequence[Calls]) -> tuple[list[Calls], dict[str, float]]:
    """Return the calls with the names that most ranks' reports use, and how sure the others' are.

    Only collectives tell (sends and receives go along with them where they have one name). What
    goes together with no communicator of the others, or is one of too many, keeps its name. Names
    that nobody had to infer are not in the second.
    """
    kinds = {c.rank: usual_kind(c.communicator.tolist()) for c in calls if len(c)}
    counted = Counter(each for each in kinds.values() if each)
    if len(set(kinds.values())) < 2:
        return list(calls), {}
    leading = max(counted, key=lambda each: (counted[each], each == "nccl"))
    known: dict[tuple[str, int], list[Stream]] = {}
    for c in calls:
        if kinds.get(c.rank) == leading:
            for part in _parts(c):
                name, stream = part.calls.communicator[0], int(part.calls.stream[0])
                if name is not None:
                    known.setdefault((str(name), stream), []).append(part)
    strangers = [c for c in calls if kinds.get(c.rank, leading) != leading]
    if sum(len(set(c.stream.tolist())) for c in strangers) * len(known) > _MOST:
        return list(calls), {}
    sure: dict[str, float] = {}
    renamed = {c.rank: _adopted(c, known, sure) for c in strangers}
    return [renamed.get(c.rank, c) for c in calls], sure


def usual_kind(names: Sequence[object]) -> str:
    """Return the kind that most of a rank's names are of."""
    counted: Counter[str] = Counter()
    for name, count in Counter(names).items():
        counted[kind(name)] += count
    return max(counted, key=lambda each: (counted[each], each)) if counted else ""


def _parts(calls: Calls) -> list[Stream]:
    """A rank's collectives by communicator and stream: a communicator may have two streams."""
    rows = np.flatnonzero(~np.isin(calls.operation.astype(str), list(POINT_TO_POINT)))
    names = calls.communicator[rows].tolist()
    return [
        part
        for name in dict.fromkeys(names)
        for part in streams(calls, rows[[each == name for each in names]])
    ]


def _adopted(
    calls: Calls, known: Mapping[tuple[str, int], list[Stream]], sure: dict[str, float]
) -> Calls:
    """Return one rank's calls under the names of `known` that they go together with."""
    parts = _parts(calls)
    fits = [
        (*fit, key, k)
        for k, part in enumerate(parts)
        for key, members in known.items()
        if (fit := _fit(part, members)) is not None
    ]
    names = calls.communicator.copy()
    taken: set[tuple[str, int]] = set()
    adopted: dict[int, str] = {}
    for _, doubt, key, k in sorted(fits):
        if key not in taken and k not in adopted:
            taken.add(key)
            adopted[k] = key[0]
            names[parts[k].rows] = key[0]
            sure[key[0]] = min(sure.get(key[0], 1.0), 1.0 - doubt)
    # sends and receives under a name whose collectives all have one new name
    for own in {part.calls.communicator[0] for part in parts} - {None}:
        theirs = {adopted.get(k) for k, p in enumerate(parts) if p.calls.communicator[0] == own}
        if len(theirs) == 1 and None not in theirs:
            names[calls.communicator == own] = theirs.pop()
    return replace(calls, communicator=names)


def _fit(part: Stream, members: Sequence[Stream]) -> tuple[float, float] | None:
    """How far apart the ends lie (ns) and how unsure that is, at worst; None if they are strangers.

    Compared are the first members and the last, not all: they agree among themselves.
    """
    some = [*members[: _COMPARED - 1], *members[_COMPARED - 1 :][-1:]]
    found = [partner(each, part, 0, 1) for each in some]
    pairs = [each for each in found if each is not None]
    if len(pairs) < len(found):
        return None
    return max(each.spread_ns for each in pairs), 1.0 - min(each.confidence for each in pairs)
