"""Merging a run directory: every profiled rank is accounted for, however often it is merged."""

from __future__ import annotations

import errno
import json
import lzma
import os
import shlex
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lab.command import PATIENCE_S
from seeds import content, trace

from clusterprof import masking, next_command, run_directory
from clusterprof.agent.contracts import states
from clusterprof.arguments import check_free
from clusterprof.cli import main, merge
from clusterprof.clock_probe import Measurement, is_measurement
from clusterprof.errors import UsageError
from clusterprof.results import RANKS

RECORDING = Path(__file__).parents[1] / "data" / "recordings" / "nsys-2025.3" / "ddp"


def results(run: run_directory.Window) -> Any:
    return json.loads((run.merged / "results.json").read_text())


def test_a_profiled_rank_whose_folder_is_gone_is_missing(run: run_directory.Window) -> None:
    assert merge.main("merge", [str(run.path)], None) == 0
    assert results(run)["missing"] == []
    shutil.rmtree(run.rank(2))
    assert merge.main("merge", [str(run.path)], None) == 0
    assert [each["rank"] for each in results(run)["ranks"]] == [0, 1]
    assert [each["rank"] for each in results(run)["missing"]] == [2]
    assert not (run.path / "tables" / "00002").exists(), "its tables belong to no result"


def test_what_is_wrong_with_a_rank_that_has_a_report_is_in_the_results(
    run: run_directory.Window,
) -> None:
    why = "the program ended inside the window (the program ended with status 139)"
    states.advance(str(run.rank(1)), "collected", why)
    assert merge.main("merge", [str(run.path)], None) == 0
    assert f"rank 1: {why}" in results(run)["warnings"]


def test_merges_of_one_run_at_once_do_not_disturb_each_other(
    run: run_directory.Window,
) -> None:
    problems: list[Exception] = []

    def one() -> None:
        try:
            merge.main("merge", [str(run.path)], None)
        except Exception as error:  # noqa: BLE001 - whatever it is
            problems.append(error)

    merges = [threading.Thread(target=one) for _ in range(6)]
    for each in merges:
        each.start()
    for each in merges:
        each.join()
    assert problems == []
    assert len(results(run)["ranks"]) == 3
    assert not [path for path in run.path.rglob("*") if path.suffix == ".tmp"]


def test_of_two_merges_at_once_the_second_waits_and_says_so(
    run: run_directory.Window, capfd: pytest.CaptureFixture[str]
) -> None:
    second = threading.Thread(target=merge.main, args=("merge", [str(run.path)], None))
    with run_directory.merging(run):
        second.start()
        for _ in range(10 * int(PATIENCE_S)):
            second.join(0.1)
            if "waiting" in (printed := capfd.readouterr().err):
                break
        assert "another merge writes into" in printed
        assert second.is_alive()
        assert not (run.merged / "results.json").exists()
    second.join()
    assert len(results(run)["ranks"]) == 3


def test_a_rank_that_still_captures_is_missing_and_stays_as_it_is(
    run: run_directory.Window,
) -> None:
    Path(run.rank(2), "trace.json.gz").unlink()
    Path(run.rank(2), "state.json").unlink()
    states.advance(str(run.rank(2)), "armed", chosen=True)
    assert merge.main("merge", [str(run.path)], None) == 0
    (missing,) = results(run)["missing"]
    assert missing["rank"] == 2
    assert missing["reason"].startswith("its program still runs: merge again when it has ended")
    assert states.read(str(run.rank(2)))["state"] == "armed"
    assert [each["rank"] for each in results(run)["ranks"]] == [0, 1]


def test_a_run_that_others_may_not_lock_is_merged_all_the_same(
    run: run_directory.Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "flock", none)
    assert merge.main("merge", [str(run.path)], None) == 0


# --- --force


@pytest.fixture
def reports(tmp_path: Path) -> list[str]:
    """Two reports, as words of a command line."""
    return [str(trace(tmp_path / f"rank{rank}.json", content(rank))) for rank in (0, 1)]


def test_force_replaces_a_page_of_ours_and_nothing_else(tmp_path: Path, reports: list[str]) -> None:
    page = str(tmp_path / "page.html")
    assert merge.main("merge", [*reports, "--html", page], None) == 0
    with pytest.raises(UsageError, match="--force") as caught:
        merge.main("merge", [*reports, "--html", page], None)
    assert page in str(caught.value)
    assert merge.main("merge", [*reports, "--html", page, "--force"], None) == 0
    (tmp_path / "own.html").write_text("<!DOCTYPE html><p>years of work")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    for target in (reports[0], tmp_path / "own.html", tmp_path, tmp_path / "dangling", "/dev/null"):
        before = os.lstat(target)
        with pytest.raises(UsageError) as caught:
            merge.main("merge", [*reports, "--html", str(target), "--force"], None)
        assert str(target) in str(caught.value)
        assert os.lstat(target).st_ino == before.st_ino


def test_force_writes_into_an_output_of_ours_and_leaves_no_stale_tables(
    tmp_path: Path, reports: list[str]
) -> None:
    output = tmp_path / "output"
    line = [*reports, "--output", str(output)]
    assert merge.main("merge", line, None) == 0
    (output / "tables" / "00001" / "notes").write_text("mine")
    assert merge.main("merge", [*line[1:], "--force"], None) == 0  # rank 1 alone
    assert not (output / "tables" / "00000").exists()
    assert merge.main("merge", [line[0], *line[2:], "--force"], None) == 0  # rank 0 alone
    assert [path.name for path in (output / "tables" / "00001").iterdir()] == ["notes"]
    assert len(list((output / "tables" / "00000").iterdir())) == 4
    home = tmp_path / "home"
    home.mkdir()
    (home / "report.html").write_text("mine")
    with pytest.raises(UsageError) as caught:
        merge.main("merge", [*reports, "--output", str(home), "--force"], None)
    assert str(home) in str(caught.value)
    assert os.listdir(home) == ["report.html"]


def test_force_replaces_a_measurement_of_clocks_and_nothing_else(tmp_path: Path) -> None:
    ours, other = tmp_path / "clock.json", tmp_path / "package.json"
    Measurement((), "UDP").write(ours)
    other.write_text('{"name": "x"}')
    check_free(ours, True, is_measurement)
    with pytest.raises(UsageError) as caught:
        check_free(other, True, is_measurement)
    assert str(other) in str(caught.value)


@pytest.mark.parametrize("where", ["the rank's folder", "its folder without a state", "one folder"])
def test_a_run_whose_reports_are_scrubbed_exports_is_read(
    run: run_directory.Window, where: str
) -> None:
    for rank in range(3):
        (run.rank(rank) / "trace.json.gz").unlink()
        name = run.rank(rank) / "report.sqlite.xz"
        if where == "one folder":
            name = run.path / f"rank{rank}.sqlite.xz"
        if where != "the rank's folder":
            (run.rank(rank) / "state.json").unlink()
        shutil.copy(RECORDING / f"rank{rank}.sqlite.xz", name)
    assert merge.main("merge", [str(run.path)], None) == 0
    assert [each["rank"] for each in results(run)["ranks"]] == [0, 1, 2]
    assert results(run)["missing"] == []


def test_reports_without_the_environment_are_of_the_ranks_and_the_world_of_their_run(
    run: run_directory.Window,
) -> None:
    # as nsys leaves it out with --discard-environment
    for rank in range(3):
        (run.rank(rank) / "trace.json.gz").unlink()
        export = run.rank(rank) / "report.sqlite"
        export.write_bytes(lzma.decompress((RECORDING / f"rank{rank}.sqlite.xz").read_bytes()))
        with closing(sqlite3.connect(export)) as database:
            database.execute("DELETE FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT%'")
            database.commit()
    manifest = json.loads(Path(run.path, "run.json").read_text())
    run.directory.write_manifest({**manifest, "world_size": 4})
    assert merge.main("merge", [str(run.path)], None) == 0
    found = [(each["rank"], each["world_size"]) for each in results(run)["ranks"]]
    assert found == [(0, 4), (1, 4), (2, 4)]


def test_a_recommended_command_has_its_values_for_who_launched_the_run_alone(
    run: run_directory.Window,
) -> None:
    whole = ["clusterprof", "torchrun", RANKS, "--rdzv-id", "x y", "--", "train.py", "--lr", "0.1"]
    masked = masking.again(whole, RANKS)
    run.directory.read_manifest().record(again=masked)
    run.directory.write_again(whole)
    begin = "clusterprof torchrun --ranks 3 "
    found: Any = {"findings": [{"next": begin + masking.command(masked[3:])}, {"next": ""}]}
    shown = next_command.with_values(found, run)["findings"]
    assert [each["next"] for each in shown] == [begin + shlex.join(whole[3:]), ""]
    if os.geteuid() == 0:
        os.chown(run.path / "again.json", 12345, 12345)
        assert next_command.with_values(found, run) == found


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "most"), [(0, 0o755), (0o002, 0o775), (0o077, 0o700)])
def test_what_is_written_outside_of_a_run_is_not_every_user_s_to_write(
    tmp_path: Path, reports: list[str], umask: Callable[[int], int], mask: int, most: int
) -> None:
    umask(mask)
    out, page = tmp_path / "out", tmp_path / "page.html"
    line = ["merge", *reports, "--html", str(page), "--output", str(out)]
    assert main.main(line) == 0
    made = [page, out, *out.rglob("*")]
    assert len(made) > 5
    assert [each for each in made if stat.S_IMODE(each.stat().st_mode) & ~most] == []


def test_a_job_inherits_the_umask_that_there_is(umask: Callable[[int], int]) -> None:
    umask(0)
    main.main(["run", "--dry-run", "--profiler=torch", "--", "true"])
    assert umask(0) == 0
