"""A program as it is: `accelerate launch`, `deepspeed`, a script, or the only rank itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterprof.agent.contracts.identity import ALONE
from clusterprof.errors import UsageError
from clusterprof.launchers.support.command_line import (
    closed,
    mount_remark,
    unmounted_folders,
    whose_ranks,
)
from clusterprof.launchers.support.job import Job

SUMMARY = "run a program as it is (accelerate, deepspeed, a script) and profile some of its ranks"
PASSES_OPTIONS_TO = ""


def job(
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
) -> Job:
    """See `clusterprof.launchers.Launcher`."""
    if options:
        raise UsageError(
            f"run has no option {options[0]}",
            "options of the program follow it: clusterprof run --ranks 0 -- accelerate launch ...",
        )
    return Job(
        launcher="run",
        command=tuple(program),
        # What starts the processes tells their number to them alone.
        world_size=None,
        size_source="",
        identity=whose_ranks(program, ALONE),
        remarks=tuple(mount_remark(unmounted_folders((), program, added))),
        closed=closed(program),
    )
