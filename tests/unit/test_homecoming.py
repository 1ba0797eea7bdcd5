"""A report on its way home: whole, or what it was being made of."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from clusterprof.agent.contracts import states
from clusterprof.agent.guard.report_transfer import ReportTransfer

WHOLE = b"NVIDIA Tegra Profiler Report" + bytes(100) + b"U3w[END]"


@pytest.fixture
def home(tmp_path: Path) -> ReportTransfer:
    folder = tmp_path / "ranks" / "00000"
    folder.mkdir(parents=True)
    private = tmp_path / "private"
    (private / "nsys" / "nvidia").mkdir(parents=True)
    made = ReportTransfer(str(private), str(folder))
    states.advance(str(folder), "finishing")
    return made


def state(home: ReportTransfer) -> dict[str, str]:
    found: dict[str, str] = json.loads(Path(home.folder, "state.json").read_text())
    return found


def test_a_report_that_nsys_was_ended_over_goes_back_to_what_it_was_made_of(
    home: ReportTransfer,
) -> None:
    Path(home.report + ".nsys-rep").write_bytes(WHOLE[:60])
    Path(home.private, "nsys", "nsys-report-087b.qdstrm").write_bytes(b"raw")
    home.torn = True
    home.settle(0, 1.0, opened=True)
    assert not Path(home.folder, "report.nsys-rep").exists()
    assert Path(home.folder, "report.qdstrm").read_bytes() == b"raw"
    assert state(home)["state"] == "lost"
    assert all(fact in state(home)["reason"] for fact in ("report.qdstrm", "clusterprof collect"))


@pytest.mark.parametrize(
    ("content", "torn"), [(WHOLE, True), (WHOLE, False), (b"of another version", False)]
)
def test_a_whole_report_is_transferred(home: ReportTransfer, content: bytes, torn: bool) -> None:
    Path(home.report + ".nsys-rep").write_bytes(content)
    home.torn = torn
    home.settle(0, 1.0, opened=True, troubles=["nsys is another one here"])
    assert Path(home.folder, "report.nsys-rep").read_bytes() == content
    assert state(home)["state"] == "captured"


@pytest.mark.parametrize(
    ("known", "stated"), [(None, r".*\b139\b.*"), ("killed inside", "killed inside")]
)
def test_a_program_that_a_signal_ends_while_its_window_is_closed_is_said_to(
    home: ReportTransfer, known: str | None, stated: str
) -> None:
    if known:
        states.advance(home.folder, "finishing", known)
    Path(home.report + ".nsys-rep").write_bytes(WHOLE)
    home.settle(139, 1.0, opened=True)
    assert state(home)["state"] == "captured"
    assert re.fullmatch(stated, state(home)["reason"])


def test_why_a_window_was_cut_stays_beside_what_then_went_wrong(home: ReportTransfer) -> None:
    # A signal to the whole group ends the program and races with its `nsys stop`.
    states.advance(home.folder, "finishing", "cut")
    Path(home.report + ".nsys-rep").write_bytes(WHOLE)
    home.settle(1, 1.0, opened=True, troubles=["nsys stop ended with status 1"])
    assert state(home)["reason"] == "cut; nsys stop ended with status 1"


def test_a_program_that_ends_after_its_window_ends_as_it_ends(home: ReportTransfer) -> None:
    states.advance(home.folder, "finishing", closed=True)
    Path(home.report + ".nsys-rep").write_bytes(WHOLE)
    home.settle(139, 1.0, opened=True)
    assert "reason" not in state(home)


def test_the_report_of_a_run_directory_that_was_deleted_is_deleted_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # It holds the environment of the program, and no one would know of it.
    (tmp_path / "run" / "ranks" / "00007").mkdir(parents=True)
    (tmp_path / "private").mkdir()
    home = ReportTransfer(str(tmp_path / "private"), str(tmp_path / "run/ranks/00007"))
    Path(home.report + ".nsys-rep").write_bytes(WHOLE)
    shutil.rmtree(tmp_path / "run")
    home.settle(0, 1.0, opened=True)
    assert os.listdir(tmp_path) == []
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("clusterprof: rank 7: ")
    assert "deleted" in printed


def test_a_report_that_stays_on_its_node_is_said_where_no_state_can_say_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The file system of the run directory is gone: it may come back.
    (tmp_path / "private").mkdir()
    home = ReportTransfer(str(tmp_path / "private"), str(tmp_path / "gone/run/ranks/00007"))
    Path(home.report + ".nsys-rep").write_bytes(WHOLE)
    home.settle(0, 1.0, opened=True)
    assert Path(home.report + ".nsys-rep").read_bytes() == WHOLE
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert {os.uname().nodename, f"{home.report}.nsys-rep"} <= set(printed.split())


def test_a_report_that_is_collected_as_soon_as_it_is_there_stays_collected(
    home: ReportTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The job was given up, the report comes home after all, and somebody collects it at once.
    states.advance(home.folder, "lost", "cut off", late=True)
    Path(home.report + ".nsys-rep").write_bytes(WHOLE)
    bring = home.bring

    def collected(beside: bool = False) -> str | None:
        problem = bring(beside)
        states.advance(home.folder, "collected", "late")
        return problem

    monkeypatch.setattr(home, "bring", collected)
    home.settle(0, 1.0, opened=True)
    assert (state(home)["state"], state(home)["program_status"]) == ("collected", 0)
