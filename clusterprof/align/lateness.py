"""How late each rank came to each call, by the flight recorders of all ranks alone.

Where the backend measured durations no clock is needed: all members of a collective end at one
time, so that the last to arrive has the shortest duration, and the longest minus its own is how
long the first waited for it. Where there are none (gloo) the times of the calls themselves tell,
on one clock, to within its bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof import words
from clusterprof.align.clock.alignment import Clock, align
from clusterprof.align.clock.measured import (
    LOOK,
    RankReadings,
    interpolated,
    machine_spans,
    nearest,
    pair_bounds,
    stepped,
)
from clusterprof.align.match import MATCHED
from clusterprof.align.match.calls import steps_of
from clusterprof.align.match.flight_calls import FlightCalls
from clusterprof.columns import (
    Bools,
    EntryRows,
    Ints,
    Objects,
    PlacedRows,
    RankNumbers,
    first_at_or_after,
    first_places,
    integers,
    order_by,
    row_of,
    rows_by,
    texts,
)
from clusterprof.ingest.flight.all_dumps import Flight
from clusterprof.results import UNBOUNDED_NS
from clusterprof.tables import NAME, RankTables, ReportInfo, empty, required

#: One row for each rank's part of a call. `lateness_ns` is how much later than the first member it
#: came, null where neither durations nor a clock tell; `bound_ns` is by how much clocks may make it
#: wrong, 0 by durations. `enqueue_ns` is on the reference rank's clock, null without one.
SHALLOW = pa.schema(
    [
        required("rank", pa.int32()),
        required("group", NAME),
        required("sequence", pa.int64()),
        required("operation", NAME),
        pa.field("bytes", pa.int64()),
        pa.field("enqueue_ns", pa.int64()),
        pa.field("duration_ns", pa.int64()),
        pa.field("lateness_ns", pa.int64()),
        pa.field("bound_ns", pa.int64()),
        #: which call it is a part of: equal on all its members
        required("call", pa.int64()),
        #: the training step in which the rank made it, by its step log; null outside of it
        pa.field("step", pa.int64()),
        #: `file:line function` of the program, where stacks were recorded
        pa.field("line", NAME),
        #: `collective` of the same call among the profiled ranks' (collectives.parquet), by group
        #: and sequence number; null where the rank has no report, and for sends and receives
        pa.field("collective", pa.int64()),
    ]
)


def shallow(
    calls: FlightCalls,
    clock: Clock | None = None,
    steps: Mapping[int, pa.Table] | None = None,
    sure_ns: float = math.inf,
) -> pa.Table:
    """Return `SHALLOW` of matched calls: of each rank of `clock` on that clock (ns).

    `steps` are the ranks' step logs (`STEPS`), on their own wall clocks as the calls are. Where the
    clock may be wrong by more than `sure_ns` a call has no time.
    """
    entries, rank = calls.entries, integers(calls.entries, "rank")
    wall = integers(entries, "enqueue_ns")
    aligned, uncertainty = wall.copy(), np.zeros(wall.size, np.int64)
    placed = np.isin(rank, clock.ranks) if clock is not None else np.zeros(wall.size, bool)
    if clock is not None and placed.any():
        aligned[placed] = clock.align(rank[placed], wall[placed])
        uncertainty[placed] = clock.uncertainty_ns[row_of(clock.ranks, rank[placed])]
    placed &= uncertainty <= sure_ns
    duration = integers(entries, "duration_ns", -1)
    by_duration = _of_all(calls, duration >= 0)
    # NCCL's calls start when their stream comes to them, long after a host enqueued them
    enqueued = "nccl" in calls.flight.backends
    by_clock = _of_all(calls, placed & (not enqueued)) & ~by_duration
    stretches, call = calls.stretches, calls.of_row
    longest = stretches.greatest(duration)[call]
    first = stretches.least(np.where(placed, aligned, np.iinfo(np.int64).max))[call]
    # the first's own uncertainty belongs to the bound; of several at once the largest
    widest = stretches.greatest(np.where(aligned == first, uncertainty, 0))[call]
    lateness = np.where(by_duration, longest - duration, np.where(by_clock, aligned - first, 0))
    bound = np.where(by_clock & (aligned != first), uncertainty + widest, 0)
    determined = by_duration | by_clock
    groups = [words.group(group.name, group.description) for group in calls.flight.groups]
    columns = {
        "rank": entries["rank"],
        "group": pa.array(groups, pa.string())
        .dictionary_encode()
        .take(entries["group"].combine_chunks()),
        "sequence": entries["sequence"],
        "operation": entries["operation"],
        "bytes": entries["bytes"],
        "enqueue_ns": pa.array(aligned, mask=~placed),
        "duration_ns": entries["duration_ns"],
        "lateness_ns": pa.array(lateness, mask=~determined),
        "bound_ns": pa.array(bound, mask=~determined),
        "call": pa.array(call),
        "step": _steps(wall, rank, steps or {}),
        "line": entries["frame"],
        "collective": pa.nulls(entries.num_rows, pa.int64()),
    }
    return pa.table(columns).select(SHALLOW.names).cast(SHALLOW)


def joined(table: pa.Table, called_ns: Ints, placed: pa.Table) -> pa.Table:
    """Return `SHALLOW` with the `collective` of profiled ranks' reports (`MATCHED`).

    `called_ns` is when each row was called on its rank's own wall clock, which reports have too.
    Reports do not number a group's calls as torch does, but have the same ones in the same order:
    a communicator is the group, its first call the number, by which times differ least and most
    evenly while all operations agree. On all ranks that has to be the same.
    """
    if not placed.num_rows:
        return table
    shallow_of, deep_of = (rows_by(integers(calls, "rank")) for calls in (table, placed))
    counted = np.flatnonzero(~np.isin(texts(placed, "operation"), ("Send", "Recv", "SendRecv")))
    issued_rows = np.flatnonzero(placed["issue_start_ns"].is_valid().to_numpy())
    usable = np.zeros(placed.num_rows, bool)
    usable[np.intersect1d(counted, issued_rows)] = True
    numbers, turns = integers(table, "sequence"), integers(placed, "order")
    times, collective = integers(placed, "issue_start_ns"), integers(placed, "collective")
    operations = texts(table, "operation"), texts(placed, "operation")
    group, communicator = texts(table, "group"), texts(placed, "communicator")
    fits: dict[str, Counter[tuple[str, int]]] = {}
    lanes: dict[tuple[int, str, str], tuple[EntryRows, PlacedRows]] = {}
    for rank in shallow_of.keys() & deep_of.keys():
        recorded, reported = shallow_of[rank], deep_of[rank]
        recorded = recorded[~np.isin(operations[0][recorded], ("Send", "Recv"))]
        reported = reported[usable[reported]]
        for name in dict.fromkeys(communicator[reported].tolist()):
            deep = reported[communicator[reported] == name]
            deep = deep[order_by(turns[deep])]
            best: list[tuple[float, str, int]] = []
            for group_name in set(group[recorded].tolist()):
                rows = recorded[group[recorded] == group_name]
                rows = rows[order_by(called_ns[rows])]
                lanes[rank, name, group_name] = rows, deep
                candidates = _first_number(
                    (numbers[rows], called_ns[rows], operations[0][rows]),
                    (turns[deep], times[deep], operations[1][deep]),
                )
                best += [(apart, group_name, first) for apart, first in candidates]
            if best:
                _, group_name, first = min(best)
                fits.setdefault(name, Counter())[group_name, first] += 1
    joined_to = np.full(table.num_rows, -1, np.int64)
    for (_, name, group_name), (rows, deep) in lanes.items():
        if name not in fits or fits[name].most_common(1)[0][0][0] != group_name:
            continue
        (_, first), _ = fits[name].most_common(1)[0]
        places = _last_places(numbers[rows], turns[deep] + first)
        joined_to[rows[places[places >= 0]]] = collective[deep[places >= 0]]
    column = SHALLOW.get_field_index("collective")
    return table.set_column(column, SHALLOW.field(column), pa.array(joined_to, mask=joined_to < 0))


#: so many numbers of the first call are tried: several calls may be as near as it
_TRIED = 8
#: Part of one group's calls on a rank: their numbers, times (ns) and operations.
_Lane = tuple[Ints, Ints, Objects]
#: a call is recorded when its host makes it: far within this of the time in the rank's report
_BESIDE_NS = 1_000_000_000


def _first_number(recorded: _Lane, reported: _Lane) -> list[tuple[float, int]]:
    """Return how far times are apart (ns), and the number of the first call; [] if nothing fits."""
    numbers, times, operations = recorded
    turns, issued, names = reported
    near = first_at_or_after(times, issued)
    tried = np.concatenate(
        [numbers[np.clip(near + by, 0, times.size - 1)] - turns for by in (-1, 0)]
    )
    fits = []
    for first, _ in Counter(tried.tolist()).most_common(_TRIED):
        places = _last_places(numbers, turns + first)
        has_place, places = places >= 0, places[places >= 0]
        if 2 * places.size < turns.size or (operations[places] != names[has_place]).any():
            continue
        apart = (times[places] - issued[has_place]).astype(float)
        usual = float(np.median(apart))
        if abs(usual) < _BESIDE_NS:
            fits.append((abs(usual) + float(np.abs(apart - usual).mean()), int(first)))
    return sorted(fits)[:1]


def _last_places(numbers: Ints, wanted: Ints) -> Ints:
    """Return where the wanted numbers are, of several the last; -1 where none is."""
    places = first_places(numbers[::-1], wanted)
    return np.where(places < 0, -1, numbers.size - 1 - places)


def host_clock(flight: Flight, readings: Mapping[int, RankReadings], probe: object = None) -> Clock:
    """Return one clock for the ranks whose machines' clocks are known to each other.

    `readings` are of each rank, `probe` is clock_probe.json as parsed, of which the measurements
    nearest in time to the calls count. Ranks of one machine read one wall clock; without a
    measurement there is a clock for the ranks of one machine alone.
    """
    enqueue = integers(flight.entries, "enqueue_ns")
    spans = {
        rank: (int(enqueue[rows].min()), int(enqueue[rows].max()))
        for rank, rows in rows_by(integers(flight.entries, "rank")).items()
    }
    machines: dict[str, list[int]] = {}
    for rank in sorted(spans.keys() & readings.keys()):
        if readings[rank].machine:
            machines.setdefault(readings[rank].machine, []).append(rank)
    # a machine's clock was read at the window's ends in one of its ranks
    first = {
        max(ranks, key=lambda rank: (len(readings[rank].readings), -rank)): ranks
        for ranks in machines.values()
    }
    valid = {
        rank: replace(readings[rank], anchor=(0, 0))
        for rank in sorted(first)
        if stepped(readings[rank].readings) is None
    }
    tables = [
        _bare(rank, own.machine, [spans[peer] for peer in first[rank]])
        for rank, own in valid.items()
    ]
    bounds = pair_bounds(valid, _measured(probe, machine_spans(readings, spans)))
    clock = align(tables, MATCHED.empty_table(), bounds)
    bounded = np.flatnonzero(clock.uncertainty_ns < UNBOUNDED_NS).tolist()
    places = sorted((rank, place) for place in bounded for rank in first[clock.ranks[place]])
    return clock.of([place for _, place in places], tuple(rank for rank, _ in places))


def _measured(probe: object, spans: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """What was measured of the machines' clocks, for these spans of theirs (ns): between two looks
    at a running job as it follows from the measurements at both.
    """
    near = nearest(probe, spans)
    if not any(row.get("when") == LOOK for row in near):
        return {"bounds": near}
    longest = max(end - begin for begin, end in spans.values())
    pairs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in near:
        pairs.setdefault((str(row.get("machine")), str(row["other_machine"])), []).append(row)
    bounds = []
    for (_, other), measured in pairs.items():
        begin = sum(spans[other]) // 2 - longest // 2
        bounds += interpolated(measured, begin, begin + longest)
    return {"bounds": bounds}


def _bare(rank: int, machine: str, spans: list[tuple[int, int]]) -> RankTables:
    """A machine as the alignment takes it: a rank that recorded nothing for so long."""
    begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    info = ReportInfo(Path(), "", rank, host=machine, begin_ns=begin, end_ns=end)
    names = ("activity", "collective_calls", "steps", "host_calls")
    return RankTables(info, *(empty(name) for name in names))


def _steps(enqueue: Ints, rank: RankNumbers, steps: Mapping[int, pa.Table]) -> pa.Array:
    """Return the step in which each row was called; null outside of its rank's step log."""
    step_of_row = np.full(rank.size, -1, np.int64)
    for number, rows in rows_by(rank).items():
        if number in steps:
            step_of_row[rows] = steps_of(steps[number], enqueue[rows])
    return pa.array(step_of_row, mask=step_of_row < 0)


def _of_all(calls: FlightCalls, rows: Bools) -> Bools:
    """Return the rows of the calls of two members and more of which each row is chosen."""
    whole = calls.stretches.least(rows) & (calls.counts > 1)
    return np.asarray(whole[calls.of_row])
