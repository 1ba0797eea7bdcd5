"""A process that reads one report after the other, and may be lost without who asked it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from clusterprof import words
from clusterprof.agent.contracts import processes
from clusterprof.errors import ClusterprofError
from clusterprof.imports import without_pandas
from clusterprof.ingest import handover
from clusterprof.ingest.sources import Source
from clusterprof.priority import end_with_parent
from clusterprof.tables import RankTables

#: what is read of one rank
Rank = RankTables | ClusterprofError

#: reads one source; what is wrong with it is a value. A function of a module: it is sent by name
Read = Callable[[Source], list[Rank]]

#: What reading takes at most, for each byte: traces of an older Kineto become Python objects,
#: 0.3 s/MB (measured on two cores).
_SLOWEST_S = 0.3e-6

#: A reading process that takes longer hangs: twenty times as long as the slowest format takes for
#: its size, and five minutes for a file system or a node that is busy.
_PATIENCE_S, _TIMES = 300.0, 20.0

#: A killed process is gone within a moment, unless its file system keeps it: then it is left.
_GONE_S = 10.0

#: what glibc says of a library that does not fit into memory
_NOT_MAPPED = ("failed to map segment", "annot allocate memory")

#: what a reading process answers: the tables follow, or it ran out of memory
_READ, _NO_MEMORY = b"+", b"-"


class Lost(NamedTuple):
    """A source that its reading process did not hand back."""

    why: str
    host: str

    def read_again(self, ranks: list[Rank]) -> list[Rank]:
        """What another process read of it, with a warning of each rank."""
        text = f"its reading process on {self.host} {self.why}: another one on {host()} read it"
        return [each.warned(text) if isinstance(each, RankTables) else each for each in ranks]


def host() -> str:
    """This host's name, as warnings have it."""
    return socket.gethostname()


def limit_s(source: Source) -> float:
    """How long a process may read a source before it is taken to hang."""
    paths = [path for path in (source.path, source.beside) if path is not None]
    size = 0
    for path in paths:
        with suppress(OSError):
            size += path.stat().st_size
    return _PATIENCE_S + _TIMES * _SLOWEST_S * size


def too_long(seconds: float) -> str:
    """Why a source is lost that took so long, and longer."""
    return f"took longer than {words.age(seconds)}"


class Reader:
    """A process that reads one source after the other; another one where it was lost.

    It has a process group and a folder for temporary files of its own: both go with it.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._folder = ""
        self._over = False

    def ask(self, read: Read, source: Source) -> int | Lost:
        """The file in memory with what `read` gives (`handover`); blocks for `limit_s` at most."""
        after_s = limit_s(source)
        late = threading.Event()

        def end() -> None:
            late.set()
            self._signal()

        try:
            if self._process is None:
                self._start()
        except OSError as error:
            return Lost(f"could not be started ({error.strerror or error})", host())
        watch = threading.Timer(after_s, end)
        watch.daemon = True
        watch.start()
        answer = None
        try:
            self._calls.send((read, source))
            answer = self._calls.recv_bytes()
            if answer == _READ:
                return handover.receive(self._calls)
        except (EOFError, OSError):
            pass
        finally:
            watch.cancel()
        if answer is None:
            self._process.join(_GONE_S)  # how it ends by itself, if it does
        status = self.close()
        if answer == _NO_MEMORY:
            return Lost("ran out of memory", host())
        if late.is_set():
            return Lost(too_long(after_s), host())
        return Lost(_ended(status), host())

    def kill(self) -> None:
        """End the process, from whatever thread: the one that waits for its answer gets none."""
        self._over = True
        self._signal()

    def close(self) -> int:
        """Remove the process and its files; returns how it ended, as subprocess says it."""
        self._signal()
        process, self._process = self._process, None
        if process is None:
            return 0
        self._calls.close()
        process.join(_GONE_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        return int(process.exitcode or 0)

    def _start(self) -> None:
        context = get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._folder = tempfile.mkdtemp(prefix="clusterprof-")
        process = context.Process(target=_serve, args=(theirs, self._folder), daemon=True)
        process.start()
        theirs.close()
        self._process = process
        if self._over:
            self._signal()

    def _signal(self) -> None:
        process = self._process
        if process is not None and process.pid and process.exitcode is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # where it has no group of its own yet


def _ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed, most often by the kernel for want of memory"
    return processes.ended(status)


def _serve(calls: Connection, folder: str) -> None:
    """The reading process: answer until who asks is gone."""
    end_with_parent()
    os.setpgid(0, 0)
    processes.end_first()  # before who asked
    tempfile.tempdir = folder
    without_pandas()
    while True:
        try:
            read, source = calls.recv()
        except (EOFError, OSError):
            return
        file = _answer(read, source)
        calls.send_bytes(_NO_MEMORY if file is None else _READ)
        if file is not None:
            handover.send(calls, file)


def _wants_memory(cause: object) -> bool:
    """Whether an error is for want of memory: a library that is loaded then has one of its own."""
    if isinstance(cause, ImportError):
        return any(each in str(cause) for each in _NOT_MAPPED)
    return isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM


def _answer(read: Read, source: Source) -> int | None:
    """The file in memory with what was read; None where there is not enough memory."""
    try:
        ranks = read(source)
        if any(_wants_memory(getattr(each, "__cause__", None)) for each in ranks):
            return None
    except MemoryError:
        return None
    with suppress(MemoryError, OSError):
        return handover.pack(ranks)
    return None
