"""When a signal waits for the reports, when windows close for the time limit, and when not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from clusterprof import run_directory
from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.plan import NsysPlan
from clusterprof.arguments import StepWindow, parse_ranks
from clusterprof.collect import live_windows
from clusterprof.launch import run_job
from clusterprof.launch.run_job import BeforeSrunKills
from clusterprof.run_directory import Window


@pytest.fixture
def run(tmp_path: Path) -> Window:
    return run_directory.create(tmp_path / "run")


def rank_is(run: Window, rank: int, state: str, *, report: bool = False) -> None:
    states.advance(str(run.rank(rank)), state, chosen=True)
    if report:
        (run.rank(rank) / "report.nsys-rep").write_bytes(b"report")


def test_only_open_windows_and_reports_that_are_being_written_are_waited_for(
    run: Window,
) -> None:
    rank_is(run, 0, "waiting")
    rank_is(run, 1, "capturing")
    rank_is(run, 2, "finishing")
    rank_is(run, 3, "finishing", report=True)
    rank_is(run, 4, "captured")
    assert run_job.unsaved(run, None) == [1, 2]
    assert run_job.unsaved(run, [2, 3, 9]) == [2]


def test_windows_that_were_ordered_later_are_waited_for_too(run: Window) -> None:
    run.directory.write_manifest({"schema_version": 1})
    later = live_windows.order(run, StepWindow(30, 40), parse_ranks("1,3"), "torch", auto=True)
    for rank in range(4):
        rank_is(run, rank, "counting")
        states.advance(str(later.rank(rank)), "capturing" if rank == 3 else "counting")
    assert run_job.unsaved(run, ()) == [3]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_srun_gets_its_signal_once_the_reports_are_home_and_the_ranks_are_told_why(
    name: str, run: Window
) -> None:
    rank_is(run, 0, "capturing")
    looks = []

    def enough() -> bool:
        looks.append(states.stop_requested(str(run.path)))
        rank_is(run, 0, "finishing", report=len(looks) == 3)
        return False

    number = signal.Signals[name]
    assert BeforeSrunKills(run, [0])(number, enough) == [number]
    assert [name in str(reason) for reason in looks] == [True] * 3


def test_reports_may_take_as_much_longer_as_nsys_may(run: Window) -> None:
    by_nsys = NsysPlan("nsys", "2022.4", None, {}, [], [], [], [], start_s=60)
    assert BeforeSrunKills(run, [0], by_nsys.longer_s).saving_s == run_job.SAVING_S + 54
    assert by_nsys._replace(start_s=1).longer_s == 0


def test_somebody_who_signals_again_does_not_wait(run: Window) -> None:
    rank_is(run, 0, "capturing")
    assert BeforeSrunKills(run, [0])(signal.SIGTERM, lambda: True) == [signal.SIGTERM]


@pytest.mark.parametrize("state", ["waiting", "captured", "lost"])
def test_where_nothing_is_to_be_saved_no_signal_waits(run: Window, state: str) -> None:
    rank_is(run, 0, state)
    assert BeforeSrunKills(run, [0])(signal.SIGHUP, pytest.fail) == [signal.SIGHUP]
    assert states.stop_requested(str(run.path)) is None


def test_the_second_interrupt_within_a_second_is_the_one_that_kills(run: Window) -> None:
    rank_is(run, 0, "capturing")
    before = BeforeSrunKills(run, None)
    assert before(signal.SIGUSR1, pytest.fail) == [signal.SIGUSR1]
    assert before(signal.SIGINT, pytest.fail) == [signal.SIGINT]
    assert before(signal.SIGINT, lambda: True) == [signal.SIGINT, signal.SIGINT]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-02:03:04", 93784.0), ("02:03:04", 7384.0), ("3:04", 184.0), ("0:00", 0.0),
        ("UNLIMITED", None), ("NOT_SET", None), ("INVALID", None), ("", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_what_slurm_says_of_a_time_limit_is_understood(text: str, expected: float | None) -> None:
    assert run_job.seconds(text) == expected


def test_a_short_limit_leaves_most_of_its_time_to_the_window() -> None:
    assert [run_job.margin(limit) for limit in (None, 86400.0, 300.0, 60.0)] == [60, 60, 30, 6]


def test_the_job_is_the_one_around_us_or_the_one_that_a_rank_names(
    run: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert run_job.slurm_job(run, [3]) is None
    states.advance(str(run.rank(3)), "waiting", chosen=True, slurm_job="4711")
    assert run_job.slurm_job(run, [3]) == "4711"
    assert run_job.slurm_job(run, None) == "4711"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert run_job.slurm_job(run, [3]) == "12"
