"""Slurm batch jobs: fill a template's marked block from one command line, submit it and its merge.

The templates run as they are; a script made of one differs from it in the block alone. Words are
quoted for bash, so that none of them is ever read as a command.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import clusterprof
from clusterprof import console, jobs, run_directory
from clusterprof.arguments import path
from clusterprof.console import say
from clusterprof.errors import LaunchError, UsageError
from clusterprof.launch.planning import checked, default_run
from clusterprof.launch.settings import as_words, settle
from clusterprof.launchers import srun

BEGIN = "# >>> filled in by `clusterprof sbatch` >>>"
END = "# <<< filled in by `clusterprof sbatch` <<<"
ONE_TASK = "one-task-per-gpu"
TORCHRUN = "torchrun-per-node"

_PACKAGE = Path(__file__).resolve().parents[1]
#: a wheel holds `slurm/` of the source tree inside the package
_IN_WHEEL = _PACKAGE / "slurm"
_TEMPLATES = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "slurm"

#: options that the batch job's own `clusterprof srun` does not get: the script has its own way
_NOT_FOR_THE_JOB = {
    "help", "run_dir", "dry_run", "no_merge", "debug", "template", "srun_arg", "merge_arg",
    "merge_nodes",
}  # fmt: skip

#: sbatch's options on where a job may run and on whose account: the merge job gets them too
_MERGE_TOO = (
    ("-A", "--account"), ("-p", "--partition"), ("-q", "--qos"), ("-M", "--clusters"),
    ("-D", "--chdir"), ("--reservation",), ("--export",),
)  # fmt: skip

#: Tasks on each node of a merge over several nodes. Each has two processors, as a merge on one node
#: has, so that they take eight: no node with GPUs has fewer.
MERGE_TASKS = 4

#: sbatch's options that take no value, or only one after `=`
_NO_VALUE = {
    "--contiguous", "--disable-stdout-job-summary", "--exclusive", "--get-user-env", "--help",
    "--hold", "--ignore-pbs", "--kill-on-invalid-dep", "--nice", "--no-kill", "--no-requeue",
    "--overcommit", "--oversubscribe", "--parsable", "--propagate", "--quiet", "--reboot",
    "--requeue", "--share", "--spread-job", "--test-only", "--usage", "--use-min-nodes",
    "--verbose", "--version", "--wait",
}  # fmt: skip
_NO_VALUE_LETTERS = "hHkOQsuvVW"


def templates() -> list[str]:
    """The names of the templates that come with clusterprof."""
    return sorted(path.stem for path in _TEMPLATES.glob("*.sbatch"))


def filled(template: str, values: Mapping[str, str]) -> str:
    """The script of a template, by its name or a file, with `values` assigned in its block.

    They are bash, see `bash_array` and `quoted`; those that the block does not assign are left out.
    Raises UsageError where there is no such template, or it has no block.
    """
    file = _TEMPLATES / f"{template}.sbatch"
    if "/" in template or not file.is_file():
        file = Path(template).expanduser()
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(
            f"there is no batch template {template}: {error.strerror}",
            f"name a file, or one of {', '.join(templates())}",
        ) from None
    before, begin, rest = text.partition(BEGIN + "\n")
    block, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(
            f"the template {template} has no block to fill",
            f'it needs a line "{BEGIN}"',
            f'and a line "{END}", with program=(...) between them',
        )
    lines = [
        f"{name}={values[name]}" if (name := line.partition("=")[0]) in values else line
        for line in block.splitlines()
    ]
    return "\n".join([before + BEGIN, *lines, END + after])


def quoted(word: str) -> str:
    """`word` for bash, its control characters as escapes: sbatch refuses carriage returns."""
    if not re.search(r"[\x00-\x1f\x7f]", word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + re.sub(r"[\x00-\x1f\x7f]", lambda c: f"\\{ord(c[0]):03o}", escaped) + "'"


def bash_array(words: Sequence[str]) -> str:
    """A bash array of `words`."""
    return "(" + " ".join(map(quoted, words)) + ")"


@dataclass(frozen=True)
class Submission:
    """Everything that will be submitted, decided."""

    options: Sequence[str]
    script: str
    #: the run directory, or what stands before the job's id in its name
    run: str
    named_by_job: bool
    #: None where each task merges in its own job
    merge_options: Sequence[str] | None

    def run_of(self, job: str) -> str:
        """The run directory of the job with this id."""
        return self.run + job if self.named_by_job else self.run

    def merge(self, job: str) -> tuple[list[str], str]:
        """The command line and the script of the job that merges."""
        line = ["sbatch", "--parsable", f"--dependency=afterany:{job}", *(self.merge_options or ())]
        runs = bash_array([self.run_of(job)])
        return line, filled("merge", {"clusterprof": bash_array(_clusterprof()), "runs": runs})

    def shown(self) -> str:
        """What `--dry-run` prints: to be pasted, with the job's id instead of JOBID."""
        batches = [(["sbatch", "--parsable", *self.options], self.script)]
        batches += [] if self.merge_options is None else [self.merge("JOBID")]
        lines = []
        for command, script in batches:
            mark = "SCRIPT"
            while mark in script.split("\n"):
                mark += "_"
            lines.append(f"{shlex.join(command)} <<'{mark}'\n{script.rstrip()}\n{mark}")
        return "\n".join(lines)


def decide(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, options: Sequence[str],
    program: Sequence[str], own: Sequence[str] = (),
) -> Submission:  # fmt: skip
    """Understand a command line, `own` as it was given; nothing is written or run.

    Raises UsageError, RunDirectoryError. Errors are found here, not after hours in the queue.
    """
    refuse_strays(options)
    if arguments.fail_on:
        raise UsageError(
            "--fail-on: the merge of a batch job runs after it, and nothing waits for its status",
            "check the run once it is merged: clusterprof merge RUN --fail-on CONDITION",
        )
    if arguments.gpu_hour:
        raise UsageError(
            "--gpu-hour: a batch job prints no verdict",
            "once it is merged: clusterprof report RUN --gpu-hour PRICE",
        )
    origins = settle(arguments, parser, own, "sbatch")
    # Settings are written out, since the job may have another environment.
    by_default = {"profiler"} if origins["profiler"] == "default" else set()
    launching = as_words(parser, arguments, _NOT_FOR_THE_JOB | by_default)
    selection, _ = checked(arguments)

    options = list(options)
    name, words = fitting(arguments.template, program)
    tasks = jobs.last_value(options, "-n", "--ntasks", "--ntasks-per-node")
    if name == ONE_TASK and not jobs.starts_ranks_itself(program):
        selection.check(*srun.ranks(options, program, {}))
    elif name == ONE_TASK and tasks is None:
        options.append("--ntasks-per-node=1")

    array = jobs.last_value(options, "-a", "--array") is not None
    by_job = arguments.run_dir is None
    run = run_path(arguments, array)
    # The tasks of an array end at different times: each merges in its own job.
    merging = not arguments.no_merge and not array
    if arguments.no_merge or merging:
        launching.append("--no-merge")
    values = {
        "clusterprof": bash_array(_clusterprof()),
        "run": quoted(run) + ("$SLURM_JOB_ID" if by_job else ""),
        "options": bash_array(launching),
        "srun_options": bash_array(arguments.srun_arg),
        "program": bash_array(words),
        "folder": quoted(clusterprof.__path__[0]),
    }
    for_merging = [*for_merge(options, arguments.merge_nodes), *arguments.merge_arg]
    merge_options = for_merging if merging else None
    return Submission(options, filled(name, values), run, by_job, merge_options)


def for_merge(options: Sequence[str], nodes: int) -> list[str]:
    """The options of the job that merges on so many nodes; `options` are the other job's."""
    given = {names[-1]: jobs.last_value(options, *names) for names in _MERGE_TOO}
    too = [f"{name}={value}" for name, value in given.items() if value is not None]
    if nodes == 1:
        return too
    # --no-kill: with a lost node MPI ends its tasks, and the script merges by itself
    return [*too, "--no-kill", f"--nodes={nodes}", f"--ntasks={nodes * MERGE_TASKS}",
            f"--ntasks-per-node={MERGE_TASKS}"]  # fmt: skip


def refuse_strays(options: Sequence[str]) -> None:
    """Raise UsageError for a word that sbatch would take for the script, instead of ours."""
    for before, word in itertools.pairwise(["", *options]):
        if word.split("=")[0] == "--wrap":
            raise UsageError("--wrap excludes a program after --", "leave out --wrap")
        # Whether sbatch may read the word as the value of the option before it.
        letters = before[1:].lstrip(_NO_VALUE_LETTERS) if before.startswith("-") else ""
        is_value = len(letters) == 1
        if before.startswith("--"):
            is_value = "=" not in before and before not in _NO_VALUE
        if not word.startswith("-") and not is_value:
            raise UsageError(
                f"{word!r} is neither an option nor the value of one",
                f"options go before --, the program after it: clusterprof sbatch ... -- {word}",
            )


def fitting(wanted: str | None, program: Sequence[str]) -> tuple[str, list[str]]:
    """The template's name, and the program as it takes it: without the word `torchrun`."""
    words = inner = list(program)
    if jobs.file_name(words[0]) == "torchrun":
        inner = words[1:]
    elif words[1:3] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        inner = words[3:]
    name = wanted or (TORCHRUN if inner is not words else ONE_TASK)
    if name == TORCHRUN and not inner:
        raise UsageError("torchrun has no program", "write: clusterprof sbatch ... -- train.py")
    return name, (inner if name == TORCHRUN else words)


def run_path(arguments: argparse.Namespace, array: bool) -> str:
    """The run directory, without the job's id at its end where that names it. Raises UsageError,
    RunDirectoryError.
    """
    if arguments.run_dir is None:
        return str(default_run("-"))[:-1]
    if array:
        raise UsageError(
            "each task of an array needs its own run directory", "leave out --run-dir with --array"
        )
    folder = path(arguments.run_dir).absolute()
    run_directory.check_free(folder, force=arguments.force)
    return str(folder)


def submit(submission: Submission, *, quiet: bool) -> int:
    """Submit both jobs to Slurm. Raises LaunchError where there is no sbatch.

    With `quiet` (the user's own --parsable) stdout has the job's id alone, as sbatch's would.
    """
    status, job = sbatch(["sbatch", "--parsable", *submission.options], submission.script)
    if not job:  # --test-only, or a refusal, which sbatch has printed
        return status
    run = submission.run_of(job)
    lines = [f"job {job}"]
    if submission.merge_options is not None:
        failed, merge = sbatch(*submission.merge(job))
        if failed or not merge:
            # The training is queued: the status returned is sbatch's for it.
            collect = shlex.join(["clusterprof", "collect", run])
            say(f"the merge job was refused; once job {job} has ended: {collect}")
        else:
            lines.append(f"merge {merge}")
    arrayed = jobs.last_value(submission.options, "-a", "--array") is not None
    lines.append(f"run {submission.run}JOBID" if arrayed else f"run {run}")
    for line in lines[1:] if quiet else ():
        say(line)
    with console.harmless():  # it is submitted
        print(job if quiet else "\n".join(lines), flush=True)
    return status


def sbatch(command: Sequence[str], script: str) -> tuple[int, str]:
    """Submit a script by sbatch's stdin; its status and the job's id, "" where there is none."""
    program = jobs.find_program("sbatch")
    try:
        done = subprocess.run(
            [program, *command[1:]], input=os.fsencode(script), stdout=subprocess.PIPE, check=False
        )
    except OSError as error:
        raise LaunchError("sbatch could not be started", str(error)) from None
    output = done.stdout.decode(errors="replace")
    identity = output.strip().split(";")[0]
    if not identity.isdigit():
        sys.stderr.write(output)
        identity = ""
    return done.returncode, identity


def _clusterprof() -> list[str]:
    """This clusterprof, which the job may not have on its PATH."""
    beside = Path(sys.executable).parent / "clusterprof"
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "clusterprof"]
