"""Reports of the installed nsys, read through its own export."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.command import Completed

from clusterprof.errors import ReportError
from clusterprof.ingest import gather, read_report
from clusterprof.ingest.nsys_export import export_command
from clusterprof.nsys import installed

pytestmark = pytest.mark.needs_nsys

Run = Callable[..., Completed]

PROGRAM = "import socket; a, b = socket.socketpair(); a.send(b'x'); b.recv(1); a.close()"
SECRET = "f00ba7-must-not-be-kept"
_IMPORTER = Path("/usr/lib/nsight-systems/host-linux-x64/QdstrmImporter")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`record(rank)`: a real report of a short program that was that rank of four."""
    from lab import command

    def make(rank: int) -> Path:
        folder = tmp_path_factory.mktemp(f"rank{rank}")
        report = folder / "report.nsys-rep"
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "somewhere",
            "MASTER_PORT": "29500",
            "API_TOKEN": SECRET,
        }
        nsys = ["nsys", "profile", "--trace=osrt,nvtx", "--sample=none", "--cpuctxsw=none"]
        output = f"--output={report.with_suffix('')}"
        done = command.run(
            [*nsys, output, sys.executable, "-c", PROGRAM], env=environment, timeout=120
        )
        left = report.with_suffix(".qdstrm")
        if not report.exists() and left.exists():
            # Debian's nsys does not find its own importer.
            done = command.run([_IMPORTER, "-i", left], timeout=120)
        assert report.exists(), done
        return report

    return make


@pytest.fixture(scope="module")
def report(record: Callable[[int], Path]) -> Path:
    return record(3)


def test_a_report_is_exported_and_read_without_leaving_anything(report: Path) -> None:
    before = sorted(report.parent.iterdir())
    temporary = set(Path(os.environ.get("TMPDIR", "/tmp")).glob("clusterprof-*"))
    ranks = read_report(report)
    assert ranks.info.source == report
    assert (ranks.rank, ranks.info.world_size, ranks.info.local_rank) == (3, 4, 3)
    assert ranks.info.profiler.startswith("nsys 20")
    assert {"send", "recv"} <= set(ranks.host_calls["name"].to_pylist())
    assert ranks.info.job is not None
    assert sorted(report.parent.iterdir()) == before
    assert set(Path(os.environ.get("TMPDIR", "/tmp")).glob("clusterprof-*")) == temporary


def test_the_report_s_environment_is_not_kept(report: Path) -> None:
    ranks = read_report(report)
    assert SECRET not in repr(ranks.info)
    assert SECRET not in str(ranks.host_calls.to_pydict())


def test_its_times_are_wall_clock_times(report: Path) -> None:
    written = report.stat().st_mtime_ns
    info = read_report(report).info
    assert written - 120_000_000_000 < info.begin_ns < info.end_ns < written


def test_reports_with_quotes_and_spaces_in_their_names_are_read_together(
    report: Path, record: Callable[[int], Path], tmp_path: Path
) -> None:
    shutil.copy(report, tmp_path / 'it\'s a "report" of -x.nsys-rep')
    shutil.copy(record(1), tmp_path / "-leading dash.nsys-rep")
    assert [ranks.rank for ranks in gather([tmp_path]).ranks] == [1, 3]


def test_a_truncated_report_gives_nsys_s_own_first_line(report: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.nsys-rep"
    cut.write_bytes(report.read_bytes()[:50_000])
    with pytest.raises(ReportError, match="nsys could not export") as caught:
        read_report(cut)
    assert caught.value.details[0].startswith('nsys said: "')
    assert list(tmp_path.iterdir()) == [cut]


def test_only_flags_that_this_nsys_has_are_given_to_it(run_command: Run, tmp_path: Path) -> None:
    nsys = installed()
    assert nsys is not None
    asked = run_command([nsys, "export", "--help"])
    command = export_command(str(nsys), tmp_path / "a.nsys-rep", tmp_path / "a.sqlite")
    flags = [word.partition("=")[0] for word in command[2:] if word.startswith("--")]
    assert {"--type", "--force-overwrite", "--output"} <= set(flags)
    assert all(flag in asked.stdout + asked.stderr for flag in flags)
