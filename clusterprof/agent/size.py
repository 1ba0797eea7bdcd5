"""How large a capture has become, so that a window can be closed before it fills a node's disk."""

from __future__ import annotations

import glob
import os
import stat
import tempfile
from typing import Callable, Iterator, List

#: How often it is looked at: it takes 0.2 ms, the first time a few (measured, nsys 2022.4).
EVERY_NS = 500_000_000
MB = 1_000_000


class NsysFiles:
    """What one session of nsys has on this node's disk by now."""

    def __init__(self, private: str, own_nsys: Callable[[], List[int]]) -> None:
        self.private = private
        self.own_nsys = own_nsys
        self.pids: List[int] = []

    def bytes(self) -> int:
        """The files that nsys' processes write, and those of the session that the program writes.

        nsys streams into `$TMPDIR/nsys-report-*.qdstrm`; the program puts what it records into
        `$TMPDIR/nvidia/nsight_systems/quadd_session_*PID/`, with the daemon's pid at the end.
        Measured with 2022.4.2; where a version names them otherwise the first still holds.
        """
        if not self.pids:
            self.pids = self.own_nsys()  # reads all of /proc: once
        held = {}
        for path in self.paths():
            try:
                found = os.stat(path)
            except OSError:  # ended, or removed meanwhile
                continue
            if stat.S_ISREG(found.st_mode):
                # Blocks: files are made larger than what is in them.
                held[found.st_dev, found.st_ino] = found.st_blocks * 512
        return sum(held.values())

    def paths(self) -> Iterator[str]:
        """Where to look; a file may come twice."""
        yield from glob.iglob(os.path.join(self.private, "report*"))
        sessions = os.path.join(tempfile.gettempdir(), "nvidia", "nsight_systems")
        for pid in self.pids:
            yield from glob.iglob(os.path.join(sessions, "quadd_session_*%d" % pid, "*", "*"))
            folder = "/proc/%d/fd" % pid
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in names:
                path = os.path.join(folder, name)
                try:
                    written = os.lstat(path).st_mode & stat.S_IWUSR
                    shared = os.readlink(path).startswith("/dev/")
                except OSError:
                    continue
                if written and not shared:
                    yield path


def memory() -> int:
    """Bytes of memory that this process has in use (resident)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Looks:
    """When to look next, in steps, from how long the steps take."""

    def __init__(self, first: int, now_ns: int) -> None:
        self.first = first
        self.began_ns = now_ns

    def next(self, count: int, now_ns: int) -> int:
        """The step after which to look again; at least one further on."""
        each_ns = max(1, (now_ns - self.began_ns) // max(1, count - self.first))
        return count + max(1, EVERY_NS // each_ns)
