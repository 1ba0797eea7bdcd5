"""A guard that does not answer, as one that is stopped: the training waits for it once."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import BEGIN_S, Plan, Selection
from clusterprof.agent.rank import profilers, window
from clusterprof.agent.rank.steps import Counter


@pytest.fixture
def guard() -> Iterator[socket.socket]:
    """Where a guard listens, which accepts nothing."""
    with tempfile.TemporaryDirectory(prefix="cpt-") as folder:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{folder}/socket")
        listener.listen(4)
        with listener:
            yield listener


def train(outbox: Outbox, guard: socket.socket, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Forty steps of a second with a window 10:30; how long each has waited for the guard."""
    session = profilers.NsysSession(guard.getsockname(), outbox, BEGIN_S)
    monkeypatch.setattr(window.Window, "make_switches", lambda self: [session])
    counter = Counter(outbox.clock)
    made = window.Window(Plan("", Selection("all", "all"), (10, 30), "nsys"), outbox, counter)
    counter.attend(made.first, made.at)
    counter.begin()
    waited = []
    for _ in range(40):
        outbox.clock.sleep(1)
        before = outbox.clock.now()
        counter.boundary()
        waited.append(outbox.clock.now() - before)
    return waited


def test_a_guard_that_never_answers_costs_one_wait_and_the_window(
    outbox: Outbox, rank_folder: Path, written: Callable[[], None], guard: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    waited = train(outbox, guard, monkeypatch)
    written()
    assert sum(waited) == pytest.approx(BEGIN_S + profilers.GUARD_S)
    assert waited[9] == pytest.approx(sum(waited))
    assert "guard" in states.read(str(rank_folder))["reason"]


def test_a_guard_that_answers_no_more_in_the_window_costs_nothing(
    outbox: Outbox, clock: ManualClock, rank_folder: Path, written: Callable[[], None],
    guard: socket.socket, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def answer() -> None:
        connection, _ = guard.accept()
        with connection:
            connection.sendall(b"ok\n")

    clock.plan(10 + 1.5, answer)
    waited = train(outbox, guard, monkeypatch)
    written()
    assert sum(waited) == pytest.approx(waited[9]) == pytest.approx(1.5)
    found = states.read(str(rank_folder))  # nsys may write its report at the program's end
    assert (found["state"], "could not be closed" in found["reason"]) == ("finishing", True)


def test_what_nsys_holds_comes_by_the_writer_and_is_known_at_the_next_look(
    outbox: Outbox, clock: ManualClock, rank_folder: Path, guard: socket.socket
) -> None:
    connection = outbox.share()
    assert connection is not None
    program = Outbox(connection, clock)
    program.say("watch")
    clock.sleep(0)
    session = profilers.NsysSession(guard.getsockname(), program, BEGIN_S)
    assert session.size() == 0
    asked, _ = guard.accept()
    with asked:
        assert asked.recv(64) == b"size\n"
    outbox.say("held", size=5_000_000)  # as the guard does
    clock.sleep(0)
    assert session.size() == 5_000_000
    program.close()


def test_a_switch_beside_nsys_that_fails_leaves_the_guard_to_say_whether_there_is_a_report(
    outbox: Outbox, rank_folder: Path, written: Callable[[], None], guard: socket.socket
) -> None:
    class Beside(profilers.Switch):
        def start(self) -> None: ...

        def stop(self) -> None: ...

        def save(self) -> None:
            raise MemoryError("no memory")

    nsys = profilers.NsysSession(guard.getsockname(), outbox, BEGIN_S)
    made = window.Window(
        Plan("", Selection("all", "all"), (10, 30), "nsys"), outbox, Counter(outbox.clock)
    )
    made.switches = [nsys, Beside()]
    made.running = [*made.switches]
    outbox.state(states.State.CAPTURING)
    made.close(None, whole=True)
    written()
    found = states.read(str(rank_folder))
    assert (found["state"], found["whole"]) == ("finishing", True)
    assert found["reason"] == "torch's trace could not be written: no memory"
