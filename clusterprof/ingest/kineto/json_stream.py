"""JSON with a long list in it, piece by piece: memory for a piece, however large the file.

A piece ends between two elements. Where that is, is guessed from the text and proved by parsing:
from the beginning of an element on, text parses as whole elements only if it ends with one. Where
the guess fails (braces in strings, lists of objects inside of an element), the structure of the
piece is found exactly, by counting quotes and braces of all its bytes at once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

#: bytes that are parsed at once: as Python objects they are several times that
_PIECE = 1 << 21
#: bytes of one element, and of all that is before or after the list
_LONGEST = 16 << 20
#: where a piece's end is looked for
_TAIL = 1 << 16

_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_KEY = re.compile(rb'"((?:[^"\\]|\\.){1,80})"\s*:')

_QUOTE, _COMMA = b'",'
#: a raw control character in a name is no JSON, and no reason to lose a trace
_PLAIN = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
_STRUCTURAL = np.zeros(256, np.bool_)
_STRUCTURAL[list(b'"{}[],')] = True
_STEP = np.zeros(256, np.int32)
_STEP[list(b"{[")], _STEP[list(b"}]")] = 1, -1


_Element = TypeVar("_Element")
_Value = TypeVar("_Value")
_ANYTHING = msgspec.json.Decoder()


class NotAList(ValueError):  # noqa: N818 - a state, not a fault
    """The JSON has no list of that name; `keys` are those at its top, as far as it was read."""

    def __init__(self, what: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.keys = keys


def pieces(
    file: IO[bytes],
    key: str,
    rest: dict[str, Any],
    decoder: msgspec.json.Decoder[list[_Element]],
) -> Iterator[list[_Element]]:
    """Yield the elements of the list `key` of an object, or of a list at the top, piece by piece.

    The object's other members are put into `rest`. UTF-8 and UTF-16 are read; bytes that are
    neither are replaced. Raises `NotAList`, `msgspec.ValidationError` for what is no element,
    `msgspec.DecodeError` for JSON cut short, ValueError for an element larger than 16 MB,
    RecursionError for one that is too deep, and what reading `file` raises.
    """
    source = _Text(file)
    before, text = _head(source, key)
    if before is not None:
        rest.update(_parsed(before))
    while True:
        ends = None if source.ended else _guessed(text, decoder)
        if ends is not None:
            piece, text = ends
            yield piece
        else:
            found = structure(text)
            if found.closing is not None:
                break
            if source.ended:
                _parsed(b"[" + text)  # raises: the file ends inside of the list
                raise ValueError("the list is not closed")
            if found.comma is not None:
                yield _elements(text[: found.comma], decoder)
                text = text[found.comma + 1 :]
            elif len(text) > _LONGEST:
                raise ValueError(f"one element is larger than {_LONGEST >> 20} MB")
        text += source.read(max(_PIECE, len(text)))
    yield _elements(text[: found.closing], decoder)
    tail = text[found.closing + 1 :] + source.read(_LONGEST)
    if not source.ended and source.read(1):
        raise ValueError(f"more than {_LONGEST >> 20} MB follow the list")
    if before is None:
        _parsed(b"[]" + tail)
    else:
        rest.update(_parsed(b"{" + tail.lstrip().removeprefix(b",")))


def keys_of(file: IO[bytes]) -> tuple[str, ...] | None:
    """Return the keys of the object that the file is, as far as a piece shows them; "[" for a list
    of objects, None for anything else. Raises what reading `file` raises.
    """
    text = _Text(file).read(_PIECE).lstrip()
    if text[:1] == b"[":
        return ("[",) if text[1:].lstrip()[:1] in (b"{", b"]") else None
    return _keys(text, structure(text)) if text[:1] == b"{" else None


@dataclass(frozen=True)
class Structure:
    """Where quotes, braces and commas of a text are, and what they mean."""

    #: of each byte that is one of `"{}[],`
    place: npt.NDArray[np.intp]
    #: how deep the text is behind it
    depth: npt.NDArray[np.int32]
    quoted: npt.NDArray[np.bool_]
    #: the last comma outside of everything, and the bracket that closes what the text is inside of
    comma: int | None
    closing: int | None

    def at(self, place: int) -> int | None:
        """Return how deep the byte at `place` is; None inside of a string."""
        before = int(np.searchsorted(self.place, place)) - 1
        if before < 0:
            return 0
        return None if self.quoted[before] else int(self.depth[before])


def structure(text: bytes) -> Structure:
    """Find the structure of a text that begins outside of strings."""
    # an escaped quote is none: each pair of a backslash and what it escapes goes, from the left
    plain = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    content = np.frombuffer(plain, np.uint8)
    place = np.flatnonzero(_STRUCTURAL[content])
    what = content[place]
    # behind an odd number of quotes is the inside of a string
    quoted = np.cumsum(what == _QUOTE, dtype=np.int32) % 2 == 1
    depth = np.cumsum(np.where(quoted, 0, _STEP[what]), dtype=np.int32)
    closing = np.flatnonzero(depth < 0)
    commas = np.flatnonzero((what == _COMMA) & (depth == 0) & ~quoted)
    return Structure(
        place,
        depth,
        quoted,
        int(place[commas[-1]]) if commas.size else None,
        int(place[closing[0]]) if closing.size else None,
    )


class _Text:
    """A file's text as UTF-8, whichever Unicode it is written in."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.ended = False
        self.start = file.read(4)
        mark, wide = self.start[:2], ""
        if self.start.startswith(codecs.BOM_UTF8):
            self.start = self.start[3:]
        elif mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            wide = "utf-16"
        elif b"\0" in mark:
            wide = "utf-16-be" if mark[:1] == b"\0" else "utf-16-le"
        self.decoder = codecs.getincrementaldecoder(wide)("replace") if wide else None

    def read(self, size: int) -> bytes:
        """Return some `size` bytes, fewer only at the end."""
        more = self.file.read(size)
        self.ended = len(more) < size
        found, self.start = self.start + more, b""
        if self.decoder is not None:
            found = self.decoder.decode(found, self.ended).encode()
        return found


def _head(source: _Text, key: str) -> tuple[bytes | None, bytes]:
    """Return what precedes the list, as an object (None: nothing), and its text from there on."""
    text = source.read(_PIECE).lstrip()
    if text[:1] == b"[":
        return None, text[1:]
    begins = re.compile(rb'"%s"\s*:\s*\[' % re.escape(key.encode()))
    while True:
        found = structure(text)
        for match in begins.finditer(text):
            if found.at(match.start()) == 1:
                before = text[: match.start()].rstrip().removesuffix(b",")
                return before + b"}", text[match.end() :]
        if source.ended or len(text) > _LONGEST:
            break
        text += source.read(max(_PIECE, len(text)))
    if source.ended and not isinstance(_parsed(text), dict):
        raise NotAList("it is no object")
    raise NotAList(f"it has no list of {key}", _keys(text, found))


def _keys(text: bytes, found: Structure) -> tuple[str, ...]:
    names = (
        match[1].decode(errors="replace")
        for match in _KEY.finditer(text)
        if found.at(match.start()) == 1
    )
    return tuple(dict.fromkeys(names))


def _guessed(
    text: bytes, decoder: msgspec.json.Decoder[list[_Element]]
) -> tuple[list[_Element], bytes] | None:
    """Return the elements of `text` up to what looks like an end of one, and what follows."""
    first = max(0, len(text) - _TAIL)
    matches = list(_BETWEEN.finditer(text, first))
    if not matches:
        return None
    try:
        return _elements(text[: matches[-1].start() + 1], decoder), text[matches[-1].end() :]
    except msgspec.DecodeError:
        return None


def _elements(text: bytes, decoder: msgspec.json.Decoder[list[_Element]]) -> list[_Element]:
    """Return the elements of a list's text without its brackets."""
    return _parsed(b"[" + text + b"]", decoder)


def _parsed(text: bytes, decoder: msgspec.json.Decoder[_Value] = _ANYTHING) -> _Value:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        plain = text.decode(errors="replace").encode().translate(_PLAIN)
        if plain == text:
            raise
    return decoder.decode(plain)
