"""A trace of torch.profiler (Kineto) as one rank's canonical tables, GPU or CPU only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.ingest import kinds
from clusterprof.ingest.columns import Column, Ints, encoded, fill, joined, matching, nullable
from clusterprof.ingest.kineto import gloo, nccl_kernels, trace_events
from clusterprof.ingest.kineto.launches import launches
from clusterprof.ingest.kineto.process_groups import process_groups
from clusterprof.ingest.kineto.trace_events import Spans, Trace
from clusterprof.ingest.operations import NCCL_KERNEL
from clusterprof.ingest.step_ranges import from_ranges, steps_table
from clusterprof.tables import RankTables, ReportInfo

#: Spans of torch operators that are no work of this rank's: they hand a collective over or wait
#: for it, or wait for the data loader. On a CPU-only rank they do not count as compute.
WAITS = r"^(c10d::|gloo:|nccl:|record_param_comms$|enumerate\(DataLoader\)|.*::wait(_tensor)?$|.*Barrier)"  # fmt: skip # noqa: E501

_OPTIMIZER_STEP = "Optimizer.step#"
_COPY_DIRECTIONS = {
    "HtoD": "host_to_device", "DtoH": "device_to_host", "DtoD": "device_to_device",
    "PtoP": "peer", "HtoA": "host_to_device", "AtoH": "device_to_host",
}  # fmt: skip


def read(path: Path) -> RankTables:
    """Read one trace. The rank is None where the trace has no `distributedInfo`.

    Raises `ReportError` where the file is missing, empty, truncated, no trace, or without events.
    """
    trace = trace_events.read(path)
    base = int(trace.meta.get("baseTimeNanoseconds", 0))
    unread = kinds.accelerators(trace.unread)
    if unread and not trace.spans["kernel"].ts:
        raise kinds.accelerator_error(path, unread)
    work = _activity(trace, base)
    calls, warnings = _collective_calls(trace, base)
    warnings += [f"{count} events of {what} are not read" for what, count in unread.items()]
    host = _host_calls(trace, base)
    if not work.num_rows and not host.num_rows:
        raise kinds.by_events(path, trace.unread, trace.processes)
    tables = [table for table in (work, host) if table.num_rows]
    begin = min(int(table.column("start_ns")[0].as_py()) for table in tables)
    end = max(int(table.column("end_ns").to_numpy().max()) for table in tables)
    job = _distributed(trace)
    info = ReportInfo(
        source=path,
        profiler="torch.profiler",
        rank=job.get("rank"),
        world_size=job.get("world_size"),
        host=str(trace.meta.get("host_name", "")),
        device=_device(trace, work),
        epoch_ns=base,
        begin_ns=begin,
        end_ns=end,
        backend=str(job.get("backend", "")),
        warnings=tuple(warnings),
    )
    return RankTables(info, work, calls, _steps(trace, base, begin), host, tuple(warnings))


def _distributed(trace: Trace) -> dict[str, Any]:
    found = trace.meta.get("distributedInfo")
    return found if isinstance(found, dict) else {}


def _device(trace: Trace, work: pa.Table) -> str:
    known = {
        each.get("id"): str(each.get("name", "")) for each in trace.meta.get("deviceProperties", ())
    }
    if not known or not work.num_rows:
        return ""
    devices, counts = np.unique(work.column("device").to_numpy(), return_counts=True)
    return known.get(max(int(devices[counts.argmax()]), 0), "")


def _activity(trace: Trace, base: int) -> pa.Table:
    """Return GPU work; where the trace has none, the work of the CPU's threads."""
    parts = [_kernels(trace, base), _copies(trace, base), _memsets(trace, base)]
    if not any(part.num_rows for part in parts):
        parts = [_cpu_compute(trace, base), gloo.activity(trace, base)]
    return joined("activity", parts, by="start_ns")


def _gpu(trace: Trace, category: str, base: int) -> tuple[Spans, dict[str, Column], int]:
    spans = trace.spans[category]
    start, end = spans.times(base)
    correlation = spans.column("correlation")
    launch_start, launch_end, thread, known = launches(trace, correlation, base)
    columns: dict[str, Column] = {
        "start_ns": start,
        "end_ns": end,
        "device": spans.column("device").astype(np.int32),
        "stream": spans.column("stream"),
        "correlation": nullable(correlation, correlation > 0),
        "launch_start_ns": nullable(launch_start, known),
        "launch_end_ns": nullable(launch_end, known),
        "launch_thread": nullable(thread, known),
    }
    return spans, columns, start.size


def _kernels(trace: Trace, base: int) -> pa.Table:
    spans, columns, rows = _gpu(trace, "kernel", base)
    codes = spans.column("name")
    is_nccl = (
        matching(pa.array(trace.names, pa.string()), NCCL_KERNEL)[codes] if rows else codes < 0
    )
    columns["kind"] = encoded(is_nccl.astype(np.int32), ["compute", "collective"])
    columns["name"] = encoded(codes, trace.names)
    return fill("activity", rows, columns)


def _copies(trace: Trace, base: int) -> pa.Table:
    """Return the copies; `Memcpy HtoD (Pageable -> Device)` says direction and memory."""
    spans, columns, rows = _gpu(trace, "gpu_memcpy", base)
    names = trace.names
    words = [name.split(" ") if name.startswith("Memcpy") else [] for name in names]
    directions = [
        _COPY_DIRECTIONS.get(each[1], "other") if len(each) > 1 else "other" for each in words
    ]
    codes = spans.column("name")
    pageable = np.array(["Pageable" in name for name in names], bool)
    pinned = np.array(["Pinned" in name for name in names], bool)
    columns |= {
        "kind": "copy",
        "name": encoded(codes, [f"memcpy {direction}" for direction in directions]),
        "size_bytes": nullable(spans.column("size"), spans.column("size") >= 0),
        "direction": encoded(codes, directions),
        "pageable": nullable(pageable[codes], (pageable | pinned)[codes]) if rows else None,
    }
    return fill("activity", rows, columns)


def _memsets(trace: Trace, base: int) -> pa.Table:
    spans, columns, rows = _gpu(trace, "gpu_memset", base)
    size = spans.column("size")
    columns |= {"kind": "memset", "name": "memset", "size_bytes": nullable(size, size >= 0)}
    return fill("activity", rows, columns)


def _cpu_compute(trace: Trace, base: int) -> pa.Table:
    """Return what the CPU's threads computed: outermost operators, waits inside them cut out.

    Outermost and not innermost: most of an operator's time is its own (`aten::addmm` spends it
    between its small inner operators, which would be all that is left of it).
    """
    spans = trace.spans["cpu_op"]
    if not spans.ts:
        return fill("activity", 0, {})
    start, end = spans.times(base)
    thread, codes = spans.column("thread"), spans.column("name")
    is_wait = matching(pa.array(trace.names, pa.string()), WAITS)[codes]
    outer = _outermost(start, end, thread)
    waits = np.flatnonzero(is_wait)
    waits = waits[_outermost_places(start[waits], end[waits], thread[waits])]
    inside = outer[waits]
    waits, inside = waits[~is_wait[inside]], inside[~is_wait[inside]]
    whole = np.flatnonzero((outer == np.arange(outer.size)) & ~is_wait)
    # An operator with waits inside is what begins at its begin or at a wait's end, and ends at
    # a wait's begin or at its own end: sorted by thread and time, both lists pair up.
    begins = np.r_[start[whole], end[waits]]
    ends = np.r_[end[whole], start[waits]]
    owner = np.r_[whole, inside]
    first = np.lexsort((begins, thread[owner]))
    last = np.lexsort((ends, thread[owner]))
    begins, ends, owner = begins[first], ends[last], owner[first]
    kept = ends > begins
    begins, ends, owner = begins[kept], ends[kept], owner[kept]
    return fill(
        "activity",
        begins.size,
        {
            "start_ns": begins,
            "end_ns": ends,
            "kind": "compute",
            "name": encoded(codes[owner], trace.names),
            "device": np.full(begins.size, -1, np.int32),
            "stream": thread[owner],
            "launch_thread": thread[owner],
        },
    )


def _outermost(start: Ints, end: Ints, thread: Ints) -> Ints:
    """Return for each span the place of the outermost span of its thread around it."""
    order = np.lexsort((-end, start, thread))
    lanes = np.unique(thread, return_inverse=True)[1]
    # One axis for all threads, a thread's times after all those of the thread before it.
    axis = lanes.astype(np.int64) * (int(end.max()) - int(start.min()) + 1) - int(start.min())
    begins, ends = (start + axis)[order], (end + axis)[order]
    reached = np.maximum.accumulate(ends)
    opens = np.r_[True, begins[1:] >= reached[:-1]]
    around = np.empty(order.size, np.int64)
    around[order] = order[np.flatnonzero(opens)[np.cumsum(opens) - 1]]
    return around


def _outermost_places(start: Ints, end: Ints, thread: Ints) -> Ints:
    if not start.size:
        return np.empty(0, np.int64)
    return np.flatnonzero(_outermost(start, end, thread) == np.arange(start.size))


def _collective_calls(trace: Trace, base: int) -> tuple[pa.Table, list[str]]:
    groups = process_groups(_distributed(trace))
    on_gpu, gpu_warnings = nccl_kernels.read(trace, base, groups)
    on_cpu, cpu_warnings = gloo.read(trace, base, groups)
    both = joined("collective_calls", [on_gpu, on_cpu], by="call")
    number = pa.array(np.arange(both.num_rows, dtype=np.int32))
    whole = both.set_column(0, both.schema.field("call"), number)
    return whole, gpu_warnings + cpu_warnings


def _host_calls(trace: Trace, base: int) -> pa.Table:
    kinds = {
        "cuda_runtime": "cuda",
        "cuda_driver": "cuda",
        "cpu_op": "op",
        "user_annotation": "range",
        "python_function": "python",
    }
    parts = []
    for category, kind in kinds.items():
        spans = trace.spans[category]
        start, end = spans.times(base)
        correlation = spans.column("correlation")
        known = correlation > 0
        columns: dict[str, Column] = {
            "start_ns": start,
            "end_ns": end,
            "kind": kind,
            "name": encoded(spans.column("name"), trace.names),
            "thread": spans.column("thread"),
            "correlation": nullable(correlation, known) if kind == "cuda" else None,
        }
        parts.append(fill("host_calls", start.size, columns))
    return joined("host_calls", parts, by="start_ns")


def _steps(trace: Trace, base: int, begin_ns: int) -> pa.Table:
    """Return the annotated steps; without any, what lies between ends of the optimizer's steps."""
    spans = trace.spans["user_annotation"]
    start, end = spans.times(base)
    codes, thread = spans.column("name"), spans.column("thread")
    marked = from_ranges(trace.names, codes, start, end, thread, "nvtx")
    if marked.num_rows:
        source = "profiler" if _named_by_profiler(trace) else "nvtx"
        column = encoded(np.zeros(marked.num_rows, np.int32), [source])
        return marked.set_column(3, marked.schema.field("source"), column)
    steps = [place for place, name in enumerate(trace.names) if name.startswith(_OPTIMIZER_STEP)]
    counts = [int((codes == place).sum()) for place in steps]
    if not counts or max(counts) == 0:
        return marked
    ends = np.sort(end[codes == steps[int(np.argmax(counts))]])
    begins = np.r_[begin_ns, ends[:-1]]
    return steps_table(np.arange(ends.size, dtype=np.int64), begins, ends, "optimizer")


def _named_by_profiler(trace: Trace) -> bool:
    return any(name.startswith("ProfilerStep#") for name in trace.names) and not any(
        name.startswith("clusterprof") for name in trace.names
    )
