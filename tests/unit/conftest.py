"""Unit tests cannot start a process: one that tries fails, and belongs in `tests/integration`."""

from __future__ import annotations

import multiprocessing.process
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings
from lab.command import PATIENCE_S

from clusterprof import run_directory
from clusterprof.agent.contracts import states
from clusterprof.agent.guard.outbox import Outbox
from clusterprof.agent.guard.writer import Writer
from clusterprof.arguments import parse_ranks

#: traces of three ranks
GLOO = Path(__file__).parents[1] / "data" / "recordings" / "kineto" / "gloo"

# The same examples in each run, and each may take as long as the machine stalls for.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

_EVENTS = {
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
}
_attempts: list[str] = []
_forbidden = False


class ProcessInUnitTest(BaseException):
    """Not an Exception, so that no `except Exception` of the code under test hides it."""


def _refuse(what: str) -> NoReturn:
    _attempts.append(what)
    raise ProcessInUnitTest(f"a unit test may not start a process: {what}")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    # An audit hook sees every way of starting a process, however it was imported.
    if _forbidden and event in _EVENTS:
        _refuse(f"{event} {arguments[:2]}")


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuses every process start, and fails the test even when the refusal was swallowed."""
    global _forbidden
    # multiprocessing's spawn goes past the audited calls.
    monkeypatch.setattr(
        multiprocessing.process.BaseProcess,
        "start",
        lambda process: _refuse(f"multiprocessing {process.name}"),
    )
    _attempts.clear()
    _forbidden = True
    try:
        yield _attempts
    finally:
        _forbidden = False
    assert not _attempts, f"this unit test started or tried to start: {_attempts}"


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    """A rank's outbox; its writer, a process of its own elsewhere, is a thread here."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=Writer(theirs, os.getpid()).serve, daemon=True)
    thread.start()
    made = Outbox(ours)
    yield made
    made.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def written(outbox: Outbox) -> Callable[[], None]:
    """Waits until all that the outbox was given is in its files."""

    def wait() -> None:
        outbox.say("finish")
        assert outbox.wait("finished", PATIENCE_S)

    return wait


@pytest.fixture
def rank_folder(outbox: Outbox, tmp_path: Path) -> Path:
    """The folder of the outbox's rank, whose window is 10:20."""
    folder = tmp_path / "run" / "ranks" / "00003"
    folder.parent.mkdir(parents=True)
    outbox.say(
        "begin", run=str(tmp_path / "run"), folder=str(folder), window=[10, 20], wall_ns=0, log_s=0
    )
    return folder


@pytest.fixture
def run(tmp_path: Path) -> run_directory.RunDirectory:
    """A run of three ranks, all profiled, that has been collected."""
    made = run_directory.create(tmp_path / "run")
    for rank in range(3):
        states.advance(str(made.rank(rank)), "captured", chosen=True)
        shutil.copy(GLOO / f"rank{rank}.json.gz", made.rank(rank) / "trace.json.gz")
    made.write_manifest(
        {
            "schema_version": 1,
            "launcher": "torchrun",
            "world_size": None,
            "selection": parse_ranks("all")._asdict(),
            "window": [5, 10],
            "outcomes": [{"rank": rank, "state": "collected", "reason": ""} for rank in range(3)],
        }
    )
    return made
