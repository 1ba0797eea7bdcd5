"""How large a capture has become, so that a window can be closed before it fills a node's disk."""

from __future__ import annotations

import os
import stat
from typing import Callable, Dict, Iterator, List, Tuple

#: How often it is looked at: it takes 0.2 ms, the first time a few (measured, nsys 2022.4).
EVERY_NS = 500_000_000
MB = 1_000_000


class NsysFiles:
    """What one session of nsys holds on this node by now."""

    def __init__(self, private: str, nsys_pids: Callable[[], List[int]]) -> None:
        self.private = private
        self.nsys_pids = nsys_pids
        self.pids: List[int] = []
        #: anonymous memory of each of nsys' processes when it was first looked at
        self.before: Dict[int, int] = {}

    def bytes(self) -> int:
        """All that it holds: files, shared memory, and how much its processes have grown."""
        return sum(self.parts().values())

    def parts(self) -> Dict[str, int]:
        """Bytes by where they are.

        `files`: what the session has below its own TMPDIR, where nsys streams into
        `nsys-report-*.qdstrm` and the program puts what it records into `nvidia/nsight_systems/
        quadd_session_*` (measured with 2022.4, 2023.4 and 2024.2). `elsewhere`: what its
        processes hold open for writing besides, deleted files too; `shared_memory`: the same in
        /dev/shm; `memory`: the growth of its processes since `begin`, for versions that keep
        records in memory until they stop.
        """
        if not self.pids:
            self.pids = self.nsys_pids()  # reads all of /proc: once
        files: Dict[Tuple[int, int], int] = {}
        elsewhere: Dict[Tuple[int, int], int] = {}
        shared_memory: Dict[Tuple[int, int], int] = {}
        for path in tree(self.private):
            note(files, path)
        for path, target in opened(self.pids):
            note(shared_memory if target.startswith(("/dev/shm/", "/memfd:")) else elsewhere, path)
        for known in files:
            elsewhere.pop(known, None)
        return {
            "files": sum(files.values()), "elsewhere": sum(elsewhere.values()),
            "shared_memory": sum(shared_memory.values()), "memory": self.growth(),
        }  # fmt: skip

    def begin(self) -> None:
        """The session starts to collect: what its processes are now is not its records."""
        self.pids = self.nsys_pids()
        self.before = {pid: anonymous(pid) for pid in self.pids}

    def growth(self) -> int:
        """Bytes of memory of their own that nsys' processes have taken since `begin`."""
        return sum(
            max(0, anonymous(pid) - before) for pid, before in self.before.items()
        )  # fmt: skip


def tree(folder: str) -> Iterator[str]:
    """All files below `folder`; links are not followed."""
    for at, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(at, name)


def opened(pids: List[int]) -> Iterator[Tuple[str, str]]:
    """What these processes hold open for writing: the way to it in /proc, and its name."""
    for pid in pids:
        folder = "/proc/%d/fd" % pid
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.lstat(path).st_mode & stat.S_IWUSR:
                    yield path, os.readlink(path)
            except OSError:
                continue


def note(held: Dict[Tuple[int, int], int], path: str) -> None:
    """Add a file's blocks under its identity, so that one that is found twice counts once."""
    try:
        # One in the tree may be a link to what others share; one in /proc is always a link.
        found = os.stat(path) if path.startswith("/proc/") else os.lstat(path)
    except OSError:  # ended, or removed meanwhile
        return
    if stat.S_ISREG(found.st_mode):
        # Blocks: files are made larger than what is in them.
        held[found.st_dev, found.st_ino] = found.st_blocks * 512


def anonymous(pid: int) -> int:
    """Bytes of memory that are the process's own and no file's; 0 where it is gone."""
    try:
        with open("/proc/%d/status" % pid, encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


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
