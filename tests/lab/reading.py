"""What may happen to a process that reads a report, and to its task of MPI.

A file `.fails` beside the report says what; it happens once, as the file goes first.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from clusterprof.agent.contracts.processes import parent
from clusterprof.errors import ReportError
from clusterprof.ingest.engines import Rank
from clusterprof.ingest.gathered import _attempt
from clusterprof.ingest.sources import Source
from clusterprof.tables import RankTables

#: a process that hangs does so for ever, or as long as the test
HANGING_S = 600


def fails(report: Path) -> Path:
    """The file that says what happens to who reads this report."""
    return report.with_suffix(".fails")


def failing(source: Source) -> list[Rank]:
    """Read; the first time something happens."""
    try:
        happens = fails(source.path).read_text()
        fails(source.path).unlink()
    except FileNotFoundError:
        return _attempt(source)
    if happens == "unseen":
        return [ReportError(f"{source.path} does not exist")]
    _EVENTS[happens]()
    try:
        return _attempt(source)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def dying_always(source: Source) -> list[Rank]:
    """Read what has no `.fails` beside it; else killed."""
    if fails(source.path).exists():
        _killed()
    return _attempt(source)


def loading(source: Source) -> list[Rank]:
    """Read, with a warning where pandas was loaded."""
    found = _attempt(source)
    if sys.modules.get("pandas") is None:
        return found
    return [e.warned("pandas was loaded") if isinstance(e, RankTables) else e for e in found]


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hanging() -> None:
    """Hang, with a process of its own that hangs as well."""
    asks = Path(f"/proc/{os.getppid()}")
    os.fork()
    until = time.monotonic() + HANGING_S
    while asks.exists() and time.monotonic() < until:
        time.sleep(0.2)


def _limited() -> None:
    """Allow no memory besides what is there already."""
    resource.setrlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))


def _task() -> tuple[int, int]:
    """Of the task of MPI that this process reads for: its child with MPI, and the task itself.

    That child's own child started this process, as a copy of itself.
    """
    child = parent(os.getppid()) or 0
    return child, parent(child) or 0


def _task_killed() -> None:
    child, task = _task()
    os.kill(task, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    time.sleep(HANGING_S)  # it goes with the child


def _first_child() -> int:
    """The child with MPI of the first task, which hands out; it started where ours did."""
    beside = parent(_task()[1])
    for entry in Path("/proc").iterdir():
        task = parent(int(entry.name)) if entry.name.isdecimal() else None
        with suppress(OSError):  # it has ended
            environ = Path(f"/proc/{task}/environ").read_bytes().split(b"\0")
            if parent(task or 0) == beside and b"OMPI_COMM_WORLD_RANK=0" in environ:
                return int(entry.name)
    raise AssertionError("there is no first task")


def _first_child_killed() -> None:
    os.kill(_first_child(), signal.SIGKILL)


_EVENTS: dict[str, Callable[[], None]] = {
    "killed": _killed,
    "hanging": _hanging,
    "out of memory": _limited,
    "task killed": _task_killed,
    "first child killed": _first_child_killed,
}
