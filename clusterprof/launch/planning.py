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

from clusterprof import launchers, masking, run_directory
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
    capture: CapturePlan
    #: where each setting came from: {"steps": "default"}
    origins: Mapping[str, str]
    #: plan.json: what the agent in every rank reads
    for_agent: Plan
    #: clusterprof's own options
    arguments: argparse.Namespace

    @property
    def expected(self) -> tuple[int, ...] | None:
        """The ranks to profile; None where only the ranks know."""
        return self.selection.expected(self.job.world_size)

    def command_lines(self) -> list[str]:
        """What will run where: a line for a shell, or one for each host; secrets masked."""
        there = self.job.over_ssh
        if there is None:
            added = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
            return [" ".join([*added, shlex.join(masking.words(self.job.command))])]
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
        which = self.selection.text
        if self.expected is not None and self.selection.kind != "ranks":
            which += f" ({','.join(map(str, self.expected))})"
        world = f"{self.job.world_size} ranks" if self.job.world_size else "known only to the ranks"
        came_from = self.origins
        rows = [
            ("run directory", str(self.run), came_from["run_dir"]),
            ("world", world, self.job.size_source),
            ("ranks", which, came_from["ranks"]),
            ("steps", str(self.window), came_from["steps"]),
            ("steps counted by", self.for_agent.step_on or "torch optimizer steps",
             came_from["step_on"]),
            ("profiler", f"{self.capture.name} {self.capture.version}", self.capture.because),
        ]  # fmt: skip
        width = max(len(value) for _, value, _ in rows)
        lines = [f"{name:<17} {value:<{width}}  {origin}".rstrip() for name, value, origin in rows]
        lines += ["", "will run:", *(f"  {line}" for line in self.command_lines())]
        if commands := self.capture.shown():
            lines += ["", "around the program in each profiled rank:"]
            lines += [f"  {shlex.join(command)}" for command in commands]
        if remarks := [*self.job.remarks, *filter(None, [self.job.closed])]:
            lines += ["", "notes:", *(f"  {remark}" for remark in remarks)]
        return "\n".join(lines)


#: The settings that can be given by environment: option -> (variable, default).
SETTINGS = {
    "ranks": ("CLUSTERPROF_RANKS", "0"),
    "steps": ("CLUSTERPROF_STEPS", "10:15"),
    "step_on": ("CLUSTERPROF_STEP_ON", None),
    "nsys": ("CLUSTERPROF_NSYS", None),
    "profiler": ("CLUSTERPROF_PROFILER", "auto"),
    "run_dir": ("CLUSTERPROF_RUN_DIR", None),
}


def settle(arguments: argparse.Namespace) -> dict[str, str]:
    """Give the settings that were not given their values; returns where each came from."""
    origins = {}
    for name, (variable, default) in SETTINGS.items():
        if getattr(arguments, name) is not None:
            origins[name] = "--" + name.replace("_", "-")
        else:
            given = os.environ.get(variable)
            origins[name] = variable if given else "default"
            setattr(arguments, name, given or default)
    return origins


def make_plan(
    verb: str,
    arguments: argparse.Namespace,
    origins: Mapping[str, str],
    options: Sequence[str],
    program: Sequence[str],
    turn: int = 1,
) -> LaunchPlan:
    """Decide everything; nothing is written or run. Raises UsageError, ProfilerError.

    `turn`: the run directory is a different one for each of several runs in the same second.
    """
    selection, window = checked(arguments)
    capture = choose(CaptureRequest.of(arguments))
    if arguments.run_dir:
        folder = run_directory.started_over(path(arguments.run_dir).absolute(), os.environ)
    else:
        now, job_id = dt.datetime.now(dt.timezone.utc), os.environ.get("SLURM_JOB_ID")
        folder = run_directory.default_path(Path("runs"), job_id, now).absolute()
        folder = folder if turn == 1 else folder.with_name(f"{folder.name}-{turn}")
    before = os.environ.get("PYTHONPATH")
    environment = {  # what loads the agent in every interpreter of the job
        "CLUSTERPROF_PLAN": str(RunDirectory(folder).plan),
        "PYTHONPATH": f"{INJECT}:{before}" if before else str(INJECT),
    }
    job = launchers.job(verb, CommandLine(options, program, os.environ, environment))
    selection.check(job.world_size, job.size_source)
    for_agent = Plan(
        str(folder), selection, (window.first, window.end), capture.name, job.identity,
        arguments.step_on, capture.window_by, capture.emit_nvtx, capture.nsys,
        arguments.clock_probe, arguments.beacons, arguments.max_report_mb,
    )  # fmt: skip
    added = {} if job.carries else environment
    return LaunchPlan(job, added, folder, selection, window, capture, origins, for_agent, arguments)


def checked(arguments: argparse.Namespace) -> tuple[Selection, StepWindow]:
    """The ranks and the steps to profile, and how much of them may be captured within limits.

    Raises UsageError.
    """
    sizes = {name: getattr(arguments, name) for name in ("pp", "tp", "cp", "dp")}
    selection = parse_ranks(arguments.ranks, **sizes)
    steps, most, step_on = parse_steps(arguments.steps), arguments.max_steps, arguments.step_on
    if len(steps) > most:
        raise UsageError(
            f"--steps {steps} has {len(steps)} steps, more than --max-steps {most}",
            "a report grows with every step, and five to ten steps are enough: "
            f"try --steps {steps.first}:{steps.first + 10}",
            f"to profile them all: --max-steps {len(steps)}",
        )
    if step_on is not None and not all(step_on.partition(":")):
        raise UsageError(
            f"--step-on {step_on!r} is not a function",
            "write module:function or module:Class.method",
        )
    if arguments.max_report_mb < 0:
        raise UsageError(
            f"--max-report-mb {arguments.max_report_mb} is negative", "0 means no limit"
        )
    if not 0 <= arguments.beacons <= MOST_BEACONS:
        raise UsageError(
            f"--beacons {arguments.beacons} is not between 0 and {MOST_BEACONS}", "16 are enough"
        )
    return selection, steps
