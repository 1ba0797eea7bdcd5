"""What a reader finds in a report of one rank, in columns: the seam between formats and tables.

Every reader fills a `Recording`, and `clusterprof.ingest.assembler` makes the canonical tables of
it. A new column of a format is read by that format's reader into the field here that it belongs to.
All times are ns since the report's own zero (`ReportInfo.epoch_ns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.columns import (
    Bools,
    Ints,
    first_at_or_after,
    last_at_or_before,
    order_by,
    row_among,
)
from clusterprof.tables import SCHEMAS, ReportInfo

#: of each table, when its rows begin; all of them end at `end_ns`
BEGINS = {
    "activity": "start_ns", "collective_calls": "start_ns", "steps": "begin_ns",
    "host_calls": "start_ns",
}  # fmt: skip

#: what a column may be given as: an array, a constant, or null throughout
Column: TypeAlias = "pa.Array | pa.ChunkedArray | npt.NDArray[Any] | Sequence[object] | str | None"


class Launched(NamedTuple):
    """Begin, end and thread of the call that launched each piece of work; -1 where none is known.

    `known` is true where one is, since a report's times may be negative.
    """

    start: Ints
    end: Ints
    thread: Ints
    known: Bools

    def at(self, places: Ints) -> Launched:
        """Return the calls of the work at these places."""
        return Launched._make(column[places] for column in self)


def not_launched(size: int) -> Launched:
    """Return that no launching call is known of so many pieces of work."""
    start, end, thread = np.full((3, size), -1, np.int64)
    return Launched(start, end, thread, np.zeros(size, bool))


@dataclass(frozen=True)
class Calls:
    """Calls of a host's threads, of one kind or several; `names[name[i]]` is the name of call i."""

    kind: Column
    start: Ints
    #: negative: still open when the capture ended (only in `Recording.marks`)
    end: Ints
    thread: Ints
    name: Ints
    names: Sequence[str]
    #: of CUDA calls; 0 or less: none
    correlation: Ints | None = None

    @cached_property
    def _by_correlation(self) -> tuple[Ints, Ints]:
        ids = np.zeros(0, np.int64) if self.correlation is None else self.correlation
        # An id may be on a runtime call and on the driver call inside it: the outer comes first.
        order = order_by(ids, self.start) if ids.size else ids
        return order, ids[order]

    def launching(self, correlation: Ints) -> Launched:
        """Return the call that has each correlation id."""
        order, ids = self._by_correlation
        place = row_among(ids, correlation)
        linked = (place >= 0) & (correlation > 0)
        call = order[place[linked]]
        launched = not_launched(correlation.size)._replace(known=linked)
        for column, of_call in zip(launched, (self.start, self.end, self.thread), strict=False):
            column[linked] = of_call[call]
        return launched


@dataclass(frozen=True)
class Recording:
    """One rank's part of a report, as its reader found it."""

    #: without device, begin and end, which the assembler adds
    info: ReportInfo
    #: ACTIVITY: see `activity`
    work: Sequence[pa.Table]
    calls: Sequence[Calls]
    #: COLLECTIVE_CALLS, in the order of their issue
    collectives: pa.Table
    #: ranges that may be named as steps, and what the source of such steps is called
    marks: Calls
    marked_by: str
    #: where steps end if no range marks any: the ends of the optimizer's updates
    step_ends: Ints
    #: id -> name of the host's GPUs
    devices: Mapping[int, str]

    def warned(self, *warnings: str) -> Recording:
        """This recording with further warnings."""
        return replace(self, info=self.info.warned(*warnings))

    @property
    def has_events(self) -> bool:
        """Whether anything was recorded."""
        return any(work.num_rows for work in self.work) or any(c.start.size for c in self.calls)


def said_by_ranks(warnings: Iterable[tuple[int, Iterable[str]]]) -> list[str]:
    """Return each warning once, behind the ranks that gave it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, texts in warnings:
        for text in dict.fromkeys(texts):
            ranks_of.setdefault(text, []).append(rank)
    return [f"{words.ranks(ranks)}: {text}" for text, ranks in ranks_of.items()]


def activity(
    start: Ints,
    end: Ints,
    device: Ints,
    stream: Ints,
    launched: Launched,
    *,
    correlation: Ints | None = None,
    size: Ints | None = None,
    **more: Column,
) -> pa.Table:
    """Return the ACTIVITY table of work of a device (-1: of the CPU, whose streams are threads).

    Ids of 0 or less and negative sizes are none. `more` are `kind`, `name` and further columns.
    """
    columns: dict[str, Column] = {
        "start_ns": start,
        "end_ns": end,
        "device": device.astype(np.int32),
        "stream": stream,
        "correlation": None if correlation is None else nullable(correlation, correlation > 0),
        "launch_start_ns": nullable(launched.start, launched.known),
        "launch_end_ns": nullable(launched.end, launched.known),
        "launch_thread": nullable(launched.thread, launched.thread >= 0),
        "size_bytes": None if size is None else nullable(size, size >= 0),
    }
    return fill("activity", start.size, columns | more)


def nullable(values: npt.NDArray[Any], valid: Bools) -> pa.Array:
    """Return `values` as an Arrow array that is null where `valid` is false."""
    return pa.array(values, mask=~valid)


def encoded(codes: npt.NDArray[Any], names: Sequence[str]) -> pa.DictionaryArray:
    """Return a name column: `names[codes[i]]`, null where the code is negative."""
    small = codes.astype(np.int32, copy=False)
    indices = pa.array(small, mask=small < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(names), pa.string()))


def fill(table: str, rows: int, columns: Mapping[str, Column]) -> pa.Table:
    """Return a table of the schema `table` with `rows` rows; columns not given are null."""
    schema = SCHEMAS[table]
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise KeyError(f"{table} has no column {sorted(unknown)}")
    arrays = [_column(columns.get(field.name), field.type, rows) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(value: Column, kind: pa.DataType, rows: int) -> pa.Array | pa.ChunkedArray:
    if value is None:
        return pa.nulls(rows, kind)
    if isinstance(value, str):
        dictionary = pa.types.is_dictionary(kind)
        return encoded(np.zeros(rows, np.int32), [value]) if dictionary else pa.repeat(value, rows)
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return value if value.type == kind else value.cast(kind)
    return pa.array(value, kind)


def joined(table: str, parts: Iterable[pa.Table], by: str = "") -> pa.Table:
    """Return the rows of all `parts` (of one schema) in one chunk, sorted by the column `by`."""
    whole = pa.concat_tables([SCHEMAS[table].empty_table(), *parts])
    whole = whole.unify_dictionaries().combine_chunks()
    keys = whole.column(by).to_numpy() if by else np.empty(0)
    if keys.size and not (keys[1:] >= keys[:-1]).all():
        whole = whole.take(pa.array(order_by(keys)))
    return whole


def span_around(begin: Ints, end: Ints, span_thread: Ints, thread: Ints, time: Ints) -> Ints:
    """Return for each time the place of the innermost span of its thread around it, else -1.

    `span_thread` are the spans' threads, `thread` those of the times. Innermost is what began last.
    """
    place = np.full(len(time), -1, np.int64)
    for lane in np.unique(thread):
        rows = np.flatnonzero(span_thread == lane)
        rows = rows[order_by(begin[rows], -end[rows])]
        if not rows.size:
            continue
        wanted = np.flatnonzero(thread == lane)
        last = last_at_or_before(begin[rows], time[wanted])
        # the one that began last, or where that has ended the one that reaches farthest
        reach = np.maximum.accumulate(end[rows])
        farthest = first_at_or_after(reach, reach)
        for row in (farthest[last], last):
            inside = (last >= 0) & (end[rows][row] >= time[wanted])
            place[wanted[inside]] = rows[row[inside]]
    return place


def matching(names: Sequence[str], pattern: str) -> Bools:
    """Return for each of `names` whether the regular expression `pattern` is found in it."""
    matches = pc.match_substring_regex(pa.array(names, pa.string()), pattern)
    return np.asarray(matches.to_numpy(zero_copy_only=False), np.bool_)
