"""A dump's file, as the document of version 2 that is in it: nothing of a pickle is executed.

Python's own unpickler calls what a pickle names. Of the one that is written in Python only those
instructions are taken here that build data: there is nothing to call, and each takes no more time
and memory than its own bytes. What comes out is counted before anybody walks through it.
"""

from __future__ import annotations

import io
import lzma
import pickle
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from clusterprof import words
from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.ingest.opening import check_regular, opened, unreadable
from clusterprof.ingest.operations import operation

#: Bytes, unpacked: an entry takes 0.5 kB as JSON, a pickled one with a deep stack 2 kB; this
#: holds thirty thousand of those, fifteen times what the recorder keeps unless asked for more.
_LARGEST = 64 << 20

#: what unpacking a damaged file raises
DAMAGES = (EOFError, lzma.LZMAError, zlib.error)

#: the group that torch makes first, of all ranks
_WORLD = 0


def read_document(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return a dump as version 2 has it, and warnings. Raises `ReportError`."""
    document = _parsed(path)
    if isinstance(document, list) and document:
        document = {"version": "1.0", "entries": document}  # of torch 2.2, which says none
    if isinstance(document, dict) and "entries" not in document and "pg_config" in document:
        raise ReportError(
            f"the program has made no collective that torch's flight recorder records ({path})",
            "it records those of process groups, none of symmetric memory",
        )
    if not isinstance(document, dict) or not isinstance(document.get("entries"), (list, tuple)):
        raise ReportError(f"{path} is no dump of a flight recorder: it has no entries")
    version = document.get("version")
    if not isinstance(version, str) or not version.startswith(("1.", "2.")):
        raise ReportError(
            f"{path} is of version {str(version)[:20]!r} of the flight recorder's dumps",
            "versions 1.x and 2.x are read, which torch 2.2 and later write",
        )
    return as_version_2(path, document) if version.startswith("1.") else (document, [])


def _parsed(path: Path) -> Any:
    """Return what a file's JSON or pickle holds, whatever that is."""
    check_regular(path)
    try:
        content = content_of(path)
    except DAMAGES as error:
        raise ReportError(f"{path} is cut short or damaged", str(error), "copy it again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > _LARGEST:
        raise ReportError(
            f"{path} holds more than {_LARGEST >> 20} MB, which no flight recorder does",
            "set TORCH_FR_BUFFER_SIZE to fewer entries and dump it again",
        )
    if not content:
        raise ReportError(f"{path} is empty", "copy it again, or dump it again")
    try:
        return unpickled(content) if content[:1] == b"\x80" else orjson.loads(content)
    except (PickleError, orjson.JSONDecodeError) as error:
        raise ReportError(
            f"{path} is neither JSON nor a pickle of numbers, strings and containers alone",
            str(error),
            "where it is cut short, copy it again; nothing of it was executed",
        ) from error


def content_of(path: Path) -> bytes:
    """Return what a file holds, unpacked, with a byte more than may be if it is more.

    Raises OSError, EOFError, lzma.LZMAError, zlib.error.
    """
    if path.suffix == ".gz":  # most often whole and one piece: at once, in half a stream's time
        with files.opened(path, links=True) as file:
            packed = file.read(_LARGEST)
        unpacker = zlib.decompressobj(31)  # gzip's own format
        content = unpacker.decompress(packed, _LARGEST + 1)
        if unpacker.eof and not unpacker.unused_data:
            return content
    with opened(path) as file:
        return file.read(_LARGEST + 1)


# -- pickles -------------------------------------------------------------------------------------


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
    """Return what a pickle of protocol 2 to 5 holds, which is data alone. Raises `PickleError`."""
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


# -- torch 2.2 and 2.3
#
# That of torch 2.2 is a list of entries alone, in microseconds; versions 1.x have more, from 1.4 on
# the ranks of each group. Each rank numbers its groups for itself: what names one on all its
# members is its ranks, and how many of the same ranks were made before it. Sends and receives are
# counted together with the collectives of their group, and each rank counts its own.


def as_version_2(path: Path, document: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return a dump as version 2 would have it, and warnings: each call with its group's name, its
    time in ns, whether it is a Send or Recv, and its number.

    Raises ReportError where its recorder has dropped calls that the numbers are counted from.
    """
    entries = [{"record_id": place, **entry} for place, entry in enumerate(document["entries"])]
    if all("process_group" in entry for entry in entries):
        return document, []
    config = document.get("pg_config") or {}
    groups = _groups({int(number): sorted(ranks) for number, ranks in config.items()})
    converted: list[dict[str, Any]] = []
    by_group: dict[int, list[dict[str, Any]]] = {}
    for entry in (entry for entry in entries if entry["pg_id"] in groups):
        us, (name, description, _) = entry.get("time_created_us"), groups[entry["pg_id"]]
        entry["process_group"] = [name, description]
        entry["time_created_ns"] = entry["time_created_ns"] if us is None else us * 1000
        entry["is_p2p"] = operation(entry["profiling_name"]) in ("Send", "Recv")
        by_group.setdefault(entry["pg_id"], []).append(entry)
        converted.append(entry)
    for calls in by_group.values():
        _number(path, calls)
    listed = {
        name: {"name": name, "desc": text, "ranks": ranks} for name, text, ranks in groups.values()
    }
    lost = len(entries) - len(converted)
    text = (
        f"{lost} of {len(entries)} calls are of groups whose ranks the dump does not list: left out"
    )
    new = {"version": document["version"], "entries": converted, "pg_config": listed}
    return new, [text] * bool(lost)


def _groups(ranks: Mapping[int, list[int]]) -> dict[int, tuple[str, str, list[int]]]:
    """Return name, description and ranks of each group of a rank, by its number."""
    groups_of: Counter[tuple[int, ...]] = Counter()
    described = {_WORLD: ("0", "default_pg", ranks.get(_WORLD, []))}
    for number in sorted({*ranks} - {_WORLD}):
        members = ranks[number]
        groups_of[tuple(members)] += 1
        which = f" ({groups_of[tuple(members)]})" if groups_of[tuple(members)] > 1 else ""
        described[number] = (words.numbers(members) + which, "", members)
    return described


def _number(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Set `collective_seq_id` and `p2p_seq_id` of one group's calls: each kind is counted apart."""
    numbers = np.array([entry["seq_id"] for entry in entries], np.int64)
    directed = np.array([entry["is_p2p"] for entry in entries], bool)
    # what ends a batch has the number of its parts
    directed |= np.isin(numbers, numbers[directed])
    if directed.any() and numbers.min() > 1:
        raise ReportError(
            f"{path} lacks the first calls of a process group with sends and receives, which torch "
            "before 2.4 counts with its collectives: these have no numbers that other ranks share",
            "set TORCH_NCCL_TRACE_BUFFER_SIZE to more entries than the job makes, or take torch 2.4"
            " or later",
        )
    own = numbers.copy()
    for rows in (directed, ~directed) if directed.any() else ():
        own[rows] = np.unique(numbers[rows], return_inverse=True)[1].reshape(-1) + 1
    for entry, number, p2p in zip(entries, own.tolist(), directed.tolist(), strict=True):
        entry["is_p2p"] = p2p
        entry["collective_seq_id"], entry["p2p_seq_id"] = (0, number) if p2p else (number, 0)
