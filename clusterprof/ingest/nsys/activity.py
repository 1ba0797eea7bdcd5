"""What ran on the GPU, and the host call that put each of it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from clusterprof.ingest import recording
from clusterprof.ingest.nsys import schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.operations import NCCL_KERNEL
from clusterprof.ingest.rank_steps import ends_of_updates, updates
from clusterprof.ingest.recording import (
    Calls,
    Column,
    Ints,
    Launched,
    encoded,
    matching,
    nullable,
    with_names,
)


@dataclass(frozen=True)
class NcclKernels:
    """The NCCL kernels of a process by begin; `names[name[i]]` is the name of kernel i."""

    start: Ints
    end: Ints
    stream: Ints
    launched: Launched
    name: Ints
    names: list[str]


@dataclass(frozen=True)
class Activity:
    """The work of one process: kernels, graphs, copies and memsets, and what follows from it."""

    #: ACTIVITY
    work: list[pa.Table]
    nccl: NcclKernels
    #: where the optimizer's kernels show that steps end
    step_ends: Ints
    kernels: int
    #: whole CUDA graphs, whose kernels were not traced
    graphs: int


@dataclass(frozen=True)
class Kernels:
    """What one process ran on one GPU: how many kernels, and of these of NCCL."""

    process: int
    device: int
    kernels: int
    nccl: int


def kernels_by_process(export: Export) -> list[Kernels]:
    """Return the kernels of every process on every GPU, counted."""
    kernel = schema.KERNEL.name
    if not export.has(kernel, "globalPid", "deviceId"):
        return []
    named = [f'k."{each}"' for each in ("shortName", "demangledName") if export.has(kernel, each)]
    name = f"coalesce({', '.join([*named, '-1', '-1'])})"
    counted = export.rows(
        'SELECT CAST(k."globalPid" AS INTEGER), CAST(k."deviceId" AS INTEGER), count(*),'
        " coalesce(sum(s.value LIKE '%nccl%Kernel%'), 0)"
        f" FROM {{0}} k LEFT JOIN {{1}} s ON s.id = {name}"
        ' WHERE k."globalPid" IS NOT NULL AND k."deviceId" IS NOT NULL GROUP BY 1, 2',
        kernel,
        schema.STRINGS,
    )
    return [Kernels(schema.process_of(each), *more) for each, *more in counted]


def read(export: Export, process: int | None, cuda: Calls) -> Activity:
    """Return kernels, graphs, copies and memsets of `process` (None: of all)."""
    raw = export.spans(schema.KERNEL, process)
    launched = cuda.launching(raw["correlationId"])
    codes, names = export.names(
        np.where(raw["shortName"] >= 0, raw["shortName"], raw["demangledName"])
    )
    is_nccl = with_names(matching(names, NCCL_KERNEL), codes)
    kinds = encoded(is_nccl.astype(np.int32), ["compute", "collective"])
    kernels = _work(raw, launched, kind=kinds, name=encoded(codes, names))
    # the short name of all of PyTorch's kernels for many tensors is one: the long one differs
    full, full_names = export.names(raw["demangledName"])
    ours = np.flatnonzero(~is_nccl & launched.known)
    update = with_names(updates(full_names), full)[ours]
    nccl = np.flatnonzero(is_nccl)
    nccl = nccl[np.argsort(raw["start"][nccl], kind="stable")]
    begin, end, stream = (raw[name][nccl] for name in ("start", "end", "streamId"))
    graphs, copies, memsets = (
        export.spans(table, process) for table in (schema.GRAPH, schema.MEMCPY, schema.MEMSET)
    )
    return Activity(
        work=[
            kernels,
            _work(graphs, cuda, kind="compute", name="CUDA graph"),
            _copies(copies, cuda),
            _work(memsets, cuda, kind="memset", name="memset"),
        ],
        nccl=NcclKernels(begin, end, stream, launched.at(nccl), codes[nccl], names),
        step_ends=ends_of_updates(launched.start[ours], launched.end[ours], update),
        kernels=kernels.num_rows,
        graphs=graphs["start"].size,
    )


def _work(raw: Mapping[str, Ints], launching: Launched | Calls, **more: Column) -> pa.Table:
    ids, device, stream = (raw[name] for name in ("correlationId", "deviceId", "streamId"))
    launched = launching.launching(ids) if isinstance(launching, Calls) else launching
    begin, end, size = raw["start"], raw["end"], raw.get("bytes")
    return recording.activity(
        begin, end, device, stream, launched, correlation=ids, size=size, **more
    )


def _copies(raw: Mapping[str, Ints], cuda: Calls) -> pa.Table:
    direction_of = np.zeros(64, np.int32)
    direction_of[list(schema.DIRECTION_OF_KIND)] = list(schema.DIRECTION_OF_KIND.values())
    direction = direction_of[np.clip(raw["copyKind"], 0, 63)]
    host_memory = np.select([direction == 1, direction == 2], [raw["srcKind"], raw["dstKind"]], -1)
    known = (host_memory == schema.PAGEABLE) | (host_memory == schema.PINNED)
    return _work(
        raw,
        cuda,
        kind="copy",
        name=encoded(direction, [f"memcpy {each}" for each in schema.DIRECTIONS]),
        direction=encoded(direction, schema.DIRECTIONS),
        pageable=nullable(host_memory == schema.PAGEABLE, known),
    )
