"""From reports to results, for `merge`, `collect` and the launching verbs."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterprof import console, folders, next_command, run_directory, watched, words
from clusterprof.agent.contracts import files, identity, paths
from clusterprof.collect import live_windows
from clusterprof.collect.outcomes import Outcome
from clusterprof.console import say
from clusterprof.errors import ReportError, RunDirectoryError
from clusterprof.results import RANKS, Suspect
from clusterprof.run_directory import Manifest, Window, writing

if TYPE_CHECKING:
    import pyarrow as pa

    from clusterprof.analysis.model.shallow import Shallow
    from clusterprof.clock_probe import Measurement
    from clusterprof.ingest.engines import Engine
    from clusterprof.ingest.sources import Source
    from clusterprof.pauses import RankLog, Timeout
    from clusterprof.report.whole_job import Job
    from clusterprof.results import (
        HangResults,
        HardwareEntry,
        MissingRank,
        PausesResults,
        Results,
        RunSize,
    )
    from clusterprof.study import Study
    from clusterprof.tables import RankTables


def merge_run(
    run: Window,
    outcomes: Sequence[Outcome],
    engine: Engine | None = None,
    gpu_hour: float | None = None,
) -> Study:
    """Merge the collected reports of a run and write the results into the run directory.

    `engine` reads them, by default processes of this host; `gpu_hour` is what a GPU costs.
    """
    # Tables are written in seconds, and what a rank started ends five minutes after it at most:
    # what was not written to for so long was left by a process that was killed.
    left_s = 600.0
    with console.Progress(), run_directory.merging(run):
        for outcome in outcomes:
            files.remove_left(run.rank(outcome.rank) / paths.REDUCED, left_s)
        made = merged(run, outcomes, engine, gpu_hour)
        console.progress("writing tables and the page")
        try:
            save(made, run)
        except RunDirectoryError as error:
            raise UnsavedError(error, made.results) from None
    return made


class UnsavedError(RunDirectoryError):
    """A run was merged, and what that shows cannot be written."""

    def __init__(self, error: RunDirectoryError, results: Results) -> None:
        super().__init__(error.what, *error.details)
        self.results = results


def merge_and_print(run: Window, outcomes: Sequence[Outcome], gpu_hour: float | None) -> Results:
    """Merge a run as `merge_run` does, and print its verdict, also where it cannot be written.

    Raises UnsavedError then, once it is printed, and what `merge_run` raises.
    """
    try:
        results = merge_run(run, outcomes, gpu_hour=gpu_hour).results
    except UnsavedError as error:
        with console.harmless():
            print_verdict(error.results, run)
        raise
    check_price(results, gpu_hour)
    with console.harmless():
        print_verdict(results, run)
    say(f"wrote {run.html}")
    return results


def merged(
    run: Window,
    outcomes: Sequence[Outcome],
    engine: Engine | None = None,
    gpu_hour: float | None = None,
) -> Study:
    """Merge the collected reports of a run, and write nothing. Arguments as for `merge_run`."""
    from clusterprof import clock_probe, pauses
    from clusterprof.align.clock.measured import known_clocks
    from clusterprof.analysis.findings.profiler_overhead import capture_cost, unprofiled_steps
    from clusterprof.ingest import Gathered, gather
    from clusterprof.study import study

    with writing(run.results.path):
        probe = clock_probe.gathered(run.results)
    sources, manifest = _sources(run, outcomes), run.directory.read_manifest()
    # a report without the environment does not say how large its job was
    size = manifest.world_size
    gathered = gather(sources, engine=engine, world_size=size) if sources else Gathered([], [], [])
    ranks = gathered.ranks
    profiled = [tables.rank for tables in ranks]
    lost = _lost_ranks(run, outcomes, profiled)
    # A report may be there although something went wrong: the program ended inside the window, say.
    reported = {outcome.rank: outcome.reason for outcome in outcomes if outcome.report}
    incomplete = [f"rank {rank}: {reason}" for rank, reason in reported.items() if reason]
    measured = clock_probe.of_run(run, profiled)
    disturbed = live_windows.switching_steps(run) if profiled else []
    job = job_record(run, manifest)
    shallow, silent = _over_the_run(run, ranks, disturbed, job.steps)
    sampled, unread = sampled_hardware(run, job)
    timeout = pauses.timeout_of(*(shallow.timeout_ns, shallow.backends) if shallow else (None,))
    made = study(
        ranks,
        missing=[*gathered.missing, *lost],
        warnings=[*gathered.warnings, *incomplete, *silent, *unread],
        source=str(run.path),
        clocks=known_clocks(ranks, measured, probe.as_json() if probe else None),
        capture=job.window
        and capture_cost(
            job.steps, reported, *job.window, job.paces, late_after(shallow, job.window[1])
        ),
        outside_ns=unprofiled_steps(job.steps, reported, job.window),
        again=again(run, manifest),
        shallow=shallow,
        interruptions=pauses.named(run_pauses(run, timeout), ranks, run.attempt),
        hardware=sampled,
        run_size=run_size(job, manifest, ranks, sampled, gpu_hour),
    )
    return replace(made, job=replace(job, shallow=made.shallow))


def late_after(shallow: Shallow | None, step: int) -> float:
    """The first step in which a rank begins to delay the others after this one, by the looks."""
    suspects = shallow.results["suspects"] if shallow else []
    begun = [s["since_step"] or 0 for s in suspects if s["delays"]]
    return min((since for since in begun if since > step), default=math.inf)


def _lost_ranks(
    run: Window, outcomes: Sequence[Outcome], profiled: Container[int]
) -> list[MissingRank]:
    """The ranks that were to leave a report and have none, and why."""
    return [
        {"rank": outcome.rank, "source": str(run.rank(outcome.rank)), "reason": outcome.reason}
        for outcome in outcomes
        if not outcome.report and outcome.rank not in profiled
    ]


def _over_the_run(
    run: Window,
    ranks: Sequence[RankTables],
    disturbed: Sequence[int],
    steps: Mapping[int, pa.Table],
) -> tuple[Shallow | None, list[str]]:
    """What `all_ranks` tells of the window, with what the looks of `--watch` tell of the run.

    `ranks` are the profiled ones: there are no warnings where these are all of the job.
    """
    shallow, warnings = all_ranks(run.results, disturbed, steps)
    looks = watched.read(watched.path_of(run.directory.path))
    if shallow is None and looks:
        # the window left no recorder, and the latest look tells who is in which group
        shallow, _ = all_ranks(run.results, disturbed, steps, "watch")
    if shallow is not None:
        shallow = replace(shallow, results=watched.over_the_run(shallow.results, looks))
    elif any(len(ranks) == tables.info.world_size for tables in ranks):
        warnings = []  # each rank was profiled
    return shallow, warnings


def _sources(run: Window, outcomes: Sequence[Outcome]) -> Sequence[Source]:
    """The reports of a run: where it has none, who shares it may have put them, scrubbed, anywhere
    in it.
    """
    from clusterprof.ingest import Source, find_sources

    sources = [
        Source(
            outcome.report, rank=outcome.rank, alone=True, steps=outcome.steps,
            beside=outcome.trace, reduced=outcome.report.with_name(paths.REDUCED),
        )
        for outcome in outcomes
        if outcome.report is not None
    ]  # fmt: skip
    if not sources:
        with contextlib.suppress(ReportError):
            return find_sources([run.path])
    return sources


def job_record(run: Window, manifest: Manifest | None = None) -> Job:
    """What the run directory tells of all its ranks; a damaged log leaves its rank out."""
    from clusterprof.collect.outcomes import newest_step_log
    from clusterprof.ingest.rank_steps import beside_log, read_log, read_pace
    from clusterprof.report.whole_job import Job

    states = run.results.states() | run.states()
    steps, paces = {}, {}
    for rank in states:
        log = newest_step_log(run.logged(rank))
        with contextlib.suppress(ReportError):
            if log is not None:
                steps[rank] = read_log(log)
                paces[rank] = read_pace(beside_log(log, paths.PACE))
    hosts = {rank: str(state["host"]) for rank, state in states.items() if state.get("host")}
    job = Job(steps=steps, paces=paces, attempt=run.attempt, hosts=hosts)
    if manifest is None:
        return job
    window, content = run.window(), manifest.content
    return replace(
        job,
        window=(window.first, window.end),
        torch=tuple(sorted({str(s["torch"]) for s in states.values() if s.get("torch")})),
        command=shlex.join(str(word) for word in content.get("argv") or ()),
        launcher=manifest.launcher or "",
        began=str(content.get("began") or ""),
        ended=manifest.ended or "",
    )


def sampled_hardware(run: Window, job: Job) -> tuple[list[HardwareEntry], list[str]]:
    """What GPUs and nodes of a run's ranks said of themselves, and warnings."""
    from clusterprof import hardware
    from clusterprof.collect.outcomes import newest_step_log
    from clusterprof.ingest.rank_steps import beside_log

    first = run.directory.first(run.attempt)
    states = first.states()
    logs = {rank: newest_step_log(first.rank(rank)) for rank in states}
    files = {rank: beside_log(log, paths.HARDWARE) for rank, log in logs.items() if log}
    return hardware.of_ranks(files, states, partial(_step_at, job))


def _step_at(job: Job, rank: int, wall_ns: int) -> int | None:
    """In which step a rank was at a time of its wall clock, by its logs; in the middle of a block
    of steps as if they were equal. None before the first step, and without a log.
    """
    log, pace = job.steps.get(rank), job.paces.get(rank, {})
    if log is None:
        return None
    rows = [*zip(*(log[name].to_pylist() for name in ("step", "begin_ns", "end_ns")), strict=True)]
    of_block = ("first_step", "count", "begin_ns", "end_ns")
    begins = {begin: (step, 1, end) for step, begin, end in rows}
    for block in zip(*(pace.get(name, ()) for name in of_block), strict=True):
        first, count, begin, end = map(int, block)
        begins[begin] = first, count, end
    before = [begin for begin in begins if begin <= wall_ns]
    if not before:
        return None
    begin = max(before)
    first, count, end = begins[begin]
    return int(first + min((wall_ns - begin) * count // max(end - begin, 1), count))


def run_size(
    job: Job,
    manifest: Manifest,
    ranks: Sequence[RankTables],
    sampled: Sequence[HardwareEntry],
    gpu_hour: float | None,
) -> RunSize | None:
    """How many steps a run that has ended made, on how many GPUs; None where that is not known."""
    sizes = [tables.info.world_size or 0 for tables in ranks]
    gpus = manifest.world_size or max(sizes, default=0)
    has_gpus = any(tables.info.device for tables in ranks) or any(row["uuid"] for row in sampled)
    steps = job.step_count
    if manifest.ended is None or not (steps and gpus and has_gpus):
        return None
    return {"steps": steps, "gpus": gpus, "gpu_hour": gpu_hour}


def priced(results: Results, gpu_hour: float | None) -> Results:
    """The results with what a GPU costs per hour, if that is given; says where it is of no use."""
    check_price(results, gpu_hour)
    size = results.get("run_size")
    if size is None or gpu_hour is None:
        return results
    priced_results = results.copy()
    priced_results["run_size"] = {**size, "gpu_hour": gpu_hour}
    return priced_results


def check_price(results: Results, gpu_hour: float | None) -> None:
    """Say why nothing is stated in money, where the user has given a price."""
    if gpu_hour is not None and "run_size" not in results:
        say("--gpu-hour: the run's GPU hours cannot be determined: it takes a run of clusterprof "
            "on GPUs that has ended, with its step logs")  # fmt: skip


def run_pauses(
    run: Window, timeout: Timeout | None = None, few: int | None = None
) -> PausesResults | None:
    """Name the pauses of a run, of all its attempts, by what its ranks' step logs hold so far.

    `few`: of so many of its ranks alone, which stand for the others. A rank whose log is damaged is
    left out. None where there are none.
    """
    from clusterprof import pauses

    attempts, world_size = [], run.directory.read_manifest().world_size or 0
    # a profiler's start and end are long steps of the ranks that wait for it
    disturbed = [window.disturbed for window in live_windows.windows(run)]
    for attempt in run.directory.first().attempts():
        ranks = attempt.ranks()
        world_size = max(world_size, len(ranks))
        some = ranks if few is None else ranks[:: -(-len(ranks) // few) or 1]
        logs = [_pause_log(attempt.rank(rank), rank) for rank in some]
        attempts.append(
            pauses.Attempt(attempt.attempt, [log for log in logs if log is not None], disturbed)
        )
    return pauses.pauses_of(attempts, world_size, timeout)


def recorded_timeout(run: Window) -> Timeout:
    """After how long a process group of the job gives up, by one rank's newest flight recorder."""
    from clusterprof import pauses
    from clusterprof.ingest.flight.all_dumps import find_dumps, read_dumps

    folder = run.directory.first().attempts()[-1].folder
    with contextlib.suppress(ReportError):
        dumps = find_dumps(folder, "watch") or find_dumps(folder)
        flight = read_dumps(dumps[:1])
        return pauses.timeout_of(flight.timeout_ns, flight.backends)
    return pauses.timeout_of(None)


def _pause_log(folder: Path, rank: int) -> RankLog | None:
    """What a rank has logged of its long steps; None where it has logged no step."""
    from clusterprof import pauses
    from clusterprof.collect.outcomes import newest_step_log
    from clusterprof.ingest.rank_steps import beside_log, read_pauses

    log, extent_ns = newest_step_log(folder), live_windows.extent_ns(folder)
    if log is None or extent_ns is None:
        return None
    try:
        rows = read_pauses(beside_log(log, paths.PAUSES))
    except ReportError as error:
        say(f"{error.what}: the pauses of rank {rank} are left out")
        return None
    return pauses.RankLog(rank, *extent_ns, pauses.possible(rows, extent_ns[1]))


def again(run: Window, manifest: Manifest) -> list[str]:
    """The command line that starts the run again (`Manifest.again`).

    Ranks that their process group numbers started as children of the program: torch.profiler alone
    captures them.
    """
    first = next(run.states_of(run.ranks()), (0, {}))[1]
    by = ["--profiler", "torch"] if first.get("identity") == identity.GROUP else []
    return [word for item in manifest.again for word in ([item, *by] if item == RANKS else [item])]


class Look(NamedTuple):
    """What the flight recorders and step logs of all ranks show, before a deeper look."""

    #: those that left a flight recorder, in order
    ranks: tuple[int, ...]
    #: those that delay others most, worst first; none where no rank stands out
    suspects: list[Suspect]
    #: the members of each process group
    groups: list[tuple[int, ...]]
    #: the ranks of each pipeline stage, where groups or sends tell them
    stages: list[tuple[int, ...]]
    warnings: list[str]
    #: the steps that were looked at
    steps: Sequence[int] = ()


def look(run: Window) -> Look:
    """Look at all ranks of a run by their flight recorders alone.

    What cannot be read is a warning; where no rank left a recorder there are no ranks.
    """
    shallow, warnings = all_ranks(run)
    if shallow is None:
        return Look((), [], [], [], warnings)
    results = shallow.results
    groups = [tuple(group["ranks"]) for group in results["groups"]]
    stages = [tuple(stage) for stage in results["stages"]]
    return Look(
        tuple(results["ranks"]), results["suspects"], groups, stages, warnings, results["steps"]
    )


def all_ranks(
    run: Window,
    disturbed: Sequence[int] = (),
    steps: Mapping[int, pa.Table] | None = None,
    which: str = "flight",
    chance: float | None = None,
    sure_frac: float | None = None,
) -> tuple[Shallow | None, list[str]]:
    """What the flight recorders of a run's ranks show, and warnings; None where there are none.

    `disturbed` are steps in which a profiler was started or stopped; `steps` are the ranks' step
    logs, which else are read. `which` dumps: see `find_dumps`. `chance`: in what part of all looks
    at equal ranks one may be named, by default that of a verdict. `sure_frac`: by what part of a
    step clocks may be wrong at most.
    """
    from clusterprof import clock_probe
    from clusterprof.align.clock.measured import parsed
    from clusterprof.align.lateness import host_clock
    from clusterprof.analysis.model import limits
    from clusterprof.analysis.model.shallow import all_ranks as compared
    from clusterprof.collect.outcomes import flights
    from clusterprof.ingest.flight.all_dumps import find_dumps, read_dumps

    try:
        flight = read_dumps(find_dumps(run.folder, which))
    except ReportError as error:
        why = flights(run)[1] or error.what
        return None, [f"ranks that were not profiled cannot be compared: {why}"]
    warnings = flight.warnings
    try:
        probe = clock_probe.measured_so_far(run)
    except ReportError as error:
        probe = None
        warnings.append(str(error))
    written = clock_probe.of_run(run, flight.ranks)
    warnings += _untimed(written)
    hosts = {
        rank: str(files["state"]["host"])
        for rank, files in written.items()
        if isinstance(files["state"], dict) and files["state"].get("host")
    }
    readings = {rank: parsed(**files) for rank, files in written.items()}
    clock = host_clock(flight, readings, probe.as_json() if probe else None)
    logs = job_record(run).steps if steps is None else steps
    shallow = compared(
        flight, clock, logs, hosts, disturbed, chance or limits.CHANCE, sure_frac or math.inf
    )
    return shallow, warnings


def _untimed(written: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Whose collectives were not timed, and why, as the states of these ranks have it."""
    states = {rank: left["state"] for rank, left in written.items()}
    reasons = {
        rank: words.plain(str(state["untimed"]))
        for rank, state in states.items()
        if isinstance(state, dict) and state.get("untimed")
    }
    return [f"{words.ranks(reasons)}: {min(reasons.items())[1]}"] if reasons else []


def merge_reports(
    paths: Sequence[Path],
    ranks: Mapping[Path, int],
    clocks: Measurement | None = None,
    engine: Engine | None = None,
) -> Study:
    """Merge reports that clusterprof did not launch. Raises ReportError, MergeError.

    `clocks` is what was measured of their hosts' clocks; `engine` reads the reports.
    """
    from clusterprof import clock_probe
    from clusterprof.align.clock.measured import known_clocks
    from clusterprof.ingest import gather
    from clusterprof.study import study

    with console.Progress():
        gathered = gather(list(paths), ranks=ranks, engine=engine)
        measured, silent = clock_probe.of_reports(gathered.ranks, clocks) if clocks else ({}, [])
        rank_clocks = known_clocks(gathered.ranks, measured, clocks.as_json()) if clocks else None
        return study(
            gathered.ranks,
            missing=gathered.missing,
            warnings=[*gathered.warnings, *silent],
            source=" ".join(map(str, paths)),
            clocks=rank_clocks,
        )


def merge_dumps(dumps: Sequence[tuple[Path, int | None]], ranks: Mapping[Path, int]) -> HangResults:
    """Say what a job waits for, from its flight recorders' dumps alone. Raises ReportError.

    `dumps` are files with their ranks, where a run says them; `ranks` are those that the user gave.
    """
    from clusterprof import __version__
    from clusterprof.align.match.flight_calls import match
    from clusterprof.analysis.model.hang import diagnose
    from clusterprof.ingest.flight.all_dumps import read_dumps
    from clusterprof.report import text
    from clusterprof.results import SCHEMA_VERSION, MissingRank

    flight = read_dumps(dumps, ranks)
    diagnosis = diagnose(match(flight))
    lost = [
        MissingRank(rank=rank, source="", reason="left no dump")
        for rank in flight.absent
        if rank not in [entry["rank"] for entry in flight.missing]
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "clusterprof_version": __version__,
        "dumps": list(flight.ranks),
        "missing": [*flight.missing, *lost],
        "waiting": diagnosis.waiting,
        "hang": diagnosis.causes,
        "verdict": text.hang_verdict(
            diagnosis.causes, diagnosis.waiting, whole=not (lost or flight.missing)
        ),
        "warnings": flight.warnings,
    }


def progress(before: Path, after: Path) -> dict[int, int | None]:
    """How many calls each rank with a dump in one folder made until that in the other; None without
    one there.

    0 also for a rank whose program was started over between them. Raises ReportError.
    """
    from clusterprof.ingest.flight.all_dumps import find_dumps, read_dumps

    newest = []
    for folder in (before, after):
        entries = read_dumps(find_dumps(folder)).entries
        rows = entries.group_by("rank").aggregate([("record", "max")]).to_pylist()
        newest.append({row["rank"]: row["record_max"] for row in rows})
    first, last = newest
    return {
        rank: max(last[rank] - first[rank], 0) if rank in last else None for rank in sorted(first)
    }


def _reasons(missing: Sequence[MissingRank]) -> list[str]:
    """Why dumps are missing, the first few."""
    return [f"{lost['source']}: {lost['reason']}" for lost in missing[:4]]


def merge_cycles(
    dumps: Sequence[tuple[Path, int | None]],
    hosts: Mapping[int, str],
    disturbed_ns: Sequence[tuple[int, int]] = (),
) -> Study:
    """Compare the ranks of a job that runs, by dumps of their flight recorders alone.

    Its steps are the cycles in which all ranks repeat their calls; those that overlap a time of
    `disturbed_ns` (wall clock) are left out. Raises ReportError where nothing can be compared.
    """
    from clusterprof.align.clock.measured import RankReadings
    from clusterprof.align.lateness import host_clock
    from clusterprof.analysis.model.shallow import all_ranks as compared
    from clusterprof.ingest.flight.all_dumps import read_dumps
    from clusterprof.ingest.flight.cycles import cycles, within
    from clusterprof.study import study

    flight = read_dumps(dumps)
    if len(flight.ranks) < 2:
        reasons = (f"{words.ranks(flight.ranks)} alone has a dump", *_reasons(flight.missing))
        raise ReportError("who is late cannot be determined from one rank", *reasons)
    steps = cycles(flight)
    if not steps:
        raise ReportError(
            "who is late cannot be determined: the dumps show no steps",
            "a group of all ranks repeats its calls eight times or more where they do; a recorder "
            "holds more with TORCH_NCCL_TRACE_BUFFER_SIZE=20000",
        )
    clock = host_clock(flight, {rank: RankReadings(hosts[rank]) for rank in hosts})
    shallow = compared(flight, clock, steps, hosts, sorted(within(steps, disturbed_ns)))
    if shallow.results["by"] == "nothing":
        raise ReportError(
            "who is late cannot be determined: NCCL measured no durations of collectives",
            "next time, set TORCH_NCCL_ENABLE_TIMING=1 in the job script",
        )
    return study([], shallow=shallow)


def save(made: Study, run: Window) -> None:
    """Write results, tables and page into `run`. Raises RunDirectoryError."""
    from concurrent.futures import ThreadPoolExecutor

    from clusterprof.report import results_json
    from clusterprof.tables import SCHEMAS

    # Arrow packs without the interpreter's lock, which drawing the page holds. More threads would
    # hold more tables packed in memory.
    with writing(run.merged, ""), ThreadPoolExecutor(2) as packers:
        run.merged.mkdir(exist_ok=True)
        results_json.write(run.merged / paths.RESULTS, made.results)
        whole = {name: getattr(made, name) for name in ("collectives", "accounts", "lanes")}
        if made.shallow is not None:
            whole["shallow"] = made.shallow
        targets = [(table, run.merged / f"{name}.parquet") for name, table in whole.items()]
        for rank in made.ranks:
            folder = run.tables(rank.rank)
            folder.mkdir(parents=True, exist_ok=True)
            for name in SCHEMAS:
                target = folder / f"{name}.parquet"
                if not same_file(rank.kept.get(name), target):
                    targets.append((getattr(rank, name), target))
        packed = [packers.submit(write_table, *target) for target in targets]
        write_page(made, run.html, run.results.path.name, "")
        for write in packed:
            write.result()
        _remove_others(run.results.path / paths.TABLES, {run.tables(r.rank) for r in made.ranks})


def _remove_others(tables: Path, kept: Container[Path]) -> None:
    """Remove our tables of an earlier merge's other ranks than those `kept`, and nothing else."""
    from clusterprof.tables import SCHEMAS

    for old in tables.iterdir() if tables.is_dir() else ():
        if old.name.isdigit() and old not in kept and not old.is_symlink():
            for name in SCHEMAS:
                (old / f"{name}.parquet").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                old.rmdir()


def same_file(kept: Path | None, target: Path) -> bool:
    """Give the file of a table that a rank keeps a second name: it has what `target` is to have.

    False where it has to be written: it differs, or the file system has no such names. All of ours
    are replaced as a whole, so that nothing that is written to one name is seen under the other.
    """
    try:
        if kept is None or kept.is_symlink():
            return False
        if target.is_symlink() or not target.exists() or not target.samefile(kept):
            folders.link(kept, target)
    except OSError:
        return False
    return True


def write_page(made: Study, target: Path, title: str, option: str = "--html") -> None:
    """Write the page of a study. Raises `RunDirectoryError`, which names `option`, if it cannot be
    written.
    """
    from clusterprof.report import html

    results = next_command.runnable(made.results)
    html.write(target, _page(results, made.collectives, made.lanes, title, made.job), option)


def page_again(run: Window, results: Results, *, anonymous: bool = False) -> str:
    """The page of a run that was merged before, from what merging wrote. Raises ReportError.

    `anonymous`: without hosts, paths and programs' arguments.
    """
    from clusterprof.align.lateness import SHALLOW
    from clusterprof.align.match import PLACED
    from clusterprof.report import anonymous as hidden
    from clusterprof.tables import SPANS, read_table

    def merged_table(name: str, schema: pa.Schema) -> pa.Table | None:
        """What an earlier version did not write, or nothing was known of, is not there."""
        path = run.merged / f"{name}.parquet"
        return read_table(path, schema) if path.is_file() else None

    collectives = read_table(run.merged / "collectives.parquet", PLACED)
    spans, job = merged_table("lanes", SPANS), None
    if run.directory.manifest.is_file():
        run = run_directory.opened(run.path).deep()
        job = job_record(run, run.directory.read_manifest())
        job = replace(job, shallow=merged_table("shallow", SHALLOW))
    if not anonymous:
        results = next_command.runnable(results)
        return _page(results, collectives, spans, run.results.path.name, job)
    names = hidden.host_names(results, job.hosts.values() if job else ())
    collectives = hidden.anonymous_table(collectives, names)
    spans = None if spans is None else hidden.anonymous_table(spans, names)
    job = job and hidden.anonymous_job(job, names)
    return _page(hidden.anonymous(results, names), collectives, spans, "a run", job)


def _page(
    results: Results, collectives: pa.Table, spans: pa.Table | None, title: str, job: Job | None
) -> str:
    from clusterprof.analysis.findings.registry import explained
    from clusterprof.report import html

    meaning = explained(results["findings"])
    return html.render(results, collectives, spans, title=title, job=job, explained=meaning)


def write_table(table: pa.Table, target: Path) -> None:
    """Write one table as Parquet, by rename. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from clusterprof import mapped

    # Times hardly repeat: to look for those that do takes four times as long as their differences,
    # which take a fifth of the space.
    apart = [
        field.name
        for field in table.schema
        if field.type == pa.int64() and (field.name.endswith("_ns") or field.name == "correlation")
    ]
    with files.new(target) as file:  # pyarrow opens no path whose bytes are not UTF-8
        parquet.write_table(
            table, file,
            use_dictionary=[name for name in table.schema.names if name not in apart],
            column_encoding=dict.fromkeys(apart, "DELTA_BINARY_PACKED"),
        )  # fmt: skip
    mapped.release()


def print_verdict(results: Results, run: Window | None) -> None:
    """The verdict as text on stdout; where a person looks at it, coloured, and with the values of
    the commands that are to be pasted.
    """
    from clusterprof.report import text

    results = next_command.runnable(results, run)
    if run is not None and sys.stdout.isatty():
        results = next_command.with_values(results, run)
    width = min(100, console.width(100))
    page = text.render(results, colour=console.wants_colour(sys.stdout), width=width)
    console.styled(page.rstrip("\n") + "\n", text.CODES)
