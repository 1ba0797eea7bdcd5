"""Where nsys is: named by the user, on PATH, or where installers put it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

#: Names an nsys for launching and reading alike.
VARIABLE = "CLUSTERPROF_NSYS"

_PLACES = (
    "opt/nvidia/nsight-systems/*/bin/nsys",
    "opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
)


def installed(named: Path | None = None) -> Path | None:
    """The nsys `named`, or by CLUSTERPROF_NSYS, or the first that is found; None without one."""
    return next(_candidates(named), None)


def _candidates(named: Path | None) -> Iterator[Path]:
    for wanted in (named, os.environ.get(VARIABLE)):
        if wanted and (path := shutil.which(wanted)):
            yield Path(path)
    if on_path := shutil.which("nsys"):
        yield Path(on_path)
    # The newest first: installers put the version into the folder's name.
    found = [path for place in _PLACES for path in Path("/").glob(place)]
    yield from sorted((path for path in found if os.access(path, os.X_OK)), reverse=True)
