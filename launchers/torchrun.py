"""PyTorch's torchrun: its workers are the ranks, and they alone know which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterprof.errors import UsageError
from clusterprof.jobs import CommandLine, Job, is_python, last_value, whole_number

SUMMARY = "run a job under PyTorch's torchrun and profile some of its ranks"
PASSES_OPTIONS_TO = "torchrun"
EXAMPLES = (
    "--nproc-per-node 4 -- train.py",
    "--ranks 0,2 --steps 20:30 --nproc-per-node 4 -- train.py",
    "--dry-run --nproc-per-node 4 -- train.py",
)


def job(line: CommandLine) -> Job:
    """See `clusterprof.launchers.Launcher`."""
    options = list(line.options)
    if is_python(line.program[0]) and "--no-python" not in options:
        # `-- python train.py`, as one writes it for srun: torchrun would put a python before it.
        if "-m" in options or "--module" in options:
            raise UsageError(
                f"torchrun -m takes a module, not {line.program[0]}",
                "write: clusterprof torchrun -m ... -- package.module arguments",
            )
        options.append("--no-python")
    size = world(line.options, line.environ)
    return Job("torchrun", ("torchrun", *options, *line.program), *size, identity="torchrun")


def given(options: Sequence[str], name: str) -> str | None:
    """The value that torchrun's options give to one of them; None where they do not."""
    return last_value(options, f"--{name}", f"--{name.replace('-', '_')}")


def world(options: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, str]:
    """How many workers there will be and what says so; (None, "") where only torchrun knows."""
    given_nodes = given(options, "nnodes") or environ.get("PET_NNODES")
    given_each = given(options, "nproc-per-node") or environ.get("PET_NPROC_PER_NODE")
    nodes, per_node = whole_number(given_nodes or "1"), whole_number(given_each or "1")
    if nodes is None or per_node is None:  # elastic (1:4), or one worker for each GPU
        return None, ""
    size_source = f"--nproc-per-node={per_node}" if given_each else "torchrun's default"
    return nodes * per_node, f"--nnodes={nodes} {size_source}" if given_nodes else size_source
