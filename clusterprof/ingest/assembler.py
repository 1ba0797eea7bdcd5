"""One report of whatever format as canonical tables, with the rank and steps it belongs to."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.ingest import kinds
from clusterprof.ingest.checks import checked
from clusterprof.ingest.garbage_collections import beside_steps, with_collections
from clusterprof.ingest.nsys.database import unreadable
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
from clusterprof.ingest.step_ranges import read_log, usual_step
from clusterprof.tables import RankTables


def read_report(
    path: Path,
    *,
    rank: int | None = None,
    steps: Path | None = None,
    nsys: Path | None = None,
) -> RankTables:
    """Return the canonical tables of one rank's report: see `read_ranks`. Raises `ReportError`."""
    (only,) = read_ranks(path, rank=rank, steps=steps, nsys=nsys, alone=True)
    if isinstance(only, ReportError):
        raise only
    return only


def read_ranks(
    path: Path,
    *,
    rank: int | None = None,
    steps: Path | None = None,
    nsys: Path | None = None,
    alone: bool = False,
) -> list[RankTables | ReportError]:
    """Return the canonical tables of each rank in a report, or what is wrong with that rank.

    `path` is an nsys report (`.nsys-rep`, through the installed nsys), its SQLite export
    (`.sqlite`, `.sqlite.xz`) or a Kineto trace (`.json`, plain or packed). `rank` is what a
    manifest or the user says; None: the report itself must say. Of a report of several ranks (nsys
    around what starts them) it is the first one's, unless the report is known to be of one
    (`alone`). `steps` is a step log that
    overrides the steps found in the report. `nsys` exports a `.nsys-rep` where it is there, else
    the installed one. Raises `ReportError`.
    """
    try:
        found = _read(path, nsys, alone)
        if len(found) == 1:
            return [_checked(found[0], steps, rank)]
        told = [None if rank is None else rank + place for place in range(len(found))]
        return [_attempt(tables, steps, mine) for tables, mine in zip(found, told, strict=True)]
    except MemoryError as error:
        raise ReportError(f"{path} does not fit into memory") from error
    except ClusterprofError:
        raise
    except Exception as error:
        # Whatever a stranger's file does to a reader, it costs that file's rank and no other.
        raise ReportError(
            f"{path} cannot be read: its content is not as its profiler writes it",
            f"{type(error).__name__}: {error}",
            "record or copy it again; if the profiler itself wrote it so, please report it"
            " with what --debug shows",
        ) from error


def _attempt(tables: RankTables, steps: Path | None, rank: int | None) -> RankTables | ReportError:
    """Check one of several ranks, of which one that is odd costs no other."""
    try:
        return _checked(tables, steps, rank)
    except ReportError as error:
        one = tables.info.rank if rank is None else rank
        return ReportError(f"rank {one} of {error.what}", *error.details)


def _checked(tables: RankTables, steps: Path | None, rank: int | None) -> RankTables:
    if steps is not None:
        info = tables.info
        inside = read_log(steps, info.begin_ns, info.end_ns)
        info = replace(info, usual_step_ns=usual_step(read_log(steps), info.begin_ns))
        tables = replace(tables, info=info, steps=inside)
        tables = with_collections(tables, beside_steps(steps))
    return checked(tables, rank)


def _read(path: Path, nsys: Path | None, alone: bool) -> list[RankTables]:
    # The readers are imported when used: a Kineto trace needs no SQLite driver.
    _check_regular(path)
    suffix = suffix_of(path)
    if suffix in NSYS_SQLITE:
        return _read_export(path, nsys, alone)
    if suffix in NSYS_REPORT:
        exports = (path.with_suffix(each) for each in NSYS_SQLITE)
        chosen = fresh_export([path, *(each for each in exports if each.is_file())])
        if chosen != path:
            return _read_export(chosen, nsys, alone)
    if suffix in (*NSYS_REPORT, *NSYS_RAW):
        from clusterprof.ingest.nsys.export import read as read_nsys

        return read_nsys(path, nsys, alone=alone)
    if suffix in KINETO:
        from clusterprof.ingest.kineto.trace import read as read_trace

        return [read_trace(path)]
    if kinds.suffix_of_foreign(path):
        raise kinds.by_name(path)
    raise ReportError(
        f"{path} is no report that clusterprof knows",
        f"it reads: {', '.join('*' + each for each in SUFFIXES)}",
    )


def _check_regular(path: Path) -> None:
    """Raise `ReportError` for what is not there, may not be seen, or could be waited for for ever.

    Opening a pipe that nobody writes to does not return.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            next(path.iterdir(), None)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file (a pipe or a device)"
        raise ReportError(f"{path} is {what}, not a report", "copy the report into a file")


def _read_export(path: Path, nsys: Path | None, alone: bool) -> list[RankTables]:
    """Return the ranks of an export, or of the report beside it where the export is no good.

    `nsys stats` leaves an export without NCCL's payloads beside each report that it looks at, and
    one that is cut short where it is stopped.
    """
    from clusterprof.ingest.nsys.sqlite import read as read_sqlite

    forms = [path.with_name(stem_of(path) + suffix) for suffix in NSYS_REPORT]
    report = next((each for each in forms if each.is_file()), forms[0])
    try:
        ranks = read_sqlite(path, alone=alone)
    except ReportError as damaged:
        if not report.is_file():
            raise
        return _read_beside(report, nsys, alone, damaged)
    sources = {
        source
        for tables in ranks
        for source in tables.collective_calls.column("source").unique().to_pylist()
    }
    if "nvtx_name" not in sources or "nvtx_payload" in sources or not report.is_file():
        return ranks
    try:
        return _read_beside(report, nsys, alone)
    except ReportError:
        return ranks  # the export was good enough for everything else


def _read_beside(
    report: Path, nsys: Path | None, alone: bool, damaged: ReportError | None = None
) -> list[RankTables]:
    from clusterprof.ingest.nsys.export import read as read_nsys

    try:
        ranks = read_nsys(report, nsys, alone=alone)
    except ReportError as error:
        raise damaged or error from error
    if damaged is None:
        return ranks
    instead = f"{damaged.what}: the report beside it was read instead"
    return [tables.warned(instead) for tables in ranks]
