"""The order to close all windows now: who obeys it when, and what the state says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab.clock import ManualClock

from clusterprof.agent import nsys as profiler
from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import NsysPlan, Plan, Selection
from clusterprof.agent.guard import report_transfer, session
from clusterprof.agent.rank import window
from clusterprof.agent.rank.steps import Counter
from clusterprof.launch.run_job import request_stop

WHY = "the job's time limit is near"


class Switch:
    """A capture that is told to stop."""

    excludes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")

    def save(self) -> None:
        self.events.append("save")

    def size(self) -> int:
        return 0


@pytest.fixture
def armed(
    outbox: Outbox, rank_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter, Switch]:
    """A window of the steps 2 to 19 that looks at each step, since these are long."""
    switch, counter = Switch(), Counter(outbox.clock)
    made = window.Window(Plan("", Selection("all", "all"), (2, 20), "torch"), outbox, counter)
    counter.attend(made.first, made.at)
    monkeypatch.setattr(made, "make_switches", lambda: [switch])
    counter.begin()
    return counter, switch


def steps(counter: Counter, count: int) -> None:
    for _ in range(count):
        counter.clock.sleep(1)
        counter.boundary()


def test_an_ordered_window_closes_between_two_steps_and_says_why(
    armed: tuple[Counter, Switch], outbox: Outbox, rank_folder: Path, written: Callable[[], None]
) -> None:
    counter, switch = armed
    steps(counter, 5)
    assert switch.events == ["start"]
    request_stop(rank_folder.parents[1], WHY)
    steps(counter, 30)
    assert switch.events == ["start", "stop", "save"]
    written()
    found = states.read(str(rank_folder))
    assert found["step_end"] == 6
    assert all(fact in found["reason"] for fact in ("6", "2:20", WHY))


def test_a_window_whose_time_comes_after_the_order_is_not_opened(
    armed: tuple[Counter, Switch],
    rank_folder: Path,
    written: Callable[[], None],
) -> None:
    counter, switch = armed
    request_stop(rank_folder.parents[1], WHY)
    steps(counter, 30)
    assert switch.events == []
    written()
    found = states.read(str(rank_folder))
    assert (found["state"], "step_begin" in found) == ("lost", False)
    assert all(fact in found["reason"] for fact in ("2", WHY))


def test_the_first_reason_stays_and_a_run_directory_that_is_gone_gives_no_order(
    tmp_path: Path,
) -> None:
    request_stop(tmp_path, WHY)
    request_stop(tmp_path, "another")
    assert states.stop_requested(str(tmp_path)) == WHY
    assert states.stop_requested(str(tmp_path / "gone")) is None
    request_stop(tmp_path / "gone", WHY)
    assert not (tmp_path / "gone").exists()


def test_an_order_that_comes_later_is_seen_until_no_one_asks(
    outbox: Outbox, rank_folder: Path, written: Callable[[], None]
) -> None:
    outbox.say("watch")
    written()
    assert outbox.look()["order"] is None
    request_stop(rank_folder.parents[1], WHY)
    outbox.clock.sleep(2 * states.LOOK_S)
    assert outbox.look()["order"] == WHY


def test_a_session_whose_step_does_not_end_after_the_order_is_stopped_inside_it(
    clock: ManualClock,
    outbox: Outbox,
    rank_folder: Path,
    written: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiler.tempfile, "gettempdir", lambda: str(tmp_path))
    trace = {"cpu": "nvtx", "gpu": "cuda"}
    nsys = NsysPlan("nsys", "2022.4", None, trace, [], [], [], ["stop"])
    home = report_transfer.ReportTransfer(str(tmp_path), str(rank_folder))
    made = session.Session("clusterprof-of-no-rank", nsys, "session", home, 0, outbox, clock)
    stopped: list[list[str]] = []
    monkeypatch.setattr(made, "spawn", lambda command: stopped.append(command))
    outbox.state("capturing")
    made.opened = True
    made.obey()
    assert (stopped, outbox.look().get("order")) == ([], None), "no one asked"
    outbox.answers["order"] = WHY
    made.obey()
    assert (stopped, outbox.look().get("order")) == ([], WHY), (
        "the agent closes it between two steps, if it can"
    )
    clock.sleep(session.ORDER_GRACE_S)
    made.obey()
    assert stopped == []
    clock.sleep(0.01)
    made.obey()
    made.obey()
    assert stopped == [["nsys", "stop"]]
    written()
    found = states.read(str(rank_folder))
    assert (found["state"], WHY in found["reason"]) == ("finishing", True)
