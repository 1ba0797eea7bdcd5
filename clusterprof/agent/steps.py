"""Counting steps and logging when each began and ended, on every rank of the job.

The hook runs once per optimizer step inside somebody's training loop: between two events
(the window's ends, a flush) it takes a clock reading, appends it and compares two numbers.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Callable, List, Optional, Tuple

#: A step that ends this long after the last write takes the log's new lines to the disk.
FLUSH_NS = 2_000_000_000

#: So many steps of one other optimizer without one of the counted: the program has moved on.
GIVEN_UP = 16


class Counter:
    """Counts steps by the boundaries between them; calls `at(count)` when `next_event` is reached.

    A step is a step of the *first optimizer that stepped*: a program with two (a GAN, Muon
    beside AdamW, one per parameter) steps each of them once per iteration. Micro-batches
    of gradient accumulation do not step the optimizer and so do not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self.enabled = False
        #: the program counts by itself (`clusterprof.step()`, `--step-on`): optimizers do not
        self.said = False
        #: the count at which `at` is called next; -1 for never
        self.next_event = -1
        self.at: Optional[Callable[[int], None]] = None
        #: called when the program counts by itself before any optimizer was imported
        self.on_first: Optional[Callable[[], None]] = None
        self._path: Optional[str] = None
        self._begin = 0
        #: (begin, end) of the steps that are not in the log yet
        self._pending: List[Tuple[int, int]] = []
        self._flush_at = 0
        self._counted: Optional[weakref.ref[Any]] = None
        self._other: Optional[weakref.ref[Any]] = None
        self._other_steps = 0

    def begin(self, path: Optional[str]) -> None:
        """Start counting; step 0 begins now. `path` is the log, None to keep none."""
        self._path = path
        self.enabled = True
        self._begin = time.time_ns()
        self._flush_at = self._begin + FLUSH_NS

    def end(self) -> None:
        """Stop counting: in a forked child, or at the program's end."""
        self.enabled = False
        self._path = None
        self.next_event = -1

    def optimizer_stepped(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Post hook of every torch optimizer's step."""
        if self._counted is None or self._counted() is not optimizer:
            if not self._takes_over(optimizer):
                return
        self._other_steps = 0
        if not self.said and self.enabled:
            self.boundary()

    def _takes_over(self, optimizer: Any) -> bool:
        """Whether `optimizer`, which is not the counted one, is the counted one from now on."""
        if self._counted is not None and self._counted() is not None:
            if self._other is None or self._other() is not optimizer:
                if self._other_steps == 0:
                    self._other = weakref.ref(optimizer)
                    self._other_steps = 1
                return False
            self._other_steps += 1
            if self._other_steps < GIVEN_UP:
                return False
        self._counted = weakref.ref(optimizer)
        return True

    def say(self) -> None:
        """One step has ended, says the program itself: optimizers no longer count."""
        if not self.enabled:
            if self.on_first is None:
                return
            self.on_first()
        self.said = True
        self.boundary()

    def boundary(self) -> None:
        """One step ends and the next begins."""
        now = time.time_ns()
        self._pending.append((self._begin, now))
        self._begin = now
        self.count += 1
        if self.count == self.next_event or now >= self._flush_at:
            self._slow()

    def _slow(self) -> None:
        if self.count == self.next_event and self.at is not None:
            self.at(self.count)
            # What the profiler's start or stop cost lies between two steps, in neither.
            self._begin = time.time_ns()
        self.flush()

    def flush(self) -> None:
        """Bring the new lines to the log; one that cannot be written is given up."""
        first = self.count - len(self._pending)
        lines = ["%d,%d,%d\n" % (first + i, *step) for i, step in enumerate(self._pending)]
        self._pending = []
        self._flush_at = time.time_ns() + FLUSH_NS
        if self._path is None or not lines:
            return
        try:
            with open(self._path, "a", encoding="ascii") as file:
                if file.tell() == 0:
                    file.write("step,begin_ns,end_ns\n")
                file.write("".join(lines))
        except OSError:
            self._path = None


#: This process's counter; `clusterprof.step()` speaks to it.
counter = Counter()
