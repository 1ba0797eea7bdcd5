"""What brings a report home when the guard itself is killed.

A launcher that ends its ranks gives them little time (Open MPI: SIGKILL half a second after
SIGTERM), less than nsys needs to write. nsys runs in a session of its own and goes on; the guard
that would have taken its report home is gone. The keeper is a child of the guard, in a session
of its own and with none of the rank's descriptors, that sleeps until the guard has ended.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

if __package__:
    from . import processes, states
else:  # beside guard.py, which runs as a script
    import processes  # type: ignore[import-not-found,no-redef]
    import states  # type: ignore[import-not-found,no-redef]

#: how long nsys may take to write, and its importer after it
WRITING_S = 20.0
IMPORT_S = 30.0

#: the guard's last word: all is done, there is nothing to keep
DONE = b"."


class Keeper:
    """The guard's end: dismiss the keeper when the report is safe."""

    def __init__(self, home: Any, session: str) -> None:
        reader, self.writer = os.pipe()
        # The program's output must be its own: nothing that is buffered may be written twice.
        self.pid = os.fork()
        if self.pid == 0:
            try:
                alone(reader)
                if os.read(reader, 1) != DONE:
                    take_over(home, session)
            finally:
                os._exit(0)
        os.close(reader)

    def dismiss(self) -> None:
        """Nothing is left to be kept."""
        try:
            os.write(self.writer, DONE)
            os.close(self.writer)
            os.waitpid(self.pid, 0)
        except OSError:
            pass


def alone(reader: int) -> None:
    """Hold nothing of the rank's: a launcher waits for its pipes to close."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, reader)
    os.closerange(reader + 1, max(1024, null + 1))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def take_over(home: Any, session: str) -> None:
    """The guard was killed, and the program with it: wait for nsys, bring its report home."""
    if states.read(home.folder).get("state") == "capturing":
        # Whoever collects waits for a rank that is finishing.
        home.say("finishing", "the rank was killed inside the window")
    until = time.monotonic() + WRITING_S
    while processes.of_session(session) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in processes.of_session(session):
        os.kill(pid, signal.SIGKILL)
    home.settle(128 + signal.SIGKILL, IMPORT_S, opened=True)
