"""Answers that no helper of ours gives: what a host says that is broken, or lies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

#: As the whole answer to any question.
ANSWERS = {
    "nothing": b"",
    "a line end": b"\n\n",
    "words": b"Welcome to this host\nhave a nice day\n",
    "null": b"null",
    "a truth": b"true",
    "a number": b"-1",
    "no number": b"NaN",
    "infinity": b"-Infinity",
    "a number beyond all floats": b"1e999",
    "a number of 5,000 digits": b"9" * 5000,
    "another string": b'"runing"',
    "half an object": b'{"host": "h2", "machi',
    "half a list": b'[{"path": "00001/log", "size": 1',
    "two objects": b"{}{}",
    "lists nested 200,000 deep": b"[" * 200_000 + b"]" * 200_000,
    "objects nested 200,000 deep": b'{"host":' * 200_000 + b"1" + b"}" * 200_000,
    "lists that never end": b"[" * 200_000,
    "no UTF-8": b'{"host": "\xff\xfe"}',
    "UTF-16": json.dumps({"host": "h2"}).encode("utf-16"),
    "zero bytes": b"\0" * 1000,
    "escape sequences": b"\x1b]0;owned\x07\x1b[2J\x1b[31mh1: all is well\r",
    "one word in a list": b'["running"]',
    "lists in a list": b"[[], {}, null, NaN, 3]",
    "five megabytes in one line": b"a" * 5_000_000,
    "five megabytes of lines": b"a\n" * 2_500_000,
}

#: In the place of any value.
VALUES = (
    None, True, 0, -1, 1 << 70, -0.5, float("nan"), float("inf"), "", "\0", "a\nb\x1b[2J", "\ud800",
    "\u202eabc", "x" * 100_000, [], [[]], {}, {"a": {}},
)  # fmt: skip


def changed(answer: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The answer with one member left out or replaced; says what was done."""
    for name in answer:
        yield f"no {name}", {key: value for key, value in answer.items() if key != name}
        for value in VALUES:
            yield f"{name} is {ascii(value)[:30]}", {**answer, name: value}
