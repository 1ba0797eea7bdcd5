"""From the ranks' tables to results: matching, one clock, accounts, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof import __version__
from clusterprof.align.clock import Clock, align
from clusterprof.align.clock.measured import KnownClocks, of_one_report
from clusterprof.align.lateness import joined
from clusterprof.align.match import contradicted, match, numbered, tolerance
from clusterprof.align.placing import place
from clusterprof.align.waiting_kernels import as_exchanges, waiting_kernels
from clusterprof.analysis.findings import communication
from clusterprof.analysis.findings.combined import combined
from clusterprof.analysis.findings.finding import pace, rare, unseen
from clusterprof.analysis.findings.registry import all_findings
from clusterprof.analysis.findings.verdict import verdict
from clusterprof.analysis.groups.topology import topology
from clusterprof.analysis.model.accounts import accounts, compute_absent
from clusterprof.analysis.model.critical_path import critical_path
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.recorded import contradictions
from clusterprof.analysis.model.shallow import Shallow
from clusterprof.analysis.model.slowdown import slowdown
from clusterprof.analysis.model.steady_state import steady_steps
from clusterprof.analysis.model.timeline import Timelines
from clusterprof.console import progress
from clusterprof.errors import MergeError
from clusterprof.mapped import trim
from clusterprof.report.whole_job import Job
from clusterprof.results import (
    SCHEMA_VERSION,
    CaptureCost,
    CollectivesEntry,
    MissingRank,
    RankAccount,
    RankEntry,
    Results,
    StepEntry,
)
from clusterprof.spans import SPANS, spans
from clusterprof.tables import RankTables
from clusterprof.words import counted
from clusterprof.words import ranks as rank_list


@dataclass(frozen=True)
class Study:
    """Results, and the tables that they rest on."""

    results: Results
    #: schema `clusterprof.align.match.PLACED`
    collectives: pa.Table
    #: schema `clusterprof.analysis.model.accounts.ACCOUNTS`
    accounts: pa.Table
    clock: Clock
    ranks: tuple[RankTables, ...]
    #: schema `clusterprof.align.lateness.SHALLOW`; None where no rank left its flight recorder
    shallow: pa.Table | None
    #: what the findings rest on: further what-ifs replay it
    dataset: Dataset
    #: what is known of the job besides; None where the reports are not of a run of clusterprof
    job: Job | None = None
    #: schema `clusterprof.spans.SPANS`
    lanes: pa.Table = field(default_factory=SPANS.empty_table)


def study(
    ranks: Sequence[RankTables],
    missing: Sequence[MissingRank] = (),
    warnings: Sequence[str] = (),
    *,
    source: str = "",
    clocks: KnownClocks | None = None,
    capture: CaptureCost | None = None,
    again: Sequence[str] = (),
    shallow: Shallow | None = None,
) -> Study:
    """Align the ranks' clocks, match their collectives, and find stragglers and other costs.

    `missing` are the missing reports and `warnings` the readers' own, both passed on; `source` is
    what the user named; `clocks` is what is known of them besides the reports, `capture` the
    profiler's overhead by the step logs, `again` the command line that starts the run again,
    `shallow` what the flight recorders of all ranks show. Raises MergeError if a rank comes twice.
    """
    known = clocks or KnownClocks()
    unusable = sorted((t for t in ranks if t.rank in known.unusable), key=lambda t: t.rank)
    missing = [*missing, *(_unusable(t, known) for t in unusable)]
    dataset = dataset_of(ranks, known, source=source, capture=capture, again=again)
    dataset = replace(dataset, shallow=shallow.results if shallow else None)
    progress("replaying the steps and weighing what would be saved")
    found, too_few = all_findings(dataset)
    trim()
    results: Results = {
        "schema_version": SCHEMA_VERSION,
        "clusterprof_version": __version__,
        "ranks": [_rank(t) for t in dataset.tables],
        "missing": missing,
        "clock": dataset.clock.entry(),
        "steps": _steps(dataset),
        "collectives": _collectives(dataset),
        "topology": topology(dataset),
        "capture": capture,
        "shallow": dataset.shallow,
        "pace": pace(dataset),
        "what_if": slowdown(dataset),
        "critical_path": critical_path(dataset),
        "compute_absent": compute_absent(dataset),
        "findings": found,
        "combined": combined(dataset, found),
        "verdict": verdict(dataset, found),
        "warnings": [
            *dict.fromkeys((*warnings, *known.warnings)),
            *_warnings(dataset, warnings),
            *_inferred(dataset.placed),
            *_contradicted(dataset.placed),
            *contradictions(dataset),
            *unseen(dataset),
            *rare(dataset),
            *too_few,
        ],
    }
    tables = tuple(dataset.tables)
    return Study(
        results,
        dataset.placed,
        dataset.accounts,
        dataset.clock,
        tables,
        joined(shallow.table, shallow.called_ns, dataset.placed) if shallow else None,
        dataset,
        lanes=spans(dataset, results),
    )


def dataset_of(
    ranks: Sequence[RankTables],
    clocks: KnownClocks | None = None,
    *,
    source: str = "",
    capture: CaptureCost | None = None,
    again: Sequence[str] = (),
) -> Dataset:
    """Align the ranks' clocks and match their collectives. Arguments as for `study`."""
    ordered, known = tuple(sorted(ranks, key=lambda t: t.rank)), clocks or KnownClocks()
    numbers = [t.rank for t in ordered]
    # they are in order
    twice = [one for one, next_one in pairwise(numbers) if one == next_one]
    if twice:
        files = [str(t.info.source) for t in ordered if t.rank == twice[0]]
        raise MergeError(
            f"rank {twice[0]} has more than one report", *files, "merge only one of them"
        )
    ordered = tuple(numbered([t for t in ordered if t.rank not in known.unusable]))
    progress(f"matching the collectives of {counted(len(ordered), 'rank')}")
    matched = match(ordered)
    progress("aligning the clocks")
    measured = (*known.bounds, *of_one_report(ordered))
    clock = align(ordered, matched, measured)
    if names := waiting_kernels(ordered, clock):
        ordered = tuple(as_exchanges(t, names) for t in ordered)
        matched = match(ordered)
        clock = align(ordered, matched, measured)
    trim()
    placed = place(matched, clock)
    lines = Timelines(ordered)
    account = accounts(lines, [t.rank for t in ordered], placed, clock)
    steady = steady_steps(lines, placed)
    trim()
    return Dataset(ordered, lines, account, placed, clock, steady, source, capture, again)


def _inferred(placed: pa.Table) -> list[str]:
    within = tolerance(placed)
    if within is None:
        return []
    text = (
        "the reports do not name their communicators: they are inferred from streams and times, by "
        f"collectives whose members end within {within / 1e3:.0f} µs of each other or a quarter of "
        "their length (learned from this recording)"
    )
    return [text]


def _contradicted(placed: pa.Table) -> list[str]:
    """The warning about ids of operations that cannot be right: at most one."""
    found = contradicted(placed)
    name, reason = next(iter(found.items()), ("", ""))
    text = (
        f"ids of operations contradict each other in {counted(len(found), 'communicator')}, such as"
        f" {name} ({reason}): the calls are matched by their order there"
    )
    return [text] if found else []


def _unusable(tables: RankTables, known: KnownClocks) -> MissingRank:
    why = known.unusable[tables.rank]
    return {"rank": tables.rank, "source": str(tables.info.source), "reason": why}


def _rank(tables: RankTables) -> RankEntry:
    info = tables.info
    return {
        "rank": tables.rank,
        "host": info.host,
        "source": str(info.source),
        "profiler": info.profiler,
        "world_size": info.world_size,
        "device": info.device,
        "versions": dict(info.versions),
    }


def _steps(dataset: Dataset) -> list[StepEntry]:
    entries: list[StepEntry] = []
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in dataset.accounts.to_pylist():
        rows.setdefault(row["step"], []).append(row)
    steady = set(dataset.steady_steps)
    names = list(RankAccount.__annotations__)
    for step in dataset.steps:
        here = rows[step]
        ranks: Any = [{name: row[name] for name in names} for row in here]
        entries.append(
            {
                "step": step,
                "settled": step in steady,
                "begin_ns": min(r["aligned_begin_ns"] for r in here),
                "duration_ns": int(np.median([r["duration_ns"] for r in here])),
                "ranks": ranks,
            }
        )
    return entries


def _collectives(dataset: Dataset) -> CollectivesEntry:
    c = dataset.collectives
    state = np.asarray(dataset.placed["state"].cast(pa.string()).to_pylist(), dtype=object)

    def count(what: str) -> int:
        return len(np.unique(c.collective[state == what]))

    return {
        "matched": count("matched"),
        "incomplete": count("incomplete"),
        "unmatched": count("unmatched"),
        "by_operation": communication.by_operation(dataset),
    }


def _warnings(dataset: Dataset, gathered: Sequence[str]) -> list[str]:
    out = list(dataset.clock.warnings)
    # each once, with the ranks that gave it
    of_ranks: dict[str, list[int]] = {}
    for tables in dataset.tables:
        for text in dict.fromkeys(tables.warnings):
            own = text.removeprefix(f"rank {tables.rank}: ")
            of_ranks.setdefault(own, []).append(tables.rank)
    # the reader's own lines begin with the ranks in another form
    known = {line.partition(": ")[2] for line in gathered}
    out += [f"{rank_list(by, None)}: {text}" for text, by in of_ranks.items() if text not in known]
    bare = [dataset.ranks[k] for k in np.flatnonzero(~dataset.timelines.has_steps)]
    if bare:
        out.append(
            f"{rank_list(bare, None)}: the report has no steps; the whole window counts as one "
            "(mark steps with NVTX ranges named 'step N', or launch with clusterprof)"
        )
    return list(dict.fromkeys(out))
