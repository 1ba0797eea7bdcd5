"""A rank's reduced tables stand for its report, to the byte, or say why they cannot."""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lab.tiers import long_but
from pyarrow import parquet

from clusterprof import run_directory, unpacking
from clusterprof.agent.contracts import states
from clusterprof.cli import merge
from clusterprof.collect.outcomes import collect
from clusterprof.errors import ReportError
from clusterprof.ingest import Gathered, Source, find_sources, gather, read_report, reduced, reports
from clusterprof.ingest.assembler import checked
from clusterprof.ingest.nsys import exported
from clusterprof.report import results_json
from clusterprof.study import study
from clusterprof.tables import KINDS, SCHEMA_VERSION, SCHEMAS, RankTables, read_table

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"


def test_the_schema_version_is_raised_with_the_schemas() -> None:
    # Tables that were kept before are read as these: whoever changes one raises the version.
    text = ";".join(
        f"{name}.{field.name}:{field.type}:{field.nullable}"
        for name, schema in SCHEMAS.items()
        for field in schema
    )
    assert (SCHEMA_VERSION, zlib.crc32(text.encode())) == (1, 566872317)


@pytest.mark.parametrize(
    "recording",
    long_but(
        ["nsys-2024.2/pipeline", "kineto/gloo"],
        ["nsys-2025.3/ddp-host-straggler", "kineto/pipeline"],
    ),
)
def test_results_are_the_same_from_the_tables_as_from_the_reports(
    recording: str, tmp_path: Path
) -> None:
    shutil.copytree(RECORDINGS / recording, tmp_path / "reports")
    reports = sorted((tmp_path / "reports").glob("rank*.*"))

    def read(kept: bool = True) -> Gathered:
        sources = [
            Source(each, alone=True, reduced=tmp_path / each.name if kept else None)
            for each in reports
        ]
        found = gather(sources)
        return replace(found, ranks=[replace(each, kept={}) for each in found.ranks])

    def results(found: Gathered) -> str:
        made = study(found.ranks, missing=found.missing, warnings=found.warnings, source="here")
        return results_json.dumps(made.results)

    without = read(kept=False)
    assert read() == without  # reads the reports, keeps the tables
    assert all((tmp_path / each.name / "rank.json").is_file() for each in reports)
    assert read() == without  # the tables of reports that are there
    for each in reports:
        each.unlink()
    assert results(read()) == results(without)


def merged(run: run_directory.Window) -> Any:
    assert merge.main("merge", [str(run.path)], None) == 0
    return json.loads((run.merged / "results.json").read_text())


def test_a_run_is_merged_from_its_tables_where_its_reports_are_gone(
    run: run_directory.Window,
) -> None:
    first = merged(run)
    for rank in range(3):
        (run.rank(rank) / "trace.json.gz").unlink()
    assert merged(run) == first
    assert [each.report for each in collect(run, range(3), patience_s=0)] == [
        run.rank(rank) / "trace.json.gz" for rank in range(3)
    ]
    (run.path / "run.json").unlink()  # what somebody shares of it
    assert len(gather([run.path]).ranks) == 3


def test_a_trace_beside_a_report_that_was_dropped_does_not_take_its_place(
    run: run_directory.Window,
) -> None:
    # of a rank without a GPU: nsys' report and a trace of the same window
    folder = run.rank(0)
    report = folder / "report.nsys-rep"
    report.write_bytes(b"of nsys")
    trace = read_report(folder / "trace.json.gz")
    reduced.write(trace, folder / "reduced", report)
    report.unlink()
    (first, *_) = collect(run, range(3), patience_s=0)
    assert (first.report, first.trace) == (report, folder / "trace.json.gz")
    for _ in range(2):
        assert merged(run)["missing"] == []
        assert reduced.report_of(folder / "reduced") == report
    (run.path / "run.json").unlink()
    sources = find_sources([run.path])
    assert (sources[0].path, sources[0].beside) == (report, folder / "trace.json.gz")


def cut(folder: Path) -> str:
    table = folder / "activity.parquet"
    table.write_bytes(table.read_bytes()[: table.stat().st_size // 2])
    return "activity.parquet has"


def damaged(folder: Path) -> str:
    table = folder / "host_calls.parquet"
    content = bytearray(table.read_bytes())
    content[len(content) // 3] ^= 0xFF
    table.write_bytes(content)
    return "host_calls.parquet"


def other_schema(folder: Path) -> str:
    content = json.loads((folder / "rank.json").read_text())
    content["schema_version"] += 1
    content["info"] = "of another form"
    (folder / "rank.json").write_text(json.dumps(content))
    return "they are of schema version 2, and this clusterprof reads version 1"


def without_a_table(folder: Path) -> str:
    (folder / "steps.parquet").unlink()
    return "steps.parquet: No such file"


def no_json(folder: Path) -> str:
    (folder / "rank.json").write_text("{")
    return "rank.json is damaged"


def foreign_name(folder: Path) -> str:
    content = json.loads((folder / "rank.json").read_text())
    content["report"]["name"] = "../../elsewhere"
    (folder / "rank.json").write_text(json.dumps(content))
    return "the 'report' of rank.json is invalid"


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


SPOIL = [cut, damaged, other_schema, without_a_table, no_json, foreign_name]


@pytest.mark.parametrize("spoil", long_but([cut, foreign_name], SPOIL))
def test_tables_that_cannot_be_used_cost_their_rank_alone_and_are_named(
    spoil: Callable[[Path], str], run: run_directory.Window, capsys: Any
) -> None:
    merged(run)
    report = run.rank(1) / "trace.json.gz"
    kept = report.rename(run.path / "kept")
    why = spoil(report.with_name("reduced"))
    spoilt = contents(report.with_name("reduced"))
    results = merged(run)
    assert contents(report.with_name("reduced")) == spoilt, "nothing is written over"
    assert [each["rank"] for each in results["ranks"]] == [0, 2]
    (missing,) = results["missing"]
    assert missing["rank"] == 1
    assert why in missing["reason"]
    # The report itself is read where it is there, and its tables are made again.
    kept.rename(report)
    results = merged(run)
    assert results["missing"] == []
    named = [each for each in results["warnings"] if why in each and "read instead" in each]
    assert len(named) == (spoil is not other_schema), results["warnings"]
    report.unlink()
    results = merged(run)
    assert results["missing"] == []
    assert not [each for each in results["warnings"] if "read instead" in each], "made again"


def test_a_table_that_a_rank_keeps_is_not_written_a_second_time(
    run: run_directory.Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.rank(2) / "steps.csv").write_text("step,begin_ns,end_ns\n")
    first = merged(run)
    own = {rank: run.path / "tables" / f"{rank:05d}" for rank in range(3)}
    linked = {
        rank: {name for name in SCHEMAS if (own[rank] / f"{name}.parquet").stat().st_nlink > 1}
        for rank in range(3)
    }
    assert linked == {0: {*SCHEMAS}, 1: {*SCHEMAS}, 2: {*SCHEMAS} - {"steps"}}
    by_name = sum(each.stat().st_size for each in run.path.rglob("*") if each.is_file())
    assert run_directory.bytes_of(run.path) < by_name, "a file of two names counts once"
    # They are written where the file system has no second names, and what was there before goes.
    kept = {rank: contents(own[rank]) for rank in range(3)}
    shutil.rmtree(own[1])

    def none(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    assert merged(run) == first
    assert (own[1] / "activity.parquet").stat().st_nlink == 1
    monkeypatch.undo()
    (own[0] / "activity.parquet").unlink()
    (own[0] / "activity.parquet").write_bytes(b"of an earlier merge")
    assert merged(run) == first
    assert {rank: contents(own[rank]) for rank in range(3)} == kept


def test_what_a_killed_reducer_has_left_counts_nowhere_and_goes(
    run: run_directory.Window,
) -> None:
    left = run.rank(1) / ".reduced.0123456789abcdef.tmp"
    left.mkdir()
    (left / "activity.parquet").write_bytes(b"PAR1")
    first = merged(run)
    assert first["missing"] == []
    assert left.exists(), "it may still be written to"
    assert len(find_sources([run.path])) == 3
    os.utime(left, (0, 0))
    assert merged(run) == first
    assert not left.exists()
    assert (run.rank(1) / "reduced" / "rank.json").exists()


def test_tables_that_a_file_system_shows_late_are_waited_for(
    run: run_directory.Window,
) -> None:
    merged(run)
    folder = run.rank(1)
    (folder / "trace.json.gz").unlink()
    hidden = (folder / "reduced").rename(run.path / "hidden")
    timer = threading.Timer(0.5, lambda: hidden.rename(folder / "reduced"))
    timer.start()
    outcomes = collect(run, range(3), patience_s=60)
    timer.join()
    assert [str(each.state) for each in outcomes] == ["collected"] * 3
    assert states.read(str(folder))["state"] == "collected"


def test_a_report_that_this_host_has_no_nsys_for_is_named_and_the_others_are_merged(
    run: run_directory.Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run.rank(1) / "report.nsys-rep"
    (run.rank(1) / "trace.json.gz").rename(run.path / "elsewhere")
    report.write_bytes(b"of nsys")
    monkeypatch.setattr(exported, "installed", list)
    results = merged(run)
    assert [each["rank"] for each in results["ranks"]] == [0, 2]
    (missing,) = results["missing"]
    assert "without nsys, which is not installed on this host" in missing["reason"]
    assert report.read_bytes() == b"of nsys"
    assert not (run.rank(1) / "reduced").exists()
    with pytest.raises(ReportError, match="without nsys"):  # what a reducer prints on its node
        reports.keep(report, run.rank(1) / "reduced")


def test_tables_of_another_report_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    one, other = (RECORDINGS / "kineto" / "gloo" / f"rank{rank}.json.gz" for rank in (0, 1))
    report = tmp_path / "trace.json.gz"
    shutil.copy(one, report)
    reduced.write(read_report(report), tmp_path / "reduced", report)
    shutil.copy(other, report)
    with pytest.raises(ReportError, match=r"of another report than trace\.json\.gz is now"):
        reduced.read(tmp_path / "reduced", report)
    (read,) = reports.read_ranks(Source(report, reduced=tmp_path / "reduced"))
    assert not isinstance(read, ReportError)
    assert read.rank == 1
    assert reduced.read(tmp_path / "reduced", report).info.rank == 1, "they are made again"


def test_what_fails_while_tables_are_written_leaves_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = RECORDINGS / "kineto" / "gloo" / "rank0.json.gz"
    folder = tmp_path / "reduced"
    tables = read_report(report)
    reduced.write(tables, folder, report)
    before = (folder / "rank.json").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(OSError, match="No space left"):
        reduced.write(tables, folder, report)
    assert (folder / "rank.json").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["reduced"]


def test_a_report_that_changes_under_the_reader_is_named(
    run: run_directory.Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = run.rank(1) / "trace.json.gz"
    read = reports.assemble

    def meanwhile(recording: Any) -> Any:
        if recording.info.source == changing:
            with changing.open("ab") as file:
                file.write(b"\0")
        return read(recording)

    monkeypatch.setattr(reports, "assemble", meanwhile)
    results = merged(run)
    assert [each["rank"] for each in results["ranks"]] == [0, 2]
    assert "changed while it was read" in results["missing"][0]["reason"]
    assert not (run.rank(1) / "reduced").exists(), "these tables are of no report"


def test_tables_whose_rows_are_not_what_clusterprof_writes_are_refused(tmp_path: Path) -> None:
    report = RECORDINGS / "kineto" / "gloo" / "rank0.json.gz"
    tables = read_report(report)
    shuffled = tables.host_calls.take(pa.array(range(tables.host_calls.num_rows - 1, -1, -1)))
    changed = type(tables)(**{**vars(tables), "host_calls": shuffled})
    reduced.write(changed, tmp_path / "reduced", report)
    with pytest.raises(ReportError, match=r"host_calls\.parquet does not hold what clusterprof"):
        reduced.read(tmp_path / "reduced", report)


def test_a_bit_that_flipped_in_an_unpacked_table_is_no_other_number(tmp_path: Path) -> None:
    report = RECORDINGS / "kineto" / "gloo" / "rank0.json.gz"
    reduced.write(read_report(report), tmp_path / "reduced", report)
    file = tmp_path / "reduced" / "steps.parquet"
    begin = reduced.read(tmp_path / "reduced", report).steps["begin_ns"][0].as_py()
    content = file.read_bytes()
    assert begin.to_bytes(8, "little") in content, "it is unpacked"
    file.write_bytes(
        content.replace(begin.to_bytes(8, "little"), (begin + 1).to_bytes(8, "little"), 1)
    )
    with pytest.raises(ReportError, match=r"steps\.parquet"):
        reduced.read(tmp_path / "reduced", report)


def test_an_activity_or_a_call_of_an_unknown_kind_is_refused() -> None:
    tables = read_report(RECORDINGS / "kineto" / "gloo" / "rank0.json.gz")
    for name in KINDS:
        table = getattr(tables, name)
        odd = table.set_column(
            table.schema.get_field_index("kind"), table.schema.field("kind"),
            pa.array(["\0ython"] * table.num_rows).dictionary_encode(),
        )  # fmt: skip
        with pytest.raises(ReportError, match=f"is not a valid kind of {name}"):
            checked(tables.changed(name, odd), None)


def test_what_ends_before_it_begins_is_left_out_with_a_warning(tmp_path: Path) -> None:
    whole = read_report(RECORDINGS / "nsys-2025.3" / "ddp" / "rank0.sqlite.xz")
    whole = replace(whole, kept=reduced.files_of(tmp_path))
    begins = {"activity": "start_ns", "host_calls": "start_ns", "collective_calls": "start_ns"}
    tables = whole
    for name, begin in begins.items():
        table = getattr(whole, name)
        times = table["end_ns"].to_pylist()
        times[2] = table[begin][2].as_py() - 1
        place = table.schema.get_field_index("end_ns")
        tables = replace(
            tables,
            **{
                name: table.set_column(
                    place, table.schema.field(place), pa.array(times, pa.int64())
                )
            },
        )
    found = checked(tables, None)
    assert [len(whole.activity) - 1, len(whole.host_calls) - 1, len(whole.collective_calls)] == [
        len(found.activity), len(found.host_calls), len(found.collective_calls)
    ]  # fmt: skip
    call = found.collective_calls.slice(2, 1).to_pylist()[0]
    assert (call["start_ns"], call["end_ns"]) == (None, None)
    assert found.steps.equals(whole.steps)
    assert set(found.kept) == {"steps"}, "no file holds what was changed"
    assert "left out of activity: 1 row with an end before the begin" in found.warnings
    assert checked(whole, None) == whole


def test_the_tables_say_nothing_of_the_environment(tmp_path: Path) -> None:
    report = RECORDINGS / "nsys-2025.3" / "ddp" / "rank0.sqlite.xz"
    reduced.write(read_report(report), tmp_path / "reduced", report)
    content = json.loads((tmp_path / "reduced" / "rank.json").read_text())
    assert set(content) == {"schema_version", "clusterprof_version", "report", "tables", "info"}
    assert str(report.parent) not in json.dumps(content)


def many_rows(tables: RankTables, count: int) -> tuple[str, pa.Table]:
    """Rows that take no space: they are all alike."""
    return "steps", tables.steps.take(pa.array(np.zeros(count, np.int64)))


def one_text_for_all(tables: RankTables, count: int) -> tuple[str, pa.Table]:
    """Rows that have one text, which is there once."""
    calls = tables.collective_calls.take(pa.array(np.zeros(count // 100, np.int64)))
    place = calls.schema.get_field_index("communicator")
    texts = pa.DictionaryArray.from_arrays(np.zeros(len(calls), np.int32), ["x" * 20_000])
    return "collective_calls", calls.set_column(place, "communicator", texts)


def long_lists(tables: RankTables, count: int) -> tuple[str, pa.Table]:
    """Rows with lists of numbers that are all alike."""
    calls = tables.collective_calls.take(pa.array(np.zeros(10, np.int64)))
    place = calls.schema.get_field_index("members")
    ends = np.arange(11, dtype=np.int32) * (count // 10)
    lists = pa.ListArray.from_arrays(ends, np.zeros(ends[-1], np.int32))
    return "collective_calls", calls.set_column(place, "members", lists)


@pytest.mark.parametrize("make", [many_rows, one_text_for_all, long_lists])
def test_a_small_table_that_is_large_once_it_is_unpacked_is_refused(
    make: Callable[[RankTables, int], tuple[str, pa.Table]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unpacking, "_HARMLESS", 1 << 20)
    tables = read_report(RECORDINGS / "kineto" / "gloo" / "rank0.json.gz")
    name, table = make(tables, 200_000)
    file = tmp_path / f"{name}.parquet"
    parquet.write_table(table, file, compression="zstd", row_group_size=len(table))
    assert file.stat().st_size < 10_000
    with pytest.raises(ReportError, match="holds more than"):
        read_table(file, SCHEMAS[name])
    monkeypatch.setenv("CLUSTERPROF_MAX_UNPACKED", "1G")
    assert len(read_table(file, SCHEMAS[name])) == len(table)


def varint(number: int, length: int) -> bytes:
    """A number as a Parquet footer has it, in so many bytes."""
    groups = [number * 2 >> 7 * place & 127 for place in range(length)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def say_in_the_footer(file: Path, numbers: dict[int, int]) -> None:
    """Have a table's footer say other numbers than it does."""
    content = file.read_bytes()
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[begin:]
    for before, after in numbers.items():
        length = (before * 2).bit_length() // 7 + 1
        assert varint(before, length) in footer
        footer = footer.replace(varint(before, length), varint(after, length))
    file.write_bytes(content[:begin] + footer)


def test_a_table_whose_pages_are_larger_than_its_footer_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_HARMLESS", 1 << 20)
    tables = read_report(RECORDINGS / "kineto" / "gloo" / "rank0.json.gz")
    name, table = many_rows(tables, 200_000)
    file = tmp_path / f"{name}.parquet"
    parquet.write_table(
        table, file, compression="zstd", use_dictionary=False, data_page_size=1 << 30,
        row_group_size=len(table), max_rows_per_page=len(table), write_statistics=False,
    )  # fmt: skip
    group = parquet.read_metadata(file).row_group(0)
    sizes = {group.column(n).total_uncompressed_size: 9 for n in range(group.num_columns)}
    say_in_the_footer(file, {**sizes, len(table): 9})
    group = parquet.read_metadata(file).row_group(0)
    assert {group.column(n).total_uncompressed_size for n in range(group.num_columns)} == {9}
    with pytest.raises(ReportError, match="holds more than"):
        read_table(file, SCHEMAS[name])
