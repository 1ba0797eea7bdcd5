"""One report of whatever format as canonical tables, with the rank and steps it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterprof.agent.contracts import paths
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.ingest import other_tools
from clusterprof.ingest.assembler import assemble, checked
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
) -> list[RankTables | ReportError]:
    """Return the canonical tables of each rank in a report, or what is wrong with that rank.

    `path` is an nsys report (`.nsys-rep`, through the installed nsys), its SQLite export
    (`.sqlite`, `.sqlite.xz`) or a Kineto trace (`.json`, plain or packed). `rank` is what a
    manifest or the user gives; None: the report itself must name it. Of a report of several ranks
    (nsys around what starts them) it is the first one's, unless the report is known to be of one
    (`alone`). `steps` is a step log that overrides the steps found in the report. Raises
    `ReportError`.
    """
    try:
        found = _read(path, alone)
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


def _attempt(
    recording: Recording, steps: Path | None, rank: int | None
) -> RankTables | ReportError:
    """Return the tables of one of several ranks, of which one that is odd costs no other."""
    try:
        return _tables(recording, steps, rank)
    except ReportError as error:
        one = recording.info.rank if rank is None else rank
        return ReportError(f"rank {one} of {error.what}", *error.details)


def _tables(recording: Recording, steps: Path | None, rank: int | None) -> RankTables:
    tables = assemble(recording)
    if steps is not None:
        info = tables.info
        inside = read_log(steps, info.begin_ns, info.end_ns)
        info = replace(info, usual_step_ns=usual_step(read_log(steps), info.begin_ns))
        tables = replace(tables, info=info, steps=inside)
        tables = with_collections(tables, beside_log(steps, paths.GARBAGE))
    return checked(tables, rank)


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

        return [read_trace(path)]
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
