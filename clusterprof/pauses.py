"""The pauses of a run: steps that took far longer than usual, and what is regular in them.

A rank's log keeps each long step (`pauses.csv`). A pause is the job's where most ranks have it in
one step: they wait for each other, so that which one of them began it cannot be determined from
step logs. What it is cannot either: a series of pauses is known by its regularity and its length.

What tells a series from chance: a pause that comes as far behind another one as that came behind
the one before it may do so by chance, by how many pauses there are in the time between. A series
is named where that chance, of all the pairs that could have begun one, is below `CHANCE`: four
checkpoints every 500 steps are, and seven every 40, where a few other pauses lie between.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from clusterprof import words
from clusterprof.agent.guard.long_steps import GRADE
from clusterprof.columns import Ints, Stretches, integers, matched, order_by, texts
from clusterprof.results import LONGEST_NS, PauseEntry, PauseKind, PausesResults
from clusterprof.tables import GARBAGE, RankTables

#: in so many jobs, of which each has pauses at random, chance may name one series
CHANCE = 5e-4
#: fewer pauses are no series, whatever the chance
LEAST = 3
#: a series is looked for among all pauses, and among those of these parts of the longest and more
_LENGTHS = (0, 1 / 16, 1 / 4)
#: a series may begin with any two pauses that have fewer than so many others between them
_NEIGHBOURS = 8
#: of the places where a series is to have a pause this part may have none: a short one is not kept
_MISSING_FRAC = 0.2
#: pauses after so many steps are alike to a step; those after a time to this part of it, and to
#: the steps in which it ends
_STEPS_APART, _TIME_FRAC, _STEPS_LONG = 1, 0.03, 1.5
#: pauses that follow each other within fewer steps are the job's own pattern (`agent/guard`)
_LEAST_STEPS = 16
#: A pause of a series that is so many times as long as the others may hold another one as well; one
#: that is shorter by more is of no such series.
_LONGER, _SHORTER = 2.0, 0.25
#: A job starts in its first steps, those of its long ones that follow each other as closely.
_FIRST_STEPS, _CLOSE = 20, 5
#: this part of a pause is made up for by the steps after it: it was a wait for queued work
_MADE_UP_FRAC = 0.5
#: after this part of a process group's timeout a pause is warned of
NEAR_FRAC = 0.5
#: torch's own timeouts of process groups: of NCCL, of all others
_NCCL_NS, _TIMEOUT_NS = 600_000_000_000, 1_800_000_000_000
#: what names of ranges and calls say of a pause: a call of any other name may be a wait
_NAMES = rf"(?i)check ?point|ckpt|sav(e|ing)|eval|valid|compil|dynamo|inductor|^{GARBAGE}"
#: so many steps of a series are listed, the longest of more
_MOST_STEPS = 64


class RankLog(NamedTuple):
    """What the logs of one rank tell of one attempt of the job; wall clock, ns."""

    rank: int
    #: when its first step began, and when the last one had ended
    begin_ns: int
    end_ns: int
    #: columns of `ingest.rank_steps.read_pauses`
    pauses: Mapping[str, Ints]


class Attempt(NamedTuple):
    """One attempt of the job: torchrun may start its ranks over."""

    number: int
    ranks: Sequence[RankLog]
    #: the steps of each window, with those in which the profiler's end shows
    disturbed: Sequence[range]


class Timeout(NamedTuple):
    """After how long a process group gives up (ns), and whether that is a default of torch's."""

    ns: int
    is_assumed: bool


def timeout_of(recorded_ns: int | None, backends: Collection[str] = ()) -> Timeout:
    """The timeout that flight recorders hold (ns); where they hold none, torch's own of NCCL or,
    where `backends` are others alone, of these.
    """
    if recorded_ns is not None:
        return Timeout(recorded_ns, is_assumed=False)
    return Timeout(_TIMEOUT_NS if backends and "nccl" not in backends else _NCCL_NS, True)


@dataclass(frozen=True)
class Pause:
    """One step, or several that follow each other, on all ranks that have it."""

    attempt: int
    step: int
    last_step: int
    #: when it began (wall clock)
    begin_ns: int
    #: how much longer than usual it took, and the usual step
    excess_ns: int
    usual_ns: int
    #: the longest of its steps
    length_ns: int
    ranks: tuple[int, ...]
    #: most ranks of the job have it
    of_job: bool

    @property
    def is_start(self) -> bool:
        """Whether the job's first steps are in it, which compile and warm up."""
        return self.step <= _CLOSE and self.of_job


class Regular(NamedTuple):
    """Pauses of a series by their places, and after how many steps or ns each follows."""

    members: tuple[int, ...]
    gap: float
    #: how probable it is that pauses at random have such a series
    chance: float
    by_steps: bool


def pauses_of(
    attempts: Sequence[Attempt], world_size: int, timeout: Timeout | None = None
) -> PausesResults | None:
    """Name the pauses of a run, in the order in which they began. None where there are none.

    `attempts` have the logs of all ranks that left any, or of some of them; `world_size` is how
    many ranks (GPUs) the job has.
    """
    attempts = [attempt for attempt in attempts if attempt.ranks]
    if not attempts:
        return None
    begin_ns = _middle([log.begin_ns for log in attempts[0].ranks])
    # the latest pause may be later than the steps that are logged one by one
    ends = [int(log.pauses["end_ns"].max(initial=log.end_ns)) for log in attempts[-1].ranks]
    run_ns = _middle(ends) - begin_ns
    logs = [log for attempt in attempts for log in attempt.ranks]
    run = _Run(max(run_ns, 1), max(world_size, *(1 + log.rank for log in logs)))
    entries = [run.restart(*pair) for pair in pairwise(attempts)]
    for attempt in attempts:
        entries += run.entries(combined(attempt), attempt.disturbed)
    if not entries:
        return None
    full = [steps for log in logs if len(steps := log.pauses["step"]) >= GRADE]
    return {
        "run_ns": run.ns,
        "world_size": run.world_size,
        "timeout_ns": timeout.ns if timeout else None,
        "timeout_assumed": bool(timeout and timeout.is_assumed),
        "longer_only_from": min((int(steps[GRADE - 1]) for steps in full), default=None),
        "entries": sorted(entries, key=lambda entry: (entry["first_ns"], entry["kind"])),
    }


def combined(attempt: Attempt) -> list[Pause]:
    """The pauses of an attempt, in order: long steps of all ranks that are one step or neighbours.

    Without those in a window, where a profiler makes steps long, and those for which the steps
    after them made up.
    """
    logs = [log for log in attempt.ranks if len(log.pauses["step"])]
    if not logs:
        return []
    rank = np.repeat([log.rank for log in logs], [len(log.pauses["step"]) for log in logs])
    step, begin, end, usual, made_up = (
        np.concatenate([log.pauses[name] for log in logs])
        for name in ("step", "begin_ns", "end_ns", "usual_ns", "made_up_ns")
    )
    excess = end - begin - usual
    kept = (made_up < _MADE_UP_FRAC * excess) & (made_up >= 0)
    # what no log of ours holds
    kept &= (step >= 0) & (step < LONGEST_NS) & (begin >= 0) & (usual > 0)
    kept &= end - begin < LONGEST_NS
    for window in attempt.disturbed:
        kept &= (step < window.start) | (step >= window.stop)
    rows = np.flatnonzero(kept)
    rows = rows[order_by(step[rows])]
    table = np.stack([rank, step, begin, excess - made_up, usual, end - begin])[:, rows]
    apart = np.diff(table[1], prepend=-_LEAST_STEPS)
    joined = np.where(table[1] < _FIRST_STEPS, _CLOSE, _STEPS_APART)
    pauses = Stretches.from_begins(apart > joined)
    # of each the ranks in order, as far as there are any
    table = table[:, order_by(pauses.of_row, table[0])]
    return [
        _pause(table[:, first : first + size], attempt)
        for first, size in zip(pauses.first.tolist(), pauses.size.tolist(), strict=True)
    ]


def _pause(rows: Ints, attempt: Attempt) -> Pause:
    """One pause of its long steps: rank, step, begin, excess, usual, length [6, n], by rank."""
    ranks, steps = Stretches.of(rows[0]), rows[1].tolist()
    first, last = min(steps), max(steps)
    if first > _CLOSE:
        # ranks that end a step just before the others have a pause in the next one
        first = last = Counter(steps).most_common(1)[0][0]
    # of ranks that do not wait for each other each has its own
    return Pause(
        attempt.number,
        step=first,
        last_step=last,
        begin_ns=_middle(ranks.least(rows[2])),
        excess_ns=_middle(ranks.sum(rows[3])),
        usual_ns=_middle(rows[4]),
        length_ns=_middle(ranks.greatest(rows[5])),
        ranks=tuple(rows[0, ranks.first].tolist()),
        of_job=2 * len(ranks.first) >= len(attempt.ranks),
    )


# --- series


def series(
    pauses: Sequence[Pause], disturbed: Sequence[range] = ()
) -> list[tuple[Regular, list[Pause]]]:
    """The series among pauses of one attempt, each with its pauses; those that are left are single.

    In steps that are `disturbed` a series may have a pause that is not among them.

    A pause in which two series meet is in both, with a part of its length in each.
    """
    every: list[tuple[Regular, list[Pause]]] = []
    left = sorted(pauses, key=lambda pause: pause.step)
    #: by the step of a pause of which a part is left: the series that it is in so far
    parts: dict[int, int] = {}
    while (regular := _most_regular(left, disturbed)) is not None:
        excess = sorted(left[place].excess_ns for place in regular.members)
        usual = excess[len(excess) // 4]
        members, rest = list[Pause](), list[Pause]()
        for pause in (left[place] for place in regular.members):
            if pause.excess_ns < _SHORTER * usual:
                rest.append(pause)
                continue
            parts.pop(pause.step, None)
            if pause.excess_ns > _LONGER * usual:
                parts[pause.step] = len(every)
                rest.append(replace(pause, excess_ns=pause.excess_ns - usual))
                pause = replace(pause, excess_ns=usual)
            members.append(pause)
        every.append((regular, members))
        chain = {*regular.members}
        rest += [pause for place, pause in enumerate(left) if place not in chain]
        left = sorted(rest, key=lambda pause: pause.step)
    _join_rests(every, [pause for pause in left if pause.step in parts], parts)
    return every


def _join_rests(
    every: Sequence[tuple[Regular, list[Pause]]], rests: Sequence[Pause], parts: Mapping[int, int]
) -> None:
    """Give what is left of pauses, and is of no other series, back to them: they took longer."""
    for rest in rests:
        members = every[parts[rest.step]][1]
        place = next(k for k, member in enumerate(members) if member.step == rest.step)
        members[place] = replace(rest, excess_ns=members[place].excess_ns + rest.excess_ns)


def _most_regular(pauses: Sequence[Pause], disturbed: Sequence[range]) -> Regular | None:
    """The series that chance explains least, of all pauses or of the longer ones; None where it
    explains all.
    """
    longest = max((pause.excess_ns for pause in pauses), default=0)
    kinds = {
        tuple(k for k, pause in enumerate(pauses) if pause.excess_ns >= part * longest)
        for part in _LENGTHS
    }
    able = list[Regular]()
    for places in sorted(kinds, key=len, reverse=True):
        chain = _regular([pauses[place] for place in places], disturbed)
        if chain is not None and (chance := chain.chance * len(kinds)) < CHANCE:
            members = tuple(places[member] for member in chain.members)
            able.append(chain._replace(members=members, chance=chance))
    return min(able, key=lambda chain: chain.chance, default=None)


def _regular(pauses: Sequence[Pause], disturbed: Sequence[range]) -> Regular | None:
    """The most regular chain of pauses that are alike in length, by steps or by times.

    By the steps where these are as regular: times of steps that are alike are regular as well.
    """
    if len(pauses) < LEAST:
        return None
    usual_ns = float(np.median([pause.usual_ns for pause in pauses]))
    in_steps = _Line([float(pause.step) for pause in pauses], _LEAST_STEPS, _STEPS_APART)
    in_time = _Line(
        [float(pause.begin_ns) for pause in pauses],
        _LEAST_STEPS * usual_ns, _STEPS_LONG * usual_ns, _TIME_FRAC,
    )  # fmt: skip
    by_steps = in_steps._replace(disturbed=disturbed).most_regular(by_steps=True)
    by_time = in_time.most_regular(by_steps=False)
    if by_steps and by_time and by_steps.chance < CHANCE:
        steps = np.diff([pauses[place].step for place in by_steps.members])
        is_exact = 2 * np.count_nonzero(steps == round(by_steps.gap)) > len(steps)
        if is_exact and 2 * len(by_steps.members) > len(by_time.members):
            return by_steps
    chains = [chain for chain in (by_steps, by_time) if chain is not None]
    return min(chains, key=lambda chain: chain.chance, default=None)


class _Line(NamedTuple):
    """Where pauses are, in ascending steps or times."""

    at: list[float]
    #: the least distance of a series; and how far from equal its distances may be, or which part of
    #: them where that is more
    least: float
    apart: float
    apart_frac: float = 0.0
    #: where a series may have a pause that is not known
    disturbed: Sequence[range] = ()

    def most_regular(self, *, by_steps: bool) -> Regular | None:
        """The chain of equal distances that chance explains least."""
        best: Regular | None = None
        #: what another chain has gone through already
        links: set[tuple[int, int]] = set()
        pairs = 0
        for first in range(len(self.at)):
            for second in range(first + 1, min(first + 1 + _NEIGHBOURS, len(self.at))):
                pairs += 1
                is_new = (first, second) not in links
                if self.at[second] - self.at[first] >= self.least and is_new:
                    chain = self.chain(first, second, by_steps)
                    links.update(pairwise(chain.members))
                    if best is None or chain.chance < best.chance:
                        best = chain
        return best and best._replace(chance=best.chance * pairs)

    def chain(self, first: int, second: int, by_steps: bool) -> Regular:
        """The pauses that follow each other as the second one follows the first, and as they would
        before the first; one that lacks is passed over.

        Its chance is as of the only pair that it could have begun with.
        """
        members, gaps, missing = [first, second], 1, 0
        by = self.at[second] - self.at[first]
        tolerance = max(self.apart, self.apart_frac * by)
        for distance in (by, -by):
            while (following := self.next(self.at[members[-1]], distance, tolerance)) is not None:
                place, times, is_missing = following
                members.append(place)
                gaps, missing = gaps + times, missing + is_missing
            members.reverse()
        begin, end = self.at[members[0]], self.at[members[-1]]
        gap, chance = (end - begin) / gaps, 1.0
        if len(members) >= LEAST and missing <= _MISSING_FRAC * (len(members) + missing):
            width = 2 * tolerance + (1 if by_steps else 0)
            density = (members[-1] - members[0]) / (end - begin)
            by_link = min(density * width * (2 if missing else 1), 1.0)
            chance = by_link ** (len(members) - 2)
            if by_steps and _apart(begin, gap) <= _STEPS_APART:
                # counted from the job's first step on: one coincidence more
                chance *= min(2 * width / gap, 1.0)
        return Regular(tuple(members), gap, chance, by_steps)

    def next(self, last: float, by: float, tolerance: float) -> tuple[int, int, bool] | None:
        """The place at this distance from `last` or at twice that, at which, and whether one lacks
        before it.
        """
        at, is_missing = self.at, False
        for times in (1, 2):
            wanted = last + times * by
            low, high = wanted - tolerance, wanted + tolerance
            near = range(bisect_left(at, low), bisect_right(at, high))
            if near:
                return min(near, key=lambda place: abs(at[place] - wanted)), times, is_missing
            is_missing = not any(w.start <= high and low < w.stop for w in self.disturbed)
        return None


def _apart(value: float, gap: float) -> float:
    """How far a value is from a multiple of `gap`."""
    return abs(value - gap * round(value / gap))


# --- what they are


def named(
    results: PausesResults | None, ranks: Sequence[RankTables], attempt: int
) -> PausesResults | None:
    """`results` with the names of those series of an attempt that a capture had a pause of.

    A name is that of a range, a call or a garbage collection which lasts for half of the pause or
    more, if it says what such pauses are (`_NAMES`): any other may be what a rank waits in.
    """
    if results is None:
        return None
    entries = [entry.copy() for entry in results["entries"]]
    for entry in entries:
        if entry["every_steps"] and entry["attempt"] == attempt:
            entry["name"] = _name(entry, ranks)
    return {**results, "entries": entries}


def _name(entry: PauseEntry, ranks: Sequence[RankTables]) -> str:
    """The call that takes most of a captured step in which the series has a pause; or nothing."""
    longest, name = entry["least_ns"] / 2, ""
    for tables in ranks:
        for row in tables.steps.to_pylist():
            far = _apart(row["step"] - entry["first_step"], entry["every_steps"] or 1)
            excess = row["end_ns"] - row["begin_ns"] - entry["usual_step_ns"]
            if far > _STEPS_APART or excess < longest:
                continue
            calls = tables.host_calls
            starts = integers(calls, "start_ns")
            lengths = np.minimum(integers(calls, "end_ns"), row["end_ns"]) - starts
            rows = np.flatnonzero((starts >= row["begin_ns"]) & (lengths >= excess / 2))
            names = texts(calls, "name")[rows]
            rows = rows[matched(names, _NAMES)]
            if rows.size and lengths[rows].max() > longest:
                place = rows[np.argmax(lengths[rows])]
                longest, name = int(lengths[place]), str(texts(calls, "name")[place])
    return name


# --- what is told of them


def warnings(results: PausesResults) -> list[str]:
    """What is to be known of pauses by whoever reads nothing else."""
    lines, timeout_ns = list[str](), results["timeout_ns"]
    near = [
        entry for entry in results["entries"]
        if timeout_ns and entry["longest_step_ns"] > NEAR_FRAC * timeout_ns
        # a job's first step begins before it has a process group
        and entry["kind"] in ("regular", "single")
    ]  # fmt: skip
    if near and timeout_ns and results["world_size"] > 1:
        longest = max(near, key=lambda entry: entry["longest_step_ns"])
        by = "torch's default, which is assumed" if results["timeout_assumed"] else "its timeout"
        lines.append(
            f"a pause of {words.duration(longest['longest_step_ns'])} ({what(longest)}) lasts more "
            f"than half of the {words.duration(timeout_ns)} after which a process group gives up "
            f"({by}): shorten it, or give init_process_group a longer timeout"
        )
    if (step := results["longer_only_from"]) is not None:
        lines.append(
            f"a rank had {GRADE} pauses until step {step}: of later ones the longer ones alone "
            "were kept, so that the share of pauses is at least what is stated"
        )
    return lines


class _Run(NamedTuple):
    """The whole run, of which a pause is a share: how long it took (ns), how many ranks it has."""

    ns: int
    world_size: int

    def entries(self, pauses: Sequence[Pause], disturbed: Sequence[range]) -> list[PauseEntry]:
        """What is told of the pauses of one attempt."""
        entries = [self.entry("start", [pause]) for pause in pauses if pause.is_start]
        single = []
        for alike in _by_ranks([pause for pause in pauses if not pause.is_start]):
            regular = series(alike, disturbed)
            entries += [self.entry("regular", members, chain) for chain, members in regular]
            single.append(_in_no_series(alike, regular))
        of_job, *of_some = single
        left_over = of_job, [pause for of_ranks in of_some for pause in of_ranks]
        return entries + [self.entry("single", rest) for rest in left_over if rest]

    def entry(
        self, kind: PauseKind, pauses: Sequence[Pause], regular: Regular | None = None
    ) -> PauseEntry:
        """One series, or all that are in none."""
        every_steps, every_ns = _period(regular)
        excess = [pause.excess_ns for pause in pauses]
        gpu_ns = self.gpu_ns(pauses)
        longest = sorted(pauses, key=lambda pause: -pause.excess_ns)[:_MOST_STEPS]
        return {
            "kind": kind,
            "attempt": pauses[0].attempt,
            "ranks": _ranks_of(pauses),
            "count": len(pauses),
            "every_steps": every_steps,
            "every_ns": every_ns,
            "chance": regular.chance if regular else None,
            "mean_ns": round(sum(excess) / len(excess)),
            "least_ns": min(excess),
            "most_ns": max(excess),
            "longest_step_ns": max(pause.length_ns for pause in pauses),
            "usual_step_ns": _middle([pause.usual_ns for pause in pauses]),
            "first_step": min(pause.step for pause in pauses),
            "last_step": max(pause.last_step for pause in pauses),
            "first_ns": min(pause.begin_ns for pause in pauses),
            "last_ns": max(pause.begin_ns for pause in pauses),
            "steps": sorted({pause.step for pause in longest}),
            "gpu_ns": gpu_ns,
            "share_of_run": min(gpu_ns / (self.ns * self.world_size), 1.0),
            "name": "",
        }

    def gpu_ns(self, pauses: Sequence[Pause]) -> int:
        """The time that the pauses took of all ranks together that have them."""
        if pauses[0].of_job:
            return sum(pause.excess_ns * self.world_size for pause in pauses)
        return sum(pause.excess_ns * len(pause.ranks) for pause in pauses)

    def restart(self, before: Attempt, after: Attempt) -> PauseEntry:
        """From the last step of an attempt that is logged to the first of the next one."""
        begin_ns = _middle([log.end_ns for log in before.ranks])
        end_ns = _middle([log.begin_ns for log in after.ranks])
        gap_ns = max(end_ns - begin_ns, 0)
        pause = Pause(after.number, 0, 0, begin_ns, gap_ns, 0, gap_ns, ranks=(), of_job=True)
        return self.entry("restart", [pause])


def _by_ranks(pauses: Sequence[Pause]) -> list[list[Pause]]:
    """The pauses of the whole job, which may be none, and then those of each other set of ranks."""
    of_job = [pause for pause in pauses if pause.of_job]
    of_some: dict[tuple[int, ...], list[Pause]] = {}
    for pause in pauses:
        if not pause.of_job:
            of_some.setdefault(pause.ranks, []).append(pause)
    return [of_job, *of_some.values()]


def _in_no_series(
    pauses: Sequence[Pause], regular: Sequence[tuple[Regular, Sequence[Pause]]]
) -> list[Pause]:
    """The pauses whose steps are in none of the series."""
    named = {member.step for _, members in regular for member in members}
    return [pause for pause in pauses if pause.step not in named]


def _ranks_of(pauses: Sequence[Pause]) -> list[int]:
    """The ranks that have the pauses; none are listed where these are of the whole job."""
    if pauses[0].of_job:
        return []
    return sorted({rank for pause in pauses for rank in pause.ranks})


def _period(regular: Regular | None) -> tuple[int | None, int | None]:
    """After how many steps a pause of the series follows, or else after how many ns."""
    if regular is None:
        return None, None
    gap = round(regular.gap)
    return (gap, None) if regular.by_steps else (None, gap)


# --- in words

#: the columns of `cells`
COLUMNS = (
    "pause",
    "count",
    "longer than a step by",
    "steps",
    "first (UTC)",
    "of the run",
    "rank hours",
)


def what(entry: PauseEntry) -> str:
    """What pauses these are, as far as it is known: `every 500 steps (…)`, `single`."""
    if entry["kind"] == "start":
        count = entry["last_step"] + 1 - entry["first_step"]
        return f"start: compilation and warm-up, {words.counted(count, 'step')}"
    if entry["kind"] == "restart":
        return f"restart after attempt {entry['attempt'] - 1}"
    of_some = f" on {words.ranks(entry['ranks'])}" if entry["ranks"] else ""
    if entry["kind"] == "single":
        return f"single{of_some}"
    every = f"{entry['every_steps']:,} steps" if entry["every_steps"] else ""
    every = every or words.duration(entry["every_ns"] or 0)
    name = words.plain(entry["name"]) or "a checkpoint or an evaluation"
    return f"every {every} ({name}){of_some}"


def times(entry: PauseEntry) -> str:
    """How long they take beyond a usual step: the mean, and from where to where it varies."""
    mean, least, most = (words.duration(entry[key]) for key in ("mean_ns", "least_ns", "most_ns"))
    return mean if least == most else f"{mean} ({least} to {most})"


def possible(rows: Mapping[str, Ints], end_ns: int) -> dict[str, Ints]:
    """The rows of a `pauses.csv` that can be: each step once, none that ends after all that the
    rank has logged (`end_ns`, wall clock), which may be a minute behind.
    """
    within = (rows["begin_ns"] >= 0) & (rows["end_ns"] <= end_ns + 60_000_000_000)
    _, first = np.unique(rows["step"], return_index=True)
    once = np.zeros_like(within)
    once[first] = True
    return {name: column[within & once] for name, column in rows.items()}


def cells(entry: PauseEntry) -> list[str]:
    """A row of `COLUMNS`."""
    restart = entry["kind"] == "restart"
    steps = "-" if restart else words.spans({entry["first_step"], entry["last_step"]})
    if entry["count"] > 1:
        steps = f"{entry['first_step']} to {entry['last_step']}"
    return [
        what(entry), f"{entry['count']:,}", times(entry), steps, words.minute(entry["first_ns"]),
        words.percent(entry["share_of_run"]), gpu_hours(entry),
    ]  # fmt: skip


def gpu_hours(entry: PauseEntry) -> str:
    """The time of all ranks together, in hours: of a GPU, where each rank has one."""
    hours = entry["gpu_ns"] / 3.6e12
    if 0 < hours < 0.001:
        return "<0.001"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"


def sentence(entry: PauseEntry) -> str:
    """The same in one line: `every 500 steps (…): 12 pauses, mean 41.0 s; 3.1% of the run, …`."""
    kind, count, takes, steps, _, share, hours = cells(entry)
    many = f"{count} pauses, mean {takes}" if entry["count"] > 1 else takes
    where = "" if entry["kind"] == "restart" else f", step{'s' if ' ' in steps else ''} {steps}"
    return f"{kind}: {many}{where}; {share} of the run, {hours} rank hours"


def costliest(results: PausesResults | None, count: int) -> list[PauseEntry]:
    """So many of the pauses, those that cost most, in the order in which they began."""
    entries = results["entries"] if results else []
    able = sorted(entries, key=lambda entry: -entry["gpu_ns"])[:count]
    return [entry for entry in entries if any(entry is chosen for chosen in able)]


def _middle(values: Sequence[int] | Ints) -> int:
    return int(np.median(values))
