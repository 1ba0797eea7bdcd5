"""Which nsys this host has, and which of them the user prefers."""

from __future__ import annotations

import os
import shutil

from clusterprof.agent import nsys
from clusterprof.agent.nsys import Nsys


def installed() -> list[Nsys]:
    """All that are found, each once: by CLUSTERPROF_NSYS, on PATH, and then at their places."""
    wanted = (os.environ.get(nsys.VARIABLE), "nsys")
    candidates = [shutil.which(name) for name in wanted if name]
    paths: dict[str, Nsys] = {}
    for path in filter(None, [*candidates, *nsys.in_places()]):
        paths.setdefault(os.path.realpath(path), Nsys(path))
    return list(paths.values())


def prefer(named: str | os.PathLike[str] | None) -> None:
    """Let the nsys that the user named be the first choice of this process from now on.

    Only a user names one: what a run directory or a report says that it was made by is never
    executed, since whoever sent it could have written anything there.
    """
    if named is not None:
        os.environ[nsys.VARIABLE] = os.fspath(named)
