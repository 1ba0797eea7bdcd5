"""Processes that outlive the tests which started them: found, named and ended.

Every process of a test session carries the session's mark in its environment, and pytest's own
`PYTEST_CURRENT_TEST` says which test started it. Daemons that write over their environment
(sshd does) are found by a path of the session in their command line.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: the environment name that marks a test session's processes
MARK = "CLUSTERPROF_TESTS_SESSION"


@dataclass(frozen=True)
class Leftover:
    """A process of this session that should be gone."""

    pid: int
    command: str
    test: str

    def __str__(self) -> str:
        by = f", started by {self.test}" if self.test else ""
        return f"{self.pid} {self.command[:120]}{by}"


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile, or belongs to somebody else
        return b""


def _parent(pid: int) -> int:
    # The command stands in brackets and may itself hold brackets and blanks.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[0] != b"Z" else 0


def _family(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        pid = _parent(pid)


def _belongs(pid: int, mark: str, folders: Iterable[Path]) -> bool:
    if f"{MARK}={mark}".encode() in _read(pid, "environ").split(b"\0"):
        return True
    command = _read(pid, "cmdline")
    return any(os.fsencode(folder) in command for folder in folders)


def _test(pid: int) -> str:
    """The test that was running when the process was started, and its phase: `a.py::b (call)`."""
    for entry in _read(pid, "environ").split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == b"PYTEST_CURRENT_TEST":
            return value.decode(errors="replace")
    return ""


def find(mark: str, folders: Iterable[Path] = ()) -> list[Leftover]:
    """Living processes that carry `mark` or name one of `folders`, this one's family excepted."""
    folders = list(folders)
    own = set(_family(os.getpid()))
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in own:
            continue
        pid = int(entry)
        command = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        # A zombie has no command line; multiprocessing's tracker lives exactly as long as we do,
        # and so does the server whose copies its processes are.
        if not command or "multiprocessing.resource_tracker" in command:
            continue
        if "multiprocessing.forkserver" in command and _parent(pid) in own:
            continue
        if _belongs(pid, mark, folders):
            found.append(Leftover(pid, command, _test(pid)))
    return found


def settle(mark: str, folders: Iterable[Path] = (), seconds: float = 120.0) -> list[Leftover]:
    """As `find`, after giving what is on its way out the time to go."""
    folders = list(folders)
    deadline = time.monotonic() + seconds
    while (left := find(mark, folders)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end_of_test(mark: str, nodeid: str) -> None:
    """Kill what the body of this test started and did not end; what its fixtures started stays."""
    left = [process for process in find(mark) if process.test == f"{nodeid} (call)"]
    end(left, mark)


def end(left: Iterable[Leftover], mark: str, folders: Iterable[Path] = ()) -> None:
    """Kill these, each looked at once more through a handle that its pid cannot outlive."""
    folders = list(folders)
    for each in left:
        try:
            handle = os.pidfd_open(each.pid)
        except (ProcessLookupError, PermissionError):
            continue
        try:
            if _belongs(each.pid, mark, folders):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        finally:
            os.close(handle)
