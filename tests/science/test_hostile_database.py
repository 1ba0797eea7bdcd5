"""An nsys export that somebody made: it costs its own rank, and neither hours nor gigabytes."""

from __future__ import annotations

import lzma
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from lab.hostile import repeat_pages

from clusterprof import unpacking
from clusterprof.errors import ReportError
from clusterprof.ingest import read_report

RECORDING = Path(__file__).parents[1] / "data/recordings/nsys-2025.3/ddp"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    (packed, *_) = sorted(RECORDING.glob("*.sqlite.xz"))
    made = tmp_path / "rank.sqlite"
    made.write_bytes(lzma.decompress(packed.read_bytes()))
    return made


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL"])
@pytest.mark.parametrize("below_itself", [False, True])
def test_pages_that_give_their_rows_any_number_of_times_are_refused(
    export: Path, table: str, below_itself: bool
) -> None:
    repeat_pages(export, table, below_itself=below_itself)
    with pytest.raises(ReportError) as refused:
        read_report(export)
    assert "belongs to no place, or to two" in str(refused.value)


def test_a_name_that_many_ranges_have_is_read_once(export: Path) -> None:
    # Joined to each of them, it would be twenty gigabytes of one megabyte.
    with closing(sqlite3.connect(export)) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(NVTX_EVENTS)")]
        query = "SELECT * FROM NVTX_EVENTS WHERE eventType IN (59, 60) LIMIT 1"
        row = dict(zip(columns, database.execute(query).fetchone(), strict=True))
        database.execute("INSERT INTO StringIds VALUES (999999, ?)", ("x" * 1_000_000,))
        row |= {"textId": 999_999, "text": None}
        values = [row[name] for name in columns]
        marks = ",".join("?" * len(values))
        database.executemany(f"INSERT INTO NVTX_EVENTS VALUES ({marks})", [values] * 20_000)
        database.commit()
    before = read_report(export)
    assert before.collective_calls.num_rows


def test_a_query_that_gives_more_than_the_file_can_hold_is_ended(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_HARMLESS", 1 << 16)
    monkeypatch.setattr(unpacking, "_RATIO", 0)
    with pytest.raises(ReportError) as refused:
        read_report(export)
    assert "gives more than a database of this size holds" in str(refused.value)


def test_a_write_ahead_log_beside_an_export_is_neither_read_nor_written(export: Path) -> None:
    before = read_report(export)
    with closing(sqlite3.connect(export)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("DELETE FROM NVTX_EVENTS")
        database.commit()
        there = {name: (export.parent / name).read_bytes() for name in os.listdir(export.parent)}
        assert len(there) == 3, "the log and its index"
        after = read_report(export)
        assert {name: (export.parent / name).read_bytes() for name in there} == there
    assert after.steps == before.steps
    assert after.collective_calls == before.collective_calls


def test_a_view_in_place_of_a_table_is_none(export: Path) -> None:
    with closing(sqlite3.connect(export)) as database:
        database.execute("ALTER TABLE StringIds RENAME TO Others")
        database.execute("CREATE VIEW StringIds AS SELECT * FROM Others, Others, Others, Others")
        database.commit()
    with pytest.raises(ReportError, match="is an SQLite database but not an nsys export"):
        read_report(export)
