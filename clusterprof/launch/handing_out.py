"""The tasks of an MPI job: the first one hands out sources, the others read and send tables.

These are the processes that have MPI (`launch.tasks`), and all they do is move messages. Each sends
an update every second, so that one that was killed, stopped or cut off is known by its silence, by
name, and its source is given back. mpi4py.futures has the same work done, but does not say who has
which part of it, and ends with all or not at all.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any

from clusterprof import words
from clusterprof.agent.contracts.timing import REAL
from clusterprof.ingest import engines, handover
from clusterprof.ingest.reading_process import Lost, Read, Reader, limit_s, too_long
from clusterprof.ingest.sources import Source

#: how often a task sends an update, and who waits looks for messages
BEAT_S, _LOOK_S = 1.0, 0.002

#: Messages of a few bytes are out within a moment; what a lost task had not taken is left.
DISMISS_S = 5.0

#: MPI counts what a message has by 32 bits: larger tables are several.
_LARGEST_MESSAGE = 1 << 28

#: tags: messages to the others, their messages, their tables
_DOWN, _UP, _TABLES = 1, 2, 3


@dataclass
class _Sending:
    """Messages under way: MPI has not read their memory yet."""

    comm: Any
    requests: list[Any] = field(default_factory=list)

    def say(self, message: object, rank: int, tag: int) -> None:
        """Send a message. Raises RuntimeError (MPI's errors are)."""
        self.requests.append(self.comm.isend(message, rank, tag))
        self.under_way()

    def under_way(self) -> bool:
        """Whether a message is; it takes this for MPI to send it."""
        self.requests = [each for each in self.requests if not each.test()[0]]
        return bool(self.requests)


class _Pace:
    """Looks often while there is something to do, and seldom while there is not."""

    def __init__(self) -> None:
        self.busy = False

    def __iter__(self) -> Iterator[None]:
        while True:
            self.busy = False
            yield
            if not self.busy:
                REAL.sleep(_LOOK_S)


# -- a task that reads ---------------------------------------------------------------------------


def serve(comm: Any, over: Callable[[int], None]) -> bool:
    """Read what the first task hands out, until that ends; whether all tasks are there.

    `over` is told its status then, 0 where it is lost.
    """
    sending, pace = _Sending(comm), _Pace()
    updated = beat = REAL.now()
    reading: tuple[int, Future[int | Lost]] | None = None
    with _reader() as ask:
        for _ in pace:
            now = REAL.now()
            if comm.iprobe(0, _DOWN):
                updated, pace.busy = now, True
                match comm.recv(source=0, tag=_DOWN):
                    case (int(status), bool(whole)):
                        over(status)
                        return whole
                    case (index, read, source):
                        reading = index, ask(read, source)
            elif now - updated > engines.SILENCE_S:
                over(0)
                return False
            if reading and reading[1].done():
                _hand_back(sending, reading[0], reading[1].result())
                reading = None
            if now - beat > BEAT_S:
                beat = now
                sending.say(None, 0, _UP)
    raise AssertionError("it ends in the loop")


@contextmanager
def _reader() -> Iterator[Callable[[Read, Source], Future[int | Lost]]]:
    """A reading process, that this task does not wait for."""
    reader = Reader()
    try:
        with ThreadPoolExecutor(1) as thread:
            try:
                yield lambda read, source: thread.submit(reader.ask, read, source)
            finally:
                reader.kill()
    finally:
        reader.close()


def _hand_back(sending: _Sending, index: int, answer: int | Lost) -> None:
    if isinstance(answer, Lost):
        sending.say((index, answer), 0, _UP)
        return
    memory = handover.mapped(answer)
    sending.say((index, len(memory)), 0, _UP)
    for piece in _pieces(memory):
        sending.requests.append(sending.comm.Isend(piece, 0, _TABLES))


def _pieces(memory: mmap) -> list[memoryview]:
    whole = memoryview(memory)
    return [whole[at : at + _LARGEST_MESSAGE] for at in range(0, len(whole), _LARGEST_MESSAGE)]


# -- the first task ------------------------------------------------------------------------------


@dataclass
class _Task:
    """What the first task knows of another."""

    host: str
    updated: float
    silent: bool = False
    #: whether it reads; the index of that source while it is wanted, and how long it may take
    busy: bool = False
    index: int | None = None
    limit_s: float = 0.0
    since: float = 0.0
    #: tables that it sends: their index, the file, MPI's requests
    coming: tuple[int, int, list[Any]] | None = None

    @property
    def lost(self) -> bool:
        """Whether nothing can be had of it: it is silent, or reads for ever."""
        return self.silent or (self.busy and self.index is None)


class Leader:
    """The first task: hands out what the merging process asks for, until that says its status."""

    def __init__(self, comm: Any, calls: Connection, hosts: Sequence[str]) -> None:
        now = REAL.now()
        self._comm, self._calls, self._sending = comm, calls, _Sending(comm)
        self._tasks = {rank: _Task(host, now) for rank, host in enumerate(hosts) if rank}
        self._waiting: deque[tuple[int, Source]] = deque()
        self._read: Read | None = None

    def run(self) -> bool:
        """Work until the end; whether all tasks are there then."""
        pace, beat = _Pace(), REAL.now()
        for _ in pace:
            if self._calls.poll():
                order = self._calls.recv()
                if isinstance(order, int):
                    break
                self._read, sources = order
                self._waiting.extend(enumerate(sources))
            while self._comm.iprobe(tag=_UP):
                pace.busy = True
                self._take()
            beats = REAL.now() - beat > BEAT_S
            if beats:
                beat = REAL.now()
                self._calls.send(None)
            for rank, task in self._tasks.items():
                self._receive(task)
                if not task.silent:
                    self._look_after(rank, task, beats)
            while self._waiting and all(task.lost for task in self._tasks.values()):
                self._calls.send((self._waiting.popleft()[0], Lost("was lost, as all were", "MPI")))
        whole = not any(task.lost for task in self._tasks.values())
        for rank, task in self._tasks.items():
            if not task.silent:
                self._say((order, whole), rank, task)
        REAL.until(lambda: not self._sending.under_way(), DISMISS_S, _LOOK_S)
        return whole

    def _look_after(self, rank: int, task: _Task, beats: bool) -> None:
        """See whether a task is there, and give it what to read."""
        now = REAL.now()
        if now - task.updated > engines.SILENCE_S:
            task.silent = True
            self._lose(task, f"sent no update for {words.age(engines.SILENCE_S)}")
        elif task.index is not None and now - task.since > task.limit_s:
            self._lose(task, too_long(task.limit_s))
        elif not task.busy and self._waiting:
            task.busy, (task.index, source) = True, self._waiting.popleft()
            task.since, task.limit_s = now, limit_s(source) + engines.SILENCE_S
            self._say((task.index, self._read, source), rank, task)
        elif beats:
            self._say(None, rank, task)

    def _say(self, message: object, rank: int, task: _Task) -> None:
        try:
            self._sending.say(message, rank, _DOWN)
        except RuntimeError:  # MPI's errors are
            task.silent = True
            self._lose(task, "was lost by MPI")

    def _lose(self, task: _Task, why: str) -> None:
        if task.index is not None:
            self._calls.send((task.index, Lost(why, task.host)))
            task.index = None

    def _take(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        message = self._comm.recv(tag=_UP, status=status)
        task = self._tasks[status.source]
        task.updated, task.silent = REAL.now(), False
        if message is None:
            return
        index, answer = message
        if isinstance(answer, Lost):
            if index == task.index:
                self._calls.send((index, answer))
            task.index, task.busy = None, False
            return
        # tables follow, whether they are still wanted or not
        file, memory = handover.empty(answer)
        requests = [self._comm.Irecv(piece, status.source, _TABLES) for piece in _pieces(memory)]
        task.coming = (index, file, requests)

    def _receive(self, task: _Task) -> None:
        """Pass on the tables that a task sends, once they are here."""
        if task.coming is None or not all(request.Test() for request in task.coming[2]):
            return
        index, file, _ = task.coming
        if index == task.index:
            self._calls.send((index, None))
            handover.send(self._calls, file)
        else:
            os.close(file)
        task.coming, task.index, task.busy = None, None, False
