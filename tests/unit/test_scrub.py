"""A scrubbed export holds what a merge needs, and nothing of the process or its machine besides."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.ingest.nsys.scrubbing import is_ours, scrub

TID, OTHER = (77 << 24) | 1, (99 << 24) | 1

#: what nothing of may be left, wherever in the file
PRIVATE = (
    "argsecret", "envsecret", "alonesecret", "printedsecret", "textsecret", "threadsecret",
    "rangesecret", "mallorys-editor", "mallorys-thread", "/home/alice",
)  # fmt: skip


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export with every place in it where something private has been found."""
    path = tmp_path / "full.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            f"""
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            INSERT INTO StringIds VALUES
                (1, 'poll'), (2, 'void ns::kernel<int>::operator=(float)'), (3, 'step=7'),
                (4, 'SINGLE=alonesecret'), (5, 'RANK=3' || char(0) || 'TOKEN=envsecret'),
                (6, 'printedsecret'), (7, 'mallorys-thread'), (8, 'load KEY=textsecret, n=1'),
                (9, 'pt_main_thread --token threadsecret'), (10, '/home/alice/lib.so'),
                (11, 'python' || char(0) || '--token' || char(0) || 'argsecret');
            CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
            INSERT INTO META_DATA_CAPTURE VALUES
                ('PROCESS_0:ENVIRONMENT_VARIABLE', 'RANK="3"'),
                ('PROCESS_0:ENVIRONMENT_VARIABLE', 'TOKEN="envsecret"'),
                ('PROCESS_0:ARGUMENT_1', 'argsecret'),
                ('PROCESS_0:WORKING_DIRECTORY', '/home/alice');
            CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
            INSERT INTO META_DATA_EXPORT VALUES
                ('EXPORT_PRODUCT_VERSION', '2025.3.1'), ('EXPORT_INPUT_PATH', '/home/alice/r');
            CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, name TEXT, value TEXT);
            INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES
                (1, 'Hostname', 'n1'), (1, 'UserName', '/home/alice'),
                (1, 'DeviceEnvironment', 'TOKEN=envsecret'),
                (2, 'DeviceEnvironment', 'RANK=3' || char(0) || 'TOKEN=envsecret');
            CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
            INSERT INTO PROCESSES VALUES
                ({77 << 24}, 77, 'python'), ({99 << 24}, 99, 'mallorys-editor');
            CREATE TABLE ThreadNames (nameId INTEGER, globalTid INTEGER);
            INSERT INTO ThreadNames VALUES (9, {TID}), (7, {OTHER});
            CREATE TABLE ProcessStreams (globalPid INTEGER, contentId INTEGER);
            INSERT INTO ProcessStreams VALUES ({77 << 24}, 6);
            CREATE TABLE OSRT_API (start INTEGER, "end" INTEGER, globalTid INTEGER, nameId INTEGER);
            INSERT INTO OSRT_API VALUES (1, 2, {TID}, 1);
            CREATE TABLE NVTX_EVENTS (start INTEGER, globalTid INTEGER, text TEXT, textId INTEGER);
            INSERT INTO NVTX_EVENTS VALUES
                (1, {TID}, NULL, 3), (2, {TID}, NULL, 8),
                (3, {TID}, 'API=rangesecret lr=1e-3', NULL);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
                (start INTEGER, globalPid INTEGER, shortName INTEGER);
            CREATE TABLE "odd "" name" ("group" TEXT);
            INSERT INTO "odd "" name" VALUES ('X=textsecret');
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, {77 << 24}, 2);
            CREATE TABLE OSRT_CALLCHAINS (id INTEGER, module INTEGER);
            INSERT INTO OSRT_CALLCHAINS VALUES (1, 10);
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
            INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (5);
            """
        )
    return path


def rows(path: Path, sql: str) -> list[object]:
    with closing(sqlite3.connect(path)) as database:
        return [row if len(row) > 1 else row[0] for row in database.execute(sql)]


def test_nothing_private_is_left_and_all_that_a_merge_needs(export: Path, tmp_path: Path) -> None:
    clean = tmp_path / "clean.sqlite"
    before = export.read_bytes()
    assert all(each.encode() in before for each in PRIVATE), "else this test shows nothing"
    scrub(export, clean)
    assert export.read_bytes() == before
    assert [each for each in PRIVATE if each.encode() in clean.read_bytes()] == []
    strings = dict(rows(clean, "SELECT id, value FROM StringIds"))  # type: ignore[arg-type]
    assert strings[1] == "poll"
    assert strings[2] == "void ns::kernel<int>::operator=(float)"
    assert strings[3] == "step=7"
    assert strings[5] == "RANK=3"
    assert strings[8] == "load KEY=***, n=1"
    assert rows(clean, "SELECT text FROM NVTX_EVENTS WHERE start = 3") == ["API=*** lr=1e-3"]
    assert rows(clean, "SELECT value FROM META_DATA_CAPTURE") == ['RANK="3"']
    assert rows(clean, "SELECT value FROM META_DATA_EXPORT") == ["2025.3.1"]
    assert rows(clean, "SELECT name, value FROM TARGET_INFO_SYSTEM_ENV") == [
        ("Hostname", "n1"), ("DeviceEnvironment", "RANK=3"),
    ]  # fmt: skip
    assert rows(clean, "SELECT name FROM PROCESSES") == ["python"]


def test_the_unfinished_copy_is_its_owner_s_alone(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = []
    connect = sqlite3.connect

    def looked_at(path: str, **more: bool) -> sqlite3.Connection:
        if not more:  # the others are of the reader
            observed.append(stat.S_IMODE(os.stat(path).st_mode))
        return connect(path, **more)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr("clusterprof.ingest.nsys.scrubbing.sqlite3.connect", looked_at)
    before = os.umask(0)
    try:
        scrub(export, tmp_path / "clean.sqlite")
    finally:
        os.umask(before)
    assert observed == [0o600]
    assert stat.S_IMODE((tmp_path / "clean.sqlite").stat().st_mode) == 0o600
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(files.UNFINISHED)]


def test_a_copy_is_known_as_one_and_a_recording_is_not(export: Path, tmp_path: Path) -> None:
    scrub(export, tmp_path / "clean.sqlite")
    assert is_ours(tmp_path / "clean.sqlite")
    assert not is_ours(export)
    assert not is_ours(tmp_path / "absent")


def test_a_place_where_no_copy_can_be_is_said_to_be_one(export: Path, tmp_path: Path) -> None:
    target = tmp_path / "missing" / "clean.sqlite"
    with pytest.raises(ReportError, match=r"clean\.sqlite cannot be written"):
        scrub(export, target)
