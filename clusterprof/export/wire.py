"""Protocol Buffers' wire format: single messages as bytes, and messages by the million as arrays.

Only what a Perfetto trace needs; the tests read it with the definitions that Perfetto publishes.
The protobuf package encodes one message at a time, some 50,000 a second. Here all messages of one
form are rows of one array. They have one length, so a varint has as many bytes as the largest of
its column needs; the format allows the additional ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from clusterprof.columns import Ints

#: messages or parts of them, one a row
Rows = npt.NDArray[np.uint8]

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int) -> bytes:
    """A whole number; a negative one as 64 bits in two's complement."""
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def number(field: int, value: int) -> bytes:
    """A field with a whole number."""
    return varint(field << 3 | _VARINT) + varint(value)


def text(field: int, value: str) -> bytes:
    """A field with text."""
    return message(field, value.encode("utf-8", "backslashreplace"))


def message(field: int, *parts: bytes) -> bytes:
    """A field with a message of these parts."""
    content = b"".join(parts)
    return varint(field << 3 | _LENGTH) + varint(len(content)) + content


def numbers(field: int, values: Ints) -> Rows:
    """The same field of every message, with whole numbers."""
    left = values.astype(np.uint64)
    width = max(1, -(-int(left.max(initial=0)).bit_length() // 7))
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    encoded = (left[:, None] >> shifts).astype(np.uint8) & np.uint8(0x7F)
    encoded[:, :-1] |= np.uint8(0x80)
    return _after(varint(field << 3 | _VARINT), encoded)


def fixed(field: int, values: Ints) -> Rows:
    """The same, as 64 bits of fixed length."""
    encoded = values.astype("<u8").view(np.uint8).reshape(-1, 8)
    return _after(varint(field << 3 | _FIXED64), encoded)


def messages(field: int, count: int, *parts: bytes | Rows) -> Rows:
    """`count` messages: parts that all share, and parts with a row for each."""
    none = np.empty((count, 0), np.uint8)
    content = np.hstack([_after(p, none) if isinstance(p, bytes) else p for p in parts])
    return _after(varint(field << 3 | _LENGTH) + varint(content.shape[1]), content)


def _after(begin: bytes, rows: Rows) -> Rows:
    """Every row after the same bytes."""
    joined = np.empty((len(rows), len(begin) + rows.shape[1]), np.uint8)
    joined[:, : len(begin)] = np.frombuffer(begin, np.uint8)
    joined[:, len(begin) :] = rows
    return joined


def in_order(parts: Sequence[tuple[npt.NDArray[np.intp], Rows]]) -> bytes:
    """All rows in the order of their places: each part has the places of its rows.

    The places are the whole numbers from 0, each once.
    """
    length = np.zeros(sum(len(places) for places, _ in parts), np.int64)
    for places, rows in parts:
        length[places] = rows.shape[1]
    begin = np.cumsum(length) - length
    content = np.empty(int(length.sum()), np.uint8)
    for places, rows in parts:
        content[begin[places][:, None] + np.arange(rows.shape[1])] = rows
    return content.tobytes()
