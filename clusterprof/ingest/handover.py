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


class _Split(NamedTuple):
    """A rank's tables, and a file that has the large ones, or on its way to a host its content."""

    others: RankTables
    large: Path | bytes


def put_down(parts: Iterable[Any], folder: str) -> list[Any]:
    """Return the same with ranks' large tables in files of a folder that this process alone writes.

    Tables for which there is no space stay as they are. Raises OSError for those of `packed`.
    """
    return [_put_down(outcome, Path(folder, f"{next(_numbers)}.arrow")) for outcome in parts]


def _put_down(outcome: Any, file: Path) -> Any:
    if isinstance(outcome, _Split) and isinstance(outcome.large, bytes):
        file.write_bytes(outcome.large)
        return outcome._replace(large=file)
    if not isinstance(outcome, RankTables):
        return outcome
    try:
        with file.open("wb") as opened:
            mapped.write([getattr(outcome, name) for name in _LARGE], opened)
    except OSError:
        file.unlink(missing_ok=True)
        return outcome
    return _Split(replace(outcome, **{name: empty(name) for name in _LARGE}), file)


def packed(parts: Iterable[Any]) -> list[Any]:
    """Return what was put down as bytes, for another host to put down. Raises OSError."""
    return [
        outcome._replace(large=outcome.large.read_bytes())
        if isinstance(outcome, _Split) and isinstance(outcome.large, Path)
        else outcome
        for outcome in parts
    ]


def taken_up(parts: Iterable[Any]) -> list[Any]:
    """Return what was put down on this host, whose files may be removed. Raises OSError."""
    return [
        replace(outcome.others, **dict(zip(_LARGE, mapped.read(outcome.large), strict=True)))
        if isinstance(outcome, _Split) and isinstance(outcome.large, Path)
        else outcome
        for outcome in parts
    ]
