"""What was read on its way from one process to another: large tables lie in files.

A rank's tables are as large as its report. Through a pipe they would be copied three times; a file
is mapped where they are used, so that only MPI copies them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof import mapped
from clusterprof.tables import RankTables, empty

#: the tables of a rank that may be large
_LARGE = ("activity", "host_calls")

#: of the files that this process writes
_numbers = count()


class _InFile(NamedTuple):
    """A rank's tables, of which the large ones are in a file."""

    others: RankTables
    file: Path


class _Packed(NamedTuple):
    """The same, with what the file holds."""

    others: RankTables
    content: bytes


def put_down(parts: Iterable[Any], folder: str) -> list[Any]:
    """Return the same with ranks' large tables in files of a folder that this process alone writes.

    Tables for which there is no space stay as they are. Raises OSError for those of `packed`.
    """
    return [_put_down(each, Path(folder, f"{next(_numbers)}.arrow")) for each in parts]


def _put_down(part: Any, file: Path) -> Any:
    if isinstance(part, _Packed):
        file.write_bytes(part.content)
        return _InFile(part.others, file)
    if not isinstance(part, RankTables):
        return part
    try:
        with file.open("wb") as opened:
            mapped.write([getattr(part, name) for name in _LARGE], opened)
    except OSError:
        file.unlink(missing_ok=True)
        return part
    return _InFile(replace(part, **{name: empty(name) for name in _LARGE}), file)


def packed(parts: Iterable[Any]) -> list[Any]:
    """Return what was put down as bytes, for another host to put down. Raises OSError."""
    return [
        _Packed(each.others, each.file.read_bytes()) if isinstance(each, _InFile) else each
        for each in parts
    ]


def taken_up(parts: Iterable[Any]) -> list[Any]:
    """Return what was put down on this host, whose files may be removed. Raises OSError."""
    return [_taken_up(each) if isinstance(each, _InFile) else each for each in parts]


def _taken_up(found: _InFile) -> RankTables:
    tables = mapped.read(found.file)
    return replace(found.others, **dict(zip(_LARGE, tables, strict=True)))
