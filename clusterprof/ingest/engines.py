"""Who reads the reports: this process, processes on this host, or the tasks of an MPI job.

Whoever it is, one function reads each source, and what it gave comes back in the order of the
sources: results do not depend on the engine, nor on the number of workers. A reading process that
dies, hangs or runs out of memory loses its source to another one, and the rank says so.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias

from clusterprof import console
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.ingest.apart import Lost, Readers, host, limit_s, taken_up
from clusterprof.ingest.sources import KINETO, Source, suffix_of
from clusterprof.tables import RankTables

#: what is read of one rank
Rank: TypeAlias = "RankTables | ClusterprofError"

#: reads one source; what is wrong with it is a value. A function of a module: it is sent by name
Read: TypeAlias = Callable[[Source], list[Rank]]

#: More do not read faster from one host's disk.
MOST_WORKERS = 8

#: What reading takes, for each byte: a packed trace's JSON 0.13 s/MB (measured on two
#: cores when Arrow read it); SQLite and Arrow read an export of nsys, 0.02 s/MB.
_TRACE_S, _EXPORT_S = 0.13e-6, 0.02e-6

#: So much work is worth processes, which hand back tables. Two traces of 2.5 s took a quarter less
#: processor time, and a third less memory, in threads.
_WORTH_PROCESSES_S = 5.0

#: Tables of a report come over MPI within this; a task from which nothing comes is lost.
ON_ITS_WAY_S = 30.0


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
        console.progress(f"reading reports: 0 of {len(sources)}")
        processors = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        workers = min(self.workers or processors, len(sources))
        few = len(sources) < 2 or sum(map(seconds, sources)) < _WORTH_PROCESSES_S
        if few and not self.always:
            if workers < 2:
                return [read(source) for source in sources]
            with ThreadPoolExecutor(workers) as threads:
                return [*threads.map(read, sources)]
        return once_more(read, sources, _apart(read, sources, workers))


@dataclass(frozen=True)
class Tasks:
    """The tasks of an MPI job, of which each reads in processes, behind a child of ours that has
    MPI.

    What they did not read, for whatever reason, this host reads again. It decides what is wrong
    with a report, so that another node, which lacks nsys or sees files late, never does.
    """

    #: to the child: see `launch.tasks`
    calls: Connection
    here: Processes

    def read(self, read: Read, sources: Sequence[Source]) -> list[list[Rank]]:
        """What `read` gives of each source."""
        # Tables that were reduced on the nodes are a fifth of what they are in memory: those come
        # over the file system, and no tables over MPI.
        far = [
            source
            for source in sources
            if source.path.exists() or source.reduced is None or not source.reduced.exists()
        ]
        came = dict(zip(far, self._over(read, far), strict=True))
        unsure = [source for source in sources if not _is_whole(came.get(source))]
        came |= zip(unsure, self.here.read(read, unsure), strict=True)
        # One that took its reader along is read in a process of its own, and not in this one.
        return once_more(read, sources, [came[source] for source in sources])

    def _over(self, read: Read, sources: Sequence[Source]) -> list[list[Rank] | Lost]:
        """What the tasks made of the sources; all that they did not answer is lost."""
        answers: list[list[Rank] | Lost] = [Lost("was lost with MPI", host())] * len(sources)
        longest_s = max((_limit_s(source) for source in sources), default=0.0) + ON_ITS_WAY_S
        with (
            suppress(EOFError, OSError),
            tempfile.TemporaryDirectory(prefix="clusterprof-") as folder,
        ):
            self.calls.send((read, [(source, _limit_s(source)) for source in sources], folder))
            for done in range(len(sources)):
                console.progress(f"reading reports: {done} of {len(sources)}")
                if not self.calls.poll(longest_s):
                    break
                place, answer = self.calls.recv()
                answers[place] = answer if isinstance(answer, Lost) else taken_up(answer)
        return answers


def once_more(
    read: Read, sources: Sequence[Source], answers: Sequence[list[Rank] | Lost]
) -> list[list[Rank]]:
    """Return what was read, with what was lost read again, one at a time."""
    pairs = [*zip(sources, answers, strict=True)]
    lost = [source for source, answer in pairs if isinstance(answer, Lost)]
    again = iter(_apart(read, lost, 1))
    whole = []
    for source, first in pairs:
        second = next(again) if isinstance(first, Lost) else first
        if not isinstance(first, Lost):
            whole.append(first)
        elif not isinstance(second, Lost):
            whole.append(first.read_again(second))
        else:
            error = ReportError(
                f"{source.path} could not be read: its reading process {second.why}",
                f"another one before it {first.why}",
                "read fewer reports at once, or elsewhere: clusterprof merge --workers 1 PATH",
            )
            whole.append([error])
    return whole


def _apart(read: Read, sources: Sequence[Source], workers: int) -> list[list[Rank] | Lost]:
    limited = [(source, _limit_s(source)) for source in sources]
    return Readers().read_each(read, limited, workers, "reports")


def _is_whole(answer: list[Rank] | Lost | None) -> bool:
    if isinstance(answer, list):
        return all(isinstance(rank, RankTables) for rank in answer)
    return answer is not None


def _limit_s(source: Source) -> float:
    return limit_s(path for path in (source.path, source.beside) if path is not None)


def seconds(source: Source) -> float:
    """What reading a source takes, about; 0 where its file cannot be seen."""
    try:
        path = source.beside or source.path
        size = path.stat().st_size / (12 if path.suffix == ".json" else 1)
    except OSError:
        return 0.0
    return size * (_TRACE_S if suffix_of(path) in KINETO else _EXPORT_S)
