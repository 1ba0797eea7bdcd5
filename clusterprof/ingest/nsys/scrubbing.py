"""Make an nsys SQLite export fit to share: what is needed to merge it stays, and nothing else.

A report holds every environment variable of the profiled process, and of whatever else ran on the
machine (keys, tokens, paths), all its arguments, what it printed, and the names of other users'
processes. So the strings and facts that may stay are listed here, not those that must go; and
what stays is searched for what looks like an assignment or a secret.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import sqlite3
from pathlib import Path

from clusterprof import masking
from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.sqlite import wanted_variables

#: Besides the rank's place: versions, which explain a recording and hold nothing private.
_KEPT = {"CUDA_VERSION", "NCCL_VERSION", "GROUP_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK"}

#: marks a copy as ours in SQLite's own field for that ("clsp")
_MARK = 0x636C7370

#: the tables of facts in which these names stay, of patterns of GLOB
_FACTS = {
    "META_DATA_CAPTURE": ("*ENVIRONMENT_VARIABLE",),
    "META_DATA_EXPORT": ("EXPORT_PRODUCT_*", "EXPORT_SCHEMA_*"),
    "EXPORT_META_DATA": ("EXPORT_PRODUCT_*", "EXPORT_SCHEMA_*"),
    "TARGET_INFO_SYSTEM_ENV": ("Hostname", "DeviceEnvironment"),
}

#: columns by which events name what they are; a compiler wrote the symbols
_NAMES = re.compile(r"(nameId|textId|schedulingDetailId|jsonTextId)", re.IGNORECASE)
_SYMBOLS = re.compile(r"(shortName|demangledName|mangledName)", re.IGNORECASE)

#: tables of events that only the profiled processes have
_OF_THE_PROFILED = re.compile(r"NVTX_EVENTS|OSRT_API|CUPTI_ACTIVITY_KIND_\w+")

#: `NAME=value` that is no measure (`step=7`, `lr=1e-3`) and no argument of a function's name
_ASSIGNMENT = re.compile(
    r"(?<![A-Za-z0-9_])([A-Za-z_][A-Za-z0-9_]*=)"
    r"(?!(?:[-+]?[0-9.]+(?:e[-+]?[0-9]+)?|true|false|none)(?![^\s,;)\]}]))[^\s,;)\]}]+",
    re.IGNORECASE,
)


def scrub(source: Path, target: Path) -> None:
    """Write a copy of the SQLite export `source` to `target` with no more than a merge needs.

    The copy is rebuilt, so that nothing is left in free pages. `target` is replaced as a whole, or
    left as it was. Raises ReportError where `source` is no nsys export, or `target` cannot be
    written.
    """
    Export(source).close()
    try:
        # a link is followed: the user named it
        with files.opened(source, links=True) as file, files.new(target, 0o600) as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            with contextlib.closing(sqlite3.connect(copy.name)) as database:
                # Names of other processes need not be UTF-8.
                database.text_factory = bytes
                database.create_function("variables", 1, _variables, deterministic=True)
                database.create_function("masked", 1, _masked, deterministic=True)
                _clean(database)
                database.execute(f"PRAGMA application_id = {_MARK}")
                database.commit()
                database.execute("VACUUM")
    except OSError as error:
        raise ReportError(
            f"{target} cannot be written: {error.strerror or error}",
            "choose another place, or make its folder",
        ) from error
    except sqlite3.Error as error:
        raise ReportError(f"{source} cannot be scrubbed", f"sqlite printed: {error}") from error


def is_ours(path: Path) -> bool:
    """Whether a file is a copy that `scrub` wrote."""
    try:
        with files.opened(path, links=True) as file:
            head = file.read(72)
    except OSError:
        return False
    return head.startswith(b"SQLite format 3\0") and head[68:] == _MARK.to_bytes(4, "big")


def _clean(database: sqlite3.Connection) -> None:
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    columns = {}
    for (name,) in tables:
        described = database.execute(f"PRAGMA table_info({_quoted(name.decode())})")
        columns[name.decode()] = [row[1].decode() for row in described]
    environments = "(name GLOB '*Environment*' OR name GLOB '*ENVIRONMENT_VARIABLE')"
    kept = "CAST(variables(CAST(value AS BLOB)) AS TEXT)"
    for table in columns.keys() & _FACTS.keys():
        stays = " OR ".join("name GLOB ?" for _ in _FACTS[table])
        database.execute(f"DELETE FROM {table} WHERE NOT ({stays})", _FACTS[table])
        # of environments, one variable or NUL-separated ones, only those that may stay
        database.execute(f"UPDATE {table} SET value = {kept} WHERE {environments}")
        database.execute(f"DELETE FROM {table} WHERE value = '' AND {environments}")
    if "ProcessStreams" in columns:
        database.execute("DELETE FROM ProcessStreams")
    _forget_other_processes(database, columns)
    _keep_named_strings(database, columns)
    for table, names in columns.items():
        if table.startswith("ENUM_") or table in (*_FACTS, "StringIds"):
            continue
        for column in map(_quoted, names):  # texts that look like an assignment or a secret
            masked = f"CAST(masked(CAST({column} AS BLOB)) AS TEXT)"
            database.execute(
                f"UPDATE {_quoted(table)} SET {column} = {masked}"
                f" WHERE typeof({column}) = 'text' AND {column} <> {masked}"
            )


def _variables(value: object) -> bytes:
    """The variables of `value` that may stay; "" where it has none, or is no text."""
    if not isinstance(value, bytes):
        return b""
    kept = {name.encode() for name in wanted_variables() | _KEPT}
    lines = (line.partition(b"=") for line in value.split(b"\0"))
    return b"\0".join(b"".join(line) for line in lines if line[1] and line[0] in kept)


def _forget_other_processes(database: sqlite3.Connection, columns: dict[str, list[str]]) -> None:
    """Names of processes and threads that the report is not about: other users' among them."""
    asked = [
        f"SELECT DISTINCT {column} & ~0xFFFFFF FROM {table}"
        for table, names in columns.items()
        for column in ("globalTid", "globalPid")
        if column in names and _OF_THE_PROFILED.fullmatch(table)
    ]
    profiled = " UNION ".join(asked) or "SELECT 0"
    for table, column in (("PROCESSES", "globalPid"), ("ThreadNames", "globalTid")):
        if column in columns.get(table, []):
            database.execute(f"DELETE FROM {table} WHERE {column} & ~0xFFFFFF NOT IN ({profiled})")


def _keep_named_strings(database: sqlite3.Connection, columns: dict[str, list[str]]) -> None:
    """Strings that events are named by; of the others only the variables that may stay."""
    if "StringIds" not in columns:
        return
    names, symbols = (_ids(database, columns, wanted) for wanted in (_NAMES, _SYMBOLS))
    named = names | symbols
    update = "UPDATE StringIds SET value = CAST(? AS TEXT) WHERE id = ?"
    for row, value in database.execute("SELECT id, value FROM StringIds").fetchall():
        if b"\0" in (value or b"") or row not in named:
            kept = _variables(value) or b"removed by clusterprof scrub"
        else:
            kept = value if row not in names else _masked(value)
        if kept != value:
            database.execute(update, (kept, row))


def _ids(
    database: sqlite3.Connection, columns: dict[str, list[str]], wanted: re.Pattern[str]
) -> set[int]:
    """The strings that the columns of such a name refer to."""
    return {
        row
        for table, names in columns.items()
        for column in names
        if wanted.fullmatch(column)
        for (row,) in database.execute(f"SELECT DISTINCT {column} FROM {_quoted(table)}")
        if isinstance(row, int)
    }


def _quoted(name: str) -> str:
    """A table or column of whatever name, for SQL."""
    return '"{}"'.format(name.replace('"', '""'))


@functools.lru_cache(maxsize=1 << 16)  # many events have the same text
def _masked(value: bytes) -> bytes:
    plain = value.decode("utf-8", "surrogateescape")
    masked = masking.text(_ASSIGNMENT.sub(rf"\1{masking.MASK}", plain))
    return masked.encode("utf-8", "surrogateescape")
