"""One report of whatever format as canonical tables, with the rank and steps it belongs to."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.ingest import other_tools, reduced
from clusterprof.ingest.assembler import assemble, checked
from clusterprof.ingest.nsys import NO_PAYLOADS
from clusterprof.ingest.opening import check_regular
from clusterprof.ingest.rank_steps import collections_of, read_log, usual_step, with_collections
from clusterprof.ingest.recording import Recording
from clusterprof.ingest.sources import (
    NSYS_REPORT,
    NSYS_SQLITE,
    SUFFIXES,
    Source,
    format_of,
    fresh_export,
    stem_of,
)
from clusterprof.tables import RankTables

_LOG = logging.getLogger(__name__)


def read_report(path: Path, *, rank: int | None = None, steps: Path | None = None) -> RankTables:
    """Return the canonical tables of one rank's report: see `read_ranks`. Raises `ReportError`."""
    (only,) = read_ranks(Source(path, rank, alone=True, steps=steps))
    if isinstance(only, ReportError):
        raise only
    return only


def read_ranks(source: Source) -> list[RankTables | ReportError]:
    """Return the canonical tables of each rank in a report, or what is wrong with that rank.

    The report is nsys' own (`.nsys-rep`, through the installed nsys), its SQLite export
    (`.sqlite`, `.sqlite.xz`) or a Kineto trace (`.json`, plain or packed). Of a report of several
    ranks (nsys around what starts them) the source's rank is the first one's. Raises `ReportError`.
    """
    rank = source.rank
    with _reading(source.path) as check_unchanged:
        ranks = _tables(source, check_unchanged)
        if len(ranks) == 1:
            return [_as_rank(ranks[0], source, rank)]
        outcomes: list[RankTables | ReportError] = []
        for place, tables in enumerate(ranks):
            given = None if rank is None else rank + place
            try:
                outcomes.append(_as_rank(tables, source, given))
            except ReportError as error:  # costs no other rank
                number = tables.info.rank if given is None else given
                outcomes.append(ReportError(f"rank {number} of {error.what}", *error.details))
        return outcomes


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


def _tables(source: Source, check_unchanged: Callable[[], None]) -> list[RankTables]:
    """Return a report's tables, as they are kept, or of the report itself, and kept from then on.

    Raises ReportError where there are no tables to use, and no report either.
    """
    path, kept, trouble = source.path, source.reduced, []
    if kept is not None and os.path.lexists(kept):
        try:
            return [reduced.read(kept, path)]
        except ReportError as error:
            if not os.path.lexists(path):
                raise
            _LOG.debug("%s is read: %s", path, error)
            if not isinstance(error, reduced.Outdated):
                trouble = [f"{error.what}: the report was read instead"]
    ranks = [assemble(recording) for recording in _read(path, source.alone)]
    if kept is not None and len(ranks) == 1:
        check_unchanged()
        # payloads that are lacking another nsys has
        if not any(warning.startswith(NO_PAYLOADS) for warning in ranks[0].warnings):
            with contextlib.suppress(OSError):  # a run that others share, a full disk
                reduced.write(ranks[0], kept, path)
                ranks = [replace(ranks[0], kept=reduced.files_of(kept))]
    return [tables.warned(*trouble) for tables in ranks]


def _as_rank(whole: RankTables, source: Source, rank: int | None) -> RankTables:
    """Return a report's tables with the steps of its step log, checked, as those of a rank."""
    tables, steps = whole, source.steps
    if steps is not None:
        info = whole.info
        inside = read_log(steps, info.begin_ns, info.end_ns)
        info = replace(info, usual_step_ns=usual_step(read_log(steps), info.begin_ns))
        tables = replace(whole, info=info, steps=inside)
        tables = with_collections(tables, collections_of(source.path, steps))
    tables = checked(tables, rank)
    same = [name for name in whole.kept if getattr(tables, name) is getattr(whole, name)]
    return replace(tables, kept={name: whole.kept[name] for name in same})


def _read(path: Path, alone: bool) -> list[Recording]:
    check_regular(path)
    form = format_of(path)
    if form is None:
        unknown = f"{path} is no report that clusterprof knows"
        it_reads = f"it reads: {', '.join('*' + ending for ending in SUFFIXES)}"
        raise other_tools.by_name(path, SUFFIXES) or ReportError(unknown, it_reads)
    if form is NSYS_REPORT:
        exports = (path.with_suffix(ending) for ending in NSYS_SQLITE.suffixes)
        chosen = fresh_export([path, *(export for export in exports if export.is_file())])
        if chosen != path:
            return _read_export(chosen, alone)
    return _read_export(path, alone) if form is NSYS_SQLITE else form.read(path, alone=alone)


def _read_export(path: Path, alone: bool) -> list[Recording]:
    """Return the ranks of an export, or of the report beside it where the export is no good.

    `nsys stats` leaves an export without NCCL's payloads beside each report that it looks at, and
    one that is cut short where it is stopped.
    """
    forms = [path.with_name(stem_of(path) + suffix) for suffix in NSYS_REPORT.suffixes]
    report = next((form for form in forms if form.is_file()), None)
    try:
        recordings = NSYS_SQLITE.read(path, alone=alone)
    except ReportError as damaged:
        if report is None:
            raise
        try:
            recordings = NSYS_REPORT.read(report, alone=alone)
        except ReportError as error:
            raise damaged from error
        instead = f"{damaged.what}: the report beside it was read instead"
        return [recording.warned(instead) for recording in recordings]
    columns = (recording.collectives["source"] for recording in recordings)
    sources = {source for column in columns for source in column.unique().to_pylist()}
    lacks_payloads = "nvtx_name" in sources and "nvtx_payload" not in sources
    if report is not None and lacks_payloads:
        with contextlib.suppress(ReportError):  # the export was good enough for everything else
            return NSYS_REPORT.read(report, alone=alone)
    return recordings
