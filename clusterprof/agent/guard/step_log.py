"""What a rank's writer learns of its steps: the step log, and whether one lasts so long that the
rank may hang.

The log has every step near the window, summaries of all others; at most 1 MB.

`steps.csv` has the steps near the window, one a line; `pace.csv` the rest in blocks, with the
quartiles of each. A block has a thousand steps, or those of a minute where they take longer; after
every thousand blocks it may have twice as many, so that a job of weeks fits as well. `pauses.csv`
has the long steps (`long_steps`), whichever of the two they are in.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from typing import Deque, Dict, Iterable, List, Tuple

from ..contracts import files, paths
from . import long_steps

#: So many steps before the window and after it are near it.
NEAR = 500
#: So many are near a later window: of those there may be many in a run.
NEAR_LATER = 100
#: So many of the latest are written beside a flight recorder that is saved while the job runs.
LATEST = 1_000
#: Together less than 1 MB, the steps inside of later windows apart: a step's line has 47 bytes, a
#: block's 97 at most, a long step's 70 or less.
MOST_STEPS = 5_000
MOST_BLOCKS = 6_000
BLOCK = 1_000
BLOCK_NS = 60_000_000_000
#: After so many blocks each may be twice as long.
GRADE = 1_000
#: A step hangs that lasts so many times the usual, which is the median of so many steps.
TIMES = 20
_KNOWN = 1_000
#: cells of a block's row: a count is between its first step and its times
_OF_A_BLOCK = 8
HEADS = {
    paths.STEPS: "step,begin_ns,end_ns\n",
    paths.PACE: "first_step,count,begin_ns,end_ns,median_ns,q1_ns,q3_ns,longest_ns\n",
    paths.PAUSES: long_steps.HEAD,
}
#: Begin and end of a step by the monotonic clock, ns.
Step = Tuple[int, int]
Row = Tuple[int, ...]


class StepLog:
    """Steps come by `add` from one thread, are written by `write` from another."""

    def __init__(self, folder: str, window: Tuple[int, int], wall_ns: int) -> None:
        """`wall_ns`: what the wall clock is ahead of the monotonic one."""
        self.folder = folder
        self.near = [range(window[0] - NEAR, window[1] + NEAR)]
        #: inside later windows
        self.inside: List[range] = []
        #: from which step on the times are by which difference
        self.walls = [(0, wall_ns)]
        #: the number of the next step
        self.count = 0
        #: which log of this rank's it is: 2 for steps.2.csv
        self.number = 0
        self.steps: List[Row] = []
        self.blocks: List[Row] = []
        self.long = long_steps.LongSteps()
        self._block: List[Step] = []
        self._lock = threading.Lock()
        #: the latest steps, whichever
        self.latest: Deque[Row] = deque(maxlen=LATEST)
        #: how many rows are in a file already; it is to be made where it is not in here
        self._written: Dict[str, int] = {}
        self._count_written = 0

    def add(self, first: int, steps: Iterable[Step]) -> None:
        """The steps from number `first` on."""
        with self._lock:
            if first != self.count:  # some were lost on the way
                self._close()
                self.count = first
            for begin, end in steps:
                self.latest.append((self.count, begin, end))
                self.long.add(self.count, begin, end)
                near = self.near if len(self.steps) < MOST_STEPS else self.inside
                if any(self.count in window for window in near):
                    self._close()
                    self.steps.append((self.count, begin, end))
                elif len(self.blocks) < MOST_BLOCKS:
                    self._block.append((begin, end))
                self.count += 1
                if len(self._block) >= BLOCK << len(self.blocks) // GRADE:
                    self._close()

    def attend(self, steps: Tuple[int, int]) -> None:
        """Keep the steps in and near a later window, those in it whatever their number."""
        with self._lock:
            self.near.append(range(steps[0] - NEAR_LATER, steps[1] + NEAR_LATER))
            self.inside.append(range(*steps))

    def anchor(self, wall_ns: int, since: int = 0) -> None:
        """All times from step `since` on, written already or not, are by this difference of the
        two clocks.
        """
        with self._lock:
            self.walls = [wall for wall in self.walls if wall[0] < since] + [(since, wall_ns)]
            self._written = {}

    def claim(self) -> None:
        """Make steps.csv, or steps.2.csv where this rank has one already. Raises OSError."""
        while True:
            self.number += 1
            with contextlib.suppress(FileExistsError), open(self.path(paths.STEPS), "x") as file:
                file.write(HEADS[paths.STEPS])
                self._written[paths.STEPS] = 0
                return

    def path(self, name: str) -> str:
        """The file `name`, numbered as this log."""
        return os.path.join(self.folder, paths.numbered(name, self.number))

    def write(self, *, all_of_it: bool = False) -> None:
        """Bring to the files what is new: at most one operation where all steps are of one kind,
        and one for long steps.

        `all_of_it`: also a block that could still grow. Raises OSError.
        """
        with self._lock:
            old = self._block[-1][1] - self._block[0][0] if self._block else 0
            if all_of_it or old >= BLOCK_NS << len(self.blocks) // GRADE:
                self._close()
            if all_of_it:
                self.long.close()
            progress, self._count_written = self.count != self._count_written, self.count
            written, new_lines = dict(self._written), {}
            every = (paths.STEPS, self.steps), (paths.PACE, self.blocks)
            for name, rows in (*every, (paths.PAUSES, self.long.rows)):
                if new_rows := rows[written.get(name, 0) :]:
                    new_lines[name] = "".join(line(row, self.walls) for row in new_rows)
                    self._written[name] = len(rows)
        try:
            for name, lines in new_lines.items():
                if name not in written:
                    files.write(self.path(name), HEADS[name] + lines)
                    continue
                # Not made anew: a run directory that was deleted stays deleted.
                log = os.open(self.path(name), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                with open(log, "w", encoding="ascii") as file:
                    file.write(lines)
            if progress and not new_lines:  # the file's time shows that the rank runs
                os.utime(self.path(paths.STEPS))
        except OSError:
            with self._lock:  # what is in the files cannot be known: next time as a whole
                self._written = {}
            raise

    def write_latest(self, name: str) -> None:
        """Write the latest steps to the file `name` beside the log. Raises OSError."""
        with self._lock:
            lines = [line(row, self.walls) for row in self.latest]
        files.write(self.path(name), HEADS[paths.STEPS] + "".join(lines))

    def _close(self) -> None:
        """Make a row of the steps that are in no row yet."""
        steps, self._block = self._block, []
        if steps:
            self.blocks.append(summary(self.count - len(steps), steps))


def summary(first: int, steps: List[Step]) -> Row:
    """One row of pace.csv: `steps` from number `first` on."""
    took = sorted(end - begin for begin, end in steps)
    count = len(took)
    median = (took[(count - 1) // 2] + took[count // 2]) // 2
    return (
        first, count, steps[0][0], steps[-1][1],
        median, took[count // 4], took[3 * count // 4], took[-1],
    )  # fmt: skip


def line(row: Row, walls: List[Tuple[int, int]]) -> str:
    """A row as it is in its file, its two times by the wall clock: `walls` as of a `StepLog`."""
    wall_ns = next(wall_ns for since, wall_ns in reversed(walls) if row[0] >= since)
    first = 2 if len(row) == _OF_A_BLOCK else 1
    cells = (*row[:first], row[first] + wall_ns, row[first + 1] + wall_ns, *row[first + 2 :])
    return ",".join(map(str, cells)) + "\n"


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
        overdue_s = self._last_s + self.unseen_s + max(self.after_s, TIMES * usual_s)
        self.found = now_s >= overdue_s
        self.look_at = math.inf if self.found else overdue_s
        return self.found
