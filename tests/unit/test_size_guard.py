"""How large a capture may become: what is counted, when it is looked at, and who closes it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent import guard, size, window
from clusterprof.agent.steps import Counter


class Switch:
    """A capture of which each step takes a megabyte."""

    def __init__(self) -> None:
        self.bytes = 0
        self.stopped = 0
        self.order: str | None = None

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped += 1

    def save(self) -> None:
        pass

    def size(self) -> int:
        self.bytes += size.MB
        return self.bytes

    def ordered(self) -> str | None:
        return self.order


class Beacons:
    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def send(self, event: str, count: int) -> None:
        self.sent.append((event, count))


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a window of the steps 2 to 19, with one switch."""

    def make(most: int, beacons: Any = None) -> tuple[window.Window, Counter, Switch]:
        switch, counter = Switch(), Counter()
        plan = {
            "window": [2, 20], "max_report_mb": most, "profiler": "torch", "run": str(tmp_path)
        }  # fmt: skip
        made = window.Window(plan, str(tmp_path), counter, beacons)
        monkeypatch.setattr(made, "make_switches", lambda: [switch])
        counter.begin(None)
        return made, counter, switch

    # Each step is a look.
    monkeypatch.setattr(size, "EVERY_NS", 0)
    return make


def steps(counter: Counter, count: int) -> None:
    for _ in range(count):
        counter.boundary()


def test_a_window_closes_between_the_steps_at_which_it_became_too_large(
    armed: Any, tmp_path: Path
) -> None:
    made, counter, switch = armed(4)
    steps(counter, 30)
    assert not made.is_open
    assert switch.stopped == 1
    text = (tmp_path / "state.json").read_text()
    assert "closed at step 7 of 2:20: the report reached 5 MB" in text


def test_without_a_limit_no_size_closes_a_window(armed: Any) -> None:
    made, counter, switch = armed(0)
    steps(counter, 19)
    assert made.is_open
    steps(counter, 11)
    assert switch.stopped == 1


def test_what_cannot_be_measured_does_not_end_the_window_nor_the_training(armed: Any) -> None:
    made, counter, switch = armed(4)
    switch.size = lambda: 1 / 0
    steps(counter, 19)
    assert made.is_open
    steps(counter, 1)
    assert not made.is_open


def test_a_window_closed_early_sends_its_beacons_when_all_ranks_do(armed: Any) -> None:
    beacons = Beacons()
    _, counter, switch = armed(4, beacons)
    steps(counter, 30)
    assert beacons.sent == [("open", 2), ("close", 20)]
    assert switch.stopped == 1


def test_short_steps_are_looked_at_every_half_second_and_long_ones_each() -> None:
    looks = size.Looks(10, 0)
    assert looks.next(20, 10 * 25_000_000) == 20 + 20
    assert looks.next(20, 10 * 5_000_000_000) == 21
    assert looks.next(10, 0) > 10


def test_a_session_is_what_its_daemon_and_its_program_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size.tempfile, "gettempdir", lambda: str(tmp_path))
    private = tmp_path / "private"
    ours = tmp_path / "nvidia/nsight_systems/quadd_session_104711/injection_files"
    other = tmp_path / "nvidia/nsight_systems/quadd_session_104712/injection_files"
    for folder in (private, ours, other):
        folder.mkdir(parents=True)
        (folder / "report.qdstrm").write_bytes(b"x" * 100_000)
    (ours / "sparse").touch()
    with (ours / "sparse").open("r+b") as file:
        file.truncate(1 << 30)
    held = size.NsysFiles(str(private), lambda: [4711]).bytes()
    assert 200_000 <= held < 300_000


def test_the_guard_stops_a_session_that_grows_within_one_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    plan = {
        "nsys": {"path": "nsys", "trace": {"cpu": "nvtx", "gpu": "cuda"}, "stop": ["stop"]},
        "window_by": "session", "run": str(tmp_path), "max_report_mb": 4,
    }  # fmt: skip
    made = guard.Guard(plan, 0, ["true"])
    spawned: list[list[str]] = []
    monkeypatch.setattr(made, "spawn", lambda command: spawned.append(command))
    monkeypatch.setattr(made.files, "bytes", lambda: 6 * size.MB)
    made.stop_if_too_large()
    assert spawned == [], "it is not collecting yet"
    made.look_at = time.monotonic_ns()
    made.stop_if_too_large()
    made.stop_session()
    assert spawned == [["nsys", "stop"]]
