"""Whether a rank's step lasts so long that the rank may hang, by the steps that have ended."""

from __future__ import annotations

import math
from collections import deque
from typing import Deque, Iterable, Tuple

#: A step hangs that lasts so many times the usual, which is the median of so many steps.
TIMES = 20
_KNOWN = 1_000


class Hangs:
    """The steps that a writer is told of, and when the next one is overdue; monotonic times, s."""

    def __init__(self) -> None:
        #: a shorter step does not hang; and how long ended steps are kept by the rank
        self.after_s = math.inf
        self.unseen_s = 0.0
        #: when to ask `overdue`; infinite for not before the next step has ended
        self.look_at = math.inf
        #: a step hangs, as far as is known
        self.found = False
        self._took: Deque[int] = deque(maxlen=_KNOWN)
        self._last_s = 0.0

    def listen(self, after_s: float, unseen_s: float) -> None:
        """From now on there is somebody to ask."""
        self.after_s, self.unseen_s = after_s, unseen_s
        if self._took:
            self.look_at = self._last_s + unseen_s + after_s

    def ended(self, steps: Iterable[Tuple[int, int]]) -> bool:
        """Steps have ended (begin, end, ns); whether a hang has ended with them."""
        for begin, end in steps:
            self._took.append(end - begin)
            self._last_s = end / 1e9
        self.look_at = self._last_s + self.unseen_s + self.after_s
        hung, self.found = self.found, False
        return hung

    def overdue(self, now_s: float) -> bool:
        """Whether the step that runs hangs; said once of each. Without an ended step none does."""
        if now_s < self.look_at or not self._took:
            return False
        usual_s = sorted(self._took)[len(self._took) // 2] / 1e9
        at = self._last_s + self.unseen_s + max(self.after_s, TIMES * usual_s)
        self.found = now_s >= at
        self.look_at = math.inf if self.found else at
        return self.found
