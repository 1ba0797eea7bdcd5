"""How large a capture has become, so that a window can be closed before it fills a node's disk."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from typing import Callable, Dict, Iterator, List, Tuple


class NsysFiles:
    """What one session of nsys holds on this node by now."""

    def __init__(self, private: str, nsys_pids: Callable[[], List[int]]) -> None:
        self.private = private
        self.nsys_pids = nsys_pids
        self.pids: List[int] = []
        #: anonymous memory of each of nsys' processes when it was first looked at
        self.before: Dict[int, int] = {}

    def begin(self) -> None:
        """The session starts to collect: what its processes are now is not its records."""
        self.pids = self.nsys_pids()
        self.before = {pid: anonymous(pid) for pid in self.pids}

    def bytes(self) -> int:
        """All that it holds: files, shared memory, and how much its processes have grown.

        Files: those of `written`, and what its processes hold open for writing, deleted or not.
        Memory: since `begin`, for versions that keep records there until they stop.
        """
        if not self.pids:
            self.pids = self.nsys_pids()  # reads all of /proc: once
        held = self._in_its_folder()
        for path in opened(self.pids):
            note(held, path)
        grown = [anonymous(pid) - before for pid, before in self.before.items()]
        return sum(held.values()) + sum(max(0, growth) for growth in grown)

    def written(self) -> int:
        """Bytes below its own TMPDIR.

        There nsys streams into `nsys-report-*.qdstrm` and the program puts what it records into
        `nvidia/nsight_systems/quadd_session_*` (measured with 2022.4, 2023.4 and 2024.2).
        """
        return sum(self._in_its_folder().values())

    def _in_its_folder(self) -> Dict[Tuple[int, int], int]:
        held: Dict[Tuple[int, int], int] = {}
        for folder, _, names in os.walk(self.private):
            for name in names:
                note(held, os.path.join(folder, name))
        return held


def opened(pids: List[int]) -> Iterator[str]:
    """The ways in /proc to the files that these processes hold open for writing."""
    for pid in pids:
        for path in glob.iglob("/proc/%d/fd/*" % pid):
            with contextlib.suppress(OSError):
                if os.lstat(path).st_mode & stat.S_IWUSR:
                    yield path


def note(held: Dict[Tuple[int, int], int], path: str) -> None:
    """Add a file's bytes under its identity, so that one that is found twice counts once."""
    try:
        # One in the tree may be a link to what others share; one in /proc is always a link.
        status = os.stat(path) if path.startswith("/proc/") else os.lstat(path)
    except OSError:  # ended, or removed meanwhile
        return
    if stat.S_ISREG(status.st_mode):
        # Blocks: files are made larger than what is in them.
        held[status.st_dev, status.st_ino] = status.st_blocks * 512


def anonymous(pid: int) -> int:
    """Bytes of memory that are the process's own and no file's; 0 where it is gone."""
    with contextlib.suppress(OSError, ValueError), open("/proc/%d/status" % pid, "rb") as file:
        for line in file:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
