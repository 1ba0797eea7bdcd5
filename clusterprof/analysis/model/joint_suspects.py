"""Which suspects are late together: those of one node or one group, and those that follow them.

A rank that is late in one of its groups makes the other members end late, so that these come late
to their own other groups in turn: the whole tensor group of a slow rank is late in the data groups.
What its own group has passed on to a rank it waits for there, so that nothing but its waiting peers
speaks against it (`delays` is false). A rank that delays its peers beyond what it waits itself
follows no rank of another node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from clusterprof import words
from clusterprof.analysis.model import limits
from clusterprof.results import ShallowGroup, ShallowResults, Suspect

#: a group's name, as suspects have it, and its members
_Groups = Mapping[int, list[tuple[str, frozenset[int]]]]


def joint_suspects(shallow: ShallowResults) -> list[list[Suspect]]:
    """Put together the suspects that are late together; of each list the first one first.

    The first is the one that the others follow, or the worst one (as suspects are sorted). All of a
    list are late in about the same steps. Those of one node are together, and those that one group
    waits for; over nodes and groups those whose own group waits for one of them, or has most of its
    members among them.
    """
    groups, left = _groups_by_rank(shallow["groups"]), [*shallow["suspects"]]
    joint: list[list[Suspect]] = []
    while left:
        first, *others = left
        alike = [suspect for suspect in others if _same_steps(first, suspect, shallow)]
        late = [first, *(suspect for suspect in alike if _jointly(first, suspect))]
        late += _followers(late, alike, groups)
        ranks = {suspect["rank"] for suspect in late}
        joint.append(late)
        left = [suspect for suspect in others if suspect["rank"] not in ranks]
    return joint


def late_steps(late: Suspect, shallow: ShallowResults) -> list[int]:
    """Return the steps around the window in which a suspect is late by the flight recorders."""
    steps = shallow["steps"] if late["late_steps"] is None else late["late_steps"]
    first, last = late["since_step"], late["until_step"]
    return [step for step in steps if (first or 0) <= step and (last is None or step <= last)]


def joint_group(shallow: ShallowResults, late: Sequence[Suspect]) -> ShallowGroup | None:
    """Return the smallest group that all of these ranks are members of; None for none."""
    ranks = {suspect["rank"] for suspect in late}
    common = [group for group in shallow["groups"] if ranks <= {*group["ranks"]}]
    return min(common, key=lambda group: len(group["ranks"]), default=None)


def _groups_by_rank(groups: Iterable[ShallowGroup]) -> _Groups:
    by_rank: dict[int, list[tuple[str, frozenset[int]]]] = defaultdict(list)
    for group in groups:
        named = words.group(group["name"], group["description"]), frozenset(group["ranks"])
        for rank in named[1]:
            by_rank[rank].append(named)
    return by_rank


def _jointly(first: Suspect, suspect: Suspect) -> bool:
    """Whether two suspects are of one node, or one group waits for both of them together.

    Of two that one group waits for, neither repaired alone saves more than the difference.
    """
    of_group = first["group"], first["delays"]
    one_node = first["host"] is not None and first["host"] == suspect["host"]
    return one_node or of_group == (suspect["group"], suspect["delays"])


def _followers(late: list[Suspect], every: list[Suspect], groups: _Groups) -> list[Suspect]:
    """The other suspects that come late since their groups wait for those that are late."""
    joined, named_in = [*late], {s["rank"]: s["group"] for s in late}
    waiting = {s["rank"]: s for s in every if not s["delays"] and s["rank"] not in named_in}
    for suspect in joined:  # which grows
        for name, members in groups.get(suspect["rank"], ()):
            new = _passed_on(name, members, named_in, waiting)
            joined += new
            named_in.update((s["rank"], s["group"]) for s in new)
            waiting = {r: s for r, s in waiting.items() if r not in named_in}
    return joined[len(late) :]


def _passed_on(
    name: str, members: frozenset[int], named_in: Mapping[int, str], waiting: Mapping[int, Suspect]
) -> list[Suspect]:
    """The suspects to which a group passes on that members of it are late.

    None, unless the group itself waits for one of these or has most of its members among the late
    ranks. `named_in`: the late ranks so far, with the group that waits for each; `waiting`: the
    suspects that may follow them.
    """
    # that a rank is late in this group is not passed on to it by this group
    new = [s for r, s in waiting.items() if r in members and s["group"] != name]
    inside = [named_in[rank] for rank in members if rank in named_in]
    most = len(inside) + len(new) > max(1, limits.HALF * len(members))
    return new if most or name in inside else []


def _same_steps(first: Suspect, suspect: Suspect, shallow: ShallowResults) -> bool:
    """Whether two are late in about the same steps: three of four that either is late in."""
    if first["late_steps"] is None and suspect["late_steps"] is None:
        spans = [_span(late, shallow) for late in (first, suspect)]
        begins, ends = zip(*spans, strict=True)
        common, either = min(ends) - max(begins), max(ends) - min(begins)
    else:
        own, others = ({*late_steps(late, shallow)} for late in (first, suspect))
        common, either = len(own & others), len(own | others)
    return bool(common > 0 and common >= limits.STEADY_FRAC * either)


def _span(late: Suspect, shallow: ShallowResults) -> tuple[int, int]:
    """From which step until before which one a suspect is late, of those that were compared."""
    steps, watch = shallow["steps"], shallow.get("watch")
    looked = [*steps[:1], *steps[-1:]]
    looked += [watch["first_step"], watch["last_step"]] if watch else []
    since, until = late["since_step"], late["until_step"]
    begin = min(looked, default=0) if since is None else since
    return begin, 1 + (max(looked, default=begin) if until is None else until)
