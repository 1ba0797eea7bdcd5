"""From reports to results, for `merge`, `collect` and the launching verbs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof import console
from clusterprof.agent.contracts import files, paths
from clusterprof.collect.outcomes import Outcome
from clusterprof.console import say
from clusterprof.run_directory import RunDirectory, writing

if TYPE_CHECKING:
    import pyarrow as pa

    from clusterprof.probe.measurement import Measurement
    from clusterprof.results import CaptureCost, MissingRank, Results
    from clusterprof.study import Study


def merge_run(run: RunDirectory, outcomes: Sequence[Outcome]) -> Study:
    """Merge the collected reports of a run and write the results into the run directory."""
    from clusterprof.align.clock.measured import known_clocks
    from clusterprof.errors import ReportError
    from clusterprof.ingest import Source, find_sources, gather
    from clusterprof.probe import measurement
    from clusterprof.study import study

    with writing(run.path):
        probe = measurement.gathered(run)
    sources = [
        Source(each.report, rank=each.rank, alone=True, steps=each.steps, beside=each.trace)
        for each in outcomes
        if each.report is not None
    ]
    if not sources:  # who shares a run may have put its reports, scrubbed, anywhere in it
        with contextlib.suppress(ReportError):
            sources = find_sources([run.path])
    gathered = gather(sources)
    there = [tables.rank for tables in gathered.ranks]
    lost: list[MissingRank] = []
    # A report may be there although something went wrong: the program ended inside the window, say.
    incomplete = []
    for each in outcomes:
        if each.report and each.reason:
            incomplete.append(f"rank {each.rank}: {each.reason}")
        elif not each.report and each.rank not in there:
            source = str(run.rank(each.rank))
            lost.append({"rank": each.rank, "source": source, "reason": each.reason})
    measured = measurement.of_run(run, there)
    made = study(
        gathered.ranks,
        missing=[*gathered.missing, *lost],
        warnings=[*gathered.warnings, *incomplete],
        source=str(run.path),
        clocks=known_clocks(gathered.ranks, measured, probe.as_json() if probe else None),
        capture=measured_cost(run, outcomes),
        launcher=run.read_manifest().launcher,
    )
    save(made, run)
    return made


def measured_cost(run: RunDirectory, outcomes: Sequence[Outcome]) -> CaptureCost | None:
    """What the capture cost, by the step logs of every rank; None where they do not tell."""
    from clusterprof.analysis.model.capture_cost import capture_cost
    from clusterprof.collect.outcomes import newest_step_log
    from clusterprof.errors import ReportError
    from clusterprof.ingest.rank_steps import beside_log, read_log, read_pace

    logs, pace = {}, {}
    for rank in run.ranks():
        log = newest_step_log(run.rank(rank))
        if log is not None:
            with contextlib.suppress(ReportError):  # a damaged log leaves one rank out
                logs[rank] = read_log(log)
                pace[rank] = read_pace(beside_log(log, paths.PACE))
    window = run.read_manifest().window
    reported = {each.rank for each in outcomes if each.report}
    return capture_cost(logs, reported, window.first, window.end, pace)


def merge_reports(
    paths: Sequence[Path], ranks: Mapping[Path, int], clocks: Measurement | None = None
) -> Study:
    """Merge reports that clusterprof did not launch. Raises ReportError, MergeError.

    `clocks` is what was measured of their hosts' clocks.
    """
    from clusterprof.align.clock.measured import known_clocks
    from clusterprof.ingest import gather
    from clusterprof.probe import measurement
    from clusterprof.study import study

    gathered = gather(list(paths), ranks=ranks)
    known = None
    silent: list[str] = []
    if clocks is not None:
        measured, silent = measurement.of_reports(gathered.ranks, clocks)
        known = known_clocks(gathered.ranks, measured, clocks.as_json())
    return study(
        gathered.ranks,
        missing=gathered.missing,
        warnings=[*gathered.warnings, *silent],
        source=" ".join(map(str, paths)),
        clocks=known,
    )


def save(made: Study, run: RunDirectory) -> None:
    """Write results, tables and page into `run`. Raises RunDirectoryError."""
    from clusterprof.report import html, results_json
    from clusterprof.tables import SCHEMAS

    with writing(run.merged):
        run.merged.mkdir(exist_ok=True)
        results_json.write(run.merged / paths.RESULTS, made.results)
        for name in ("collectives", "accounts"):
            write_table(getattr(made, name), run.merged / f"{name}.parquet")
        tables = run.path / paths.TABLES
        kept = [f"{rank.rank:05d}" for rank in made.ranks]
        for rank, folder in zip(made.ranks, kept, strict=True):
            (tables / folder).mkdir(parents=True, exist_ok=True)
            for name in SCHEMAS:
                write_table(getattr(rank, name), tables / folder / f"{name}.parquet")
        # Of an earlier merge's other ranks our tables are removed, and nothing else.
        for old in tables.iterdir() if tables.is_dir() else ():
            if old.name.isdigit() and old.name not in kept and not old.is_symlink():
                for name in SCHEMAS:
                    (old / f"{name}.parquet").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    old.rmdir()
        html.write(run.html, made.results, made.collectives, title=run.path.name)


def write_table(table: pa.Table, target: Path) -> None:
    """Write one table as Parquet, by rename. Raises OSError."""
    import pyarrow.parquet as parquet

    with files.new(target) as file:  # pyarrow opens no path whose bytes are not UTF-8
        parquet.write_table(table, file)


def tell_results(made: Study, run: RunDirectory) -> None:
    """The verdict on stdout, and where the page is on stderr."""
    print_verdict(made.results)
    say(f"wrote {run.html}")


def print_verdict(results: Results) -> None:
    """The verdict as text on stdout, coloured where a person looks at it."""
    import shutil

    from clusterprof.report import text

    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    page = text.render(results, colour=text.wants_colour(sys.stdout), width=width)
    console.styled(page.rstrip("\n") + "\n", text.CODES)
