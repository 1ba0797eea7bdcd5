"""The attempts of an elastic job: kept apart, and of one attempt what is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterprof import run_directory
from clusterprof.agent.contracts import paths, states
from clusterprof.collect.outcomes import collect_attempts
from clusterprof.run_directory import Window


@pytest.fixture
def run(tmp_path: Path) -> Window:
    return run_directory.create(tmp_path / "run")


def rank_left(run: Window, attempt: int, rank: int, state: str, **facts: Any) -> None:
    """A profiled rank's folder in one attempt; with a report where its state says so."""
    folder = Window.at(run.path, attempt).rank(rank)
    states.advance(str(folder), state, chosen=True, **facts)
    if state in ("finishing", "captured"):
        (folder / "report.nsys-rep").write_bytes(b"report")


def test_each_attempt_has_a_folder_and_all_belong_to_one_run(run: Window) -> None:
    assert paths.attempt_of({}) == 1
    assert paths.attempt_of({"TORCHELASTIC_RESTART_COUNT": "0"}) == 1
    assert paths.attempt_of({"TORCHELASTIC_RESTART_COUNT": "2"}) == 3
    assert paths.attempt_of({"TORCHELASTIC_RESTART_COUNT": "many"}) == 1
    third = paths.attempt_folder("/runs/x", 3)
    assert (paths.attempt_folder("/runs/x", 1), third) == ("/runs/x", "/runs/x/attempt-3")
    assert paths.run_of(third) == paths.run_of("/runs/x") == "/runs/x"
    rank_left(run, 3, 0, "waiting")
    (run.path / "attempt-of-mine").mkdir()
    assert [each.attempt for each in run.attempts()] == [1, 3]


@pytest.mark.parametrize(
    ("before", "again"),
    [
        ({"state": "captured", "whole": True}, False),
        ({"state": "finishing", "whole": True}, False),
        ({"state": "captured", "whole": False}, True),
        ({"state": "captured"}, True),
        ({"state": "lost"}, True),
    ],
)
def test_a_rank_captures_again_unless_it_has_had_the_whole_window(
    run: Window, before: dict[str, Any], again: bool
) -> None:
    rank_left(run, 1, 0, **before)
    folder = Window.at(run.path, 2).rank(0)
    assert states.captured_before(str(folder)) is not again


@pytest.mark.parametrize("best", [1, 2])
def test_the_attempt_with_most_whole_windows_is_merged_and_the_others_stay(
    run: Window, best: int
) -> None:
    for attempt in (1, 2):
        for rank in (0, 1):
            rank_left(run, attempt, rank, "captured", whole=attempt == best)
    rank_left(run, 3, 0, "waiting")
    taken, outcomes = collect_attempts(run, [0, 1], patience_s=0)
    assert taken.attempt == best
    folder = Window.at(run.path, best)
    assert [one.report for one in outcomes] == [
        folder.rank(rank) / "report.nsys-rep" for rank in (0, 1)
    ]
    for attempt in (1, 2):
        assert states.read(str(Window.at(run.path, attempt).rank(0)))["state"] == "collected"


def test_of_attempts_with_as_many_whole_windows_the_one_with_most_reports_is_merged(
    run: Window,
) -> None:
    for attempt, ranks in ((1, 2), (2, 3), (3, 1)):
        for rank in range(ranks):
            rank_left(run, attempt, rank, "captured", whole=rank == 0)
    assert collect_attempts(run, [0, 1, 2], patience_s=0)[0].attempt == 2


def test_reports_of_two_attempts_are_not_merged_with_each_other(run: Window) -> None:
    rank_left(run, 1, 0, "captured", whole=True)
    rank_left(run, 1, 1, "captured", whole=True)
    rank_left(run, 1, 2, "capturing")
    states.advance(str(Window.at(run.path, 2).rank(0)), "counting", chosen=False)
    rank_left(run, 2, 2, "captured", whole=True)
    taken, outcomes = collect_attempts(run, [0, 1, 2], patience_s=0)
    assert taken.attempt == 1
    assert [one.state for one in outcomes] == ["collected", "collected", "lost"]
    assert "attempt 2 " in outcomes[2].reason


def test_a_run_is_read_as_it_was_merged(run: Window) -> None:
    run.directory.write_manifest({"schema_version": run_directory.SCHEMA_VERSION, "attempt": 2})
    assert run_directory.opened(run.path).rank(0) == run.path / "attempt-2/ranks/00000"
    run.directory.write_manifest({"schema_version": run_directory.SCHEMA_VERSION})
    assert run_directory.opened(run.path).attempt == 1
