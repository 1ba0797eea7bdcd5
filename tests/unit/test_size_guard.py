"""How large a capture may become: what is counted, when it is looked at, and who closes it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.clock import ManualClock

from clusterprof.agent import nsys as profiler
from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import LOOK_NS, MB, NsysPlan, Plan, Selection
from clusterprof.agent.guard import report_transfer, session
from clusterprof.agent.rank import profilers, window
from clusterprof.agent.rank.steps import Counter


class Switch:
    """A capture of which each step takes a megabyte."""

    excludes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.bytes = 0
        self.stopped = 0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped += 1

    def save(self) -> None:
        pass

    def size(self) -> int:
        self.bytes += MB
        return self.bytes

    def stall_s(self, done: int, left: int) -> float:
        return 9.0 if done > 2 else 1.0


@pytest.fixture
def armed(outbox: Outbox, rank_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a window of the steps 2 to 19, with one switch."""

    def make(most: int) -> tuple[window.Window, Counter, Switch]:
        switch, counter = Switch(), Counter(outbox.clock)
        plan = Plan("", Selection("all", "all"), (2, 20), "torch", max_report_mb=most)
        made = window.Window(plan, outbox, counter)
        counter.attend(made.first, made.at)
        monkeypatch.setattr(made, "make_switches", lambda: [switch])
        counter.begin()
        return made, counter, switch

    return make


def steps(counter: Counter, count: int) -> None:
    for _ in range(count):
        counter.clock.sleep(1)  # so each is a look
        counter.boundary()


def test_a_window_closes_between_the_steps_at_which_it_became_too_large(
    armed: Any, rank_folder: Path, written: Callable[[], None]
) -> None:
    made, counter, switch = armed(4)
    steps(counter, 30)
    written()
    assert not made.is_open
    assert switch.stopped == 1
    reason = states.read(str(rank_folder))["reason"]
    assert all(fact in reason for fact in ("step 7", "2:20", "5 MB")), reason


@pytest.mark.parametrize(("timeout_s", "warned"), [(10.0, False), (8.0, True), (None, False)])
def test_a_stall_longer_than_a_process_group_waits_is_said_once(
    armed: Any, rank_folder: Path, written: Callable[[], None], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], timeout_s: float | None, warned: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(profilers, "shortest_timeout_s", lambda: timeout_s)
    _, counter, switch = armed(0)
    steps(counter, 30)
    written()
    stated = states.read(str(rank_folder)).get("stall", "")
    printed = capfd.readouterr().err
    assert switch.stopped == 1
    assert all((fact in text) == warned for text in (stated, printed) for fact in ("2:20", "9 s"))
    assert printed.count("process group") == warned


def test_torch_profiler_s_stall_follows_from_what_its_steps_add(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = profilers.TorchProfiler(outbox, alone=True)
    for done, held_mb, stalls_mb in ((0, 900, 0), (1, 50, 0), (2, 60, 60 + 8 * 10), (5, 90, 140)):
        monkeypatch.setattr(profiler, "size", lambda held_mb=held_mb: held_mb * MB)
        assert profiler.stall_s(done, 10 - done) == pytest.approx(stalls_mb * MB * profilers.BYTE_S)


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


def test_short_steps_are_looked_at_every_half_second_and_long_ones_each() -> None:
    assert window.next_look(10, 0, 20, 10 * 25_000_000) == 20 + 20
    assert window.next_look(10, 0, 20, 10 * 5_000_000_000) == 21
    assert window.next_look(10, 0, 10, 0) > 10


def test_a_session_is_what_is_in_its_folder_and_what_its_nsys_holds_open(tmp_path: Path) -> None:
    private = tmp_path / "private"
    (private / "nsys/nvidia").mkdir(parents=True)
    (private / "nsys/nvidia/storage.dat").write_bytes(b"x" * 100_000)
    (private / "report.qdstrm").write_bytes(b"x" * 100_000)
    with (private / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    other = tmp_path / "lock"
    other.write_bytes(b"x" * 50_000_000)
    (private / "nsys/lock").symlink_to(other)
    # tests before this one may have left this process a file of its own
    own = session.NsysFiles(str(tmp_path / "none"), lambda: [os.getpid()]).bytes()
    with (tmp_path / "deleted").open("wb") as held, (private / "report.qdstrm").open("ab"):
        held.write(b"x" * 300_000)
        held.flush()
        (tmp_path / "deleted").unlink()
        files = session.NsysFiles(str(private), lambda: [os.getpid()])
        written, held_besides = files.written(), files.bytes() - files.written()
    assert 200_000 <= written < 250_000
    assert 300_000 <= held_besides - own < 10_000_000


def test_a_session_s_shared_memory_and_growth_count(tmp_path: Path) -> None:
    files = session.NsysFiles(str(tmp_path), lambda: [os.getpid()])
    files.begin()
    with os.fdopen(os.memfd_create("records"), "wb") as held:
        held.write(b"x" * 1_000_000)
        held.flush()
        # fresh pages: what Python allocates may be memory that it has had already
        with mmap.mmap(-1, 24 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
            taken.write(b"x" * len(taken))
            with_both = files.bytes()
        with_records = files.bytes()
    without = files.bytes()
    assert with_both - with_records > 12 << 20
    assert 1_000_000 <= with_records - without < 100_000_000


def made_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most: int, clock: ManualClock
) -> tuple[session.Session, list[list[str]]]:
    """A session that is collecting 6 MB, and what it starts."""
    monkeypatch.setattr(profiler.tempfile, "gettempdir", lambda: str(folder))
    trace = {"cpu": "nvtx", "gpu": "cuda"}
    nsys = NsysPlan("nsys", "2022.4", None, trace, [], [], [], ["stop"])
    home = report_transfer.ReportTransfer(str(folder), str(folder / "rank"))
    made = session.Session(
        "clusterprof-of-no-rank", nsys, "session", home, most, Outbox(None), clock
    )
    spawned: list[list[str]] = []

    class Started:
        returncode = None

        def poll(self) -> None:
            return None

    def spawn(command: list[str], nice: int = 0) -> Started:
        spawned.append(command)
        return Started()

    monkeypatch.setattr(made, "spawn", spawn)
    monkeypatch.setattr(made.files, "bytes", lambda: 6 * MB)
    return made, spawned


def test_the_guard_stops_a_session_that_grows_within_one_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    made, spawned = made_session(tmp_path, monkeypatch, 4 * MB, clock)
    made.tend(10)
    assert spawned == [], "it is not collecting yet"
    made.opened, made.look_at = True, 1
    made.tend(10)
    assert spawned == [], "its rank learns of it first"
    clock.sleep(LOOK_NS / 1e9)
    made.tend(10)
    assert spawned == [["nsys", "stop"]]
    made.stop()
    assert spawned == [["nsys", "stop"]], "its rank closes the window at the step's end"


def test_the_guard_stops_a_session_before_the_disk_under_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    made, spawned = made_session(tmp_path, monkeypatch, 0, clock)
    monkeypatch.setattr(profiler, "free_bytes", lambda _: profiler.LEAST_FREE_B + 7 * MB)
    made.opened, made.look_at = True, 1
    made.tend(10)
    assert spawned == []
    monkeypatch.setattr(profiler, "free_bytes", lambda _: profiler.LEAST_FREE_B + 5 * MB)
    made.look_at = 1
    made.tend(10)
    assert spawned == [["nsys", "stop"]]
    (trouble,) = made.troubles
    assert all(fact in trouble for fact in (made.scratch, "69 MB")), trouble


def test_a_stop_that_hangs_while_the_capture_grows_is_ended_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    made, spawned = made_session(tmp_path, monkeypatch, MB, clock)
    monkeypatch.setattr(profiler, "free_bytes", lambda _: 1 << 40)
    made.opened, made.look_at, made.too_large = True, 1, True
    made.tend(10)
    assert spawned == [["nsys", "stop"]]
    clock.sleep(session.STOP_S)
    made.tend(10)
    assert not made.transfer.torn
    clock.sleep(LOOK_NS / 1e9)
    made.tend(10)
    assert made.transfer.torn
    assert made.troubles[-1] == "nsys stop did not end, and the capture grew to 6 MB"
