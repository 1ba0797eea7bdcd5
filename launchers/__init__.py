"""The launchers: one small module each, loaded when its verb is used.

A launcher turns the user's own command line into a `launchers.job.Job`: what to run, how
many ranks there will be, and which variables will tell a process its rank. It runs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from clusterprof.launchers.job import Job

#: verb -> module; `import clusterprof.launchers` loads none of them
NAMES = ("srun", "torchrun", "mpirun", "ssh", "run")


class Launcher(Protocol):
    """What each module of this package provides."""

    def job(
        self,
        options: Sequence[str],
        program: Sequence[str],
        environ: Mapping[str, str],
        added: Mapping[str, str],
    ) -> Job:
        """The job that `LAUNCHER options... program...` starts.

        `options` are the launcher's own, verbatim; `added` is the environment that must reach
        every rank. Raises UsageError where the two cannot work together.
        """


def load(name: str) -> Launcher:
    """The launcher called `name`, one of `NAMES`."""
    return cast("Launcher", importlib.import_module(f"clusterprof.launchers.{name}"))
