"""Traces of other tools, and packed files that hold more than they may: read, or named."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from seeds import content, span, sqlite, trace

from clusterprof.errors import ReportError, UsageError
from clusterprof.ingest import find_sources, gather, read_report
from clusterprof.ingest.assembler import RankUnknown
from clusterprof.ingest.kineto.json_stream import NotAList, pieces
from clusterprof.ingest.opening import VARIABLE, opened
from clusterprof.ingest.sources import SUFFIXES


def streamed(text: bytes, piece: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Any]:
    from clusterprof.ingest.kineto import json_stream

    monkeypatch.setattr(json_stream, "_PIECE", piece)
    rest: dict[str, Any] = {}
    anything = msgspec.json.Decoder(list[Any])
    found = [e for part in pieces(io.BytesIO(text), "traceEvents", rest, anything) for e in part]
    return found, rest


ODD_TEXT = ['a "quoted" }, {name', "back\\", '\\"', "},\n  {", "[[[", "ä€𝄞", "]}", ""]


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1, 2])
def test_a_list_in_pieces_of_any_size_is_the_same_list(
    piece: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [
        {"name": name, "args": {"stack": [{"at": name}, {"at": 2}], "n": [[], [1, 2]]}, "v": k}
        for k, name in enumerate(ODD_TEXT * 3)
    ]
    whole = {"traceEventsNot": [1], "before": {"traceEvents": [7]}, "traceEvents": events}
    for document in ({**whole, "after": {"a": [1]}}, whole, {"traceEvents": []}):
        for ascii_only in (True, False):
            text = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
            found, rest = streamed(text, piece, monkeypatch)
            assert {**rest, "traceEvents": found} == document
    found, rest = streamed(json.dumps(events, indent=indent).encode(), piece, monkeypatch)
    assert (found, rest) == (events, {})


@pytest.mark.parametrize("piece", [5, 1 << 20])
def test_a_list_that_is_cut_short_is_never_taken_for_a_whole_one(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"a": 1, "traceEvents": [{"x": [1, 2]}, {"y": "}"}], "b": 2}).encode()
    for length in range(1, len(text)):
        with pytest.raises(ValueError):
            streamed(text[:length], piece, monkeypatch)
    with pytest.raises(ValueError):
        streamed(text + b"{", piece, monkeypatch)


def test_json_without_the_list_says_which_keys_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotAList) as caught:
        streamed(b'{"schema": "1", "inner": {"traceEvents": [1]}, "nodes": []}', 9, monkeypatch)
    assert caught.value.keys == ("schema", "inner", "nodes")


# --- limits


def test_a_bomb_of_gzip_or_xz_is_named_with_the_limit_and_how_to_raise_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = b'{"ph": "X", "cat": "none", "name": "%s", "ts": 1, "tid": 1},' % (b"x" * 100_000)
    blank = b'{"traceEvents": [' + event * 700
    smaller = lzma.compress(blank, preset=0)
    for name, packed in (
        ("b.json.gz", gzip.compress(blank, 1)),
        ("b.json.xz", smaller),
        ("b.sqlite.xz", smaller),
    ):
        path = tmp_path / name
        path.write_bytes(packed)
        with pytest.raises(ReportError, match="holds more than") as caught:
            read_report(path, rank=0)
        assert VARIABLE in caught.value.details[-1]
    monkeypatch.setenv(VARIABLE, "300M")
    with opened(tmp_path / "b.json.gz") as file:
        assert sum(len(part) for part in iter(lambda: file.read(1 << 20), b"")) == len(blank)
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(UsageError, match=f"{VARIABLE}='much' is no size"):
        opened(tmp_path / "b.json.gz")


def test_a_bomb_is_a_missing_report_beside_the_others(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json", content(0))
    (tmp_path / "rank1.sqlite.xz").write_bytes(lzma.compress(b" " * (70 << 20), preset=0))
    found = gather([tmp_path])
    assert [tables.rank for tables in found.ranks] == [0]
    (gap,) = found.missing
    assert gap["source"] == str(tmp_path / "rank1.sqlite.xz")
    assert "67.1 MB" in gap["reason"]


PROGRAMS = {
    "a generated column": "ALTER TABLE NVTX_EVENTS ADD COLUMN b TEXT AS (hex(zeroblob(500000)))",
    "a long default": f"ALTER TABLE NVTX_EVENTS ADD COLUMN b TEXT DEFAULT '{'x' * 100_000}'",
    "a trigger": (
        "CREATE TRIGGER t AFTER UPDATE ON StringIds BEGIN DELETE FROM StringIds; END"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_export_that_computes_what_it_holds_is_refused(
    tmp_path: Path, recordings: Path, name: str
) -> None:
    path = sqlite(tmp_path / "r.sqlite", recordings, PROGRAMS[name])
    # the table, and its trigger or column
    named = r"\bStringIds\b.* t\b" if name == "a trigger" else r"\bNVTX_EVENTS\b.* b\b"
    with pytest.raises(ReportError, match=named) as caught:
        read_report(path)
    assert str(path) in str(caught.value)


def test_a_view_in_place_of_a_table_is_not_read(tmp_path: Path, recordings: Path) -> None:
    path = sqlite(tmp_path / "r.sqlite", recordings, "DROP TABLE OSRT_API")
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE VIEW OSRT_API AS WITH RECURSIVE"
            " n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            ' SELECT i AS start, i + 1 AS "end", 0 AS globalTid, 1 AS nameId FROM n'
        )
        database.commit()
    kinds = set(read_report(path).host_calls["kind"].to_pylist())
    assert "os" not in kinds
    assert "cuda" in kinds


# --- kinds


def test_a_trace_is_found_wherever_its_events_begin_and_however_it_is_written(
    tmp_path: Path,
) -> None:
    found = content(0)
    text = json.dumps({"notes": "x" * 10_000, **found})
    written = {
        "late.json": text.encode(),
        "wide.json": text.encode("utf-16"),
        "wide-be.json": text.encode("utf-16-be"),
        "marked.json": text.encode("utf-8-sig"),
        "packed.json.xz": lzma.compress(text.encode()),
    }
    for name, packed in written.items():
        (tmp_path / name).write_bytes(packed)
    assert [source.path.name for source in find_sources([tmp_path])] == sorted(written)
    kernels = {read_report(tmp_path / name).activity.num_rows for name in written}
    assert kernels == {4}


def test_a_list_at_the_top_is_a_trace_without_a_rank(tmp_path: Path) -> None:
    path = trace(tmp_path / "list.json", content(0)["traceEvents"])  # type: ignore[arg-type]
    assert [source.path for source in find_sources([tmp_path])] == [path]
    assert read_report(path, rank=0).steps.num_rows == 4


def test_settings_beside_the_reports_are_none(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json", content(0))
    (tmp_path / "config.json").write_text('{"layers": 12}')
    (tmp_path / "results.json").write_text('{"schema_version": 1, "findings": []}')
    assert [source.path.name for source in find_sources([tmp_path])] == ["rank0.json"]


def of_2020() -> list[dict[str, Any]]:
    """Kineto's first form: a list, capital categories, threads as texts."""
    events = []
    for event in content(0)["traceEvents"]:
        event["cat"] = {
            "kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator",
        }[event["cat"]]  # fmt: skip
        event["tid"] = "stream 7" if event["cat"] == "Kernel" else "4093687616"
        event["ts"] += 1_606_910_596_297_023
        events.append(event)
    return events


def test_kineto_of_2020_is_read_as_today_s(tmp_path: Path) -> None:
    path = trace(tmp_path / "old.json", of_2020())  # type: ignore[arg-type]
    old = read_report(path, rank=0)
    now = read_report(trace(tmp_path / "now.json", content(0)), rank=0)
    assert old.info.begin_ns == 1_606_910_596_297_023_000
    for column in ("start_ns", "end_ns", "launch_start_ns", "launch_end_ns"):
        shifted = now.activity[column].to_numpy() - now.info.begin_ns + old.info.begin_ns
        assert np.array_equal(old.activity[column].to_numpy(), shifted)
    assert old.steps["step"].to_pylist() == now.steps["step"].to_pylist()


def test_the_only_report_that_communicates_with_no_one_is_of_rank_0(tmp_path: Path) -> None:
    path = trace(tmp_path / "old.json", of_2020())  # type: ignore[arg-type]
    (tables,) = gather([path]).ranks
    assert tables.rank == 0
    assert len(tables.warnings) == 1 + len(read_report(path, rank=0).warnings)
    events = of_2020()
    for event in events:
        event["name"] = event["name"].replace("gemm", "ncclKernel_AllReduce_RING_LL_Sum_float")
    with pytest.raises(RankUnknown):
        gather([trace(path, events)])  # type: ignore[arg-type]
    trace(path, of_2020())  # type: ignore[arg-type]
    trace(tmp_path / "rank0.json", content(0))
    (missing,) = gather([tmp_path]).missing
    assert (missing["rank"], missing["source"]) == (None, str(path))


def chrome(process: str, **event: Any) -> dict[str, Any]:
    named = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": process}}
    return {"traceEvents": [named, {"ph": "X", "name": "f", "ts": 1, "dur": 2, "tid": 1, **event}]}


FOREIGN: dict[str, tuple[Any, str]] = {
    "Chakra": ({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}, "execution trace"),
    "rocprofv3": ({"rocprofiler-sdk-tool": [{}]}, "rocprofv3"),
    "rocprof": (chrome("CPU HIP API"), "a trace of rocprof"),
    "XLA": (chrome("/device:GPU:0"), "an XLA trace"),
    "msprof": (chrome("Ascend Hardware"), "an Ascend profile"),
    "another tool": (chrome("main", cat="js"), "its categories are js"),
    "MTIA": (chrome("python", cat="mtia_ccp_events"), "1 events of MTIA"),
    "Ascend": (chrome("python", cat="async_npu"), "Ascend"),
    "Gaudi": (chrome("python", cat="hpu_op"), "Gaudi"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_json_of_another_tool_is_named_for_what_it_is(tmp_path: Path, name: str) -> None:
    found, expected = FOREIGN[name]
    trace(tmp_path / "rank0.json", content(0))
    path = trace(tmp_path / "rank1.json", found)
    result = gather([tmp_path])
    (lost,) = result.missing
    assert expected in lost["reason"]
    assert lost["source"] == str(path)
    with pytest.raises(ReportError) as caught:
        read_report(path, rank=1)
    assert caught.value.details


def test_a_rank_of_another_accelerator_is_not_taken_for_a_cpu_only_one(tmp_path: Path) -> None:
    found = content(1)
    events = [event for event in found["traceEvents"] if event["cat"] != "kernel"]
    events += [span("cpu_op", "aten::mm", 0, 50), span("mtia_ccp_events", "matmul", 5, 40)]
    path = trace(tmp_path / "r.json", {**found, "traceEvents": events})
    with pytest.raises(ReportError, match="MTIA") as caught:
        read_report(path)
    assert str(path) in str(caught.value)
    events.append(span("kernel", "gemm", 0, 50, device=0, stream=7))
    path = trace(tmp_path / "r.json", {**found, "traceEvents": events})
    assert any(warning.startswith("1 events of MTIA") for warning in read_report(path).warnings)


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"run/{path.stem}", "x")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"rank0{suffix}.zip": (archive, "is an archive of reports") for suffix in SUFFIXES},
    "host.xplane.pb": (lambda path: path.write_bytes(b"\n\0"), "an XLA profile"),
    "kernel.ncu-rep": (lambda path: path.write_bytes(b"NVR"), "Nsight Compute"),
    "trace.pftrace": (lambda path: path.write_bytes(b"\n\0"), "Perfetto"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_tool_beside_reports_is_named(tmp_path: Path, name: str) -> None:
    write, expected = FILES[name]
    trace(tmp_path / "rank0.json", content(0))
    write(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as file:
        file.writestr("train.py", "pass")
    (lost,) = gather([tmp_path]).missing
    assert expected in lost["reason"]
