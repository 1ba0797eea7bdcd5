"""Slurm's srun: one task is one rank, unless the program is torchrun or similar."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from clusterprof import jobs, masking
from clusterprof.errors import UsageError
from clusterprof.jobs import CommandLine, Job

SUMMARY = "run a job under Slurm's srun and profile some of its ranks"
PASSES_OPTIONS_TO = "srun"
EXAMPLES = (
    "-N2 --ntasks-per-node=8 --gpus-per-node=8 -- python train.py",
    "-N2 --gpus-per-node=8 -- torchrun --nproc-per-node=8 train.py",
    "--ranks 0,8 --steps 20:30 -N2 ... -- python train.py",
    "--dry-run -N2 ... -- python train.py",
)

#: Puts our two variables into a task's environment and becomes what follows. It is always the same;
#: our folder comes before whatever PYTHONPATH srun gives the task (which of two it gives depends
#: on its version).
_CARRY = (
    "PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH} CLUSTERPROF_PLAN=$2; "
    'export PYTHONPATH CLUSTERPROF_PLAN; shift 2; exec "$@"'
)


def job(line: CommandLine) -> Job:
    """The job that srun starts for a command line: its options, then the program.

    The variables of `line.added` must reach every rank; the first folder of its PYTHONPATH is ours.
    Where srun's --export withholds them sh sets them inside the command, and the job `carries` them
    itself. Raises UsageError where several programs would each need that.
    """
    options, program, environ, added = line.options, line.program, line.environ, line.added
    remarks, carrier = jobs.mount_remarks(line), []
    for component in components(options, program):
        # srun passes only what --export names: set our two variables in the command.
        exported = jobs.last_value(component, "--export") or environ.get("SLURM_EXPORT_ENV")
        names = (exported or "ALL").split(",")
        if "ALL" in names and not any(name.startswith("PYTHONPATH=") for name in names):
            continue
        if ":" in program or "--multi-prog" in options:
            raise UsageError(
                "srun --export withholds clusterprof's variables from several programs",
                "add ALL to it, and no PYTHONPATH=",
            )
        inject = added["PYTHONPATH"].split(":", 1)[0]
        masking.ours.add(_CARRY)  # no secret: shown as it is
        carrier = ["/bin/sh", "-c", _CARRY, "clusterprof", inject, added["CLUSTERPROF_PLAN"]]
        remarks += ("srun --export withholds clusterprof's variables: sh sets them",)
    return Job(
        "srun",
        ("srun", *options, *carrier, *program),
        *ranks(options, program, environ),
        # whose variables tell a process its rank
        identity=jobs.whose_ranks(program, "srun"),
        remarks=remarks,
        carries=bool(carrier),
    )


def ranks(
    options: Sequence[str], program: Sequence[str], environ: Mapping[str, str]
) -> tuple[int | None, str]:
    """How many ranks there will be and what says so; (None, "") where that cannot be told here."""
    if jobs.starts_ranks_itself(program):
        return None, ""
    parts = [world(component, environ) for component in components(options, program)]
    sizes = [size for size, _ in parts if size is not None]
    per_node = jobs.last_value(options, "--ntasks-per-node")
    tasks = jobs.last_value(options, "-n", "--ntasks")
    nodes = jobs.last_value(options, "-N", "--nodes") or environ.get("SLURM_NNODES")
    one_a_node = per_node == "1" or (per_node is None and tasks is not None and tasks == nodes)
    # A script that srun starts once on each node may well end in a torchrun.
    may_be_torchrun = one_a_node and not jobs.is_python(program[0])
    if len(sizes) < len(parts) or may_be_torchrun:
        return None, ""
    return sum(sizes), " : ".join(source for _, source in parts)


def components(options: Sequence[str], program: Sequence[str]) -> list[list[str]]:
    """The options of each component of a heterogeneous job: `-n1 -- A : -n2 B` has two."""
    parts = [list(options)]
    for words in jobs.further(program):
        # The program is the first word that is no option, nor may be the value of one.
        pairs = itertools.pairwise(["", *words])
        own = itertools.takewhile(lambda pair: any(word.startswith("-") for word in pair), pairs)
        named = [word for _, word in own]
        if named and jobs.is_python(named[-1]):
            named.pop()
        parts.append(named)
    return parts


def world(options: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, str]:
    """How many tasks there will be and what says so; (None, "") where only srun knows."""
    if ":" in options:  # a heterogeneous job: each component has its own numbers
        return None, ""
    value, number = jobs.last_value, jobs.whole_number
    tasks = number(value(options, "-n", "--ntasks"))
    per_node = number(value(options, "--ntasks-per-node"))
    given_nodes = value(options, "-N", "--nodes")
    if tasks is not None:
        return tasks, f"-n{tasks}"
    if per_node is not None:
        nodes = number(given_nodes)
        nodes = number(environ.get("SLURM_NNODES")) if nodes is None else nodes
        source = f"-N{nodes} --ntasks-per-node={per_node}"
        return (nodes * per_node, source) if nodes else (None, "")
    inherited = number(environ.get("SLURM_NTASKS")) if given_nodes is None else None
    return inherited, "" if inherited is None else "SLURM_NTASKS"
