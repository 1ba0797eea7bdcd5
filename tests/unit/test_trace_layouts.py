"""What is read of a trace is what its JSON says, whatever its layout and what is odd in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lab.tiers import long_but

from clusterprof.errors import ReportError
from clusterprof.ingest.kineto import json_stream, trace_events

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
            "args": {
                row: json.loads(msgspec.json.encode(args)) for row, args in spans.args.items()
            },
            **{name: spans.column(name).tobytes() for name in spans.arrays if name != "name"},
        }
        for category, spans in trace.spans.items()
    }
    others = (trace.meta, trace.threads, trace.functions, trace.unread, trace.processes)
    # a name's code depends on which category has it first in a piece
    return spans, sorted(trace.names), repr(others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_of_any_layout_reads_as_its_json(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    content = document(random.Random(1))
    path.write_text(LAYOUTS[layout](content))
    trace = trace_events.read(path)
    for category, numbers in trace_events.CATEGORIES.items():
        wanted = [e for e in content["traceEvents"] if e.get("cat") == category]
        if category == "python_function":
            wanted = [e for e in wanted if e["dur"] >= 20]
        spans = trace.spans[category]
        for name in ("ts", "dur"):
            assert spans.column(name).tolist() == [e[name] for e in wanted]
        assert spans.column("thread").tolist() == [e["tid"] for e in wanted]
        for name in numbers:
            expected = [e.get("args", {}).get(name, -1) for e in wanted]
            assert spans.column(name).tolist() == expected
        if category != "python_function":
            names = [trace.names[code] for code in spans.column("name").tolist()]
            assert names == [e["name"] for e in wanted]
    assert trace.threads == {9: "thread 9"}
    assert trace.processes == {"python"}


@pytest.mark.parametrize("every", long_but([3], [1]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_spoilt_or_strange_reads_the_same_in_pieces(
    layout: str, every: int, tmp_path: Path
) -> None:
    refused = whole = 0
    path = tmp_path / "trace.json"
    for seed in range(0, 60, every):
        random_ = random.Random(seed)
        text = LAYOUTS[layout](document(random_)).encode()
        path.write_bytes(spoilt(text, random_))
        at_once = read(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_stream, "_PIECE", 1500)
            in_pieces = read(path)
        if isinstance(at_once, str):
            assert isinstance(in_pieces, str), seed
        else:
            assert in_pieces == at_once, seed
        refused += isinstance(at_once, str)
        whole += not isinstance(at_once, str)
    assert refused > 1
    assert whole > 1


EVENT = {"ph": "X", "cat": "kernel", "name": "a", "tid": 1, "ts": 1.5, "dur": 2, "args": {}}


def _read(tmp_path: Path, *events: bytes) -> trace_events.Trace:
    path = tmp_path / "trace.json"
    path.write_bytes(b'{"traceEvents": [' + b",".join(events) + b"]}")
    return trace_events.read(path)


def _event(**changes: Any) -> bytes:
    return json.dumps(EVENT | changes).encode()


def test_what_a_collective_says_of_itself_is_kept(tmp_path: Path) -> None:
    arguments = {"Collective name": "allreduce", "Seq": "7", "more": [{"x": 1}]}
    trace = _read(tmp_path, _event(), _event(ph="f"), _event(args=arguments))
    assert list(trace.spans["kernel"].args) == [1]
    kept = trace.spans["kernel"].args[1]
    assert (kept.collective, kept.number, kept.dtype) == ("allreduce", "7", None)


@pytest.mark.parametrize(
    ("odd", "column", "expected"),
    [
        ({"ts": "1.5"}, "ts", 1.5),
        ({"dur": None}, "dur", 0),
        ({"tid": "12"}, "thread", 12),
        ({"args": None}, "device", -1),
        ({"args": {"device": None}}, "device", -1),
        ({"unknown": {"ts": [7]}}, "ts", 1.5),
        ({"finished": 7, "args": {"Collective name": 7}}, "ts", 1.5),
    ],
)
def test_what_is_odd_and_has_a_meaning_is_read(
    odd: dict[str, Any], column: str, expected: float, tmp_path: Path
) -> None:
    trace = _read(tmp_path, _event(**odd), _event())
    assert trace.spans["kernel"].column(column).tolist()[0] == expected


def test_raw_control_characters_and_broken_unicode_lose_no_trace(tmp_path: Path) -> None:
    trace = _read(
        tmp_path, _event(name="a#b").replace(b"#", b"\x0b"), _event().replace(b"a", b"\xff", 1)
    )
    assert trace.spans["kernel"].column("ts").tolist() == [1.5]
    trace = _read(tmp_path, b"\x0b" + _event(), _event().replace(b":", b":\x00", 1))
    assert trace.spans["kernel"].column("ts").tolist() == [1.5, 1.5]
    trace = _read(tmp_path, _event(name="a#b").replace(b"#", b"\xff"))
    assert trace.names == ["a\ufffdb"]


@pytest.mark.parametrize(
    "odd",
    [
        _event()[:-1],
        b"",
        b"null",
        b"[" + _event() + b"]",
        _event(args=[]),
        _event(args={"correlation": 1.5}),
        _event(args={"correlation": 1 << 64}),
        _event(name=None),
        _event(name=7, args={"Collective name": "allreduce"}),
        _event(name=["a"]),
        _event(cat={}),
        _event(tid=None),
        _event(ts=None),
        _event(ts="soon"),
        _event(ts=1e300),
        _event(ts=1).replace(b'"ts": 1', b'"ts": NaN'),
        _event(ts=1).replace(b'"ts": 1', b'"ts": 1e999'),
        _event(ts=1).replace(b'"ts": 1', b'"ts": ' + b"9" * 400),
        _event(deep="#").replace(b'"#"', b"[" * 100_000 + b"]" * 100_000),
    ],
    ids=range(19),
)
def test_what_is_no_event_is_refused_with_the_file(odd: bytes, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"trace\.json cannot be read: not "):
        _read(tmp_path, _event(), odd)


def test_categories_that_are_not_read_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    categories = [f"kind {letter}" for letter in "hcaebgdf"]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [KINDS[0] | {"cat": each} for each in categories]}))
    assert list(trace_events.read(path).unread) == categories


def test_no_thread_makes_a_decoder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(msgspec.json, "Decoder", made)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document(random.Random(0))))
    assert not isinstance(read(path), str)
