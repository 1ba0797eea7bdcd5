"""Where a launcher's program is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from clusterprof.errors import LaunchError


def find(name: str) -> str:
    """The program: on PATH, or beside our own Python (an environment that is not activated).

    Raises LaunchError where it is in neither.
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise LaunchError(
            f"{name} was not found",
            "looked in PATH and beside " + sys.executable,
            "load its module, or activate the environment that has it",
        )
    return found
