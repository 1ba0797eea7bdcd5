"""A launch is a value before it is an action: `--dry-run`, the tests and the real run share it.

From the options to a `LaunchPlan`: what is profiled, where each value came from, what is refused.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterprof import launchers, masking
from clusterprof import run_directory as rundir
from clusterprof.agent.contracts.plan import Plan
from clusterprof.arguments import Selection, StepWindow, parse_ranks, parse_steps, path
from clusterprof.errors import UsageError
from clusterprof.launch.profiling import CapturePlan, CaptureRequest, choose
from clusterprof.launchers.support.job import CommandLine, Job
from clusterprof.run_directory import RunDirectory

#: `--strict`: the training was fine, the profile was not.
PROFILE_FAILED = 123
#: `--beacons`: more would slow the job
MOST_BEACONS = 1000
#: `--max-steps`: five to ten steps are enough; no tool opens reports of hundreds
MOST_STEPS = 200
#: `--max-report-mb`: millions of events; writing a torch trace takes four times its size
MOST_REPORT_MB = 1024
#: Put first on PYTHONPATH: the sitecustomize in it starts the agent in every interpreter.
INJECT = Path(__file__).resolve().parents[1] / "agent" / "inject"


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that will be run, decided."""

    job: Job
    environment: Mapping[str, str]
    run: Path
    selection: Selection
    window: StepWindow
    step_on: str | None
    capture: CapturePlan
    #: where each value came from: {"steps": "default"}
    origins: Mapping[str, str]
    clock_probe: str = "off"
    beacons: int = 0
    max_report_mb: int = 0

    def for_agent(self) -> Plan:
        """plan.json: what the agent in every rank reads."""
        return Plan(
            str(self.run),
            self.selection,
            (self.window.first, self.window.end),
            self.capture.name,
            self.job.identity,
            self.step_on,
            self.capture.window_by,
            self.capture.emit_nvtx,
            self.capture.nsys,
            self.clock_probe,
            self.beacons,
            self.max_report_mb,
        )

    def command_line(self) -> str:
        """The command with its added environment, to be pasted into a shell; secrets masked."""
        added = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*added, shlex.join(masking.words(self.job.command))])

    def command_lines(self) -> list[str]:
        """What will run where: one line, or one for each host."""
        there = self.job.over_ssh
        if there is None:
            return [self.command_line()]
        variables = " ".join([*self.environment, *there.environment])
        lines = [
            f"{host.name}: cd {shlex.quote(there.folder)} && {shlex.join(masking.words(command))}"
            for host, command in zip(there.hosts, there.commands, strict=True)
        ]
        lines.append(
            f"with {variables} set; the agent and the reports are in a temporary folder on each "
            "host, which is removed once the reports are fetched"
        )
        return lines

    def shown(self) -> str:
        """What `--dry-run` prints."""
        expected = self.selection.expected(self.job.world_size)
        which = self.selection.text
        if expected is not None and self.selection.kind != "ranks":
            which += f" ({','.join(map(str, expected))})"
        world = f"{self.job.world_size} ranks" if self.job.world_size else "known only to the ranks"
        rows = [
            ("run directory", str(self.run), self.origins.get("run_dir", "default")),
            ("world", world, self.job.size_source),
            ("ranks", which, self.origins.get("ranks", "default")),
            ("steps", str(self.window), self.origins.get("steps", "default")),
            ("steps counted by", self.step_on or "torch optimizer steps",
             self.origins.get("step_on", "default")),
            ("profiler", f"{self.capture.name} {self.capture.version}", self.capture.because),
        ]  # fmt: skip
        width = max(len(value) for _, value, _ in rows)
        lines = [f"{name:<17} {value:<{width}}  {origin}".rstrip() for name, value, origin in rows]
        lines += ["", "will run:", *(f"  {line}" for line in self.command_lines())]
        commands = self.capture.shown()
        if commands:
            lines += ["", "around the program in each profiled rank:"]
            lines += [f"  {shlex.join(command)}" for command in commands]
        remarks = [*self.job.remarks, *([self.job.closed] if self.job.closed else [])]
        if remarks:
            lines += ["", "notes:", *(f"  {remark}" for remark in remarks)]
        return "\n".join(lines)


def injected(environ: Mapping[str, str], plan_file: Path) -> dict[str, str]:
    """The two variables that load the agent in every interpreter of the job."""
    before = environ.get("PYTHONPATH")
    return {
        "CLUSTERPROF_PLAN": str(plan_file),
        "PYTHONPATH": f"{INJECT}:{before}" if before else str(INJECT),
    }


#: The settings that can be given by environment: option -> (variable, default).
SETTINGS = {
    "ranks": ("CLUSTERPROF_RANKS", "0"),
    "steps": ("CLUSTERPROF_STEPS", "10:15"),
    "profiler": ("CLUSTERPROF_PROFILER", "auto"),
    "nsys": ("CLUSTERPROF_NSYS", None),
    "run_dir": ("CLUSTERPROF_RUN_DIR", None),
    "step_on": ("CLUSTERPROF_STEP_ON", None),
}


class Settings:
    """The values in force, each with its origin."""

    def __init__(self, arguments: argparse.Namespace, environ: Mapping[str, str] | None = None):
        self._arguments = arguments
        self._environ = os.environ if environ is None else environ
        self.origins: dict[str, str] = {}

    def get(self, name: str) -> str | None:
        """The value of the setting `name` (a key of SETTINGS); remembers where it came from."""
        variable, default = SETTINGS[name]
        given = getattr(self._arguments, name)
        if given is not None:
            self.origins[name] = "--" + name.replace("_", "-")
            return str(given)
        if self._environ.get(variable):
            self.origins[name] = variable
            return self._environ[variable]
        self.origins[name] = "default"
        return default


def make_plan(
    verb: str,
    arguments: argparse.Namespace,
    options: Sequence[str],
    program: Sequence[str],
    turn: int = 1,
) -> LaunchPlan:
    """Decide everything; nothing is written or run. Raises UsageError, ProfilerError."""
    settings = Settings(arguments)
    selection = selected(arguments, settings)
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
    check_limits(arguments)
    folder = run_directory(settings, turn)
    environment = injected(os.environ, RunDirectory(folder).plan)
    job = launchers.job(verb, CommandLine(options, program, os.environ, environment))
    selection.check(job.world_size, job.size_source)
    return LaunchPlan(
        job,
        {} if job.carries else environment,
        folder,
        selection,
        steps,
        step_on,
        capture,
        settings.origins,
        arguments.clock_probe,
        arguments.beacons,
        arguments.max_report_mb,
    )


def run_directory(settings: Settings, turn: int) -> Path:
    """The run directory, a different one for each of several runs in the same second (`turn`)."""
    wanted = settings.get("run_dir")
    if wanted:
        return rundir.started_over(path(wanted).absolute(), os.environ)
    now = dt.datetime.now(dt.timezone.utc)
    folder = rundir.default_path(Path("runs"), os.environ.get("SLURM_JOB_ID"), now).absolute()
    return folder if turn == 1 else folder.with_name(f"{folder.name}-{turn}")


def selected(arguments: argparse.Namespace, settings: Settings) -> Selection:
    """The ranks to profile. Raises UsageError."""
    sizes = {name: getattr(arguments, name) for name in ("pp", "tp", "cp", "dp")}
    return parse_ranks(str(settings.get("ranks")), **sizes)


def checked_window(
    arguments: argparse.Namespace, settings: Settings
) -> tuple[StepWindow, str | None]:
    """The window, and what ends a step (None: the optimizer's). Raises UsageError."""
    steps = parse_steps(str(settings.get("steps")))
    most = arguments.max_steps
    if len(steps) > most:
        raise UsageError(
            f"--steps {steps} has {len(steps)} steps, more than --max-steps {most}",
            "a report grows with every step, and five to ten steps are enough: "
            f"try --steps {steps.first}:{steps.first + 10}",
            f"to profile them all: --max-steps {len(steps)}",
        )
    step_on = settings.get("step_on")
    if step_on is not None and not all(step_on.partition(":")):
        raise UsageError(
            f"--step-on {step_on!r} is not a function",
            "write module:function or module:Class.method",
        )
    return steps, step_on


def check_limits(arguments: argparse.Namespace) -> None:
    """How much a rank may capture, and how many beacons it sends. Raises UsageError."""
    if arguments.max_report_mb < 0:
        raise UsageError(
            f"--max-report-mb {arguments.max_report_mb} is negative", "0 means no limit"
        )
    if not 0 <= arguments.beacons <= MOST_BEACONS:
        raise UsageError(
            f"--beacons {arguments.beacons} is not between 0 and {MOST_BEACONS}", "16 are enough"
        )
