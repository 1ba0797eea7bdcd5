"""Pickles of numbers, strings and containers, read without executing anything.

Python's own unpickler calls what a pickle names. Of the one that is written in Python only those
instructions are taken here that build data: there is nothing to call, and each takes no more time
and memory than its own bytes. What comes out is counted before anybody walks through it.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

#: How many values a document may hold with what it refers to several times counted each time: a
#: recorder of 100,000 entries (fifty times its usual size), each with forty frames of four values.
_MOST_VALUES = 1 << 24
#: containers within containers; a dump of the flight recorder has six
_DEEPEST = 32
_CONTAINERS = frozenset({list, dict, tuple})

#: what it raises: a KeyError for other instructions than these
_REFUSED = (
    pickle.UnpicklingError, struct.error, EOFError, AttributeError, LookupError, OverflowError,
    TypeError, ValueError,
)  # fmt: skip
#: `pickletools` has their meaning
_OF_DATA = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE",
    "BINGET", "LONG_BINGET",
)  # fmt: skip


class PickleError(ValueError):
    """A pickle that holds anything but data, refers to itself, or is damaged."""


def _take_text(machine: Any, length: struct.Struct) -> None:
    """Take a text, of whatever encoding."""
    (size,) = length.unpack(machine.read(length.size))
    machine.append(machine.read(size).decode("utf-8", "replace"))


class _Unpickler(pickle._Unpickler):
    """Python's own, with instructions for data alone."""

    dispatch = {  # noqa: RUF012 - as its parent has it
        **{
            code: pickle._Unpickler.dispatch[code]
            for code in (getattr(pickle, name)[0] for name in _OF_DATA)
        },
        pickle.SHORT_BINUNICODE[0]: partial(_take_text, length=struct.Struct("<B")),
        pickle.BINUNICODE[0]: partial(_take_text, length=struct.Struct("<I")),
        pickle.BINUNICODE8[0]: partial(_take_text, length=struct.Struct("<Q")),
    }


def unpickled(content: bytes) -> Any:
    """Return what a pickle of protocol 2 to 5 holds, if it is numbers, strings and containers.

    Raises `PickleError`.
    """
    file = io.BytesIO(content)
    try:
        value = _Unpickler(file).load()
    except _REFUSED as error:
        where = f"damaged, or more than data, at byte {file.tell()}"
        raise PickleError(f"{where} ({type(error).__name__}: {error})") from error
    _check([value], {}, 0)
    return value


def _check(
    values: Sequence[Any], checked: dict[int, tuple[int, int]], depth: int
) -> tuple[int, int]:
    """Return how many values these are with all that they hold, and how deep they go.

    Raises PickleError where that is too much, which it is of what holds itself, and for a key that
    is neither a string nor a number. `checked` has the same of containers that are done.
    """
    if depth > _DEEPEST:
        raise PickleError(f"containers are more than {_DEEPEST} deep")
    count, deepest = len(values), 0
    for value in values:
        if type(value) not in _CONTAINERS:
            continue
        if id(value) not in checked:
            held = value
            if type(value) is dict:
                held = [*value, *value.values()]
                if any(type(key) not in (str, int) for key in value):
                    raise PickleError("a key is neither a string nor a number")
            checked[id(value)] = _check(held, checked, depth + 1)
        within, deep = checked[id(value)]
        count, deepest = count + within, max(deepest, deep + 1)
    if count > _MOST_VALUES or deepest > _DEEPEST:
        raise PickleError(f"{count} values, {deepest} deep")
    return count, deepest
