"""`clusterprof sbatch OPTIONS -- PROGRAM...`: fill a batch template, submit it and a merge job."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import clusterprof
from clusterprof import console, ranks
from clusterprof import run_directory as rundir
from clusterprof.console import say
from clusterprof.errors import LaunchError, UsageError
from clusterprof.launch import batch, planning
from clusterprof.launch.settings import SETTINGS, Settings, path
from clusterprof.launchers import executable, srun
from clusterprof.launchers.options import last_value, starts_ranks_itself

ONE_TASK = "one-task-per-gpu"
TORCHRUN = "torchrun-per-node"
MERGE = "merge"

#: What the batch job's own `clusterprof srun` is not told: the script says it in another way.
_NOT_FOR_THE_JOB = {
    "help", "run_dir", "dry_run", "no_merge", "debug", "template", "srun_arg", "merge_arg",
}  # fmt: skip

#: sbatch's options that say where a job may run and on whose account: the merge job's as well.
_SHARED = (
    ("-A", "--account"), ("-p", "--partition"), ("-q", "--qos"), ("-M", "--clusters"),
    ("-D", "--chdir"), ("--reservation",), ("--export",),
)  # fmt: skip

#: sbatch's options that take no value, or one only after `=`.
_NO_VALUE = {
    "--contiguous", "--disable-stdout-job-summary", "--exclusive", "--get-user-env", "--help",
    "--hold", "--ignore-pbs", "--kill-on-invalid-dep", "--nice", "--no-kill", "--no-requeue",
    "--overcommit", "--oversubscribe", "--parsable", "--propagate", "--quiet", "--reboot",
    "--requeue", "--share", "--spread-job", "--test-only", "--usage", "--use-min-nodes",
    "--verbose", "--version", "--wait",
}  # fmt: skip
_NO_VALUE_LETTERS = "hHkOQsuvVW"


@dataclass(frozen=True)
class Submission:
    """Everything that will be submitted, decided."""

    options: tuple[str, ...]
    script: str
    #: the run directory, or what stands before the job's id in its name
    run: str
    named_by_job: bool
    merge_options: tuple[str, ...] | None

    def run_of(self, job: str) -> str:
        """The run directory of the job with this id."""
        return self.run + job if self.named_by_job else self.run

    def merge_script(self, job: str) -> str:
        """The dependent job's script."""
        return batch.template(MERGE).fill(
            {"clusterprof": batch.array(_clusterprof()), "runs": batch.array([self.run_of(job)])}
        )

    def merge_line(self, job: str) -> list[str]:
        """The dependent job's command line."""
        return ["sbatch", "--parsable", f"--dependency=afterany:{job}", *(self.merge_options or ())]

    def shown(self) -> str:
        """What `--dry-run` prints: to be pasted, with the job's id in the place of JOBID."""
        parts = [_pasted(["sbatch", "--parsable", *self.options], self.script)]
        if self.merge_options is not None:
            parts.append(_pasted(self.merge_line("JOBID"), self.merge_script("JOBID")))
        return "\n".join(parts)


def parser(verb: str) -> argparse.ArgumentParser:
    """The launching verbs' options, and what only a submission has."""
    this = planning.parser(verb)
    this.usage = "clusterprof sbatch [--ranks R] [--steps A:B] [sbatch OPTION...] -- PROGRAM..."
    this.description = (
        "Submit PROGRAM as a batch job whose chosen ranks are captured, and a second job that "
        "merges the reports when the first has ended, however it ended. PROGRAM is what you would "
        "give srun, one task for each rank, or a torchrun line, one for each node. Options that "
        "are not listed here are sbatch's and reach it as they stand."
    )
    job = this.add_argument_group("the batch job")
    job.add_argument(
        "--template",
        metavar="NAME|FILE",
        help=f"the script to fill: {', '.join(batch.templates())}, or a file with the same marked "
        f"block (default {ONE_TASK}, for torchrun {TORCHRUN})",
    )
    job.add_argument(
        "--srun-arg", action="append", default=[], metavar="ARG",
        help="a further argument for srun inside the job",
    )  # fmt: skip
    job.add_argument(
        "--merge-arg", action="append", default=[], metavar="ARG",
        help="a further argument for sbatch, for the merge job only",
    )  # fmt: skip
    return this


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Submit, and tell the jobs' ids and the run directory; returns sbatch's own status."""
    this = parser(verb)
    arguments, options = this.parse_known_args(list(own))
    if not program:
        raise UsageError(
            f"there is no {'--' if program is None else 'program'}",
            "write: clusterprof sbatch [sbatch OPTION...] -- python train.py",
        )
    submission = decide(this, arguments, options, program)
    if arguments.dry_run:
        print(submission.shown())
        return 0
    return submit(submission, quiet="--parsable" in options)


def decide(
    this: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    options: Sequence[str],
    program: Sequence[str],
) -> Submission:
    """Understand a command line; nothing is written or run. Raises UsageError, RunDirectoryError.

    Whatever can be found wrong is found now, and not after a night in the queue.
    """
    refuse_strays(options)
    settings = Settings(arguments)
    told = launcher_options(this, arguments, settings)
    selection = ranks.parse(
        str(settings.get("ranks")),
        pp=arguments.pp, tp=arguments.tp, cp=arguments.cp, dp=arguments.dp,
    )  # fmt: skip
    planning.checked_window(arguments, settings)
    planning.clock_evidence(arguments)
    planning.limits(arguments)

    options = list(options)
    name, words = fitting(arguments.template, program)
    chosen = batch.template(name)
    inner = starts_ranks_itself(program)
    if name == ONE_TASK:
        if inner and last_value(options, "-n", "--ntasks", "--ntasks-per-node") is None:
            options.append("--ntasks-per-node=1")
        if not inner:
            selection.check(*srun.ranks(options, program, {}))

    array = last_value(options, "-a", "--array") is not None
    run, run_text = run_directory(arguments, settings, array)
    # The tasks of an array end each at its own time: each merges by itself, in its own job.
    merging = not arguments.no_merge and not array
    if arguments.no_merge or merging:
        told.append("--no-merge")
    script = chosen.fill(
        {
            "clusterprof": batch.array(_clusterprof()),
            "run": run_text,
            "options": batch.array(told),
            "srun_options": batch.array(arguments.srun_arg),
            "program": batch.array(words),
            "folder": batch.quoted(clusterprof.__path__[0]),
        }
    )
    merge_options = (*shared(options), *arguments.merge_arg) if merging else None
    by_job = settings.origins["run_dir"] == "default"
    return Submission(tuple(options), script, run, by_job, merge_options)


def refuse_strays(options: Sequence[str]) -> None:
    """A word that belongs to no option would be sbatch's script, in the place of ours."""
    for place, word in enumerate(options):
        if word.split("=")[0] == "--wrap":
            raise UsageError("--wrap and a program after -- exclude each other", "leave out --wrap")
        before = options[place - 1] if place else ""
        if not word.startswith("-") and not _takes_next(before):
            raise UsageError(
                f"{word!r} belongs to no option",
                "sbatch's options stand before --, the program after it: "
                f"clusterprof sbatch ... -- {word}",
            )


def _takes_next(option: str) -> bool:
    """Whether sbatch may read the next word as the value of this one."""
    if option.startswith("--"):
        return "=" not in option and option not in _NO_VALUE
    letters = option[1:].lstrip(_NO_VALUE_LETTERS) if option.startswith("-") else ""
    return len(letters) == 1


def launcher_options(
    this: argparse.ArgumentParser, arguments: argparse.Namespace, settings: Settings
) -> list[str]:
    """What was asked of clusterprof, as options of the job's own `clusterprof srun`.

    Also what CLUSTERPROF_* ask here: the job may have another environment, and its script
    shall tell the whole.
    """
    words = []
    for action in this._actions:
        name = action.dest
        if name in _NOT_FOR_THE_JOB:
            continue
        value = getattr(arguments, name)
        if name in SETTINGS:
            value = settings.get(name)
            if value is None or (settings.origins[name] == "default" and name == "profiler"):
                continue
        elif value == action.default:
            continue
        flag = action.option_strings[-1]
        if value is True:
            words.append(flag)
        else:
            each = value if isinstance(value, list) else [value]
            words += [f"{flag}={one}" for one in each]
    return words


def fitting(wanted: str | None, program: Sequence[str]) -> tuple[str, list[str]]:
    """The template's name, and the program as it takes it: without the word `torchrun`."""
    words = list(program)
    behind = words
    if words[0].rsplit("/", 1)[-1] == "torchrun":
        behind = words[1:]
    elif words[1:3] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        behind = words[3:]
    name = wanted or (TORCHRUN if behind is not words else ONE_TASK)
    if name == TORCHRUN and not behind:
        raise UsageError("torchrun has no program", "write: clusterprof sbatch ... -- train.py")
    return name, (behind if name == TORCHRUN else words)


def run_directory(
    arguments: argparse.Namespace, settings: Settings, array: bool
) -> tuple[str, str]:
    """The run directory, and the bash text that makes it in the job. Raises RunDirectoryError."""
    wanted = settings.get("run_dir")
    if wanted is None:
        now = dt.datetime.now(dt.timezone.utc)
        stem = str(rundir.default_path(Path("runs"), "-", now).absolute())[:-1]
        return stem, batch.quoted(stem) + "$SLURM_JOB_ID"
    if array:
        raise UsageError(
            "the tasks of an array need a run directory each", "leave out --run-dir with --array"
        )
    folder = path(wanted).absolute()
    rundir.check_free(folder, force=arguments.force)
    return str(folder), batch.quoted(str(folder))


def shared(options: Sequence[str]) -> list[str]:
    """Of sbatch's options those that the merge job needs too."""
    found = [(names[-1], last_value(options, *names)) for names in _SHARED]
    return [f"{name}={value}" for name, value in found if value is not None]


def submit(submission: Submission, *, quiet: bool) -> int:
    """Hand both jobs to Slurm. Raises LaunchError where there is no sbatch.

    With `quiet` (the user's own --parsable) stdout has the job's id alone, as sbatch's would.
    """
    status, job = sbatch(["sbatch", "--parsable", *submission.options], submission.script)
    if not job:  # --test-only, or a refusal, which sbatch has told
        return status
    run = submission.run_of(job)
    lines = [f"job {job}"]
    if submission.merge_options is not None:
        failed, merge = sbatch(submission.merge_line(job), submission.merge_script(job))
        if failed or not merge:
            # The training is queued, which is what matters: this status is sbatch's for it.
            say(f"the merge job was refused; once job {job} has ended: "
                f"{shlex.join(['clusterprof', 'collect', run])}")  # fmt: skip
        else:
            lines.append(f"merge {merge}")
    arrayed = last_value(submission.options, "-a", "--array") is not None
    lines.append(f"run {submission.run}JOBID" if arrayed else f"run {run}")
    if quiet:
        for line in lines[1:]:
            say(line)
    with console.harmless():  # it is submitted
        print(job if quiet else "\n".join(lines), flush=True)
    return status


def sbatch(command: Sequence[str], script: str) -> tuple[int, str]:
    """Submit a script by sbatch's stdin; its status and the job's id, "" where there is none."""
    program = executable.find("sbatch")
    try:
        done = subprocess.run(
            [program, *command[1:]], input=os.fsencode(script), stdout=subprocess.PIPE, check=False
        )
    except OSError as error:
        raise LaunchError("sbatch could not be started", str(error)) from None
    said = done.stdout.decode(errors="replace")
    identity = said.strip().split(";")[0]
    if not identity.isdigit():
        sys.stderr.write(said)
        identity = ""
    return done.returncode, identity


def _clusterprof() -> list[str]:
    """This very clusterprof, which the job may not have on its PATH."""
    beside = Path(sys.executable).parent / "clusterprof"
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "clusterprof"]


def _pasted(command: Sequence[str], script: str) -> str:
    """A command and its stdin, as a shell takes them."""
    mark = "SCRIPT"
    while mark in script.split("\n"):
        mark += "_"
    return f"{shlex.join(command)} <<'{mark}'\n{script.rstrip()}\n{mark}"
