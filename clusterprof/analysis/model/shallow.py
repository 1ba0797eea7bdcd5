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
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock.alignment import Clock
from clusterprof.align.lateness import shallow
from clusterprof.align.match.flight_calls import FlightCalls, match
from clusterprof.analysis.model import limits
from clusterprof.columns import (
    Bools,
    Floats,
    Ints,
    RankNumbers,
    RankPlaces,
    StepNumbers,
    StepPlaces,
    coded,
    connected,
    greatest_by,
    integers,
    order_by,
    parts,
    places,
    row_among,
    rows_by,
    where_known,
)
from clusterprof.ingest.flight.all_dumps import Flight
from clusterprof.ingest.rank_steps import WARM_UP
from clusterprof.results import ShallowNode, ShallowResults, Suspect

#: These send on what has just been computed: who comes late to them computes late. Parameters that
#: are gathered are known long before, and may be waited for while there is other work to do.
COMPUTED = ("AllReduce", "ReduceScatter", "Reduce", "AllToAll")
#: pauses of hosts that have nothing in common differ in length by a third at least
_PAUSES_VARY = 0.3
#: of fewer values no correlation from one to the next, or a high one alone, is more than chance
_SHOW_PERSISTENCE = 20
#: no usual value is so many times as far from the median as half of them are
_FAR = 9.0
#: at most so many of the values are unusual ones
_FEW_FRAC = 0.1
#: what Megatron, DeepSpeed and torch's device meshes call a pipeline's group
_PIPELINE = re.compile(r"(?i)(^|_)(pp|pipe|pipeline)(_|$)")


class Waits(NamedTuple):
    """How long ranks waited in steps (ns), as arrays [ranks, steps]."""

    ranks: RankNumbers
    steps: StepNumbers
    #: members' places in `ranks`, of the groups whose calls are known
    groups: Mapping[str, RankPlaces]
    #: hosts may run ahead of their devices; else calls are made when their work is done (gloo)
    ahead: bool
    #: whether all of a rank's calls of a step are known
    known: Bools
    #: all of a step's waits, of which some may have delayed nothing
    at_most_ns: Floats
    #: the part of them that delayed the rank's own work
    at_least_ns: Floats
    #: in sends and receives
    direct_ns: Floats
    #: when a rank made the first and the last of a step's calls (ns from some origin on one clock,
    #: NaN where that is not known)
    first_ns: Floats
    last_ns: Floats
    #: by how much clocks may be wrong in one call of a step; 0 by durations
    bound_ns: Floats

    def of(self, ranks: RankPlaces | slice, steps: StepPlaces | slice) -> Waits:
        """The same of some ranks and steps."""
        values: Sequence[Any] = [values[ranks][:, steps] for values in self[4:]]
        return Waits(self.ranks[ranks], self.steps[steps], self.groups, self.ahead, *values)

    @property
    def own_ns(self) -> Floats:
        """How long the members of a group wait: in sends and receives only beyond the least."""
        return np.asarray(self.at_most_ns + self.direct_ns - self.direct_ns.min(axis=0))


@dataclass(frozen=True)
class Shallow:
    """What the flight recorders of all ranks show, and the table that it rests on (`SHALLOW`)."""

    results: ShallowResults
    table: pa.Table
    #: when each row of it was called, on its rank's own wall clock
    called_ns: Ints
    #: after how long the first process group gives up (ns); None where no dump says it
    timeout_ns: int | None = None
    #: nccl, gloo
    backends: frozenset[str] = frozenset()


def all_ranks(
    flight: Flight,
    clock: Clock,
    steps: Mapping[int, pa.Table],
    hosts: Mapping[int, str],
    disturbed: Sequence[int] = (),
    chance: float = limits.CHANCE,
    sure_frac: float = math.inf,
) -> Shallow:
    """Compare all ranks of a job.

    `steps` are their step logs (`STEPS`), `hosts` are those that are known; `disturbed` are steps
    in which a profiler was started or stopped. In this part of all jobs of equal ranks chance names
    one. Calls have no time where clocks may be wrong by more than `sure_frac` of a step.
    """
    calls = match(flight)
    sure_ns = math.inf
    if math.isfinite(sure_frac) and steps:
        every = np.concatenate([integers(log, "step") for log in steps.values()])
        sure_ns = sure_frac * mean_step(steps, every) or math.inf
    table = shallow(calls, clock, steps, sure_ns)
    job = within_steps(waits(table, disturbed), steps)
    compared = job.steps[job.known.any(axis=0)]
    step_ns = mean_step(steps, compared)
    named = suspects(job, step_ns, chance)
    known = table.filter(pc.is_valid(table["lateness_ns"])).unify_dictionaries()
    late = known.filter(pc.is_valid(known["line"])).group_by(["rank", "line"])
    # the last is the one with the calls to which the rank came latest, summed over all of them
    by_lateness = late.aggregate([("lateness_ns", "sum")]).sort_by("lateness_ns_sum").to_pylist()
    lines = {row["rank"]: row["line"] for row in by_lateness}
    by: Literal["durations", "clock", "nothing"] = "clock" if known.num_rows else "nothing"
    if known["duration_ns"].null_count < known.num_rows:
        by = "durations"
    results: ShallowResults = {
        "ranks": list(flight.ranks),
        "missing": flight.missing,
        "steps": [int(step) for step in compared],
        "step_ns": round(step_ns),
        "by": by,
        "suspects": [
            {**each, "host": hosts.get(each["rank"]), "line": lines.get(each["rank"])}
            for each in named
        ],
        "nodes": by_node(named, hosts),
        "groups": [
            {"name": group.name, "description": group.description, "ranks": [*(group.ranks or ())]}
            for group in flight.groups
        ],
        "stages": [list(ranks) for ranks in stages(calls)],
    }
    return Shallow(
        results, table, integers(calls.entries, "enqueue_ns"),
        flight.timeout_ns, flight.backends,
    )  # fmt: skip


def waits(table: pa.Table, disturbed: Sequence[int] = ()) -> Waits:
    """Return how long ranks waited in the calls of `SHALLOW`, but for those of disturbed steps."""
    table = table.filter(pc.and_(pc.is_valid(table["lateness_ns"]), pc.is_valid(table["step"])))
    rank, step = integers(table, "rank"), integers(table, "step")
    (ranks, row), (steps, column) = places(rank), places(step)
    lateness, (calls, call) = integers(table, "lateness_ns"), places(integers(table, "call"))
    last = greatest_by(call, lateness, np.zeros_like(calls))
    waited = last[call] - lateness
    operations, operation = coded(table, "operation")
    direct = np.isin(operations, ("Send", "Recv"))[operation]
    computed, exchanged = (
        np.isin(operations, COMPUTED)[operation],
        (operations == "AllToAll")[operation],
    )

    def by_step(what: np.ufunc, values: Ints | Floats, start: float = 0.0) -> Floats:
        """What the values come to in each rank's step."""
        reached = np.full(ranks.size * steps.size, start)
        what.at(reached, row * steps.size + column, values.astype(float))
        return reached.reshape(ranks.size, steps.size)

    enqueue = table["enqueue_ns"].to_numpy().astype(float)
    enqueue -= np.nanmin(enqueue) if np.isfinite(enqueue).any() else 0.0
    enqueue[direct] = np.nan
    counts = by_step(np.add, np.ones_like(call))
    usual = np.median(counts, axis=1, keepdims=True) if steps.size else counts
    names, of_group = coded(table, "group")
    pairs, _ = places((of_group * ranks.size + row)[~direct])
    return Waits(
        ranks,
        steps,
        {
            str(names[place]): pairs[pairs // ranks.size == place] % ranks.size
            for place in sorted(np.unique(of_group).tolist(), key=lambda place: names[place])
        },
        ahead=table["duration_ns"].null_count < table.num_rows,
        at_most_ns=by_step(np.add, waited * ~direct),
        at_least_ns=np.maximum(
            by_step(np.maximum, waited * computed), by_step(np.add, waited * exchanged)
        ),
        direct_ns=by_step(np.add, waited * direct),
        first_ns=by_step(np.fmin, enqueue, np.nan),
        last_ns=by_step(np.fmax, enqueue, np.nan),
        bound_ns=by_step(np.maximum, integers(table, "bound_ns")),
        known=(counts > usual / 2) & (steps >= WARM_UP) & ~np.isin(steps, disturbed),
    )


def within_steps(job: Waits, steps: Mapping[int, pa.Table]) -> Waits:
    """Return the waits of which none is longer than its rank's step, by the step logs (`STEPS`).

    Calls of several streams wait beside each other, so that their sum may be longer. A step of a
    host that runs ahead may be shorter than that of its device: then it is what a step usually is.
    """
    longest = np.full(job.at_most_ns.shape, np.inf)
    for place, rank in enumerate(job.ranks.tolist()):
        if rank in steps and (log := steps[rank]).num_rows:
            length = (integers(log, "end_ns") - integers(log, "begin_ns")).astype(float)
            logged = where_known(length, row_among(integers(log, "step"), job.steps), math.inf)
            longest[place] = np.maximum(logged, np.median(length))
    names = ("at_most_ns", "at_least_ns", "direct_ns")
    return job._replace(**{name: np.minimum(getattr(job, name), longest) for name in names})


def suspects(job: Waits, step_ns: float, chance: float = limits.CHANCE) -> list[Suspect]:
    """Return the ranks that keep others waiting, worst first; [] where none stands out.

    Of a group those who are late in all known steps; where that is surer, in all but one; else in
    some. One step of five in which a machine stalls would hide who is late in the others. Half of
    the chance is for all steps, the other half for all without one: shared among the ways to leave
    one out (Bonferroni), as the waits themselves tell which it is.
    """
    every: list[Suspect] = []
    for name, members in job.groups.items():
        known = np.flatnonzero(job.known[members].all(axis=0))
        if members.size < 2 or known.size < limits.FEW:
            continue
        group, least_ns = job.of(members, known), limits.LEAST_FRAC * step_ns
        of_rank = chance / job.ranks.size / 2
        in_all = _late(group, name, of_rank, least_ns)
        in_some = _now_and_then(group, name, step_ns, chance)
        if known.size == limits.FEW:
            every += in_all or in_some
            continue
        own = group.own_ns
        far = np.abs(own - np.median(own, axis=1, keepdims=True)).sum(axis=0).argmax()
        others = group.of(slice(None), np.delete(np.arange(known.size), far))
        but_one = _late(others, name, of_rank / known.size, least_ns)
        ways = (in_all, but_one, in_some)
        every += max(ways, key=lambda named: max((1 + s["delays"] for s in named), default=0))
    best: dict[int, Suspect] = {}
    for suspect in sorted(every, key=lambda s: (not s["delays"], -s["lateness_ns"], s["rank"])):
        best.setdefault(suspect["rank"], suspect)
    return list(best.values())


def _late(group: Waits, name: str, chance: float, least_ns: float) -> list[Suspect]:
    """Return the members of a group that are late in its steps, but for so much chance."""
    own = group.own_ns
    order = order_by(own.mean(axis=1))
    # those that wait least, together, up to half of the members: a slow node has several
    gaps = np.diff(own.mean(axis=1)[order])[: order.size // 2]
    late, others = np.split(order, [int(gaps.argmax()) + 1])
    named: list[Suspect] = []
    for place in late.tolist():
        for waited, delays in ((group.at_least_ns, True), (group.at_most_ns, False)):
            caused = waited[others].min(axis=0) - own[place]
            when = regime(caused)
            # of what may be a lead that is carried on, the steps' lengths tell the effect
            persistent = persistence(caused, when) if delays else 0.0
            caused, compared = caused[when], group.of(np.append(place, others), when)
            bound = half_width(caused, chance, persistent) + compared.bound_ns[0].mean()
            # who is said to delay others does so by what is known to a half
            enough_ns = max(bound / limits.HALF if delays else bound, least_ns)
            if caused.mean() <= enough_ns or (delays and outlasts(compared, caused)):
                continue
            since, until = compared.steps[[0, -1]].tolist()
            suspect = _suspect(compared, name, float(caused.mean()), bound)
            suspect["since_step"] = since if when.start else None
            suspect["until_step"], suspect["delays"] = until if when.stop else None, delays
            named.append(suspect)
            break
    return named


def _suspect(compared: Waits, name: str, late_ns: float, bound_ns: float) -> Suspect:
    """Return the first rank as one that is late by so much in the mean, in all steps."""
    return Suspect(
        rank=int(compared.ranks[0]), lateness_ns=round(late_ns), bound_ns=round(bound_ns),
        group=name, host=None, since_step=None, until_step=None, late_steps=None, delays=True,
        line=None,
    )  # fmt: skip


def _now_and_then(group: Waits, name: str, step_ns: float, chance: float) -> list[Suspect]:
    """Return the members of a group that are late by half a step in more steps than by chance."""
    quickest = np.partition(group.at_least_ns, 1, axis=0)
    others_ns = np.where(group.at_least_ns == quickest[0], quickest[1], quickest[0])
    apart_ns = others_ns - group.own_ns
    late_ns = np.where(apart_ns >= max(limits.HALF * step_ns, 1.0), apart_ns, 0.0)
    named: list[Suspect] = []
    for place in np.flatnonzero(late_ns.any(axis=1)).tolist():
        order = np.append(place, np.delete(np.arange(group.ranks.size), place))
        compared, late = group.of(order, slice(None)), late_ns[place] > 0
        occasions = _occasions(late_ns[order], persistence(apart_ns[place]))
        often = more_often(occasions, len(group.groups), chance)
        if not often or outlasts(compared, late_ns[place]):
            continue
        # in how many steps it is late is a count of the look; by how much, varies
        varies = 2 * float(late_ns[place, late].std(ddof=1)) * math.sqrt(late.sum()) / late.size
        bound = varies + float((compared.bound_ns[0] * late).mean())
        suspect = _suspect(compared, name, float(late_ns[place].mean()), bound)
        named.append({**suspect, "late_steps": group.steps[late].tolist()})
    return named


def _occasions(late_ns: Floats, correlation: float) -> Floats:
    """Put as many steps as tell what one would into one, by the longest, [ranks, steps]: what holds
    for several, as the lengths of sequences may, makes a rank late in them by one chance.
    """
    steps = math.ceil((1 + correlation) / max(1 - correlation, 1 / late_ns.shape[1]))
    return np.maximum.reduceat(late_ns, np.arange(0, late_ns.shape[1], steps), axis=1)


def more_often(lengths: Floats, groups: float, chance: float = limits.CHANCE) -> bool:
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
    return bool(share < chance)


def half_width(values: Floats, chance: float, correlation: float = 0.0) -> float:
    """Return by how much a mean of normal values is above the truth in this part of all cases.

    Values of which each has this `correlation` with the next, and its powers with those behind,
    tell as much as fewer would that are drawn anew (infinity: as fewer than two).
    """
    anew = values.size * (1 - correlation) / (1 + correlation)
    if anew < 2:
        return math.inf
    return float(students_t(chance, int(anew) - 1) * values.std(ddof=1) / math.sqrt(anew))


def persistence(values: Floats, when: slice = slice(None)) -> float:
    """Return the correlation of values with the next ones, but for a change of their level where
    `when` begins or ends; 0 where chance may make as much, or too few values show it.

    Pauses, and a few values of another level, are left out: they are not what comes again.
    """
    inside = np.zeros(values.size, bool)
    inside[when] = True
    before = values[~inside] if not inside.all() else values
    apart = values - np.where(inside, np.median(values[inside]), np.median(before))
    usual = np.abs(apart) <= _FAR * np.median(np.abs(apart))
    if usual.mean() < 1 - _FEW_FRAC:
        usual[:] = True
    if np.count_nonzero(usual) < _SHOW_PERSISTENCE:
        return 0.0
    apart = np.where(usual, apart - apart[usual].mean(), 0.0)
    spread = float(apart @ apart)
    correlation = float(apart[1:] @ apart[:-1]) / spread if spread else 0.0
    # the standard deviation of what values that are drawn anew have
    by_chance = 3 / math.sqrt(np.count_nonzero(usual))
    return correlation if correlation > by_chance else 0.0


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


def outlasts(compared: Waits, caused: Floats) -> bool:
    """Return whether the first rank's lateness may have outlasted the steps, not lost in each.

    Where hosts run ahead of their devices, one may stay behind the others without being slower, and
    devices that wait for it would have waited for their own hosts as well. So it is where others
    call in the next step before it has made its last call of this one, and where its lateness, or
    that of its calls, wanders; unknown clocks leave it open.
    """
    if not compared.ahead:
        return False
    if not np.isfinite(compared.first_ns).all():
        return True
    usual, so_far = np.median(compared.first_ns[1:], axis=0), int(compared.steps[-1]) + 1
    overtaken = usual[1:] < compared.last_ns[0, :-1]
    lateness = compared.first_ns[0] - usual, caused
    return bool(overtaken.mean() >= 1 / 2) or any(persists(late, so_far) for late in lateness)


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
    anew = 2 + NormalDist().inv_cdf(1 / 20) * 2 * math.sqrt((n - 2) / (n**2 - 1))
    walked = students_t(limits.CHANCE, n - 1) * math.sqrt(change * so_far)
    return change / spread < anew and abs(float(values.mean())) < walked


def regime(values: Floats) -> slice:
    """Return where values are high: from a change on, or until one; else everywhere."""
    for ordered in (values, values[::-1]):
        # the sum of what is above its mean falls until there, and rises from there on
        begin = int(np.cumsum(ordered - ordered.mean()).argmin()) + 1
        if min(begin, ordered.size - begin) < limits.FEW:
            continue
        before, after = ordered[:begin], ordered[begin:]
        wide = half_width(before, limits.CHANCE) + half_width(after, limits.CHANCE)
        grown = after.mean() - before.mean()
        # what grows by less than half was there before
        if grown > wide and grown > after.mean() / 2:
            return slice(begin, None) if ordered is values else slice(None, values.size - begin)
    return slice(None)


def step_lengths(steps: Mapping[int, pa.Table], span: range) -> Floats:
    """Return what each step of a span took (ns) by the step logs (`STEPS`), as the middle rank has
    it; of those that any log has.
    """
    if not steps:
        return np.empty(0)
    every = pa.concat_tables(steps.values())
    step, length = integers(every, "step"), integers(every, "end_ns") - integers(every, "begin_ns")
    inside = (step >= span.start) & (step < span.stop)
    of_step = rows_by(step[inside]).values()
    return np.array([np.median(length[inside][rows]) for rows in of_step])


def lengthened(usual: Floats, longer: Floats, chance: float) -> tuple[int, int] | None:
    """Return by how much steps are longer than those before, and how far that may be wrong (ns).

    Both are lengths of steps (ns) in their order. None where they are too few, where chance, in
    this part of all cases, makes half as much of a difference, or where it is below what is worth a
    finding.
    """
    if min(usual.size, longer.size) < limits.FEW:
        return None
    more_ns = float(longer.mean() - usual.mean())
    # the late steps become longer as a queue drains, too: those before tell, if there are enough
    persistent = persistence(usual if usual.size >= _SHOW_PERSISTENCE else longer)
    bound_ns = sum(half_width(lengths, chance, persistent) for lengths in (usual, longer))
    if more_ns <= max(bound_ns / limits.HALF, limits.LEAST_FRAC * float(usual.mean())):
        return None
    return round(more_ns), round(bound_ns)


def by_node(named: Sequence[Suspect], hosts: Mapping[int, str]) -> list[ShallowNode]:
    """Return the hosts with several ranks most of which are suspects."""
    late, nodes = {suspect["rank"] for suspect in named}, dict[str, ShallowNode]()
    for rank, host in sorted(hosts.items()):
        node = nodes.setdefault(host, {"host": host, "ranks": [], "suspects": []})
        node["ranks"].append(rank)
        node["suspects"] += [rank] if rank in late else []
    return [n for n in nodes.values() if len(n["suspects"]) > max(1, len(n["ranks"]) / 2)]


def mean_step(steps: Mapping[int, pa.Table], compared: StepNumbers) -> float:
    """Return what a step takes by the ranks' step logs (ns): of the ranks' medians the middle."""
    medians = []
    for log in steps.values():
        lasting, step = integers(log, "end_ns") - integers(log, "begin_ns"), integers(log, "step")
        within = lasting[np.isin(step, compared)]
        # where the log has none of those compared, all but the first
        within = within if within.size else lasting[WARM_UP:]
        medians += [float(np.median(within))] if within.size else []
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
    pipeline = connected(member, calls.of_row[rows], ranks.size)
    lines = described or [tuple(each.tolist()) for each in parts(ranks, pipeline)]
    if len({len(line) for line in lines}) != 1:
        return []
    return [tuple(sorted(column)) for column in zip(*lines, strict=True)]
