"""A launch is a value before it is an action: `--dry-run`, the tests and the real run share it.

From the options to a `LaunchPlan`: what is profiled, where each value came from, what is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from clusterprof import launchers, masking, run_directory, words
from clusterprof.agent.contracts import paths
from clusterprof.agent.contracts.plan import Plan
from clusterprof.arguments import (
    RANKS_GRAMMAR,
    Selection,
    StepWindow,
    parse_ranks,
    parse_steps,
    path,
    shortest,
    watch_seconds,
)
from clusterprof.errors import ClusterprofError, ReportError, UsageError
from clusterprof.jobs import CommandLine, Job
from clusterprof.launch.profiling import (
    MANY_RANKS,
    CapturePlan,
    choose,
    reduction_for,
    reduction_text,
)
from clusterprof.launch.settings import SETTINGS
from clusterprof.results import RANKS, Results
from clusterprof.run_directory import Manifest, RunDirectory, Window

#: `--strict`: the training was fine, the profile was not.
PROFILE_FAILED = 123
#: `--fail-on`: the training was fine, and a condition is met or could not be checked.
GATE_FAILED = 122
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
    #: the command line that starts such a run again (`results.RANKS`)
    again: tuple[str, ...] = ()

    @property
    def expected(self) -> tuple[int, ...] | None:
        """The ranks to profile; None where only the ranks know."""
        return self.selection.expected(self.job.world_size)

    def command_lines(self) -> list[str]:
        """What will run where: a line for a shell, or one for each host; secrets masked."""
        ssh_job = self.job.over_ssh
        if ssh_job is None:
            added = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
            return [" ".join([*added, shlex.join(masking.words(self.job.command))])]
        variables = " ".join([*self.environment, *ssh_job.environment])
        lines = [
            f"{host.name}: cd {shlex.quote(ssh_job.folder)} && {shlex.join(masking.words(command))}"
            for host, command in zip(ssh_job.hosts, ssh_job.commands, strict=True)
        ]
        lines.append(
            f"with {variables} set; the agent and the reports are in a temporary folder on each "
            "host, which is removed once the reports are fetched"
        )
        return lines

    @property
    def ranks_text(self) -> str:
        """Which ranks are profiled, in words."""
        if self.selection.kind == "auto":
            return f"{self.selection.text}: chosen after the window, captured in a second one"
        if self.selection.kind == "ranks" or self.expected is None:
            return self.selection.text
        return f"{self.selection.text} ({','.join(map(str, self.expected))})"

    def settings(self) -> list[tuple[str, str, str]]:
        """Each setting, its value, and where that came from."""
        plan, job, came_from = self.for_agent, self.job, self.origins
        # why this profiler, or what named it where that is no option
        profiler_from, because = came_from["profiler"], self.capture.because
        if profiler_from in ("default", "--profiler") or because.startswith("auto"):
            profiler_from = because
        settings = (
            ("run directory", str(self.run), came_from["run_dir"]),
            ("world", f"{job.world_size} ranks" if job.world_size else "known only to the ranks",
             job.size_source),
            ("ranks", self.ranks_text, came_from["ranks"]),
            ("under nsys", plan.armed.text if plan.armed else "", came_from.get("arm", "")),
            ("steps", str(self.window), came_from["steps"]),
            ("steps counted by", plan.step_on or "torch optimizer steps", came_from["step_on"]),
            ("profiler", f"{self.capture.name} {self.capture.version}", profiler_from),
            ("flight recorder", f"every rank, after step {self.window.end - 1}",
             "with stacks: --stacks" if plan.stacks else "without stacks"),
            ("watch", f"all ranks every {words.age(plan.watch_s)}" if plan.watch_s else "",
             f"--watch {self.arguments.watch}" if "watch" in came_from else "default"),
            ("reports to tables", reduction_text(plan.reduction, self.expected),
             came_from.get("reduce", f"more than {MANY_RANKS} profiled ranks")),
        )  # fmt: skip
        further = (
            (f"--{name.replace('_', '-')}", str(getattr(self.arguments, name)), origin)
            for name, origin in came_from.items()
            if not origin.startswith("--") and name not in (*SETTINGS, "arm")
        )
        return [*(row for row in settings if row[1]), *further]

    def shown(self) -> str:
        """What `--dry-run` prints."""
        rows = self.settings()
        width = max(len(value) for _, value, _ in rows)
        lines = [f"{name:<17} {value:<{width}}  {origin}".rstrip() for name, value, origin in rows]
        costs = [ARMED_COSTS] if self.for_agent.armed else []
        closed = filter(None, [self.job.closed])
        sections = {
            "will run": self.command_lines(),
            "around the program in each profiled rank": self.capture.command_lines(),
            "notes": [*self.job.remarks, *self.capture.remarks, *costs, *closed],
        }
        for title, texts in sections.items():
            lines += ["", f"{title}:", *(f"  {text}" for text in texts)] if texts else []
        return "\n".join(lines)


#: Measured with 400 small kernels a step on an H200, nsys 2025.3, twice: 2.7 ms without and 2.9
#: armed, 2.48 and 2.78 (docs/nsys.md).
ARMED_COSTS = (
    "a rank that waits under nsys for the second window is 8 to 12% slower if it is launch-bound, "
    "as before if GPU-bound; --arm none avoids that, and torch.profiler captures it"
)

#: How often a rank's step log is written, and a later window is looked for.
LOG_S = 60
#: how often all ranks are looked at while the job runs, where ranks are chosen by a look
WATCH_S = 600


def make_plan(
    verb: str, arguments: argparse.Namespace, origins: Mapping[str, str], options: Sequence[str],
    program: Sequence[str], turn: int = 1,
) -> LaunchPlan:  # fmt: skip
    """Decide everything; nothing is written or run. Raises UsageError, ProfilerError.

    `turn`: the run directory is a different one for each of several runs in the same second.
    """
    selection, window = checked(arguments)
    if arguments.run_dir:
        folder = run_directory.started_over(path(arguments.run_dir).absolute(), os.environ)
    else:
        folder = default_run(os.environ.get("SLURM_JOB_ID"))
        folder = folder if turn == 1 else folder.with_name(f"{folder.name}-{turn}")
    may_be_nsys = arguments.profiler in ("auto", "nsys")
    capture = choose(arguments, latest(folder.parent, program) if may_be_nsys else None)
    before = os.environ.get("PYTHONPATH")
    environment = {  # what loads the agent in every interpreter of the job
        "CLUSTERPROF_PLAN": str(RunDirectory(folder).plan),
        "PYTHONPATH": f"{INJECT}:{before}" if before else str(INJECT),
    }
    masking.ours.update({str(INJECT), environment["CLUSTERPROF_PLAN"]})
    job = launchers.job(verb, CommandLine(options, program, os.environ, environment))
    if capture.name == "none":
        selection = Selection("none", "ranks")
        origins = {**origins, "ranks": "--profiler none"}
    elif selection.kind == "auto" and (why := cannot_look(job, capture)):
        selection = parse_ranks("0")
        origins = {**origins, "ranks": f"auto: {why}"}
        remark = f"--ranks auto captures rank 0 alone: {why}"
        capture = replace(capture, remarks=(*capture.remarks, remark))
    elif selection.kind == "auto":
        origins = {**origins, "arm": "--arm" if arguments.arm else "default"}
    armed = to_arm(arguments, selection, capture)
    for ranks in filter(None, (armed, selection)):
        ranks.check(job.world_size, job.size_source)
    for_agent = Plan(
        str(folder), selection, (window.first, window.end), capture.name, job.identity,
        arguments.step_on, capture.window_by, capture.emit_nvtx, capture.nsys,
        arguments.clock_probe, arguments.max_report_mb, arguments.stacks, arguments.hang_after,
        log_s=LOG_S,
        armed=armed,
        watch_s=watching_s(arguments, selection, job),
        reduction=reduction_for(arguments.reduce, arguments.keep_reports, capture.name),
    )  # fmt: skip
    added = {} if job.carries else environment
    again = ("clusterprof", verb, *arguments.given, RANKS, *without_values(options, job), "--",
             *program)  # fmt: skip
    return LaunchPlan(
        job, added, folder, selection, window, capture, origins, for_agent, arguments, again
    )


def default_run(job_id: str | None) -> Path:
    """Where a run goes for which the user names no run directory."""
    now = dt.datetime.now(dt.timezone.utc)
    return run_directory.default_path(Path("runs"), job_id, now).absolute()


def without_values(options: Sequence[str], job: Job) -> list[str]:
    """A launcher's options without the values of `--env`, which are kept nowhere."""
    values = job.over_ssh.environment if job.over_ssh is not None else {}
    names = {f"{name}={value}": name for name, value in values.items()}
    names.update({f"--env={word}": f"--env={name}" for word, name in [*names.items()]})
    return [names.get(word, word) for word in options]


def cannot_look(job: Job, capture: CapturePlan) -> str:
    """Why `--ranks auto` cannot capture a second window; "" where it can."""
    if job.over_ssh is not None:
        return "these hosts share no folder in which they could look for a second window"
    if capture.window_by == "cuda":
        return "--window-by cuda opens one window, at steps that are known before"
    return "the job has one rank" if job.world_size == 1 else ""


def watching_s(arguments: argparse.Namespace, selection: Selection, job: Job) -> int:
    """How often all ranks are looked at while the job runs, 0 for never. Raises UsageError."""
    usual_s = WATCH_S * (selection.kind == "auto")
    every_s = usual_s if arguments.watch is None else watch_seconds(arguments.watch)
    if every_s and job.over_ssh is not None:
        raise UsageError(
            "--watch needs a folder that all hosts share",
            "leave it out: flight recorders of these hosts are gathered once the job has ended",
        )
    if arguments.metrics and not every_s:
        raise UsageError("--metrics is written by looks at all ranks", "add --watch 10m")
    if arguments.metrics:
        _check_metrics(arguments.metrics)
    return every_s


def _check_metrics(file: Path) -> None:
    """Raise UsageError where no such file can be made."""
    folder = file.absolute().parent
    if file.is_dir():
        raise UsageError(f"--metrics {file} is a folder", f"name a file: {file}/clusterprof.prom")
    if not folder.is_dir():
        raise UsageError(
            f"--metrics {file}: there is no folder {folder}",
            "make it, or name a file in another one",
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--metrics {file}: {folder} cannot be written", "name another file")


def to_arm(
    arguments: argparse.Namespace, selection: Selection, capture: CapturePlan
) -> Selection | None:
    """The ranks that start under nsys to be captured later, or None. Raises UsageError."""
    is_chosen_later = selection.kind == "auto" and capture.name == "nsys"
    if arguments.arm and not is_chosen_later:
        raise UsageError(
            "--arm is for --ranks auto with nsys",
            "leave it out: ranks that are named start under the profiler that captures them",
        )
    if arguments.arm == "none" or not is_chosen_later:
        return None
    if arguments.arm is None:
        return parse_ranks("stages", pp=arguments.pp) if arguments.pp else parse_ranks("0")
    armed = parse_ranks(arguments.arm, pp=arguments.pp)
    if armed.kind == "auto":
        raise UsageError("--arm auto does not exist", f"expected none, or {RANKS_GRAMMAR}")
    return armed


def checked(arguments: argparse.Namespace) -> tuple[Selection, StepWindow]:
    """The ranks and the steps to profile, within limits. Raises UsageError."""
    sizes = {name: getattr(arguments, name) for name in ("pp", "tp", "cp", "dp")}
    selection = parse_ranks(arguments.ranks, **sizes)
    steps, limit, step_on = parse_steps(arguments.steps), arguments.max_steps, arguments.step_on
    if len(steps) > limit:
        raise UsageError(
            f"--steps {steps} has {len(steps)} steps, more than --max-steps {limit}",
            "a report grows with every step, and five to ten steps are enough: "
            f"try --steps {steps.first}:{steps.first + 10}",
            f"to profile them all: --max-steps {len(steps)}",
        )
    if step_on is not None and not all(step_on.partition(":")):
        raise UsageError(
            f"--step-on {step_on!r} is not a function",
            "write module:function or module:Class.method",
        )
    if arguments.fail_on and arguments.no_merge:
        raise UsageError(
            "--fail-on needs a merge, which --no-merge leaves out",
            "merge later: clusterprof merge RUN --fail-on CONDITION",
        )
    if arguments.max_report_mb < 0:
        raise UsageError(
            f"--max-report-mb {arguments.max_report_mb} is negative", "0 means no limit"
        )
    if arguments.hang_after < 0:
        raise UsageError(f"--hang-after {arguments.hang_after} is negative", "0 looks for no hang")
    return selection, steps


# -- a user's own runs that are there already, in one folder -------------------------------------
# What one of them found about a program decides how the next run of it is captured, where nothing
# else can: nsys must be there when a program starts, and before that nothing can be measured.

#: So many of the newest runs are looked through for one of the same program.
MOST = 50
#: All ranks run one program: so many of them tell what it launches.
TELLING = 2


def runs_in(parent: Path) -> list[tuple[Window, Manifest]]:
    """The user's own runs in a folder, the newest first; what is damaged is left out."""
    runs = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            run = Window.at(Path(entry.path))
            # A pipe, or a link of somebody else's, would be waited for or followed.
            with contextlib.suppress(OSError, ClusterprofError):
                status = run.directory.manifest.lstat()
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if ours and entry.is_dir(follow_symlinks=False):
                    manifest = run.directory.read_manifest()
                    runs.append((manifest.began, run, manifest))
    return [(run, manifest) for _, run, manifest in sorted(runs, key=lambda run: run[0])[::-1]]


class MergedRun(NamedTuple):
    """A merged run of the same program."""

    run: Window
    results: Results

    def __str__(self) -> str:
        return shortest(self.run.path)

    def was_launch_bound(self) -> bool:
        """Whether launches bind the steps, or steps stayed longer after nsys' window: nsys costs
        time for each launch until the program ends.
        """
        from clusterprof.analysis.findings.finding import LAUNCH_BOUND
        from clusterprof.analysis.findings.profiler_overhead import stay

        cost = self.results["capture"]
        by_nsys = any(rank["profiler"].startswith("nsys") for rank in self.results["ranks"])
        stays = by_nsys and cost is not None and stay(cost["profiled"])
        codes = {finding["code"] for finding in self.results["findings"]}
        return bool(stays) or LAUNCH_BOUND in codes

    def had_graphs(self) -> bool:
        """Whether a rank launched CUDA graphs in its window: of many the first ones tell."""
        from clusterprof.tables import SCHEMAS, launches_graphs, read_table

        for entry in self.results["ranks"][:TELLING]:
            file = self.run.tables(entry["rank"]) / "host_calls.parquet"
            with contextlib.suppress(ReportError):
                calls = read_table(file, SCHEMAS["host_calls"], ["name"])
                if launches_graphs(calls):
                    return True
        return False


def latest(parent: Path, program: Sequence[str]) -> MergedRun | None:
    """The latest merged run of this program in `parent`; None where its results cannot be read."""
    wanted = masking.suspected(program)
    for run, manifest in runs_in(parent)[:MOST]:
        again, result = manifest.whole, run.merged / paths.RESULTS
        if "--" in again and again[again.index("--") + 1 :] == wanted and result.is_file():
            from clusterprof.report import results_json

            with contextlib.suppress(ReportError):  # of another version
                return MergedRun(run, results_json.read(result))
            return None
    return None
