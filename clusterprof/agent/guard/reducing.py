"""A report's canonical tables, made on its node by a process of idle priority (`ingest.reduce`).

What it does not finish in time the merge does, which reads the report then. A report that is to
stay on its node, or to be dropped, is transferred after all where its tables could not be made.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from typing import IO, Any, Callable, Optional

from ..contracts import files, paths, processes
from ..contracts.plan import Reduction
from ..contracts.timing import REAL, Clock
from ..nsys import VARIABLE

#: how often one looks whether it has ended
_LOOK_S = 0.05


class Reducing:
    """The reduction of one rank's report; nothing in here raises but MemoryError."""

    def __init__(self, order: Reduction, nsys: Optional[str] = None, clock: Clock = REAL) -> None:
        """`nsys` is the one whose exporter is tried first."""
        self.order = order
        #: it begins beside the training
        self.at_once = order.when == "now"
        self.nsys = nsys
        self.clock = clock
        #: the report in the rank's folder, once it is there
        self.report = ""
        self.child: Optional["subprocess.Popen[bytes]"] = None
        self._printed: IO[bytes] = io.BytesIO()
        #: where the tables are to be
        self._reduced = ""
        #: what its exporter writes, which one that is killed does not remove
        self.temporary = ""
        #: why there are no tables; "" where there are, None where that is open
        self.trouble: Optional[str] = None

    def start(self, report: str, folder: str) -> None:
        """Make the tables of `report` in the rank's folder, once."""
        if self.child is not None or self.trouble is not None:
            return
        python, self._reduced = self.order.command[0], os.path.join(folder, paths.REDUCED)
        if not os.access(python, os.X_OK):
            self.trouble = "there is no %s on %s" % (python, os.uname().nodename)
            return
        environment = processes.environment_without(("CLUSTERPROF_PLAN", "PYTHON"))
        if self.nsys:
            environment[VARIABLE] = self.nsys
        try:
            self.temporary = tempfile.mkdtemp(prefix="clusterprof-")
            # In memory: what it says may be that the disk is full.
            self._printed = os.fdopen(os.memfd_create("clusterprof"), "w+b")
            self.child = subprocess.Popen(
                [*self.order.command, report, self._reduced],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._printed,
                start_new_session=True, env=dict(environment, TMPDIR=self.temporary), cwd="/",
            )  # fmt: skip
        except (OSError, AttributeError) as error:  # not every Python has memfd_create
            self.trouble = "it could not be started: %s" % error
            self._clean()

    def poll(self) -> Optional[str]:
        """None while it runs or has not begun; else "", or why there are no tables."""
        if self.trouble is None and self.child is not None:
            status = self.child.poll()
            if status is not None:
                why = "it %s; it printed: %s" % (processes.ended(status), last_line(self._printed))
                self.trouble = why if status else ""
                self._clean()
        return self.trouble

    def wait(self, seconds: float, got_on: Callable[[], Any]) -> str:
        """Wait so long for its end, then end it; "", or why there are no tables."""
        self.clock.until(lambda: self.poll() is not None or got_on(), seconds, _LOOK_S)
        self.end("it did not end in time")
        return self.trouble or ""

    def end(self, why: str) -> None:
        """Leave no process behind; `why` where it has not ended by itself."""
        if self.poll() is None:
            self.trouble = why
            if self.child is not None:
                processes.end_group(self.child)
                self._clean()

    def _clean(self) -> None:
        """Remove what one that was killed has left."""
        files.remove_left(self._reduced)
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)


def last_line(printed: IO[bytes]) -> str:
    """The last line that a program has printed to this file; "nothing" for none."""
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - 65536))
    lines = printed.read().decode("utf-8", "replace").splitlines()
    return ([line.strip() for line in lines if line.strip()] or ["nothing"])[-1][:400]
