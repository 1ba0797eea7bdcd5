"""A report's canonical tables beside it: a rank's `reduced/`, made where it ran, or by a merge.

Four Parquet files and `rank.json`, which says of which report they are. They are of the report
alone: steps of a step log replace its own when they are read. Made under a temporary name and put
in place by rename, so what is there is whole; what was cut short in copying is an error in words.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from clusterprof import __version__, folders
from clusterprof.agent.contracts import files, paths
from clusterprof.errors import ReportError
from clusterprof.ingest.opening import unreadable
from clusterprof.ingest.recording import BEGINS
from clusterprof.mapped import moved
from clusterprof.tables import SCHEMA_VERSION, SCHEMAS, RankTables, ReportInfo, read_table

#: bytes; to unpack a smaller table takes as long as all else that reading it takes
_SMALL = 1 << 15
#: bytes; a larger table lies in a file of the system's: there may be a thousand of them
_LARGE = 1 << 18

#: of each table, the column by which its rows are sorted
_SORTED_BY = BEGINS | {"collective_calls": "call"}


def _texts_by_text(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )


def _file_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^/\0]{1,255}", value) is not None


_NUMBER = range(1 << 62)
_INFO = {
    "profiler": str, "rank": (int, None), "world_size": (int, None),
    "local_rank": (int, None), "host": str, "device": str, "versions": _texts_by_text,
    "job": (str, None), "epoch_ns": int, "begin_ns": int, "end_ns": int, "backend": str,
    "groups": _texts_by_text, "usual_step_ns": (int, None), "warnings": [str],
}  # fmt: skip
#: of tables of any version
_MADE = {
    "clusterprof_version": str,
    "report": {"name": _file_name, "size_bytes": _NUMBER, "crc32": range(1 << 32)},
}
_FORM = {
    **_MADE,
    "tables": {name: {"rows": _NUMBER, "size_bytes": _NUMBER} for name in SCHEMAS},
    "info": _INFO,
}


class Outdated(ReportError):  # noqa: N818 - it says what is the matter
    """Whole tables, but of another report, or made by another clusterprof."""


def _origin(report: Path) -> dict[str, Any]:
    """Return a file's name, size and CRC-32, which tell whose tables are. Raises ReportError."""
    checksum = size = 0
    try:
        with files.opened(report, links=True) as file:
            while piece := file.read(8 << 20):
                checksum = zlib.crc32(piece, checksum)
                size += len(piece)
    except OSError as error:
        raise unreadable(report, error) from error
    return {"name": report.name, "size_bytes": size, "crc32": checksum}


def write(tables: RankTables, folder: Path, report: Path) -> None:
    """Put the tables of one report, as they were before any step log, into `folder`.

    What is there is replaced once they are whole; of two at once the last one stays. Raises OSError
    (no space), ReportError where the report cannot be read.
    """
    import pyarrow.parquet as parquet

    origin = _origin(report)
    written: dict[str, dict[str, int]] = {}
    with folders.new_folder(folder) as unfinished:
        for name in SCHEMAS:
            table: pa.Table = getattr(tables, name)
            target = unfinished / f"{name}.parquet"
            with files.new(target) as file:  # pyarrow opens no path whose bytes are not UTF-8
                parquet.write_table(
                    table, file, write_page_checksum=True, row_group_size=max(1, table.num_rows),
                    compression="none" if table.nbytes < _SMALL else "zstd",
                )  # fmt: skip
            written[name] = {"rows": table.num_rows, "size_bytes": target.stat().st_size}
        info = asdict(tables.info)
        del info["source"]
        content = {
            "schema_version": SCHEMA_VERSION,
            "clusterprof_version": __version__,
            "report": origin,
            "tables": written,
            "info": info,
        }
        files.write_json(unfinished / paths.REDUCED_RANK, content, indent=1)


def read(folder: Path, report: Path) -> RankTables:
    """The tables of a report, as `assembler.assemble` made them.

    `report` is where the report is or would be (`report_of`). Where it is there, the tables must be
    of that very file, and made by this clusterprof. Raises ReportError with what is wrong with
    them.
    """
    content = _content(folder, _FORM)
    maker = f"clusterprof {content['clusterprof_version']:.40}"
    if content["schema_version"] != SCHEMA_VERSION:
        raise _unusable(
            folder,
            f"they are of schema version {content['schema_version']}, and this clusterprof reads"
            f" version {SCHEMA_VERSION}",
            f"merge with {maker}, which made them",
            kind=Outdated,
        )
    if os.path.lexists(report):
        if content["clusterprof_version"] != __version__:
            raise _unusable(folder, f"{maker} made them", kind=Outdated)
        _check_origin(folder, report, content["report"])
    info = {name: content["info"][name] for name in _INFO}
    info["warnings"] = tuple(info["warnings"])
    return RankTables(
        ReportInfo(source=report, **info),
        **{name: _table(folder, name, content["tables"][name]) for name in SCHEMAS},
        kept=files_of(folder),
    )


def files_of(folder: Path) -> dict[str, Path]:
    """The file of each table in a folder of reduced tables."""
    return {name: folder / f"{name}.parquet" for name in SCHEMAS}


def report_of(folder: Path) -> Path:
    """Where the report of reduced tables is, or was before it was dropped. Raises ReportError."""
    return folder.with_name(_content(folder, _MADE)["report"]["name"])


def _content(folder: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = files.load(folder / paths.REDUCED_RANK)
    except OSError as error:
        raise _unusable(folder, f"{paths.REDUCED_RANK}: {error.strerror or error}") from None
    except ValueError as error:
        raise _unusable(folder, f"{paths.REDUCED_RANK} is damaged: {error}") from None
    # of another version the rest may have another form
    if not isinstance(content, dict) or not isinstance(content.get("schema_version"), int):
        raise _unusable(folder, f"{paths.REDUCED_RANK} is not clusterprof's")
    form = form if content["schema_version"] == SCHEMA_VERSION else _MADE
    for name, expected in form.items():
        if not files.fits(content, {name: expected}):
            raise _unusable(folder, f"the {name!r} of {paths.REDUCED_RANK} is invalid")
    return content


def _check_origin(folder: Path, report: Path, claimed: Mapping[str, Any]) -> None:
    """Raise ReportError unless the tables are of this file."""
    try:
        same_size = report.stat().st_size == claimed["size_bytes"]
    except OSError as error:
        raise unreadable(report, error) from error
    if not same_size or not _origin(report).items() <= claimed.items():
        why = f"they are of another report than {report.name} is now"
        raise _unusable(folder, why, kind=Outdated)


def _table(folder: Path, name: str, claimed: Mapping[str, int]) -> pa.Table:
    """One table in one chunk, in the form and order of its schema."""
    file = folder / f"{name}.parquet"
    try:
        size = file.stat().st_size
    except OSError as error:
        raise _unusable(folder, f"{file.name}: {error.strerror or error}") from None
    if size != claimed["size_bytes"]:
        raise _unusable(folder, f"{file.name} has {size} of {claimed['size_bytes']} bytes")
    try:
        table = read_table(file, SCHEMAS[name])
    except ReportError as error:
        raise _unusable(folder, error.what) from None
    table = table.unify_dictionaries().combine_chunks()
    lacking = any(table[field.name].null_count for field in table.schema if not field.nullable)
    order = table[_SORTED_BY[name]].to_numpy()
    unsorted = bool((order[:-1] > order[1:]).any())
    if lacking or unsorted or table.num_rows != claimed["rows"]:
        raise _unusable(folder, f"{file.name} does not hold what clusterprof writes")
    return moved(table) if table.nbytes > _LARGE else table


def _unusable(
    folder: Path, why: str, *more: str, kind: type[ReportError] = ReportError
) -> ReportError:
    again = "copy them again, or put the report itself beside them and merge again"
    return kind(f"the reduced tables in {folder} cannot be used: {why}", *more or (again,))
