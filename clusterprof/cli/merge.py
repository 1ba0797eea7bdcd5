"""`clusterprof merge PATH...`: reports of several ranks, on one clock, with a verdict."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof import console, gate, installed_nsys, run_directory
from clusterprof.agent.contracts import paths
from clusterprof.arguments import add_gpu_hour, check_free, number_of, path
from clusterprof.cli import Parser, verb_parser
from clusterprof.errors import ReportError, UsageError
from clusterprof.launch import tasks
from clusterprof.run_directory import Window

if TYPE_CHECKING:
    from clusterprof.collect.outcomes import Outcome
    from clusterprof.ingest.engines import Engine


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Align the clocks of several ranks' reports, match their collectives and print which rank "
        "delays the others, why, and which communication is exposed.",
        "merge runs/20260102T030405Z-4711               a run, again",
        "merge reports/ --html report.html              what nsys or torch.profiler recorded",
        "merge reports/ --fail-on critical --json       in a pipeline",
        "merge a.nsys-rep b.nsys-rep --rank a.nsys-rep=0 --rank b.nsys-rep=8",
        "merge dumps/                                   flight recorders of a job that hangs",
    )
    add = parser.add_argument
    add("paths", nargs="+", type=path, metavar="PATH",
        help="a run directory, a folder of reports, or reports: .nsys-rep, .qdrep, .sqlite(.xz), "
        "Kineto .json(.gz, .xz); or a folder of dumps of PyTorch's flight recorder alone, of a job "
        "that hangs")  # fmt: skip
    add("--rank", action="append", default=[], metavar="FILE=N",
        help="the rank of a report that does not contain it (of several ranks: the "
        "first)")  # fmt: skip
    add("--clock", action="append", default=[], type=path, metavar="FILE",
        help="what `clusterprof clock --output FILE` measured on the hosts of the reports, soon "
        "before or after the window (its bound grows by 9 ms per minute); may be "
        "repeated")  # fmt: skip
    add("--nsys", type=path, metavar="PATH", help="the nsys to read reports with")
    add("--json", action="store_true", help="print results.json instead of text")
    add("--html", type=path, metavar="FILE", help="write the HTML report to FILE")
    add("-o", "--output", type=path, metavar="DIR",
        help="write results, tables and HTML report to DIR")  # fmt: skip
    add("--force", action="store_true", help="replace what --output or --html wrote")
    add("--engine", choices=tasks.ENGINES, default="auto",
        help="who reads the reports: processes of this host, or the tasks of an MPI job, of which "
        "the first one merges (default auto: mpi under srun or mpirun with more than one task, "
        "else process)")  # fmt: skip
    add("--workers", type=number_of("processes"), metavar="N",
        help="how many processes read on one host (default: one for each processor, at most "
        "8)")  # fmt: skip
    add_gpu_hour(add)
    gate.add_option(add)
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Merge and print; 0, or 1 where a condition of --fail-on is met."""
    line = [*own, *(program or ())]
    task = tasks.task(os.environ)
    with tasks.first_speaks(task) as speak:
        arguments = parser(verb).parse_args(line)
        gate.check_codes(arguments.fail_on)
        installed_nsys.prefer(arguments.nsys)
        from clusterprof.ingest.engines import Processes

        processes = Processes(arguments.workers, always=arguments.engine == "process")
        work = partial(_merge, arguments)
        return tasks.over(arguments.engine, task, processes, line, work, speak)


def _merge(arguments: argparse.Namespace, engine: Engine) -> int:
    from clusterprof import merge_run
    from clusterprof.report import html, results_json, summary

    if arguments.html:
        check_free(arguments.html, arguments.force, html.is_ours)
    if dumps := _dumps_alone(arguments.paths):
        return _hang(dumps, arguments)
    output, run = _output(arguments), None
    if len(arguments.paths) == 1 and _is_run(arguments.paths[0]):
        run, outcomes = _collected(arguments)
        study = merge_run.merge_run(run, outcomes, engine, arguments.gpu_hour)
        console.say(f"wrote {run.html}")
    else:
        from clusterprof import clock_probe

        ranks = _given_ranks(arguments.rank)
        clocks = [clock_probe.read(file) for file in arguments.clock]
        joined = clock_probe.joined(clocks) if clocks else None
        study = merge_run.merge_reports(arguments.paths, ranks, joined, engine)
    if output is not None:
        with run_directory.merging(output):
            merge_run.save(study, output)
        console.say(f"wrote {output.html}")
    if arguments.html:
        title = ", ".join(source.name for source in arguments.paths)
        merge_run.write_page(study, arguments.html, title)
        console.say(f"wrote {arguments.html}")
    merge_run.check_price(study.results, arguments.gpu_hour)
    if arguments.json:
        console.json(results_json.dumps(study.results))
    else:
        merge_run.print_verdict(study.results, run)
    figures = summary.Summary(study.results).figures
    return int(gate.fails(arguments.fail_on, study.results["findings"], figures=figures))


def _collected(arguments: argparse.Namespace) -> tuple[Window, list[Outcome]]:
    """The window of the run given that has its reports, and what its ranks have left."""
    from clusterprof.collect.live_windows import check_over, of_running
    from clusterprof.collect.outcomes import collect, collect_attempts

    only = arguments.paths[0]
    if arguments.clock:
        raise UsageError(
            f"{only} is a run directory, which keeps measurements of its own",
            f"put it there: clusterprof clock FILE... --output {only / 'clock_probe.json'}",
        )
    run = run_directory.opened(only).deep()
    check_over(run)
    if run.number > 1:  # which attempt is merged stands in run.json for the first one only
        return collect_attempts(run, run.expected_ranks(), patience_s=0, write=False)
    outcomes = collect(run, run.expected_ranks(), patience_s=0, write=False)
    return run, of_running(run, outcomes)


def _is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it may not be seen, which its reader says
        return Window.at(folder.absolute()).directory.manifest.is_file()
    return False


def _dumps_alone(given: Sequence[Path]) -> list[tuple[Path, int | None]]:
    """The dumps of flight recorders in the one folder given, if it holds no reports."""
    from clusterprof.ingest import find_sources
    from clusterprof.ingest.flight.all_dumps import find_dumps

    folder = given[0]
    dumps: list[tuple[Path, int | None]] = []
    try:
        if len(given) == 1 and folder.is_dir() and not _is_run(folder):
            dumps = find_dumps(folder)
        reports = {source.path for source in find_sources([folder])} if dumps else set()
    except OSError:
        return []  # it may not be seen, which its reader says
    except ReportError:
        return dumps
    return dumps if reports <= {path for path, _ in dumps} else []


def _hang(dumps: Sequence[tuple[Path, int | None]], arguments: argparse.Namespace) -> int:
    """Print what a job waits for; 0, or 1 with --fail-on where one waits."""
    from clusterprof import merge_run
    from clusterprof.report import results_json, text

    if arguments.output or arguments.html or arguments.clock:
        raise UsageError(
            f"{arguments.paths[0]} holds dumps of flight recorders and no reports:"
            " --output, --html and --clock are for reports",
            "print what the job waits for: clusterprof merge FOLDER --json",
        )
    results = merge_run.merge_dumps(dumps, _given_ranks(arguments.rank))
    if arguments.json:
        console.json(results_json.dumps(results))
    else:
        console.styled(text.hang_page(results), ())
    return int(bool(arguments.fail_on and results["hang"]))


def _output(arguments: argparse.Namespace) -> Window | None:
    """The folder of --output; made here, so that its errors come before the work."""
    from clusterprof.report import results_json

    if arguments.output is None:
        return None

    def is_ours(folder: Path) -> bool:
        with contextlib.suppress(ReportError):
            return bool(results_json.read(Window.at(folder).merged / paths.RESULTS))
        return False

    folder: Path = arguments.output.absolute()
    if not folder.is_dir() or any(folder.iterdir()):
        check_free(folder, arguments.force, is_ours)
    with run_directory.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return Window.at(folder)


def _given_ranks(given: Sequence[str]) -> dict[Path, int]:
    from clusterprof.tables import HIGHEST_RANK

    ranks = {}
    for text in given:
        file, _, rank = text.rpartition("=")
        # isdigit() would let "²" through
        if not file or not rank.isdecimal() or int(rank) > HIGHEST_RANK:
            raise UsageError(f"--rank {text!r} is not FILE=N", "write --rank FILE=N")
        ranks[path(file)] = int(rank)
    return ranks
