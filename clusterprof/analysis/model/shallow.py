"""Who makes the others wait, by the flight recorders of all ranks of a job.

In each step a rank waits in its calls for those that come later. A rank that waits less than all
its peers of a group keeps them waiting, by at most as much as the least of them waits more than it
does: whatever else was repaired, that peer has no more to gain. The stages of a pipeline wait for
each other by design: in sends and receives only what a rank waits more than its peers counts.

How much of the waiting delayed the waiting rank's own work is known in bounds. A call starts when
the one before it in its stream has ended, at the earliest, so that a rank that is ahead waits once
more in each call for one and the same lead: all waits of a step are the most, the longest of them
the least. What an AllToAll brings is needed at once, so that those add up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock.model import Clock
from clusterprof.align.columns import Bools, Floats, Ints, coded, integers, places
from clusterprof.align.lateness import shallow
from clusterprof.align.match.flight_calls import FlightCalls, match
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import parts
from clusterprof.exchanges import connected
from clusterprof.ingest.flight.all_dumps import Flight
from clusterprof.ingest.rank_steps import WARM_UP
from clusterprof.results import ShallowNode, ShallowResults, Suspect

#: that values which do not hang together are taken to do so
_ONE_SIDED = 0.05
#: These send on what has just been computed: who comes late to them computes late. Parameters that
#: are gathered are known long before, and may be waited for while there is other work to do.
COMPUTED = ("AllReduce", "ReduceScatter", "Reduce", "AllToAll")
#: pauses of hosts that have nothing in common differ in length by a third at least
_PAUSES_VARY = 0.3
#: what Megatron, DeepSpeed and torch's device meshes call a pipeline's group
_PIPELINE = re.compile(r"(?i)(^|_)(pp|pipe|pipeline)(_|$)")


@dataclass(frozen=True)
class Waits:
    """How long each rank waited in each step (ns), [ranks, steps]."""

    ranks: Ints
    steps: Ints
    #: all of a step's waits, of which some may have delayed nothing
    at_most_ns: Floats
    #: the part of them that delayed the rank's own work
    at_least_ns: Floats
    #: in sends and receives
    direct_ns: Floats
    #: when it made the first and the last of a step's calls (ns from some origin on one clock, NaN
    #: where that is not known); None where calls are made when their work is done (gloo)
    called_ns: tuple[Floats, Floats] | None
    #: by how much clocks may be wrong in one call of a step; 0 by durations
    bound_ns: Floats
    #: whether all of a rank's calls of a step are known
    known: Bools
    #: members' places in `ranks`, of the groups whose calls are known
    groups: Mapping[str, Ints]


@dataclass(frozen=True)
class Shallow:
    """What the flight recorders of all ranks show, and the table that it rests on (`SHALLOW`)."""

    results: ShallowResults
    table: pa.Table
    #: when each row of it was called, on its rank's own wall clock
    called_ns: Ints


def all_ranks(
    flight: Flight,
    clock: Clock,
    steps: Mapping[int, pa.Table],
    hosts: Mapping[int, str],
    disturbed: Sequence[int] = (),
) -> Shallow:
    """Compare all ranks of a job.

    `steps` are their step logs (`STEPS`), `hosts` are those that are known; `disturbed` are steps
    in which a profiler was started or stopped.
    """
    calls = match(flight)
    table = shallow(calls, clock, steps)
    found = waits(table, disturbed)
    compared = found.steps[found.known.any(axis=0)]
    step_ns = mean_step(steps, compared)
    named_ranks = suspects(found, step_ns)
    known = table.filter(pc.is_valid(table["lateness_ns"]))
    by: Literal["durations", "clock", "nothing"] = "nothing"
    if known.num_rows:
        by = "durations" if known["duration_ns"].null_count < known.num_rows else "clock"
    results: ShallowResults = {
        "ranks": list(flight.ranks),
        "missing": flight.missing,
        "steps": [int(step) for step in compared],
        "step_ns": round(step_ns),
        "by": by,
        "suspects": [
            {**each, "host": hosts.get(each["rank"]), "line": _line(known, each["rank"])}
            for each in named_ranks
        ],
        "nodes": by_node(named_ranks, hosts),
        "groups": [
            {"name": each.name, "description": each.description, "ranks": list(each.ranks or ())}
            for each in flight.groups
        ],
        "stages": [list(each) for each in stages(calls)],
    }
    return Shallow(results, table, integers(calls.entries, "enqueue_ns"))


def _line(table: pa.Table, rank: int) -> str | None:
    """The program's line of the calls to which a rank came latest, summed over all of them."""
    mine = table.filter(pc.and_(pc.equal(table["rank"], rank), pc.is_valid(table["line"])))
    if not mine.num_rows:
        return None
    lines, line = coded(mine, "line")
    return str(lines[np.bincount(line, integers(mine, "lateness_ns")).argmax()])


def waits(table: pa.Table, disturbed: Sequence[int] = ()) -> Waits:
    """Return how long ranks waited in the calls of `SHALLOW`, but for those of disturbed steps."""
    table = table.filter(pc.and_(pc.is_valid(table["lateness_ns"]), pc.is_valid(table["step"])))
    rank, step = integers(table, "rank"), integers(table, "step")
    (ranks, row), (steps, column) = places(rank), places(step)
    lateness, (calls, call) = integers(table, "lateness_ns"), places(integers(table, "call"))
    last = np.zeros_like(calls)
    np.maximum.at(last, call, lateness)
    waited = last[call] - lateness
    operations, operation = coded(table, "operation")
    direct, computed, exchanged = (
        np.isin(operations, names)[operation]
        for names in (("Send", "Recv"), COMPUTED, ("AllToAll",))
    )

    def each(what: np.ufunc, values: Ints | Floats, start: float = 0.0) -> Floats:
        """What the values come to in each rank's step."""
        found = np.full(ranks.size * steps.size, start)
        what.at(found, row * steps.size + column, values.astype(float))
        return found.reshape(ranks.size, steps.size)

    enqueue = table["enqueue_ns"].to_numpy().astype(float)
    enqueue -= np.nanmin(enqueue) if np.isfinite(enqueue).any() else 0.0
    enqueue[direct] = np.nan
    counts = each(np.add, np.ones_like(call))
    usual = np.median(counts, axis=1, keepdims=True) if steps.size else counts
    known = (counts > usual / 2) & (steps >= WARM_UP) & ~np.isin(steps, disturbed)
    names, of_group = coded(table, "group")
    pairs, _ = places((of_group * ranks.size + row)[~direct])
    groups = {
        str(names[place]): pairs[pairs // ranks.size == place] % ranks.size
        for place in sorted(np.unique(of_group).tolist(), key=lambda place: names[place])
    }
    return Waits(
        ranks,
        steps,
        each(np.add, waited * ~direct),
        np.maximum(each(np.maximum, waited * computed), each(np.add, waited * exchanged)),
        each(np.add, waited * direct),
        (each(np.fmin, enqueue, np.nan), each(np.fmax, enqueue, np.nan))
        if table["duration_ns"].null_count < table.num_rows
        else None,
        each(np.maximum, integers(table, "bound_ns")),
        known,
        groups,
    )


def suspects(found: Waits, step_ns: float) -> list[Suspect]:
    """Return the ranks that keep others waiting, worst first; [] where none stands out."""
    every = [one for name in found.groups for one in _in_group(found, name, step_ns)]
    best: dict[int, Suspect] = {}
    for one in sorted(every, key=lambda s: (not s["delays"], -s["lateness_ns"], s["rank"])):
        best.setdefault(one["rank"], one)
    return list(best.values())


def _in_group(found: Waits, group: str, step_ns: float) -> list[Suspect]:
    """Return who is late in all known steps; where that is surer, in all but one; else in some.

    One step of five in which a machine stalls would hide who is late in the others. Half of the
    chance is for all steps, the other half for all without one: shared among the ways to leave
    one out (Bonferroni), as the waits themselves tell which it is.
    """
    members = found.groups[group]
    columns = np.flatnonzero(found.known[members].all(axis=0))
    if members.size < 2 or columns.size < limits.FEW:
        return []
    least_ns, chance = limits.LEAST_FRAC * step_ns, limits.CHANCE / found.ranks.size / 2
    named = _late(found, group, columns, chance, least_ns)
    some = _now_and_then(found, group, columns, step_ns)
    if columns.size == limits.FEW:
        return named or some
    own = _own(found, members, columns)
    far = np.abs(own - np.median(own, axis=1, keepdims=True)).sum(axis=0).argmax()
    others = _late(found, group, np.delete(columns, far), chance / columns.size, least_ns)
    return max(named, others, some, key=lambda of: max((1 + s["delays"] for s in of), default=0))


def _own(found: Waits, members: Ints, columns: Ints) -> Floats:
    """Return how long members wait in these steps (ns), [members, columns]."""
    here = np.ix_(members, columns)
    direct = found.direct_ns[here]
    return np.asarray(found.at_most_ns[here] + direct - direct.min(axis=0))


def _late(found: Waits, group: str, columns: Ints, chance: float, least_ns: float) -> list[Suspect]:
    """Return the members of a group that are late in these steps, but for so much chance."""
    members = found.groups[group]
    own = _own(found, members, columns)
    order = np.argsort(own.mean(axis=1), kind="stable")
    # those that wait least, together, up to half of the members: a slow node has several
    gaps = np.diff(own.mean(axis=1)[order])[: members.size // 2]
    several = int(gaps.argmax()) + 1
    others = members[order[several:]]
    out: list[Suspect] = []
    for place in order[:several].tolist():
        for waited, delays in ((found.at_least_ns, True), (found.at_most_ns, False)):
            caused = waited[np.ix_(others, columns)].min(axis=0) - own[place]
            when = regime(caused)
            caused, late = caused[when], columns[when]
            bound = half_width(caused, chance) + found.bound_ns[members[place], late].mean()
            if caused.mean() <= max(bound, least_ns):
                continue
            if delays and outlasts(found, members[place], others, late, caused):
                continue
            one = _suspect(found, members[place], group, float(caused.mean()), bound)
            since = int(found.steps[late[0]]) if when.start else None
            until = int(found.steps[late[-1]]) if when.stop else None
            out.append({**one, "since_step": since, "until_step": until, "delays": delays})
            break
    return out


def _suspect(found: Waits, place: int, group: str, late_ns: float, bound_ns: float) -> Suspect:
    """Return the suspect that is late in all steps by so much in the mean."""
    return {
        "rank": int(found.ranks[place]),
        "lateness_ns": round(late_ns),
        "bound_ns": round(bound_ns),
        "group": group,
        "host": None,
        "since_step": None,
        "until_step": None,
        "late_steps": None,
        "delays": True,
        "line": None,
    }


def _now_and_then(found: Waits, group: str, columns: Ints, step_ns: float) -> list[Suspect]:
    """Return the members of a group that are late by half a step in more steps than by chance."""
    members = found.groups[group]
    least = found.at_least_ns[np.ix_(members, columns)]
    quickest = np.partition(least, 1, axis=0)
    others_ns = np.where(least == quickest[0], quickest[1], quickest[0])
    late_ns = others_ns - _own(found, members, columns)
    late_ns = np.where(late_ns >= max(limits.HALF * step_ns, 1.0), late_ns, 0.0)
    out: list[Suspect] = []
    for k in np.flatnonzero(late_ns.any(axis=1)).tolist():
        others = np.delete(np.arange(members.size), k)
        lengths = late_ns[k][late_ns[k] > 0]
        if not more_often(late_ns[[k, *others]], len(found.groups)) or outlasts(
            found, members[k], members[others], columns, late_ns[k]
        ):
            continue
        # in how many steps it is late is a count of the look; by how much, varies
        varies = 2 * float(lengths.std(ddof=1)) * math.sqrt(lengths.size) / columns.size
        bound = varies + float((found.bound_ns[members[k], columns] * (late_ns[k] > 0)).mean())
        one = _suspect(found, members[k], group, float(late_ns[k].mean()), bound)
        out.append({**one, "late_steps": found.steps[columns[late_ns[k] > 0]].tolist()})
    return out


def more_often(lengths: Floats, groups: float) -> bool:
    """Return whether the first rank is late in more steps than chance has it, of so many groups.

    `lengths` are by how much each is late, [ranks, steps] (ns), 0 where it is not. By chance any of
    equals is in any step (hypergeometric); where only one is, how late it is varies (log-normal).
    """
    own, (count, steps) = lengths[0][lengths[0] > 0], lengths.shape
    n, every, cells = len(own), np.count_nonzero(lengths), lengths.size
    if not n:
        return False
    ways = (math.comb(steps, m) * math.comb(cells - steps, every - m) for m in range(n, every + 1))
    share = sum(ways) / math.comb(cells, every) * count * groups
    if n == every:
        share *= math.erf(np.ptp(np.log(own)) / 2 / _PAUSES_VARY) ** (n - 1)
    return bool(share < limits.CHANCE)


def half_width(values: Floats, chance: float) -> float:
    """Return by how much a mean of normal values is above the truth in this part of all cases."""
    return float(students_t(chance, values.size - 1) * values.std(ddof=1) / np.sqrt(values.size))


@cache
def students_t(chance: float, free: int) -> float:
    """Return what Student's t exceeds in this part of all cases, with `free` degrees of freedom."""
    # bisection for its arc tangent in the sums of Abramowitz and Stegun, 26.7.3 and 26.7.4
    powers = np.arange(free % 2, free - 1, 2)
    factors = np.cumprod(np.maximum(powers - 1, 1) / np.maximum(powers, 1))
    low, high = 0.0, math.pi / 2
    for _ in range(np.finfo(float).nmant):
        angle = (low + high) / 2
        within = math.sin(angle) * float((factors * math.cos(angle) ** powers).sum())
        if free % 2:
            within = (angle + within) * 2 / math.pi
        low, high = (angle, high) if within < 1 - 2 * chance else (low, angle)
    return math.sqrt(free) * math.tan(low)


def outlasts(found: Waits, one: int, others: Ints, columns: Ints, caused: Floats) -> bool:
    """Return whether a rank's lateness may have outlasted the steps instead of being lost in each.

    Where hosts run ahead of their devices, one may stay behind the others without being slower, and
    devices that wait for it would have waited for their own hosts as well. So it is where others
    call in the next step before it has made its last call of this one, and where its lateness, or
    that of its calls, wanders; unknown clocks leave it open.
    """
    if found.called_ns is None:
        return False
    first, last = (each[:, columns] for each in found.called_ns)
    if not np.isfinite(first[[one, *others]]).all():
        return True
    usual, so_far = np.median(first[others], axis=0), int(found.steps[columns[-1]]) + 1
    ahead = usual[1:] < last[one, :-1]
    lateness = first[one] - usual, caused
    return bool(ahead.mean() >= 1 / 2) or any(persists(each, so_far) for each in lateness)


def persists(values: Floats, so_far: int) -> bool:
    """Return whether a level that is carried on from step to step may be all of these values (ns).

    What is lost in each step anew varies about its mean from step to step. The ratio of von
    Neumann, whose mean is 2 for values that do not hang together and whose variance is
    4 (n - 2) / (n² - 1), is below this by chance in one case of twenty. And a level that changes by
    so little in a step has in `so_far` steps of the job not come to be as high (a random walk).
    """
    n, spread = values.size, float(values.var(ddof=1))
    if not spread:
        return False
    change = float((np.diff(values) ** 2).mean())
    anew = 2 + NormalDist().inv_cdf(_ONE_SIDED) * 2 * math.sqrt((n - 2) / (n**2 - 1))
    walked = students_t(limits.CHANCE, n - 1) * math.sqrt(change * so_far)
    return change / spread < anew and abs(float(values.mean())) < walked


def change(values: Floats) -> int:
    """Return the place from which on values are higher than before; 0 where they always were."""
    # the sum of what is above its mean falls until there, and rises from there on
    at = int(np.cumsum(values - values.mean()).argmin()) + 1
    if min(at, values.size - at) < limits.FEW:
        return 0
    before, after = values[:at], values[at:]
    wide = sum(half_width(one, limits.CHANCE) for one in (before, after))
    # what grows by less than half was there before
    more = after.mean() - before.mean()
    return at if more > wide and more > after.mean() / 2 else 0


def regime(values: Floats) -> slice:
    """Return where values are high: from a change on, or until one; else everywhere."""
    if since := change(values):
        return slice(since, None)
    until = change(values[::-1])
    return slice(None, values.size - until if until else None)


def by_node(found: Sequence[Suspect], hosts: Mapping[int, str]) -> list[ShallowNode]:
    """Return the hosts with several ranks most of which are suspects."""
    late, nodes = {each["rank"] for each in found}, dict[str, ShallowNode]()
    for rank, host in sorted(hosts.items()):
        node = nodes.setdefault(host, {"host": host, "ranks": [], "suspects": []})
        node["ranks"].append(rank)
        node["suspects"] += [rank] if rank in late else []
    return [
        each for each in nodes.values() if len(each["suspects"]) > max(1, len(each["ranks"]) / 2)
    ]


def mean_step(steps: Mapping[int, pa.Table], compared: Ints) -> float:
    """Return what a step takes by the ranks' step logs (ns): of the ranks' medians the middle."""
    each = []
    for log in steps.values():
        lasting, step = integers(log, "end_ns") - integers(log, "begin_ns"), integers(log, "step")
        of_it = lasting[np.isin(step, compared)]
        # where the log has none of those compared, all but the first
        each.append(of_it if len(of_it) else lasting[WARM_UP:])
    medians = [float(np.median(lasting)) for lasting in each if len(lasting)]
    return float(np.median(medians)) if medians else 0.0


def stages(calls: FlightCalls) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline stage; [] where neither groups nor sends tell.

    A pipeline's ranks stand in ascending order of its stages, as all frameworks number them. Its
    group says so in its description; else who sends to each other is one pipeline.
    """
    groups = calls.flight.groups
    described = [each.ranks or () for each in groups if _PIPELINE.search(each.description)]
    rows = (calls.p2p & (calls.counts == 2))[calls.of_row]
    ranks, member = places(integers(calls.entries, "rank")[rows])
    found = connected(member, calls.of_row[rows], ranks.size)
    lines = described or [tuple(each.tolist()) for each in parts(ranks, found)]
    if len({len(line) for line in lines}) != 1:
        return []
    return [tuple(sorted(column)) for column in zip(*lines, strict=True)]
