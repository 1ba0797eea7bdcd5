"""From a `Recording`, whatever format it is of, to one rank's canonical tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.ingest.recording import Calls, Recording, Work, encoded, fill, joined, nullable
from clusterprof.ingest.report_steps import from_ends, from_ranges
from clusterprof.tables import RankTables, ReportInfo


def assemble(recording: Recording) -> RankTables:
    """Return the tables of a recording, which must have work or calls. The rank may be None."""
    activity = joined("activity", map(_work, recording.work), by="start_ns")
    calls = joined("host_calls", map(_calls, recording.calls), by="start_ns")
    events = [table for table in (activity, calls) if table.num_rows]
    begin = min(table["start_ns"][0].as_py() for table in events)
    end = max(int(table["end_ns"].to_numpy().max()) for table in events)
    epoch = recording.epoch_ns
    info = ReportInfo(
        source=recording.source,
        profiler=recording.profiler,
        rank=recording.rank,
        world_size=recording.world_size,
        local_rank=recording.local_rank,
        host=recording.host,
        device=_device(recording),
        job=recording.job,
        epoch_ns=epoch,
        begin_ns=begin + epoch,
        end_ns=end + epoch,
        backend=recording.backend,
        warnings=tuple(recording.warnings),
    )
    return RankTables(
        info,
        activity=_on_wall_clock(activity, epoch),
        collective_calls=_on_wall_clock(_numbered(recording.collectives), epoch),
        steps=_on_wall_clock(_steps(recording, begin), epoch),
        host_calls=_on_wall_clock(calls, epoch),
    )


def _work(work: Work) -> pa.Table:
    call, correlation, size = work.launched, work.correlation, work.size
    return fill(
        "activity",
        work.start.size,
        {
            "start_ns": work.start,
            "end_ns": work.end,
            "kind": work.kind,
            "name": work.name,
            "device": work.device.astype(np.int32),
            "stream": work.stream,
            "correlation": None if correlation is None else nullable(correlation, correlation > 0),
            "launch_start_ns": nullable(call.start, call.known),
            "launch_end_ns": nullable(call.end, call.known),
            "launch_thread": nullable(call.thread, call.thread >= 0),
            "size_bytes": None if size is None else nullable(size, size >= 0),
            "direction": work.direction,
            "pageable": work.pageable,
        },
    )


def _calls(calls: Calls) -> pa.Table:
    ids = calls.correlation
    return fill(
        "host_calls",
        calls.start.size,
        {
            "start_ns": calls.start,
            "end_ns": calls.end,
            "kind": calls.kind,
            "name": encoded(calls.name, calls.names),
            "thread": calls.thread,
            "correlation": None if ids is None else nullable(ids, ids > 0),
        },
    )


def _steps(recording: Recording, begin: int) -> pa.Table:
    """Return the steps that ranges mark; without any, those that end with the optimizer."""
    marked = from_ranges(recording.marks, recording.marked_by)
    return marked if marked.num_rows else from_ends(recording.step_ends, begin)


def _numbered(calls: pa.Table) -> pa.Table:
    number = pa.array(np.arange(calls.num_rows, dtype=np.int32))
    return calls.set_column(0, calls.schema.field("call"), number)


def _on_wall_clock(table: pa.Table, epoch_ns: int) -> pa.Table:
    for place, field in enumerate(table.schema):
        if field.name.endswith("_ns"):
            shifted = pc.add(table.column(place), pa.scalar(epoch_ns, pa.int64()))
            table = table.set_column(place, field, shifted)
    return table


def _device(recording: Recording) -> str:
    """Return the name of the GPU that did most of the work."""
    names = recording.devices
    devices, counts = np.unique(
        np.concatenate([work.device for work in recording.work]), return_counts=True
    )
    if not devices.size or not names:
        return ""
    most = max(int(devices[counts.argmax()]), 0)
    return names.get(most, next(iter(names.values())))


def combine(nsys: RankTables, kineto: RankTables) -> RankTables:
    """Return one rank's tables from an nsys report and a Kineto trace of the same window.

    On a CPU-only rank nsys records neither operators nor gloo: activity and collectives come
    from Kineto where nsys has none, OS calls always from nsys, the host's other calls from
    whichever report gave the activity. Both clocks are the host's wall clock.
    """
    has_calls = nsys.collective_calls.num_rows > 0
    first, second = (nsys, kineto) if nsys.activity.num_rows else (kineto, nsys)
    parts = [_of_the_system(first.host_calls, False), _of_the_system(nsys.host_calls, True)]
    info = replace(
        nsys.info,
        profiler=f"{nsys.info.profiler} + {kineto.info.profiler}",
        rank=nsys.info.rank if nsys.info.rank is not None else kineto.info.rank,
        world_size=nsys.info.world_size or kineto.info.world_size,
        host=nsys.info.host or kineto.info.host,
        device=nsys.info.device or kineto.info.device,
        begin_ns=min(nsys.info.begin_ns, kineto.info.begin_ns),
        end_ns=max(nsys.info.end_ns, kineto.info.end_ns),
        backend=nsys.info.backend or kineto.info.backend,
        warnings=tuple(dict.fromkeys((*nsys.warnings, *kineto.warnings))),
    )
    return RankTables(
        info=info,
        activity=first.activity,
        collective_calls=(nsys if has_calls else kineto).collective_calls,
        steps=first.steps if first.steps.num_rows else second.steps,
        host_calls=joined("host_calls", parts, by="start_ns"),
    )


def _of_the_system(calls: pa.Table, wanted: bool) -> pa.Table:
    """Return the calls of the OS runtime, or (`wanted` is false) all others."""
    is_os = pc.equal(calls.column("kind").cast(pa.string()), "os")
    return calls.filter(is_os if wanted else pc.invert(is_os))
