"""The end of a thread: torch's profilers live on one, and end the program on any other."""

from __future__ import annotations

import os
import threading
from typing import Callable


class AtEnd:
    """Calls `act` when the thread that made it ends, on that thread.

    Not the main thread's end, which is atexit's; and a thread that the interpreter leaves behind
    never ends.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._local = threading.local()
        self._local.last = _Last(act)


class _Last:
    """Local to a thread, and so deleted by it when it ends."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.pid = os.getpid()

    def __del__(self) -> None:
        # A forked child has one thread, and main's things are deleted with the interpreter.
        if os.getpid() == self.pid and threading.current_thread() is not threading.main_thread():
            self.act()
