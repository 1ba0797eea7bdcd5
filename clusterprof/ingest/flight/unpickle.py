"""Pickles of numbers, strings and containers, read without executing anything.

Python's own unpickler calls what a pickle names, and takes memory for whatever memo index it
names. This one knows the instructions that build data, and no other: there is nothing to call.
Each instruction costs at most its own bytes, so that time and memory follow from the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

#: How many values a document may hold with what it refers to several times counted each time: a
#: recorder of 100,000 entries (fifty times its usual size), each with forty frames of four values.
_MOST_VALUES = 1 << 24
#: containers within containers; a dump of the flight recorder has six
_DEEPEST = 32
#: bytes of an integer of 64 bits with its sign
_LONGEST_INTEGER = 9


class PickleError(ValueError):
    """A pickle that holds anything but data, refers to itself, or is damaged."""


def unpickled(content: bytes) -> Any:
    """Return what a pickle of protocol 2 to 5 holds, if it is numbers, strings and containers.

    Raises `PickleError`.
    """
    machine = _Machine(content)
    try:
        return machine.run()
    except (IndexError, KeyError, struct.error, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, PickleError):
            raise
        raise PickleError(f"damaged at byte {machine.at}") from error


class _Machine:
    """The stack machine of pickle; `at` is the byte that is read next."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        #: containers by id, which no other takes as all are kept: values within, and depth
        self.sizes: dict[int, tuple[int, int]] = {}
        self.kept: list[Any] = []
        #: containers that were referred to: they are complete, so that no cycle is possible
        self.complete: set[int] = set()

    def run(self) -> Any:
        content, known = self.content, _INSTRUCTIONS
        while (code := content[self.at]) != _STOP:
            instruction = known.get(code)
            if instruction is None:
                raise PickleError(f"instruction {code:#04x} at byte {self.at} is not of data")
            self.at += 1
            instruction(self)
        (only,) = self.stack
        return only

    def take(self, count: int) -> bytes:
        begin = self.at
        self.at += count
        if count < 0 or self.at > len(self.content):
            raise PickleError(f"ends within a value at byte {begin}")
        return self.content[begin : self.at]

    def number(self, form: struct.Struct) -> Any:
        (found,) = form.unpack_from(self.content, self.at)
        self.at += form.size
        return found

    def text(self, form: struct.Struct) -> None:
        self.stack.append(self.take(self.number(form)).decode("utf-8", "replace"))

    def integer(self) -> None:
        length = self.content[self.at]
        if length > _LONGEST_INTEGER:
            raise PickleError(f"an integer of {length} bytes at byte {self.at}")
        self.at += 1
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def push(self, container: Any, held: list[Any]) -> None:
        """Put a new container on the stack, which holds `held`."""
        self.kept.append(container)
        self.complete.discard(id(container))  # there is but one empty tuple
        self.sizes[id(container)] = (1, 1)
        self.hold(container, held)
        self.stack.append(container)

    def hold(self, container: Any, held: list[Any]) -> None:
        """Count what a container takes in. Raises PickleError."""
        if id(container) in self.complete:
            raise PickleError(f"a value that was referred to is changed at byte {self.at}")
        values, depth = self.sizes[id(container)]
        values += len(held)
        for each in held:
            if type(each) in _CONTAINERS:
                within, deep = self.sizes[id(each)]
                values += within
                depth = max(depth, deep + 1)
        if values > _MOST_VALUES or depth > _DEEPEST:
            raise PickleError(f"{values} values, {depth} deep, at byte {self.at}")
        self.sizes[id(container)] = values, depth

    def tuple_of(self, count: int) -> None:
        held = self.stack[len(self.stack) - count :]
        if len(held) < count:
            raise PickleError(f"damaged at byte {self.at}")
        del self.stack[len(self.stack) - count :]
        self.push(tuple(held), held)

    def marked_tuple(self) -> None:
        self.tuple_of(len(self.stack) - self.marks.pop())

    def extend(self, held: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not list:
            raise PickleError(f"no list at byte {self.at}")
        self.hold(into, held)
        into.extend(held)

    def update(self, held: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not dict or len(held) % 2:
            raise PickleError(f"no dictionary at byte {self.at}")
        if any(type(key) not in (str, int) for key in held[::2]):
            raise PickleError(f"a key that is neither string nor number at byte {self.at}")
        self.hold(into, held)
        into.update(zip(held[::2], held[1::2], strict=True))

    def last(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        found = self.memo[index]
        if type(found) in _CONTAINERS:
            self.complete.add(id(found))
        self.stack.append(found)


_CONTAINERS = frozenset({list, dict, tuple})
_STOP = ord(".")
_U1, _U2, _U4, _U8 = (struct.Struct("<" + form) for form in "BHIQ")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")


def _value(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _number(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(form))


#: instruction -> what it does; `pickletools` has their meaning
_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): act
    for code, act in {
        "\x80": lambda machine: machine.take(1),  # PROTO
        "\x95": lambda machine: machine.take(8),  # FRAME
        "N": _value(None), "\x88": _value(True), "\x89": _value(False),
        "K": _number(_U1), "M": _number(_U2), "J": _number(_I4), "G": _number(_F8),
        "\x8a": _Machine.integer,
        "\x8c": lambda machine: machine.text(_U1),
        "X": lambda machine: machine.text(_U4),
        "\x8d": lambda machine: machine.text(_U8),
        "(": lambda machine: machine.marks.append(len(machine.stack)),
        "]": lambda machine: machine.push([], []),
        "}": lambda machine: machine.push({}, []),
        ")": lambda machine: machine.tuple_of(0),
        "\x85": lambda machine: machine.tuple_of(1),
        "\x86": lambda machine: machine.tuple_of(2),
        "\x87": lambda machine: machine.tuple_of(3),
        "t": _Machine.marked_tuple,
        "a": lambda machine: machine.extend(machine.last(1)),
        "e": lambda machine: machine.extend(machine.since_mark()),
        "s": lambda machine: machine.update(machine.last(2)),
        "u": lambda machine: machine.update(machine.since_mark()),
        "q": lambda machine: machine.put(machine.number(_U1)),
        "r": lambda machine: machine.put(machine.number(_U4)),
        "\x94": lambda machine: machine.put(len(machine.memo)),  # MEMOIZE
        "h": lambda machine: machine.get(machine.number(_U1)),
        "j": lambda machine: machine.get(machine.number(_U4)),
    }.items()
}  # fmt: skip
