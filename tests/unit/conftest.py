"""Unit tests need no study and no process (`lab.no_processes`), and handle what is small."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.clock import ManualClock, WriterBeside
from lab.collected import run
from lab.no_processes import no_processes

from clusterprof.agent.contracts.outbox import Outbox

__all__ = ["no_processes", "run"]


@pytest.fixture
def clock() -> ManualClock:
    """By which no test really waits."""
    return ManualClock()


@pytest.fixture
def outbox(clock: ManualClock) -> Iterator[Outbox]:
    """A rank's outbox; its writer, a process of its own elsewhere, writes while it waits."""
    ours, theirs = socket.socketpair()
    beside = WriterBeside(theirs, clock)
    made = Outbox(ours, clock)
    yield made
    made.close()
    clock.sleep(0)
    beside.writer.clean()
    assert not beside.writer.peers


@pytest.fixture
def written(outbox: Outbox) -> Callable[[], None]:
    """Waits until all that the outbox was given is in its files."""

    def wait() -> None:
        outbox.say("finish")
        assert outbox.wait("finished", 1.0)

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
