"""Who reads the reports: this process, processes on this host, or the tasks of an MPI job.

Whoever it is, one function reads each source, and what it gave comes back in the order of the
sources: results do not depend on the engine, nor on the number of workers. A reading process may
die, hang or run out of memory and costs no other: another one reads its source, and the rank says
so. A rank's tables are as large as its report. Through a pipe they would be copied three times: the
large ones lie in a file, which is mapped where they are used, so that only MPI copies them.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import active_children, forkserver, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from clusterprof import console, mapped, words
from clusterprof.agent.contracts import processes
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.ingest.sources import Source, seconds
from clusterprof.priority import end_with_parent
from clusterprof.tables import RankTables, empty

_Of = TypeVar("_Of")
_Part = TypeVar("_Part")

#: A reading process that takes longer hangs: twenty times as long as the slowest format takes for
#: its size (traces of an older Kineto become Python objects, 0.3 s/MB measured on two cores), and
#: five minutes for a file system or a node that is busy.
_PATIENCE_S, _PATIENCE_S_PER_BYTE = 300.0, 20 * 0.3e-6

#: the tables of a rank that may be large
_LARGE = ("activity", "host_calls")

#: numbers of the files that this process writes
_numbers = count()


# -- what one process hands to another -----------------------------------------------------------


class _Split(NamedTuple):
    """A rank's tables, and a file that has the large ones, or on its way to a host its content."""

    others: RankTables
    large: Path | bytes


def put_down(parts: Iterable[Any], folder: str) -> list[Any]:
    """Return the same with ranks' large tables in files of a folder that this process alone writes.

    Tables for which there is no space stay as they are. Raises OSError for those of `packed`.
    """
    outcomes = [*parts]
    for place, outcome in enumerate(outcomes):
        file = Path(folder, f"{next(_numbers)}.arrow")
        if isinstance(outcome, _Split) and isinstance(outcome.large, bytes):
            file.write_bytes(outcome.large)
            outcomes[place] = outcome._replace(large=file)
        elif isinstance(outcome, RankTables):
            try:
                with file.open("wb") as opened:
                    mapped.write([getattr(outcome, name) for name in _LARGE], opened)
            except OSError:
                file.unlink(missing_ok=True)
                continue
            others = replace(outcome, **{name: empty(name) for name in _LARGE})
            outcomes[place] = _Split(others, file)
    return outcomes


def packed(parts: Iterable[Any]) -> list[Any]:
    """Return what was put down as bytes, for another host to put down. Raises OSError."""
    return [
        outcome._replace(large=outcome.large.read_bytes())
        if isinstance(outcome, _Split) and isinstance(outcome.large, Path)
        else outcome
        for outcome in parts
    ]


def taken_up(parts: Iterable[Any]) -> list[Any]:
    """Return what was put down on this host, whose files may be removed. Raises OSError."""
    return [
        replace(outcome.others, **dict(zip(_LARGE, mapped.read(outcome.large), strict=True)))
        if isinstance(outcome, _Split) and isinstance(outcome.large, Path)
        else outcome
        for outcome in parts
    ]


# -- processes that read -------------------------------------------------------------------------


class Lost(NamedTuple):
    """What a reading process did not hand back."""

    why: str
    host: str


def host() -> str:
    """This host's name, as warnings have it."""
    return socket.gethostname()


def limit_s(files: Iterable[Path]) -> float:
    """How long a process may read these files before it is taken to hang."""
    size = 0
    for file in files:
        with suppress(OSError):
            size += file.stat().st_size
    return _PATIENCE_S + _PATIENCE_S_PER_BYTE * size


class Readers:
    """Processes of this host, one for each thing that is read; what they put down is `taken`."""

    def __init__(self, taken: Callable[[list[Any]], list[Any]] = taken_up) -> None:
        self._taken = taken
        self._context = _context()
        self._running: set[BaseProcess] = set()
        self._over = False

    def read_each(
        self,
        function: Callable[[_Of], list[_Part]],
        things: Sequence[tuple[_Of, float]],
        workers: int,
        noun: str,
    ) -> list[list[_Part] | Lost]:
        """Return what `read` does for each thing and its limit, in order, so many at a time.

        Meanwhile it is said how many of `noun` are read.
        """
        with ThreadPoolExecutor(max(workers, 1)) as threads:
            try:
                answers = [
                    threads.submit(self.read, function, thing, within_s)
                    for thing, within_s in things
                ]
                for done, _ in enumerate(futures.as_completed(answers), 1):
                    console.progress(f"reading {noun}: {done} of {len(answers)}")
                return [answer.result() for answer in answers]
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                self._over = True  # an interrupted merge ends at once
                for process in [*self._running]:
                    _end(process)

    def read(
        self, function: Callable[[_Of], list[_Part]], thing: _Of, within_s: float
    ) -> list[_Part] | Lost:
        """Return what `function`, of a module, gives of a thing in a process that ends then.

        It has a process group and a folder for temporary files of its own: both go with it.
        """
        pool = process = None
        folder = ""
        try:
            folder = tempfile.mkdtemp(prefix="clusterprof-")
            pool = ProcessPoolExecutor(1, self._context)
            pid = pool.submit(_begin, folder, dict(os.environ)).result(within_s)
            process = next(child for child in active_children() if child.pid == pid)
            self._running.add(process)
            if self._over:
                _end(process)
            answer = pool.submit(_answer, function, thing, folder).result(within_s)
            return self._taken(answer)
        except futures.TimeoutError:
            why = f"took longer than {words.age(within_s)}"
        except MemoryError:
            why = "ran out of memory"
        except BrokenProcessPool:
            why = _how_ended(pool, process)
        except Exception as error:  # noqa: BLE001 - one that is odd costs no other
            why = f"failed ({type(error).__name__}: {error})"
        finally:
            self._running.discard(process)
            _end(process)
            if pool:
                pool.shutdown(wait=False)  # its file system may keep it
            shutil.rmtree(folder, ignore_errors=True)
        return Lost(why, host())


def _end(process: BaseProcess | None) -> None:
    """Kill a reading process, and what it has started."""
    if process is not None and process.pid:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def _how_ended(pool: ProcessPoolExecutor | None, process: BaseProcess | None) -> str:
    """How a reading process ended by itself, in words."""
    if pool is None or process is None:
        return "ended before it read anything"
    pool.shutdown()  # it waits for the process, too
    status = int(process.exitcode or 0)
    if status == -signal.SIGKILL:
        return "was killed, most often by the kernel for want of memory"
    return processes.ended(status)


def _context() -> BaseContext:
    """Return what starts processes: copies of one that has imported all, each within a moment.

    That one looks for modules where we do, and not in the current folder first. Where it cannot
    (Python 3.10), or a socket of its own has too long a name (TMPDIR), each starts by itself.
    """
    before = os.environ.copy()
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    try:
        forkserver.set_forkserver_preload(["clusterprof.ingest.preloaded"])
        if sys.version_info >= (3, 11):
            forkserver.ensure_running()
            return get_context("forkserver")
    except OSError:
        pass
    finally:
        for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
            del os.environ[name]
            os.environ.update({name: before[name]} if name in before else {})
    return get_context("spawn")


# -- in the reading process ----------------------------------------------------------------------


def _begin(folder: str, environ: dict[str, str]) -> int:
    """Become a reading process; returns its id, which its group has as well."""
    end_with_parent()
    os.setpgid(0, 0)

    def end_with_who_asked() -> None:  # not the parent: the process that is copied is
        if asked := parent_process():
            asked.join()
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_who_asked, daemon=True).start()
    processes.end_first()  # before who asked
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = folder
    return os.getpid()


def _answer(function: Callable[[_Of], list[Any]], thing: _Of, folder: str) -> list[Any]:
    """What was read, put down. Raises MemoryError, also where a reader has hidden it."""
    parts = function(thing)
    for cause in (getattr(outcome, "__cause__", None) for outcome in parts):
        wanting = isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM
        # a library that is loaded then has an error of its own: what glibc says
        glibc = ("failed to map segment", "annot allocate memory")
        not_mapped = any(text in str(cause) for text in glibc)
        if wanting or (isinstance(cause, ImportError) and not_mapped):
            raise MemoryError
    return put_down(parts, folder)


# -- the engines ---------------------------------------------------------------------------------

#: what is read of one rank
Rank: TypeAlias = "RankTables | ClusterprofError"

#: reads one source; what is wrong with it is a value. A function of a module: it is sent by name
Read: TypeAlias = Callable[[Source], list[Rank]]

#: More do not read faster from one host's disk.
MOST_WORKERS = 8

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
        refused = {
            source
            for source, ranks in came.items()
            if isinstance(ranks, list) and any(isinstance(rank, ClusterprofError) for rank in ranks)
        }
        unsure = [source for source in sources if source in refused or source not in came]
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
    whole: list[list[Rank]] = []
    for source, first in pairs:
        if not isinstance(first, Lost):
            whole.append(first)
        elif isinstance(second := next(again), Lost):
            error = ReportError(
                f"{source.path} could not be read: its reading process {second.why}",
                f"another one before it {first.why}",
                "read fewer reports at once, or elsewhere: clusterprof merge --workers 1 PATH",
            )
            whole.append([error])
        else:
            by = f"its reading process on {first.host} {first.why}: another one on {host()} read it"
            whole.append([r.warned(by) if isinstance(r, RankTables) else r for r in second])
    return whole


def _apart(read: Read, sources: Sequence[Source], workers: int) -> list[list[Rank] | Lost]:
    limited = [(source, _limit_s(source)) for source in sources]
    return Readers().read_each(read, limited, workers, "reports")


def _limit_s(source: Source) -> float:
    return limit_s(path for path in (source.path, source.beside) if path is not None)
