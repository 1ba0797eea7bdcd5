"""One report of whatever format as canonical tables, with the rank and steps it belongs to."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from clusterprof.agent.contracts import paths
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.ingest import other_tools, reduced
from clusterprof.ingest.assembler import assemble, checked
from clusterprof.ingest.nsys import NO_PAYLOADS
from clusterprof.ingest.opening import check_regular
from clusterprof.ingest.rank_steps import beside_log, read_log, usual_step, with_collections
from clusterprof.ingest.recording import Recording
from clusterprof.ingest.sources import (
    KINETO,
    NSYS_RAW,
    NSYS_REPORT,
    NSYS_SQLITE,
    SUFFIXES,
    fresh_export,
    stem_of,
    suffix_of,
)
from clusterprof.tables import RankTables

_LOG = logging.getLogger(__name__)

#: inode, size and time of change of a file; None where it is not there
_Stamp: TypeAlias = "tuple[int, int, int] | None"


def read_report(path: Path, *, rank: int | None = None, steps: Path | None = None) -> RankTables:
    """Return the canonical tables of one rank's report: see `read_ranks`. Raises `ReportError`."""
    (only,) = read_ranks(path, rank=rank, steps=steps, alone=True)
    if isinstance(only, ReportError):
        raise only
    return only


def read_ranks(
    path: Path,
    *,
    rank: int | None = None,
    steps: Path | None = None,
    alone: bool = False,
    kept: Path | None = None,
) -> list[RankTables | ReportError]:
    """Return the canonical tables of each rank in a report, or what is wrong with that rank.

    `path` is an nsys report (`.nsys-rep`, through the installed nsys), its SQLite export
    (`.sqlite`, `.sqlite.xz`) or a Kineto trace (`.json`, plain or packed). `rank` is what a
    manifest or the user gives; None: the report itself must name it. Of a report of several ranks
    (nsys around what starts them) it is the first one's, unless the report is known to be of one
    (`alone`). `steps` is a step log that overrides the steps found in the report. `kept` is the
    folder of the report's tables (`ingest.reduced`): they are read in place of the report where
    they are of it or it is not there, and put there once it was read. Raises `ReportError`.
    """
    before = _stamp(path)
    try:
        found = _read_ranks(path, rank, steps, alone, kept, before)
    except ReportError as error:
        if before != _stamp(path):
            raise _changed(path) from error
        raise
    if before != _stamp(path):
        raise _changed(path)
    return found


def _stamp(path: Path) -> _Stamp:
    """Return what differs once a file is written to or replaced; None where it is not there."""
    try:
        there = path.stat()
    except OSError:
        return None
    return there.st_ino, there.st_size, there.st_mtime_ns


def _changed(path: Path) -> ReportError:
    return ReportError(
        f"{path} changed while it was read", "merge again once whatever writes it has ended"
    )


def _read_ranks(
    path: Path,
    rank: int | None,
    steps: Path | None,
    alone: bool,
    kept: Path | None,
    before: _Stamp,
) -> list[RankTables | ReportError]:
    try:
        whole, trouble = _kept(path, kept)
        found = whole or _found(path, alone, kept, before)
        if trouble:
            found = [each.warned(trouble) for each in found]
        if len(found) == 1:
            return [_tables(found[0], steps, rank)]
        ranks = [None if rank is None else rank + place for place in range(len(found))]
        return [_attempt(each, steps, mine) for each, mine in zip(found, ranks, strict=True)]
    except MemoryError as error:
        raise ReportError(f"{path} does not fit into memory") from error
    except ClusterprofError:
        raise
    except Exception as error:
        # Whatever a foreign file does to a reader, it costs that file's rank and no other.
        raise ReportError(
            f"{path} cannot be read: its content is not as its profiler writes it",
            f"{type(error).__name__}: {error}",
            "record or copy it again; if the profiler itself wrote it so, please report it"
            " with what --debug shows",
        ) from error


def _kept(path: Path, kept: Path | None) -> tuple[list[Recording | RankTables], str]:
    """Return the report's tables that are kept, nothing where it has to be read, and what is wrong
    with them.

    Raises ReportError where there are no tables to use, and no report either.
    """
    if kept is None or not os.path.lexists(kept):
        return [], ""
    try:
        return [reduced.read(kept, path)], ""
    except ReportError as error:
        if not os.path.lexists(path):
            raise
        _LOG.debug("%s is read: %s", path, error)
        outdated = isinstance(error, reduced.Outdated)
        return [], "" if outdated else f"{error.what}: the report was read instead"


def _found(
    path: Path, alone: bool, kept: Path | None, before: _Stamp
) -> Sequence[Recording | RankTables]:
    """Return what a report holds; that of one rank is kept, where it can be written."""
    found = _read(path, alone)
    if kept is None or len(found) != 1:
        return found
    tables = assemble(found[0])
    if before != _stamp(path):
        raise _changed(path)
    if not any(each.startswith(NO_PAYLOADS) for each in tables.warnings):  # another nsys has them
        with contextlib.suppress(OSError):  # a run that others share, a full disk
            reduced.write(tables, kept, path)
            tables = replace(tables, kept=reduced.files_of(kept))
    return [tables]


def keep(path: Path, kept: Path) -> None:
    """Put the tables of a report of one rank into `kept`, the report itself being read alone.

    Raises ReportError, also where another nsys would give more of it; OSError (no space).
    """
    before = _stamp(path)
    tables = assemble(_read(path, alone=True)[0])
    checked(tables, 0)
    if before != _stamp(path):
        raise _changed(path)
    if lacking := [each for each in tables.warnings if each.startswith(NO_PAYLOADS)]:
        raise ReportError(lacking[0])
    reduced.write(tables, kept, path)


def _attempt(
    recording: Recording | RankTables, steps: Path | None, rank: int | None
) -> RankTables | ReportError:
    """Return the tables of one of several ranks, of which one that is odd costs no other."""
    try:
        return _tables(recording, steps, rank)
    except ReportError as error:
        one = recording.info.rank if rank is None else rank
        return ReportError(f"rank {one} of {error.what}", *error.details)


def _tables(found: Recording | RankTables, steps: Path | None, rank: int | None) -> RankTables:
    whole = tables = found if isinstance(found, RankTables) else assemble(found)
    if steps is not None:
        info = tables.info
        inside = read_log(steps, info.begin_ns, info.end_ns)
        info = replace(info, usual_step_ns=usual_step(read_log(steps), info.begin_ns))
        tables = replace(tables, info=info, steps=inside)
        tables = with_collections(tables, beside_log(steps, paths.GARBAGE))
    tables = checked(tables, rank)
    same = [name for name in whole.kept if getattr(tables, name) is getattr(whole, name)]
    return replace(tables, kept={name: whole.kept[name] for name in same})


def _read(path: Path, alone: bool) -> list[Recording]:
    # The readers are imported when used: a Kineto trace needs no SQLite driver.
    check_regular(path)
    suffix = suffix_of(path)
    if suffix in NSYS_SQLITE:
        return _read_export(path, alone)
    if suffix in NSYS_REPORT:
        exports = (path.with_suffix(each) for each in NSYS_SQLITE)
        chosen = fresh_export([path, *(each for each in exports if each.is_file())])
        if chosen != path:
            return _read_export(chosen, alone)
    if suffix in (*NSYS_REPORT, *NSYS_RAW):
        from clusterprof.ingest.nsys.exported import read as read_nsys

        return read_nsys(path, alone=alone)
    if suffix in KINETO:
        from clusterprof.ingest.kineto.trace import read as read_trace

        return read_trace(path, alone=alone)
    if other_tools.suffix_of_foreign(path):
        raise other_tools.by_name(path)
    raise ReportError(
        f"{path} is no report that clusterprof knows",
        f"it reads: {', '.join('*' + each for each in SUFFIXES)}",
    )


def _read_export(path: Path, alone: bool) -> list[Recording]:
    """Return the ranks of an export, or of the report beside it where the export is no good.

    `nsys stats` leaves an export without NCCL's payloads beside each report that it looks at, and
    one that is cut short where it is stopped.
    """
    from clusterprof.ingest.nsys.exported import read as read_nsys
    from clusterprof.ingest.nsys.sqlite import read as read_sqlite

    forms = [path.with_name(stem_of(path) + suffix) for suffix in NSYS_REPORT]
    report = next((each for each in forms if each.is_file()), None)
    try:
        recordings = read_sqlite(path, alone=alone)
    except ReportError as damaged:
        if report is None:
            raise
        try:
            recordings = read_nsys(report, alone=alone)
        except ReportError as error:
            raise damaged from error
        instead = f"{damaged.what}: the report beside it was read instead"
        return [each.warned(instead) for each in recordings]
    columns = (recording.collectives["source"] for recording in recordings)
    sources = {source for column in columns for source in column.unique().to_pylist()}
    if report is None or "nvtx_name" not in sources or "nvtx_payload" in sources:
        return recordings
    try:
        return read_nsys(report, alone=alone)
    except ReportError:
        return recordings  # the export was good enough for everything else
