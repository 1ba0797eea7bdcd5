"""The one way into the agent: a program's signal handlers, and errors of ours."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lab.clock import ManualClock
from lab.command import PATIENCE_S

from clusterprof import agent
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.agent.rank import hooks, steps, window
from clusterprof.agent.rank.hooks import Entry, Handlers
from clusterprof.agent.rank.profilers import Switch
from clusterprof.agent.rank.steps import Counter

NUMBER = signal.SIGUSR1
OURS = str(Path(agent.__file__).parent)
SA_RESTART = 0x1000_0000


class Preempted(Exception):
    """What a program's handler raises to have its checkpoint saved."""


def preempt(*_: object) -> None:
    raise Preempted


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(NUMBER, preempt)
    yield
    signal.signal(NUMBER, before)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Entry:
    """This process's, as if it had just begun."""
    made = Entry()
    for module in (hooks, steps, window):
        monkeypatch.setattr(module, "entry", made)
    return made


class Profiler(Switch):
    """Takes some lines for each thing, and catches what it can, as torch's own do."""

    def start(self) -> None:
        self.something()

    def stop(self) -> None:
        self.something()

    def save(self) -> None:
        self.something()

    def size(self) -> int:
        self.something()
        return 1

    def something(self) -> None:
        for _ in range(2):
            with contextlib.suppress(Exception):
                self.done = True


class Job:
    """Four steps with a window 1:3, and a signal at one line of all that one of them calls.

    Without a step it counts the lines of all.
    """

    def __init__(self, step: int | None = None, line: int = 0) -> None:
        self.step = step
        self.line = line
        self.lines = [0, 0, 0, 0]
        self.raised = 0
        self.clock = ManualClock()
        self.outbox = Outbox(None, self.clock)
        self.counter = Counter(self.clock)
        plan = Plan("", Selection("all", "all"), (1, 3), "torch")
        self.window = window.Window(plan, self.outbox, self.counter)
        self.counter.attend(1, self.window.at)
        self.counter.begin(self.outbox)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith((OURS, __file__)):
            return None
        if event == "line":
            self.lines[self.number] += 1
            if self.lines[self.number] == self.line:
                sys.settrace(None)  # most of the time is that of tracing
                signal.raise_signal(NUMBER)
        return self.trace

    def run(self) -> None:
        before = sys.gettrace()
        for self.number in range(4):
            if self.step in (None, self.number):
                sys.settrace(self.trace)
            try:
                self.counter.say()
            except Preempted:
                self.raised += 1
            finally:
                sys.settrace(before)


@pytest.mark.usefixtures("handled")
def test_what_a_handler_raises_at_any_line_of_a_window_comes_to_the_training_once(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window.Window, "make_switches", lambda self: [Profiler()])
    Job().run()  # all that is imported
    gc.disable()  # it would run when it likes; see `test_garbage.py`
    try:
        whole = Job()
        whole.run()
        assert whole.window.was_open
        assert sum(whole.lines) > 500
        places = [(step, line + 1) for step in range(4) for line in range(whole.lines[step])]
        for place in places:
            job = Job(*place)
            job.run()
            assert job.raised == 1, place
            assert signal.getsignal(NUMBER) is preempt, place
            assert not entry.is_shut, place
    finally:
        gc.enable()


@pytest.mark.usefixtures("handled")
def test_handlers_wait_for_one_another_and_are_all_called(entry: Entry) -> None:
    came: list[int] = []
    others = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGUSR2, signal.SIGTERM)
    }

    def act() -> None:
        for number in (NUMBER, *others):
            signal.raise_signal(number)
        assert came == []

    with pytest.raises(Preempted):
        entry.run(act)
    assert came == list(others)
    for number, before in others.items():
        signal.signal(number, before)


def test_a_program_that_is_as_deep_as_its_limit_lets_it_is_not_ended_by_us(entry: Entry) -> None:
    def deeper(calls: int, act: Callable[[], None]) -> None:
        deeper(calls - 1, act) if calls else act()

    def fits(calls: int) -> bool:
        with contextlib.suppress(RecursionError):
            deeper(calls, lambda: None)
            return True
        return False

    acted: list[int] = []
    ours = lambda: deeper(100, lambda: acted.append(sys.getrecursionlimit()))  # noqa: E731
    most = sys.getrecursionlimit()
    deepest = next(calls for calls in range(most, 0, -1) if fits(calls))
    for left in (10, 20, 60):
        deeper(deepest - left, lambda: entry.run(ours))
    assert len(acted) == 3
    assert sys.getrecursionlimit() == most
    assert not entry.is_shut


def test_the_limit_is_the_program_s_again_once_no_thread_is_inside(entry: Entry) -> None:
    most, inside, go = sys.getrecursionlimit(), threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        assert go.wait(PATIENCE_S)

    other = threading.Thread(target=entry.run, args=(stay,))
    other.start()
    assert inside.wait(PATIENCE_S)
    entry.run(lambda: None)
    raised = sys.getrecursionlimit()
    go.set()
    other.join()
    assert (raised > most, sys.getrecursionlimit()) == (True, most)
    entry.run(lambda: sys.setrecursionlimit(most + 7))  # what the program sets stays
    assert sys.getrecursionlimit() == most + 7
    sys.setrecursionlimit(most)


class Action(ctypes.Structure):
    """glibc's `struct sigaction`."""

    _fields_ = (
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    )  # fmt: skip


def action(number: int) -> tuple[int, int]:
    """What the kernel does at a signal."""
    found = Action()
    ctypes.CDLL(None).sigaction(number, None, ctypes.byref(found))
    return found.handler, found.flags


@pytest.mark.usefixtures("handled")
def test_what_the_kernel_calls_stays_as_the_program_has_it() -> None:
    signal.siginterrupt(NUMBER, False)
    handlers, before = Handlers(), action(NUMBER)
    handlers.wait()
    assert signal.getsignal(NUMBER) is not preempt
    assert action(NUMBER) == before
    assert before[1] & SA_RESTART
    handlers.go_on()
    assert signal.getsignal(NUMBER) is preempt
    assert action(NUMBER) == before


@pytest.mark.usefixtures("handled")
def test_a_handler_that_is_set_while_others_wait_stays(entry: Entry) -> None:
    def another(*_: object) -> None:
        raise AssertionError

    entry.run(signal.signal, NUMBER, another)
    assert signal.getsignal(NUMBER) is another


@pytest.mark.parametrize("at", ["step", "run"])
def test_an_error_of_ours_takes_us_out_of_the_program_and_is_said_once(
    entry: Entry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], at: str
) -> None:
    reasons: list[str] = []
    entry.undo.append(reasons.append)
    counter = Counter()
    counter.begin()
    # as a clock that is beyond what can be counted
    monkeypatch.setattr(counter, "_begin", "no number")
    monkeypatch.setattr(counter, "_flush_at", 0)
    act: Callable[[], None] = counter.say if at == "step" else lambda: entry.run(counter.flush, 1)
    for _ in range(3):
        act()
    if at == "step":
        entry.run(counter.flush, 1)
    printed = capfd.readouterr().err
    assert entry.is_shut
    assert len(reasons) == 1
    assert printed.count("runs without profiling") == len(printed.splitlines()) == 1
