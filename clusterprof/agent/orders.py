"""The one order that a running job may be given: close your windows now, and save what you have.

It is a file in the run directory, `close`, with the reason in it. Whoever has a window open looks
for it from a thread of its own: a file system that hangs must hold up nobody's training.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Optional

if __package__:
    from . import attempts, files
else:  # beside guard.py, which runs as a script
    import attempts  # type: ignore[import-not-found,no-redef]
    import files  # type: ignore[import-not-found,no-redef]

NAME = "close"
EVERY_S = 0.25


def give(run: str, reason: str) -> None:
    """Order all windows of the run closed; the first reason stays. Raises OSError."""
    if read(run) is None:
        files.write(os.path.join(run, NAME), reason + "\n")


def read(run: str) -> Optional[str]:
    """The order's reason; None where none was given by us, or the run directory cannot be read.

    `run`: the run directory, or the folder of an attempt in it.
    """
    try:
        run = attempts.root(run)
        # The listing first: NFS may remember for half a minute that a file is not there, but
        # asks the server whenever a folder is opened.
        if NAME not in os.listdir(run):
            return None
        with files.open_ours(os.path.join(run, NAME)) as file:
            return file.readline().decode().strip()
    except (OSError, ValueError):
        return None


class Watch:
    """Looks for the order until it is there or `end` is called."""

    def __init__(self, run: str) -> None:
        self.run = run
        #: the order's reason, once it is there
        self.said: Optional[str] = None
        #: when it was seen (monotonic seconds)
        self.since = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.is_set():
            reason = read(self.run)
            if reason is not None:
                self.since = time.monotonic()
                self.said = reason
                return
            self._ended.wait(EVERY_S)
