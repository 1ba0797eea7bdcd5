"""All ranks and steps in one picture: which measure is how large where, as data for the page.

A rank is a row, a step a column; each measure has the ranks and steps that it is known of. The
values are 16-bit numbers in base64: a job of 4,096 ranks fits into a page.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import exchanges, words
from clusterprof.columns import (
    Floats,
    Ints,
    combined,
    count_by,
    integers,
    order_by,
    places,
    row_of,
    sums,
)
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job

#: cells of one measure that a page carries, 3 bytes each: 73 steps of 4,096 ranks
MOST_CELLS = 300_000
#: more columns than that are narrower than a pointer can show
MOST_STEPS = 400
#: the strongest shade is so much of a step at least: a twentieth is what a finding takes
_LEAST_SHADE = 1 / 20
#: a value of which nothing is known; below it, the largest
_UNKNOWN, _FULL = 65_535, 65_000
#: measures of the accounts: name, member of `RankAccount`, sentence, whether from the least
_OF_ACCOUNTS = (
    ("idle", "idle_ns", "time without compute, communication or copies", False),
    ("exposed wait", "exposed_wait_ns", "waiting for a later rank, not overlapped", False),
    ("step time", "duration_ns", "the rank's step on its device", True),
)


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
    certain = exchanges.certain_waits(table, run.uncertainties)
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


# --- as data for the page


def embedded(run: Summary, collectives: pa.Table, job: Job) -> dict[str, Any] | None:
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
    return {
        "ranks": ranks.tolist(),
        "profiled": [row[e["rank"]] for e in run.results["ranks"] if e["rank"] in row],
        "named": [row[rank] for rank in named if rank in row],
        "groupings": _groupings(run, job, ranks),
        "measures": [_packed(measure, ranks, run) for measure in known_measures],
        "first": names.index("idle") if idles and "idle" in names else 0,
    }


def _packed(measure: Measure, ranks: Ints, run: Summary) -> dict[str, Any]:
    window = [step["step"] for step in run.results["steps"]]
    steady = [step["step"] for step in run.results["steps"] if step["settled"]]
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
    unit = max(float(np.nanmax(values, initial=0)) / _FULL, 1.0)
    codes = np.where(has_value, np.round(np.nan_to_num(values) / unit), _UNKNOWN).astype("<u2")
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
    groupings = []
    for kind, groups in members.items():
        label = np.full(len(ranks), -1)
        for number, group in enumerate(groups.values()):
            label[np.isin(ranks, group) & (label < 0)] = number
        sizes = count_by(label[label >= 0], 1)
        # one group, or one rank in each, groups nothing
        if (sizes > 0).sum() > 1 and sizes.max() > 1:
            groupings.append({"name": kind, "labels": [*groups], "of": label.tolist()})
    return groupings
