"""Later windows of a job that runs: how an order comes to a rank, and what the rank does then."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import files, paths, plan as plans, states
from clusterprof.agent.contracts.identity import Identity
from clusterprof.agent.contracts.outbox import WINDOW, Outbox
from clusterprof.agent.contracts.plan import LaterWindow, Plan, Selection
from clusterprof.agent.contracts.states import State
from clusterprof.agent.guard import step_log
from clusterprof.agent.guard.step_log import MOST_STEPS, NEAR_LATER, StepLog
from clusterprof.agent.rank import rank as ranks
from clusterprof.agent.rank.steps import Counter
from clusterprof.arguments import StepWindow, parse_ranks
from clusterprof.cli import capture, status
from clusterprof.collect import live_windows
from clusterprof.collect.outcomes import Outcome
from clusterprof.errors import RunDirectoryError, UsageError
from clusterprof.ingest.rank_steps import read_log
from clusterprof.run_directory import Window

NONE = Selection("0", "ranks", (0,))
THREE = Selection("3", "ranks", (3,))
S, MS = 1_000_000_000, 1_000_000


def ordered(run: Path, number: int, first: int, end: int, **members: Any) -> Path:
    """Write an order as `clusterprof capture` does."""
    made = {"selection": THREE, "profiler": "torch", **members}
    file = Path(plans.order_path(str(run), number))
    file.parent.mkdir(parents=True)
    files.write_json(file, LaterWindow(number, (first, end), **made).to_json())
    return file


@pytest.fixture
def asking(outbox: Outbox, tmp_path: Path) -> Path:
    """The run of an outbox whose writer looks for orders once a second; its rank is 3."""
    run = tmp_path / "run"
    folder = run / "ranks" / "00003"
    (run / "windows").mkdir(parents=True)
    outbox.say("begin", run=str(run), folder=str(folder), window=[10, 20], wall_ns=0, log_s=1)
    return run


def handed_over(outbox: Outbox, within_s: float = 2.0) -> list[dict[str, Any]]:
    """The orders that the writer hands to the rank within so long, once there is one."""
    outbox.clock.until(lambda: outbox.look() and _has_one(outbox), within_s, 0.1)
    return outbox.windows()


def _has_one(outbox: Outbox) -> bool:
    return any(name.startswith(WINDOW) for name in outbox.answers)


# --- the order


def test_orders_are_found_by_their_number_and_what_is_none_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "windows").mkdir()
    assert plans.next_order(str(tmp_path), 1) is None
    ordered(tmp_path, 2, 30, 40).write_text("{}")
    ordered(tmp_path, 3, 30, 40).write_text(json.dumps({"number": 3}))
    ordered(tmp_path, 10, 50, 60, asked_by="somebody")
    (tmp_path / "windows" / "notes").mkdir()
    found = plans.next_order(str(tmp_path), 1)
    assert found == LaterWindow(10, (50, 60), THREE, "torch", "somebody")
    assert plans.next_order(str(tmp_path), 10) is None
    (tmp_path / "windows" / "11").mkdir()  # its order is not there yet
    ordered(tmp_path, 12, 70, 80)
    assert plans.next_order(str(tmp_path), 10) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 3},
        {"steps": [40, 30]},
        {"steps": [30]},
        {"profiler": "gdb"},
        {"selection": {"kind": "some"}},
        {"schema_version": 2},
        {"schema_version": None},
    ],
)
def test_what_is_no_order_for_this_window_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = ordered(tmp_path, 2, 30, 40)
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    with pytest.raises(ValueError, match=r"order|version"):
        plans.read_order(str(tmp_path), 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users' files")
def test_an_order_of_another_user_is_obeyed_by_no_rank(tmp_path: Path) -> None:
    from users import MALLORY

    os.chown(ordered(tmp_path, 2, 30, 40), MALLORY, MALLORY)
    assert plans.next_order(str(tmp_path), 1) is None
    ordered(tmp_path, 3, 50, 60)
    found = plans.next_order(str(tmp_path), 1)
    assert found
    assert found.number == 3


def test_the_folders_of_a_later_window_are_those_of_the_run(tmp_path: Path) -> None:
    first = paths.rank_folder(paths.attempt_folder("/runs/x", 2), 8)
    later = paths.in_window(first, 3)
    assert later == "/runs/x/windows/3/attempt-2/ranks/00008"
    assert paths.run_of_rank(later) == paths.run_of_rank(first) == "/runs/x"
    run = Window.at(tmp_path)
    assert (run.number, run.path, run.directory.later_windows()) == (1, tmp_path, [])
    ordered(tmp_path, 2, 30, 40)
    (window,) = run.directory.later_windows()
    assert (window.number, window.directory.path) == (2, tmp_path)
    assert window.rank(8) == tmp_path / "windows/2/ranks/00008"
    assert window.logged(8) == tmp_path / "ranks/00008"
    assert (window.window().first, window.window().end) == (30, 40)
    # A run directory of that name is one.
    assert Window.at(window.path) == window
    (window.path / paths.MANIFEST).write_text("{}")
    assert Window.at(window.path).number == 1


# --- the writer


def test_a_writer_hands_an_order_over_once_and_writes_to_the_windows_folder(
    asking: Path, outbox: Outbox, written: Callable[[], None]
) -> None:
    ordered(asking, 2, 30, 40)
    (content,) = handed_over(outbox)
    assert LaterWindow.from_json(content, 2).steps == (30, 40)
    later = outbox.of_window(2)
    outbox.state("counting")
    later.state("waiting", chosen=True)
    later.say("file", name=paths.GARBAGE, text="a\n")
    later.file(paths.FLIGHT, b"dump")
    outbox.file(paths.FLIGHT, b"first")
    written()
    there = asking / "windows/2/ranks/00003"
    assert states.read(str(there))["state"] == "waiting"
    assert (there / paths.GARBAGE).read_text() == "a\n"
    assert (there / paths.FLIGHT).read_bytes() == b"dump"
    assert (asking / "ranks/00003" / paths.FLIGHT).read_bytes() == b"first"
    assert states.read(str(asking / "ranks/00003"))["state"] == "counting"
    ordered(asking, 3, 50, 60)
    (content,) = handed_over(outbox)
    assert content["number"] == 3


def test_what_a_guard_says_of_its_rank_stays_with_its_writer(
    outbox: Outbox, tmp_path: Path, written: Callable[[], None]
) -> None:
    folder = tmp_path / "run" / "ranks" / "00003"
    folder.parent.mkdir(parents=True)
    outbox.say("guard", run=str(tmp_path / "run"), folder=str(folder))
    outbox.state("armed", pid=1)
    written()
    assert states.read(str(folder))["state"] == "armed"


def test_an_order_that_is_to_come_soon_is_looked_for_more_often_until_it_is_late(
    clock: ManualClock, outbox: Outbox, tmp_path: Path, written: Callable[[], None]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run/ranks/00003"
    (run / "windows").mkdir(parents=True)
    outbox.say("begin", run=str(run), folder=str(folder), window=[10, 20], wall_ns=0, log_s=3600)
    outbox.steps(0, [(each * MS, (each + 1) * MS) for each in range(20)])
    outbox.say("expect", every_s=0.2)
    written()
    logged = read_log(folder / paths.STEPS)
    assert len(logged) == 20, "by these steps the ranks and steps are chosen"
    ordered(run, 2, 30, 40, auto=True)
    (content,) = handed_over(outbox, within_s=0.5)
    assert (content["number"], content["auto"]) == (2, True)
    clock.sleep(plans.SOON_S - 1)
    ordered(run, 3, 50, 60, auto=True)  # since that one came too late
    (content,) = handed_over(outbox, within_s=0.5)
    assert (content["number"], content["auto"]) == (3, True)
    clock.sleep(plans.SOON_S + 1)
    ordered(run, 4, 70, 80, auto=True)
    assert handed_over(outbox, within_s=60) == []


def test_the_steps_that_are_looked_at_are_logged_at_once(
    outbox: Outbox, tmp_path: Path, written: Callable[[], None]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run/ranks/00003"
    run.mkdir()
    outbox.say("begin", run=str(run), folder=str(folder), window=[10, 20], wall_ns=0, log_s=3600)
    outbox.steps(0, [(each * MS, (each + 1) * MS) for each in range(20)])
    outbox.say("log")
    written()
    assert len(read_log(folder / paths.STEPS)) == 20


def test_a_window_that_the_rank_has_captured_already_is_not_handed_over(
    asking: Path, outbox: Outbox
) -> None:
    ordered(asking, 2, 30, 40)
    states.advance(str(asking / "windows/2/ranks/00003"), "captured")
    ordered(asking, 3, 50, 60)
    (content,) = handed_over(outbox)
    assert content["number"] == 3


def test_a_writer_of_a_plan_without_later_windows_looks_for_none(
    clock: ManualClock, rank_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(plans, "next_order", lambda run, number: looked.append(run))
    clock.sleep(600)
    assert rank_folder.exists()
    assert not looked


# --- the step log


def test_the_steps_of_a_later_window_are_kept_however_many_there_were(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path), (10, 20), 0)
    log.claim()
    log.steps = [(i, i, i) for i in range(MOST_STEPS)]
    log.count = 700_000
    log.attend((700_200, 700_205))
    log.add(700_000, [(i * MS, (i + 1) * MS) for i in range(400)])
    assert [row[0] for row in log.steps[MOST_STEPS:]] == list(range(700_200, 700_205))
    log.steps = []
    log.attend((701_000, 701_005))
    log.add(700_400, [(i * MS, (i + 1) * MS) for i in range(1_000)])
    kept = [row[0] for row in log.steps]
    assert kept == list(range(701_000 - NEAR_LATER, 701_005 + NEAR_LATER))


def test_a_clock_that_was_set_between_two_windows_moves_the_later_steps_alone(
    tmp_path: Path,
) -> None:
    log = StepLog(str(tmp_path), (0, 5), 10 * S)
    log.claim()
    log.add(0, [(i * MS, (i + 1) * MS) for i in range(10)])
    log.anchor(20 * S)
    log.anchor(30 * S, since=6)
    log.write(all_of_it=True)
    begins = read_log(tmp_path / paths.STEPS)["begin_ns"].to_pylist()
    assert begins == [(20 if i < 6 else 30) * S + i * MS for i in range(10)]
    assert step_log.line((0, 1, 2), log.walls) == f"0,{20 * S + 1},{20 * S + 2}\n"


# --- the rank


@pytest.fixture
def rank(asking: Path, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> ranks.Rank:
    """Rank 3 of 8, which was not selected; it counts, and has made 25 steps."""
    plan = Plan(str(asking), NONE, (10, 20), "torch", log_s=1)
    counter = Counter(outbox.clock)
    monkeypatch.setattr(ranks, "counter", counter)
    made = ranks.Rank(plan, Identity(3, 8, 3, "torchrun"), False, None)
    made.outbox = outbox
    counter.begin(outbox)
    for _ in range(25):
        counter.boundary()
    return made


@pytest.mark.parametrize(
    ("last_type", "name"), [(ZeroDivisionError, "ZeroDivisionError"), (None, None), ("x", None)]
)
def test_a_rank_says_which_exception_ends_it_and_nothing_of_its_text(
    asking: Path, rank: ranks.Rank, written: Callable[[], None], monkeypatch: pytest.MonkeyPatch,
    last_type: object, name: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "last_type", last_type, raising=False)
    monkeypatch.setattr(sys, "last_value", ValueError("hunter2"), raising=False)
    rank.tell_exception()
    written()
    files = [path.read_text() for path in asking.rglob(paths.STATE)]
    assert ["exception" in text for text in files] == [True] * bool(name)
    assert all(f'"{name}"' in text and "hunter2" not in text for text in files)


def test_a_rank_that_was_not_selected_at_first_takes_part_in_a_later_window(
    asking: Path, rank: ranks.Rank, written: Callable[[], None]
) -> None:
    rank.obey(LaterWindow(2, (30, 40), THREE, "torch"))
    (recorder,) = rank.recorders
    window = recorder.window
    assert (window.first, window.end, window.number, recorder.first) == (30, 40, 2, 30)
    # before it the recorder counts a step's collectives
    assert ranks.counter.next_event == recorder.due == 22
    rank.obey(LaterWindow(3, (40, 50), NONE, "torch"))
    assert rank.recorders[1].window is None
    assert rank.recorders[1].first == 40
    written()
    found = [states.read(str(asking / f"windows/{number}/ranks/00003")) for number in (2, 3)]
    assert [(each["state"], each["chosen"]) for each in found] == [
        ("waiting", True),
        ("counting", False),
    ]


@pytest.mark.parametrize(
    ("steps", "selection", "state", "facts"),
    [
        ((25, 40), THREE, "lost", ("25:40", "25 steps")),
        ((24, 40), NONE, "counted", ("24:40", "25 steps")),
        ((35, 45), THREE, "lost", ("35:45", "40")),
    ],
    ids=["past", "past, not selected", "before another one ends"],
)
def test_a_rank_that_cannot_take_part_says_why_and_captures_nothing(
    asking: Path,
    rank: ranks.Rank,
    written: Callable[[], None],
    steps: tuple[int, int],
    selection: Selection,
    state: str,
    facts: tuple[str, ...],
) -> None:
    rank.busy_until = 40
    if steps[0] < 30:
        rank.busy_until = 20
    rank.obey(LaterWindow(2, steps, selection, "torch"))
    assert rank.recorders == []
    written()
    found = states.read(str(asking / "windows/2/ranks/00003"))
    assert found["state"] == state
    assert all(fact in found["reason"] for fact in facts)
    assert found["flight"] == found["reason"]
    assert found["late"] is (steps[0] < 30)


def test_an_order_that_makes_no_sense_to_the_rank_hurts_no_step(
    rank: ranks.Rank, outbox: Outbox, capfd: pytest.CaptureFixture[str]
) -> None:
    outbox.answers["window 2"] = {"number": 2}
    ranks.counter.after_flush = rank.look_for_windows
    ranks.counter._flush_at = 0
    ranks.counter.boundary()
    assert (rank.recorders, ranks.counter.count) == ([], 26)
    assert "later window" in capfd.readouterr().err


# --- which steps can be captured


def job(run: Path, ended: str | None = None, **members: Any) -> Window:
    """A run directory of a job of two ranks."""
    made = Window.at(run)
    made.path.mkdir(exist_ok=True)
    made.directory.write_manifest(
        {"schema_version": 1, "selection": NONE._asdict(), "window": [10, 13], "world_size": 2,
         "began": "2026-01-02T03:04:05+00:00", "ended": ended, "exit_status": None, **members}
    )  # fmt: skip
    return made


def at_work(
    run: Window, rank: int, steps: int, each_s: float, now_s: float, stalled_s: float = 0
) -> None:
    """What a rank leaves that has made `steps` steps by now; it stalled in the last but one."""
    folder = run.rank(rank)
    states.advance(str(folder), "counting")
    lengths = [int(each_s * S)] * steps
    lengths[-2] += int(stalled_s * S)
    ends = list(accumulate(lengths))
    log = StepLog(str(folder), (steps - 5, steps), int(now_s * S) - ends[-1])
    log.claim()
    log.add(0, [(end - length, end) for end, length in zip(ends, lengths, strict=True)])
    log.write(all_of_it=True)


def test_the_steps_of_a_profiler_s_start_and_stop_are_those_of_all_windows_that_have_one(
    tmp_path: Path,
) -> None:
    run = job(tmp_path / "run", profiler={"name": "none"})
    ordered(run.path, 2, 40, 45)
    later = live_windows.order(run, StepWindow(70, 72), parse_ranks("0"), "none")
    assert [window.first for window in live_windows.windows(run)] == [10, 40, 70]
    assert [window.first for window in live_windows.windows(run, profiled=True)] == [40]
    # rank 0 has captured the first one by itself (`--ranks auto`)
    assert live_windows.switching_steps(run) == [10, 13, 14, 40, 45, 46]
    assert live_windows.switching_steps(later) == [40, 45, 46, 70, 72, 73]


def test_a_window_begins_where_no_rank_has_been_once_it_has_the_order(tmp_path: Path) -> None:
    run, now_s = job(tmp_path / "run"), time.time()
    with pytest.raises(RunDirectoryError, match="yet"):
        live_windows.possible(run, 60, now_s)
    at_work(run, 0, 1000, 0.1, now_s)
    at_work(run, 1, 900, 0.1, now_s)
    wait_s = 60 * (1 + live_windows.FASTER) + live_windows.ON_ITS_WAY_S
    found = live_windows.possible(run, 60, now_s)
    assert found.first == pytest.approx(1000 + wait_s / 0.1, abs=3)
    assert found.at_s(found.first) - now_s == pytest.approx(wait_s + 10, abs=1)
    ordered(run.path, 2, 5_000, 5_010)
    assert live_windows.possible(run, 60, now_s).first == 5_010
    # A log that is a minute old says less: the rank has gone on since.
    later = live_windows.possible(Window.at(run.path), 60, now_s + 600)
    assert later.first == pytest.approx(1000 + (600 + wait_s) / 0.1, abs=3)


def test_a_window_begins_at_the_first_step_that_no_rank_has_begun_once_it_has_the_order(
    tmp_path: Path,
) -> None:
    run, now_s, step_s = job(tmp_path / "run"), 1_800_000_000.0, 0.125
    at_work(run, 0, 1000, step_s, now_s)
    wait_s = 60 * (1 + live_windows.FASTER) + live_windows.ON_ITS_WAY_S
    # Its steps until then are over, and the next one, of this number, has begun.
    begun = 1000 + int(wait_s / step_s)
    assert live_windows.possible(run, 60, now_s).first == begun + 1


@pytest.mark.parametrize("ahead_s", [-30.0, 0.0, 30.0])
def test_an_order_that_ranks_expect_needs_no_host_s_clock(tmp_path: Path, ahead_s: float) -> None:
    """Its log's time of writing tells how old it is where a host's clock is ahead of ours."""
    run, now_s = job(tmp_path / "run"), time.time()
    at_work(run, 0, 1000, 0.1, now_s + ahead_s)
    os.utime(run.rank(0) / paths.STEPS, (now_s - 2, now_s - 2))
    wait_s = 0.1 * (1 + live_windows.FASTER) + live_windows.SOON_ON_ITS_WAY_S
    first = live_windows.possible(run, 0.1, now_s, now_s).first
    assert first == pytest.approx(1000 + (max(2, -ahead_s) + wait_s) / 0.1, abs=3)


def test_a_run_directory_that_cannot_be_written_has_no_time_of_its_server(tmp_path: Path) -> None:
    run = job(tmp_path / "run")
    assert live_windows.server_s(run) == pytest.approx(run.path.stat().st_mtime)
    assert live_windows.server_s(Window.at(tmp_path / "none")) is None


def paced(run: Window, rank: int, *stretches: tuple[int, int]) -> None:
    """The steps of a rank: stretches of so many, each of so many ms; from 500 on in blocks."""
    folder = run.rank(rank)
    states.advance(str(folder), "counting")
    lengths = [ms * MS for count, ms in stretches for _ in range(count)]
    ends = list(accumulate(lengths))
    log = StepLog(str(folder), (0, 0), 0)
    log.claim()
    log.add(0, [(end - length, end) for end, length in zip(ends, lengths, strict=True)])
    log.write(all_of_it=True)


@pytest.mark.parametrize(
    ("stretches", "found"),
    [
        ([(100, 10)], None),
        ([(10, 90), (80, 10), (9, 14)], None),  # fewer than half of the latest
        ([(10, 90), (80, 10), (20, 14)], (14, 10)),
        ([(80, 10), (20, 13)], None),
        ([(15, 10), (20, 20)], None),  # too few before
        ([(3000, 10), (1000, 20)], (20, 10)),  # in blocks of a thousand
        ([(3000, 10), (1000, 20), (5, 10)], (20, 10)),
        ([(3000, 20), (1000, 10)], None),
    ],
)
def test_a_rank_is_slower_by_its_latest_steps(
    tmp_path: Path, stretches: list[tuple[int, int]], found: tuple[int, int] | None
) -> None:
    run = job(tmp_path / "run")
    assert live_windows.slower(run, 1.3) is None
    paced(run, 0, (100, 10))
    paced(run, 1, *stretches)
    slower = live_windows.slower(run, 1.3)
    expected = live_windows.Slower(1, found[0] * MS, found[1] * MS) if found else None
    assert slower == expected


def test_of_two_windows_ordered_by_auto_the_result_is_of_the_one_that_most_ranks_began(
    tmp_path: Path,
) -> None:
    run = job(tmp_path / "run")
    both = Selection("0,1", "ranks", (0, 1))
    for number, first in ((2, 30), (3, 50)):
        ordered(run.path, number, first, first + 5, selection=both, auto=True)
    ordered(run.path, 4, 90, 95, selection=both)
    late, again, asked = run.directory.later_windows()
    assert run.deep() == again, "neither was begun: the last"
    states.advance(str(late.rank(0)), "captured", chosen=True, step_begin=30)
    states.advance(str(late.rank(1)), "lost", "too late", chosen=True, late=True)
    assert (run.deep(), late.is_deep) == (late, True)
    for rank in (0, 1):
        states.advance(str(again.rank(rank)), "captured", chosen=True, step_begin=50)
    late, again, asked = run.directory.later_windows()
    assert (run.deep(), late.is_deep, again.is_deep) == (again, False, True)
    assert (again.results, late.results, asked.results) == (run, late, asked)
    lines = status.render(status.look(run), everyone=False).splitlines()[-3:]
    names = [line.partition(":")[0] for line in lines]
    assert names == ["window 2", "window 3 (its result is the run's)", "window 4"]
    states.advance(str(late.rank(0)), "lost", "too late", chosen=True)
    lines = status.render(status.look(run), everyone=False).splitlines()
    assert lines[-3].endswith("; ranks 0–1: too late")


def test_steps_inside_of_windows_make_no_rank_slower(tmp_path: Path) -> None:
    run = job(tmp_path / "run")
    paced(run, 0, (80, 10), (30, 20), (5, 10))
    assert live_windows.slower(run, 1.3)
    ordered(run.path, 2, 80, 110)
    assert live_windows.slower(run, 1.3) is None


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ("step > 1x", "+10:+15"), ("step > 0.5x", "+10:+15"), ("step > 99x", "+10:+15"),
        ("step < 1.3x", "+10:+15"), ("step > 1.3", "+10:+15"), ("gpu > 1.3x", "+10:+15"),
        ("late > 5", "+10:+15"), ("late > 0%", "+10:+15"), ("late > 5%", "80:90"),
        ("", "+10:+15"), ("step > 1.3x or step > 2x", "+10:+15"), ("step > 1.3x", "80:90"),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_be_watched_is_refused(when: str, steps: str) -> None:
    with pytest.raises(UsageError):
        capture.checked_condition(when, steps)
    assert capture.checked_condition(" step>1.30 x", "+10:+15") == ("step", 1.3)
    assert capture.checked_condition("late > 5 %", "+10:+15") == ("late", 0.05)


def test_a_rank_that_stalled_is_expected_at_its_usual_pace(tmp_path: Path) -> None:
    run, now_s = job(tmp_path / "run"), time.time()
    at_work(run, 0, 100, 0.1, now_s, stalled_s=5)
    wait_s = 60 * (1 + live_windows.FASTER) + live_windows.ON_ITS_WAY_S
    found = live_windows.possible(run, 60, now_s)
    assert found.first == pytest.approx(100 + wait_s / 0.1, abs=3)
    # An older log of slower steps says less of when that is.
    at_work(run, 1, 50, 10, now_s - 30)
    found = live_windows.possible(run, 60, now_s)
    assert found.first == pytest.approx(100 + wait_s / 0.1, abs=3)
    assert found.at_s(found.first) - now_s == pytest.approx(wait_s, abs=1)


def test_steps_that_a_look_had_written_tell_the_pace_before_the_log_does(tmp_path: Path) -> None:
    run = job(tmp_path / "run")
    paced(run, 0)
    assert live_windows.pace_of(run.rank(0)) is None
    rows = "".join(f"{step},{step * 10 * MS},{(step + 1) * 10 * MS}\n" for step in range(60))
    (run.rank(0) / paths.WATCH_STEPS).write_text(f"step,begin_ns,end_ns\n{rows}")
    pace = live_windows.pace_of(run.rank(0))
    assert pace is not None
    assert (pace.steps, pace.step_s) == (60, pytest.approx(0.01))


@pytest.mark.parametrize("steps", [30, 47, 100])
def test_a_host_that_runs_ahead_of_its_gpu_is_no_faster_than_that(
    tmp_path: Path, steps: int
) -> None:
    """It waits for the GPU in each tenth step; the three after that take a fifth of the mean."""
    run = job(tmp_path / "run")
    ms = [[100, 6, 6, 6, *[30] * 6][step % 10] for step in range(steps)]
    paced(run, 0, *((1, each) for each in ms))
    pace = live_windows.pace_of(run.rank(0))
    assert pace is not None
    assert pace.steps == steps
    assert pace.step_s == pytest.approx(0.0298, rel=0.3 if steps < 40 else 0.1)


def test_a_window_is_over_once_no_rank_can_capture_it_any_more(tmp_path: Path) -> None:
    run, now_s = job(tmp_path / "run"), time.time()
    for rank in (0, 1):
        at_work(run, rank, 100, 0.1, now_s)
    ordered(run.path, 2, 200, 205, selection=Selection("0,1", "ranks", (0, 1)))
    (window,) = run.directory.later_windows()
    assert live_windows.going_on(window) == [0, 1]
    states.advance(str(window.rank(0)), "captured", chosen=True)
    assert live_windows.going_on(window) == [1]
    with pytest.raises(RunDirectoryError, match="rank 1"):
        live_windows.check_over(window)
    states.advance(str(run.rank(1)), "counted")
    assert live_windows.going_on(window) == []
    # A run that has ended, and the run itself.
    ordered(run.path, 3, 300, 305, selection=Selection("0", "ranks", (0,)))
    assert live_windows.going_on(run.directory.later_windows()[1]) == [0]
    job(tmp_path / "run", ended="2026-01-02T03:05:05+00:00")
    assert live_windows.going_on(run.directory.later_windows()[1]) == []
    assert live_windows.going_on(run) == []


def test_a_rank_that_still_runs_is_not_said_to_have_ended(tmp_path: Path) -> None:
    run, now_s = job(tmp_path / "run"), time.time()
    for rank in (0, 1):
        at_work(run, rank, 100, 0.1, now_s)
    lost = [Outcome(rank, State.LOST, "the program ended before it trained") for rank in (0, 1)]
    states.advance(str(run.rank(1)), "counted")
    running, over = live_windows.of_running(run, lost)
    assert "still runs" in running.reason
    assert over == lost[1]
    job(tmp_path / "run", ended="2026-01-02T03:05:05+00:00")
    assert live_windows.of_running(run, lost) == lost
