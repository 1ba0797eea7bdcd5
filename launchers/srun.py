"""Slurm's srun: one task is one rank, unless the program is torchrun or one of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterprof.launchers.options import last_value, starts_ranks_itself, whole_number
from clusterprof.plan import Job


def job(
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
) -> Job:
    """See `clusterprof.launchers.Launcher`."""
    inner = starts_ranks_itself(program)
    size, told_by = (None, "") if inner else world(options, environ)
    remarks = []
    command = list(program)
    if not environment_passes(options, environ):
        # srun hands over only what --export names: carry our two variables in the command.
        command = ["env", *(f"{name}={value}" for name, value in added.items()), *program]
        remarks.append("srun's --export leaves out the environment: env carries clusterprof's")
    return Job(
        launcher="srun",
        command=("srun", *options, *command),
        world_size=size,
        told_by=told_by,
        identity="torchrun" if inner else "srun",
        remarks=tuple(remarks),
    )


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
    """Whether srun hands the whole environment to the tasks."""
    export = last_value(options, "--export") or environ.get("SLURM_EXPORT_ENV") or "ALL"
    return "ALL" in export.split(",")
