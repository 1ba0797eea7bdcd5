"""An open nsys export: which tables it has, and their columns as numpy or Arrow.

It is an SQLite database, or what nsys has exported as Arrow, of which only the tables of numbers
stay as they are (`gathered`): nsys writes Arrow in two thirds of the time, and it is read in none.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from clusterprof.agent.contracts import files
from clusterprof.columns import Ints, integers, places
from clusterprof.errors import ReportError
from clusterprof.ingest.nsys import schema
from clusterprof.ingest.nsys.schema import Table
from clusterprof.ingest.opening import FARTHEST, unreadable
from clusterprof.unpacking import most

_MAGIC = b"SQLite format 3\x00"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
#: kinds of pages that name others below them; bytes of the file's header, before the first page's
_INNER, _FILE_HEADER = (2, 5), 100
#: seconds for all small queries together, which take milliseconds
_PATIENCE_S = 300
#: steps of SQLite's between two looks at the clock
_BETWEEN_LOOKS = 100_000
#: bytes of one text, of which a loop of pages makes any number
_LONGEST = 64 << 20
_TOO_MUCH = "a query gives more than a database of this size holds"
#: characters; a column added with a default has it in every row that was there before
_LONGEST_DEFAULT = 64


class Export:
    """One nsys export, opened for reading only (nothing is ever written beside it); to be closed.

    An export whose columns are computed, which nsys never writes, is refused, since a kilobyte of
    those can be any number of gigabytes. Raises `ReportError` for that, and where the file is no
    SQLite database, is cut short, or holds no nsys tables. `origin` is the path that messages name.
    `numbers` has tables that are not in the database: files of Arrow's stream format.
    """

    def __init__(
        self, path: Path, origin: Path | None = None, numbers: Mapping[str, Path] | None = None
    ) -> None:
        self.path = path
        self.origin = origin or path
        self._files = numbers or {}
        _check_file(path, self.origin)
        self._uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro&immutable=1"
        self._most = most(path.stat().st_size)
        self._large: Any = None
        with ExitStack() as stack:
            self._small = stack.enter_context(closing(sqlite3.connect(self._uri, uri=True)))
            if sys.version_info >= (3, 11):
                longest = min(self._most, _LONGEST)
                self._small.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
            # Names of other processes need not be UTF-8, and must not stop the reading.
            self._small.text_factory = lambda raw: raw.decode("utf-8", "replace")
            until = time.monotonic() + _PATIENCE_S
            self._small.set_progress_handler(lambda: time.monotonic() > until, _BETWEEN_LOOKS)
            try:
                self._small.execute("PRAGMA trusted_schema = OFF")
                with files.opened(path, links=True) as file:
                    _check_pages(file.fileno(), self._roots())
                self.tables = self._find_tables()
                self._check_tables()
            except (sqlite3.Error, OSError, ValueError) as error:
                raise self._damaged(str(error)) from error
            self._open = stack.pop_all()

    def close(self) -> None:
        """Close all connections."""
        self._open.close()

    def _roots(self) -> Iterator[int]:
        """Yield the page at which each table begins; that of the list of tables comes first."""
        yield 1
        rows = self._small.execute("SELECT rootpage FROM sqlite_master WHERE rootpage > 0")
        yield from (number for (number,) in rows)

    def _find_tables(self) -> dict[str, str]:
        """Return logical name -> name in this file; of several versions the newest."""
        newest: dict[str, tuple[int, str]] = {}
        listed = self._small.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
        )
        for name in (*(name for (name,) in listed), *self._files):
            match = schema.VERSIONED.match(name)
            logical, version = (match["name"], int(match["version"])) if match else (name, 1)
            if newest.get(logical, (-1, ""))[0] < version:
                newest[logical] = (version, name)
        return {logical: name for logical, (_, name) in newest.items()}

    def _check_tables(self) -> None:
        """Raise `ReportError` for what makes SQLite compute what it gives, or do more than read,
        and without the table that every export of nsys has.
        """
        computed = self._small.execute(
            "SELECT m.name, c.name FROM sqlite_master m, pragma_table_xinfo(m.name) c"
            " WHERE m.type = 'table' AND (c.hidden > 1 OR length(c.dflt_value) > ?)",
            (_LONGEST_DEFAULT,),
        ).fetchone()
        triggers = self._small.execute(
            "SELECT tbl_name, name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchone()
        if odd := computed or triggers:
            does = "computes its column" if computed else "has a trigger"
            raise ReportError(
                f"{self.origin} is not as nsys writes it: its table {odd[0]} {does} {odd[1]}",
                "export the report again: "
                "nsys export -t sqlite --include-blobs=true REPORT.nsys-rep",
            )
        if schema.STRINGS not in self.tables:
            raise ReportError(
                f"{self.origin} is an SQLite database but not an nsys export",
                f"its tables: {', '.join(sorted(self.tables)[:6]) or 'none'}",
                "make one with: nsys export -t sqlite --include-blobs=true REPORT.nsys-rep",
            )

    def has(self, table: str, *columns: str) -> bool:
        """Return whether the table, and all of `columns` in it, are there."""
        return table in self.tables and set(columns) <= self.columns(table)

    def columns(self, table: str) -> frozenset[str]:
        """Return the names of the table's columns."""
        if file := self._files.get(self.tables[table]):
            with self._mapped(file) as mapped:
                return frozenset(pa.ipc.open_stream(mapped).schema.names)
        described = self._small.execute(f'PRAGMA table_info("{self.tables[table]}")')
        return frozenset(row[1] for row in described)

    def rows(self, sql: str, *tables: str) -> list[tuple[Any, ...]]:
        """Return the rows of a small query, with `tables` for `{0}`, `{1}`.

        Empty where one of the tables is not in this export.
        """
        if any(table not in self.tables for table in tables):
            return []
        names = [f'"{self.tables[table]}"' for table in tables]
        fetched, left = [], self._most
        try:
            for row in self._small.execute(sql.format(*names)):
                left -= sum(len(cell) if isinstance(cell, (str, bytes)) else 8 for cell in row)
                if left < 0:
                    raise self._damaged(_TOO_MUCH)
                fetched.append(row)
        except sqlite3.Error as error:
            raise self._damaged(str(error)) from error
        return fetched

    def arrow(self, sql: str, *tables: str) -> pa.Table:
        """Return a large query's result. Its columns must not begin with NULLs (see `numbers`)."""
        import adbc_driver_manager
        import adbc_driver_sqlite

        names = [f'"{self.tables[table]}"' for table in tables]
        try:
            if self._large is None:
                database = self._open.enter_context(adbc_driver_sqlite.connect(self._uri))
                connection = adbc_driver_manager.AdbcConnection(database)
                self._large = self._open.enter_context(connection)
            with adbc_driver_manager.AdbcStatement(self._large) as statement:
                statement.set_options(**{"adbc.sqlite.query.batch_rows": "65536"})
                statement.set_sql_query(sql.format(*names))
                stream, _ = statement.execute_query()
                reader = pa.RecordBatchReader._import_from_c(stream.address)
                batches, left = [], self._most
                for batch in reader:
                    left -= batch.nbytes
                    if left < 0:
                        raise self._damaged(_TOO_MUCH)
                    batches.append(batch)
                return pa.Table.from_batches(batches, reader.schema)
        except (adbc_driver_manager.Error, pa.ArrowInvalid, OSError) as error:
            raise self._damaged(str(error).partition("\n")[0]) from error

    def numbers(
        self, table: Table, process: int | None = None, columns: Sequence[str] = ()
    ) -> dict[str, Ints]:
        """Return the numbers of a table (or only `columns`) that are of `process` (None: of all).

        -1 where a value, the column or the table is missing: the driver guesses a column's type
        from its first rows, and NULLs guess wrong. No time, id or size that is read here is -1.
        """
        columns = columns or table.columns
        if table.name not in self.tables:
            return {name: np.empty(0, np.int64) for name in columns}
        if file := self._files.get(self.tables[table.name]):
            result = self._of_file(file, {table.owner, *columns})
            if process is not None:
                owners = schema.process_of(self.integers(result, table.owner))
                result = result.filter(owners == process)
            return {name: self.integers(result, name) for name in columns}
        present = self.columns(table.name)
        chosen = [
            f'"{name}"' if name == "start" and name in present
            else f'coalesce("{name}", -1) AS "{name}"' if name in present
            else f'-1 AS "{name}"'
            for name in columns
        ]  # fmt: skip
        condition = "" if process is None else f" WHERE {schema.of_process(table.owner, process)}"
        result = self.arrow(f"SELECT {', '.join(chosen)} FROM {{0}}{condition}", table.name)
        return {name: self.integers(result, name) for name in columns}

    def _of_file(self, file: Path, columns: Collection[str]) -> pa.Table:
        """Return these columns of a table of Arrow's, with -1 as in `numbers`; no other is read."""
        with self._mapped(file) as mapped:
            present = pa.ipc.open_stream(mapped).schema.names
            mapped.seek(0)
            chosen = [place for place, name in enumerate(present) if name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=chosen)
            result = pa.ipc.open_stream(mapped, options=options).read_all()
            result.validate()
        for name in columns:
            if name not in present:
                result = result.append_column(name, pa.array(np.full(result.num_rows, -1)))
            elif name != "start":
                # as in SQLite, 64 bits have a sign
                column = pc.fill_null(result[name].cast(pa.int64(), safe=False), -1)
                result = result.set_column(result.schema.get_field_index(name), name, column)
        return result

    @contextmanager
    def _mapped(self, file: Path) -> Iterator[Any]:
        """Yield a table of Arrow's, to be read in here. Raises ReportError where it is damaged."""
        try:
            with pa.memory_map(str(file)) as mapped:
                yield mapped
        except (pa.ArrowInvalid, OSError) as error:
            raise self._damaged(str(error).partition("\n")[0]) from error

    @cached_property
    def kernels(self) -> dict[str, Ints]:
        """The `numbers` of all kernels, with their owner: what is read twice is fetched once."""
        return self.numbers(schema.KERNEL, columns=(*schema.KERNEL.columns, schema.KERNEL.owner))

    def spans(self, table: Table, process: int | None) -> dict[str, Ints]:
        """Return the `numbers` of those rows that do not end before they begin."""
        raw = self.numbers(table, process)
        whole = raw["end"] >= raw["start"]
        return raw if whole.all() else {name: values[whole] for name, values in raw.items()}

    def text(self, table: str, column: str, reference: str) -> tuple[str, str]:
        """Return SQL for a text that is in `column` of `table` (as `n`) or, by `reference`,
        among the strings (`{1}`): the expression, and the join that it needs.
        """
        if not self.has(table, reference):
            return f"n.{column}", ""
        return f"coalesce(n.{column}, s.value)", f"LEFT JOIN {{1}} s ON s.id = n.{reference}"

    def integers(self, result: pa.Table, name: str) -> Ints:
        """Return a column that must be whole numbers, of times such as can be added to others.

        Raises `ReportError` where a cell is none.
        """
        column = result.column(name)
        if not result.num_rows:
            return np.empty(0, np.int64)
        if column.null_count or not pa.types.is_integer(column.type):
            raise self._damaged(f"not every {name} is a whole number")
        values = integers(result, name)
        if name in ("start", "end") and (values.min() < -FARTHEST or values.max() > FARTHEST):
            raise self._damaged(f"a {name} lies more than a century from the report's beginning")
        return values

    @cached_property
    def strings(self) -> Mapping[int, str]:
        """The table of strings that `nameId`, `shortName` and `textId` point into."""
        rows = self.rows("SELECT id, value FROM {0}", schema.STRINGS)
        return {int(key): str(value) for key, value in rows}

    def names(self, ids: Ints) -> tuple[Ints, list[str]]:
        """Return codes and names for string ids: `names[codes[i]]` is the string of `ids[i]`."""
        present, codes = places(ids)
        return codes, [self.strings.get(string_id, "") for string_id in present.tolist()]

    def _damaged(self, why: str) -> ReportError:
        return ReportError(
            f"{self.origin} cannot be read: the database is truncated or damaged",
            f"{'arrow' if self._files else 'sqlite'} printed: {why}",
            "export or copy it again, and compare the sizes",
        )


def gathered(folder: Path, database: Path) -> dict[str, Path]:
    """Write what nsys has exported as Arrow into an SQLite database that is not there yet.

    The events' tables of numbers stay where they are, and are returned by name; of all others those
    that are read are copied. Raises `ReportError` where one of them is damaged.
    """
    import adbc_driver_manager

    arrow_files = {path.stem: path for path in sorted(folder.glob("*.arrow"))}
    logical = {name: schema.VERSIONED.sub(r"\g<name>", name) for name in arrow_files}
    copied = {name: arrow_files[name] for name in arrow_files if logical[name] in schema.COPIED}
    try:
        if cut_short := next((path for path in arrow_files.values() if not _is_whole(path)), None):
            raise ReportError(f"{cut_short} is truncated")
        _copy(copied, database)
    except (adbc_driver_manager.Error, pa.ArrowInvalid, OSError) as error:
        raise ReportError(f"{folder} cannot be read: {error}") from error
    return {name: arrow_files[name] for name in arrow_files if logical[name] in schema.OF_NUMBERS}


def _is_whole(stream: Path) -> bool:
    """Whether a stream ends as one does: Arrow takes what a full disk has cut for a shorter one."""
    with files.opened(stream) as file:
        file.seek(max(0, stream.stat().st_size - len(_END_OF_STREAM)))
        return file.read() == _END_OF_STREAM


def _copy(tables: Mapping[str, Path], database: Path) -> None:
    import adbc_driver_manager
    import adbc_driver_sqlite

    with (
        adbc_driver_sqlite.connect(f"file:{quote(os.fsencode(database.resolve()))}") as connected,
        adbc_driver_manager.AdbcConnection(connected) as connection,
    ):
        for name, file in tables.items():
            with (
                pa.memory_map(str(file)) as mapped,
                adbc_driver_manager.AdbcStatement(connection) as statement,
            ):
                table = pa.ipc.open_stream(mapped).read_all()
                table.validate()
                whole = pa.schema(
                    field.with_type(pa.int64())
                    if pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)
                    else field
                    for field in table.schema
                )
                # whole numbers of 64 bits with a sign
                table = table.cast(whole, safe=False)
                statement.set_options(**{"adbc.ingest.target_table": name})
                statement.bind_stream(table.to_reader().__arrow_c_stream__())
                statement.execute_update()


def _check_file(path: Path, origin: Path) -> None:
    """Raise `ReportError` unless `path` is a whole SQLite database."""
    again = "export or copy it again, and compare the sizes"
    try:
        size = path.stat().st_size
        with files.opened(path, links=True) as file:
            header = file.read(100)
    except OSError as error:
        raise unreadable(origin, error) from error
    if size == 0:
        raise ReportError(f"{origin} is empty", "the export ended before it wrote anything", again)
    if not header.startswith(_MAGIC):
        raise ReportError(
            f"{origin} is not an SQLite database",
            "expected an nsys export: nsys export -t sqlite --include-blobs=true REPORT.nsys-rep",
        )
    page = int.from_bytes(header[16:18], "big")
    whole = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    if len(header) < 100 or size < whole:
        raise ReportError(f"{origin} is truncated: {size} of {whole} bytes", again)


def _check_pages(file: int, roots: Iterable[int]) -> None:
    """Raise ValueError unless each page of an SQLite file belongs to one place in one table.

    A page that several others name, or that is below itself, gives its rows any number of times:
    SQLite follows it, and a few kilobytes take hours.
    """
    size = int.from_bytes(os.pread(file, 2, 16), "big")
    size = 65536 if size == 1 else size
    free = bytearray(b"\1" * (os.fstat(file).st_size // max(size, 1) + 1))
    free[0] = 0
    for root in roots:
        waiting = [root]
        while waiting:
            number = waiting.pop()
            if not 0 <= number < len(free) or not free[number]:
                raise ValueError(f"page {number} belongs to no place, or to two")
            free[number] = 0
            waiting += _pages_below(file, number, size)


def _pages_below(file: int, number: int, size: int) -> list[int]:
    """Return the pages that a page of so many bytes names: of one that has rows none."""
    begin = _FILE_HEADER if number == 1 else 0
    place = (number - 1) * size
    kind = os.pread(file, 1, place + begin)
    if not kind or kind[0] not in _INNER:
        return []
    page = os.pread(file, size, place)
    count = int.from_bytes(page[begin + 3 : begin + 5], "big")
    cells = page[begin + 12 : begin + 12 + 2 * count]
    offsets = [int.from_bytes(cells[k : k + 2], "big") for k in range(0, len(cells), 2)]
    names = [page[begin + 8 : begin + 12], *(page[cell : cell + 4] for cell in offsets)]
    return [int.from_bytes(name, "big") for name in names]
