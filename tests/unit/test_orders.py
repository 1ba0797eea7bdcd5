"""The order to close all windows now: who obeys it when, and what the state says of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent import guard, orders, size, states, window
from clusterprof.agent.steps import Counter

WHY = "the job's time limit is near"


class Switch:
    """A capture that is told to stop."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.order: str | None = None

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")

    def save(self) -> None:
        self.events.append("save")

    def size(self) -> int:
        return 0

    def ordered(self) -> str | None:
        return self.order


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter, Switch]:
    """A window of the steps 2 to 19 that looks at each step."""
    monkeypatch.setattr(size, "EVERY_NS", 0)
    switch, counter = Switch(), Counter()
    plan = {"window": [2, 20], "profiler": "torch", "run": str(tmp_path)}
    made = window.Window(plan, str(tmp_path), counter)
    monkeypatch.setattr(made, "make_switches", lambda: [switch])
    counter.begin(None)
    return counter, switch


def steps(counter: Counter, count: int) -> None:
    for _ in range(count):
        counter.boundary()


def test_an_ordered_window_closes_between_two_steps_and_says_why(
    armed: tuple[Counter, Switch], tmp_path: Path
) -> None:
    counter, switch = armed
    steps(counter, 5)
    switch.order = WHY
    steps(counter, 30)
    assert switch.events == ["start", "stop", "save"]
    assert states.read(str(tmp_path))["reason"] == f"closed at step 6 of 2:20: {WHY}"


def test_a_window_whose_time_comes_after_the_order_is_not_opened(
    armed: tuple[Counter, Switch], tmp_path: Path
) -> None:
    counter, switch = armed
    orders.give(str(tmp_path), WHY)
    steps(counter, 30)
    assert switch.events == []
    found = states.read(str(tmp_path))
    assert (found["state"], found["reason"]) == (
        "lost", f"the window was not opened at step 2: {WHY}"
    )  # fmt: skip


def test_the_first_reason_stays_and_a_run_directory_that_is_gone_gives_no_order(
    tmp_path: Path,
) -> None:
    orders.give(str(tmp_path), WHY)
    orders.give(str(tmp_path), "another")
    assert orders.read(str(tmp_path)) == WHY
    assert orders.read(str(tmp_path / "gone")) is None
    with pytest.raises(OSError, match="gone"):
        orders.give(str(tmp_path / "gone"), WHY)


def test_a_watch_sees_an_order_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "EVERY_S", 0.01)
    watch = orders.Watch(str(tmp_path))
    assert watch.said is None
    orders.give(str(tmp_path), WHY)
    deadline = time.monotonic() + 5
    while watch.said is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.said == WHY


def test_the_guard_stops_a_session_whose_step_does_not_end_after_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    plan: dict[str, Any] = {
        "nsys": {"path": "nsys", "trace": {"cpu": "nvtx", "gpu": "cuda"}, "stop": ["stop"]},
        "window_by": "session", "run": str(tmp_path),
    }  # fmt: skip
    made = guard.Guard(plan, 0, ["true"])
    stopped: list[list[str]] = []
    monkeypatch.setattr(made, "spawn", lambda command: stopped.append(command))
    made.home.say("capturing")
    made.look_at = time.monotonic_ns()
    made.orders = orders.Watch(str(tmp_path))
    made.stop_if_ordered()
    assert stopped == [], "nobody ordered it"
    made.orders.said, made.orders.since = WHY, time.monotonic()
    made.stop_if_ordered()
    assert stopped == [], "the agent closes it between two steps, if it can"
    made.orders.since -= 2 * guard.ORDER_GRACE_S
    made.stop_if_ordered()
    made.stop_if_ordered()
    assert stopped == [["nsys", "stop"]]
    found = states.read(made.home.folder)
    assert (found["state"], found["reason"]) == ("finishing", f"closed within a step: {WHY}")
