"""A program as it is: `accelerate launch`, `deepspeed`, a script, or the only rank itself."""

from __future__ import annotations

from clusterprof.agent.contracts.identity import ALONE
from clusterprof.errors import UsageError
from clusterprof.jobs import CommandLine, Job, mount_remarks, whose_ranks

SUMMARY = "run a program as it is (accelerate, deepspeed, a script) and profile some of its ranks"
PASSES_OPTIONS_TO = ""
EXAMPLES = (
    "-- accelerate launch --num_processes 4 train.py",
    "--profiler torch -- python spawns_its_ranks.py",
)


def job(line: CommandLine) -> Job:
    """The job that starts the program as it is; `run` itself has no options. Raises UsageError."""
    if line.options:
        raise UsageError(
            f"run has no option {line.options[0]}",
            "options of the program follow it: clusterprof run --ranks 0 -- accelerate launch ...",
        )
    identity = whose_ranks(line.program, ALONE)
    # What starts the processes tells their number to them alone: the world's size is not known.
    return Job(
        "run", tuple(line.program), world_size=None, size_source="", identity=identity,
        remarks=mount_remarks(line),
    )  # fmt: skip
