"""Run what uses a file system, and end in time if that file system stalls.

A process that waits for a stalled file system cannot be ended, not even by SIGKILL: so another
process waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from clusterprof.agent.contracts import descriptors
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.console import say
from clusterprof.errors import ClusterprofError
from clusterprof.launch.foreground import ENDING

#: A file system that has not answered for so long is stalled. A job ends at most 10 s later than
#: without us.
STALLED_S = 7.0
#: how long the task may take before the file systems are asked, and between two questions
ASK_S = 1.0

_PR_SET_PDEATHSIG = 1
_FAULT = 125


def unless_stalled(task: Callable[[], int], folder: Path, clock: Clock = REAL) -> int | None:
    """The status that `task` returns; None where `folder` or TMPDIR stalls meanwhile.

    The task runs and prints in a process of its own, which ends with us.
    """
    places = (folder, Path(tempfile.gettempdir()))

    def ask() -> int:
        # Setting a folder's times is a harmless write; reads may still work on a stalled one.
        for asked_folder in places:
            with contextlib.suppress(OSError):
                os.utime(asked_folder)
        return 0

    doing = Apart(task, clock)
    while not doing.ends_within(ASK_S):
        asking = Apart(ask, clock)
        until = clock.now() + STALLED_S
        while not (asking.ends_within(0.05) or doing.ends_within(0.05)):
            if clock.now() > until:
                return None
    return doing.status


class Apart:
    """A function in a forked process."""

    def __init__(self, task: Callable[[], int], clock: Clock = REAL) -> None:
        self.clock = clock
        self.status: int | None = None
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            status = _FAULT
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                status = task()
                sys.stdout.flush()
            except KeyboardInterrupt:
                status = 130
            except BaseException:  # noqa: BLE001 - nothing above may run twice
                traceback.print_exc()
            finally:
                os._exit(status)

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends within `seconds`."""
        return self.clock.until(self.ended, seconds, 0.01)

    def ended(self) -> bool:
        """Whether it has."""
        if self.status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def end(self, patience_s: float = 0.0) -> None:
        """End it, unless it ends by itself in so long; one that a file system holds may stay."""
        if not self.ends_within(patience_s):
            os.kill(self._pid, signal.SIGKILL)
            self.ends_within(ASK_S)


def beside_job(task: Callable[[], None], otherwise: str) -> Apart:
    """A task in a process of its own, until it returns or, the job having ended, is ended.

    It reads the run directory, whose file system may stall: we are to end when the job has ended.
    `otherwise`: what there is not where the task fails; it is printed with the reason.
    """

    def beside() -> int:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)  # those are the job's
        descriptors.release(descriptors.inherited())
        try:
            task()
        except Exception as error:  # noqa: BLE001 - the job goes on
            expected = isinstance(error, (ClusterprofError, OSError))
            reason = (str(error) if expected else "") or repr(error)  # some errors have no words
            say(f"{otherwise}: {reason.splitlines()[0]}")
        return 0

    return Apart(beside)
