"""A whole job: what is known of all ranks and steps beside its results, and two pictures of it.

In the heatmap a rank is a row, a step a column; each measure has the ranks and steps that it is
known of. The values are 16-bit numbers in base64: a job of 4,096 ranks fits into a page. The chart
of steps has a bar for each step of the run, or block of them, with the window and the steps that
the profiler disturbed.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import exchanges, pauses, words
from clusterprof.columns import (
    Floats,
    Ints,
    combined,
    count_by,
    integers,
    order_by,
    places,
    row_of,
    rows_by,
    sums,
)
from clusterprof.report.summary import NOT_NAMED, Summary
from clusterprof.results import Results, steady_steps, steps_to_look_at

#: cells of one measure that a page carries, 3 bytes each: 73 steps of 4,096 ranks
MOST_CELLS = 300_000
#: more columns than that are narrower than a pointer can show
MOST_STEPS = 400
#: the strongest shade is so much of a step at least: a twentieth is what a finding takes
_LEAST_SHADE = 1 / 20
#: a rank stands out with so many times the next one's value
_STANDS_OUT = 1.5
#: a value of which nothing is known; below it, the largest
_NO_VALUE, _MOST_CODE = 65_535, 65_000
#: measures of the accounts: name, member of `RankAccount`, sentence, whether from the least
_OF_ACCOUNTS = (
    ("idle", "idle_ns", "time without compute, communication or copies", False),
    ("exposed wait", "exposed_wait_ns", "waiting for a later rank, not overlapped", False),
    ("step time", "duration_ns", "the rank's step on its device", True),
)

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 170, 58, 8, 8, 24
_FLOOR = _TOP + _HEIGHT
#: with few bars the drawing is narrower: so much for a bar, but never less in all
_PER_BAR, _LEAST_WIDTH = 84, 400
#: a bar of a block of steps is so many times as wide as a single step's
_BLOCK_WIDTH = 3
#: this part of a bar's place is free at either side
_FREE = 0.08
#: how much of the height the longest undisturbed bar takes: what is longer is cut off and marked
_FULL = 0.82


@dataclass(frozen=True)
class Job:
    """A run of clusterprof, as its run directory tells. Of other reports all of it is unknown."""

    #: each call of all ranks by their flight recorders (`align.lateness.SHALLOW`)
    shallow: pa.Table | None = None
    #: the step log of each rank, profiled or not: the steps near the window (`tables.STEPS`)
    steps: Mapping[int, pa.Table] = field(default_factory=dict)
    #: the other steps of each rank in blocks: first_step, count, median_ns, q1_ns, q3_ns, …
    paces: Mapping[int, Mapping[str, Ints]] = field(default_factory=dict)
    #: which attempt of the job these are of
    attempt: int = 1
    #: the first step of the window, and the first one after it
    window: tuple[int, int] | None = None
    #: the hosts of those ranks whose host is known
    hosts: Mapping[int, str] = field(default_factory=dict)
    #: the versions of torch that ranks trained with
    torch: tuple[str, ...] = ()
    #: the command line (secrets masked), its launcher, and when the job began and ended (ISO 8601)
    command: str = ""
    launcher: str = ""
    began: str = ""
    ended: str = ""

    @property
    def step_count(self) -> int:
        """How many steps the job made, by the log that goes furthest; 0 where there is none."""
        logged = [int(log["step"].to_numpy().max()) + 1 for log in self.steps.values() if len(log)]
        blocks = [
            int((pace["first_step"] + pace["count"]).max())
            for pace in self.paces.values()
            if len(pace.get("count", ()))
        ]
        return max(logged + blocks, default=0)

    @property
    def logged(self) -> tuple[Ints, Ints, Ints]:
        """The rank, the number and the length (ns) of each step in the step logs."""
        names = ("step", "begin_ns", "end_ns")
        steps = [
            np.stack([np.full(log.num_rows, rank), *(log[name].to_numpy() for name in names)])
            for rank, log in sorted(self.steps.items())
        ]
        rank, step, begin, end = np.concatenate([np.zeros((4, 0), np.int64), *steps], axis=1)
        return rank, step, end - begin


# --- the heatmap


class Measure(NamedTuple):
    """One measure: `values` (ns, NaN where unknown) of `ranks` x `steps`."""

    name: str
    #: what it is, in one sentence without its end
    what: str
    ranks: Ints
    steps: Ints
    values: Floats
    #: its smallest value is its lightest shade; else zero is
    from_least: bool = False


def measures(run: Summary, collectives: pa.Table, job: Job) -> list[Measure]:
    """All measures that the results and the job's records have, the most telling first."""
    shallow = job.shallow
    has_wait = pc.and_(pc.is_valid(collectives["wait_ns"]), pc.is_valid(collectives["step"]))
    waits = exchanges.whole(collectives.filter(has_wait))
    known_measures = [_caused(run, waits)] if waits.num_rows else []
    accounts = [(row, step["step"]) for step in run.results["steps"] for row in step["ranks"]]
    for name, key, phrase, from_least in _OF_ACCOUNTS:
        rows = [(account["rank"], step, account[key]) for account, step in accounts]  # type: ignore[literal-required]
        columns = np.array(rows, np.int64).reshape(-1, 3).T
        known_measures.append(_measure(name, phrase, *columns, from_least=from_least))
    if shallow is not None:
        names = ("rank", "step", "lateness_ns")
        columns = [column.to_numpy() for column in shallow.select(names).drop_null().columns]
        phrase = "by how much the rank comes after the first member, in all its calls, of all ranks"
        known_measures.append(_measure("lateness, all ranks", phrase, *columns))
    phrase = "the step on the rank's host, by the step logs of all ranks"
    known_measures.append(_measure("step time, all ranks", phrase, *job.logged, from_least=True))
    return [measure for measure in known_measures if np.isfinite(measure.values).any()]


def _measure(
    name: str,
    phrase: str,
    rank: Ints,
    step: Ints,
    ns: Ints | Floats,
    *,
    from_least: bool = False,
    without: float = np.nan,
) -> Measure:
    """The sums of `ns` by rank and step; `without` where there are no values."""
    (ranks, row), (steps, column) = places(rank), places(step)
    shape, cells = (len(ranks), len(steps)), (row, column)
    values = np.where(sums(shape, cells) > 0, sums(shape, cells, ns), without)
    return Measure(name, phrase, ranks, steps, values, from_least)


def _caused(run: Summary, table: pa.Table) -> Measure:
    """How long the other members of its collectives wait for each rank."""
    names = ("rank", "last_rank", "step", "aligned_start_ns")
    rank, last, step, start = (integers(table, name) for name in names)
    # each call's wait, 0 where clocks may explain it; where a rank's waits for the same rank
    # overlap in a step, the overlap counts once
    certain = exchanges.certain_waits(table, run.uncertainties)
    start, certain = exchanges.within_steps(start, certain, step, run.begins)
    waits = exchanges.counted_once(start, certain, rank, last, step)
    # the mean over the ranks for which it comes last in the step
    cause, others = combined(last, step), rank != last
    _, once = np.unique(combined(cause, rank)[others], return_index=True)
    kept_waiting = count_by(cause[others][once], cause.max() + 1)
    mean_waits = waits / np.maximum(kept_waiting, 1)[cause]
    phrase = "how long other ranks wait for the rank (mean of those that do), overlapped or not"
    # each rank has a row, also one that no rank waits for
    return _measure(
        "wait caused", phrase, np.concatenate((last, rank)), np.concatenate((step, step)),
        np.concatenate((mean_waits, np.zeros(len(rank)))), without=0.0,
    )  # fmt: skip


def heatmap(run: Summary, collectives: pa.Table, job: Job) -> dict[str, Any] | None:
    """The heatmap's data for the page's script; None where no measure is known."""
    known_measures = measures(run, collectives, job)
    if not known_measures:
        return None
    ranks = np.unique(np.concatenate([measure.ranks for measure in known_measures]))
    row = {rank: number for number, rank in enumerate(ranks.tolist())}
    named = run.stragglers(unprofiled=True)
    # shown at first: the measure in which the leading finding shows
    top, names = run.leading, [measure.name for measure in known_measures]
    idles = top is not None and top["code"].startswith(("host.", "gpu.", "input.stall"))
    first = names.index("idle") if idles and "idle" in names else 0
    return {
        "ranks": ranks.tolist(),
        "profiled": [row[e["rank"]] for e in run.results["ranks"] if e["rank"] in row],
        "named": [row[rank] for rank in named if rank in row],
        "groupings": _groupings(run, job, ranks),
        "measures": [_packed(measure, ranks, run) for measure in known_measures],
        "first": first,
        "darkest": darkest(run, known_measures[first]),
    }


def darkest(run: Summary, measure: Measure) -> str:
    """The rank that stands out in a measure, and why no finding names it; empty where one does,
    or none stands out.
    """
    steady = np.isin(measure.steps, steady_steps(run.results))
    if len(measure.ranks) < 2 or not steady.any():
        return ""
    means = np.nan_to_num(measure.values[:, steady]).mean(axis=1)
    next_ns, most_ns = np.sort(means)[-2:].tolist()
    rank = int(measure.ranks[means.argmax()])
    least_ns = max(_STANDS_OUT * next_ns, next_ns + _LEAST_SHADE * (run.usual_ns or 0))
    if most_ns < least_ns or run.is_named(rank):
        return ""
    much = f"{measure.name} {words.ms(most_ns)} per step, the next one's {words.ms(next_ns)}"
    return f"Rank {rank} stands out: {much}. No finding is of it alone: {NOT_NAMED}."


def _packed(measure: Measure, ranks: Ints, run: Summary) -> dict[str, Any]:
    window = [step["step"] for step in run.results["steps"]]
    steady = steady_steps(run.results)
    pace = run.results["pace"]
    least_range_ns = _LEAST_SHADE * pace["window_step_ns"] if pace else 0.0
    # the steps that a page can carry: those nearest to the window
    most_steps = max(min(MOST_CELLS // max(len(ranks), 1), MOST_STEPS), 1)
    middle = (window[0] + window[-1]) / 2 if window else float(measure.steps[-1])
    nearest = order_by(np.abs(measure.steps - middle))
    chosen = np.sort(nearest[:most_steps])
    steps = measure.steps[chosen]
    values = np.full((len(ranks), len(steps)), np.nan)
    values[row_of(ranks, measure.ranks)] = measure.values[:, chosen]
    has_value = np.isfinite(values)
    unit = max(float(np.nanmax(values, initial=0)) / _MOST_CODE, 1.0)
    codes = np.where(has_value, np.round(np.nan_to_num(values) / unit), _NO_VALUE).astype("<u2")
    # a step that the profiler disturbed would make all others equal
    undisturbed = np.isin(steps, steady) | ~np.isin(steps, window)
    shown = values[:, undisturbed] if undisturbed.any() else values
    shown = shown[np.isfinite(shown)]
    low = float(shown.min()) if measure.from_least and shown.size else 0.0
    return {
        "name": measure.name,
        "what": measure.what,
        "steps": steps.tolist(),
        # those of the window that are not in steady state
        "unsteady": np.flatnonzero(~undisturbed).tolist(),
        "unit_ns": unit,
        "low_ns": round(low),
        "high_ns": round(max(float(shown.max(initial=low)), low + least_range_ns)),
        "values": base64.b64encode(codes.tobytes()).decode(),
    }


def _groupings(run: Summary, job: Job, ranks: Ints) -> list[dict[str, Any]]:
    """By what ranks can be grouped: name, labels, and each rank's label (-1 where unknown)."""
    groupings = []
    for kind, groups in _groups(run, job).items():
        label = np.full(len(ranks), -1)
        for number, group in enumerate(groups.values()):
            label[np.isin(ranks, group) & (label < 0)] = number
        sizes = count_by(label[label >= 0], 1)
        # one group, or one rank in each, groups nothing
        if (sizes > 0).sum() > 1 and sizes.max() > 1:
            groupings.append({"name": kind, "labels": [*groups], "of": label.tolist()})
    return groupings


def _groups(run: Summary, job: Job) -> dict[str, dict[str, list[int]]]:
    """The ranks of each host, stage and group, by kind and name."""
    topology, shallow = run.results["topology"], run.results["shallow"]
    members: dict[str, dict[str, list[int]]] = {"host": {}, "stage": {}}
    for rank, host in sorted({**job.hosts, **run.hosts}.items()):
        members["host"].setdefault(words.plain(host), []).append(rank)
    stages = [(stage["stage"], stage["ranks"]) for stage in topology["stages"]]
    named = [(f"{group['kind']} group", group["ranks"]) for group in topology["groups"]]
    if shallow:
        stages = [*enumerate(shallow["stages"])] if len(shallow["stages"]) > 1 else stages
        named += [(words.plain(g["description"]) or "group", g["ranks"]) for g in shallow["groups"]]
    members["stage"] = {f"stage {number}": stage_ranks for number, stage_ranks in stages}
    for kind, group_ranks in named:
        members.setdefault(kind, {})[words.spans(group_ranks, 2)] = group_ranks
    return members


# --- the chart of steps


@dataclass(frozen=True, order=True)
class Bar:
    """One step, or a block of steps: the median over ranks (ns), and the least and the most."""

    first: int
    count: int
    median_ns: float
    low_ns: float
    high_ns: float

    @property
    def wide(self) -> int:
        """How many times as wide as a single step's it is."""
        return _BLOCK_WIDTH if self.count > 1 else 1


def bars(results: Results, job: Job) -> list[Bar]:
    """All steps in order: those of the step logs, and the others in blocks; else the window's."""
    _, step, ns = job.logged
    if not len(step):
        window = results["steps"]
        rows = [(e["step"], account["duration_ns"]) for e in window for account in e["ranks"]]
        step, ns = np.array(rows, np.int64).reshape(-1, 2).T
    singles = []
    for number, rows_of_step in rows_by(step).items():
        of_ranks = ns[rows_of_step]
        median_ns, low_ns, high_ns = np.median(of_ranks), of_ranks.min(), of_ranks.max()
        singles.append(Bar(number, 1, float(median_ns), float(low_ns), float(high_ns)))
    return sorted([*singles, *_blocks(job, singles)], key=lambda bar: bar.first)


def _blocks(job: Job, singles: Sequence[Bar]) -> list[Bar]:
    """The blocks of all ranks, which begin and end in the same steps but for a few."""
    names = ("first_step", "count", "median_ns", "q1_ns", "q3_ns")
    times: dict[tuple[int, int], list[list[int]]] = {}
    for pace in job.paces.values():
        if all(name in pace for name in names):
            for first, count, *of_rank in np.stack([pace[name] for name in names], 1).tolist():
                times.setdefault((first, count), []).append(of_rank)
    blocks: list[Bar] = []
    for (first, count), of_block in sorted(times.items()):
        # another rank's block of the same steps is not drawn twice
        is_new = not blocks or first >= blocks[-1].first + blocks[-1].count
        if is_new and not any(first <= bar.first < first + count for bar in singles):
            blocks.append(Bar(first, count, *np.median(of_block, axis=0).tolist()))
    return blocks


def step_chart(results: Results, job: Job) -> dict[str, Any] | None:
    """The drawing in units of `width` x `height`; None where fewer than three steps are known."""
    every = bars(results, job)
    if len(every) < 3:
        return None
    window = [step["step"] for step in results["steps"]]
    shown = _nearest_bars(every, window)
    unsteady = {*window}.difference(steady_steps(results))
    top_ns = _top_ns(shown, unsteady)
    places = [*accumulate((bar.wide for bar in shown), initial=0)]
    width = min(max(_LEFT + _RIGHT + _PER_BAR * places[-1], _LEAST_WIDTH), _WIDTH)
    # how wide a single step's place is
    unit = (width - _LEFT - _RIGHT) / places[-1]
    drawn, pauses_by_step = [], _pauses(results, job)
    for bar, before in zip(shown, places, strict=False):
        figure = _drawn(bar, _LEFT + before * unit, unit, top_ns, disturbed=bar.first in unsteady)
        figure["inside"] = bar.count == 1 and bar.first in window
        figure["paused"] = _paused(bar, pauses_by_step)
        figure["label"] += figure["paused"]
        drawn.append(figure)
    return {
        "width": width,
        "height": _FLOOR + _BOTTOM,
        "floor": _FLOOR,
        "left": _LEFT,
        "bars": drawn,
        "window": _frame(drawn, unit, job),
        "marks": _marks(drawn, width),
        "scale": _scale(top_ns),
        "cut": any(bar["cut"] for bar in drawn),
        "paused": any(bar["paused"] for bar in drawn),
        "left_out": len(every) - len(shown),
        "timeline": _shown_in_timeline(results, job),
        "of": f"{len(job.steps):,} ranks' step logs" if job.steps else "the profiled ranks' steps",
    }


def _nearest_bars(every: list[Bar], window: list[int]) -> list[Bar]:
    """The bars nearest to the window, or else to the end: so few that one can point at each."""
    middle = (window[0] + window[-1]) / 2 if window else every[-1].first
    return sorted(sorted(every, key=lambda bar: abs(bar.first - middle))[:160])


def _top_ns(shown: list[Bar], unsteady: Container[int]) -> float:
    """The time up to which the scale goes, by the bars that the profiler did not disturb."""
    usual = [bar.median_ns for bar in shown if bar.first not in unsteady]
    # the first steps of a job compile; a scale up to them would make all others equal
    return float(np.quantile(usual or [bar.median_ns for bar in shown], 0.9)) / _FULL * 1.15


def _pauses(results: Results, job: Job) -> dict[int, str]:
    """What pauses there are, by their steps, in the attempt whose steps are drawn."""
    entries = results["pauses"]["entries"] if "pauses" in results else []
    return {
        step: pauses.what(entry)
        for entry in entries
        if entry["attempt"] == job.attempt and entry["kind"] != "restart"
        for step in (
            range(entry["first_step"], entry["last_step"] + 1)
            if entry["kind"] == "start" else entry["steps"]
        )
    }  # fmt: skip


def _paused(bar: Bar, pauses_by_step: Mapping[int, str]) -> str:
    """The pause in a step, or how many are in a block, to stand behind the bar's label."""
    if bar.count == 1:
        kind = pauses_by_step.get(bar.first)
        return f"; pause: {kind}" if kind else ""
    count = sum(bar.first <= step < bar.first + bar.count for step in pauses_by_step)
    return f"; {words.counted(count, 'pause')}" if count else ""


def _frame(drawn: list[dict[str, Any]], unit: float, job: Job) -> tuple[float, float] | None:
    """From where on the window's bars are, and how wide that is; None where there are no others."""
    inside = [bar for bar in drawn if bar["inside"]]
    if not inside or not job.steps:
        return None
    left = inside[0]["x"] - _FREE * unit
    right = inside[-1]["x"] + inside[-1]["width"] + _FREE * unit
    return round(left, 1), round(right - left, 1)


def _y(ns: float, top_ns: float) -> float:
    """How far from the upper edge a time ends; what is longer than `top_ns` is cut off."""
    return _TOP + _HEIGHT * (1 - min(ns / top_ns, 1))


def _drawn(bar: Bar, left: float, unit: float, top_ns: float, *, disturbed: bool) -> dict[str, Any]:
    """A bar as it is drawn from `left` on."""
    x, y = round(left + _FREE * unit, 1), _y(bar.median_ns, top_ns)
    width = round(bar.wide * unit - 2 * _FREE * unit, 1)
    # across the bar, from its foot to its head
    lines = np.arange(_FLOOR - 3, y, -6).tolist() if disturbed else []
    kind, spread, numbers = "step", "ranks", f"{bar.first}"
    if bar.count > 1:
        kind, spread = "steps", "quartiles"
        numbers += f"–{bar.first + bar.count - 1}"
    times = [words.duration(ns) for ns in (bar.median_ns, bar.low_ns, bar.high_ns)]
    label = f"{kind} {numbers}: {times[0]}, {spread} {times[1]} to {times[2]}"
    return {
        "x": x,
        "width": width,
        "middle": round(left + bar.wide * unit / 2, 1),
        "y": round(y, 1),
        "height": round(_FLOOR - y, 1),
        "low": round(_y(bar.low_ns, top_ns), 1),
        "high": round(_y(bar.high_ns, top_ns), 1),
        "cut": max(bar.median_ns, bar.high_ns) > top_ns,
        "stripes": "".join(f"M{x} {line:.1f}h{width}" for line in lines),
        "label": label + (", not in steady state" if disturbed else ""),
        "numbers": numbers,
    }


def _shown_in_timeline(results: Results, job: Job) -> str:
    """Which steps the timeline shows: another one may be higher here, and this says why."""
    steps = steps_to_look_at(results)
    if len(steps) < 2:
        return ""
    steady = " in steady state" if steady_steps(results) else ""
    whose = " of the profiled ranks" if job.steps else ""
    return (
        f"The timeline shows step {steps[0]}, a typical one, and step {steps[1]}, the longest"
        f"{steady}{whose}."
    )


def _scale(top: float) -> list[tuple[float, str]]:
    """At most five round times up to `top` (ns), each with its height."""
    power = 10.0 ** math.floor(math.log10(max(top / 5, 1)))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= top / 5)
    times = [count * apart for count in range(1, int(top / apart) + 1)]
    return [(round(_y(ns, top), 1), f"{ns / 1e6:g} ms") for ns in times]


def _marks(drawn: list[dict[str, Any]], width: int) -> list[tuple[float, str]]:
    """Step numbers below the bars, as many as fit."""
    marks: list[tuple[float, str]] = []
    free = -1.0
    for bar in drawn:
        half = 3.6 * len(bar["numbers"])
        if bar["middle"] - half > free and bar["middle"] + half < width:
            marks.append((bar["middle"], bar["numbers"]))
            free = bar["middle"] + half + 10
    return marks
