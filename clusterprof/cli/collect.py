"""`clusterprof collect RUN`: finish a run that was interrupted."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterprof import console, installed_nsys, run_directory, words
from clusterprof.arguments import add_gpu_hour, path, shortest
from clusterprof.cli import Parser, verb_parser
from clusterprof.collect.live_windows import check_over
from clusterprof.collect.outcomes import Outcome, collect_attempts, import_raw
from clusterprof.console import say
from clusterprof.errors import ReportError, UsageError
from clusterprof.launch import ending
from clusterprof.launch.ending import Ending
from clusterprof.launch.run_job import print_problems
from clusterprof.run_directory import Manifest, Window


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb, "Finish a run that was interrupted: collect its reports, name the missing ones, "
        "merge, and print the verdict.",
        "collect runs/...",
        "collect runs/... --window 3          a later window, also while the job runs",
        run="a run directory",
    )  # fmt: skip
    add = parser.add_argument
    add("--nsys", type=path, metavar="PATH", help="the nsys to use")
    add("-F", "--ssh-config", type=path, metavar="FILE",
        help="for a run over SSH: an ssh configuration instead of your own")  # fmt: skip
    add("--python", metavar="PATH",
        help="for a run over SSH: the hosts' Python (default: the one next to torchrun "
        "here)")  # fmt: skip
    add("--window", type=int, metavar="N",
        help="a later window (clusterprof capture), also while the job runs")  # fmt: skip
    add_gpu_hour(add)
    add("--no-merge", action="store_true", help="only collect the reports")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Collect what an interrupted launch has left, merge, print the verdict."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    installed_nsys.prefer(arguments.nsys)
    run = chosen_window(run_directory.opened(arguments.run), arguments.window)
    check_over(run)
    manifest = run.directory.read_manifest()
    gather(run, manifest, arguments)
    run, outcomes = collect_attempts(run, run.expected_ranks(), patience_s=0)
    if run.number == 1 and run.attempt != manifest.attempt:
        manifest.record(attempt=run.attempt)
    print_problems(run, outcomes)
    known = merge(run, outcomes, manifest, arguments)
    is_captured = any(outcome.report for outcome in outcomes) or (known.can_merge and not outcomes)
    if not is_captured:
        console.error(
            f"no report was captured in {run.path}",
            "each rank's state.json and log, below its ranks/, say what happened",
        )
    ending.say(known)
    return 0 if is_captured else ReportError.exit_code


def merge(
    run: Window,
    outcomes: Sequence[Outcome],
    manifest: Manifest,
    arguments: argparse.Namespace,
) -> Ending:
    """Merge what can be, and print the verdict; returns how the job ended."""
    status = manifest.exit_status if manifest.ended else None
    known = Ending(shortest(run.results.path), status, can_merge=ending.can_merge(run, outcomes))
    results = None
    if known.can_merge and arguments.no_merge:
        known = replace(known, why_none="not merged, by --no-merge")
    elif known.can_merge:
        from clusterprof.merge_run import merge_and_print

        results = merge_and_print(run, outcomes, arguments.gpu_hour)
        known = replace(known, is_merged=True)
    return ending.of_run(run, outcomes, manifest, results, known)


def gather(run: Window, manifest: Manifest, arguments: argparse.Namespace) -> None:
    """Fetch what is left on the run's hosts, and have nsys make the reports that it left raw."""
    if any(host["left"] for host in manifest.hosts):
        from clusterprof.collect.over_ssh import gather_left

        for host in gather_left(run, manifest, *ssh(arguments, manifest.ssh)):
            say(f"{host.name}: {host.reason or 'its reports are here'}")
        manifest.record()
    for attempt in run.attempts():
        for rank, problem in import_raw(attempt):
            say(f"rank {rank}: {problem or 'its report is made'}")


def chosen_window(run: Window, number: int | None) -> Window:
    """The run's window with this number, or (None) that of its result. Raises UsageError."""
    if number is None:
        return run.deep()
    windows = {window.number: window for window in (run, *run.directory.later_windows())}
    if number not in windows:
        raise UsageError(
            f"{run.directory.path} has no window {number}, only {words.listed(sorted(windows))}",
            f"clusterprof status {run.directory.path} lists them",
        )
    return windows[number]


def ssh(arguments: argparse.Namespace, recorded: dict[str, Any]) -> tuple[Path | None, str]:
    """The ssh configuration and the hosts' Python, as the user says them.

    Raises UsageError where run.json (`recorded`) has others: a run directory that somebody else
    made could name a ProxyCommand, or any program of a host, so the user has to confirm them.
    """
    from clusterprof.launchers.ssh import default_python

    config, python = arguments.ssh_config, arguments.python or default_python()
    options = ["-F", recorded["config"]] if recorded["config"] and config is None else []
    if recorded["python"] != python and not arguments.python:
        options += ["--python", recorded["python"]]
    if options:
        raise UsageError(
            f"the hosts of this run were reached with {shlex.join(options)}",
            "a run directory may not choose what is executed; if these are right, say so:",
            f"clusterprof collect {shlex.join([*options, str(arguments.run)])}",
        )
    return config, python
