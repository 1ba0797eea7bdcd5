"""When Python's garbage collector ran inside the window: no profiler sees it.

A collection holds the interpreter: the rank launches nothing meanwhile, and the others wait. A
signal that came during one has its handler called in here, where Python lets nothing out that it
raises. So that is kept, and raised when the step has ended.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any, Dict, List, Tuple

from .entry import entry
from .steps import Counter

#: A shorter collection delays no rank; of the youngest generation there are thousands.
LONG_NS = 20_000
#: More are not kept: a program that collects so often says so in the first of them.
MOST = 100_000


class Pauses:
    """One window's collections: begin and end by the monotonic clock, generation, collected."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.kept: List[Tuple[int, int, int, int]] = []
        self._begin = 0
        self._unraisable = sys.unraisablehook

    def start(self) -> None:
        """Note collections from now on."""
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self.unraisable
        gc.callbacks.append(self.note)

    def stop(self) -> None:
        """Note no more; a program may have emptied the list of callbacks itself."""
        while self.note in gc.callbacks:
            gc.callbacks.remove(self.note)
        if sys.unraisablehook == self.unraisable:
            sys.unraisablehook = self._unraisable

    def unraisable(self, found: Any) -> None:
        """What Python calls with what cannot be let out."""
        if found.object != self.note:
            self._unraisable(found)
            return
        entry.owed = found.exc_value
        self.counter.hurry()

    def note(self, phase: str, info: Dict[str, Any]) -> None:
        """What the collector calls before and after each collection; raises nothing."""
        now = time.monotonic_ns()
        if phase == "start":
            self._begin = now
        elif self._begin and now - self._begin >= LONG_NS and len(self.kept) < MOST:
            what = info.get("generation", -1), info.get("collected", 0)
            self.kept.append((self._begin, now, *what))

    def text(self) -> str:
        """gc.csv, timed as the step log; an empty one says that the collector was not the cause."""
        at = self.counter.wall
        lines = ["%d,%d,%d,%d\n" % (at(begin), at(end), *rest) for begin, end, *rest in self.kept]
        return "begin_ns,end_ns,generation,collected\n" + "".join(lines)
