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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from clusterprof.ingest.flight.all_dumps import Flight
from clusterprof.results import ShallowNode, ShallowResults, Suspect

#: the first steps of a job compile, allocate and fill queues
WARM_UP_STEPS = 3
#: that values which do not hang together are taken to do so
_ONE_SIDED = 0.05
#: These send on what has just been computed: who comes late to them computes late. Parameters that
#: are gathered are known long before, and may be waited for while there is other work to do.
COMPUTED = ("AllReduce", "ReduceScatter", "Reduce", "AllToAll")
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
    named_ranks = suspects(found, step_ns, limits.LEAST_FRAC, hosts)
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
        "suspects": [{**each, "line": _line(known, each["rank"])} for each in named_ranks],
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
    mine = pc.and_(pc.equal(table["rank"], rank), pc.is_valid(table["line"]))
    mine = table.filter(mine)
    if not mine.num_rows:
        return None
    sums = pa.table({"line": mine["line"].cast(pa.string()), "lateness_ns": mine["lateness_ns"]})
    sums = sums.group_by("line").aggregate([("lateness_ns", "sum")])
    return str(sums["line"][int(np.argmax(sums["lateness_ns_sum"].to_numpy()))])


def waits(table: pa.Table, disturbed: Sequence[int] = ()) -> Waits:
    """Return how long ranks waited in the calls of `SHALLOW`, but for those of disturbed steps."""
    table = table.filter(pc.and_(pc.is_valid(table["lateness_ns"]), pc.is_valid(table["step"])))
    rank, step = integers(table, "rank"), integers(table, "step")
    (ranks, row), (steps, column) = places(rank), places(step)
    lateness = integers(table, "lateness_ns")
    begins = np.flatnonzero(np.diff(integers(table, "call"), prepend=-1))
    last = np.maximum.reduceat(lateness, begins) if begins.size else lateness
    waited = np.repeat(last, np.diff(begins, append=lateness.size)) - lateness
    cells, shape = row * steps.size + column, (ranks.size, steps.size)
    operations, operation = coded(table, "operation")
    direct, computed, exchanged = (
        np.isin(operations, names)[operation]
        for names in (("Send", "Recv"), COMPUTED, ("AllToAll",))
    )

    def summed(values: Ints | None, rows: Bools | slice = slice(None)) -> Floats:
        total = np.bincount(cells[rows], values, ranks.size * steps.size)
        return total.reshape(shape).astype(float)

    def longest(values: Ints, rows: Bools) -> Floats:
        found = np.zeros(ranks.size * steps.size)
        np.maximum.at(found, cells[rows], values[rows])
        return found.reshape(shape)

    enqueue = table["enqueue_ns"].to_numpy().astype(float)
    enqueue -= np.nanmin(enqueue) if np.isfinite(enqueue).any() else 0.0
    ends = np.full((2, ranks.size * steps.size), np.nan)
    np.fmin.at(ends[0], cells[~direct], enqueue[~direct])
    np.fmax.at(ends[1], cells[~direct], enqueue[~direct])
    called = ends[0].reshape(shape), ends[1].reshape(shape)
    counts = summed(None)
    usual = np.median(counts, axis=1, keepdims=True) if steps.size else counts
    known = (counts > usual / 2) & (steps >= WARM_UP_STEPS) & ~np.isin(steps, disturbed)
    names, of_group = coded(table, "group")
    pairs, _ = places((of_group * ranks.size + row)[~direct])
    groups = {
        str(names[place]): pairs[pairs // ranks.size == place] % ranks.size
        for place in sorted(np.unique(of_group).tolist(), key=lambda place: names[place])
    }
    return Waits(
        ranks,
        steps,
        summed(waited[~direct], ~direct),
        np.maximum(longest(waited, computed), summed(waited[exchanged], exchanged)),
        summed(waited[direct], direct),
        called if table["duration_ns"].null_count < table.num_rows else None,
        longest(integers(table, "bound_ns"), np.ones(rank.size, bool)),
        known,
        groups,
    )


def suspects(
    found: Waits, step_ns: float, least_frac: float, hosts: Mapping[int, str] | None = None
) -> list[Suspect]:
    """Return the ranks that keep others waiting, worst first; [] where none stands out.

    `least_frac`: the part of a step (`step_ns`) from which on lateness counts.
    """
    best: dict[int, Suspect] = {}
    for group, members in found.groups.items():
        for one in _in_group(found, group, members, least_frac * step_ns, hosts or {}):
            if one["rank"] not in best or _order(one) < _order(best[one["rank"]]):
                best[one["rank"]] = one
    return sorted(best.values(), key=_order)


def _order(one: Suspect) -> tuple[bool, int, int]:
    return not one["delays"], -one["lateness_ns"], one["rank"]


def _in_group(
    found: Waits, group: str, members: Ints, least_ns: float, hosts: Mapping[int, str]
) -> list[Suspect]:
    columns = np.flatnonzero(found.known[members].all(axis=0))
    if members.size < 2 or columns.size < limits.FEW:
        return []
    here = np.ix_(members, columns)
    # What all members wait for other stages is the pipeline's own; who waits more is kept waiting.
    own = found.at_most_ns[here] + found.direct_ns[here] - found.direct_ns[here].min(axis=0)
    order = np.argsort(own.mean(axis=1), kind="stable")
    # those that wait least, together, up to half of the members: a slow node has several
    gaps = np.diff(own.mean(axis=1)[order])[: members.size // 2]
    several = int(gaps.argmax()) + 1
    out: list[Suspect] = []
    for place in order[:several].tolist():
        for waited, delays in ((found.at_least_ns, True), (found.at_most_ns, False)):
            others = waited[np.ix_(members[order[several:]], columns)]
            caused = others.min(axis=0) - own[place]
            when = regime(caused)
            caused, late = caused[when], columns[when]
            bound = found.bound_ns[members[place], late].mean()
            half = half_width(caused, limits.CHANCE / found.ranks.size)
            lateness, rank = float(caused.mean()), int(found.ranks[members[place]])
            others_places = members[order[several:]]
            if delays and outlasts(found, members[place], others_places, late, caused):
                continue
            if lateness - half - bound > 0 and lateness > least_ns:
                out.append(
                    {
                        "rank": rank,
                        "lateness_ns": round(lateness),
                        "bound_ns": round(half + bound),
                        "group": group,
                        "host": hosts.get(rank),
                        "since_step": int(found.steps[late[0]]) if when.start else None,
                        "until_step": int(found.steps[late[-1]]) if when.stop else None,
                        "delays": delays,
                        "line": None,
                    }
                )
                break
    return out


def half_width(values: Floats, chance: float) -> float:
    """Return by how much a mean of normal values is above the truth in this part of all cases.

    Student's t by the expansion of Abramowitz and Stegun, 26.7.5.
    """
    z, free = NormalDist().inv_cdf(1 - chance), values.size - 1
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return float(t * values.std(ddof=1) / np.sqrt(values.size))


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
    usual = np.median(first[others], axis=0)
    ahead = usual[1:] < last[one, :-1]
    return bool(ahead.mean() >= 1 / 2) or persists(first[one] - usual) or persists(caused)


def persists(values: Floats) -> bool:
    """Return whether each value rather follows the one before it than all of them.

    What is lost in each step anew varies about its mean from step to step. The ratio of von
    Neumann, whose mean is 2 for values that do not hang together and whose variance is
    4 (n - 2) / (n² - 1), is below this by chance in one case of twenty.
    """
    n, spread = values.size, float(values.var(ddof=1))
    if not spread:
        return False
    ratio = float((np.diff(values) ** 2).mean()) / spread
    return bool(ratio < 2 + NormalDist().inv_cdf(_ONE_SIDED) * 2 * np.sqrt((n - 2) / (n**2 - 1)))


def change(values: Floats) -> int:
    """Return the place from which on values are higher than before; 0 where they always were.

    The sum of what is above its mean falls until there, and rises from there on.
    """
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
    ranks: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        ranks.setdefault(host, []).append(rank)
    late = {each["rank"] for each in found}
    nodes: list[ShallowNode] = [
        {"host": host, "ranks": some, "suspects": [rank for rank in some if rank in late]}
        for host, some in ranks.items()
    ]
    return [
        each
        for each in nodes
        if len(each["suspects"]) > 1 and 2 * len(each["suspects"]) > len(each["ranks"])
    ]


def mean_step(steps: Mapping[int, pa.Table], compared: Ints) -> float:
    """Return what a step takes by the ranks' step logs (ns): of the ranks' medians the middle.

    Of those `compared` where the logs have them, else of all but the first.
    """
    each = []
    for log in steps.values():
        lasting, step = integers(log, "end_ns") - integers(log, "begin_ns"), integers(log, "step")
        of_it = lasting[np.isin(step, compared)]
        each.append(of_it if len(of_it) else lasting[WARM_UP_STEPS:])
    medians = [float(np.median(lasting)) for lasting in each if len(lasting)]
    return float(np.median(medians)) if medians else 0.0


def stages(calls: FlightCalls) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline stage; [] where neither groups nor sends tell.

    A pipeline's ranks stand in ascending order of its stages, as all frameworks number them. Its
    group says so in its description; else who sends to each other is one pipeline.
    """
    groups = calls.flight.groups
    described = [each.ranks or () for each in groups if _PIPELINE.search(each.description)]
    lines = described or _connected(calls)
    if len({len(line) for line in lines}) != 1:
        return []
    return [tuple(sorted(column)) for column in zip(*lines, strict=True)]


def _connected(calls: FlightCalls) -> list[tuple[int, ...]]:
    """Return the sets of ranks that send to each other."""
    rank = integers(calls.entries, "rank")
    first = calls.begins[calls.p2p & (calls.counts == 2)]
    of: dict[int, set[int]] = {}
    for one, other in set(zip(rank[first].tolist(), rank[first + 1].tolist(), strict=True)):
        both = of.get(one, {one}) | of.get(other, {other})
        of.update(dict.fromkeys(both, both))
    return sorted({tuple(sorted(each)) for each in of.values()})
