"""PyTorch's torchrun: its workers are the ranks, and they alone know which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterprof.errors import UsageError
from clusterprof.launchers.support.command_line import PYTHON, closed, last_value, whole_number
from clusterprof.launchers.support.job import Job

SUMMARY = "run a job under PyTorch's torchrun and profile some of its ranks"
PASSES_OPTIONS_TO = "torchrun"


def job(
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
) -> Job:
    """See `clusterprof.launchers.Launcher`."""
    size, size_source = world(options, environ)
    options = list(options)
    if PYTHON.fullmatch(program[0].rsplit("/", 1)[-1]) and "--no-python" not in options:
        # `-- python train.py`, as one writes it for srun: torchrun would put a python before it.
        if "-m" in options or "--module" in options:
            raise UsageError(
                f"torchrun -m takes a module, not {program[0]}",
                "write: clusterprof torchrun -m ... -- package.module arguments",
            )
        options.append("--no-python")
    return Job(
        launcher="torchrun",
        command=("torchrun", *options, *program),
        world_size=size,
        size_source=size_source,
        identity="torchrun",
        closed=closed(program),
    )


def world(options: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, str]:
    """How many workers there will be and what says so; (None, "") where only torchrun knows."""
    given_nodes = last_value(options, "--nnodes") or environ.get("PET_NNODES")
    given_each = last_value(options, "--nproc-per-node", "--nproc_per_node") or environ.get(
        "PET_NPROC_PER_NODE"
    )
    nodes, each = whole_number(given_nodes or "1"), whole_number(given_each or "1")
    if nodes is None or each is None:  # elastic (1:4), or one worker for each GPU
        return None, ""
    size_source = [f"--nproc-per-node={each}"] if given_each else ["torchrun's default"]
    if given_nodes:
        size_source.insert(0, f"--nnodes={nodes}")
    return nodes * each, " ".join(size_source)
