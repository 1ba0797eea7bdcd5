"""A trace of torch.profiler (Kineto) as one rank's recording, GPU or CPU only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.columns import (
    Bools,
    Ints,
    begins,
    count_by,
    first_of,
    order_by,
    preceding,
    running_maximum,
)
from clusterprof.errors import ReportError
from clusterprof.ingest import other_tools
from clusterprof.ingest.kineto import collectives, trace_events
from clusterprof.ingest.kineto.trace_events import Trace
from clusterprof.ingest.recording import (
    Calls,
    Column,
    Recording,
    activity,
    encoded,
    joined,
    matching,
    not_launched,
    nullable,
)
from clusterprof.tables import ReportInfo

#: Spans of torch operators that are no work of this rank's: they hand a collective over or wait
#: for it, or wait for the data loader. On a CPU-only rank they do not count as compute.
WAITS = r"^(c10d::|gloo:|nccl:|record_param_comms$|enumerate\(DataLoader\)|.*::wait(_tensor)?$|.*Barrier)"  # fmt: skip # noqa: E501

#: a process that runs fewer of its kernels than this on a GPU does not drive it
_FEW_KERNELS_FRAC = 0.05
#: of the kernels of a GPU so many have a launch of the process that drives it: the others were
#: launched before the trace began
_LEAST_LAUNCHED_FRAC = 0.5
#: GPUs that one process may drive: a number beyond is none of theirs
_MOST_DEVICES = 1024
_COPY_DIRECTIONS = {
    "HtoD": "host_to_device", "DtoH": "device_to_host", "DtoD": "device_to_device",
    "PtoP": "peer", "HtoA": "host_to_device", "AtoH": "device_to_host",
}  # fmt: skip
#: kind of host call -> the categories that are such
_HOST_CALLS = {
    "cuda": ("cuda_runtime", "cuda_driver"), "op": ("cpu_op",), "range": ("user_annotation",),
    "python": ("python_function",),
}  # fmt: skip
#: Kineto leaves this call out, and whoever asks for the time between two events has made it
#: before: DistributedDataParallel does so in the forward pass of its first iterations
_EVENT_WAIT, _EVENT_TIME = "cudaEventSynchronize", "cudaEventElapsedTime"


def read(path: Path, *, alone: bool = False) -> list[Recording]:
    """Read one trace. The rank is None where the trace has no `distributedInfo`.

    Of a trace that several ranks' were merged into, or of a process that drives several GPUs, each
    is a recording, unless it is known to be of one rank (`alone`). Raises `ReportError` where the
    file is missing, empty, truncated, no trace, without events, or of ranks that cannot be told
    apart.
    """
    trace = trace_events.read(path)
    # `ranks`: each rank's own trace, where a tool that merged several has labelled its processes or
    # events with ranks; empty in any other. Labels are certain, and hold where it is `alone` too;
    # what follows concludes from processes and GPUs.
    if len(trace.ranks) == 1:
        (trace,) = trace.ranks.values()
    launching = [trace.spans[category].column("process") for category in _HOST_CALLS["cuda"]]
    processes = [] if alone else _frequent(np.concatenate(launching))
    on_devices = [] if alone else _frequent(trace.spans["kernel"].column("device"))
    devices = [number for number in on_devices if number < _MOST_DEVICES]
    if trace.ranks:
        of_ranks = trace.by_rank()
    elif len(processes) > 1:
        of_ranks = _by_process(path, trace, processes, devices)
    elif len(devices) > 1:
        of_ranks = {k: trace.of_device(device) for k, device in enumerate(devices)}
    else:
        return [_read(path, trace)]
    gpus = 0 if trace.ranks or len(processes) > 1 else len(devices)
    return [_of_several(_read(path, own), rank, gpus) for rank, own in of_ranks.items()]


def _frequent(numbers: Ints) -> list[int]:
    """Return the GPUs or processes of kernels but for those of next to none, ascending."""
    number, count = np.unique(numbers, return_counts=True)
    often = count > _FEW_KERNELS_FRAC * count.max(initial=0)
    return [int(each) for each in number[often & (number >= 0)]]


def _by_process(
    path: Path, trace: Trace, processes: list[int], devices: list[int]
) -> dict[int, Trace]:
    """Return what is of each rank where the traces of several processes were merged into one.

    Their ranks are those that the processes are labelled with, or their order. Each drives one GPU,
    in the same order unless their kernels' launches tell otherwise. Raises ReportError where
    nothing tells which drives which.
    """
    ranks = {process: trace.labelled.get(process, -1) for process in processes}
    labelled = min(ranks.values()) >= 0 and len({*ranks.values()}) == len(ranks)
    order = sorted(processes, key=lambda process: (ranks[process] * labelled, process))
    categories = ("kernel", *_HOST_CALLS["cuda"])
    launches = replace(trace, spans={category: trace.spans[category] for category in categories})
    drives = np.array([[_is_launched(launches.of_device(d, p)) for d in devices] for p in order])
    alone = (drives.sum(0) == 1).all() and (drives.sum(1) == 1).all()
    if len(order) != len(devices) or not (alone or drives.diagonal().all()):
        raise ReportError(
            f"{path} has the events of {len(order)} processes on {len(devices)} GPUs, and nothing "
            "tells which kernels are whose",
            "give the traces as they were before they were merged, one for each rank",
        )
    device_of = drives.argmax(axis=1) if alone else range(len(order))
    return {
        ranks[process] if labelled else k: trace.of_device(devices[device_of[k]], process)
        for k, process in enumerate(order)
    }


def _is_launched(trace: Trace) -> bool:
    """Whether the one process of a trace may have launched the kernels that ran on its one GPU."""
    kernels = trace.spans["kernel"]
    calls = trace.calls("cuda", *_HOST_CALLS["cuda"])
    launched = calls.launching(kernels.column("correlation"))
    too_early = launched.known & (kernels.start < launched.start)
    share = launched.known.mean()
    return bool(share >= _LEAST_LAUNCHED_FRAC and too_early.mean() <= _FEW_KERNELS_FRAC)


def _of_several(recording: Recording, rank: int, gpus: int) -> Recording:
    """Return a recording as that of one rank of several in a file, with a warning.

    A process's `gpus` (0: ranks' traces were merged) come after those of the processes before it.
    """
    info, origin = recording.info, "several ranks, by the labels or the order of their processes"
    world = info.world_size
    if gpus:
        origin = f"a process with {gpus} GPUs: each is a rank"
        rank += gpus * info.rank if isinstance(info.rank, int) else 0
        world = gpus * world if isinstance(world, int) else None
    warnings = (*info.warnings, f"the trace is of {origin}")
    return replace(recording, info=replace(info, rank=rank, world_size=world, warnings=warnings))


def _read(path: Path, trace: Trace) -> Recording:
    """Read what is of one rank."""
    unread = other_tools.accelerators(trace.unread)
    if unread and not trace.spans["kernel"].start.size:
        raise other_tools.accelerator_error(path, unread)
    calls = {kind: trace.calls(kind, *from_) for kind, from_ in _HOST_CALLS.items()}
    job = trace.meta.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    groups = collectives.process_groups(job)
    launched = calls["cuda"].launching(trace.spans["kernel"].column("correlation"))
    exchanging = collectives.exchanging_kernels(trace, launched)
    on_gpu, gpu_warnings = collectives.calls_of_kernels(trace, launched, exchanging, groups)
    on_cpu, cpu_warnings = collectives.calls_of_gloo(trace, groups)
    not_read = (f"{count} events of {device} are not read" for device, count in unread.items())
    info = _info(path, trace.meta, job, groups).warned(*gpu_warnings, *cpu_warnings, *not_read)
    devices = trace.meta.get("deviceProperties", ())
    steps = [name for name in trace.names if name.startswith(("ProfilerStep#", "clusterprof"))]
    by_profiler = bool(steps) and all(name.startswith("ProfilerStep#") for name in steps)
    recording = Recording(
        info=info,
        work=_work(trace, calls["cuda"], exchanging),
        calls=[*calls.values(), _event_waits(trace)],
        collectives=joined("collective_calls", [on_gpu, on_cpu]),
        marks=calls["range"],
        marked_by="profiler" if by_profiler else "nvtx",
        step_ends=_step_ends(trace),
        devices={device.get("id"): str(device.get("name", "")) for device in devices},
    )
    if not recording.has_events:
        raise other_tools.by_events(path, trace.unread, trace.processes)
    return recording


def _info(
    path: Path,
    meta: Mapping[str, Any],
    job: Mapping[str, Any],
    groups: Mapping[str, collectives.ProcessGroup],
) -> ReportInfo:
    rank = job.get("rank")
    return ReportInfo(
        source=path,
        profiler="torch.profiler",
        epoch_ns=int(meta.get("baseTimeNanoseconds", 0)),
        rank=int(rank) if isinstance(rank, str) and rank.isdecimal() else rank,
        world_size=job.get("world_size"),
        host=str(meta.get("host_name", "")),
        versions=_versions(meta, job),
        backend=str(job.get("backend", "")),
        groups={g.communicator: g.description for g in groups.values() if g.description},
    )


def _versions(meta: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, str]:
    """What the trace says of versions; CUDA's are numbers such as 13000."""
    versions = {}
    for name, key in (("CUDA driver", "cuda_driver_version"), ("CUDA", "cuda_runtime_version")):
        number = meta.get(key)
        if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 10**6:
            versions[name] = f"{number // 1000}.{number % 1000 // 10}"
    nccl = job.get("nccl_version")
    return versions | ({"NCCL": nccl} if isinstance(nccl, str) and nccl else {})


def _work(trace: Trace, cuda: Calls, exchanging: Bools) -> list[pa.Table]:
    """Return GPU work; where the trace has none, the work of the CPU's threads."""
    kinds = encoded(exchanging.astype(np.int32), ["compute", "collective"])
    names = encoded(trace.spans["kernel"].column("name"), trace.names)
    # `Memcpy HtoD (Pageable -> Device)` names direction and memory
    words = (name.partition("Memcpy ")[2].partition(" ")[0] for name in trace.names)
    directions = [_COPY_DIRECTIONS.get(word, "other") for word in words]
    copied = trace.spans["gpu_memcpy"].column("name")
    pageable, pinned = (trace.named("gpu_memcpy", kind) for kind in ("Pageable", "Pinned"))
    copies: dict[str, Column] = {
        "name": encoded(copied, [f"memcpy {direction}" for direction in directions]),
        "direction": encoded(copied, directions),
        "pageable": nullable(pageable, pageable | pinned),
    }
    work = [
        _on_gpu(trace, "kernel", cuda, kind=kinds, name=names),
        _on_gpu(trace, "gpu_memcpy", cuda, kind="copy", **copies),
        _on_gpu(trace, "gpu_memset", cuda, kind="memset", name="memset"),
    ]
    if any(table.num_rows for table in work):
        return work
    return [_cpu_compute(trace), collectives.gloo_spans(trace)]


def _on_gpu(trace: Trace, category: str, cuda: Calls, **more: Column) -> pa.Table:
    spans = trace.spans[category]
    device, stream, ids = (spans.column(name) for name in ("device", "stream", "correlation"))
    size = None if category == "kernel" else spans.column("bytes")
    start, end, launched = spans.start, spans.end, cuda.launching(ids)
    return activity(start, end, device, stream, launched, correlation=ids, size=size, **more)


def _cpu_compute(trace: Trace) -> pa.Table:
    """Return what the CPU's threads computed: outermost operators, waits inside them cut out.

    Outermost and not innermost: most of an operator's time is its own (`aten::addmm` spends it
    between its small inner operators, which would be all that is left of it).
    """
    spans = trace.spans["cpu_op"]
    start, end, thread = spans.start, spans.end, spans.column("thread")
    is_wait = trace.named("cpu_op", WAITS)
    outer = _outermost(start, end, thread)
    waits = np.flatnonzero(is_wait)
    around = _outermost(start[waits], end[waits], thread[waits])
    waits = waits[around == np.arange(waits.size)]
    inside = outer[waits]
    waits, inside = waits[~is_wait[inside]], inside[~is_wait[inside]]
    whole = np.flatnonzero((outer == np.arange(outer.size)) & ~is_wait)
    # An operator with waits inside is what begins at its begin or at a wait's end, and ends at
    # a wait's begin or at its own end: sorted by thread and time, both lists pair up.
    starts = np.concatenate((start[whole], end[waits]))
    ends = np.concatenate((end[whole], start[waits]))
    owner = np.concatenate((whole, inside))
    by_start, by_end = (order_by(thread[owner], times) for times in (starts, ends))
    starts, ends, owner = starts[by_start], ends[by_end], owner[by_start]
    kept = ends > starts
    threads, none = thread[owner[kept]], not_launched(int(np.count_nonzero(kept)))
    name = encoded(spans.column("name")[owner[kept]], trace.names)
    lanes = (none.start, threads, none._replace(thread=threads))
    return activity(starts[kept], ends[kept], *lanes, kind="compute", name=name)


def _event_waits(trace: Trace) -> Calls:
    """Return the waits for events: what no thread recorded before it asked for events' times."""
    asked, recorded = (
        any(name.startswith(call) for name in trace.names) for call in (_EVENT_TIME, _EVENT_WAIT)
    )
    if recorded or not asked:
        none = np.zeros(0, np.int64)
        return Calls("cuda", none, none, none, none, [_EVENT_WAIT])
    categories = (category for kind in ("cuda", "op", "range") for category in _HOST_CALLS[kind])
    calls = trace.calls("any", *categories)
    start, end, thread = calls.start, calls.end, calls.thread
    asks = matching(trace.names, f"^{_EVENT_TIME}")[calls.name]
    rows = np.isin(thread, thread[asks])
    time, on = np.concatenate((start[rows], end[rows])), np.tile(thread[rows], 2)
    asking = np.concatenate((asks[rows], np.zeros_like(asks[rows])))
    order = order_by(on, time, asking)
    time, on, asking = time[order], on[order], asking[order]
    ends = np.flatnonzero(asking[1:] & (on[1:] == on[:-1])) + 1
    return Calls("cuda", time[ends - 1], time[ends], on[ends], np.zeros_like(ends), [_EVENT_WAIT])


def _outermost(start: Ints, end: Ints, thread: Ints) -> Ints:
    """Return for each span the place of the outermost span of its thread around it."""
    order = order_by(thread, start, -end)
    other_thread = begins(thread[order])
    latest_end = running_maximum(end[order], np.cumsum(other_thread))
    outermost = other_thread | (start[order] >= preceding(latest_end, 0))
    around = np.empty(order.size, np.int64)
    around[order] = order[first_of(outermost)]
    return around


def _step_ends(trace: Trace) -> Ints:
    """Return when the optimizer's steps end: of the optimizer with most of them."""
    spans = trace.spans["user_annotation"]
    codes = spans.column("name")
    of_optimizer = trace.named("user_annotation", r"^Optimizer\.step#")
    most = count_by(codes[of_optimizer], 1).argmax()
    return np.sort(spans.end[of_optimizer & (codes == most)])
