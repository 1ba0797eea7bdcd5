"""Make an nsys SQLite export fit to share: without the environment of the process it is of.

A report holds every environment variable of the profiled process (keys, tokens, paths) in up
to three places, and what the program printed. What tells the rank and the job stays, so that
the scrubbed export can still be merged.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

from clusterprof.agent import files
from clusterprof.errors import ReportError
from clusterprof.ingest.export import Export, unreadable
from clusterprof.ingest.identity import WANTED

#: Besides the rank's place: versions, which explain a recording and hold nothing private.
KEPT = WANTED | {"CUDA_VERSION", "NCCL_VERSION", "GROUP_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK"}

_REMOVED = "removed by clusterprof scrub"


def scrub(source: Path, target: Path) -> None:
    """Write a copy of the SQLite export `source` to `target` without environment and output.

    The copy is rebuilt, so that nothing is left in free pages. Raises ReportError where
    `source` is no nsys export, or `target` cannot be written.
    """
    Export(source).close()
    try:
        with files.new(target, 0o600) as copy:
            with source.open("rb") as file:
                shutil.copyfileobj(file, copy)
            copy.flush()
            with contextlib.closing(sqlite3.connect(copy.name)) as database:
                # Names of other processes need not be UTF-8.
                database.text_factory = bytes
                _clean(database)
                database.commit()
                database.execute("VACUUM")
    except OSError as error:
        raise unreadable(target, error) from error
    except sqlite3.Error as error:
        raise ReportError(f"{source} cannot be scrubbed", f"sqlite said: {error}") from error


def _clean(database: sqlite3.Connection) -> None:
    tables = {name.decode() for (name,) in database.execute("SELECT name FROM sqlite_master")}
    if "META_DATA_CAPTURE" in tables:
        _clean_lines(database)
    if "TARGET_INFO_SYSTEM_ENV" in tables:
        _clean_joined(database, "TARGET_INFO_SYSTEM_ENV", "name = 'DeviceEnvironment'")
    if "ProcessStreams" in tables:
        database.execute(
            "UPDATE StringIds SET value = ? WHERE id IN (SELECT contentId FROM ProcessStreams)",
            (_REMOVED,),
        )
    _clean_joined(database, "StringIds", "instr(CAST(value AS BLOB), x'00')")


def _clean_lines(database: sqlite3.Connection) -> None:
    """One variable a row: `NAME="value"`."""
    rows = database.execute(
        "SELECT rowid, value FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT_VARIABLE%'"
    ).fetchall()
    private = [(row,) for row, value in rows if not _may_stay(value or b"")]
    database.executemany("DELETE FROM META_DATA_CAPTURE WHERE rowid = ?", private)


def _clean_joined(database: sqlite3.Connection, table: str, where: str) -> None:
    """The whole environment in one string, NAME=value with NULs between."""
    rows = database.execute(f"SELECT rowid, value FROM {table} WHERE {where}").fetchall()
    for row, value in rows:
        kept = b"\0".join(line for line in value.split(b"\0") if _may_stay(line))
        database.execute(f"UPDATE {table} SET value = CAST(? AS TEXT) WHERE rowid = ?", (kept, row))


def _may_stay(line: bytes) -> bool:
    return line.partition(b"=")[0].decode("ascii", "replace") in KEPT
