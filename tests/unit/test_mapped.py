"""Large tables lie in a file, whose memory can be given back."""

from __future__ import annotations

import errno
import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clusterprof import mapped

TABLES = [
    pa.table({"a": range(100_000), "b": pa.array(["x", None] * 50_000).dictionary_encode()}),
    pa.table({"c": pa.array([], pa.int32())}),
    pa.concat_tables([pa.table({"d": pa.array([each]).dictionary_encode()}) for each in "xy"]),
]


def written(file: Path) -> Path:
    with file.open("wb") as opened:
        mapped.write(TABLES, opened)
    return file


@pytest.mark.parametrize("name", ["tables", "tables\udcff"], ids=["a name", "no UTF-8"])
def test_tables_of_any_size_lie_behind_each_other(name: str, tmp_path: Path) -> None:
    made = mapped.read(written(tmp_path / name))
    assert [each.to_pydict() for each in made] == [each.to_pydict() for each in TABLES]


def test_what_was_given_back_is_read_again(tmp_path: Path) -> None:
    file = written(tmp_path / "tables")
    made = mapped.read(file)
    file.unlink()
    mapped.trim()
    assert made[0].equals(TABLES[0])


@pytest.mark.parametrize(("much", "stays"), [(1 << 40, True), (1 << 20, False)])
def test_only_much_is_given_back_where_one_rank_after_the_other_is_read(
    *, much: int, stays: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def in_memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE

    monkeypatch.setattr(mapped, "_MUCH", much)
    with (tmp_path / "tables").open("wb") as file:
        mapped.write([pa.table({"a": np.arange(4_000_000)})], file)
    made = mapped.read(tmp_path / "tables")[0]
    mapped.trim()
    before = in_memory()
    assert made["a"].to_numpy()[::512].sum() == np.arange(0, 4_000_000, 512).sum()
    assert in_memory() - before > 24_000_000
    mapped.release()
    assert (in_memory() - before > 24_000_000) == stays


def test_a_table_that_is_moved_is_the_same_and_its_file_has_no_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = pa.total_allocated_bytes()
    made = mapped.moved(TABLES[0])
    assert pa.total_allocated_bytes() - before < TABLES[0].nbytes / 2
    assert made.equals(TABLES[0])
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_fits_on_no_disk_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped, "write", full)
    assert mapped.moved(TABLES[0]) is TABLES[0]
