"""What one process hands to another comes back as it was."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from simulate import Job, simulate

from clusterprof import mapped
from clusterprof.ingest.engines import packed, put_down, taken_up
from clusterprof.tables import SCHEMAS, RankTables


@pytest.fixture
def tables() -> list[RankTables]:
    """Those of a job."""
    return simulate(Job(layers=8))[0]


def same(one: RankTables, other: RankTables) -> bool:
    alike = (getattr(one, name).equals(getattr(other, name)) for name in SCHEMAS)
    return one.info == other.info and all(alike)


def sent(parts: list[object]) -> list[object]:
    """What another process gets of it."""
    found: list[object] = pickle.loads(pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))
    return found


def test_tables_from_another_process_are_the_same_and_take_no_memory(
    tables: list[RankTables], tmp_path: Path
) -> None:
    size = sum(each.activity.nbytes + each.host_calls.nbytes for each in tables)
    way = sent(put_down([*tables, "text"], str(tmp_path)))
    assert len(pickle.dumps(way)) < size / 2
    before = pa.total_allocated_bytes()
    *made, text = taken_up(way)
    for file in tmp_path.iterdir():
        file.unlink()  # as whoever reads them does then
    assert pa.total_allocated_bytes() - before < size / 2
    assert all(map(same, tables, made))
    assert text == "text"


def test_tables_from_another_host_are_the_same(tables: list[RankTables], tmp_path: Path) -> None:
    for name in "far", "here":
        (tmp_path / name).mkdir()
    far = sent(packed(put_down([*tables, "text"], str(tmp_path / "far"))))
    *made, text = taken_up(sent(put_down(far, str(tmp_path / "here"))))
    assert all(map(same, tables, made))
    assert text == "text"


def test_tables_that_fit_on_no_disk_go_through_the_pipe(
    tables: list[RankTables], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped, "write", full)
    made = taken_up(sent(put_down(tables, str(tmp_path))))
    assert all(map(same, tables, made))
    assert list(tmp_path.iterdir()) == []
    assert same(taken_up(sent(put_down(tables, str(tmp_path / "gone"))))[0], tables[0])


def test_files_that_are_mapped_take_no_descriptor(tables: list[RankTables], tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = [taken_up(put_down(tables, str(tmp_path))) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert same(made[-1][0], tables[0])
