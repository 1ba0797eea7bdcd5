"""Reports of the installed nsys, read through its own export."""

from __future__ import annotations

import csv
import lzma
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.parts import LAB
from lab.tiers import few

from clusterprof.agent.nsys import VARIABLE, Nsys
from clusterprof.errors import ReportError
from clusterprof.ingest import gather, read_report
from clusterprof.ingest.nsys import exported as nsys_export
from clusterprof.installed_nsys import installed
from clusterprof.tables import RankTables

Run = Callable[..., Completed]

PROGRAM = "import socket; a, b = socket.socketpair(); a.send(b'x'); b.recv(1); a.close()"
SECRET = "f00ba7-must-not-be-kept"
NCCL_RANGES = Path(__file__).parents[1] / "data" / "nccl_ranges.py"
_IMPORTER = Path("/usr/lib/nsight-systems/host-linux-x64/QdstrmImporter")


Record = Callable[..., Path]


def environment(rank: int) -> dict[str, str | None]:
    """That of a rank of four."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "MASTER_ADDR": "somewhere",
        "MASTER_PORT": "29500", "API_TOKEN": SECRET,
    }  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """`record(rank, *program)`: a real report of a short program that was that rank of four."""
    return lambda rank, *program: recorded(
        "nsys", tmp_path_factory.mktemp(f"rank{rank}"), rank, _IMPORTER, *program
    )


def recorded(
    nsys: str | Path, folder: Path, rank: int, importer: Path, *program: str | Path
) -> Path:
    """The report of this nsys of a program that was this rank."""
    report = folder / "report.nsys-rep"
    line = [nsys, "profile", "--trace=osrt,nvtx", "--sample=none", "--cpuctxsw=none",
            f"--output={report.with_suffix('')}", sys.executable]  # fmt: skip
    left = report.with_suffix(".qdstrm")
    for _ in range(3):  # beside another that starts, a real one fails now and then
        done = command.run([*line, *(program or ("-c", PROGRAM))], env=environment(rank))
        if report.exists() or left.exists():
            break
    if not report.exists() and left.exists():
        # Debian's nsys does not find its own importer, nor does the script.
        done = command.run([importer, "-i", left, "-o", report])
    assert report.exists(), done
    return report


def recorded_by_script(nsys: Path, folder: Path, rank: int) -> Path:
    """A report by the script in nsys' place."""
    return recorded(nsys, folder, rank, nsys.parents[1] / "host-linux-x64" / "QdstrmImporter")


@pytest.fixture(scope="module")
def script_report(nsys_script: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of rank 3."""
    return recorded_by_script(nsys_script, tmp_path_factory.mktemp("script"), 3)


@pytest.mark.needs_nsys
def test_a_report_is_exported_and_read_in_wall_clock_time_and_nothing_else_is_left_or_kept(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = record(3)
    written = report.stat().st_mtime_ns
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(report.parent.iterdir())
    ranks = read_report(report)
    assert ranks.info.source == report
    assert (ranks.rank, ranks.info.world_size, ranks.info.local_rank) == (3, 4, 3)
    assert ranks.info.profiler.startswith("nsys 20")
    assert {"send", "recv"} <= set(ranks.host_calls["name"].to_pylist())
    assert ranks.info.job is not None
    assert written - 120_000_000_000 < ranks.info.begin_ns < ranks.info.end_ns < written
    assert sorted(report.parent.iterdir()) == before
    assert list(tmp_path.glob("clusterprof-*")) == []
    assert SECRET not in repr(ranks.info)
    assert SECRET not in str(ranks.host_calls.to_pydict())

    cut = tmp_path / "cut.nsys-rep"
    cut.write_bytes(report.read_bytes()[:50_000])
    with pytest.raises(ReportError, match="exit status") as caught:
        read_report(cut)
    assert caught.value.details[0].startswith('nsys printed: "')
    assert list(tmp_path.iterdir()) == [cut]


def test_reports_with_quotes_and_spaces_in_their_names_are_read_together_and_older_ones_too(
    scripted: None, nsys_script: Path, script_report: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = recorded_by_script(nsys_script, tmp_path / "other", 1)
    shutil.copy(script_report, tmp_path / 'it\'s a "report" of -x.nsys-rep')
    other.rename(tmp_path / "-leading dash.nsys-rep")
    assert [ranks.rank for ranks in gather([tmp_path]).ranks] == [1, 3]
    (tmp_path / "old").mkdir()
    shutil.copy(script_report, tmp_path / "old" / "old.qdrep")
    assert [ranks.rank for ranks in gather([tmp_path / "old"]).ranks] == [3]


@pytest.mark.needs_nsys
def test_only_flags_that_this_nsys_has_are_given_to_it(run_command: Run, tmp_path: Path) -> None:
    nsys = installed()[0]
    asked = run_command([nsys.path, "export", "--help"])
    command = nsys_export.export_command(nsys, tmp_path / "a.nsys-rep", tmp_path / "a.sqlite")
    flags = [word.partition("=")[0] for word in command[2:] if word.startswith("--")]
    assert {"--type", "--force-overwrite", "--output"} <= set(flags)
    assert all(flag in asked.stdout + asked.stderr for flag in flags)


@pytest.fixture(scope="module")
def nccl_report(record: Record) -> Path:
    return record(2, NCCL_RANGES)


def called(ranks: RankTables) -> list[tuple[object, ...]]:
    columns = ("operation", "communicator", "message_bytes", "root", "peer", "source")
    rows = ranks.collective_calls.select(columns).to_pylist()
    return [tuple(row[name] for name in columns) for row in rows]


def calls_of_a_step(step: int) -> list[tuple[object, ...]]:
    data, pipeline = "0xa1b2c3d4e5f60718", "0x2be99ac413cc7b82"
    return [
        ("AllReduce", data, 5 << 30, None, None, "nvtx_payload"),
        ("AllGather", data, 1000 + step, None, None, "nvtx_payload"),
        ("Broadcast", data, 8, 3, None, "nvtx_payload"),
        ("Send", pipeline, 4096, None, 1, "nvtx_payload"),
        ("Recv", pipeline, 2048, None, 0, "nvtx_payload"),
    ]


CALLS = [call for step in range(3) for call in calls_of_a_step(step)]


FULL = "No space left on device"


@pytest.mark.needs_nsys
def test_nccl_s_payloads_are_read_whatever_the_installed_nsys_puts_them_into(
    nccl_report: Path, run_command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(nccl_report.parent.iterdir())
    ranks = read_report(nccl_report)
    assert called(ranks) == CALLS
    assert ranks.warnings == ()
    assert sorted(nccl_report.parent.iterdir()) == before

    # An export without payloads beside it, as `nsys stats` leaves it, is not all that is read.
    report = Path(shutil.copy(nccl_report, tmp_path / "rank2.nsys-rep"))
    export = tmp_path / "rank2.sqlite"
    run_command(["nsys", "export", "--type=sqlite", f"--output={export}", report])
    assert called(read_report(export)) == CALLS
    (ranks,) = gather([tmp_path]).ranks
    assert called(ranks) == CALLS
    report.unlink()
    alone = called(read_report(export))
    assert [call[0] for call in alone] == [call[0] for call in CALLS]
    assert {call[-1] for call in alone} == {"nvtx_name"}

    # Payloads that cannot be had are a warning and no lost rank.
    full = f'case "$*" in *--type=json*) echo "{FULL}" >&2; exit 1 ;; esac'
    nsys = program(tmp_path, full)
    monkeypatch.setenv(VARIABLE, str(nsys))
    ranks = read_report(nccl_report)
    assert [call[0] for call in called(ranks)] == [call[0] for call in CALLS]
    command = nsys_export.export_command(Nsys(str(nsys)), nccl_report, export)
    if not any(word.startswith("--include-") for word in command):
        (warning,) = ranks.warnings
        assert str(nccl_report) in warning
        assert FULL in warning


def program(folder: Path, *lines: str) -> Path:
    """The first nsys that is found as a program of its own, with these lines of a shell before."""
    path = folder / "nsys"
    path.write_text("\n".join(("#!/bin/sh", *lines, f'exec "{installed()[0].path}" "$@"', "")))
    path.chmod(0o755)
    return path


#: what an nsys of 2025 says and does beside this one, with an export of nsys 2025.3 that was kept
ARROW = Path(__file__).parents[1] / "data" / "nsys-arrow" / "rank1.arrow.tar.xz"
OFFERS_ARROW = f'[ "$*" != "export --help" ] || echo " {nsys_export.ARROW}"'
EXPORTS_ARROW = """
case "$*" in *--type=arrowdir*)
  for word; do case "$word" in --output=*) mkdir "${word#*=}"; cd "${word#*=}" ;; esac; done
  %s; exit ;;
esac"""


@pytest.mark.parametrize(
    ("does", "rank"),
    [(f"tar -xJf {ARROW}", 1), ("echo x > StringIds.arrow", 3), ("false", 3)],
    ids=["arrow", "damaged", "fails"],
)
def test_arrow_is_read_where_nsys_writes_it_and_sqlite_where_that_fails(
    does: str,
    rank: int,
    scripted: None,
    script_report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = program(tmp_path, OFFERS_ARROW, EXPORTS_ARROW % does)
    monkeypatch.setattr(nsys_export, "installed", lambda: [Nsys(str(newer))])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert read_report(script_report).rank == rank
    assert list(tmp_path.iterdir()) == [newer]


REFUSES = 'case "$*" in *--output=*) echo "{}" >&2; exit 1 ;; esac'
NEWER = (
    "Exportation error: Version number is invalid: 2024@2@3@38-242334140272v0",
    "Report was created in Nsight Systems version (2024.2.3.38-2423341402v0), newer than yours",
)


@pytest.mark.parametrize("words", NEWER)
def test_a_report_of_a_newer_nsys_says_of_which(
    words: str,
    scripted: None,
    script_report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nsys = program(tmp_path, REFUSES.format(words))
    monkeypatch.setattr(nsys_export, "installed", lambda: [Nsys(str(nsys))])
    with pytest.raises(ReportError, match=r"2024\.2\.3\.38") as caught:
        read_report(script_report)
    assert "CLUSTERPROF_NSYS=PATH" in caught.value.details[0]


def test_where_one_nsys_cannot_read_a_report_another_that_is_installed_does(
    nsys_script: Path, script_report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "nsys"
    old.write_text(f'#!/bin/sh\n{REFUSES.format(NEWER[0])}\nexec {nsys_script} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(nsys_script.parent), prepend=":")
    others = [each.path for each in installed()]
    assert str(nsys_script) in others
    monkeypatch.setenv(VARIABLE, str(old))
    assert [each.path for each in installed()] == [str(old), *others]
    assert read_report(script_report).rank == 3


def test_a_full_temporary_folder_is_what_is_said_to_be_wrong(
    scripted: None, script_report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nsys 2022.4 ends with 0 and leaves an empty file.
    empty = 'for word; do case "$word" in --output=*) : >"${word#*=}"; exit 0 ;; esac; done'
    full = program(tmp_path, empty)
    monkeypatch.setattr(nsys_export, "installed", lambda: [Nsys(str(full))])
    monkeypatch.setattr(nsys_export, "_LEAST_FREE", 1 << 60)
    with pytest.raises(ReportError, match=str(script_report)) as caught:
        read_report(script_report)
    assert "point TMPDIR to" in caught.value.details[0]


def test_an_export_that_was_cut_short_does_not_stand_in_the_way_of_its_report(
    scripted: None, nsys_script: Path, script_report: Path, run_command: Run, tmp_path: Path
) -> None:
    shutil.copy(script_report, tmp_path / "rank3.nsys-rep")
    export = tmp_path / "rank3.sqlite"
    run_command([nsys_script, "export", "--type=sqlite", f"--output={export}", script_report])
    export.write_bytes(export.read_bytes()[: export.stat().st_size // 2])
    (ranks,) = gather([tmp_path]).ranks
    assert ranks.rank == 3
    assert f"{export} is truncated" in ranks.warnings[0]
    assert ranks.info.source == tmp_path / "rank3.nsys-rep"


@pytest.mark.needs_nsys
def test_what_nsys_left_without_making_the_report_is_imported(
    record: Record, tmp_path: Path, run_clusterprof: Run
) -> None:
    report = record(3)
    left = report.with_suffix(".qdstrm")
    if left.exists():  # Debian's nsys leaves it
        shutil.copy(left, tmp_path / "rank3.qdstrm")
        assert read_report(tmp_path / "rank3.qdstrm").host_calls.equals(
            read_report(report).host_calls
        )
    (tmp_path / "rank4.qdstrm").write_bytes(b"garbage")
    shutil.copy(report, tmp_path / "rank5.nsys-rep")
    done = run_clusterprof(["merge", tmp_path / "rank4.qdstrm", tmp_path / "rank5.nsys-rep"])
    assert done.returncode == 0, done
    assert f"{tmp_path}/rank4.qdstrm" in "".join(done.stdout.split("\n")).replace("       ", "")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".qdstrm") == [
        "rank5.nsys-rep"
    ]


def test_without_its_importer_what_nsys_left_is_said_to_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "rank0.qdstrm"
    left.write_bytes(b"content")
    monkeypatch.setattr(Nsys, "importer", None)
    with pytest.raises(ReportError, match="has no importer") as caught:
        read_report(left)
    assert caught.value.details[1] == f"QdstrmImporter -i {left}"


#: the script, and the one that loads torch
TORCHRUN = {"script": ([LAB / "torchrun_script.py"],), "torch": (["-m", "torch.distributed.run"],)}


@pytest.mark.needs_nsys
@pytest.mark.parametrize("torchrun", few(TORCHRUN, "script"))
def test_nsys_around_torchrun_is_read_as_all_its_ranks(
    record: Record, torchrun: list[str | Path]
) -> None:
    report = record(0, *torchrun, "--nproc-per-node", "2", NCCL_RANGES)
    gathered = gather([report])
    assert [ranks.rank for ranks in gathered.ranks] == [0, 1]
    for ranks in gathered.ranks:
        assert called(ranks) == [call for step in range(3) for call in calls_of_a_step(step)]
    assert any("--rank FILE=FIRST" in each for each in gathered.warnings)
    later = gather([report], ranks={report: 4})
    assert [ranks.rank for ranks in later.ranks] == [4, 5]


@pytest.mark.needs_nsys
def test_summaries_are_those_of_nsys_stats(
    run_clusterprof: Run, run_command: Run, workdir: Path, recordings: Path
) -> None:
    """On an H200's report, in nsys' order: of the phases data, backward, forward, optimizer."""
    report = recordings / "nsys-2025.3/ddp-host-straggler/rank0.sqlite.xz"
    Path("rank0.sqlite").write_bytes(lzma.decompress(report.read_bytes()))
    for words in ("merge rank0.sqlite -o run", "export run --format csv -o tables"):
        done = run_clusterprof(words.split())
        assert done.returncode == 0, done

    def of_nsys(*names: str) -> list[dict[str, str]]:
        """A summary, which later versions call by another name."""
        for name in names:
            done = run_command(
                ["nsys", "stats", "--format=csv", f"--report={name}", "rank0.sqlite"]
            )
            _, found, lines = done.stdout.partition("Time (%)")
            if found:
                return list(csv.DictReader(f"{found}{lines.strip()}".splitlines()))
        raise AssertionError(done)

    def ours(table: str) -> list[dict[str, str]]:
        with Path("tables", f"{table}.csv").open(newline="") as file:
            return [row for row in csv.DictReader(file) if row["rank"] == "0"]

    def figures(row: dict[str, str], name: str, calls: str, *times: str) -> tuple[str, ...]:
        # cudaEventRecordWithFlags_v11010: the version is nsys' own addition
        plain = re.sub(r"_v\d+$", "", row[name])
        return plain, row[calls], *(row[time].partition(".")[0] for time in times)

    mine = ("total_ns", "mean_ns", "median_ns", "min_ns", "max_ns")
    theirs = ("Total Time (ns)", "Avg (ns)", "Med (ns)", "Min (ns)", "Max (ns)")
    ranges = [
        figures(row, "Range", "Instances", *theirs)
        for row in of_nsys("nvtx_sum", "nvtxsum")
        if row["Range"] in ("data", "forward", "backward", "optimizer")
    ]
    assert [name for name, *_ in ranges] == ["data", "backward", "forward", "optimizer"]
    phases = [figures(row, "name", "calls", *mine) for row in ours("ranges")]
    assert [row for row in phases if row[0] in dict.fromkeys(r[0] for r in ranges)] == ranges
    calls = [
        figures(row, "Name", "Num Calls", *theirs) for row in of_nsys("cuda_api_sum", "cudaapisum")
    ]
    found = [each for each in ours("host_calls") if each["kind"] == "cuda"]
    assert [figures(row, "name", "calls", *mine) for row in found] == calls
