"""Who reads the reports: this process, processes on this host, or the tasks of an MPI job.

Whoever it is, one function reads each source, and what it gave comes back in the order of the
sources: results do not depend on the engine, nor on the number of workers. A reading process that
dies, hangs or runs out of memory loses its source to another one, and the rank says so; so does a
task of MPI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol, TypeVar

from clusterprof import console
from clusterprof.errors import ReportError
from clusterprof.ingest import handover
from clusterprof.ingest.reading_process import Lost, Rank, Read, Reader, host
from clusterprof.ingest.sources import KINETO, Source, suffix_of
from clusterprof.tables import RankTables

_Sent = TypeVar("_Sent")
_Found = TypeVar("_Found")

#: More do not read faster from one host's disk.
MOST_WORKERS = 8

#: What reading takes, for each byte: Arrow reads a packed trace's JSON, 0.13 s/MB; SQLite and
#: Arrow read an export of nsys, 0.02 s/MB (measured on two cores).
_TRACE_S, _EXPORT_S = 0.13e-6, 0.02e-6

#: So much work is worth processes: each takes half a second to start, and hands back tables. Two
#: traces of 2.5 s took a quarter less processor time, and a third less memory, in threads.
_WORTH_PROCESSES_S = 5.0

#: Tasks of MPI send an update each second. After so long without one, stalls of a busy node
#: included, a task is lost; what it had is read again: a wrong guess costs time only.
SILENCE_S = 30.0


class Engine(Protocol):
    """Reads many sources."""

    def read(self, read: Read, sources: Sequence[Source]) -> list[list[Rank]]:
        """What `read` gives of each source, in their order."""


@dataclass(frozen=True)
class Processes:
    """Up to `workers` processes on this host; threads where there is too little to read.

    Unpacking, SQLite and Arrow run without the interpreter's lock, so that threads do for a few
    exports. `always`: processes, however little it is.
    """

    #: None: one for each processor that we may use, `MOST_WORKERS` at most
    workers: int | None = None
    always: bool = False

    def read(self, read: Read, sources: Sequence[Source]) -> list[list[Rank]]:
        """What `read` gives of each source. What was lost is read again when the others are
        through, one at a time: memory is free by then.
        """
        if not sources:
            return []
        workers = min(self.workers or _usual(), len(sources))
        few = len(sources) == 1 or sum(map(seconds, sources)) < _WORTH_PROCESSES_S
        if few and not self.always:
            if workers == 1:
                return [read(source) for source in sources]
            with ThreadPoolExecutor(workers) as threads:
                return _in_order([threads.submit(read, each) for each in sources], Future.result)
        found = self._apart(read, sources, workers)
        lost = [place for place, each in enumerate(found) if isinstance(each, Lost)]
        again = iter(self._apart(read, [sources[place] for place in lost], 1) if lost else ())
        return [
            each if not isinstance(each, Lost) else _second(source, each, next(again))
            for source, each in zip(sources, found, strict=True)
        ]

    def _apart(
        self, read: Read, sources: Sequence[Source], workers: int
    ) -> list[list[Rank] | Lost]:
        readers = [Reader() for _ in range(workers)]
        idle: SimpleQueue[Reader] = SimpleQueue()
        for reader in readers:
            idle.put(reader)

        def one(source: Source) -> list[Rank] | Lost:
            reader = idle.get()
            try:
                answer = reader.ask(read, source)
                return answer if isinstance(answer, Lost) else handover.unpack(answer)
            finally:
                idle.put(reader)

        threads = ThreadPoolExecutor(workers)
        try:
            return _in_order([threads.submit(one, each) for each in sources], Future.result)
        finally:
            # Killed before the threads are waited for: an interrupted merge ends at once.
            threads.shutdown(wait=False, cancel_futures=True)
            for reader in readers:
                reader.kill()
            threads.shutdown()
            for reader in readers:
                reader.close()


@dataclass(frozen=True)
class Tasks:
    """The tasks of an MPI job, each with a reading process, behind a child of ours that has MPI.

    What they did not read, for whatever reason, this host reads again. It decides what is wrong
    with a report, so that another node, which lacks nsys or sees files late, never does.
    """

    #: to the child: see `launch.handing_out`
    calls: Connection
    here: Processes

    def read(self, read: Read, sources: Sequence[Source]) -> list[list[Rank]]:
        """What `read` gives of each source."""
        # Tables that were reduced on the nodes are a fifth of what they are in memory: those come
        # over the file system, and no tables over MPI.
        far = [place for place, each in enumerate(sources) if not _is_reduced(each)]
        found: list[list[Rank] | Lost | None] = [None] * len(sources)
        for place, each in zip(far, self._over(read, [sources[k] for k in far]), strict=True):
            found[place] = each
        lost = [place for place, each in enumerate(found) if isinstance(each, Lost)]
        unsure = [place for place, each in enumerate(found) if not _is_whole(each)]
        # One that took its reader along is read in a process of its own, and not in this one.
        for places, always in ((lost, True), (unsure, self.here.always)):
            again = replace(self.here, always=always).read(read, [sources[k] for k in places])
            for place, ranks in zip(places, again, strict=True):
                before = found[place]
                found[place] = before.read_again(ranks) if isinstance(before, Lost) else ranks
        return [each for each in found if isinstance(each, list)]

    def _over(self, read: Read, sources: Sequence[Source]) -> list[list[Rank] | Lost]:
        """What the tasks made of the sources; all that they did not answer is lost."""
        found: list[list[Rank] | Lost] = [Lost("was lost with MPI", host())] * len(sources)
        left = len(sources)
        with suppress(EOFError, OSError):
            if sources:
                self.calls.send((read, list(sources)))
            while left and self.calls.poll(SILENCE_S):
                answer = self.calls.recv()
                if answer is not None:  # else it is there, and waits
                    place, lost = answer
                    found[place] = lost or handover.unpack(handover.receive(self.calls))
                    left -= 1
                console.progress(_progress(len(sources) - left, len(sources)))
        return found


def _second(source: Source, lost: Lost, again: list[Rank] | Lost) -> list[Rank]:
    if not isinstance(again, Lost):
        return lost.read_again(again)
    return [
        ReportError(
            f"{source.path} could not be read: its reading process {again.why}",
            f"another one before it {lost.why}",
            "read fewer reports at once, or elsewhere: clusterprof merge --workers 1 PATH",
        )
    ]


def _is_reduced(source: Source) -> bool:
    """Whether a source's tables are there, and its report is not."""
    there = source.reduced is not None and source.reduced.exists()
    return there and not source.path.exists()


def _is_whole(found: list[Rank] | Lost | None) -> bool:
    if isinstance(found, list):
        return all(isinstance(each, RankTables) for each in found)
    return found is not None


def _in_order(
    futures: Sequence[Future[_Sent]], received: Callable[[Future[_Sent]], _Found]
) -> list[_Found]:
    """What was found, in order; meanwhile it is said how many there are."""
    found = []
    for place, future in enumerate(futures):
        console.progress(_progress(place, len(futures)))
        found.append(received(future))
    return found


def _progress(done: int, of: int) -> str:
    return f"reading reports: {done} of {of}"


def seconds(source: Source) -> float:
    """What reading a source takes, about; 0 where its file cannot be seen."""
    try:
        path = source.beside or source.path
        size = path.stat().st_size / (12 if path.suffix == ".json" else 1)
    except OSError:
        return 0.0
    return size * (_TRACE_S if suffix_of(path) in KINETO else _EXPORT_S)


def _usual() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
