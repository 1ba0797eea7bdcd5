"""From a `Recording`, whatever format it is of, to one rank's canonical tables, checked.

Behind this point a rank is a number that no other table overflows on, its times lie so near to
each other that sums and differences of them are exact, and its warnings are few: one rank's odd
report can then cost that rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.columns import Ints
from clusterprof.errors import ReportError
from clusterprof.ingest.rank_steps import from_ends, from_ranges
from clusterprof.ingest.recording import BEGINS, Calls, Recording, encoded, fill, joined, nullable
from clusterprof.tables import HIGHEST_RANK, KINDS, SCHEMAS, RankTables, ReportInfo
from clusterprof.words import counted

#: ns, 2116: the difference of any two times from 1970 on fits into 64 bits
_FARTHEST_NS = 1 << 62
#: ns, 104 days: a double holds every nanosecond of it; captures last seconds
_LONGEST_NS = 1 << 53
#: bytes, a petabyte: of more than any memory, and a million of them fit into 64 bits
_LARGEST = 1 << 50
#: step numbers and message counts are used as list places and in products
_HIGHEST_STEP = 1 << 40
#: of a rank, with the characters of each; nsys' own diagnostics may be tens of thousands
_MOST_WARNINGS, _LONGEST_WARNING = 50, 1000


class RankUnknown(ReportError):  # noqa: N818 - a state, not a fault
    """A report does not name its rank."""


def assemble(recording: Recording) -> RankTables:
    """Return the tables of a recording, which must have work or calls. The rank may be None."""
    activity = joined("activity", recording.work, by="start_ns")
    calls = joined("host_calls", map(_calls, recording.calls), by="start_ns")
    events = [table for table in (activity, calls) if table.num_rows]
    begin = min(table["start_ns"][0].as_py() for table in events)
    end = max(int(table["end_ns"].to_numpy().max()) for table in events)
    steps = from_ranges(recording.marks, recording.marked_by)
    if not steps.num_rows:
        steps = from_ends(recording.step_ends, begin)
    number = pa.array(np.arange(recording.collectives.num_rows, dtype=np.int32))
    collectives = recording.collectives.set_column(0, SCHEMAS["collective_calls"][0], number)
    epoch = recording.info.epoch_ns
    device = _device(activity["device"].to_numpy(), recording.devices)
    info = replace(recording.info, device=device, begin_ns=begin + epoch, end_ns=end + epoch)
    tables = [activity, collectives, steps, calls]
    for n, table in enumerate(tables):
        for place, field in enumerate(table.schema):
            if field.name.endswith("_ns"):
                shifted = pc.add(table.column(place), pa.scalar(epoch, pa.int64()))
                tables[n] = tables[n].set_column(place, field, shifted)
    return RankTables(info, *tables)


def _calls(calls: Calls) -> pa.Table:
    ids = calls.correlation
    columns = {
        "start_ns": calls.start,
        "end_ns": calls.end,
        "kind": calls.kind,
        "name": encoded(calls.name, calls.names),
        "thread": calls.thread,
        "correlation": None if ids is None else nullable(ids, ids > 0),
    }
    return fill("host_calls", calls.start.size, columns)


def _device(devices: Ints, names: Mapping[int, str]) -> str:
    """Return the name of the GPU that did most of the work."""
    distinct, counts = np.unique(devices, return_counts=True)
    if not distinct.size or not names:
        return ""
    return names.get(max(int(distinct[counts.argmax()]), 0), next(iter(names.values())))


def combine(nsys: RankTables, kineto: RankTables) -> RankTables:
    """Return one rank's tables from an nsys report and a Kineto trace of the same window.

    On a CPU-only rank nsys records neither operators nor gloo: activity and collectives come
    from Kineto where nsys has none, OS calls always from nsys, the host's other calls from
    whichever report gave the activity. Both clocks are the host's wall clock.
    """
    first, second = (nsys, kineto) if nsys.activity.num_rows else (kineto, nsys)
    communicating = nsys if nsys.collective_calls.num_rows else kineto
    nsys_info, kineto_info = nsys.info, kineto.info
    info = replace(
        nsys_info,
        profiler=f"{nsys_info.profiler} + {kineto_info.profiler}",
        rank=nsys_info.rank if nsys_info.rank is not None else kineto_info.rank,
        world_size=nsys_info.world_size or kineto_info.world_size,
        host=nsys_info.host or kineto_info.host,
        device=nsys_info.device or kineto_info.device,
        versions={**kineto_info.versions, **nsys_info.versions},
        begin_ns=min(nsys_info.begin_ns, kineto_info.begin_ns),
        end_ns=max(nsys_info.end_ns, kineto_info.end_ns),
        backend=nsys_info.backend or kineto_info.backend,
        groups={**kineto_info.groups, **nsys_info.groups},
        warnings=tuple(dict.fromkeys((*nsys_info.warnings, *kineto_info.warnings))),
    )
    is_os = [pc.equal(side.host_calls["kind"].cast(pa.string()), "os") for side in (first, nsys)]
    calls = [first.host_calls.filter(pc.invert(is_os[0])), nsys.host_calls.filter(is_os[1])]
    return RankTables(
        info=info,
        activity=first.activity,
        collective_calls=communicating.collective_calls,
        steps=first.steps if first.steps.num_rows else second.steps,
        host_calls=joined("host_calls", calls, by="start_ns"),
    )


def checked(tables: RankTables, rank: int | None) -> RankTables:
    """Return `tables` as those of `rank` (None: the report's own), with a warning of whatever
    contradicts it. Raises ReportError for a rank, time or size that is impossible.
    """
    for name in SCHEMAS:
        _check_columns(tables.info, name, getattr(tables, name))
    tables = _plausible(tables)
    info = _identified(tables.info, rank)
    warnings = [
        text if len(text) <= _LONGEST_WARNING else f"{text[:_LONGEST_WARNING]}..."
        for text in dict.fromkeys(info.warnings)
    ]
    if (further := len(warnings) - _MOST_WARNINGS) > 0:
        warnings[_MOST_WARNINGS:] = [f"and {further} further warnings of this report"]
    return replace(tables, info=replace(info, warnings=tuple(warnings)))


def _identified(info: ReportInfo, given: int | None) -> ReportInfo:
    """Return `info` with its rank; what the report itself states is a claim until it is checked."""
    source, stated, world = info.source, info.rank, info.world_size
    give_it = f"give it: --rank {source}=N"
    odd = []
    if stated is not None and not _is_rank(stated):
        wrong = f"gives its rank as {_shown(stated)}, which is not a rank"
        if given is None:
            raise ReportError(f"{source} {wrong}", give_it)
        odd.append(f"the report {wrong}")
    if world is not None and not (_is_rank(world) and world > 0):
        odd.append(f"the report gives the job {_shown(world)} ranks, which is left out")
        world = None
    if _is_rank(stated) and given not in (None, stated):
        odd.append(f"{source} is of rank {stated} by itself, and read as rank {given}")
    rank = stated if given is None else given
    if rank is None:
        raise RankUnknown(
            f"{source} does not name its rank",
            "looked for RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, ... in its environment, for its"
            " rank in NCCL's communicators, and for distributedInfo in a trace",
            give_it,
        )
    if world is not None and rank >= world:
        odd.append(f"no rank {rank}: by {source} its job has ranks 0 to {world - 1}")
    local = info.local_rank if _is_rank(info.local_rank) else None
    return replace(info, rank=rank, world_size=world, local_rank=local).warned(*odd)


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value <= HIGHEST_RANK


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_columns(info: ReportInfo, name: str, table: pa.Table) -> None:
    # a time lies near the others of its report
    first, last = info.begin_ns - _LONGEST_NS, info.begin_ns + _LONGEST_NS
    near = max(-_LONGEST_NS, first), min(_FARTHEST_NS, last)
    kinds = table["kind"].unify_dictionaries().unique().to_pylist() if name in KINDS else []
    invalid = [("kind", kind) for kind in sorted({*kinds} - {*KINDS.get(name, ())})]
    times = [column for column in table.schema.names if column.endswith("_ns")]
    # all times at once; one after the other only where one of them is impossible
    every = [chunk for column in times for chunk in table[column].chunks]
    odd = _impossible(pa.chunked_array(every, pa.int64()), *near) is not None
    limits = dict.fromkeys(times, near) if odd else {}
    limits |= {"step": (0, _HIGHEST_STEP), "communicator_size": (0, HIGHEST_RANK)}
    invalid += [
        (column, value)
        for column in table.schema.names
        if column in limits and (value := _impossible(table[column], *limits[column])) is not None
    ]
    for column, value in invalid:
        raise ReportError(
            f"{info.source} cannot be read: {_shown(value)} is not a valid {column} of {name}",
            "record or copy it again; if the profiler itself wrote it so, please report it",
        )


def _impossible(column: pa.ChunkedArray, first: int, last: int) -> int | None:
    """A value of a column that is less than `first` or more than `last`; None without one."""
    low, high = pc.min_max(column).as_py().values()
    if low is None or first <= low <= high <= last:
        return None
    return int(low if low < first else high)


def _plausible(tables: RankTables) -> RankTables:
    """Return `tables` without the sizes that can be none, since they are added up, and without what
    ends before it begins; a call of NCCL stays, without its times, since calls are counted.
    """
    warnings = []
    for name, column in (("activity", "size_bytes"), ("collective_calls", "message_bytes")):
        sizes = getattr(tables, name)[column]
        odd = pc.or_(pc.less(sizes, 0), pc.greater(sizes, _LARGEST))
        if count := pc.sum(odd).as_py():
            tables = _without(tables, name, odd, column)
            text = "sizes of more than a petabyte, or less than none, were left out"
            warnings.append(f"{count} {text}")
    for name, column in BEGINS.items():
        table = getattr(tables, name)
        odd = pc.less(table["end_ns"], table[column])
        if count := pc.sum(odd).as_py():
            rows = counted(count, "row")
            warnings.append(f"left out of {name}: {rows} with an end before the begin")
            if name == "collective_calls":
                tables = _without(tables, name, odd, "start_ns", "end_ns")
            else:
                tables = tables.changed(name, table.filter(pc.invert(odd)))
    return tables.warned(*warnings)


def _without(tables: RankTables, name: str, odd: pa.ChunkedArray, *columns: str) -> RankTables:
    """Return `tables`, of which one lacks the values of some columns where they are odd."""
    table = getattr(tables, name)
    for column in columns:
        place = table.schema.get_field_index(column)
        kept = pc.if_else(pc.fill_null(odd, False), pa.scalar(None, pa.int64()), table[column])
        table = table.set_column(place, table.schema.field(place), kept)
    return tables.changed(name, table)
