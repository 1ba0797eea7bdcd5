"""Kernels of which no name tells that they wait for other ranks, and that do all the same.

A kernel of one name, the same one of each step, that ends on two ranks at once and begins on them
at different times, again and again: what computes does not, nor what sends without waiting, but
what waits for the other one does. Asked are those that count as compute, and those that are known
to exchange data by an operation that is not.
How nearly at once is as of communicators that no report names (`match.communicators`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from clusterprof import words
from clusterprof.align.clock import Clock
from clusterprof.align.match.calls import UNKNOWN, steps_of
from clusterprof.align.time_stamps import ENDS_NS, MOST_FRAC, WAITS, timed
from clusterprof.columns import (
    ActivityRows,
    CallRows,
    Ints,
    Objects,
    StepNumbers,
    Stretches,
    coded,
    combined,
    integers,
    order_by,
    ranges,
    texts,
)
from clusterprof.ingest.operations import EXCHANGE
from clusterprof.ingest.recording import fill, joined
from clusterprof.tables import GRAPH, SCHEMAS, RankTables

#: it is seen so often, or it may be chance
_FEW = 4
#: names that a warning lists
_MOST_NAMED = 4


class _Kernels(NamedTuple):
    """Kernels of one rank by name, step and begin, on the reference rank's clock (ns)."""

    name: Ints
    step: StepNumbers
    start: Ints
    end: Ints


def waiting_kernels(ranks: Sequence[RankTables], clock: Clock) -> set[str]:
    """Return the names of kernels that wait for those of other ranks, as nothing else tells.

    Compared are ranks whose places are 1, 2, 4, … apart, among them two of each usual group.
    """
    names = _varying(ranks)
    if not names:
        return set()
    kernels = [_kernels(tables, clock, names) for tables in ranks]
    waiting: set[int] = set()
    for by in (1 << k for k in range(len(ranks).bit_length())):
        for k in range(len(ranks) - by):
            bound = sum(clock.uncertainty(ranks[place].rank) for place in (k, k + by))
            waiting |= set(_waiting(kernels[k], kernels[k + by], bound))
    return {names[code] for code in waiting}


def _varying(ranks: Sequence[RankTables]) -> list[str]:
    """The names of kernels of which some take longer than others by as much as a wait: one that
    always takes as long has waited for nothing.
    """
    lengths: dict[str, tuple[int, int]] = {}
    for tables in ranks:
        names, code, rows = _unclear(tables)
        table = tables.activity
        length = (integers(table, "end_ns") - integers(table, "start_ns"))[rows]
        order = order_by(code, length)
        code, length = code[order], length[order]
        kernels = Stretches.of(code)
        shortest, longest = length[kernels.first].tolist(), length[kernels.last].tolist()
        for name, low, high in zip(names[code[kernels.first]], shortest, longest, strict=True):
            extremes = lengths.get(name, (low, high))
            lengths[name] = min(extremes[0], low), max(extremes[1], high)
    return [name for name, (low, high) in lengths.items() if high - low > WAITS * ENDS_NS]


def _unclear(tables: RankTables) -> tuple[Objects, Ints, ActivityRows]:
    """The names of a rank's activities; of its kernels that may wait or compute, each one's name
    as a place among those, and its row.
    """
    table = tables.activity
    names, name = coded(table, "name")
    kinds, kind = coded(table, "kind")
    computes = (kinds == "compute")[kind] & (integers(table, "device") >= 0)
    unclear = computes & (names != GRAPH)[name]
    unclear[_unknown_operations(tables)[1]] = True
    rows = np.flatnonzero(unclear)
    return names, name[rows], rows


def _unknown_operations(tables: RankTables) -> tuple[CallRows, ActivityRows]:
    """The rows of a rank's calls whose operation is unknown, and of their kernels."""
    calls, table = tables.collective_calls, tables.activity
    unknown = np.flatnonzero((texts(calls, "operation") == "Unknown") & timed(calls))
    kernels = np.flatnonzero(texts(table, "kind") == "collective") if len(unknown) else unknown
    stream, start = (
        np.concatenate((integers(table, column)[kernels], integers(calls, column)[unknown]))
        for column in ("stream", "start_ns")
    )
    place = combined(stream, start)
    kernel = np.full(len(place), UNKNOWN)
    kernel[place[: len(kernels)]] = kernels
    kernel = kernel[place[len(kernels) :]]
    return unknown[kernel >= 0], kernel[kernel >= 0]


def _kernels(tables: RankTables, clock: Clock, wanted: Sequence[str]) -> _Kernels:
    """A rank's kernels of these names that were launched in a step."""
    names, name, rows = _unclear(tables)
    places = {kernel: code for code, kernel in enumerate(wanted)}
    code = np.array([places.get(kernel, -1) for kernel in names.tolist()], np.int64)[name]
    rows, code = rows[code >= 0], code[code >= 0]
    launch, *times = (
        integers(tables.activity, time)[rows] for time in ("launch_start_ns", "start_ns", "end_ns")
    )
    step = steps_of(tables.steps, launch)
    start, end = (clock.align(tables.rank, time) for time in times)
    order = order_by(code, step, start)
    rows = order[step[order] != UNKNOWN]
    return _Kernels(code[rows], step[rows], start[rows], end[rows])


def _waiting(one: _Kernels, other: _Kernels, bound_ns: int) -> list[int]:
    """The names whose kernels end together on two ranks, but do not begin so."""
    a, b = _same(one, other)
    waiting = []
    for name in np.unique(one.name[a]).tolist():
        rows = one.name[a] == name
        starts, ends = (
            x[a[rows]] - y[b[rows]] for x, y in ((one.start, other.start), (one.end, other.end))
        )
        at_once = _apart(ends, ends, bound_ns) <= ENDS_NS
        # by the clock by which they end at once, and by the one by which most begin so
        apart = (_apart(starts, by, bound_ns) for by in (ends, starts))
        waits = np.minimum(*apart) > WAITS * ENDS_NS
        if at_once.mean() >= MOST_FRAC and np.count_nonzero(at_once & waits) >= _FEW:
            waiting.append(name)
    return waiting


def _apart(times: Ints, by: Ints, bound_ns: int) -> Ints:
    """How far times are from equal by the clock that has most of `by` so, within its bound."""
    return np.abs(times - int(np.clip(np.median(by), -bound_ns, bound_ns)))


def _same(one: _Kernels, other: _Kernels) -> tuple[Ints, Ints]:
    """The rows of the same kernels of two ranks, where a step has as many of a name on both."""
    steps = 1 + max(int(kernels.step.max(initial=0)) for kernels in (one, other))
    keys = [kernels.name * steps + kernels.step for kernels in (one, other)]
    own, theirs = (Stretches.of(key) for key in keys)
    _, a, b = np.intersect1d(keys[0][own.first], keys[1][theirs.first], return_indices=True)
    alike = own.size[a] == theirs.size[b]
    a, b = a[alike], b[alike]
    return ranges(own.first[a], own.size[a]), ranges(theirs.first[b], theirs.size[b])


def as_exchanges(tables: RankTables, names: set[str]) -> RankTables:
    """Return a rank's tables with these kernels as exchanges, and a warning that names them."""
    every, name, rows = _unclear(tables)
    rows = rows[np.isin(every[name], [*names])]
    if not len(rows):
        return tables
    table, kinds = tables.activity, texts(tables.activity, "kind")
    unknown, kernels = _unknown_operations(tables)
    made = _calls(table.take(pa.array(rows[kinds[rows] == "compute"])))
    operations = texts(tables.collective_calls, "operation")
    operations[unknown[np.isin(kernels, rows)]] = EXCHANGE
    calls = _with(tables.collective_calls, "collective_calls", "operation", operations)
    calls = joined("collective_calls", [calls, made])
    number = pa.array(np.arange(calls.num_rows, dtype=np.int32))
    calls = calls.set_column(0, SCHEMAS["collective_calls"][0], number)
    kinds[rows] = "collective"
    table = _with(table, "activity", "kind", kinds)
    some = words.listed(sorted(names), _MOST_NAMED)
    text = (
        f"{words.counted(len(rows), 'kernel')} end on several ranks at once although they do not "
        f"begin so, and count as communication that waits for all of its members: {some}"
    )
    return tables.changed("activity", table).changed("collective_calls", calls).warned(text)


def _calls(kernels: pa.Table) -> pa.Table:
    """The calls of kernels that counted as compute."""
    times = {"issue_start_ns": "launch_start_ns", "issue_end_ns": "launch_end_ns"}
    same = {name: name for name in ("stream", "start_ns", "end_ns")}
    return fill(
        "collective_calls",
        kernels.num_rows,
        {
            "call": np.zeros(kernels.num_rows, np.int32),
            "operation": EXCHANGE,
            "source": "kernel_name",
            **{name: kernels[other] for name, other in (times | same).items()},
        },
    )


def _with(table: pa.Table, schema: str, column: str, values: Objects) -> pa.Table:
    """A table with other texts in a column."""
    field = SCHEMAS[schema].field(column)
    texts = pa.array(values.tolist(), pa.string()).dictionary_encode()
    return table.set_column(table.schema.get_field_index(column), field, texts.cast(field.type))
