"""Running a command and measuring it: its wall time, and the memory of its whole family."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")

#: An installed package has its byte code; a checkout gets it at the first run.
_BYTE_CODE = {"PYTHONDONTWRITEBYTECODE": ""}


@dataclass(frozen=True)
class Measured:
    """`peak_bytes` sums the resident memory of the process and all its descendants.

    Pages that several of them share count once for each: the true peak is not above it.
    """

    seconds: float
    #: of the process and all its descendants
    processor_seconds: float
    peak_bytes: int
    stdout: str
    stderr: str


class Failed(RuntimeError):
    """A command of the benchmark did not do its work: its time means nothing."""


def run(
    argv: Sequence[str | Path],
    environ: Mapping[str, str] | None = None,
    *,
    memory: bool = False,
    timeout: float = 300.0,
) -> Measured:
    """Run `argv` to its end. Raises Failed where it does not exit with 0."""
    watch = _Watch() if memory else None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before, begin = _processor_seconds(), time.perf_counter()
        process = subprocess.Popen(
            list(map(str, argv)),
            env={**os.environ, **_BYTE_CODE, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        if watch is not None:
            watch.start(process.pid)
        # Not wait(timeout): that looks only every so often, less and less, up to 50 ms late.
        deadline = threading.Timer(timeout, process.kill)
        deadline.start()
        status = process.wait()
        seconds = time.perf_counter() - begin
        deadline.cancel()
        peak = watch.stop() if watch is not None else 0
        out.seek(0)
        err.seek(0)
        done = Measured(seconds, _processor_seconds() - before, peak, out.read(), err.read())
    if status != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Failed(f"{Path(argv[0]).name} {argv[1]} ended with {status}: {last}")
    return done


def _processor_seconds() -> float:
    """What all processes took that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Watch:
    """Reads the memory of a process and its descendants every few milliseconds."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._peak = 0

    def start(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._look, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._peak

    def _look(self, pid: int) -> None:
        while not self._ended.is_set():
            self._peak = max(self._peak, _resident(pid))
            time.sleep(0.003)


def _resident(pid: int) -> int:
    total = 0
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                waiting += map(int, children.read_text().split())
        except (OSError, ValueError, IndexError):  # it ended while we looked
            continue
    return total
