"""The events of a piece of a trace as columns, which Arrow makes without the interpreter's lock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from clusterprof.ingest.recording import Bools, Ints

_NUMBERS = ("correlation", "device", "stream", "bytes", "Python id", "Python parent id")
_ARGS = pa.struct(
    [(name, pa.int64()) for name in _NUMBERS]
    + [(name, pa.string()) for name in ("Collective name", "name")]
)
_EVENT = pa.struct(
    [(name, pa.string()) for name in ("ph", "cat", "name")]
    + [("tid", pa.int64()), ("ts", pa.float64()), ("dur", pa.float64()), ("args", _ARGS)]
)
#: lists in a list, which what follows the list of events in the file cannot be inside of
_FORM = arrow_json.ParseOptions(
    explicit_schema=pa.schema([("lists", pa.list_(pa.list_(_EVENT)))]),
    unexpected_field_behavior="ignore",
)
#: what only the events of collectives have, of which all arguments are wanted
_MARKS = (b'"Collective name"', b'"gloo:')
GLOO = "gloo:"
#: braces that are tried before and behind such a mark
_MOST_BRACES = 6


@dataclass(frozen=True)
class Columns:
    """The complete events of a piece, in the file's order; -1 for a missing number."""

    #: each event's category as a place in `categories`
    category: Ints
    categories: list[str]
    ts: npt.NDArray[np.float64]
    dur: npt.NDArray[np.float64]
    #: `thread` and the numbers among the arguments
    numbers: dict[str, Ints]
    #: each event's name as a place in `names`
    name: Ints
    names: list[str]
    #: event -> the whole event, for collectives only
    whole: dict[int, dict[str, Any]]
    #: thread id -> name, as other events tell
    threads: dict[int, str]
    processes: list[str]


def parsed(text: bytes) -> Columns | None:
    """Return the events of a text, elements of a list with commas between them.

    None where it is not such text, or one whose events are not all as Kineto writes them today.
    """
    try:
        return _columns(text)
    except (pa.ArrowInvalid, UnicodeDecodeError, orjson.JSONDecodeError):
        return None


def _columns(text: bytes) -> Columns | None:
    whole = b'{"lists":[[' + text + b"]]}"
    options = arrow_json.ReadOptions(use_threads=False, block_size=len(whole) + 1)
    lists = arrow_json.read_json(pa.BufferReader(whole), options, _FORM)["lists"].combine_chunks()
    if len(lists) != 1 or len(lists.values) != 1:
        return None
    events = lists.values.values
    field = dict(zip(_EVENT.names, events.flatten(), strict=True))
    args = dict(zip(_ARGS.names, field["args"].flatten(), strict=True))
    complete = _true(pc.equal(field["ph"], "X"))
    names = field["name"].dictionary_encode()
    kept = pa.array(np.flatnonzero(complete))
    needed = [field[each].take(kept) for each in ("cat", "tid", "ts", "name")]
    if events.null_count or any(each.null_count for each in needed):
        return None
    marked = pc.or_(pc.is_valid(args["Collective name"]), pc.starts_with(field["name"], GLOO))
    collectives = np.flatnonzero(_true(marked))
    found = _elements(text) if collectives.size else []
    if [each.get("ts") for each in found] != field["ts"].take(pa.array(collectives)).to_pylist():
        return None
    place = np.cumsum(complete) - 1
    categories = needed[0].dictionary_encode()
    other = {
        name: np.flatnonzero(_true(pc.equal(field["name"], name)) & ~complete)
        for name in ("thread_name", "process_name")
    }
    named = {name: args["name"].take(pa.array(rows)).to_pylist() for name, rows in other.items()}
    if any(each is None for each in (*named["thread_name"], *named["process_name"])):
        return None
    threads = zip(
        field["tid"].take(pa.array(other["thread_name"])).to_pylist(),
        named["thread_name"],
        strict=True,
    )
    return Columns(
        category=_numbers(categories.indices),
        categories=categories.dictionary.to_pylist(),
        ts=needed[2].to_numpy(),
        dur=field["dur"].take(kept).fill_null(0).to_numpy(),
        numbers={name: _numbers(args[name].take(kept)) for name in _NUMBERS}
        | {"thread": _numbers(needed[1])},
        name=_numbers(names.indices.take(kept)),
        names=names.dictionary.to_pylist(),
        whole={
            int(place[row]): each
            for row, each in zip(collectives.tolist(), found, strict=True)
            if complete[row]
        },
        threads={thread: name for thread, name in threads if thread is not None},
        processes=named["process_name"],
    )


def _true(values: pa.Array) -> Bools:
    known: Bools = values.fill_null(False).to_numpy(zero_copy_only=False)
    return known


def _numbers(values: pa.Array) -> Ints:
    known: Ints = values.fill_null(-1).to_numpy().astype(np.int64, copy=False)
    return known


def _elements(text: bytes) -> list[dict[str, Any]]:
    """Return the events with a mark of collectives, in the text's order, as far as they can be
    found.
    """
    found = []
    after = 0
    for place in sorted(match for mark in _MARKS for match in _places(text, mark)):
        if place >= after:
            event, after = _around(text, place, after)
            found.append(event)
    return found


def _places(text: bytes, mark: bytes) -> Iterator[int]:
    place = text.find(mark)
    while place >= 0:
        yield place
        place = text.find(mark, place + 1)


def _around(text: bytes, place: int, after: int) -> tuple[dict[str, Any], int]:
    """Return the event around a place, and where it ends; an empty one where none is found."""
    begin = place
    for _ in range(_MOST_BRACES):
        begin, end = text.rfind(b"{", after, begin), place
        for _ in range(_MOST_BRACES):
            end = text.find(b"}", end) + 1
            with contextlib.suppress(orjson.JSONDecodeError):
                event = orjson.loads(text[max(begin, 0) : end])
                if "ph" in event:
                    return event, end
    return {}, place + 1
