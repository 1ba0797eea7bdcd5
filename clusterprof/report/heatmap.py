"""All ranks and steps in one picture: which measure is how large where, as data for the page.

A rank is a row, a step a column; each measure has the ranks and steps that it is known of. The
values are 16-bit numbers in base64: a job of 4,096 ranks fits into a page.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import exchanges, words
from clusterprof.report import summary
from clusterprof.report.whole_job import Job
from clusterprof.results import Results

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


def measures(results: Results, collectives: pa.Table, job: Job) -> list[Measure]:
    """All measures that the results and the job's records have, the most telling first."""
    found = [
        _caused(results, collectives),
        *_accounts(results),
        _shallow(job.shallow),
        _logged(job.steps),
    ]
    return [each for each in found if each is not None and np.isfinite(each.values).any()]


def _grid(rank: Numbers, step: Numbers, ns: Reals) -> tuple[Numbers, Numbers, Reals, Numbers]:
    """Ranks, steps, the sums of `ns` by rank and step, and how many values each is of."""
    ranks, row = np.unique(rank, return_inverse=True)
    steps, column = np.unique(step, return_inverse=True)
    shape = (len(ranks), len(steps))
    cell = row.reshape(-1) * len(steps) + column.reshape(-1)
    counts = np.bincount(cell, minlength=shape[0] * shape[1])
    sums = np.zeros(shape)
    np.add.at(sums.reshape(-1), cell, ns)
    return ranks, steps, sums, counts.reshape(shape)


def _caused(results: Results, collectives: pa.Table) -> Measure | None:
    """How long the other members of its collectives wait for each rank."""
    known = pc.and_(pc.is_valid(collectives["wait_ns"]), pc.is_valid(collectives["step"]))
    table = exchanges.whole(collectives.filter(known))
    if not table.num_rows:
        return None
    rank, last, wait, step = (_column(table, n) for n in ("rank", "last_rank", "wait_ns", "step"))
    _, of, members = np.unique(
        _column(table, "collective"), return_inverse=True, return_counts=True
    )
    clocks = summary.rank_uncertainties(results)
    unsure = np.asarray([clocks.get(one, 0) for one in range(int(max(rank.max(), last.max())) + 1)])
    others = np.maximum(members[of.reshape(-1)] - 1, 1)
    certain = (wait > unsure[rank] + unsure[last]) & exchanges.once(table)
    caused = np.where(certain, wait, 0) / others
    # each rank has a row, also one that no rank waits for
    ranks, steps, sums, _ = _grid(
        np.concatenate([last, rank]),
        np.concatenate([step, step]),
        np.concatenate([caused, np.zeros(len(rank))]),
    )
    what = "how long the other members of its collectives wait for the rank, overlapped or not"
    return Measure("wait caused", what, ranks, steps, sums)


#: measures of the accounts: name, member of `RankAccount`, sentence, whether from the least
_OF_ACCOUNTS = (
    ("idle", "idle_ns", "time without compute, communication or copies", False),
    ("exposed wait", "exposed_wait_ns", "waiting for a later rank, not overlapped", False),
    ("step time", "duration_ns", "the rank's step on its device", True),
)


def _accounts(results: Results) -> list[Measure]:
    accounts = [(step["step"], each) for step in results["steps"] for each in step["ranks"]]
    if not accounts:
        return []
    step = np.asarray([number for number, _ in accounts])
    rank = np.asarray([account["rank"] for _, account in accounts])
    out = []
    for name, key, what, from_least in _OF_ACCOUNTS:
        ns = np.array([account[key] for _, account in accounts], np.float64)  # type: ignore[literal-required]
        ranks, steps, sums, counts = _grid(rank, step, ns)
        out.append(Measure(name, what, ranks, steps, _where(counts, sums), from_least))
    return out


def _shallow(table: pa.Table | None) -> Measure | None:
    """How long all members of its groups wait for each rank, by all flight recorders."""
    if table is None:
        return None
    table = table.filter(pc.and_(pc.is_valid(table["lateness_ns"]), pc.is_valid(table["step"])))
    if not table.num_rows:
        return None
    late = _column(table, "lateness_ns").astype(float)
    ranks, steps, sums, counts = _grid(_column(table, "rank"), _column(table, "step"), late)
    what = "by how much the rank comes after the first member, in all its calls, of all ranks"
    return Measure("lateness, all ranks", what, ranks, steps, _where(counts, sums))


def _logged(logs: Mapping[int, pa.Table]) -> Measure | None:
    """What each step took on the host, by the step logs of all ranks."""
    tables = {rank: log for rank, log in sorted(logs.items()) if log.num_rows}
    if not tables:
        return None
    every = pa.concat_tables(
        [log.select(["step", "begin_ns", "end_ns"]) for log in tables.values()]
    )
    rank = np.repeat(np.asarray([*tables]), [log.num_rows for log in tables.values()])
    took = (_column(every, "end_ns") - _column(every, "begin_ns")).astype(float)
    ranks, steps, sums, counts = _grid(rank, _column(every, "step"), took)
    what = "the step on the rank's host, by the step logs of all ranks"
    return Measure("step time, all ranks", what, ranks, steps, _where(counts, sums), True)


def _where(counts: Numbers, sums: Reals) -> Reals:
    return np.where(counts > 0, sums, np.nan)


def _column(table: pa.Table, name: str) -> Numbers:
    return np.asarray(table[name].to_numpy(), dtype=np.int64)


# --- as data for the page


def embedded(results: Results, collectives: pa.Table, job: Job) -> dict[str, Any] | None:
    """The heatmap's data for the page's script; None where no measure is known."""
    found = measures(results, collectives, job)
    if not found:
        return None
    ranks = np.unique(np.concatenate([each.ranks for each in found]))
    steady = [step["step"] for step in results["steps"] if step["settled"]]
    window = [step["step"] for step in results["steps"]]
    place = {rank: at for at, rank in enumerate(ranks.tolist())}
    pace = results["pace"]
    least = _LEAST_SHADE * pace["window_step_ns"] if pace else 0.0
    return {
        "ranks": ranks.tolist(),
        "profiled": [place[e["rank"]] for e in results["ranks"] if e["rank"] in place],
        "named": [
            place[rank] for rank in summary.stragglers(results, unprofiled=True) if rank in place
        ],
        "groupings": _groupings(results, job, ranks),
        "measures": [_packed(each, ranks, steady, window, least) for each in found],
        "first": _first(results, [each.name for each in found]),
    }


def _first(results: Results, names: Sequence[str]) -> int:
    """Which measure is shown at first: that in which the leading finding shows."""
    top = summary.leading(results)
    wanted = "idle" if top and top["code"].startswith(("host.", "gpu.", "input.stall")) else ""
    return names.index(wanted) if wanted in names else 0


def _packed(
    measure: Measure, ranks: Numbers, steady: Sequence[int], window: Sequence[int], least: float
) -> dict[str, Any]:
    chosen = _columns(measure.steps, len(ranks), window)
    steps = measure.steps[chosen]
    values = np.full((len(ranks), len(steps)), np.nan)
    values[np.searchsorted(ranks, measure.ranks)] = measure.values[:, chosen]
    known = np.isfinite(values)
    unit = max(float(np.nanmax(values, initial=0)) / _FULL, 1.0)
    codes = np.where(known, np.round(np.nan_to_num(values) / unit), _UNKNOWN).astype("<u2")
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
        "high_ns": round(max(float(shown.max(initial=low)), low + least)),
        "values": base64.b64encode(codes.tobytes()).decode(),
    }


def _columns(steps: Numbers, ranks: int, window: Sequence[int]) -> Numbers:
    """The steps that a page can carry: those nearest to the window."""
    most = max(min(MOST_CELLS // max(ranks, 1), MOST_STEPS), 1)
    middle = (window[0] + window[-1]) / 2 if window else float(steps[-1])
    nearest = np.argsort(np.abs(steps - middle), kind="stable")[:most]
    return np.sort(nearest)


def _groupings(results: Results, job: Job, ranks: Numbers) -> list[dict[str, Any]]:
    """By what ranks can be grouped: name, labels, and each rank's label (-1 where unknown)."""
    hosts = {**job.hosts, **{e["rank"]: e["host"] for e in results["ranks"] if e["host"]}}
    by_host: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        by_host.setdefault(words.plain(host), []).append(rank)
    found = [_grouping("host", by_host, ranks)]
    shallow = results["shallow"]
    stages = {f"stage {each['stage']}": each["ranks"] for each in results["topology"]["stages"]}
    if shallow and len(shallow["stages"]) > 1:
        stages = {f"stage {at}": each for at, each in enumerate(shallow["stages"])}
    found.append(_grouping("stage", stages, ranks))
    kinds: dict[str, dict[str, list[int]]] = {}
    for group in results["topology"]["groups"]:
        label = words.spans(group["ranks"], 2)
        kinds.setdefault(f"{group['kind']} group", {})[label] = group["ranks"]
    for named in shallow["groups"] if shallow else ():
        kind = words.plain(named["description"]) or "group"
        kinds.setdefault(kind, {})[words.spans(named["ranks"], 2)] = named["ranks"]
    found += [_grouping(kind, groups, ranks) for kind, groups in kinds.items()]
    return [each for each in found if each is not None]


def _grouping(
    name: str, groups: Mapping[str, Iterable[int]], ranks: Numbers
) -> dict[str, Any] | None:
    """None where it groups nothing: one group, or one rank in each."""
    of = np.full(len(ranks), -1)
    for at, members in enumerate(groups.values()):
        of[np.isin(ranks, np.asarray([*members], np.int64)) & (of < 0)] = at
    sizes = np.bincount(of[of >= 0], minlength=1)
    if (sizes > 0).sum() < 2 or sizes.max() < 2:
        return None
    return {"name": name, "labels": [*groups], "of": of.tolist()}
