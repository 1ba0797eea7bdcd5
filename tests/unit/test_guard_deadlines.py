"""A rank under an nsys that hangs: it ends no later than it may, and its state says why.

And what its launcher sends it meanwhile is its program's.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import NsysPlan, Plan, Selection
from clusterprof.agent.guard import guard, session
from clusterprof.agent.guard.guard import Guard

#: beyond what pids there are
PROGRAM = 1 << 24
#: what a launcher, or whoever uses it, may send to a rank
SENT = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT,
)  # fmt: skip


class Process:
    """A process of nsys; by default it ends when it is killed, and not before."""

    def __init__(self, node: Node, pid: int, lasts_s: float) -> None:
        self.node, self.pid = node, pid
        self.ends_at = node.clock.now() + lasts_s
        self.status = 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.node.clock.now() >= self.ends_at:
            self.returncode = self.status
        return self.returncode


class Node:
    """A node with a program that trains for three seconds under an nsys of which a verb hangs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, clock: ManualClock, folder: Path, hangs: str
    ) -> None:
        self.clock, self.hangs = clock, hangs
        self.processes: list[Process] = []
        self.program_ends_at = math.inf
        #: every signal that was sent, and to which process
        self.sent: list[tuple[int, int]] = []
        for module, name, value in (
            (tempfile, "gettempdir", lambda: str(folder)),
            (os, "kill", self.kill),
            (session.Session, "spawn", self.spawn),
            (guard.processes, "adopt_orphans", lambda: True),
            (guard.processes, "forget_dead_sessions", lambda: None),
            (guard.processes, "of_session", lambda name, children=False: self.alive()),
            (guard.processes, "running", self.runs),
            (guard.processes, "work", lambda pid: ("R" if "works" in hangs else "S", 0)),
            (guard.processes, "end_group", lambda child: self.kill(child.pid, signal.SIGKILL)),
            (guard.processes, "status_of", lambda pid: 0),
            (guard.profiler, "here", lambda nsys, window_by: (nsys, [])),
            (guard.profiler, "free_bytes", lambda folder: 1 << 40),
            (guard, "run_alone", self.alone),
        ):
            monkeypatch.setattr(module, name, value)

    def spawn(self, command: list[str], **_: Any) -> Process:
        """Start nsys, for the session: all verbs take half a second but the one that hangs."""
        verb = command[1]
        lasts_s = math.inf if verb == "launch" or verb in self.hangs else 0.5
        self.processes.append(Process(self, PROGRAM + 1 + len(self.processes), lasts_s))
        if verb == "launch" and "launch" not in self.hangs:
            self.clock.plan(1.0, self.program_starts)
        return self.processes[-1]

    def program_starts(self) -> None:
        """The trampoline says so, and the program's agent opens and closes the window."""
        self.replied(f"hello {PROGRAM}", f"pid {PROGRAM}")
        self.clock.plan(1.0, self.window_opens)

    def window_opens(self) -> None:
        self.answer = self.replied("start 1")
        self.clock.plan(1.0, lambda: self.replied("stop"))
        self.clock.plan(3.0, self.program_ends)

    def program_ends(self) -> None:
        self.program_ends_at = self.clock.now()
        if "exit" not in self.hangs:
            self.processes[0].ends_at = self.clock.now() + 0.1

    def replied(self, *words: str) -> str:
        """What the guard answers to one request."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            for each in words:
                theirs.send(each.encode())
            self.guard.answer(ours)
            return theirs.recv(256).decode().strip() if words != ("stop",) else ""

    def alive(self) -> list[int]:
        return [each.pid for each in self.processes if each.poll() is None]

    def runs(self, pid: int) -> bool:
        return pid in self.alive() or (pid == PROGRAM and self.clock.now() < self.program_ends_at)

    def kill(self, pid: int, number: int) -> None:
        """It obeys SIGKILL alone."""
        self.sent.append((pid, number))
        for each in self.processes:
            if each.pid == pid and number == signal.SIGKILL and each.poll() is None:
                each.ends_at, each.status = self.clock.now(), -number

    def alone(self, program: list[str]) -> None:
        raise Alone


class Alone(Exception):
    """The program runs, without nsys."""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Sockets' names have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cpt-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A guard takes them; one that does not is not to end this process."""
    before = {number: signal.signal(number, lambda *_: None) for number in SENT}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def guarded(
    node: Node, outbox: Outbox, monkeypatch: pytest.MonkeyPatch, run: Path, start_s: int
) -> Guard:
    """The guard of rank 0 on this node, whose writer this outbox reaches."""
    nsys = NsysPlan(
        "nsys", "2022.4", None, {"cpu": "", "gpu": ""}, [], ["launch"], ["start"], ["stop"], start_s
    )
    (run / "ranks").mkdir(parents=True)
    plan = Plan(str(run), Selection("0", "ranks", (0,)), (2, 4), "nsys", nsys=nsys)
    monkeypatch.setattr(guard.outbox, "start", lambda: outbox)
    made = Guard(plan, 0, ["true"], node.clock)
    made.given = {}
    node.guard = made
    return made


@pytest.mark.parametrize("start_s", [6, 10])
@pytest.mark.parametrize(
    ("hangs", "why"),
    [
        ("start", "nsys start did not end within"),
        ("stop", "nsys stop did not end"),
        ("exit", "nsys did not end within"),
        ("exit, and works", "nsys did not end within"),
        ("stop, exit, and works", "nsys did not end within"),
        ("start, exit", "nsys start did not end within"),
        ("start, exit, and works", "nsys start did not end within"),
        ("nothing", "nsys wrote no report"),
        ("writer", None),
    ],
)
def test_a_rank_ends_within_its_budget_whatever_of_nsys_hangs(
    hangs: str, why: str | None, start_s: int, clock: ManualClock, outbox: Outbox,
    short_folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    node = Node(monkeypatch, clock, short_folder, hangs)
    if hangs == "writer":  # stopped, or waiting for its file system
        ours, _theirs = socket.socketpair()
        outbox = Outbox(ours, clock)
    made = guarded(node, outbox, monkeypatch, short_folder / "run", start_s)
    assert made.run() == 0
    waited_s = made.starting_s + made.session.starting_s
    longer_s = waited_s + clock.now() - node.program_ends_at
    assert longer_s <= start_s + guard.BUDGET_S
    assert node.alive() == []
    if why is not None:
        found = states.read(str(short_folder / "run/ranks/00000"))
        assert (found["state"], why in found["reason"] + node.answer) == ("lost", True)


def test_what_nsys_leaves_is_transferred_by_another_writer_where_ours_was_killed(
    clock: ManualClock, outbox: Outbox, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None but a writer ends the wait of whoever collects."""
    node = Node(monkeypatch, clock, short_folder, "nothing")
    ours, theirs = socket.socketpair()
    writers = [outbox, Outbox(ours, clock)]
    made = guarded(node, outbox, monkeypatch, short_folder / "run", 6)
    monkeypatch.setattr(guard.outbox, "start", writers.pop)
    clock.plan(2.5, theirs.close)
    written = b"what nsys wrote"
    monkeypatch.setattr(
        guard.ReportTransfer, "rescue", lambda self, _: Path(self.made).write_bytes(written)
    )
    assert made.run() == 0
    found = states.read(str(short_folder / "run/ranks/00000"))
    assert found["state"] == "captured", found
    assert (short_folder / "run/ranks/00000/report.nsys-rep").read_bytes() == written
    assert not writers


@pytest.mark.parametrize(("start_s", "within_s"), [(6, 6), (10, 10), (60, 16)])
def test_a_training_waits_for_a_window_to_open_only_so_long(
    start_s: int, within_s: int, clock: ManualClock, outbox: Outbox, short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    node = Node(monkeypatch, clock, short_folder, "start")
    made = guarded(node, outbox, monkeypatch, short_folder / "run", start_s)
    assert made.run() == 0
    assert node.answer == f"nsys start did not end within {within_s} s"
    assert made.session.starting_s == pytest.approx(within_s, abs=0.1)


def test_a_program_that_nsys_does_not_start_runs_without_it_in_time(
    clock: ManualClock, outbox: Outbox, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, clock, short_folder, "launch")
    made, began = guarded(node, outbox, monkeypatch, short_folder / "run", 6), clock.now()
    with pytest.raises(Alone):
        made.run()
    assert 6 <= clock.now() - began <= 6 + guard.BUDGET_S
    assert node.alive() == []
    clock.sleep(0)
    found = states.read(str(short_folder / "run/ranks/00000"))
    assert found["state"] == "lost"
    assert "nsys did not start the program within 6 s" in found["reason"]
    assert found["reason"].endswith("the program ran without nsys")
    # Where only the ranks know which of them are profiled, its outcome is among theirs.
    assert found["chosen"]


def test_what_a_rank_is_sent_before_its_program_runs_and_while_it_does_is_the_program_s(
    clock: ManualClock, outbox: Outbox, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, clock, short_folder, "nothing")
    made = guarded(node, outbox, monkeypatch, short_folder / "run", 6)
    for at_s in (0.8, 2.8):  # the program begins after a second, and its window after another
        for number in SENT:
            clock.plan(at_s, functools.partial(signal.raise_signal, number))
    assert made.run() == 0
    assert node.sent == [(PROGRAM, number) for number in (*SENT, *SENT)]
