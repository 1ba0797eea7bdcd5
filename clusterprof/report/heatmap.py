"""All ranks and steps in one picture: which measure is how large where, as data for the page.

A rank is a row, a step a column; each measure has the ranks and steps that it is known of. The
values are 16-bit numbers in base64: a job of 4,096 ranks fits into a page.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import exchanges, words
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

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


@dataclass(frozen=True)
class Measure:
    """One measure: `values` (ns, NaN where unknown) of `ranks` x `steps`."""

    name: str
    #: what it is, in one sentence without its end
    what: str
    ranks: Numbers
    steps: Numbers
    values: Reals
    #: its smallest value is its lightest shade; else zero is
    from_least: bool = False


def measures(run: Summary, collectives: pa.Table, job: Job) -> list[Measure]:
    """All measures that the results and the job's records have, the most telling first."""
    every = [*_caused(run, collectives), *_accounts(run), *_shallow(job.shallow), *_logged(job)]
    return [measure for measure in every if np.isfinite(measure.values).any()]


def _measure(
    name: str,
    what: str,
    rank: npt.ArrayLike,
    step: npt.ArrayLike,
    ns: npt.ArrayLike,
    *,
    from_least: bool = False,
    without: float = np.nan,
) -> Measure:
    """The sums of `ns` by rank and step; `without` where there are no values."""
    ranks, row = np.unique(np.asarray(rank, np.int64), return_inverse=True)
    steps, column = np.unique(np.asarray(step, np.int64), return_inverse=True)
    sums, has_value = np.zeros((len(ranks), len(steps))), np.zeros((len(ranks), len(steps)), bool)
    np.add.at(sums, (row, column), np.asarray(ns, np.float64))
    has_value[row, column] = True
    return Measure(name, what, ranks, steps, np.where(has_value, sums, without), from_least)


def _caused(run: Summary, collectives: pa.Table) -> Iterator[Measure]:
    """How long the other members of its collectives wait for each rank."""
    has_wait = pc.and_(pc.is_valid(collectives["wait_ns"]), pc.is_valid(collectives["step"]))
    table = exchanges.whole(collectives.filter(has_wait))
    if not table.num_rows:
        return
    rank, last, step = (
        pc.fill_null(table[name], 0).to_numpy() for name in ("rank", "last_rank", "step")
    )
    start = pc.fill_null(table["aligned_start_ns"], 0).to_numpy()
    certain = exchanges.certain_waits(table, run.uncertainties)
    waits = exchanges.counted_once(start, certain, rank, last, step)
    # the mean over the ranks for which it comes last in the step
    cause, others = exchanges.combined(last, step), rank != last
    _, once = np.unique(exchanges.combined(cause, rank)[others], return_index=True)
    kept_waiting = np.bincount(cause[others][once], minlength=cause.max() + 1)
    mean_waits = waits / np.maximum(kept_waiting, 1)[cause]
    what = "how long other ranks wait for the rank (mean of those that do), overlapped or not"
    # each rank has a row, also one that no rank waits for
    yield _measure(
        "wait caused", what, np.r_[last, rank], np.r_[step, step],
        np.r_[mean_waits, np.zeros(len(rank))], without=0.0,
    )  # fmt: skip


def _accounts(run: Summary) -> Iterator[Measure]:
    window = run.results["steps"]
    accounts = [account for step in window for account in step["ranks"]]
    ranks = [account["rank"] for account in accounts]
    steps = [step["step"] for step in window for _ in step["ranks"]]
    for name, key, what, from_least in _OF_ACCOUNTS if accounts else ():
        ns = [account[key] for account in accounts]  # type: ignore[literal-required]
        yield _measure(name, what, ranks, steps, ns, from_least=from_least)


def _shallow(table: pa.Table | None) -> Iterator[Measure]:
    """How long all members of its groups wait for each rank, by all flight recorders."""
    if table is None:
        return
    table = table.filter(pc.and_(pc.is_valid(table["lateness_ns"]), pc.is_valid(table["step"])))
    if table.num_rows:
        columns = (table[name].to_numpy() for name in ("rank", "step", "lateness_ns"))
        what = "by how much the rank comes after the first member, in all its calls, of all ranks"
        yield _measure("lateness, all ranks", what, *columns)


def _logged(job: Job) -> Iterator[Measure]:
    """What each step took on the host, by the step logs of all ranks."""
    logs = [(rank, log) for rank, log in sorted(job.steps.items()) if log.num_rows]
    if not logs:
        return
    log = pa.concat_tables([log.select(["step", "begin_ns", "end_ns"]) for _, log in logs])
    rank = np.repeat([rank for rank, _ in logs], [log.num_rows for _, log in logs])
    took = pc.subtract(log["end_ns"], log["begin_ns"]).to_numpy()
    what = "the step on the rank's host, by the step logs of all ranks"
    yield _measure(
        "step time, all ranks", what, rank, log["step"].to_numpy(), took, from_least=True
    )


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


def _packed(measure: Measure, ranks: Numbers, run: Summary) -> dict[str, Any]:
    window = [step["step"] for step in run.results["steps"]]
    steady = [step["step"] for step in run.results["steps"] if step["settled"]]
    pace = run.results["pace"]
    least_range_ns = _LEAST_SHADE * pace["window_step_ns"] if pace else 0.0
    chosen = _columns(measure.steps, len(ranks), window)
    steps = measure.steps[chosen]
    values = np.full((len(ranks), len(steps)), np.nan)
    values[np.searchsorted(ranks, measure.ranks)] = measure.values[:, chosen]
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


def _columns(steps: Numbers, ranks: int, window: Sequence[int]) -> Numbers:
    """The steps that a page can carry: those nearest to the window."""
    most_steps = max(min(MOST_CELLS // max(ranks, 1), MOST_STEPS), 1)
    middle = (window[0] + window[-1]) / 2 if window else float(steps[-1])
    nearest = np.argsort(np.abs(steps - middle), kind="stable")[:most_steps]
    return np.sort(nearest)


def _groupings(run: Summary, job: Job, ranks: Numbers) -> list[dict[str, Any]]:
    """By what ranks can be grouped: name, labels, and each rank's label (-1 where unknown)."""
    topology, shallow = run.results["topology"], run.results["shallow"]
    hosts: dict[str, list[int]] = {}
    for rank, host in sorted({**job.hosts, **run.hosts}.items()):
        hosts.setdefault(words.plain(host), []).append(rank)
    stages = {f"stage {stage['stage']}": stage["ranks"] for stage in topology["stages"]}
    if shallow and len(shallow["stages"]) > 1:
        stages = {f"stage {number}": members for number, members in enumerate(shallow["stages"])}
    kinds: dict[str, dict[str, list[int]]] = {}
    named = [(f"{group['kind']} group", group["ranks"]) for group in topology["groups"]]
    if shallow:
        named += [(words.plain(g["description"]) or "group", g["ranks"]) for g in shallow["groups"]]
    for kind, members in named:
        kinds.setdefault(kind, {})[words.spans(members, 2)] = members
    every = [("host", hosts), ("stage", stages), *kinds.items()]
    groupings = (_grouping(kind, groups, ranks) for kind, groups in every)
    return [grouping for grouping in groupings if grouping is not None]


def _grouping(
    name: str, groups: Mapping[str, Iterable[int]], ranks: Numbers
) -> dict[str, Any] | None:
    """None where it groups nothing: one group, or one rank in each."""
    label = np.full(len(ranks), -1)
    for number, members in enumerate(groups.values()):
        label[np.isin(ranks, np.asarray([*members], np.int64)) & (label < 0)] = number
    sizes = np.bincount(label[label >= 0], minlength=1)
    if (sizes > 0).sum() < 2 or sizes.max() < 2:
        return None
    return {"name": name, "labels": [*groups], "of": label.tolist()}
