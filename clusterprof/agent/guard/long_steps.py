"""The steps that take far longer than those before them: a checkpoint, an evaluation, a stall.

A summary of a thousand steps does not tell when the long ones were, so each is kept by itself. A
host that runs ahead of its GPU makes several steps in no time and waits for it in the next: how
much of a long step the steps after it make up for is kept with it.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import Deque, List, Optional, Tuple

HEAD = "step,begin_ns,end_ns,usual_ns,made_up_ns\n"
#: a step is long that takes more than so many times the usual one
TIMES = 3
#: the usual step is the median of so many of the latest
LATEST = 64
#: Where so many of the latest were about as long, long steps are the job's own pattern.
PATTERN = 4
_ALIKE = 2
#: The first steps of a job compile and warm up: they are judged together, when so many have ended.
FIRST = 20
#: so many steps after a long one may make up for it
AFTER = 32
#: of many long steps only longer ones are kept: after each grade those of twice as many times
MOST, GRADE = 2_000, 500

Row = Tuple[int, ...]


class LongSteps:
    """Steps come by `add` in their order; `rows` are those of pauses.csv, monotonic times, ns."""

    def __init__(self) -> None:
        self.rows: List[Row] = []
        self._first: List[Row] = []
        #: the lengths of the latest steps, in their order and by length
        self._latest: Deque[int] = deque()
        self._ordered: List[int] = []
        #: the last long step, while steps may make up for it; and how many have ended since
        self._open: Optional[Row] = None
        self._made_up = self._after = 0

    def add(self, step: int, begin: int, end: int) -> None:
        """One more step has ended."""
        took = end - begin
        if len(self._latest) >= FIRST and (usual := self._usual_if_long(took)):
            self.close()
            self._open = (step, begin, end, usual)
        elif self._open is not None:
            self._made_up += self._open[3] - took
            self._after += 1
            if self._after >= AFTER:
                self.close()
        self._know(took)
        if len(self._first) < FIRST:
            self._first.append((step, begin, end))
            if len(self._first) == FIRST:
                self._judge_first()

    def close(self) -> None:
        """Make a row of the last long step, whatever follows it."""
        if self._open is not None:
            self._keep((*self._open, max(self._made_up, 0)))
        self._open, self._made_up, self._after = None, 0, 0

    def _usual_if_long(self, took: int) -> int:
        """The usual step (ns) where this one is long; 0 where it is not."""
        usual = max(self._ordered[len(self._ordered) // 2], 1)
        # the job's own pattern, such as a value that is read from the GPU every ten steps
        often = self._ordered[-PATTERN] * _ALIKE if len(self._ordered) == LATEST else 0
        return usual if took > max(usual * self._times, often) else 0

    @property
    def _times(self) -> int:
        return TIMES << len(self.rows) // GRADE

    def _know(self, took: int) -> None:
        self._latest.append(took)
        bisect.insort(self._ordered, took)
        if len(self._latest) > LATEST:
            oldest = bisect.bisect_left(self._ordered, self._latest.popleft())
            del self._ordered[oldest]

    def _judge_first(self) -> None:
        """Keep the long ones of the job's first steps, by what most of these took."""
        usual = max(self._ordered[len(self._ordered) // 2], 1)
        for step, begin, end in self._first:
            if end - begin > TIMES * usual:
                self._keep((step, begin, end, usual, 0))

    def _keep(self, row: Row) -> None:
        if len(self.rows) < MOST:
            self.rows.append(row)
