"""Memory cgroups, of either version: a group of processes that the kernel gives so much memory."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path


class Group:
    """One group; its files have other names in version 2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        is_new = (folder / "cgroup.controllers").exists()
        self.limit = folder / ("memory.max" if is_new else "memory.limit_in_bytes")
        self.usage = folder / ("memory.current" if is_new else "memory.usage_in_bytes")
        #: how many of its processes the kernel has ended stands in here
        self.events = folder / ("memory.events" if is_new else "memory.oom_control")
        self.processes = folder / "cgroup.procs"

    def killed(self) -> int:
        """How many processes the kernel has ended for want of memory."""
        (count,) = re.findall(r"^oom_kill (\d+)$", self.events.read_text(), re.MULTILINE)
        return int(count)


def _parent() -> Path | None:
    """Where groups can be made: below our own in version 1, below the root in version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    root = Path("/sys/fs/cgroup")
    has = root / "cgroup.subtree_control"
    return root if has.exists() and "memory" in has.read_text().split() else None


def why_not() -> str | None:
    """Why no group can be made here; None where one can."""
    parent = _parent()
    if parent is None or not os.access(parent, os.W_OK):
        return "no memory cgroup that is ours to divide"
    return None


@contextlib.contextmanager
def memory_group() -> Iterator[Group]:
    """Make one, and remove it; what still runs in it goes on in the one above."""
    parent = _parent()
    assert parent is not None
    folder = parent / f"clusterprof-test-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        yield Group(folder)
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
