"""`--watch`: the rank's flight recorder, saved again and again while the job runs.

All ranks save it at their first step after the same times of the wall clock, so that the dumps hold
the same steps. It costs a dump of the ring between two steps: 20 µs an entry, 0.4 s at most.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, List

from ..contracts import paths
from .recorder import Recorder, gpu, hand_over, members

if TYPE_CHECKING:
    from ..contracts.outbox import Outbox
    from .steps import Counter

_NAMES = {paths.FLIGHT: paths.WATCH, paths.FLIGHT_PICKLE: paths.WATCH_PICKLE}
_S = 1_000_000_000


class Watching:
    """One rank's share of the watch; `at` is called between two steps."""

    def __init__(
        self, every_s: int, recorders: List[Recorder], outbox: Outbox, counter: Counter
    ) -> None:
        """`recorders`: of each window of the rank, the first one's at least."""
        self.every_ns = every_s * _S
        self.recorders = recorders
        self.outbox = outbox
        self.counter = counter
        #: when it is saved next (wall clock, ns); 0 before the first call
        self.due_ns = 0
        #: the count at the last call, and when that was (monotonic, ns)
        self.before = (0, 0)

    def at(self, count: int) -> int:
        """A step has just ended: save what is due; returns when to come back."""
        clock = self.outbox.clock
        wall_ns, now_ns = clock.wall_ns(), clock.now_ns()
        if self.due_ns and self.due_ns <= wall_ns:
            # a window of a profiler is compared by its own dump
            if not any(recorder.is_open for recorder in self.recorders):
                # Why there is none is said of the window's dump; there may be one by the next time:
                # a program may join its process group late, or leave it for another one.
                with contextlib.suppress(Exception):
                    self.save()
        # always within the next `every_ns`: the clock may have been set
        self.due_ns = (wall_ns // self.every_ns + 1) * self.every_ns
        counted, at_ns = self.before
        self.before = count, now_ns
        step_ns = max((now_ns - at_ns) // max(count - counted, 1), 1)
        # Half the way, as steps may take longer from now on: the last calls are one step apart.
        return count + max(1, (self.due_ns - wall_ns) // step_ns // 2)

    def save(self) -> None:
        """Hand over the dump and the latest steps. Raises UnavailableError, and what torch does."""
        source = self.recorders[0].find(stacks=False)
        self.counter.flush()
        hand_over(source, _NAMES[source.name], members(), self.outbox)
        self.outbox.say("latest_steps")
        self.outbox.say("hardware", **gpu())
