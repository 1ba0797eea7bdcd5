"""clusterprof: which rank delays the others, why, and which communication is exposed."""

from __future__ import annotations

import sys

__version__ = "0.1.0.dev0"

#: not typing's, whose import would take longer than all that is here
TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from clusterprof.api import Run


def step() -> None:
    """Say that one training step has ended, in a program whose loop has no torch optimizer.

    The first call takes over from counting optimizer steps. Outside a run that clusterprof
    launched it does nothing, so it can stay in the program.
    """
    steps = sys.modules.get("_clusterprof_agent.rank.steps")
    if steps is not None:
        steps.counter.say()


def load(path: str | os.PathLike[str]) -> Run:
    """Return a merged run, its tables as pandas frames: see `clusterprof.api`."""
    from clusterprof import api

    return api.load(path)
