"""JSON with a long list in it, piece by piece: memory for a piece, however large the file.

A piece ends between two elements. Where that is, is guessed from the text and proved by parsing:
from the beginning of an element on, text parses as whole elements only if it ends with one. Where
the guess fails (braces in strings, lists of objects inside of an element), and where the list
ends, the elements of the piece are gone through one by one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
from typing import IO, Any, TypeVar

import msgspec

#: bytes that are parsed at once: as Python objects they are several times that
_PIECE = 1 << 21
#: bytes of one element, and of all that is before or after the list
_LONGEST = 16 << 20
#: where a piece's end is looked for
_TAIL = 1 << 16

_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_SPACE = re.compile(r"[ \t\r\n]*")
_KEY = re.compile(r'[ \t\r\n,]*"((?:[^"\\]|\\.)*)"[ \t\r\n]*:[ \t\r\n]*')

#: a raw control character is no JSON, and no reason to lose a trace
_PLAIN = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
#: finds where a value ends, and makes nothing of its numbers
_SCANNER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)


_Element = TypeVar("_Element")
_Value = TypeVar("_Value")
_ANYTHING = msgspec.json.Decoder()


class NotAList(ValueError):  # noqa: N818 - a state, not a fault
    """The JSON has no list of that name; `keys` are those at its top, as far as it was read."""

    def __init__(self, message: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
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
            end, closes = _last_end(text)
            if closes:
                break
            if source.ended:
                _parsed(b"[" + text)  # raises: the file ends inside of the list
                raise ValueError("the list is not closed")
            if end:
                yield _elements(text[:end], decoder)
                text = text[end + 1 :]
            elif len(text) > _LONGEST:
                raise ValueError(f"one element is larger than {_LONGEST >> 20} MB")
        text += source.read(max(_PIECE, len(text)))
    yield _elements(text[:end], decoder)
    tail = text[end + 1 :] + source.read(_LONGEST)
    if not source.ended and source.read(1):
        raise ValueError(f"more than {_LONGEST >> 20} MB follow the list")
    if before is None:
        _parsed(b"[]" + tail)
    else:
        rest.update(_parsed(b"{" + tail.lstrip().removeprefix(b",")))


def keys_of(file: IO[bytes], until: Collection[str] = ()) -> tuple[str, ...] | None:
    """Return the keys of the object that the file is, as far as a piece shows them, or up to one
    of `until`; "[" for a list of objects, None for anything else. Raises what reading it raises.
    """
    text = _Text(file).read(_PIECE).lstrip()
    if text[:1] == b"[":
        return ("[",) if text[1:].lstrip()[:1] in (b"{", b"]") else None
    if text[:1] != b"{":
        return None
    keys = []
    for key, *_ in _members(text):
        keys.append(key)
        if key in until:
            break
    return tuple(keys)


def _members(text: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield a text's members as far as it is JSON: the key, where that and its value begin."""
    # a character for each byte: what is looked for is ASCII
    plain = text.translate(_PLAIN).decode("latin-1")
    end: int | None = 1
    while end is not None and (match := _KEY.match(plain, end)):
        yield match[1].encode("latin-1").decode(errors="replace"), match.start(), match.end()
        end = _end(plain, match.end())


def _last_end(text: bytes) -> tuple[int, bool]:
    """Return where the last whole element of a list's text ends that another one follows (0: none).

    Or where the list is closed, and whether it is.
    """
    plain = text.translate(_PLAIN).decode("latin-1")
    comma, begin = 0, 0
    while (end := _end(plain, begin)) is not None and plain[end : end + 1] == ",":
        comma, begin = end, end + 1
    closing = _space(plain, begin) if end is None else end
    closes = plain[closing : closing + 1] == "]"
    return (closing if closes else comma), closes


def _end(text: str, begin: int) -> int | None:
    """Return where the value that begins behind `begin` ends, with the space behind it.

    None where the text ends before it, or it is no JSON.
    """
    try:
        return _space(text, _SCANNER.raw_decode(text, _space(text, begin))[1])
    except (ValueError, RecursionError):
        return None


def _space(text: str, begin: int) -> int:
    """Return where the space ends that begins at `begin`."""
    match = _SPACE.match(text, begin)
    return match.end() if match else begin


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
        content, self.start = self.start + more, b""
        if self.decoder is not None:
            content = self.decoder.decode(content, self.ended).encode()
        return content


def _head(source: _Text, key: str) -> tuple[bytes | None, bytes]:
    """Return what precedes the list, as an object (None: nothing), and its text from there on."""
    text = source.read(_PIECE).lstrip()
    if text[:1] == b"[":
        return None, text[1:]
    while True:
        keys = []
        for name, begin, value in _members(text):
            keys.append(name)
            if name == key and text[value : value + 1] == b"[":
                return text[:begin] + b"}", text[value + 1 :]
        if source.ended or len(text) > _LONGEST:
            break
        text += source.read(max(_PIECE, len(text)))
    if source.ended and not isinstance(_parsed(text), dict):
        raise NotAList("it is no object")
    raise NotAList(f"it has no list of {key}", tuple(dict.fromkeys(keys)))


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
