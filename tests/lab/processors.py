"""The test session's share of the processors, so that a busy machine takes none from a rank.

Where root may (the `cpu` controller of cgroup v1), the session counts for more than the machine's
other programs, and in it a test with a real nsys for more than the others: from a program's end on
its report has nine seconds, of which nsys needs two on a processor of its own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CPU = Path("/sys/fs/cgroup/cpu")
#: as `cpu.shares`, of which any other program has 1024
_SESSION, _USUAL, _URGENT = 16 * 1024, 1024, 8 * 1024


class Share:
    """Of one process of the session and all that it starts from now on."""

    def __init__(self, session: str, worker: str) -> None:
        """`worker`: of pytest-xdist, each of which has a share of its own in the session's."""
        self._session = _CPU / f"clusterprof-tests-{session}"
        self._group = self._session / worker
        with contextlib.suppress(OSError):
            self._group.mkdir(parents=True)
            (self._session / "cpu.shares").write_text(str(_SESSION))
            (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def weigh(self, *, urgent: bool) -> None:
        """From now on it counts for more than the session's others, or for as much."""
        with contextlib.suppress(OSError):
            (self._group / "cpu.shares").write_text(str(_URGENT if urgent else _USUAL))

    def close(self) -> None:
        """Remove the session's groups; what still runs in them counts as any program again."""
        for group in self._session.glob("*/"):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (_CPU / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(OSError):
            self._session.rmdir()
