"""Unit tests need no study and no process (`lab.no_processes`), and handle what is small."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.collected import run
from lab.command import PATIENCE_S
from lab.no_processes import no_processes

from clusterprof.agent.guard.outbox import Outbox
from clusterprof.agent.guard.writer import Writer

__all__ = ["no_processes", "run"]


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
