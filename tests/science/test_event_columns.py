"""Columns that Arrow makes of a trace's events are those of the events one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.ingest import read_report
from clusterprof.ingest.kineto import event_columns
from clusterprof.tables import SCHEMAS

EVENT = {"ph": "X", "cat": "cpu_op", "name": "a", "tid": 1, "ts": 1.5, "dur": 2, "args": {}}


def text(*events: object) -> bytes:
    return ",".join(map(json.dumps, events)).encode()


@pytest.mark.parametrize("trace", ["gloo/rank0.json.gz", "pipeline/rank0.json.xz"])
def test_columns_and_single_events_give_the_same_tables(
    trace: str, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_columns = read_report(recordings / "kineto" / trace)
    monkeypatch.setattr(event_columns, "parsed", lambda _: None)
    one_by_one = read_report(recordings / "kineto" / trace)
    assert by_columns.info == one_by_one.info
    for name in SCHEMAS:
        assert getattr(by_columns, name).to_pylist() == getattr(one_by_one, name).to_pylist()


def test_what_complete_events_have_is_kept() -> None:
    collective = EVENT | {"name": "b", "args": {"Collective name": "allreduce", "more": [{"x": 1}]}}
    found = event_columns.parsed(text(EVENT, EVENT | {"ph": "f"}, collective))
    assert found is not None
    assert [found.names[each] for each in found.name] == ["a", "b"]
    assert found.ts.tolist() == [1.5, 1.5]
    assert found.numbers["thread"].tolist() == [1, 1]
    assert found.numbers["correlation"].tolist() == [-1, -1]
    assert found.whole == {1: collective}


def test_threads_and_processes_are_named() -> None:
    thread = {"ph": "M", "name": "thread_name", "tid": 7, "args": {"name": "main"}}
    process = {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": "python"}}
    found = event_columns.parsed(text(thread, EVENT, process))
    assert found is not None
    assert found.threads == {7: "main"}
    assert found.processes == ["python"]


@pytest.mark.parametrize(
    "odd",
    [
        text(EVENT) + b'], "other": [' + text(EVENT),
        text(EVENT) + b"], [" + text(EVENT),
        text(EVENT) + b']]} {"lists": [[' + text(EVENT),
        text(EVENT)[:-1],
        text(EVENT) + b",",
        text(EVENT | {"tid": "stream 7"}),
        text(EVENT | {"tid": None}),
        text({"ph": "X", "cat": "cpu_op", "tid": 1, "ts": 1}),
        text(EVENT | {"args": {"Collective name": 7}}),
        text(EVENT | {"args": {"correlation": 1.5}}),
        text(EVENT | {"name": "other", "args": {"text": "gloo:"}}, EVENT | {"name": "gloo:x"}),
        text(None),
        text([EVENT]),
        b'{"ph": "X", "cat": "cpu_op", "name": "\xff", "tid": 1, "ts": 1}',
        b'{"ph": "X", "ph": "f", "cat": "cpu_op", "name": "a", "tid": 1, "ts": 1}',
    ],
)
def test_what_is_odd_is_left_to_a_closer_look(odd: bytes) -> None:
    assert event_columns.parsed(odd) is None
