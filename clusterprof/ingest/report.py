"""One report of whatever format as canonical tables, with the rank and steps it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterprof.errors import ReportError
from clusterprof.ingest.sources import (
    KINETO,
    NSYS_REPORT,
    NSYS_SQLITE,
    SUFFIXES,
    fresh_export,
    stem_of,
    suffix_of,
)
from clusterprof.ingest.steps import read_log
from clusterprof.tables import RankTables


def read_report(
    path: Path,
    *,
    rank: int | None = None,
    steps: Path | None = None,
    nsys: Path | None = None,
) -> RankTables:
    """Return one report's canonical tables.

    `path` is an nsys report (`.nsys-rep`, through the installed nsys), its SQLite export
    (`.sqlite`, `.sqlite.xz`) or a Kineto trace (`.json`, plain or packed). `rank` is what a
    manifest or the user says; None: the report itself must say. `steps` is a step log that
    overrides the steps found in the report. `nsys` exports a `.nsys-rep` where it is there, else
    the installed one. Raises `ReportError`.
    """
    tables = _read(path, nsys)
    if steps is not None:
        info = tables.info
        tables = replace(tables, steps=read_log(steps, info.begin_ns, info.end_ns))
    return _with_rank(tables, rank)


def _read(path: Path, nsys: Path | None) -> RankTables:
    # The readers are imported when used: a Kineto trace needs no SQLite driver.
    suffix = suffix_of(path)
    if suffix in NSYS_SQLITE:
        from clusterprof.ingest.nsys_sqlite import read as read_sqlite

        return _with_payloads(read_sqlite(path), path, nsys)
    if suffix in NSYS_REPORT:
        from clusterprof.ingest.nsys_export import read as read_nsys

        exports = (path.with_suffix(each) for each in NSYS_SQLITE)
        forms = [path, *(each for each in exports if each.is_file())]
        chosen = fresh_export(forms) if path.is_file() else path
        return read_nsys(path, nsys) if chosen == path else _read(chosen, nsys)
    if suffix in KINETO:
        from clusterprof.ingest.kineto import read as read_trace

        return read_trace(path)
    if not path.exists():
        raise ReportError(f"{path} does not exist", "check the path")
    raise ReportError(
        f"{path} is no report that clusterprof knows",
        f"it reads: {', '.join('*' + each for each in SUFFIXES)}",
    )


def _with_payloads(tables: RankTables, export: Path, nsys: Path | None) -> RankTables:
    """Return the tables of an export, or of the report beside it where that says more.

    `nsys stats` leaves an export without NCCL's payloads beside each report that it looks at.
    """
    report = export.with_name(stem_of(export) + NSYS_REPORT[0])
    sources = set(tables.collective_calls.column("source").unique().to_pylist())
    if "nvtx_name" not in sources or "nvtx_payload" in sources or not report.is_file():
        return tables
    from clusterprof.ingest.nsys_export import read as read_nsys

    try:
        again = read_nsys(report, nsys)
    except ReportError:
        return tables  # the export was good enough for everything else
    return replace(again, info=replace(again.info, source=tables.info.source))


def _with_rank(tables: RankTables, rank: int | None) -> RankTables:
    info = tables.info
    if rank is None and info.rank is None:
        raise ReportError(
            f"{info.source} does not say which rank it is",
            "looked for RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, ... in its environment, for its"
            " rank in NCCL's communicators, and for distributedInfo in a trace",
            f"say it: --rank {info.source}=N",
        )
    if rank is None or rank == info.rank:
        return tables
    warnings = tables.warnings
    if info.rank is not None:
        said = f"{info.source} says it is rank {info.rank}, and is taken as rank {rank} as told"
        warnings = (*warnings, said)
    info = replace(info, rank=rank, warnings=warnings)
    return replace(tables, info=info, warnings=warnings)
