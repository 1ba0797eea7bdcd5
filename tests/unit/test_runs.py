"""The runs in a folder: listed with what they found, and removed only where that was asked for."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path

import pytest
import report_sample

from clusterprof import run_directory
from clusterprof.agent.contracts import paths
from clusterprof.arguments import parse_ranks
from clusterprof.cli import main
from clusterprof.report import results_json


def made(parent: Path, name: str, days: float, ended: bool = True, merged: bool = True) -> Path:
    """A run that began so many days ago."""
    began = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=days)
    run = run_directory.create(parent / name)
    run.directory.write_manifest(
        {"schema_version": 1, "began": began.isoformat(), "window": [10, 15],
         "ended": began.isoformat() if ended else None, "exit_status": 0 if ended else None,
         "selection": parse_ranks("0")._asdict(),
         "again": ["clusterprof", "torchrun", "--", "train.py", "--deep"]}
    )  # fmt: skip
    if merged:
        run.merged.mkdir()
        results_json.write(run.merged / paths.RESULTS, report_sample.results())
    return run.path


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of 1, 10 and 40 days ago, one that runs, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    made(folder, "new", 1)
    made(folder, "old", 10, merged=False)
    made(folder, "oldest", 40)
    made(folder, "running", 50, ended=False)
    (folder / "mine").mkdir()
    (folder / "mine" / "notes").write_text("keep")
    return folder


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main.main(["runs", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_runs_are_listed_with_their_verdicts_the_newest_first(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows = printed(capsys, "list")
    assert head.split()[0] == "run"
    assert [row.split()[0] for row in rows] == [
        "runs/new", "runs/old", "runs/oldest", "runs/running",
    ]  # fmt: skip
    assert "Rank 2 delays" in rows[0]
    assert "not merged: train.py --deep" in rows[1]
    assert "running" in rows[3]
    listed = json.loads("\n".join(printed(capsys, "list", str(runs), "--json")))["runs"]
    assert [each["verdict"] is None for each in listed] == [False, True, False, False]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, printed(capsys, "list"))) <= columns


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--keep", "1"], {"old", "oldest"}),
        (["--older-than", "30d"], {"oldest"}),
        (["--older-than", "1w", "--keep", "2"], {"oldest"}),
        (["--keep", "0"], {"new", "old", "oldest"}),
        (["--keep", "9"], set()),
    ],
)
def test_clean_removes_what_it_lists_and_only_with_yes(
    runs: Path, capsys: pytest.CaptureFixture[str], options: list[str], gone: set[str]
) -> None:
    before = {each.name for each in runs.iterdir()}
    lines = printed(capsys, "clean", *options)
    assert {line.split()[2] for line in lines if line.startswith("would remove ")} == {
        f"runs/{name}" for name in gone
    }
    assert {each.name for each in runs.iterdir()} == before
    printed(capsys, "clean", *options, "--yes")
    assert {each.name for each in runs.iterdir()} == before - gone
    assert (runs / "mine" / "notes").read_text() == "keep"


def test_a_run_that_was_interrupted_long_ago_has_ended(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (runs / "running", runs / "running" / "run.json"):
        os.utime(each, (1, 1))
    assert "interrupted" in printed(capsys, "list")[-1]
    printed(capsys, "clean", "--older-than", "45d", "--yes")
    assert not (runs / "running").exists()


def test_another_s_run_and_what_a_link_leads_to_stay(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = made(tmp_path / "elsewhere", "far", 99)
    (runs / "link").symlink_to(elsewhere)
    if os.geteuid() == 0:
        os.chown(runs / "oldest" / "run.json", 12345, 12345)
    printed(capsys, "clean", "--keep", "0", "--yes")
    assert elsewhere.is_dir()
    assert (runs / "oldest").exists() == (os.geteuid() == 0)


@pytest.mark.parametrize(
    "words", [["clean"], ["clean", "--older-than", "soon"], ["clean", "--keep", "-1"]]
)
def test_what_clean_cannot_understand_removes_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main.main(["runs", *words, "--yes"]) == 2
    assert len(list(runs.iterdir())) == 5
    assert main.main(["runs", "list", "nowhere"]) == 5
