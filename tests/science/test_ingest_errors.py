"""Bad reports: each gives one `ReportError` that says what, where and what next."""

from __future__ import annotations

import gzip
import lzma
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from clusterprof.cli import merge
from clusterprof.errors import ReportError, UsageError
from clusterprof.ingest import find_sources, gather, read_report
from clusterprof.ingest.assembler import RankUnknown
from clusterprof.ingest.nsys import exported as nsys_export
from clusterprof.ingest.sources import SUFFIXES


def packed(recordings: Path) -> bytes:
    return (recordings / "nsys-2025.3" / "ddp" / "rank0.sqlite.xz").read_bytes()


def whole(recordings: Path) -> bytes:
    return lzma.decompress(packed(recordings))


def trace(recordings: Path) -> bytes:
    return (recordings / "kineto" / "gloo" / "rank0.json.gz").read_bytes()


def damaged(recordings: Path) -> bytes:
    content = bytearray(whole(recordings))
    content[4096 : len(content) - 4096] = b"\xff" * (len(content) - 8192)
    return bytes(content)


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
        database.commit()


def no_events(path: Path, recordings: Path) -> None:
    path.write_bytes(whole(recordings))
    with closing(sqlite3.connect(path)) as database:
        tables = database.execute(
            "SELECT name FROM sqlite_master WHERE name LIKE 'CUPTI%' OR name LIKE 'NVTX%'"
            " OR name LIKE 'OSRT%' AND name NOT LIKE '%CALLCHAINS%'"
        ).fetchall()
        for (name,) in tables:
            if not name.startswith("sqlite_"):
                database.execute(f'DROP TABLE "{name}"')
        database.commit()


BAD: dict[str, tuple[str, Callable[[Path, Path], object], str]] = {
    "empty database": ("r.sqlite", lambda p, r: p.write_bytes(b""), "is empty"),
    "truncated database": (
        "r.sqlite",
        lambda p, r: p.write_bytes(whole(r)[:100_000]),
        "truncated: 100000 of",
    ),
    "cut inside the header": (
        "r.sqlite",
        lambda p, r: p.write_bytes(whole(r)[:60]),
        "is truncated",
    ),
    "damaged database": ("r.sqlite", lambda p, r: p.write_bytes(damaged(r)), "damaged"),
    "text as database": (
        "r.sqlite",
        lambda p, r: p.write_bytes(b"hello\n" * 999),
        "is not an SQLite database",
    ),
    "another database": ("r.sqlite", lambda p, r: other_database(p), "not an nsys export"),
    "no events": ("r.sqlite", no_events, "holds no events"),
    "empty xz": ("r.sqlite.xz", lambda p, r: p.write_bytes(b""), "is empty"),
    "truncated xz": (
        "r.sqlite.xz",
        lambda p, r: p.write_bytes(packed(r)[:50_000]),
        "is not a whole xz file",
    ),
    "garbage xz": (
        "r.sqlite.xz",
        lambda p, r: p.write_bytes(b"\x00garbage" * 99),
        "is not a whole xz file",
    ),
    "text in xz": (
        "r.sqlite.xz",
        lambda p, r: p.write_bytes(lzma.compress(b"hello" * 99)),
        "is not an SQLite database",
    ),
    "empty trace": ("r.json", lambda p, r: p.write_bytes(b""), "is empty"),
    "empty packed trace": ("r.json.gz", lambda p, r: p.write_bytes(b""), "is empty"),
    "truncated gzip": (
        "r.json.gz",
        lambda p, r: p.write_bytes(trace(r)[:9_000]),
        "not a whole gz file",
    ),
    "garbage gzip": ("r.json.gz", lambda p, r: p.write_bytes(b"garbage"), "not a whole gz file"),
    "damaged gzip": (
        "r.json.gz",
        lambda p, r: p.write_bytes(trace(r)[:9_000] + b"\x00" * 900 + trace(r)[9_900:]),
        "not a whole gz file",
    ),
    "truncated JSON": (
        "r.json",
        lambda p, r: p.write_bytes(gzip.decompress(trace(r))[:200_000]),
        "not whole JSON",
    ),
    "JSON of something else": (
        "r.json",
        lambda p, r: p.write_bytes(b'{"schema_version": 1, "ranks": []}'),
        "not a Kineto trace",
    ),
    "a JSON list": ("r.json", lambda p, r: p.write_bytes(b"[1, 2]"), "not a Kineto trace"),
    "events that are no objects": (
        "r.json",
        lambda p, r: p.write_bytes(b'{"traceEvents": [1, 2]}'),
        "not a Kineto trace",
    ),
    "a trace without events": (
        "r.json",
        lambda p, r: p.write_bytes(b'{"traceEvents": []}'),
        "holds no events",
    ),
    "nsys's own JSON": (
        "r.json",
        lambda p, r: p.write_bytes(b'{"data":["a"]}\n{"Type":75,"NvtxEvent":{"Type":75}}\n'),
        "is nsys's JSON export",
    ),
    "a time that is none": (
        "r.json",
        lambda p, r: p.write_bytes(
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e30, "tid": 1}]}'
        ),
        "more than a century",
    ),
    "a length that is none": (
        "r.json",
        lambda p, r: p.write_bytes(
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "k", "ts": 1, "dur": -1e99,'
            b' "tid": 1}]}'
        ),
        "more than a century",
    ),
    "an unknown format": ("r.txt", lambda p, r: p.write_bytes(b"x"), "is no report"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_report_is_one_clear_error(name: str, tmp_path: Path, recordings: Path) -> None:
    file, write, expected = BAD[name]
    path = tmp_path / file
    write(path, recordings)
    with pytest.raises(ReportError, match=expected) as caught:
        read_report(path)
    assert str(path) in caught.value.what
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [*SUFFIXES, ""])
def test_a_path_that_does_not_exist_is_said_to(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ReportError, match="does not exist"):
        read_report(tmp_path / f"rank0{suffix}")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_report_that_may_not_be_read_is_said_to(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"rank0{suffix}"
    path.write_bytes(b"content")
    # Root reads everything, so the refusal is made where the file is opened.
    refuse_opening(path, monkeypatch)
    with pytest.raises(ReportError, match="permission denied"):
        read_report(path)


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".txt"])
def test_a_pipe_is_said_to_be_one_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rank0{suffix}"
    os.mkfifo(path)
    with pytest.raises(ReportError, match="no regular file"):
        read_report(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_in_the_way_of_one_rank_s_report_is_a_missing_report_beside_the_others(
    tmp_path: Path, suffix: str, recordings: Path
) -> None:
    shutil.copy(recordings / "nsys-2025.3" / "ddp" / "rank0.sqlite.xz", tmp_path)
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"gone{suffix}").symlink_to("nowhere")
    (tmp_path / f"loop{suffix}").symlink_to(f"loop{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    found = gather([tmp_path])
    assert [tables.rank for tables in found.ranks] == [0]
    assert sorted(Path(lost["source"]).name for lost in found.missing) == [
        f"gone{suffix}", f"loop{suffix}", f"pipe{suffix}",
    ]  # fmt: skip
    assert all(lost["source"] in lost["reason"] for lost in found.missing)


def test_a_folder_below_that_may_not_be_listed_is_a_missing_report_beside_the_others(
    tmp_path: Path, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        shutil.copy(recordings / f"nsys-2025.3/ddp/rank{rank}.sqlite.xz", tmp_path / f"node{rank}")
    real = Path.iterdir

    def refuse(folder: Path) -> Iterator[Path]:
        if folder.name == "node1":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    found = gather([tmp_path])
    assert [tables.rank for tables in found.ranks] == [0]
    (lost,) = found.missing
    assert lost["source"] == str(tmp_path / "node1")
    assert lost["source"] in lost["reason"]
    assert "permission denied" in lost["reason"]


def refuse_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins
    import io

    real = io.open

    def refuse(file: object, *args: object, **kwargs: object) -> object:
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(file, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    # Python 3.10's Path.open keeps io.open of its own.
    monkeypatch.setattr(Path, "open", refuse)


def test_a_folder_without_reports_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "run.json").write_text('{"schema_version": 1}')
    with pytest.raises(ReportError, match="holds no reports"):
        find_sources([tmp_path])


def test_a_report_that_does_not_say_its_rank_asks_for_it(tmp_path: Path, recordings: Path) -> None:
    path = tmp_path / "rank3.sqlite"
    path.write_bytes(whole(recordings))
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM META_DATA_CAPTURE")
        database.commit()
    with pytest.raises(RankUnknown) as caught:
        read_report(path)
    # The number in the name is no answer: names are given by people and by position.
    assert f"--rank {path}=N" in caught.value.details[-1]
    assert read_report(path, rank=3).rank == 3


def test_a_rank_that_is_told_otherwise_is_taken_with_a_warning(recordings: Path) -> None:
    path = recordings / "nsys-2025.3" / "ddp" / "rank1.sqlite.xz"
    tables = read_report(path, rank=3)
    assert tables.rank == 3
    assert "rank 1 " in tables.warnings[-1]


def test_a_rank_that_the_job_does_not_have_is_said_to_be_none(recordings: Path) -> None:
    path = recordings / "nsys-2025.3" / "ddp" / "rank1.sqlite.xz"
    assert any("ranks 0 to 3" in warning for warning in read_report(path, rank=4).warnings)


@pytest.mark.parametrize("rank", ["-1", "²", "99999999999999999999", "", "x", " "])
def test_a_rank_that_is_no_number_of_a_rank_is_a_mistake_of_the_command_line(
    rank: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="FILE=N"):
        merge.main("merge", [str(tmp_path), "--rank", f"a.sqlite={rank}"], None)


def test_an_unset_variable_is_not_the_current_folder() -> None:
    with pytest.raises(UsageError, match="PATH"):
        merge.main("merge", [""], None)


def test_a_user_that_there_is_not_is_a_file_that_there_is_not() -> None:
    with pytest.raises(ReportError, match="does not exist") as caught:
        merge.main("merge", ["~no-such-user/a.sqlite"], None)
    assert caught.value.what.startswith("~no-such-user/a.sqlite ")


def test_without_nsys_the_error_has_the_command_for_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "rank0.nsys-rep"
    report.write_bytes(b"NVIDIA Tegra Profiler Report")
    monkeypatch.setattr(nsys_export, "installed", list)
    with pytest.raises(ReportError, match="without nsys") as caught:
        read_report(report)
    export = 'nsys export -t sqlite --include-blobs=true "$f"'
    assert caught.value.details[-1] == f"for f in {tmp_path}/*.nsys-rep; do {export}; done"
    assert "without a GPU: NVIDIA's package nsight-systems-cli" in caught.value.details[0]


def test_without_nsys_the_command_for_another_host_is_for_all_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [tmp_path / "a run" / "ranks" / f"{rank:05}" / "profile.nsys-rep" for rank in (0, 1)]
    for report in reports:
        report.parent.mkdir(parents=True)
        report.write_bytes(b"NVIDIA Tegra Profiler Report")
    monkeypatch.setattr(nsys_export, "installed", list)
    with pytest.raises(ReportError, match="none of the 2 reports") as caught:
        merge.main("merge", list(map(str, reports)), None)
    export = 'nsys export -t sqlite --include-blobs=true "$f"'
    folders = f"'{tmp_path}/a run/ranks/'*/*.nsys-rep"
    assert caught.value.details[-1] == f"for f in {folders}; do {export}; done"
    assert "without a GPU" in caught.value.details[-3]


def test_an_empty_nsys_report_is_said_to_be(tmp_path: Path) -> None:
    report = tmp_path / "rank0.nsys-rep"
    report.write_bytes(b"")
    with pytest.raises(ReportError, match="is empty"):
        read_report(report)


def test_a_newer_export_beside_the_report_is_read_instead(tmp_path: Path, recordings: Path) -> None:
    report = tmp_path / "rank0.nsys-rep"
    report.write_bytes(b"not readable without nsys")
    export = tmp_path / "rank0.sqlite"
    export.write_bytes(whole(recordings))
    os.utime(report, (1, 1))
    assert read_report(report).rank == 0


def test_no_space_to_unpack_names_the_way_out(
    recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    path = recordings / "nsys-2025.3" / "ddp" / "rank0.sqlite.xz"
    with pytest.raises(ReportError, match="cannot be unpacked") as caught:
        read_report(path)
    assert "TMPDIR" in caught.value.details[-1]


def test_one_report_that_is_bad_is_an_error_and_not_an_empty_merge(tmp_path: Path) -> None:
    path = tmp_path / "rank0.sqlite"
    path.write_bytes(b"")
    with pytest.raises(ReportError, match="is empty") as alone:
        gather([path])
    (tmp_path / "rank1.sqlite").write_bytes(b"")
    with pytest.raises(ReportError, match="2 reports") as caught:
        gather([tmp_path])
    *files, advice = caught.value.details
    assert files[0] == alone.value.what
    assert str(tmp_path / "rank1.sqlite") in files[1]
    assert advice == alone.value.details[-1]
