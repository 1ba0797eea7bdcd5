"""A rank's large tables lie in a file once another process has read them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from simulate import Job, simulate

from clusterprof import mapped
from clusterprof.tables import SCHEMAS, RankTables


def received(tables: RankTables) -> RankTables:
    """What another process makes of these tables."""
    made = pickle.loads(pickle.dumps(tables, pickle.HIGHEST_PROTOCOL))
    assert isinstance(made, RankTables)
    return made


def same(one: RankTables, other: RankTables) -> bool:
    tables = (getattr(one, name).equals(getattr(other, name)) for name in SCHEMAS)
    return one.info == other.info and all(tables)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[RankTables]:
    """Those of a job, and a file of their own."""
    monkeypatch.setattr(mapped, "_store", None)
    return simulate(Job(layers=8))[0]


def test_tables_from_another_process_are_the_same_and_take_no_memory(
    tables: list[RankTables],
) -> None:
    before = pa.total_allocated_bytes()
    made = [received(each) for each in tables]
    size = sum(each.activity.nbytes + each.host_calls.nbytes for each in made)
    assert all(map(same, tables, made))
    assert pa.total_allocated_bytes() - before < size / 2


def test_what_was_given_back_is_read_again(tables: list[RankTables]) -> None:
    made = received(tables[0])
    mapped.trim()
    assert same(made, tables[0])


def test_tables_of_any_size_lie_beside_each_other(
    tables: list[RankTables], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_SEGMENT", 1 << 16)
    made = [received(each) for each in (*tables, *reversed(tables))]
    assert all(map(same, made, (*tables, *reversed(tables))))


def test_the_file_has_no_name(
    tables: list[RankTables], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    received(tables[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["pwrite", "ftruncate"])
def test_tables_that_fit_on_no_disk_stay_in_memory(
    tables: list[RankTables], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, full)
    assert same(received(tables[0]), tables[0])
