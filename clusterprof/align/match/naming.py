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

from clusterprof.align.columns import Bools
from clusterprof.align.match.calls import UNKNOWN, Calls, Part
from clusterprof.align.match.communicators import WIDEST_NS, fit

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
    counted = Counter(each for each in kinds.values() if each)
    if len(set(kinds.values())) < 2:
        return list(calls), {}
    leading = max(counted, key=lambda each: (counted[each], each == "nccl"))
    known = _known([c for c in calls if kinds.get(c.rank) == leading])
    others = [c for c in calls if kinds.get(c.rank, leading) != leading]
    if sum(len(set(c.stream.tolist())) for c in others) * len(known) > _MOST:
        return list(calls), {}
    confidence: dict[str, float] = {}
    renamed = {c.rank: _adopted(c, known, confidence) for c in others}
    alike = [renamed.get(c.rank, c) for c in calls]
    named = {name for name, _ in known}
    if all(set(c.communicator[c.directed].tolist()) <= named for c in renamed.values()):
        return alike, confidence
    # sends that have no name on one side are paired by time, which takes none on the other
    return [_without(c, c.directed) for c in alike], confidence


def _usual_kind(names: Sequence[str | None]) -> str:
    """What most of a rank's names are: NCCL's ids, names of process groups, or none (empty)."""
    kinds = ("" if n is None else "nccl" if n.startswith("0x") else "group" for n in names)
    counted = Counter(kinds)
    return max(counted, key=lambda each: (counted[each], each))


def _without(calls: Calls, rows: Bools) -> Calls:
    names = calls.communicator.copy()
    names[rows] = None
    return replace(calls, communicator=names)


def _collectives(calls: Calls) -> dict[str | None, Part]:
    """A rank's collectives by the name of their communicator."""
    return calls.every.split()[0].by("communicator")


def _known(calls: Sequence[Calls]) -> Known:
    """Every communicator's members, as a whole; and by stream, where it has several."""
    known: Known = {}
    for c in calls:
        for name, part in _collectives(c).items():
            if name is not None:
                known.setdefault((name, _WHOLE), []).append(part)
                streams = part.by("stream")
                streams.pop(UNKNOWN, None)  # calls whose kernels the capture did not see
                for stream in sorted(streams) if len(streams) > 1 else ():
                    known.setdefault((name, stream), []).append(streams[stream])
    return known


def _adopted(calls: Calls, known: Known, confidence: dict[str, float]) -> Calls:
    """Return one rank's calls under the names of `known` that they go together with."""
    own = _collectives(calls)
    nameless = own.pop(None, None)
    whole = {key: members for key, members in known.items() if key[1] == _WHOLE}
    found = _assigned(list(own.values()), whole, confidence)
    names = calls.communicator.copy()
    for k, (name, _) in found.items():
        # with the sends and receives under that name
        names[calls.communicator == list(own)[k]] = name
    if nameless is not None:
        for part, name in _nameless(nameless, known, whole, confidence):
            names[part.rows] = name
    return replace(calls, communicator=names)


def _nameless(
    part: Part, known: Known, whole: Known, confidence: dict[str, float]
) -> list[tuple[Part, str]]:
    """Calls without a name: all of one communicator, or each stream of one or of half of one."""
    at_once = _assigned([part], whole, confidence)
    if at_once:
        return [(part, at_once[0][0])]
    several = {name for name, stream in known if stream != _WHOLE}
    parts = part.streams()
    single = {key: known[key] for key in known if (key[1] != _WHOLE) == (key[0] in several)}
    found = _assigned(parts, single, confidence)
    # half of a communicator's calls would put all the others' out of order
    there = set(found.values())
    missing = {name for name, stream in single if (name, stream) not in there}
    return [(parts[k], name) for k, (name, _) in found.items() if name not in missing]


def _assigned(
    parts: Sequence[Part], known: Known, confidence: dict[str, float]
) -> dict[int, tuple[str, int]]:
    """Return place in `parts` -> the one of `known` that it goes with best; each is taken once."""
    fits = [
        (*fit, key, k)
        for k, part in enumerate(parts)
        for key, members in known.items()
        if (fit := _fit(part, members)) is not None
    ]
    found: dict[int, tuple[str, int]] = {}
    for _, doubt, key, k in sorted(fits):
        if k not in found and key not in found.values():
            found[k] = key
            confidence[key[0]] = min(confidence.get(key[0], 1.0), 1.0 - doubt)
    return found


def _fit(part: Part, members: Sequence[Part]) -> tuple[float, float] | None:
    """How far apart the ends lie (ns) and 1 - confidence, at worst; None if they do not fit.

    Compared are the first members and the last, not all: they agree among themselves.
    """
    some = [*members[: _COMPARED - 1], *members[_COMPARED - 1 :][-1:]]
    found = [
        fit(each, part, _SLACK, WIDEST_NS)
        if _lists(part, each.rank) or _lists(each, part.rank)
        else fit(each, part, _SLACK)
        for each in some
    ]
    pairs = [each for each in found if each is not None]
    if len(pairs) < len(found):
        return None
    return max(each.spread_ns for each in pairs), 1.0 - min(each.confidence for each in pairs)


def _lists(part: Part, rank: int) -> bool:
    """Whether the report lists this rank among the communicator's members."""
    return any(rank in listed for listed in part.whole.members[part.rows[:1]] if listed is not None)
