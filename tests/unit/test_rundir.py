"""The run directory: made once, read always, replaced only on request."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

import pytest
from lab.clock import ManualClock

from clusterprof import run_directory
from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.states import State
from clusterprof.arguments import parse_ranks
from clusterprof.collect import outcomes
from clusterprof.collect.outcomes import DELETED, collect
from clusterprof.errors import RunDirectoryError, RunDirectoryTaken


def made(path: Path) -> run_directory.Window:
    run = run_directory.create(path)
    run.directory.write_manifest({"schema_version": 1, "selection": parse_ranks("all")._asdict()})
    return run


@pytest.mark.parametrize(("mask", "above"), [(0, 0o775), (0o002, 0o775), (0o077, 0o700)])
def test_a_new_run_directory_is_its_owner_s_alone_and_not_everybody_s_to_rename(
    tmp_path: Path, mask: int, above: int
) -> None:
    before = os.umask(mask)
    try:
        run = made(tmp_path / "deep" / "runs" / "one")
    finally:
        os.umask(before)
    folders = (run.path, run.path.parent, run.path.parents[1])
    assert [stat.S_IMODE(each.stat().st_mode) for each in folders] == [0o700, above, above]


def test_the_name_carries_the_time_and_the_job() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert run_directory.default_path(Path("runs"), "77", now) == Path("runs/20260102T030405Z-77")


def test_a_directory_that_exists_is_not_written_into(tmp_path: Path) -> None:
    made(tmp_path / "run")
    with pytest.raises(RunDirectoryTaken, match=str(tmp_path / "run")) as error:
        run_directory.create(tmp_path / "run")
    assert "--force" in str(error.value)


def test_force_replaces_a_run_but_never_anything_else(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    (run.path / "report.html").write_text("old")
    assert not run_directory.create(tmp_path / "run", force=True).html.exists()
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    with pytest.raises(RunDirectoryTaken):
        run_directory.create(home, force=True)
    # Other tools have a run.json too.
    (home / "run.json").write_text('{"schema_version": 1}')
    with pytest.raises(RunDirectoryTaken):
        run_directory.create(home, force=True)
    assert (home / "thesis.tex").exists()


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert made(tmp_path / "run").directory.read_manifest().selection.kind == "all"


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=str(tmp_path / "file" / "run")):
        run_directory.create(tmp_path / "file" / "run")


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"schema_version": 99})])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    run = made(tmp_path / "run")
    run.directory.manifest.write_text(content)
    with pytest.raises(RunDirectoryError):
        run_directory.opened(run.path)


def test_a_manifest_knows_what_was_recorded_since(tmp_path: Path) -> None:
    run = run_directory.Window.at(tmp_path)
    written = run.directory.write_manifest({"schema_version": 1, "world_size": 4})
    assert (written.world_size, written.ended, written.attempt) == (4, None, 1)
    written.record(ended="2026-01-02T03:04:05+00:00", exit_status=3, attempt=2)
    for each in (written, run.directory.read_manifest()):
        assert (each.ended, each.exit_status) == ("2026-01-02T03:04:05+00:00", 3)
        assert each.attempt == 2


def test_a_folder_without_a_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"run\.json"):
        run_directory.opened(tmp_path)


def rank(run: run_directory.Window, number: int, state: str, report: bytes | None = None) -> None:
    states.advance(str(run.rank(number)), state, chosen=True)
    if report is not None:
        (run.rank(number) / "report.nsys-rep").write_bytes(report)


def test_a_captured_report_is_collected(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    rank(run, 2, "captured", b"report")
    (outcome,) = collect(run, [2])
    assert (outcome.rank, outcome.state) == (2, "collected")
    assert outcome.report == run.rank(2) / "report.nsys-rep"
    assert states.read(str(run.rank(2)))["state"] == "collected"


@pytest.mark.parametrize(
    ("state", "reason", "may_appear"),
    [
        ("waiting", "before the window", False),
        ("capturing", "inside the window", True),
        ("finishing", "being written", True),
        ("captured", "clusterprof collect ", True),
    ],
)
def test_a_rank_that_was_killed_is_lost_with_the_reason(
    tmp_path: Path, state: str, reason: str, may_appear: bool
) -> None:
    run = made(tmp_path / "run")
    rank(run, 0, "captured", b"report")
    rank(run, 5, state)
    outcomes = collect(run, [0, 5], patience_s=0)
    assert [each.state for each in outcomes] == [State.COLLECTED, State.LOST]
    assert reason in outcomes[1].reason
    left = states.read(str(run.rank(5)))
    assert (left["state"], left["reason"]) == ("lost", outcomes[1].reason)
    assert left["late"] is may_appear


@pytest.mark.parametrize("state", ["captured", "collected", "capturing"])
def test_who_only_merges_writes_no_states(tmp_path: Path, state: str) -> None:
    run = made(tmp_path / "run")
    rank(run, 0, state, b"report" if state == "captured" else None)
    before = (run.rank(0) / "state.json").read_bytes()
    (outcome,) = collect(run, [0], patience_s=0, write=False)
    assert outcome.state == ("collected" if state == "captured" else "lost")
    assert (run.rank(0) / "state.json").read_bytes() == before


def test_an_empty_report_is_no_report(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    rank(run, 0, "captured", b"")
    assert collect(run, [0], patience_s=0)[0].state == "lost"


@pytest.mark.parametrize(("present", "named"), [(range(4), "ranks 0–3"), ([0, 2], "ranks 0, 2")])
def test_a_rank_that_never_reported_in_is_lost_and_those_that_did_are_named(
    tmp_path: Path, present: Iterable[int], named: str
) -> None:
    run = made(tmp_path / "run")
    for number in present:
        states.advance(str(run.rank(number)), "counting", chosen=False)
    (outcome,) = collect(run, [9], patience_s=0)
    assert (outcome.rank, outcome.state) == (9, State.LOST)
    assert outcome.reason.endswith(named)


def test_a_step_log_of_a_later_attempt_is_the_one_that_counts(tmp_path: Path) -> None:
    import os

    run = made(tmp_path / "run")
    rank(run, 0, "captured", b"report")
    for name, when in (("steps.csv", 1), ("steps.2.csv", 2)):
        (run.rank(0) / name).write_text("step,begin_ns,end_ns\n")
        os.utime(run.rank(0) / name, (when, when))
    assert collect(run, [0])[0].steps == run.rank(0) / "steps.2.csv"


@pytest.mark.parametrize("state", ["capturing", "finishing", "captured"])
def test_a_report_that_appears_after_its_rank_was_given_up_is_collected_then(
    tmp_path: Path, state: str
) -> None:
    # Its node was cut off, or the file system slow.
    run = made(tmp_path / "run")
    rank(run, 0, state)
    assert [each.state for each in collect(run, [0], patience_s=0)] == ["lost"]
    (run.rank(0) / "report.nsys-rep").write_bytes(b"report")
    (outcome,) = collect(run, [0], patience_s=0)
    assert outcome.state is State.COLLECTED
    assert outcome.report == run.rank(0) / "report.nsys-rep"
    assert outcome.reason == states.read(str(run.rank(0)))["reason"] != ""
    assert states.read(str(run.rank(0)))["state"] == "collected"


def test_a_rank_has_its_time_from_when_a_stalled_file_system_responds(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "run")
    rank(run, 0, "waiting")
    stall_s = [100.0]  # more than the patience

    def stalls(path: Path) -> None:
        clock.sleep(stall_s.pop() if stall_s else 0)

    clock.plan(100.9, lambda: rank(run, 0, "captured", b"report"))
    monkeypatch.setattr(outcomes.os, "utime", stalls)
    (outcome,) = collect(run, [0], patience_s=1, clock=clock)
    assert outcome.state is State.COLLECTED


def test_a_rank_that_does_not_end_is_waited_for_as_long_as_it_may_take(
    clock: ManualClock, tmp_path: Path
) -> None:
    took_s = []
    for name in ("waiting", "finishing"):
        run, began = made(tmp_path / name), clock.now()
        rank(run, 0, name)
        (outcome,) = collect(run, [0], clock=clock)
        assert outcome.state is State.LOST
        took_s.append(clock.now() - began)
    assert took_s == pytest.approx([outcomes.PATIENCE_S, outcomes.FINISHING_S], abs=0.2)


@pytest.mark.parametrize("state", ["finishing", "captured"])
def test_a_report_that_a_shared_file_system_shows_after_its_state_is_waited_for(
    state: str, clock: ManualClock, tmp_path: Path
) -> None:
    run = made(tmp_path / "run")
    rank(run, 0, state)
    clock.plan(1.0, lambda: rank(run, 0, state, b"report"))
    (outcome,) = collect(run, [0], patience_s=2, clock=clock)
    assert outcome.state is State.COLLECTED


@pytest.mark.parametrize("stall_s", [0.0, 1.0])
def test_what_unprofiled_ranks_leave_is_waited_for_after_a_stall_and_never_else(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stall_s: float
) -> None:
    run = made(tmp_path / "run")
    states.advance(str(run.rank(0)), "counting", chosen=False)
    clock.plan(stall_s + 0.05, lambda: states.advance(str(run.rank(0)), "counted"))
    monkeypatch.setattr(outcomes.os, "utime", lambda path: clock.sleep(stall_s))
    assert collect(run, None, patience_s=1, clock=clock) == []
    assert states.read(str(run.rank(0)))["state"] == ("counted" if stall_s else "counting")


def test_a_report_that_its_rank_gave_up_is_not_collected(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    rank(run, 0, "lost", b"half of a report")
    assert [each.state for each in collect(run, [0], patience_s=0)] == ["lost"]


def test_a_rank_makes_no_run_directory_anew(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError):
        states.advance(str(run.rank(0)), "waiting")
    assert not run.path.exists()
    (outcome,) = collect(run, [0], patience_s=0)
    assert (outcome.state, outcome.report) == (State.LOST, None)
    assert DELETED in outcome.reason


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "run"),
        ({"SLURM_RESTART_COUNT": "0"}, "run"),
        ({"SLURM_RESTART_COUNT": "2"}, "run-restart2"),
        ({"SLURM_RESTART_COUNT": "nonsense"}, "run"),
    ],
)
def test_a_job_that_starts_over_leaves_its_first_run_directory_alone(
    tmp_path: Path, environ: dict[str, str], name: str
) -> None:
    first = made(tmp_path / "run").path
    again = run_directory.started_over(first, environ)
    assert again.name == name
    assert run_directory.first_start(again, environ) == (first if name != "run" else None)
    # Where nothing is in the way (a batch script that has thought of it) the name stays.
    assert run_directory.started_over(tmp_path / "other", environ) == tmp_path / "other"


@pytest.mark.parametrize("name", ["merged", "tables", "ranks/00001", "tables/00001", "attempt-2"])
def test_a_run_directory_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    run = made(tmp_path / "run")
    (tmp_path / "home").mkdir()
    (run.path / name).parent.mkdir(exist_ok=True)
    run_directory.opened(run.path)
    (run.path / name).symlink_to(tmp_path / "home")
    with pytest.raises(RunDirectoryError, match=str(run.path / name)):
        run_directory.opened(run.path)


def test_a_link_to_itself_in_a_run_directory_keeps_no_one_from_reading_it(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    for name in ("loop", "ranks/loop", "attempt-2"):
        (run.path / name).symlink_to(Path(name).name)
    assert run_directory.opened(run.path).ranks() == []


def test_a_run_directory_may_be_reached_through_a_link(tmp_path: Path) -> None:
    made(tmp_path / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    assert run_directory.opened(tmp_path / "latest").ranks() == []


def test_a_later_window_is_known_from_within_the_folder_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = tmp_path / "run" / "windows"
    (windows / "2").mkdir(parents=True)
    monkeypatch.chdir(windows)
    window = run_directory.Window.at(Path("2"))
    assert (window.number, window.directory.path) == (2, tmp_path / "run")
    assert window == run_directory.Window.at(windows / "2")
