"""Communicators of reports that name none, or otherwise: inferred from what their calls did.

Exports of nsys before 2025 carry no communicator id, nor do traces of PyTorch before 2.3. What is
left: every communicator of PyTorch has a CUDA stream of its own, and the members of one collective
end together, whatever their clocks say: the difference of two members' ends is constant, that of
other streams is not. How nearly together depends on the machine: within tens of microseconds with
NVLink, hundreds without. So the tolerance is learned from the streams that clearly wait for one
another: their calls begin at all times and yet end together.

nsys has NCCL's own id where its export holds the payload, torch.profiler the process group's name
and ranks. Where one job's reports are of several kinds, what a rank's calls did shows in the same
way which of the others' communicators they are of: operations and sizes agree in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from clusterprof.align.match.calls import UNKNOWN, Calls
from clusterprof.align.match.shift import Shift, find_shift
from clusterprof.align.time_stamps import ENDS_NS, FINEST_NS, WAITS, deviations, spread
from clusterprof.columns import Stretches, connected, places

#: members' ends may also differ by this part of the call's length
_END_SPREAD_FRAC = 0.25
#: more than ENDS_NS is learned from streams that waited for one another, up to this
_WIDEST_NS = 1_000_000.0
#: tolerances that are tried up to the widest
_WIDER = 16
#: with so few calls a constant difference may be chance: then the wall clocks must agree too
_FEW_CALLS = 3
_NEAR_NS = 1_000_000
#: with more streams than these not all pairs are compared (their number grows with the square), and
#: the tolerance is learned from so many
_MANY_STREAMS, _TELLING_STREAMS = 128, 12

#: indices into some streams, and the confidence that those are one communicator
Group = tuple[list[int], float]


@dataclass(frozen=True)
class Fit:
    """How two streams of two ranks go together that may belong to one communicator."""

    shift: Shift
    #: how far the ends of the shorter calls lie apart
    spread_ns: float
    confidence: float
    #: the tolerance that it takes for the two to be members, and how far their begins lie apart
    needs_ns: float = 0.0
    begins_ns: float = 0.0
    #: how far apart the ends are by the wall clocks
    apart_ns: float = 0.0

    @property
    def doubt(self) -> float:
        """The less, the rather it is they and no others: by the rhythm and by the clocks."""
        # clocks are not exact either
        return max(self.spread_ns, FINEST_NS) * max(self.apart_ns, FINEST_NS)


def fit(a: Calls, b: Calls, slack: float = 1.0, tolerance_ns: float = ENDS_NS) -> Fit | None:
    """Return how well two streams go together; None if they cannot be of one communicator.

    Ends may scatter by `slack` times what is usual among members, `tolerance_ns` or a part of the
    call's length.
    """
    shift = find_shift(a, b)
    if shift is None:
        return None
    in_a, in_b = shift.overlap(a, b)
    timed = a.has[in_a] & b.has[in_b]
    if not timed.any():
        return None
    # a Broadcast may end long before its other members begin it
    synchronising = timed & a.synchronising[in_a] & b.synchronising[in_b]
    timed = synchronising if synchronising.any() else timed
    (start_a, end_a), (start_b, end_b) = (
        (stream.start[inside][timed], stream.end[inside][timed])
        for stream, inside in ((a, in_a), (b, in_b))
    )
    length = np.minimum(end_a - start_a, end_b - start_b).astype(np.float64)
    # the shorter a call the more exact
    weight = 1 / np.maximum(length, ENDS_NS / _END_SPREAD_FRAC)
    apart = deviations(end_a - end_b, end_b, weight)
    needs = spread(np.where(2 * np.abs(apart) > slack * _END_SPREAD_FRAC * length, apart, 0.0))
    if needs > slack * tolerance_ns:
        return None
    # a rank that falls behind evenly has not waited, however far that is
    begins = spread(deviations(start_a - start_b, start_b, weight, limit_ppm=np.inf))
    of_short = spread(apart[length <= np.median(length)])
    by_the_clock = abs(float(np.median(end_a - end_b)))
    confidence = 0.8 * shift.confidence
    if len(apart) <= _FEW_CALLS:
        if by_the_clock > _NEAR_NS:
            return None
        confidence /= 2
    return Fit(shift, of_short, confidence, needs, begins, by_the_clock)


def infer(nodes: Sequence[Calls], *, whole: bool = False) -> tuple[list[Group], float]:
    """Group streams of different ranks into communicators: indices into `nodes`, confidence.

    `whole`: these are all collectives of all ranks of a job. Such a job's communicators connect its
    ranks and divide them evenly: the tolerance is the least that makes them so. With very many
    streams each is compared with one member of each group only. The second is the tolerance for
    members' ends, as learned from these streams (ns).
    """
    many = len(nodes) > _MANY_STREAMS
    pairs = _pairs(nodes[:_TELLING_STREAMS] if many else nodes)
    telling = [p.needs_ns for p in pairs.values() if p.begins_ns >= WAITS * p.needs_ns]
    most = max(ENDS_NS, *telling, 0.0)
    if many:
        return _infer_many(nodes, most), most
    widths = [most, *np.geomspace(most, _WIDEST_NS, _WIDER)[1:].tolist()] if whole else [most]
    tried = ((_linked(nodes, pairs, width), width) for width in widths)
    first = next(tried)
    if not whole or _plausible(nodes, first[0]):
        return first
    return next((more for more in tried if _plausible(nodes, more[0])), first)


def _plausible(nodes: Sequence[Calls], groups: Sequence[Group]) -> bool:
    """Whether groups lead from each rank to each other one, those of a size dividing all evenly."""
    sizes = [len(members) for members, _ in groups]
    of_members = np.array([nodes[k].rank for members, _ in groups for k in members], np.int64)
    ranks, member = places(of_members)
    apart = connected(member, Stretches.sized(sizes).of_row, ranks.size).any()
    return not apart and all(n * size % ranks.size == 0 for size, n in Counter(sizes).items())


def _linked(
    nodes: Sequence[Calls], pairs: Mapping[tuple[int, int], Fit], most: float
) -> list[Group]:
    """Complete linkage, tightest pair first: each member must go together with each other one.

    A group has no more members than its reports tell.
    """
    pairs = {pair: fitted for pair, fitted in pairs.items() if fitted.needs_ns <= most}
    group = {i: [i] for i in range(len(nodes))}
    for i, j in sorted(pairs, key=lambda pair: pairs[pair].doubt):
        first, second = group[i], group[j]
        ranks = {nodes[k].rank for k in first + second}
        fits = len(ranks) == len(first) + len(second) <= nodes[i].most_members
        if (
            first is not second
            and fits
            and all((min(k), max(k)) in pairs for k in product(first, second))
        ):
            first.extend(second)
            group |= dict.fromkeys(second, first)
    groups: list[Group] = []
    for i, members in group.items():
        if members[0] == i:
            scores = [pairs[pair].confidence for pair in combinations(sorted(members), 2)]
            groups.append((sorted(members, key=lambda k: nodes[k].rank), min(scores, default=0.0)))
    return groups


def _pairs(nodes: Sequence[Calls]) -> dict[tuple[int, int], Fit]:
    """Every two streams that may go together at the widest tolerance."""
    return {
        (i, j): fitted
        for i, j in combinations(range(len(nodes)), 2)
        if nodes[i].rank != nodes[j].rank
        and nodes[i].most_members == nodes[j].most_members
        and (fitted := fit(nodes[i], nodes[j], tolerance_ns=_WIDEST_NS)) is not None
    }


def _infer_many(nodes: Sequence[Calls], most: float) -> list[Group]:
    """As `infer`: each stream joins the group whose first member it goes with most tightly."""
    groups: list[Group] = []
    for i, node in enumerate(nodes):
        candidates = [
            (pair.doubt, k, pair.confidence)
            for k, (members, _) in enumerate(groups)
            if all(nodes[m].rank != node.rank for m in members)
            and len(members) < node.most_members == nodes[members[0]].most_members
            and (pair := fit(nodes[members[0]], node, tolerance_ns=most)) is not None
        ]
        if candidates:
            _, k, confidence = min(candidates)
            groups[k] = ([*groups[k][0], i], min(groups[k][1], 0.9 * confidence))
        else:
            groups.append(([i], 1.0))
    return [
        (sorted(members, key=lambda m: nodes[m].rank), c if len(members) > 1 else 0.0)
        for members, c in groups
    ]


# -- one name for a communicator -----------------------------------------------------------------

#: (name of a communicator, its stream or `_WHOLE`) -> its members' calls
Members = dict[tuple[str, int], list[Calls]]
_WHOLE = UNKNOWN - 1

#: ends may scatter by more than where all communicators are inferred: there are few to choose from.
#: Where one report lists the other's rank as a member only its own communicators are to choose from
_SLACK = 2.0
#: members of a communicator that the calls of a rank under another name are compared with
_COMPARED = 3
#: comparisons of which each takes a millisecond; with more of them names are left as they are
_MOST_COMPARISONS = 5_000


def named_alike(calls: Sequence[Calls]) -> tuple[list[Calls], dict[str, float]]:
    """Return the calls under the names of most ranks' reports, and the inferred names' confidence.

    Only collectives are compared. Sends and receives go along with them where they have one name;
    where any do not, none keeps a name, and they are paired by time. A communicator that goes
    together with none of the others' keeps its name, and all do where there are too many. Names
    that did not have to be inferred are not in the second.
    """
    kinds = {c.rank: _usual(map(_kind, c.communicator.tolist())) for c in calls if len(c)}
    if len(set(kinds.values())) < 2:
        return list(calls), {}
    leading = _usual(filter(None, kinds.values()))
    communicators = _members([c for c in calls if kinds.get(c.rank) == leading])
    others = [c for c in calls if kinds.get(c.rank, leading) != leading]
    if sum(np.unique(c.stream).size for c in others) * len(communicators) > _MOST_COMPARISONS:
        return list(calls), {}
    confidence: dict[str, float] = {}
    renamed = {c.rank: _adopted(c, communicators, confidence) for c in others}
    alike = [renamed.get(c.rank, c) for c in calls]
    named = {name for name, _ in communicators}
    if not all(set(c.communicator[c.directed].tolist()) <= named for c in renamed.values()):
        # sends that have no name on one side are paired by time, which takes none on the other
        alike = [
            replace(c, communicator=np.where(c.directed, None, c.communicator))  # type: ignore[call-overload]
            for c in alike
        ]
    return alike, confidence


def _kind(name: str | None) -> str:
    """NCCL's id, the name of a process group, or none (empty)."""
    return "" if name is None else "nccl" if name.startswith("0x") else "group"


def _usual(kinds: Iterable[str]) -> str:
    """The kind that most have; of several NCCL's ids, then groups."""
    counted = Counter(kinds)
    return max(counted, key=lambda kind: (counted[kind], kind))


def _members(calls: Sequence[Calls]) -> Members:
    """Every communicator's members, as a whole; and by stream, where it has several."""
    members: Members = {}
    for c in calls:
        for name, member in c.take(~c.directed).by("communicator").items():
            if name is not None:
                members.setdefault((name, _WHOLE), []).append(member)
                streams = member.by("stream")
                streams.pop(UNKNOWN, None)  # calls whose kernels the capture did not see
                for stream in sorted(streams) if len(streams) > 1 else ():
                    members.setdefault((name, stream), []).append(streams[stream])
    return members


def _adopted(calls: Calls, members: Members, confidence: dict[str, float]) -> Calls:
    """Return one rank's calls under the names of `members` that they go together with."""
    own = calls.take(~calls.directed).by("communicator")
    nameless = own.pop(None, None)
    whole = {key: named for key, named in members.items() if key[1] == _WHOLE}
    assigned = _assigned(list(own.values()), whole, confidence)
    names = calls.communicator.copy()
    for k, (name, _) in assigned.items():
        # with the sends and receives under that name
        names[calls.communicator == list(own)[k]] = name
    if nameless is not None:
        for stream, name in _nameless(nameless, members, whole, confidence):
            names[np.isin(calls.call, stream.call)] = name
    return replace(calls, communicator=names)


def _nameless(
    calls: Calls, members: Members, whole: Members, confidence: dict[str, float]
) -> list[tuple[Calls, str]]:
    """Calls without a name: all of one communicator, or each stream of one or of half of one."""
    at_once = _assigned([calls], whole, confidence)
    if at_once:
        return [(calls, at_once[0][0])]
    several = {name for name, stream in members if stream != _WHOLE}
    streams = calls.streams()
    single = {key: members[key] for key in members if (key[1] != _WHOLE) == (key[0] in several)}
    assigned = _assigned(streams, single, confidence)
    # half of a communicator's calls would put all the others' out of order
    missing = {name for name, _ in single.keys() - set(assigned.values())}
    return [(streams[k], name) for k, (name, _) in assigned.items() if name not in missing]


def _assigned(
    own: Sequence[Calls], members: Members, confidence: dict[str, float]
) -> dict[int, tuple[str, int]]:
    """Return place in `own` -> the one of `members` that it goes with best; each is taken once."""
    fits = [
        (*fit, key, k)
        for k, calls in enumerate(own)
        for key, named in members.items()
        if (fit := _fit_with_members(calls, named)) is not None
    ]
    assigned: dict[int, tuple[str, int]] = {}
    for _, doubt, key, k in sorted(fits):
        if k not in assigned and key not in assigned.values():
            assigned[k] = key
            confidence[key[0]] = min(confidence.get(key[0], 1.0), 1.0 - doubt)
    return assigned


def _fit_with_members(calls: Calls, members: Sequence[Calls]) -> tuple[float, float] | None:
    """How far apart the ends lie (ns) and 1 - confidence, at worst; None if they do not fit.

    Compared are the first members and the last, not all: they agree among themselves.
    """
    pairs = []
    for member in (*members[: _COMPARED - 1], *members[_COMPARED - 1 :][-1:]):
        listed = member.rank in (calls.members[0] or ()) or calls.rank in (member.members[0] or ())
        pair = fit(member, calls, _SLACK, _WIDEST_NS if listed else ENDS_NS)
        if pair is None:
            return None
        pairs.append(pair)
    return max(pair.spread_ns for pair in pairs), 1.0 - min(pair.confidence for pair in pairs)
