"""Slurm's srun: one task is one rank, unless the program is torchrun or similar."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from clusterprof.errors import UsageError
from clusterprof.launchers.support.command_line import (
    PYTHON,
    closed,
    further,
    last_value,
    mount_remark,
    starts_ranks_itself,
    unmounted_folders,
    whole_number,
    whose_ranks,
)
from clusterprof.launchers.support.job import Job

SUMMARY = "run a job under Slurm's srun and profile some of its ranks"
PASSES_OPTIONS_TO = "srun"

_CARRY = (
    "PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH} CLUSTERPROF_PLAN=$2; "
    'export PYTHONPATH CLUSTERPROF_PLAN; shift 2; exec "$@"'
)


def job(
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
) -> Job:
    """See `clusterprof.launchers.Launcher`."""
    size, size_source = ranks(options, program, environ)
    remarks = mount_remark(unmounted_folders(options, program, added))
    command, carries = list(program), False
    if any(not environment_passes(part, environ) for part in components(options, program)):
        if ":" in program or "--multi-prog" in options:
            raise UsageError(
                "srun --export withholds clusterprof's variables from several programs",
                "add ALL to it, and no PYTHONPATH=",
            )
        # srun passes only what --export names: set our two variables in the command.
        command, carries = [*carrier(added), *program], True
        remarks.append("srun --export withholds clusterprof's variables: sh sets them")
    return Job(
        launcher="srun",
        command=("srun", *options, *command),
        world_size=size,
        size_source=size_source,
        identity=whose_ranks(program, "srun"),
        remarks=tuple(remarks),
        closed=closed(program),
        carries=carries,
    )


def ranks(
    options: Sequence[str], program: Sequence[str], environ: Mapping[str, str]
) -> tuple[int | None, str]:
    """How many ranks there will be and what says so; (None, "") where that cannot be told here."""
    if starts_ranks_itself(program):
        return None, ""
    parts = [world(part, environ) for part in components(options, program)]
    sizes = [size for size, _ in parts if size is not None]
    if len(sizes) < len(parts):
        return None, ""
    if not PYTHON.fullmatch(program[0].rsplit("/", 1)[-1]) and one_task_a_node(options, environ):
        # A script that srun starts once on each node may well end in a torchrun.
        return None, ""
    return sum(sizes), " : ".join(source for _, source in parts)


def components(options: Sequence[str], program: Sequence[str]) -> list[list[str]]:
    """The options of each component of a heterogeneous job: `-n1 -- A : -n2 B` has two."""
    parts = [list(options)]
    for words in further(program):
        before = ["", *words]
        # The program is the first word that is no option, nor may be the value of one.
        own = itertools.takewhile(
            lambda pair: pair[1].startswith("-") or pair[0].startswith("-"),
            zip(before, words, strict=False),
        )
        named = [word for _, word in own]
        if named and PYTHON.fullmatch(named[-1].rsplit("/", 1)[-1]):
            named.pop()
        parts.append(named)
    return parts


def one_task_a_node(options: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the options start one task on each node, as for another launcher there."""
    per_node = last_value(options, "--ntasks-per-node")
    if per_node is not None:
        return per_node == "1"
    tasks = last_value(options, "-n", "--ntasks")
    nodes = last_value(options, "-N", "--nodes") or environ.get("SLURM_NNODES")
    return tasks is not None and tasks == nodes


def world(options: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, str]:
    """How many tasks there will be and what says so; (None, "") where only srun knows."""
    if ":" in options:  # a heterogeneous job: each component has its own numbers
        return None, ""
    tasks = whole_number(last_value(options, "-n", "--ntasks"))
    if tasks is not None:
        return tasks, f"-n{tasks}"
    nodes = whole_number(last_value(options, "-N", "--nodes"))
    per_node = whole_number(last_value(options, "--ntasks-per-node"))
    if nodes is None:
        nodes = whole_number(environ.get("SLURM_NNODES"))
    if per_node is not None:
        return (
            (nodes * per_node, f"-N{nodes} --ntasks-per-node={per_node}") if nodes else (None, "")
        )
    inherited = whole_number(environ.get("SLURM_NTASKS"))
    if inherited is not None and last_value(options, "-N", "--nodes") is None:
        return inherited, "SLURM_NTASKS"
    return None, ""


def environment_passes(options: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether srun passes the whole environment, with our variables, to the tasks."""
    named = exported(options, environ)
    return "ALL" in named and not any(each.startswith("PYTHONPATH=") for each in named)


def exported(options: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What --export names."""
    names = last_value(options, "--export") or environ.get("SLURM_EXPORT_ENV") or "ALL"
    return names.split(",")


def carrier(added: Mapping[str, str]) -> list[str]:
    """A program that puts our two variables into a task's environment and becomes what follows.

    Its script is always the same; our folder comes before whatever PYTHONPATH srun gives the task
    (which of two it gives depends on its version).
    """
    inject = added["PYTHONPATH"].split(":", 1)[0]
    return ["/bin/sh", "-c", _CARRY, "clusterprof", inject, added["CLUSTERPROF_PLAN"]]
