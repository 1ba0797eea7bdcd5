"""One report of whatever format as canonical tables, with the rank and steps it belongs to."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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
    with _reading(path) as check_unchanged:
        ranks, trouble = _kept(path, kept)
        if not ranks:
            ranks = [assemble(recording) for recording in _read(path, alone)]
            if kept is not None and len(ranks) == 1:
                check_unchanged()
                ranks = [_with_files(ranks[0], path, kept)]
        if trouble:
            ranks = [tables.warned(trouble) for tables in ranks]
        if len(ranks) == 1:
            return [_as_rank(ranks[0], steps, rank)]
        numbers = [None if rank is None else rank + place for place in range(len(ranks))]
        return [_attempt(tables, steps, n) for tables, n in zip(ranks, numbers, strict=True)]


def keep(path: Path, kept: Path) -> None:
    """Put the tables of a report of one rank into `kept`, the report itself being read alone.

    Raises ReportError, also where another nsys would give more of it; OSError (no space).
    """
    with _reading(path):
        tables = assemble(_read(path, alone=True)[0])
        checked(tables, 0)
    if lacking := [warning for warning in tables.warnings if warning.startswith(NO_PAYLOADS)]:
        raise ReportError(lacking[0])
    reduced.write(tables, kept, path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Callable[[], None]]:
    """Turn whatever a foreign file does to its reader into a ReportError: it costs no other rank.

    Raises one too where the file has changed meanwhile, which what is given raises at once.
    """
    before = _stamp(path)

    def check_unchanged() -> None:
        if before != _stamp(path):
            raise ReportError(
                f"{path} changed while it was read",
                "merge again once whatever writes it has ended",
            )

    try:
        yield check_unchanged
    except Exception as error:
        check_unchanged()
        if isinstance(error, ClusterprofError):
            raise
        if isinstance(error, MemoryError):
            raise ReportError(f"{path} does not fit into memory") from error
        raise ReportError(
            f"{path} cannot be read: its content is not as its profiler writes it",
            f"{type(error).__name__}: {error}",
            "record or copy it again; if the profiler itself wrote it so, please report it"
            " with what --debug shows",
        ) from error
    check_unchanged()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what differs once a file is written to or replaced; None where it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _kept(path: Path, kept: Path | None) -> tuple[list[RankTables], str]:
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


def _with_files(tables: RankTables, path: Path, kept: Path) -> RankTables:
    """Return the tables of a report with the files that they are kept in, where these can be."""
    if any(warning.startswith(NO_PAYLOADS) for warning in tables.warnings):
        return tables  # another nsys has them
    try:
        reduced.write(tables, kept, path)
    except OSError:  # a run that others share, a full disk
        return tables
    return replace(tables, kept=reduced.files_of(kept))


def _attempt(tables: RankTables, steps: Path | None, rank: int | None) -> RankTables | ReportError:
    """Return the tables of one of several ranks, of which one that is odd costs no other."""
    try:
        return _as_rank(tables, steps, rank)
    except ReportError as error:
        number = tables.info.rank if rank is None else rank
        return ReportError(f"rank {number} of {error.what}", *error.details)


def _as_rank(whole: RankTables, steps: Path | None, rank: int | None) -> RankTables:
    """Return a report's tables with the steps of a step log, checked, as those of a rank."""
    tables = whole
    if steps is not None:
        info = whole.info
        inside = read_log(steps, info.begin_ns, info.end_ns)
        info = replace(info, usual_step_ns=usual_step(read_log(steps), info.begin_ns))
        tables = replace(whole, info=info, steps=inside)
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
        exports = (path.with_suffix(ending) for ending in NSYS_SQLITE)
        chosen = fresh_export([path, *(export for export in exports if export.is_file())])
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
        f"it reads: {', '.join('*' + ending for ending in SUFFIXES)}",
    )


def _read_export(path: Path, alone: bool) -> list[Recording]:
    """Return the ranks of an export, or of the report beside it where the export is no good.

    `nsys stats` leaves an export without NCCL's payloads beside each report that it looks at, and
    one that is cut short where it is stopped.
    """
    from clusterprof.ingest.nsys.exported import read as read_nsys
    from clusterprof.ingest.nsys.sqlite import read as read_sqlite

    forms = [path.with_name(stem_of(path) + suffix) for suffix in NSYS_REPORT]
    report = next((form for form in forms if form.is_file()), None)
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
        return [recording.warned(instead) for recording in recordings]
    columns = (recording.collectives["source"] for recording in recordings)
    sources = {source for column in columns for source in column.unique().to_pylist()}
    if report is None or "nvtx_name" not in sources or "nvtx_payload" in sources:
        return recordings
    try:
        return read_nsys(report, alone=alone)
    except ReportError:
        return recordings  # the export was good enough for everything else
