"""What ran on the GPU, and the host call that put each of it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from clusterprof.columns import Ints, order_by
from clusterprof.ingest import recording
from clusterprof.ingest.nsys import schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.operations import exchanging_names
from clusterprof.ingest.rank_steps import ends_of_updates, updates
from clusterprof.ingest.recording import Calls, Column, Launched, encoded, nullable, with_names
from clusterprof.tables import GRAPH


@dataclass(frozen=True)
class NcclKernels:
    """The kernels of a process that exchange data, NCCL's and others', by begin.

    `names[name[i]]` is the name of kernel i.
    """

    start: Ints
    end: Ints
    stream: Ints
    launched: Launched
    name: Ints
    names: list[str]


@dataclass(frozen=True)
class Activity:
    """The work of one process, and what follows from it."""

    #: ACTIVITY: kernels, whole CUDA graphs whose kernels were not traced, copies, memsets
    work: list[pa.Table]
    nccl: NcclKernels
    #: where the optimizer's kernels show that steps end
    step_ends: Ints


def kernels_by_process(export: Export) -> list[dict[str, int]]:
    """Return how many kernels every `process` ran on every `device`, in the order of both.

    `nccl_count` is their number, `nccl_sum` that of those that exchange data.
    """
    if not export.has(schema.KERNEL.name, "globalPid", "deviceId"):
        return []
    raw = export.kernels
    codes, names = export.names(_full_name(raw))
    columns = {
        "process": schema.process_of(raw["globalPid"]),
        "device": raw["deviceId"],
        "nccl": exchanging_names(names, codes),
    }
    keys = ["process", "device"]
    kernels = pa.table(columns).filter((raw["globalPid"] >= 0) & (raw["deviceId"] >= 0))
    counts = kernels.group_by(keys).aggregate([("nccl", "count"), ("nccl", "sum")])
    rows: list[dict[str, int]] = counts.sort_by([(key, "ascending") for key in keys]).to_pylist()
    return rows


def _full_name(raw: Mapping[str, Ints]) -> Ints:
    """Return the strings' ids of kernels' names, with namespaces where they have any."""
    return np.where(raw["demangledName"] >= 0, raw["demangledName"], raw["shortName"])


def read(export: Export, process: int | None, cuda: Calls) -> Activity:
    """Return kernels, graphs, copies and memsets of `process` (None: of all)."""
    raw = export.kernels
    whole = raw["end"] >= raw["start"]
    if process is not None:
        whole &= schema.process_of(raw[schema.KERNEL.owner]) == process
    raw = {name: values[whole] for name, values in raw.items()}
    launched = cuda.launching(raw["correlationId"])
    short, full = raw["shortName"], _full_name(raw)
    codes, names = export.names(np.where(short >= 0, short, raw["demangledName"]))
    # the short name of all of PyTorch's kernels for many tensors is one, and has no namespace
    full, full_names = export.names(full)
    is_nccl = exchanging_names(full_names, full)
    kinds = encoded(is_nccl.astype(np.int32), ["compute", "collective"])
    ours = np.flatnonzero(~is_nccl & launched.known)
    update = with_names(updates(full_names), full)[ours]
    nccl = np.flatnonzero(is_nccl)
    nccl = nccl[order_by(raw["start"][nccl])]
    begin, end, stream = (raw[name][nccl] for name in ("start", "end", "streamId"))
    graphs, copies, memsets = (
        export.spans(table, process) for table in (schema.GRAPH, schema.MEMCPY, schema.MEMSET)
    )
    return Activity(
        work=[
            _work(raw, launched, kind=kinds, name=encoded(codes, names)),
            _work(graphs, cuda, kind="compute", name=GRAPH),
            _copies(copies, cuda),
            _work(memsets, cuda, kind="memset", name="memset"),
        ],
        nccl=NcclKernels(begin, end, stream, launched.at(nccl), full[nccl], full_names),
        step_ends=ends_of_updates(launched.start[ours], launched.end[ours], update),
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
    stated = (host_memory == schema.PAGEABLE) | (host_memory == schema.PINNED)
    return _work(
        raw,
        cuda,
        kind="copy",
        name=encoded(direction, [f"memcpy {label}" for label in schema.DIRECTIONS]),
        direction=encoded(direction, schema.DIRECTIONS),
        pageable=nullable(host_memory == schema.PAGEABLE, stated),
    )
