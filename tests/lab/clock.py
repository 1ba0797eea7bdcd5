"""A clock that a test sets: whoever waits by it is given the time at once."""

from __future__ import annotations

import heapq
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.agent.guard.writer import Writer

#: how often, by this clock, those look around who are beside the one that waits
_TURN_NS = 50_000_000


class ManualClock(Clock):
    """Stands but while somebody waits by it; what was planned for a time happens then."""

    def __init__(self) -> None:
        self._now_ns = 1_000_000_000_000
        #: what the wall clock is ahead of this one
        self.wall_ahead_ns = 1_790_000_000_000_000_000
        self._planned: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        #: what others do whenever somebody waits (`WriterBeside`)
        self.beside: list[Callable[[], object]] = []
        self._turning = False
        #: every pause that was made
        self.slept: list[float] = []

    def now_ns(self) -> int:
        return self._now_ns

    def now(self) -> float:
        return self._now_ns / 1e9

    def wall_ns(self) -> int:
        return self._now_ns + self.wall_ahead_ns

    def plan(self, in_s: float, act: Callable[[], object]) -> None:
        """Have this done when so much time has passed."""
        heapq.heappush(self._planned, (self._later(in_s), next(self._order), act))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        until = self._later(seconds)
        self._turn()
        while self._now_ns < until:
            self._go_on(until)
            self._turn()

    def wait(
        self, readers: Iterable[Any], seconds: float | None = None, writers: Iterable[Any] = ()
    ) -> list[Any]:
        files = list(readers), list(writers)
        until = None if seconds is None else self._later(seconds)
        while True:
            self._turn()
            ready = REAL.wait(files[0], 0, files[1])
            if ready or (until is not None and self._now_ns >= until):
                return ready
            self._go_on(until)

    def happens(self, event: threading.Event, seconds: float) -> bool:
        until = self._later(seconds)
        while not event.is_set() and self._now_ns < until:
            self._go_on(until)
        return event.is_set()

    def _later(self, seconds: float) -> int:
        return self._now_ns + (max(1, round(seconds * 1e9)) if seconds > 0 else 0)

    def _go_on(self, until: int | None) -> None:
        """Let time pass until then, or as far as something happens before."""
        due = [] if until is None else [until]
        if self.beside and not self._turning:
            due.append(self._now_ns + _TURN_NS)
        if self._planned and self._planned[0][0] <= min(due, default=self._planned[0][0]):
            at, _, act = heapq.heappop(self._planned)
            self._now_ns = max(self._now_ns, at)
            act()
            return
        assert due, "this would wait for ever"
        self._now_ns = max(self._now_ns, min(due))

    def _turn(self) -> None:
        """Let the others do what they can; these wait for no one else."""
        if not self._turning:
            self._turning = True
            try:
                for act in tuple(self.beside):
                    act()
            finally:
                self._turning = False


class WriterBeside:
    """A rank's writer in the test's own thread: it does all it can whenever somebody waits."""

    def __init__(self, connection: socket.socket, clock: ManualClock) -> None:
        self.writer = Writer(connection, os.getpid(), clock)
        clock.beside.append(self.turn)

    def turn(self) -> None:
        """Receive all that there is, do whatever is due, and write all that is to be written."""
        self.writer.take(0)
        while REAL.wait(self.connections(), 0):
            self.writer.take(0)
        for jobs in (self.writer.jobs, self.writer.on_node):
            while not jobs.empty():
                self.writer.do(jobs)

    def connections(self) -> list[socket.socket]:
        """Those to all that write by it."""
        return [peer.connection for peer in self.writer.peers.values()]
