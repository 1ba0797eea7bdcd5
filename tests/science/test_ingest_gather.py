"""Many reports at once: which files are one report, who is missing, what does not fit together."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from clusterprof.errors import MergeError, ReportError
from clusterprof.ingest import Source, combine, find_sources, gather, read_report


@pytest.fixture
def ddp(recordings: Path) -> Path:
    return recordings / "nsys-2025.3" / "ddp"


@pytest.fixture
def straggler(recordings: Path) -> Path:
    return recordings / "nsys-2025.3" / "ddp-host-straggler"


@pytest.fixture
def changed(ddp: Path, tmp_path: Path) -> Callable[[int, str], Path]:
    """An unpacked copy of one rank's report, changed by one SQL statement."""

    def change(rank: int, statement: str) -> Path:
        path = tmp_path / f"rank{rank}.sqlite"
        path.write_bytes(lzma.decompress((ddp / f"rank{rank}.sqlite.xz").read_bytes()))
        with closing(sqlite3.connect(path)) as database:
            database.execute(statement)
            database.commit()
        return path

    return change


def test_a_folder_gives_all_its_ranks_in_order(ddp: Path) -> None:
    gathered = gather([ddp])
    assert [ranks.rank for ranks in gathered.ranks] == [0, 1, 2, 3]
    assert (gathered.missing, gathered.warnings) == ([], [])


def test_the_rank_is_the_report_s_whatever_the_files_are_called(ddp: Path, tmp_path: Path) -> None:
    for rank, name in enumerate(["d", "rank2", "a 'quoted' one", "?#%41 b"]):
        shutil.copy(ddp / f"rank{rank}.sqlite.xz", tmp_path / f"{name}.sqlite.xz")
        with lzma.open(ddp / f"rank{rank}.sqlite.xz") as packed:
            (tmp_path / f"{name}.sqlite").write_bytes(packed.read())
    gathered = gather([tmp_path])
    names = [ranks.info.source.name for ranks in gathered.ranks]
    assert names == ["d.sqlite", "rank2.sqlite", "a 'quoted' one.sqlite", "?#%41 b.sqlite"]


def test_a_bad_report_is_a_missing_report_and_the_others_go_on(ddp: Path, tmp_path: Path) -> None:
    for rank in range(4):
        shutil.copy(ddp / f"rank{rank}.sqlite.xz", tmp_path)
    broken = tmp_path / "rank2.sqlite.xz"
    broken.write_bytes(broken.read_bytes()[:5000])
    gathered = gather([tmp_path])
    assert [ranks.rank for ranks in gathered.ranks] == [0, 1, 3]
    (gap,) = gathered.missing
    assert gap["source"] == str(broken)
    assert str(broken) in gap["reason"]
    assert any(str(broken) in warning for warning in gathered.warnings)


def test_a_source_s_rank_names_the_missing_report(ddp: Path, tmp_path: Path) -> None:
    lost = tmp_path / "report.sqlite"
    gathered = gather([Source(ddp / "rank0.sqlite.xz", rank=0), Source(lost, rank=7)])
    assert [(gap["rank"], gap["source"]) for gap in gathered.missing] == [(7, str(lost))]


def test_a_fault_of_the_reader_is_a_missing_report_too(
    ddp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clusterprof.ingest.nsys import sqlite

    real = sqlite.read

    def fail(path: Path, **options: bool) -> object:
        if path.name == "rank1.sqlite.xz":
            raise IndexError("boom")
        return real(path, **options)

    monkeypatch.setattr(sqlite, "read", fail)
    gathered = gather([ddp])
    assert [ranks.rank for ranks in gathered.ranks] == [0, 2, 3]
    assert "IndexError: boom" in gathered.warnings[0]


def test_one_rank_twice_is_refused_with_both_files_named(ddp: Path, straggler: Path) -> None:
    one, other = ddp / "rank1.sqlite.xz", straggler / "rank1.sqlite.xz"
    with pytest.raises(MergeError, match="rank 1 ") as caught:
        gather([one, other])
    assert str(one) in str(caught.value)
    assert str(other) in str(caught.value)


def test_one_file_given_twice_is_one_report(ddp: Path) -> None:
    gathered = gather([ddp, ddp / "rank1.sqlite.xz"])
    assert [ranks.rank for ranks in gathered.ranks] == [0, 1, 2, 3]


def test_reports_of_two_jobs_are_refused_with_who_belongs_where(
    ddp: Path, changed: Callable[[int, str], Path]
) -> None:
    port = (
        "UPDATE META_DATA_CAPTURE SET value = 'MASTER_PORT=\"7\"' WHERE value LIKE 'MASTER_PORT%'"
    )
    other = changed(2, port)
    with pytest.raises(MergeError, match="different jobs") as caught:
        gather([ddp / "rank0.sqlite.xz", ddp / "rank1.sqlite.xz", other])
    first, second = caught.value.details[:2]
    assert "rank0.sqlite.xz (rank 0)" in first
    assert f"{other} (rank 2)" in second


def test_reports_of_worlds_of_different_size_are_refused(
    ddp: Path, changed: Callable[[int, str], Path]
) -> None:
    size = "UPDATE META_DATA_CAPTURE SET value = 'WORLD_SIZE=\"8\"' WHERE value LIKE 'WORLD_SIZE%'"
    with pytest.raises(MergeError, match="different world sizes"):
        gather([ddp / "rank0.sqlite.xz", changed(1, size)])


def windows_apart(warnings: Sequence[str]) -> list[tuple[int, int]]:
    """Return the ranks of windows that do not overlap: which, and whose."""
    named = (re.findall(r"rank (\d+) \(", each) for each in warnings if "not overlap" in each)
    return [(int(rank), int(other)) for rank, other in named]


def test_two_recordings_of_one_rendezvous_are_told_apart_by_time_and_communicator(
    ddp: Path, straggler: Path
) -> None:
    # Both ran with torchrun's defaults: nothing in their environment differs.
    with pytest.raises(MergeError, match="different times") as caught:
        gather([ddp / "rank0.sqlite.xz", straggler / "rank1.sqlite.xz"])
    for folder, detail in zip((ddp, straggler), caught.value.details[:2], strict=True):
        assert str(folder) in detail


def test_one_host_s_clock_tells_two_runs_apart_where_a_report_names_no_communicator(
    ddp: Path, recordings: Path
) -> None:
    # Both are of one host, and exports of nsys 2024.2 name none.
    other = recordings / "nsys-2024.2" / "pipeline" / "rank2.sqlite.xz"
    with pytest.raises(MergeError, match="different times") as caught:
        gather([ddp / "rank0.sqlite.xz", ddp / "rank1.sqlite.xz", other])
    assert [str(other) in line for line in caught.value.details[:2]].count(True) == 1


def test_a_process_group_of_the_same_name_is_no_proof_of_one_job(
    recordings: Path, tmp_path: Path
) -> None:
    folder = recordings / "kineto" / "gloo"
    trace = json.loads(gzip.decompress((folder / "rank1.json.gz").read_bytes()))
    trace["baseTimeNanoseconds"] += 3_600_000_000_000
    trace["host_name"] = "n1"
    other = tmp_path / "rank1.json"
    other.write_text(json.dumps(trace))
    first = json.loads(gzip.decompress((folder / "rank0.json.gz").read_bytes()))
    first["host_name"] = "n0"
    one = tmp_path / "rank0.json"
    one.write_text(json.dumps(first))
    gathered = gather([one, other])
    assert [ranks.rank for ranks in gathered.ranks] == [0, 1]
    assert windows_apart(gathered.warnings) == [(1, 0)]
    one.write_text(json.dumps({**first, "host_name": "n1"}))
    with pytest.raises(MergeError, match="different times"):
        gather([one, other])


def test_a_clock_that_is_far_off_is_a_warning_where_the_communicator_is_shared(
    ddp: Path, changed: Callable[[int, str], Path]
) -> None:
    late = "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = utcEpochNs + 3600000000000"
    gathered = gather([ddp / "rank0.sqlite.xz", changed(1, late)])
    assert [ranks.rank for ranks in gathered.ranks] == [0, 1]
    assert windows_apart(gathered.warnings) == [(1, 0)]


def test_a_rank_told_for_the_report_holds_for_its_export(
    tmp_path: Path, changed: Callable[[int, str], Path]
) -> None:
    nameless = changed(3, "DELETE FROM META_DATA_CAPTURE")
    gathered = gather([nameless], ranks={tmp_path / "rank3.nsys-rep": 3})
    assert [ranks.rank for ranks in gathered.ranks] == [3]


def test_a_rank_told_for_a_file_that_is_not_there_is_refused(ddp: Path) -> None:
    with pytest.raises(ReportError, match="rank 5 ") as caught:
        gather([ddp], ranks={ddp / "rank9.sqlite": 5})
    assert str(ddp / "rank9.sqlite") in caught.value.what
    assert str(ddp / "rank0.sqlite.xz") in caught.value.details[0]


def test_a_warning_of_several_ranks_is_said_once(recordings: Path) -> None:
    gathered = gather([recordings / "nsys-2024.2" / "pipeline"])
    assert len(gathered.warnings) == 2
    assert all(warning.startswith("ranks 0, 2: nsys: ") for warning in gathered.warnings)


def test_a_report_that_names_no_communicators_beside_others_that_do_is_said(
    ddp: Path, changed: Callable[[int, str], Path]
) -> None:
    bare = changed(2, "UPDATE NVTX_EVENTS SET binaryData = NULL")
    gathered = gather([ddp / "rank0.sqlite.xz", ddp / "rank1.sqlite.xz", bare])
    (warning,) = gathered.warnings
    assert warning.startswith("rank 2: communicators ")
    assert gather([ddp]).warnings == []


# --- which files are one report ------------------------------------------------------------------


def touch(folder: Path, *names: str, mtime: int = 1000) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"schemaVersion": 1, "traceEvents": []}' if "json" in name else "x")
        os.utime(path, (mtime, mtime))


def found(folder: Path) -> list[tuple[str, str | None]]:
    return [
        (str(each.path.relative_to(folder)), each.beside.name if each.beside else None)
        for each in find_sources([folder])
    ]


def test_a_report_and_its_exports_are_one(tmp_path: Path) -> None:
    touch(tmp_path, "a.nsys-rep", "b.nsys-rep")
    touch(tmp_path, "a.sqlite", "a.sqlite.xz", "c.sqlite", "c.sqlite.xz", mtime=2000)
    assert found(tmp_path) == [("a.sqlite", None), ("b.nsys-rep", None), ("c.sqlite", None)]


def test_what_nsys_left_unfinished_is_a_report_where_there_is_no_other(tmp_path: Path) -> None:
    touch(tmp_path, "a.qdstrm", "a.nsys-rep", "b.qdstrm", "b.sqlite", "c.qdstrm")
    assert found(tmp_path) == [("a.nsys-rep", None), ("b.sqlite", None), ("c.qdstrm", None)]


def test_an_export_older_than_its_report_is_not_used(tmp_path: Path) -> None:
    touch(tmp_path, "a.sqlite", mtime=1000)
    touch(tmp_path, "a.nsys-rep", mtime=2000)
    assert found(tmp_path) == [("a.nsys-rep", None)]


def test_a_run_directory_gives_one_source_per_rank_with_the_trace_beside(tmp_path: Path) -> None:
    touch(tmp_path, "ranks/00000/report.nsys-rep", "ranks/00008/trace.json.gz")
    with gzip.open(tmp_path / "ranks/00008/trace.json.gz", "wb") as file:
        file.write(b'{"schemaVersion": 1, "traceEvents": []}')
    shutil.copy(tmp_path / "ranks/00008/trace.json.gz", tmp_path / "ranks/00000")
    for name in ("run.json", "ranks/00000/state.json", "ranks/00000/clock.json"):
        (tmp_path / name).write_text('{"schema_version": 1}')
    # of an earlier version
    (tmp_path / "ranks/00008/beacons.json").write_text('[{"begin_ns": 1, "end_ns": 2}]')
    assert found(tmp_path) == [
        ("ranks/00000/report.nsys-rep", "trace.json.gz"),
        ("ranks/00008/trace.json.gz", None),
    ]


def test_a_folder_of_folders_gives_the_reports_one_level_below(tmp_path: Path) -> None:
    touch(tmp_path, "node1/a.sqlite", "node2/a.sqlite", "node2/deep/er.sqlite")
    assert found(tmp_path) == [("node1/a.sqlite", None), ("node2/a.sqlite", None)]


# --- step logs and two reports of one rank -------------------------------------------------------


def test_a_step_log_overrides_the_steps_of_the_report(ddp: Path, tmp_path: Path) -> None:
    report = read_report(ddp / "rank0.sqlite.xz")
    begin, end = report.info.begin_ns, report.info.end_ns
    middle = (begin + end) // 2
    log = tmp_path / "steps.csv"
    log.write_text(
        "step,begin_ns,end_ns\n"
        f"99,{begin - 2_000_000_000},{begin - 1_000_000_000}\n"
        f"100,{begin - 5},{middle}\n"
        f"101,{middle},{end}\n"
        f"102,{end},{end + 1_000_000_000}\n"
    )
    (ranks,) = gather([Source(ddp / "rank0.sqlite.xz", rank=0, steps=log)]).ranks
    assert ranks.steps.to_pylist() == [
        {"step": 100, "begin_ns": begin - 5, "end_ns": middle, "source": "steplog"},
        {"step": 101, "begin_ns": middle, "end_ns": end, "source": "steplog"},
    ]


def kind_counts(table: pa.Table) -> dict[str, int]:
    counts = pc.value_counts(table["kind"].cast(pa.string())).to_pylist()
    return {each["values"]: each["counts"] for each in counts}


def test_nsys_and_a_trace_of_one_cpu_rank_make_one_rank(recordings: Path, ddp: Path) -> None:
    # A GPU report without its GPU work stands for what nsys sees of a CPU-only rank.
    nsys = read_report(ddp / "rank0.sqlite.xz")
    from dataclasses import replace

    from clusterprof.tables import empty

    blind = replace(nsys, activity=empty("activity"), collective_calls=empty("collective_calls"))
    trace = read_report(recordings / "kineto" / "gloo" / "rank0.json.gz")
    both = combine(blind, trace)
    assert both.activity.equals(trace.activity)
    assert both.collective_calls.equals(trace.collective_calls)
    assert both.steps.equals(trace.steps)
    counts = kind_counts(both.host_calls)
    assert counts["os"] == kind_counts(nsys.host_calls)["os"]
    assert counts["op"] == kind_counts(trace.host_calls)["op"]
    assert "cuda" not in counts
    assert both.info.profiler == "nsys 2025.3.2 + torch.profiler"


def test_what_nsys_saw_of_the_gpu_is_kept(recordings: Path, ddp: Path) -> None:
    nsys = read_report(ddp / "rank0.sqlite.xz")
    trace = read_report(recordings / "kineto" / "gloo" / "rank0.json.gz")
    both = combine(nsys, trace)
    assert both.activity.equals(nsys.activity)
    assert both.collective_calls.equals(nsys.collective_calls)
    assert both.host_calls.num_rows == nsys.host_calls.num_rows


def test_a_bad_trace_beside_a_report_is_left_out_with_a_warning(ddp: Path, tmp_path: Path) -> None:
    bad = tmp_path / "trace.json.gz"
    bad.write_bytes(b"garbage")
    gathered = gather([Source(ddp / "rank0.sqlite.xz", beside=bad)])
    assert [ranks.rank for ranks in gathered.ranks] == [0]
    assert any("left out" in warning for warning in gathered.warnings)


def test_captures_of_different_times_go_together_where_nothing_in_them_is_matched(
    ddp: Path, changed: Callable[[int, str], Path]
) -> None:
    later = changed(1, "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = utcEpochNs + 1E10")
    earlier = changed(0, "DROP TABLE NVTX_EVENTS")
    for path in (later, earlier):
        with closing(sqlite3.connect(path)) as database:
            database.execute("DROP TABLE IF EXISTS NVTX_EVENTS")
            database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
            database.commit()
    assert [ranks.rank for ranks in gather([earlier, later]).ranks] == [0, 1]


def test_what_lies_further_down_is_named_with_a_command_that_merges_it(tmp_path: Path) -> None:
    deep = tmp_path / "project" / "night 1" / "profiles"
    deep.mkdir(parents=True)
    for rank in range(3):
        (deep / f"rank{rank}.nsys-rep").write_bytes(b"x")
    (deep.parent / "settings.json").write_text("{}")
    with pytest.raises(ReportError) as refused:
        find_sources([tmp_path])
    assert f"{deep} (3)" in refused.value.details[-2]
    assert refused.value.details[-1].endswith(f"clusterprof merge '{deep}'")
    run = tmp_path / "runs" / "a"
    (run / "ranks" / "00000").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "ranks" / "00000" / "report.nsys-rep").write_bytes(b"x")
    with pytest.raises(ReportError) as refused:
        find_sources([tmp_path])
    assert f"1 run: {run}" in " ".join(refused.value.details)
    assert refused.value.details[-1].endswith(f"clusterprof merge {run}")


def test_the_folder_of_a_merge_is_no_folder_of_reports(tmp_path: Path) -> None:
    (tmp_path / "night 1" / "merged").mkdir(parents=True)
    (tmp_path / "night 1" / "merged" / "results.json").write_text("{}")
    for given in (tmp_path, tmp_path / "night 1"):
        with pytest.raises(ReportError) as refused:
            find_sources([given])
        assert refused.value.details[-1].endswith(f"clusterprof report '{tmp_path}/night 1'")


def test_a_tree_without_an_end_is_looked_through_so_far_only(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(12):
        folder = folder / "x"
    folder.mkdir(parents=True)
    (folder / "rank0.nsys-rep").write_bytes(b"x")
    (tmp_path / "x" / "again").symlink_to(tmp_path)
    with pytest.raises(ReportError) as refused:
        find_sources([tmp_path])
    assert len(refused.value.details) == 1
