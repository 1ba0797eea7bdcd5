"""How a good document is spoilt: a few changes, each told by two numbers, so that they shrink."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

#: (where, what): both are taken modulo the number of places and of odd values
Change = tuple[int, int]

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**53 + 1, 2**62,
    2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e15, 1e300, -1e300, "", "x", "0", "-1",
    "9" * 30, "\ud800", "\udcff", "\0", "\u202e", "nccl:all_reduce", "ncclDevKernel_AllReduce",
    "gloo:all_reduce", "kernel", "user_annotation", "Operator", "mtia_ccp_events", "ProfilerStep#9",
    "step 99999999", "thread_name", "process_name", [], [[]], {}, {"": None}, [0] * 300, [2**40],
    {"rank": -1}, "x" * 5000,
)  # fmt: skip


def spoilt(document: Any, changes: Sequence[Change]) -> Any:
    """`document` with `changes` made: a value replaced, removed, doubled, put elsewhere."""
    document = copy.deepcopy(document)
    for where, what in changes:
        places = list(_places(document))
        if not places:
            return ODD[what % len(ODD)]
        parent, key = places[where % len(places)]
        if isinstance(parent[key], int) and what % 2:
            # a number that may be one: half of all changes, since these get farthest
            parent[key] = _other_number(parent[key], what // 2)
            continue
        kind = what % (len(ODD) + 4)
        other, at = places[(where * 31 + what) % len(places)]
        if kind < len(ODD):
            parent[key] = copy.copy(ODD[kind])
        elif kind == len(ODD):
            del parent[key]
        elif kind == len(ODD) + 1 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
            parent[key] = -parent[key] if kind % 2 else parent[key] * 1000
        else:
            parent[key] = copy.deepcopy(other[at])
    return document


def _other_number(value: int, what: int) -> int:
    powers = (0, 1, 2, 7, 8, 15, 16, 20, 31, 32, 33, 40, 47, 52, 53, 54, 60, 61, 62, 63)
    power = 1 << powers[what // 4 % len(powers)]
    return (value + power, value - power, power - 1, -power)[what % 4]


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document that holds a value, outer ones first."""
    waiting = [document]
    for each in waiting:
        if isinstance(each, (dict, list)):
            for key in list(each) if isinstance(each, dict) else range(len(each)):
                yield each, key
                waiting.append(each[key])


def spoilt_bytes(content: bytes, changes: Sequence[Change]) -> bytes:
    """`content` with `changes` made: a byte changed, a stretch removed, doubled, blanked."""
    text = bytearray(content)
    for where, what in changes:
        if not text:
            return b""
        at, kind, value = where % len(text), what % 7, what // 7
        length = 1 + value % 97
        if kind < 3:
            text[at] = value % 256
        elif kind == 3:
            del text[at : at + length]
        elif kind == 4:
            text[at:at] = text[at : at + length]
        elif kind == 5:
            text[at : at + length] = bytes(length)
        else:
            text[at : at + 8] = (2**63 - value % 3).to_bytes(8, "big")
    return bytes(text)
