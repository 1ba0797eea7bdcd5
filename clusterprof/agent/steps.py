"""Counting steps and logging when each began and ended, on every rank of the job.

The hook runs once per optimizer step inside somebody's training loop: between two events
(the window's ends, a flush) it takes a clock reading, appends it and compares two numbers.

Steps are timed by the monotonic clock, which nobody sets, and written as wall-clock times by one
and the same difference of the two: that of the moment when counting began or, in a rank that
captures, when its window opened, since the report has the wall clock of that moment. A wall
clock that is set during the run makes no step longer, shorter or negative.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Tuple

if TYPE_CHECKING:
    from .outbox import Outbox

#: A step that ends this long after the last time hands the new ones to the writer.
FLUSH_NS = 2_000_000_000

#: A wall clock that was set by less is left as it is in the log: steps take milliseconds.
SET_NS = 100_000

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
        self.outbox: Optional[Outbox] = None
        #: what is added to the monotonic clock's times in the log
        self._wall = 0
        self._begin = 0
        #: (begin, end) by the monotonic clock of the steps that were not handed over yet
        self._pending: List[Tuple[int, int]] = []
        self._flush_at = 0
        self._counted: Optional[weakref.ref[Any]] = None
        self._other: Optional[weakref.ref[Any]] = None
        self._other_steps = 0

    def begin(self, outbox: Optional[Outbox] = None) -> None:
        """Start counting; step 0 begins now. `outbox` takes the log, without one there is none."""
        self.outbox = outbox
        self.enabled = True
        self._wall = wall_minus_monotonic()
        self._begin = time.monotonic_ns()
        self._flush_at = self._begin + FLUSH_NS

    def end(self) -> None:
        """Stop counting: in a forked child, or at the program's end."""
        self.enabled = False
        self.outbox = None
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
        now = time.monotonic_ns()
        self._pending.append((self._begin, now))
        self._begin = now
        self.count += 1
        if self.count == self.next_event or now >= self._flush_at:
            self._slow()

    def _slow(self) -> None:
        if self.count == self.next_event and self.at is not None:
            self.at(self.count)
            # What the profiler's start or stop cost lies between two steps, in neither.
            self._begin = time.monotonic_ns()
        self.flush()

    def anchor(self) -> None:
        """Let the log's times, those written already too, be of the wall clock as it is now."""
        ahead = wall_minus_monotonic() - self._wall
        if abs(ahead) < SET_NS:
            return
        self._wall += ahead
        if self.outbox is not None:
            self.outbox.say("anchor", wall_ns=self._wall)

    def wall(self, monotonic_ns: int) -> int:
        """A reading of the monotonic clock as the log would have it."""
        return monotonic_ns + self._wall

    def flush(self) -> None:
        """Hand the new steps to the process that writes the log."""
        pending, self._pending = self._pending, []
        self._flush_at = time.monotonic_ns() + FLUSH_NS
        if self.outbox is not None and pending:
            self.outbox.steps(self.count - len(pending), pending)
            self.outbox.look()


def wall_minus_monotonic() -> int:
    """What the wall clock is ahead of the monotonic one, ns; of three readings the closest."""
    found = []
    for _ in range(3):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1]


#: This process's counter; `clusterprof.step()` speaks to it.
counter = Counter()
