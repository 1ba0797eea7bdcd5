"""From a command line to a `LaunchPlan`: options, where each came from, what is refused."""

from __future__ import annotations

import argparse
import datetime as dt
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterprof import launchers, ranks, step_window
from clusterprof import run_directory as rundir
from clusterprof.errors import UsageError
from clusterprof.launch.capture import PROFILERS, CaptureRequest, choose
from clusterprof.launch.request import LaunchPlan, injected
from clusterprof.launch.settings import Settings, path
from clusterprof.run_directory import RunDirectory

#: `--strict`: the training was fine, the profile was not.
PROFILE_FAILED = 123
#: `--beacons`: beyond it they would be a load of their own
MOST_BEACONS = 1000
#: `--max-steps`: five steps show what there is to see; hundreds make reports that nothing opens
MOST_STEPS = 200
#: `--max-report-mb`: millions of events; a torch trace takes four times its size to be written
MOST_REPORT_MB = 1024


def parser(verb: str) -> argparse.ArgumentParser:
    """clusterprof's own options; whatever it does not know belongs to the launcher."""
    this = argparse.ArgumentParser(
        prog=f"clusterprof {verb}",
        usage=f"clusterprof {verb} [--ranks R] [--steps A:B] [{verb} OPTION...] -- PROGRAM...",
        description=f"Run PROGRAM under {verb} as it is, and capture a window of steps on chosen "
        f"ranks. Options that are not listed here are {verb}'s and reach it as they stand.",
        allow_abbrev=False,
        add_help=False,
    )
    # Not -h: argparse would find it in a launcher's -hosts and -hostfile. See `planned`.
    this.add_argument("--help", action="help", help="show this, as -h alone does")
    what = this.add_argument_group("what to capture")
    what.add_argument("--ranks", metavar="R", help=f"{ranks.GRAMMAR} (default 0)")
    for name, of in (("pp", "pipeline"), ("tp", "tensor"), ("cp", "context"), ("dp", "data")):
        what.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{of}-parallel size, for stages"
        )
    what.add_argument(
        "--steps", metavar="A:B", help="the window of steps, half open (default 10:15)"
    )
    what.add_argument("--step-on", metavar="MODULE:FUNCTION", help="a step ends when this returns")
    how = this.add_argument_group("how to capture it")
    how.add_argument("--profiler", choices=PROFILERS, help="default: nsys where it is, else torch")
    how.add_argument("--nsys", metavar="PATH", help="the nsys to use")
    how.add_argument("--trace", metavar="LIST", help="nsys --trace (default cuda,nvtx)")
    how.add_argument(
        "--nsys-arg", action="append", default=[], metavar="ARG", help="a further argument for nsys"
    )
    how.add_argument(
        "--pytorch",
        choices=("autograd-nvtx", "autograd-shapes-nvtx", "emit-nvtx"),
        help="NVTX ranges for PyTorch's operators",
    )
    how.add_argument(
        "--cpu-sampling",
        action="store_true",
        help="sample the CPU too (costs CPU time in the rank)",
    )
    how.add_argument(
        "--window-by",
        choices=("auto", "cuda", "session"),
        default="auto",
        help="session: nsys start and stop (default); cuda: cudaProfilerStart in the program",
    )
    clocks = this.add_argument_group("the ranks' clocks")
    clocks.add_argument(
        "--clock-probe",
        choices=("auto", "on", "off"),
        default="auto",
        help="measure the hosts' clocks against each other around the window, from a process "
        "beside each chosen rank (UDP between the nodes; default auto: where the chosen ranks "
        "may be on several nodes)",
    )
    clocks.add_argument(
        "--beacons",
        type=int,
        default=0,
        metavar="N",
        help="all ranks of the job send N tiny AllReduces at both ends of the window, for jobs "
        "whose collectives are all large; the ranks agree on it first, and a rank that does not "
        "come to the same step holds up the others for up to 30 s, once (default 0; 16 is plenty)",
    )
    limits = this.add_argument_group("how large it may become")
    limits.add_argument(
        "--max-steps", type=int, default=MOST_STEPS, metavar="N",
        help=f"refuse a window of more steps (default {MOST_STEPS})",
    )  # fmt: skip
    limits.add_argument(
        "--max-report-mb", type=int, default=MOST_REPORT_MB, metavar="M",
        help="close a rank's window early once what it has captured takes M MB on its node "
        f"(default {MOST_REPORT_MB}; 0: no limit)",
    )  # fmt: skip
    limits.add_argument(
        "--time-margin", type=float, metavar="S",
        help="close a window that is open S seconds before Slurm's time limit (default 60, or a "
        "tenth of a shorter limit; 0: never)",
    )  # fmt: skip
    run = this.add_argument_group("the run")
    run.add_argument(
        "--run-dir", metavar="DIR", help="default runs/<UTC stamp>-<job or process id>"
    )
    run.add_argument("--force", action="store_true", help="replace an earlier run of that name")
    run.add_argument("--dry-run", action="store_true", help="print exactly what would run")
    run.add_argument("--no-merge", action="store_true", help="collect only; merge later")
    run.add_argument(
        "--strict", action="store_true", help=f"end with {PROFILE_FAILED} if a chosen rank is lost"
    )
    run.add_argument("--debug", action="store_true", help="show tracebacks")
    return this


def planned(
    verb: str, own: Sequence[str], program: Sequence[str] | None, turn: int = 1
) -> tuple[argparse.Namespace, LaunchPlan]:
    """Understand a command line; nothing is run. Raises UsageError, ProfilerError, LaunchError.

    `turn`: 2 where the default run directory was taken the moment before, 3 where that one too.
    """
    words = ["--help" if word == "-h" else word for word in own]
    arguments, launcher_options = parser(verb).parse_known_args(words)
    if program is None:
        raise UsageError(
            "there is no -- before the program",
            f"write: clusterprof {verb} [OPTIONS] -- {_guessed_program(own)}",
        )
    if not program:
        raise UsageError(
            "there is no program after --", f"write: clusterprof {verb} ... -- train.py"
        )
    return arguments, make_plan(verb, arguments, launcher_options, program, turn)


def _guessed_program(own: Sequence[str]) -> str:
    for place, word in enumerate(own):
        if word.endswith(".py") or word.startswith("python"):
            return " ".join(own[place:])
    return "python train.py"


def make_plan(
    verb: str,
    arguments: argparse.Namespace,
    options: Sequence[str],
    program: Sequence[str],
    turn: int = 1,
) -> LaunchPlan:
    """Decide everything; nothing is written or run. Raises UsageError, ProfilerError."""
    settings = Settings(arguments)
    selection = ranks.parse(
        str(settings.get("ranks")),
        pp=arguments.pp, tp=arguments.tp, cp=arguments.cp, dp=arguments.dp,
    )  # fmt: skip
    steps, step_on = checked_window(arguments, settings)
    nsys = settings.get("nsys")
    capture = choose(
        CaptureRequest(
            profiler=str(settings.get("profiler")),
            nsys=path(nsys) if nsys else None,
            trace=arguments.trace,
            nsys_args=tuple(arguments.nsys_arg),
            pytorch=arguments.pytorch,
            cpu_sampling=arguments.cpu_sampling,
            window_by=arguments.window_by,
        )
    )
    capture = replace(
        capture, agent={**capture.agent, **clock_evidence(arguments), **limits(arguments)}
    )
    folder = run_directory(settings, turn)
    environment = injected(os.environ, RunDirectory(folder).plan)
    job = launchers.load(verb).job(options, program, os.environ, environment)
    selection.check(job.world_size, job.told_by)
    return LaunchPlan(
        job,
        {} if job.carries else environment,
        folder,
        selection,
        steps,
        step_on,
        capture,
        settings.origins,
    )


def run_directory(settings: Settings, turn: int) -> Path:
    """Where the run goes. Two runs that one job starts in the same second are told apart."""
    wanted = settings.get("run_dir")
    if wanted:
        return rundir.started_over(path(wanted).absolute(), os.environ)
    now = dt.datetime.now(dt.timezone.utc)
    folder = rundir.default_path(Path("runs"), os.environ.get("SLURM_JOB_ID"), now).absolute()
    return folder if turn == 1 else folder.with_name(f"{folder.name}-{turn}")


def checked_window(
    arguments: argparse.Namespace, settings: Settings
) -> tuple[step_window.StepWindow, str | None]:
    """The window, and what ends a step (None: the optimizer's). Raises UsageError."""
    steps = step_window.parse(str(settings.get("steps")))
    most = arguments.max_steps
    if len(steps) > most:
        raise UsageError(
            f"--steps {steps} holds {len(steps)} steps, more than --max-steps {most}",
            "a report grows with every step, and five to ten show what there is to see: "
            f"try --steps {steps.first}:{steps.first + 10}",
            f"if you mean it: --max-steps {len(steps)}",
        )
    step_on = settings.get("step_on")
    if step_on is not None and not all(step_on.partition(":")):
        raise UsageError(
            f"--step-on {step_on!r} names no function",
            "write module:function or module:Class.method",
        )
    return steps, step_on


def limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """How much a rank may capture. Raises UsageError."""
    if arguments.max_report_mb < 0:
        raise UsageError(
            f"--max-report-mb {arguments.max_report_mb}: 0 or more", "0 means no limit"
        )
    return {"max_report_mb": arguments.max_report_mb}


def clock_evidence(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the agents do for the clocks' sake. Raises UsageError."""
    if not 0 <= arguments.beacons <= MOST_BEACONS:
        raise UsageError(
            f"--beacons {arguments.beacons}: from 0 to {MOST_BEACONS}", "16 are plenty"
        )
    return {"clock_probe": arguments.clock_probe, "beacons": arguments.beacons}
