"""What no profiler writes: it costs the rank whose file it is, by name, and no other."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lab.tiers import long_but
from seeds import content, span, sqlite, trace

from clusterprof import clock_probe, run_directory
from clusterprof.agent.contracts import files, states
from clusterprof.align.clock.measured import parsed
from clusterprof.cli import collect, merge, status
from clusterprof.errors import ClusterprofError, ReportError, RunDirectoryError
from clusterprof.ingest import Gathered, gather, read_report
from clusterprof.ingest.rank_steps import read_log
from clusterprof.study import study

NESTED = "[" * 200_000


def beside_a_good_one(tmp_path: Path, write: Callable[[Path], object]) -> Gathered:
    """Gather a good rank 0 and a bad rank; the merge must come to its end."""
    trace(tmp_path / "rank0.json", content(0))
    write(tmp_path)
    found = gather([tmp_path])
    made = study(found.ranks, missing=found.missing, warnings=found.warnings)
    assert 0 in [each["rank"] for each in made.results["ranks"]]
    return found


@pytest.mark.parametrize(
    "rank", ["zero", 0.5, -1, 2**40, True, [1], {"rank": 1}, 1e300, 10**30], ids=repr
)
def test_a_trace_s_rank_that_is_none_costs_that_trace_alone(tmp_path: Path, rank: Any) -> None:
    found = beside_a_good_one(tmp_path, lambda at: trace(at / "rank1.json", content(rank)))
    assert [tables.rank for tables in found.ranks] == [0]
    (missing,) = found.missing
    assert missing["source"] == str(tmp_path / "rank1.json")


def test_a_rank_that_is_none_can_be_told(tmp_path: Path) -> None:
    path = trace(tmp_path / "odd.json", content("zero"))
    tables = read_report(path, rank=1)
    assert tables.rank == 1
    assert "'zero'" in tables.warnings[-1]


@pytest.mark.parametrize("size", [[2], "2", -2, 0, 2**40, 2.5], ids=repr)
def test_a_world_size_that_is_none_is_left_out_with_a_warning(tmp_path: Path, size: Any) -> None:
    found = beside_a_good_one(
        tmp_path, lambda at: trace(at / "rank1.json", content(1, world_size=size))
    )
    assert [tables.info.world_size for tables in found.ranks] == [2, None]
    shown = repr(size)
    assert any(shown in each for each in found.ranks[1].warnings)


ODD_EVENTS: dict[str, dict[str, Any]] = {
    "a device beyond any machine": {"device": 2**31 - 1},
    "a negative device": {"device": -5},
    "a device of 70 bits": {"device": 2**70},
    "a text for a device": {"device": "zero"},
    "a stream of 70 bits": {"stream": 2**70},
    "a correlation of 70 bits": {"correlation": 2**70},
    "arguments that are a list": {"args": [1]},
    "a name that is a number": {"name": 5},
    "a name that is half a character": {"name": "\ud800"},
    "a thread of 70 bits": {"tid": 2**70},
    "a time of a century ago": {"ts": -3e15},
    "a length of a century": {"dur": 3e15},
    "a size beyond any memory": {"bytes": 2**62},
    "a message beyond any memory": {
        "name": "ncclDevKernel_AllReduce", "Collective name": "allreduce", "dtype": "Float",
        "In msg nelems": 2**61, "Out msg nelems": 2**61, "Group size": 2,
    },
    "a message that is a text": {
        "name": "ncclDevKernel_AllReduce", "Collective name": "allreduce", "dtype": "Float",
        "In msg nelems": "many", "Group size": 2,
    },
    "a group that is a list": {
        "name": "ncclDevKernel_AllReduce", "Collective name": "allreduce", "Group size": [2],
    },
    "a peer of 40 bits": {
        "name": "ncclDevKernel_SendRecv", "Collective name": "send", "Dst Rank": 2**40,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", long_but([*ODD_EVENTS][::2], ODD_EVENTS))
def test_an_event_that_is_none_costs_its_own_rank_at_most(tmp_path: Path, name: str) -> None:
    odd = content(1)
    kernel = odd["traceEvents"][2]
    for key, value in ODD_EVENTS[name].items():
        (kernel if key in kernel else kernel["args"])[key] = value
    beside_a_good_one(tmp_path, lambda at: trace(at / "rank1.json", odd))


@pytest.mark.parametrize("ranks", ["all", [[0]], [2**40], [-1, "x"], {"a": 1}, [1.5]], ids=repr)
def test_process_groups_that_are_none_cost_their_own_rank_at_most(
    tmp_path: Path, ranks: Any
) -> None:
    odd = content(1, pg_config=[{"pg_name": "0", "ranks": ranks}])
    odd["traceEvents"][2]["name"] = "ncclDevKernel_AllReduce"
    odd["traceEvents"][2]["args"]["Process Group Name"] = "0"
    beside_a_good_one(tmp_path, lambda at: trace(at / "rank1.json", odd))


KERNEL = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {} WHERE rowid = 5"
ODD_CELLS = {
    "a kernel that starts in the year 1677": KERNEL.format('start = -9223372036854775807 - 1'),
    "a kernel that ends in the year 2262": KERNEL.format('"end" = 9223372036854775807'),
    "a kernel that starts with a word": KERNEL.format("start = 'soon'"),
    "a kernel without a start": KERNEL.format("start = x''"),
    "a device beyond any machine": KERNEL.format("deviceId = 9223372036854775807"),
    "a device that is a fraction": KERNEL.format("deviceId = 0.5"),
    "a name that is no number": KERNEL.format("shortName = 'gemm'"),
    "a range that begins with a word": "UPDATE NVTX_EVENTS SET start = 'soon' WHERE rowid = 50",
    "a range of a century": "UPDATE NVTX_EVENTS SET start = -9223372036854775807",
    "a thread of 63 bits": "UPDATE NVTX_EVENTS SET globalTid = 9223372036854775807",
    "a session that starts nowhere": "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = 'now'",
    "a session that starts in 2262": (
        "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = 9223372036854775807"
    ),
    "a rank beyond 32 bits": (
        "UPDATE META_DATA_CAPTURE SET value = 'RANK=\"2147483648\"' WHERE value LIKE 'RANK=%'"
    ),
    "a string that is bytes": "UPDATE StringIds SET value = x'ff00fe' WHERE rowid % 7 = 0",
    "a string of a number": "UPDATE StringIds SET value = 1e300 WHERE rowid % 7 = 0",
}  # fmt: skip


@pytest.mark.parametrize("name", long_but([*ODD_CELLS][::3], ODD_CELLS))
def test_a_cell_that_is_none_costs_its_own_rank_at_most(
    tmp_path: Path, recordings: Path, name: str
) -> None:
    bad = sqlite(tmp_path / "bad.sqlite", recordings, ODD_CELLS[name])
    good = recordings / "nsys-2025.3" / "ddp" / "rank0.sqlite.xz"
    found = gather([good, bad])
    assert found.ranks[0].rank == 0
    results = study(found.ranks, missing=found.missing, warnings=found.warnings).results
    assert {each["rank"] for each in results["ranks"]} <= {0, 1}
    assert all(str(bad) in lost["reason"] for lost in found.missing)


def test_a_range_whose_name_is_latin_1_is_read_with_all_others(
    tmp_path: Path, recordings: Path
) -> None:
    sql = "UPDATE NVTX_EVENTS SET text = CAST(? AS TEXT), textId = NULL WHERE text = 'forward'"
    path = sqlite(tmp_path / "r.sqlite", recordings, sql, "Vorwärts".encode("latin-1"))
    tables = read_report(path)
    names = tables.host_calls["name"].unique().to_pylist()
    assert "Vorw\ufffdrts" in names
    whole = read_report(recordings / "nsys-2025.3" / "ddp" / "rank1.sqlite.xz")
    assert tables.host_calls.num_rows == whole.host_calls.num_rows
    assert tables.steps.equals(whole.steps)


def test_diagnostics_by_the_thousand_are_named_once_and_counted(
    tmp_path: Path, recordings: Path
) -> None:
    sql = (
        "INSERT INTO DIAGNOSTIC_EVENT (timestamp, timestampType, source, severity, text, globalPid)"
        " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)"
        " SELECT i, 1, 1, 3, 'failure ' || i, 1 FROM n"
    )
    tables = read_report(sqlite(tmp_path / "r.sqlite", recordings, sql))
    assert len(tables.warnings) <= 51
    assert len(set(tables.warnings)) == len(tables.warnings) == 51
    assert re.search(r"199[0-9]{2}", tables.warnings[-1])


@pytest.mark.parametrize("steps", long_but([1000], [8000]))
def test_thousands_of_steps_are_studied(tmp_path: Path, steps: int) -> None:
    for rank in range(2):
        found = content(rank)
        found["traceEvents"] = [
            each
            for step in range(steps)
            for each in (
                span("user_annotation", f"ProfilerStep#{step}", 100 * step, 90),
                span("kernel", "gemm", 100 * step + 3, 50, device=0, stream=7),
            )
        ]
        trace(tmp_path / f"rank{rank}.json", found)
    results = study(gather([tmp_path]).ranks).results
    assert len(results["steps"]) == steps


def test_debug_shows_where_the_reader_failed_and_the_merge_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = content(1)
    odd["traceEvents"][2]["args"]["device"] = 2**70
    with caplog.at_level(logging.DEBUG, "clusterprof"):
        beside_a_good_one(tmp_path, lambda at: trace(at / "rank1.json", odd))
    assert "Traceback" in caplog.text


# --- the small files of a run


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        '{"a":' * 200_000,
        "[NaN]",
        '["\\ud800"]',
        "[" + "9" * 5000 + "]",
        "",
        "[1",
        "\xff",
    ],
    ids=lambda text: text[:9],
)
def test_json_that_is_none_is_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError):
        files.load(str(path))


def test_json_that_never_ends_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST", 1 << 20)
    path = tmp_path / "file.json"
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(OSError, match="larger than 1 MB"):
        files.load(str(path))


def test_a_file_name_s_odd_bytes_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"argv": ["train\udcff.py"]}))
    assert files.load(str(path)) == {"argv": ["train\udcff.py"]}


def a_run(tmp_path: Path, **manifest: Any) -> run_directory.Window:
    run = run_directory.create(tmp_path / "run")
    written: dict[str, Any] = {
        "schema_version": 1, "window": [1, 5], "world_size": 2, "launcher": "torchrun",
        "selection": {"text": "all", "kind": "all", "ranks": [], "pp": 1, "world_size": None},
        "profiler": {"name": "torch", "version": "2", "path": None},
        "began": "2026-01-02T03:04:05.000+00:00", "ended": None, "exit_status": None,
    }  # fmt: skip
    run.directory.write_manifest({**written, **manifest})
    for rank in range(2):
        folder = run.rank(rank)
        folder.mkdir()
        trace(folder / "trace.json", content(rank))
        (folder / "trace.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))
        (folder / "trace.json").unlink()
        states.advance(str(folder), "captured", chosen=True)
    return run


@pytest.mark.parametrize(
    "file", long_but(["state.json", "clock.json"], ["beacons.json", "probe.json"])
)
@pytest.mark.parametrize(
    "text", [NESTED, "[]", "7", '{"readings": 5, "bounds": 5, "history": 7, "state": []}', "\0"],
    ids=lambda text: text[:9],
)  # fmt: skip
def test_a_rank_s_file_that_is_none_does_not_stop_the_merge_of_the_run(
    tmp_path: Path, file: str, text: str
) -> None:
    run = a_run(tmp_path)
    (run.rank(1) / file).write_text(text)
    assert collect.main("collect", [str(run.path)], None) == 0
    results = json.loads((run.merged / "results.json").read_text())
    assert 0 in [each["rank"] for each in results["ranks"]]
    assert status.main("status", [str(run.path), "--json"], None) == 0
    assert set(clock_probe.of_run(run, [0, 1])) == {0, 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"window": [1]},
        {"window": "all"},
        {"window": [1, 10**30]},
        {"selection": {"text": "all"}},
        {"selection": []},
        {"world_size": 10**12},
        {"world_size": "two"},
        {"attempt": "one"},
        {"began": 5},
        {"began": "yesterday"},
        {"profiler": "nsys"},
        {"hosts": [5]},
        {"hosts": [{"left": "/"}]},
    ],
    ids=repr,
)
def test_a_run_json_that_is_none_is_said_to_be(tmp_path: Path, changed: dict[str, Any]) -> None:
    run = a_run(tmp_path, **changed)
    for verb in (collect, merge, status):
        with pytest.raises(ClusterprofError, match=r"run\.json is damaged"):
            verb.main(verb.__name__.rpartition(".")[2], [str(run.path)], None)


def test_marks_that_are_none_say_nothing_of_a_clock() -> None:
    whole = {"wall_ns": 10**18, "monotonic_ns": 5, "gap_ns": 1}
    mark = {"name": "clusterprof:clock:1", "before_ns": 1, "after_ns": 2}
    odd = [{**mark, "name": []}, {**mark, "before_ns": 2**70}, {**mark, "after_ns": True}, 7]
    found = parsed({"readings": [{**whole, "marks": [*odd, mark]}, {**whole, "gap_ns": 2**62}]})
    assert [[asdict(each) for each in reading.marks] for reading in found.readings] == [[mark]]


def test_a_run_json_nested_without_end_is_said_to_be(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.directory.manifest.write_text(NESTED)
    with pytest.raises(RunDirectoryError, match=r"run\.json cannot be read"):
        run_directory.opened(run.path)


def test_a_measurement_of_clocks_nested_without_end_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(NESTED)
    with pytest.raises(ReportError, match=str(path)):
        clock_probe.read(path)


@pytest.mark.parametrize("number", ["9" * 23, "-" + "9" * 23, "9" * 5000])
def test_a_number_of_23_digits_in_a_step_log_is_named(tmp_path: Path, number: str) -> None:
    log = tmp_path / "steps.csv"
    log.write_text(f"step,begin_ns,end_ns\n1,{number},{number}\n2,3,4\n")
    with pytest.raises(ClusterprofError, match="line 2"):
        read_log(log)
