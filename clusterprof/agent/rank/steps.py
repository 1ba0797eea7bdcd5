"""Counting steps and logging when each began and ended, on every rank of the job.

The hook runs once per optimizer step inside somebody's training loop: between two events
(the window's ends, a flush) it takes a clock reading, appends it and compares two numbers.

Steps are timed by the monotonic clock and written as wall-clock times by one difference of the two:
that of the moment when counting began or, in a rank that captures, when its window opened, as in
the report. A wall clock that is set during the run makes no step longer, shorter or negative.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from _weakref import ref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from ..contracts.timing import REAL, Clock
from . import hooks
from .hooks import entry

if TYPE_CHECKING:
    from ..contracts.outbox import Outbox

#: A step that ends this long after the last time hands the new ones to the writer.
FLUSH_NS = 2_000_000_000
#: The same while an order for a window is expected, which the writer then has at any moment.
SOON_NS = 100_000_000
#: So many steps are handed over at once, however short they are.
MOST_PENDING = 10_000
#: A wall clock that was set by less is left as it is in the log: steps take milliseconds.
SET_NS = 100_000
#: So many steps of one other optimizer without one of the counted, or on one other thread without
#: one on the counted: the program has moved on.
GIVEN_UP = 16
#: Optimizers beside the counted one that are remembered: a program may make new ones for ever.
MOST_OTHERS = 4096


class Other:
    """What an optimizer beside the counted one has done since the counted one's last step."""

    def __init__(self, optimizer: Any, counted: int, alone: int, first_ns: int) -> None:
        self.optimizer = ref(optimizer)
        #: how many steps the counted one had made by then, and how many of them without this one
        self.at = counted
        self.alone = alone
        self.first_ns = first_ns
        self.steps = 1


class Counter:
    """Counts steps by the boundaries between them, and calls who attends (`attend`) at some.

    A step is a step of the *first optimizer that stepped*: a program with two (a GAN, Muon
    beside AdamW, one per parameter) steps each of them once per iteration. Two that take turns
    (each makes several steps without the other) both count. Micro-batches of gradient
    accumulation do not count.

    The steps of one thread are counted, until it has ended or another one trains on without it.
    Who attends is called between two steps of the main loop: never inside autograd (`between`).
    """

    def __init__(self, clock: Clock = REAL) -> None:
        self.clock = clock
        self._now_ns = clock.now_ns
        self.count = 0
        self.enabled = False
        #: the program counts by itself (`clusterprof.step()`, `--step-on`): optimizers do not
        self.counts_itself = False
        #: the count at which somebody is called next, or so many steps have not been handed over
        self.next_event = MOST_PENDING
        self._attending: List[Tuple[int, Callable[[int], int]]] = []
        #: called at a step before counting has begun
        self.on_first: Optional[Callable[[], None]] = None
        self.outbox: Optional[Outbox] = None
        #: called now and then between two steps, or inside of autograd, after the writer was read
        self.after_flush: Optional[Callable[[], None]] = None
        #: what is added to the monotonic clock's times in the log
        self._wall = 0
        self._begin = 0
        #: (begin, end) by the monotonic clock of the steps that were not handed over yet
        self._pending: List[Tuple[int, int]] = []
        self._flush_at = 0
        #: until then an order is expected
        self._soon_until = 0
        self._counted: Optional[ref[Any]] = None
        #: steps of the counted optimizer, and those of them since another one stepped
        self._own = 0
        self._run = 0
        self._others: Dict[int, Other] = {}
        #: the one of them whose turn it is
        self._turn: Optional[int] = None
        #: whose steps are counted (`get_ident`), and how many came from elsewhere since
        self.thread = 0
        self._elsewhere = 0
        self._attends_backward = False

    def begin(self, outbox: Optional[Outbox] = None, since: int = 0) -> None:
        """Start counting; step 0 began `since` (monotonic), by default now.

        `outbox` takes the log, without one there is none.
        """
        self.outbox = outbox
        self.enabled = True
        self._wall = wall_minus_monotonic(self.clock)
        now = self._now_ns()
        self._begin, self._flush_at = since or now, now + FLUSH_NS

    def end(self) -> None:
        """Stop counting: in a forked child, or at the program's end."""
        self.enabled, self.outbox = False, None
        self.after_flush = self.on_first = None
        self._attending.clear()
        self._plan()

    def attend(self, due: int, act: Callable[[int], int]) -> None:
        """Call `act(count)` once `due` steps have ended; it returns when next, -1 for never.

        Of several that are due at once the first that attended comes first.
        """
        self._attending = [attending for attending in self._attending if attending[0] >= 0]
        self._attending.append((due, act))
        self._plan()

    def _plan(self) -> None:
        full = self.count - len(self._pending) + MOST_PENDING
        self.next_event = min([full, *(due for due, _ in self._attending if due >= 0)])

    def optimizer_stepped(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Post hook of every torch optimizer's step."""
        try:
            if get_ident() != self.thread and not self._moves_here():
                return
            if self._counted is not None and self._counted() is optimizer:
                self._own += 1
                self._run += 1
                self._turn = None
            elif not self._counts_too(optimizer):
                return
            if self.counts_itself:
                return
            if not self.enabled and self.on_first is not None:
                entry.run(self.on_first)
            if self.enabled:
                self.boundary()
        except Exception as error:
            entry.failed(error)

    def _counts_too(self, optimizer: Any) -> bool:
        """Whether this step, not of the counted optimizer, is a step of the program all the same.

        A second step without one of the counted shows a turn, if the counted one has stepped
        twice without this one before: the turn's first step is then counted late, at its time.
        """
        if self._counted is None or self._counted() is None:
            self._count(optimizer)
            return True
        me, run = id(optimizer), self._run
        self._run = 0
        other = self._others.get(me)
        if other is not None and other.optimizer() is not optimizer:
            other = None  # one that is gone had this address
        if other is None or other.at != self._own:
            if len(self._others) >= MOST_OTHERS:
                self._others.clear()
            alone = run if other is None else self._own - other.at
            self._others[me] = Other(optimizer, self._own, alone, self._now_ns())
            return False
        other.steps += 1
        if other.steps >= GIVEN_UP:
            self._count(optimizer)
            return True
        if other.alone < 2 or self._turn not in (None, me):
            return False
        if self._turn is None:
            self._turn = me
            if not self.counts_itself and self.enabled:
                self._ended(other.first_ns)
        return True

    def _count(self, optimizer: Any) -> None:
        """`optimizer` is the counted one from now on."""
        self._counted = ref(optimizer)
        self._own = self._run = 1
        self._others.clear()
        self._turn = None
        self._in_autograd()

    def _moves_here(self) -> bool:
        """Whether the steps of this thread, which is not the counted one, are counted from now."""
        self._elsewhere += 1
        if self._elsewhere < GIVEN_UP and self.thread in sys._current_frames():
            return False
        self.thread = get_ident()
        self._elsewhere = 0
        self._counted = None
        return True

    def say(self) -> None:
        """One step has ended, says the program itself: optimizers no longer count."""
        try:
            if not self.enabled:
                if self.on_first is None:
                    return
                entry.run(self.on_first)
            self.counts_itself = True
            if get_ident() == self.thread or self._moves_here():
                self.boundary()
        except Exception as error:
            entry.failed(error)

    def boundary(self) -> None:
        """One step ends and the next begins."""
        now = self._now_ns()
        self._ended(now)
        self._elsewhere = 0
        if self.next_event <= self.count or now >= self._flush_at:
            entry.run(self.between)

    def _ended(self, now: int) -> None:
        """A step has ended at `now`."""
        self._pending.append((self._begin, now))
        self._begin = now
        self.count += 1

    def between(self) -> None:
        """Between two steps, or inside of autograd: whatever is due and may be done there."""
        acts = any(0 <= due <= self.count for due, _ in self._attending)
        acts = acts and not self._in_autograd()
        if acts:
            for index, (due, act) in enumerate(self._attending):
                if 0 <= due <= self.count:
                    self._attending[index] = (-1, act)
                    self._attending[index] = (act(self.count), act)
            self._plan()
            # What the profiler's start or stop cost lies between two steps, in neither.
            self._begin = self._now_ns()
        if acts or len(self._pending) >= MOST_PENDING or self._now_ns() >= self._flush_at:
            self.flush()
            if self.after_flush is not None:
                self.after_flush()

    def expect(self, seconds: float) -> None:
        """An order may come within so long: read what the writer has more often, from now on."""
        self._soon_until = self._now_ns() + int(seconds * 1e9)
        self.flush()

    def hurry(self) -> None:
        """Have `between` called at the end of this step."""
        self._flush_at = 0

    def after_backward(self) -> None:
        """Whatever became due inside of it."""
        if self.next_event <= self.count or self._now_ns() >= self._flush_at:
            entry.run(self.between)

    def _in_autograd(self) -> bool:
        """Whether an optimizer steps inside of torch's backward: `between` is called after it."""
        task = getattr(sys.modules.get("torch._C"), "_current_graph_task_id", None)
        if task is None or task() == -1:
            return False
        if not self._attends_backward:
            self._attends_backward = True
            autograd = sys.modules.get("torch.autograd")
            if autograd is not None and hasattr(autograd, "backward"):
                hooks.wrap(autograd, "backward", self.after_backward, lets_wait=False)
        return True

    def anchor(self, since: int = 0) -> None:
        """Let the log's times from step `since` on be of the wall clock as it is now."""
        wall = wall_minus_monotonic(self.clock)
        if abs(wall - self._wall) >= SET_NS:
            self._wall = wall
            if self.outbox is not None:
                self.outbox.say("anchor", wall_ns=wall, since=since)

    def current(self) -> Tuple[int, int]:
        """The step that is running, and when it began (monotonic, ns); from any thread."""
        while True:
            step, begin = self.count, self._begin
            if step == self.count:
                return step, begin

    def wall(self, monotonic_ns: int) -> int:
        """A reading of the monotonic clock as the log would have it."""
        return monotonic_ns + self._wall

    def flush(self) -> None:
        """Hand the new steps to the process that writes the log."""
        pending, self._pending = self._pending, []
        now = self._now_ns()
        self._flush_at = now + (SOON_NS if now < self._soon_until else FLUSH_NS)
        self._plan()
        if self.outbox is not None and pending:
            self.outbox.steps(self.count - len(pending), pending)
            self.outbox.look()


def ended_before(count: int, first: int, end: int) -> str:
    """Why there is nothing of the steps `first` to `end` of a program that has ended."""
    why = "the program ended after %d steps, before the window %d:%d began" % (count, first, end)
    how = "none of torch's optimizers stepped; --step-on module:function names what ends a step"
    return why if count else "%s: %s" % (why, how)


def wall_minus_monotonic(clock: Clock) -> int:
    """What the wall clock is ahead of the monotonic one, ns; of three readings the closest."""
    readings = []
    for _ in range(3):
        before, wall, after = clock.now_ns(), clock.wall_ns(), clock.now_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


#: This process's counter; `clusterprof.step()` speaks to it.
counter = Counter()
