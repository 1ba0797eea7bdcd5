"""Where nsys and its importer are: named by the user, on PATH, or where installers put them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from clusterprof.agent import nsys as profiler

#: Names an nsys for launching and reading alike.
VARIABLE = "CLUSTERPROF_NSYS"


def installed(named: Path | None = None) -> Path | None:
    """The nsys `named`, or by CLUSTERPROF_NSYS, or the first that is found; None without one."""
    return next(_candidates(named), None)


def every(named: Path | None = None) -> list[Path]:
    """Every nsys that is found, each once, the one that `installed` returns first."""
    return list({path.resolve(): path for path in reversed(list(_candidates(named)))}.values())[
        ::-1
    ]


def prefer(nsys: str | os.PathLike[str] | None) -> None:
    """Let `nsys`, which the user named, be the first choice of this process from now on.

    Only a user names one: what a run directory or a report says that it was made by is never
    executed, since whoever sent it could have written anything there.
    """
    if nsys is not None:
        os.environ[VARIABLE] = os.fspath(nsys)


def importer(nsys: Path) -> Path | None:
    """QdstrmImporter, which Debian's nsys does not find by itself; None without one."""
    found = profiler.importer(str(nsys))
    return Path(found) if found else None


def _candidates(named: Path | None) -> Iterator[Path]:
    for wanted in (named, os.environ.get(VARIABLE)):
        if wanted and (path := shutil.which(wanted)):
            yield Path(path)
    if on_path := shutil.which("nsys"):
        yield Path(on_path)
    # The newest first: installers put the version into the folder's name.
    found = [path for place in profiler.PLACES for path in Path("/").glob(place)]
    yield from sorted((path for path in found if os.access(path, os.X_OK)), reverse=True)
