"""All checks of one host, each for itself and none longer than its time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from clusterprof.doctor import kernel, leftovers, other_profilers, places, software
from clusterprof.doctor.check import BAD, Check

#: A file system that hangs or an nsys that does not answer is found out by this.
PATIENCE_S = 6.0

Look = Callable[[], "Check | list[Check]"]


def checks(nsys: Path | None, folder: Path, probe: Path | None) -> list[tuple[str, Look]]:
    """What to look at, in the order in which it is shown.

    `folder` is where run directories are made; `probe` a folder that another node has just made
    there, None for this host alone.
    """
    table = other_profilers.table
    return [
        ("nsys", lambda: software.profiler(nsys)),
        ("gpu", software.driver),
        ("other profilers", lambda: other_profilers.other_profilers(table())),
        ("temporary folder", places.temporary_folder),
        (places.SHARED_MEMORY, places.shared_memory),
        ("loopback", places.loopback),
        (
            "run directories",
            lambda: places.probed_folder(probe, name()) if probe else places.run_folder(folder),
        ),
        ("clock source", kernel.clock_source),
        ("clock", kernel.clock_error),
        ("cpu sampling", kernel.cpu_sampling),
        ("python", software.python),
        ("leftovers", lambda: leftovers.leftovers(table())),
    ]


def name() -> str:
    """This node, by the name that Slurm has for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def look(todo: Sequence[tuple[str, Look]], patience_s: float = PATIENCE_S) -> Iterator[Check]:
    """Do all checks side by side; each one's outcome in the order given, within `patience_s`."""
    outcomes: dict[str, list[Check]] = {}
    threads = []
    for title, check in todo:
        thread = threading.Thread(target=_one, args=(title, check, outcomes), daemon=True)
        thread.start()
        threads.append((title, thread))
    deadline = time.monotonic() + patience_s
    for title, thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        yield from outcomes.get(title) or [
            Check(title, BAD, f"no answer within {patience_s:g} s",
                  "a file system that hangs? look at it on that host")
        ]  # fmt: skip


def _one(title: str, check: Look, outcomes: dict[str, list[Check]]) -> None:
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - a check that cannot be made is what is told
        found = Check(title, BAD, f"could not be looked at: {str(error) or type(error).__name__}")
    outcomes[title] = found if isinstance(found, list) else [found]
