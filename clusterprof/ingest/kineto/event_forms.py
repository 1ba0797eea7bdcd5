"""The events of a piece of a trace as columns, by the forms that their text has.

Events that differ in digits only are one form: 470,000 events have some 1,500. A form is parsed
once, which proves all of its events to be JSON and says where in their text each value is. Names
and numbers are cut out there, for all events at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from clusterprof.ingest.kineto.event_columns import GLOO, Columns
from clusterprof.ingest.recording import Ints

_Bytes = npt.NDArray[np.uint8]
_Edges = npt.NDArray[np.int32]

_SPACE = b" \t\n\r"
_BETWEEN = re.compile(rb"\}[ \t\n\r]*,[ \t\n\r]*\{")
#: bytes between two events, at most
_LONGEST_BETWEEN = 64
#: bytes of forms that are kept
_MOST_KEPT = 32 << 20
#: new forms that a piece may have, and for each of its events: with more they save nothing
_FEW, _MOST_SHARE = 64, 0.5

#: what is cut out of an event's text: members of the event, and of its arguments
_OF_EVENT = ("name", "tid", "ts", "dur")
_OF_ARGS = ("correlation", "device", "stream", "bytes", "Python id", "Python parent id")
_COLLECTIVE = "Collective name"
_FIELDS = (*_OF_EVENT, *_OF_ARGS)
_MEMBER = re.compile(
    rb'"(%s)"[ \t\n\r]*:[ \t\n\r]*(?:"([^"]*)"|(-?[9.]+(?=[ \t\n\r,}]))|(null)|)'
    % "|".join((*_FIELDS, "args", _COLLECTIVE)).encode()
)

#: Digits become nines: the largest number of that many digits is one that can be read.
_ZERO, _NINE = np.uint8(ord("0")), np.uint8(9)
_TEXT = bytes((code + 48) % 256 for code in range(256))
#: what is before a number, and no part of one
_BEFORE_NUMBER = np.frombuffer(_SPACE + b":,[-", np.uint8)


@dataclass(frozen=True)
class _Form:
    """Events that differ in digits only."""

    #: None where it is no complete event ("ph": "X")
    category: str | None
    #: names a thread or a process
    names: bool
    collective: bool
    #: where each of `_FIELDS` begins in the event's text, and its length; 0 where it has none
    places: tuple[tuple[int, int], ...]


_NO_PLACES = ((0, 0),) * len(_FIELDS)


class Forms:
    """The forms of a trace's events, as far as it was read."""

    def __init__(self, categories: Mapping[str, Sequence[str]]) -> None:
        """`categories` are those that are read, each with the numbers read of its arguments."""
        self._categories = categories
        self._known: dict[bytes, _Form | None] = {}
        self._kept = 0

    def parsed(self, text: bytes) -> Columns | None:
        """Return the events of a text, elements of a list with commas between them.

        None where it is not such text, or where an event has no form: escapes in its strings, a
        member twice, a value of another type than Kineto writes. Then it is to be parsed otherwise.
        """
        content = np.frombuffer(text, np.uint8)
        begins = _begins(text, content)
        if begins is None:
            return None
        shifted = np.maximum(content - _ZERO, _NINE)
        if _has_leading_zero(content, shifted):
            return None
        encoded = _cut(shifted, begins, pa.binary()).dictionary_encode()
        forms = self._forms(encoded.dictionary.to_pylist(), len(encoded))
        if forms is None:
            return None
        try:
            return _columns(text, begins, encoded.indices.to_numpy(), forms)
        except (pa.ArrowInvalid, AttributeError, KeyError, TypeError):
            return None

    def _forms(self, texts: list[bytes], events: int) -> list[_Form] | None:
        new = [text for text in texts if text not in self._known]
        if len(new) > max(_FEW, _MOST_SHARE * events):
            return None
        self._kept += sum(map(len, new))
        if self._kept > _MOST_KEPT:
            self._known.clear()
            new, self._kept = texts, 0
        for text in new:
            self._known[text] = _form(text.translate(_TEXT), self._categories)
        found = [form for text in texts if (form := self._known[text]) is not None]
        return found if len(found) == len(texts) else None


def _begins(text: bytes, content: _Bytes) -> _Edges | None:
    """Return where each event begins if all are divided as the first two are, and the end."""
    first = len(text) - len(text.lstrip(_SPACE))
    if text[first : first + 1] != b"{" or text[-_LONGEST_BETWEEN:].rstrip(_SPACE)[-1:] != b"}":
        return None
    match = _BETWEEN.search(text)
    if match is None:
        return np.array([first, len(text)], np.int32)
    between = np.frombuffer(match[0], np.uint8)
    if between.size > _LONGEST_BETWEEN:
        return None
    ends = np.flatnonzero((content[:-1] == between[0]) & (content[1:] == between[1]))
    ends = ends[ends + between.size <= len(text)]
    for place in range(2, between.size):
        ends = ends[content[ends + place] == between[place]]
    begins: _Edges = np.r_[first, ends + between.size - 1, len(text)].astype(np.int32)
    return begins


def _has_leading_zero(content: _Bytes, shifted: _Bytes) -> bool:
    """Return whether there is a number such as 01, which is none in JSON."""
    digit = shifted == _NINE
    # of Booleans, `>` is "and not"
    zero = (content[1:-1] == _ZERO) & (digit[2:] > digit[:-2]) & (content[:-2] != ord("."))
    return bool(np.isin(content[np.flatnonzero(zero)], _BEFORE_NUMBER).any())


def _form(text: bytes, categories: Mapping[str, Sequence[str]]) -> _Form | None:
    """Return the form of an event with its digits replaced; None where it is none."""
    try:
        event = orjson.loads(text.rstrip(_SPACE).removesuffix(b","))
    except orjson.JSONDecodeError:
        return None
    # without escapes, each quote begins or ends a string: a member is found by its text
    if b"\\" in text or not isinstance(event, dict):
        return None
    if event.get("ph") != "X":
        name = event.get("name")
        return _Form(None, name in ("thread_name", "process_name"), False, _NO_PLACES)
    category, args = event.get("cat", ""), event.get("args", {})
    if not isinstance(category, str) or "9" in category:
        return None
    if category not in categories:
        return _Form(category, False, False, _NO_PLACES)
    members: dict[str, re.Match[bytes] | None] = {}
    for match in _MEMBER.finditer(text):
        key = match[1].decode()
        members[key] = None if key in members else match
    if not isinstance(args, dict) or not _as_kineto_writes(event, args, members):
        return None
    ids = ("Python id", "Python parent id") if category == "python_function" else ()
    read = {*_OF_EVENT, *categories[category], *ids}
    places = [_place(members.get(name)) if name in read else (0, 0) for name in _FIELDS]
    collective = _COLLECTIVE in args or event["name"].startswith(GLOO)
    return _Form(category, False, collective, tuple(places))


def _as_kineto_writes(
    event: dict[str, Any], args: dict[str, Any], members: dict[str, re.Match[bytes] | None]
) -> bool:
    """Return whether each member that is read is there once at most, of the type that it has."""
    texts = (event.get("name"), args.get(_COLLECTIVE, ""))
    if members.get("args", True) is None or not all(isinstance(each, str) for each in texts):
        return False
    if type(event.get("tid")) is not int or type(event.get("ts")) not in (int, float):
        return False
    return all(
        (match := members[name]) is not None
        and name in holder
        and (name in ("name", _COLLECTIVE) or match[3] is not None or match[4] is not None)
        and (name in _OF_EVENT or name == _COLLECTIVE or not isinstance(holder[name], float))
        for holder, names in ((event, _OF_EVENT), (args, (*_OF_ARGS, _COLLECTIVE)))
        for name in names
        if name in members
    )


def _place(match: re.Match[bytes] | None) -> tuple[int, int]:
    """Return where the value begins and its length; 0 for null."""
    if match is None or match[4] is not None:
        return 0, 0
    begin, end = match.span(3 if match[2] is None else 2)
    return begin, end - begin


def _columns(text: bytes, begins: _Edges, which: _Edges, forms: list[_Form]) -> Columns:
    """Cut the columns out of a text. Raises for values that are none of theirs."""

    def event(row: int) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(
            text[begins[row] : begins[row + 1]].rstrip(_SPACE).removesuffix(b",")
        )
        return found

    categories = list(dict.fromkeys(f.category for f in forms if f.category is not None))
    number = {category: place for place, category in enumerate(categories)}
    code = np.array([-1 if f.category is None else number[f.category] for f in forms], np.int64)
    rows = np.flatnonzero(code[which] >= 0)
    kinds = which[rows]
    places = np.array([form.places for form in forms], np.int32).transpose(1, 2, 0)
    values = {
        name: _values(text, name, begins[rows] + begin[kinds], length[kinds])
        for name, (begin, length) in zip(_FIELDS, places, strict=True)
    }
    names = values.pop("name").dictionary_encode()
    values["thread"] = values.pop("tid")
    collectives = np.flatnonzero(np.array([form.collective for form in forms])[kinds])
    naming = np.flatnonzero(np.array([form.names for form in forms])[which])
    threads, processes = _named([event(row) for row in naming.tolist()])
    return Columns(
        category=code[kinds],
        categories=categories,
        ts=values.pop("ts"),
        dur=values.pop("dur"),
        numbers=values,
        name=names.indices.to_numpy(),
        names=names.dictionary.to_pylist(),
        whole={place: event(rows[place]) for place in collectives.tolist()},
        threads=threads,
        processes=processes,
    )


def _values(text: bytes, name: str, begin: Ints, length: Ints) -> Any:
    """Return a column's values; -1 for a missing number of the arguments, else 0."""
    if name == "name":
        return _strings(text, begin, length)
    decimal = name in ("ts", "dur")
    kind = pa.float64() if decimal else pa.int64()
    missing = -1 if name in _OF_ARGS else 0
    values = np.full(begin.size, missing, np.float64 if decimal else np.int64)
    there = np.flatnonzero(length)
    if there.size:
        values[there] = _strings(text, begin[there], length[there]).cast(kind).to_numpy()
    return values


def _strings(text: bytes, begin: Ints, length: Ints) -> pa.Array:
    """Return the strings that begin at places of a text, ascending, none inside of another."""
    edges = np.column_stack((begin, begin + length)).astype(np.int32).ravel()
    if not edges.size:
        return pa.array([], pa.string())
    pieces = _cut(text, edges, pa.string())
    return pieces.take(pa.array(np.arange(0, edges.size, 2)))


def _cut(text: Any, edges: _Edges, kind: pa.DataType) -> pa.Array:
    """Return what lies between edges of a text, as it is in memory."""
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(text)]
    return pa.Array.from_buffers(kind, edges.size - 1, buffers)


def _named(events: list[dict[str, Any]]) -> tuple[dict[int, str], list[str]]:
    """Return thread -> name, and the names of processes."""
    threads = {
        each["tid"]: each["args"]["name"]
        for each in events
        if each["name"] == "thread_name" and isinstance(each.get("tid"), int)
    }
    processes = [str(each["args"]["name"]) for each in events if each["name"] == "process_name"]
    return threads, processes
