"""From the ranks' tables to results: matching, one clock, accounts, findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import __version__, pauses
from clusterprof.align.clock import Clock, align
from clusterprof.align.clock.measured import KnownClocks, of_one_report
from clusterprof.align.lateness import joined
from clusterprof.align.match import contradicted, match, numbered, tolerance
from clusterprof.align.placing import place
from clusterprof.align.waiting_kernels import as_exchanges, waiting_kernels
from clusterprof.analysis.findings import communication, evidence_table
from clusterprof.analysis.findings.finding import of_the_window, pace
from clusterprof.analysis.findings.registry import all_findings, combined
from clusterprof.analysis.findings.verdict import verdict
from clusterprof.analysis.model.accounts import accounts, compute_absent
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.measures import critical_path, slowdown
from clusterprof.analysis.model.recorded import contradictions
from clusterprof.analysis.model.shallow import Shallow
from clusterprof.analysis.model.timeline import Timelines, steady_steps
from clusterprof.analysis.model.topology import topology
from clusterprof.columns import integers, rows_by
from clusterprof.console import progress
from clusterprof.errors import MergeError
from clusterprof.hardware import with_energy
from clusterprof.mapped import trim
from clusterprof.report.whole_job import Job
from clusterprof.results import (
    SCHEMA_VERSION,
    CaptureCost,
    CollectivesEntry,
    HardwareEntry,
    MissingRank,
    PausesResults,
    RankAccount,
    Results,
    RunSize,
    StepEntry,
    usual_step_ns,
)
from clusterprof.spans import spans
from clusterprof.tables import SPANS, RankTables
from clusterprof.words import counted, ranks as rank_list


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
    #: schema `clusterprof.tables.SPANS`
    lanes: pa.Table = field(default_factory=SPANS.empty_table)


def study(
    ranks: Sequence[RankTables],
    missing: Sequence[MissingRank] = (),
    warnings: Sequence[str] = (),
    *,
    source: str = "",
    clocks: KnownClocks | None = None,
    capture: CaptureCost | None = None,
    outside_ns: Sequence[float] = (),
    again: Sequence[str] = (),
    shallow: Shallow | None = None,
    interruptions: PausesResults | None = None,
    hardware: Sequence[HardwareEntry] = (),
    run_size: RunSize | None = None,
) -> Study:
    """Align the ranks' clocks, match their collectives, and find stragglers and other costs.

    `missing` are the missing reports and `warnings` the readers' own, both passed on; `source` is
    what the user named; `clocks` is what is known of them besides the reports, `capture` the
    profiler's overhead by the step logs, `outside_ns` the lengths of the steps outside the window
    by them, `again` the command line that starts the run again,
    `shallow` what the flight recorders of all ranks show, `interruptions` the run's pauses,
    `hardware` what GPUs and nodes said of themselves, `run_size` how long the run was. Raises
    MergeError if a rank comes twice.
    """
    known_clocks = clocks or KnownClocks()
    lost: list[MissingRank] = [
        {"rank": t.rank, "source": str(t.info.source), "reason": known_clocks.unusable[t.rank]}
        for t in ranks
        if t.rank in known_clocks.unusable
    ]
    dataset = dataset_of(ranks, known_clocks, source=source, capture=capture, again=again)
    dataset = replace(
        dataset, shallow=shallow.results if shallow else None, hardware=tuple(hardware),
        outside_ns=tuple(outside_ns),
    )  # fmt: skip
    progress("replaying the steps and weighing what would be saved")
    findings, too_few = all_findings(dataset)
    headline = verdict(dataset, findings)
    trim()
    results: Results = {
        "schema_version": SCHEMA_VERSION,
        "clusterprof_version": __version__,
        "ranks": [
            {
                "rank": t.rank, "host": t.info.host, "source": str(t.info.source),
                "profiler": t.info.profiler, "world_size": t.info.world_size,
                "device": t.info.device, "versions": dict(t.info.versions),
            }
            for t in dataset.tables
        ],
        "missing": sorted(
            (*missing, *lost), key=lambda m: (m["rank"] is None, m["rank"] or 0, m["source"])
        ),
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
        "findings": findings,
        "combined": combined(dataset, findings),
        "headline": headline,
        "verdict": " ".join(sentence["text"] for sentence in headline),
        "warnings": [
            *dict.fromkeys((*warnings, *known_clocks.warnings)),
            *dict.fromkeys(_warnings(dataset, warnings)),
            *contradictions(dataset),
            *of_the_window(dataset),
            *too_few,
            *(pauses.warnings(interruptions) if interruptions else ()),
        ],
    }  # fmt: skip
    if dataset.hardware:
        results["hardware"] = with_energy(dataset.hardware, usual_step_ns(results))
    if run_size is not None:
        results["run_size"] = run_size
    if interruptions is not None:
        results["pauses"] = interruptions
    evidence_table.add_to(results)
    return Study(
        results,
        dataset.placed,
        dataset.accounts,
        dataset.clock,
        tuple(dataset.tables),
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
    ordered, known_clocks = sorted(ranks, key=lambda t: t.rank), clocks or KnownClocks()
    # two reports of one rank are neighbours in this order
    for tables, following in pairwise(ordered):
        if tables.rank == following.rank:
            files = [str(t.info.source) for t in ordered if t.rank == tables.rank]
            raise MergeError(
                f"rank {tables.rank} has more than one report", *files, "merge only one of them"
            )
    # one number for one step on all ranks, whatever their programs count
    usable = tuple(numbered([t for t in ordered if t.rank not in known_clocks.unusable]))
    progress(f"matching the collectives of {counted(len(usable), 'rank')}")
    matched = match(usable)
    progress("aligning the clocks")
    measured = (*known_clocks.bounds, *of_one_report(usable))
    clock = align(usable, matched, measured)
    # on one clock kernels show by their ends that they wait for other ranks, whatever their names:
    # they are collectives as well, and tell more of the clocks
    if names := waiting_kernels(usable, clock):
        usable = tuple(as_exchanges(t, names) for t in usable)
        matched = match(usable)
        clock = align(usable, matched, measured)
    trim()  # matching has freed much that the C library keeps
    placed, lines = place(matched, clock), Timelines(usable)
    account = accounts(lines, [t.rank for t in usable], placed, clock)
    steady = steady_steps(lines, placed)
    trim()
    return Dataset(usable, lines, account, placed, clock, steady, source, capture, again)


def _steps(dataset: Dataset) -> list[StepEntry]:
    steady, names = set(dataset.steady_steps), list(RankAccount.__annotations__)
    entries: list[StepEntry] = []
    for step, rows in rows_by(integers(dataset.accounts, "step")).items():
        of_step = dataset.accounts.take(rows)
        entries.append({
            "step": step,
            "settled": step in steady,
            "begin_ns": pc.min(of_step["aligned_begin_ns"]).as_py(),
            "duration_ns": int(np.median(of_step["duration_ns"].to_numpy())),
            "ranks": of_step.select(names).to_pylist(),
        })  # fmt: skip
    return entries


def _collectives(dataset: Dataset) -> CollectivesEntry:
    placed = dataset.placed
    states = {"collective": placed["collective"], "state": placed["state"].cast(pa.string())}
    collectives = pa.table(states).group_by(["collective", "state"]).aggregate([])
    count = Counter(collectives["state"].to_pylist())
    return {
        "matched": count["matched"],
        "incomplete": count["incomplete"],
        "unmatched": count["unmatched"],
        "by_operation": sorted(
            communication.by_operation(dataset),
            key=lambda e: (-e["exposed_ns_per_step"], e["operation"], e["communicator"]),
        ),
    }


def _warnings(dataset: Dataset, by_readers: Sequence[str]) -> Iterator[str]:
    """What makes the clocks, the reports, their steps or the matches doubtful."""
    yield from dataset.clock.warnings
    # each once, with the ranks that gave it
    by_text: dict[str, list[int]] = {}
    for tables in dataset.tables:
        for text in dict.fromkeys(tables.warnings):
            by_text.setdefault(text.removeprefix(f"rank {tables.rank}: "), []).append(tables.rank)
    # the reader's own lines begin with the ranks in another form
    read = {line.partition(": ")[2] for line in by_readers}
    yield from (f"{rank_list(r, None)}: {text}" for text, r in by_text.items() if text not in read)
    if bare := [dataset.ranks[k] for k in np.flatnonzero(~dataset.timelines.has_steps)]:
        yield (
            f"{rank_list(bare, None)}: the report has no steps; the whole window counts as one: "
            "call torch.profiler's step() at the end of each step, or mark steps with NVTX ranges "
            "named 'step N', or launch with clusterprof (--step-on where no optimizer ends one)"
        )
    within = tolerance(dataset.placed)
    if within is not None:
        yield (
            "the reports do not name their communicators: they are inferred from streams and times,"
            f" by collectives whose members end within {within / 1e3:.0f} µs of each other or a "
            "quarter of their length (learned from this recording)"
        )
    if reasons := contradicted(dataset.placed):
        name, reason = next(iter(reasons.items()))
        yield (
            "ids of operations contradict each other in "
            f"{counted(len(reasons), 'communicator')}, such as {name} ({reason}): the calls are "
            "matched by their order there"
        )
