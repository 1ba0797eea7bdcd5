"""The events that Arrow reads of a trace are those read one by one, whatever its layout."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab.tiers import long_but

from clusterprof.errors import ReportError
from clusterprof.ingest.kineto import event_columns, json_stream, trace_events

TOP = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}}
REDUCED = {"Collective name": "allreduce", "In msg nelems": 64, "Seq": 3, "Process Group Name": "0"}
#: one event of each kind, and what differs between events of one
KINDS: tuple[dict[str, Any], ...] = (
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4, "tid": 9, "ts": 17.25, "dur": 3.5,
     "args": {"External id": 12, "Record function id": 0, "Input Dims": [[8, 64], []]}},
    {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 4, "tid": 9, "ts": 99.125,
     "dur": 3.5, "args": REDUCED},
    {"ph": "X", "cat": "kernel", "name": "void gemm_16x16<float, 4>(int)", "pid": 0, "tid": 7,
     "ts": 4343325717404.111, "dur": 12.864,
     "args": {"device": 0, "stream": 7, "correlation": 12971, "blocks per SM": 0.062500,
              "grid": [8192, 1, 1]}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7,
     "ts": 31, "dur": 2, "args": {"device": 0, "stream": 7, "correlation": 31, "bytes": 4096}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4, "tid": 9, "ts": 30.5,
     "dur": 2.125, "args": {"cbid": 211, "correlation": 12971}},
    {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 4, "tid": 11,
     "ts": 50.5, "dur": 20, "args": {"Input type": ["float"]}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 4, "tid": 9,
     "ts": 10.5, "dur": 200.25},
    {"ph": "X", "cat": "python_function", "name": "train.py(42): main", "pid": 4, "tid": 9,
     "ts": 11, "dur": 180.5, "args": {"Python parent id": None, "Python id": 1}},
    {"ph": "X", "cat": "python_function", "name": "<built-in method wait of Work object at 0x7f6b>",
     "pid": 4, "tid": 9, "ts": 12, "dur": 100, "args": {"Python parent id": 1, "Python id": 22}},
    {"ph": "s", "id": 12971, "pid": 4, "tid": 9, "ts": 30.5, "cat": "ac2g", "name": "ac2g"},
    {"ph": "X", "cat": "Trace", "name": "Profiler (0)", "pid": "Spans", "tid": "Profiler", "ts": 1},
    {"ph": "M", "name": "process_name", "pid": 4, "tid": 0, "ts": 1, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "pid": 4, "tid": 9, "ts": 1, "args": {"name": "thread 9"}},
    {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 328299520.278},
)  # fmt: skip


def document(random_: random.Random, count: int = 40) -> dict[str, Any]:
    """A trace of so many events of all kinds, their times and ids drawn."""
    events = []
    for number in range(count):
        event = dict(KINDS[number % len(KINDS) if number < len(KINDS) else random_.randrange(9)])
        event["ts"] = round(random_.uniform(0, 10 ** random_.randrange(2, 13)), 3)
        if "dur" in event:
            event["dur"] = random_.choice((0, 7, 20, 99.5, 1234.125))
        events.append(event)
    return TOP | {"traceEvents": events, "traceName": "x"}


def as_kineto(content: dict[str, Any]) -> str:
    """The text of a trace, an event in a few lines."""
    events = ",\n".join("  " + _lines(each) for each in content["traceEvents"])
    before = json.dumps(TOP)[:-1]
    return f'{before},\n  "traceEvents": [\n{events}\n  ],\n  "traceName": "x"\n}}\n'


def _lines(event: dict[str, Any]) -> str:
    members = [f'"{key}": {json.dumps(value)}' for key, value in event.items()]
    return "{\n    " + ",\n    ".join(members) + "\n  }"


LAYOUTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kineto": as_kineto,
    "one line": json.dumps,
    "compact": lambda content: json.dumps(content, separators=(",", ":")),
    "indented": lambda content: json.dumps(content, indent=1),
}

#: what is put into a text, or in place of some of it
STRANGE = (
    b'"', b"\\", b"\\n", b"\\u0041", b"\\ud800", b"0", b"01", b"-", b"-0", b".5", b"1.", b"1e3",
    b"1e999", b"9" * 400, b"18446744073709551616", b"Infinity", b"NaN", b"null", b"true", b"{}",
    b"[]", b"{", b"}", b"[", b"]", b",", b" ", b"\x0b", b"\0", b"\xff", b"\xc3\xa9",
    b"\xed\xa0\x80", b"},\n  {", b"}, {", b'"ts": 7, ', b'"dur": null, ', b'"tid": 8, ',
    b'"tid": "stream 7", ',
    b'"correlation": 7, ', b'"correlation": null, ', b'"correlation": 1.5, ', b'"device": -1, ',
    b'"name": "other", ', b'"name": 7, ', b'"args": {}, ', b'"args": null, ', b'"ph": "X", ',
    b'"cat": "kernel", ', b'"cat": "Kernel", ', b'"cat": "k1", ', b'"Collective name": null, ',
    b'"Python id": 5, ', b'"x": {"ts": 1, "stream": 2}, ', b'"x": [{"a": 1}, {"a": 2}], ',
)  # fmt: skip


def spoilt(text: bytes, random_: random.Random) -> bytes:
    """A text with one to three changes."""
    for _ in range(random_.choice((1, 1, 2, 3))):
        at = random_.randrange(len(text))
        kind = random_.randrange(8)
        if kind == 0:
            text = text[:at] + bytes([random_.randrange(256)]) + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[at + random_.randrange(1, 40) :]
        elif kind == 2 and random_.randrange(4) == 0:
            text = text[: max(at, 1)]
        elif kind < 5:  # where a value begins, or a member
            at = max(text.find(b'"' if kind == 3 else b": ", at), 0) + (0 if kind == 3 else 2)
            text = text[:at] + random_.choice(STRANGE) + text[at:]
        elif kind == 5:  # in place of a number
            digits = next((n for n in range(at, len(text)) if text[n : n + 1].isdigit()), at)
            text = text[:digits] + random_.choice(STRANGE) + text[digits + 1 :]
        else:
            text = text[:at] + random_.choice(STRANGE) + text[at:]
    return text


def read(path: Path) -> Any:
    """All that is read of a trace, comparable; what is said where it cannot be read."""
    try:
        trace = trace_events.read(path)
    except ReportError as error:
        return str(error)
    spans = {
        category: {
            "names": [trace.names[code] for code in spans.column("name")],
            "args": repr(spans.args),
            **{name: spans.column(name).tobytes() for name in spans.arrays if name != "name"},
        }
        for category, spans in trace.spans.items()
    }
    others = (trace.meta, trace.threads, trace.functions, trace.unread, trace.processes)
    return spans, trace.names, repr(others)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Read as if Arrow made no columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_columns, "parsed", lambda _: None)
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_of_any_layout_is_read_by_arrow(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    content = document(random.Random(1))
    numbered = [each for each in content["traceEvents"] if not isinstance(each.get("tid"), str)]
    path.write_text(LAYOUTS[layout](content | {"traceEvents": numbered}))
    by_columns = read(path)
    with one_by_one():
        assert read(path) == by_columns
    monkeypatch.setattr(trace_events, "elements", lambda _: pytest.fail("read one by one"))
    assert read(path) == by_columns


@pytest.mark.parametrize("every", long_but([3], [1]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_spoilt_or_strange_reads_the_same_one_by_one(
    layout: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = whole = 0
    parsed = event_columns.parsed
    monkeypatch.setattr(json_stream, "_PIECE", 1500)
    path = tmp_path / "trace.json"
    for seed in range(0, 60, every):
        random_ = random.Random(seed)
        text = LAYOUTS[layout](document(random_)).encode()
        path.write_bytes(spoilt(text, random_))
        found = []

        def counted(text: bytes, found: list[bool] = found) -> Any:
            columns = parsed(text)
            found.append(columns is not None)
            return columns

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(event_columns, "parsed", counted)
            by_columns = read(path)
        with one_by_one():
            assert read(path) == by_columns, seed
        used += any(found)
        whole += not isinstance(by_columns, str)
    assert used > 20 // every
    assert whole > 1


def test_categories_that_are_not_read_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    categories = [f"kind {letter}" for letter in "hcaebgdf"]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [KINDS[0] | {"cat": each} for each in categories]}))
    assert list(trace_events.read(path).unread) == categories
    with one_by_one():
        assert list(trace_events.read(path).unread) == categories
