"""One name for a communicator that the reports of its members name differently, or not at all.

nsys has NCCL's own id where its export holds the payload, torch.profiler the process group's name
and ranks, and other reports have none. Where one job's reports are of several kinds, what a rank's
calls did shows which of the others' communicators they are of: operations and sizes agree in order,
and the members of one collective end together, whatever their clocks say (see `communicators`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from clusterprof.align.match.calls import UNKNOWN, Calls, Part
from clusterprof.align.match.communicators import WIDEST_NS, fit
from clusterprof.columns import Bools

#: (name of a communicator, its stream or `_WHOLE`) -> its members' calls
Known = dict[tuple[str, int], list[Part]]
_WHOLE = UNKNOWN - 1

#: ends may scatter by more than where all communicators are inferred: there are few to choose from.
#: Where one report lists the other's rank as a member only its own communicators are to choose from
_SLACK = 2.0
#: members of a communicator that the calls of a rank under another name are compared with
_COMPARED = 3
#: comparisons of which each takes a millisecond; with more of them names are left as they are
_MOST = 5_000


def named_alike(calls: Sequence[Calls]) -> tuple[list[Calls], dict[str, float]]:
    """Return the calls under the names of most ranks' reports, and the inferred names' confidence.

    Only collectives are compared. Sends and receives go along with them where they have one name;
    where any do not, none keeps a name, and they are paired by time. A communicator that goes
    together with none of the others' keeps its name, and all do where there are too many. Names
    that did not have to be inferred are not in the second.
    """
    kinds = {c.rank: _usual_kind(c.communicator.tolist()) for c in calls if len(c)}
    counted = Counter(kind for kind in kinds.values() if kind)
    if len(set(kinds.values())) < 2:
        return list(calls), {}
    leading = max(counted, key=lambda kind: (counted[kind], kind == "nccl"))
    communicators = _known([c for c in calls if kinds.get(c.rank) == leading])
    others = [c for c in calls if kinds.get(c.rank, leading) != leading]
    if sum(len(set(c.stream.tolist())) for c in others) * len(communicators) > _MOST:
        return list(calls), {}
    confidence: dict[str, float] = {}
    renamed = {c.rank: _adopted(c, communicators, confidence) for c in others}
    alike = [renamed.get(c.rank, c) for c in calls]
    named = {name for name, _ in communicators}
    if all(set(c.communicator[c.directed].tolist()) <= named for c in renamed.values()):
        return alike, confidence
    # sends that have no name on one side are paired by time, which takes none on the other
    return [_without(c, c.directed) for c in alike], confidence


def _usual_kind(names: Sequence[str | None]) -> str:
    """What most of a rank's names are: NCCL's ids, names of process groups, or none (empty)."""
    kinds = ("" if n is None else "nccl" if n.startswith("0x") else "group" for n in names)
    counted = Counter(kinds)
    return max(counted, key=lambda kind: (counted[kind], kind))


def _without(calls: Calls, rows: Bools) -> Calls:
    names = calls.communicator.copy()
    names[rows] = None
    return replace(calls, communicator=names)


def _collectives(calls: Calls) -> dict[str | None, Part]:
    """A rank's collectives by the name of their communicator."""
    return calls.every.split()[0].by("communicator")


def _known(calls: Sequence[Calls]) -> Known:
    """Every communicator's members, as a whole; and by stream, where it has several."""
    named: Known = {}
    for c in calls:
        for name, member in _collectives(c).items():
            if name is not None:
                named.setdefault((name, _WHOLE), []).append(member)
                streams = member.by("stream")
                streams.pop(UNKNOWN, None)  # calls whose kernels the capture did not see
                for stream in sorted(streams) if len(streams) > 1 else ():
                    named.setdefault((name, stream), []).append(streams[stream])
    return named


def _adopted(calls: Calls, named: Known, confidence: dict[str, float]) -> Calls:
    """Return one rank's calls under the names of `named` that they go together with."""
    own = _collectives(calls)
    nameless = own.pop(None, None)
    whole = {key: members for key, members in named.items() if key[1] == _WHOLE}
    assigned = _assigned(list(own.values()), whole, confidence)
    names = calls.communicator.copy()
    for k, (name, _) in assigned.items():
        # with the sends and receives under that name
        names[calls.communicator == list(own)[k]] = name
    if nameless is not None:
        for stream, name in _nameless(nameless, named, whole, confidence):
            names[stream.rows] = name
    return replace(calls, communicator=names)


def _nameless(
    calls: Part, named: Known, whole: Known, confidence: dict[str, float]
) -> list[tuple[Part, str]]:
    """Calls without a name: all of one communicator, or each stream of one or of half of one."""
    at_once = _assigned([calls], whole, confidence)
    if at_once:
        return [(calls, at_once[0][0])]
    several = {name for name, stream in named if stream != _WHOLE}
    parts = calls.streams()
    single = {key: named[key] for key in named if (key[1] != _WHOLE) == (key[0] in several)}
    assigned = _assigned(parts, single, confidence)
    # half of a communicator's calls would put all the others' out of order
    taken = set(assigned.values())
    missing = {name for name, stream in single if (name, stream) not in taken}
    return [(parts[k], name) for k, (name, _) in assigned.items() if name not in missing]


def _assigned(
    parts: Sequence[Part], named: Known, confidence: dict[str, float]
) -> dict[int, tuple[str, int]]:
    """Return place in `parts` -> the one of `named` that it goes with best; each is taken once."""
    fits = [
        (*fit, key, k)
        for k, calls in enumerate(parts)
        for key, members in named.items()
        if (fit := _fit(calls, members)) is not None
    ]
    assigned: dict[int, tuple[str, int]] = {}
    for _, doubt, key, k in sorted(fits):
        if k not in assigned and key not in assigned.values():
            assigned[k] = key
            confidence[key[0]] = min(confidence.get(key[0], 1.0), 1.0 - doubt)
    return assigned


def _fit(calls: Part, members: Sequence[Part]) -> tuple[float, float] | None:
    """How far apart the ends lie (ns) and 1 - confidence, at worst; None if they do not fit.

    Compared are the first members and the last, not all: they agree among themselves.
    """
    some = [*members[: _COMPARED - 1], *members[_COMPARED - 1 :][-1:]]
    fits = [
        fit(member, calls, _SLACK, WIDEST_NS)
        if _lists(calls, member.rank) or _lists(member, calls.rank)
        else fit(member, calls, _SLACK)
        for member in some
    ]
    pairs = [pair for pair in fits if pair is not None]
    if len(pairs) < len(fits):
        return None
    return max(pair.spread_ns for pair in pairs), 1.0 - min(pair.confidence for pair in pairs)


def _lists(part: Part, rank: int) -> bool:
    """Whether the report lists this rank among the communicator's members."""
    return any(rank in listed for listed in part.whole.members[part.rows[:1]] if listed is not None)
