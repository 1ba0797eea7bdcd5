"""A program as it stands: `accelerate launch`, `deepspeed`, a script, or the only rank itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterprof.agent.contracts.identity import ALONE
from clusterprof.errors import UsageError
from clusterprof.launchers.support.command_line import (
    closed,
    say_unseen,
    unseen_places,
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
            "the program's own stand behind it: clusterprof run --ranks 0 -- accelerate launch ...",
        )
    return Job(
        launcher="run",
        command=tuple(program),
        # Whatever starts processes says how many only to them.
        world_size=None,
        told_by="",
        identity=whose_ranks(program, ALONE),
        remarks=tuple(say_unseen(unseen_places((), program, added))),
        closed=closed(program),
    )
