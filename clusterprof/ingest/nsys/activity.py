"""What ran on the GPU, and the host call that put each of it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from clusterprof.ingest.columns import (
    Bools,
    Column,
    Ints,
    encoded,
    fill,
    joined,
    matching,
    nullable,
)
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.nvtx import of_process, process_of, thread_of
from clusterprof.ingest.nsys.optimizer_steps import updates
from clusterprof.ingest.operations import NCCL_KERNEL

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"

#: `copyKind`, as the export's own ENUM_CUDA_MEMCPY_OPER has it; arrays lie on the device
_DIRECTIONS = ("other", "host_to_device", "device_to_host", "device_to_device", "peer")
_DIRECTION_OF_KIND = {1: 1, 3: 1, 11: 1, 2: 2, 4: 2, 12: 2, 5: 3, 6: 3, 7: 3, 8: 3, 13: 3, 10: 4}
_COPY_NAMES = tuple(f"memcpy {direction}" for direction in _DIRECTIONS)
_PAGEABLE, _PINNED = 0, 1


@dataclass(frozen=True)
class Launches:
    """The CUDA API calls of one process, with an order by which a correlation id is found."""

    start: Ints
    end: Ints
    thread: Ints
    correlation: Ints
    name_id: Ints
    _order: Ints

    @staticmethod
    def read(export: Export, process: int | None) -> Launches:
        """Read the runtime and driver calls of `process` (None: of all)."""
        names = ("start", "end", "globalTid", "correlationId", "nameId")
        raw = export.numbers(RUNTIME, names, of_process("globalTid", process))
        mine = raw["end"] >= raw["start"]
        start, end, tid, correlation, name_id = (raw[name][mine] for name in names)
        # An id may be on a runtime call and on the driver call inside it: the outer is found.
        order = np.lexsort((start, correlation))
        return Launches(start, end, thread_of(tid), correlation, name_id, order)

    def find(self, correlation: Ints) -> Ints:
        """Return for each correlation id the call that has it, -1 where none does."""
        if not self.start.size:
            return np.full(correlation.size, -1, np.int64)
        known = self.correlation[self._order]
        place = np.minimum(np.searchsorted(known, correlation), known.size - 1)
        found = (known[place] == correlation) & (correlation > 0)
        return np.where(found, self._order[place], -1)


@dataclass(frozen=True)
class NcclKernels:
    """The NCCL kernels of a process; times in ns since the session start, launch -1 if unknown."""

    start: Ints
    end: Ints
    stream: Ints
    launch_start: Ints
    launch_end: Ints
    launch_thread: Ints
    name: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class ComputeKernels:
    """The launched compute kernels of a process; times in ns since the session start."""

    launch_start: Ints
    launch_end: Ints
    #: which are an optimizer's
    optimizer: Bools


@dataclass(frozen=True)
class Activity:
    """The ACTIVITY table of one process with the NCCL kernels picked out of it."""

    table: pa.Table
    nccl: NcclKernels
    compute: ComputeKernels
    kernels: int
    #: whole CUDA graphs, whose kernels were not traced
    graphs: int
    device: int | None


def main_process(export: Export) -> int | None:
    """Return the process with most GPU work; None where no process has any.

    A report holds every child of the profiled program (DataLoader workers, compilers).
    """
    for table in (KERNEL, GRAPH, MEMCPY, RUNTIME):
        column = "globalTid" if table == RUNTIME else "globalPid"
        if export.has(table, column):
            values = process_of(export.numbers(table, [column])[column])
            if values.size:
                processes, counts = np.unique(values, return_counts=True)
                return int(processes[np.argmax(counts)])
    return None


@dataclass(frozen=True)
class Work:
    """What one process ran on one GPU: how many kernels, and of these of NCCL."""

    process: int
    device: int
    kernels: int
    nccl: int


def kernels_by_process(export: Export) -> list[Work]:
    """Return the kernels of every process on every GPU, counted."""
    if not export.has(KERNEL, "globalPid", "deviceId"):
        return []
    named = [f'k."{each}"' for each in ("shortName", "demangledName") if export.has(KERNEL, each)]
    name = f"coalesce({', '.join([*named, '-1', '-1'])})"
    counted = export.rows(
        'SELECT CAST(k."globalPid" AS INTEGER), CAST(k."deviceId" AS INTEGER), count(*),'
        " coalesce(sum(s.value LIKE '%nccl%Kernel%'), 0)"
        f" FROM {{0}} k LEFT JOIN {{1}} s ON s.id = {name}"
        ' WHERE k."globalPid" IS NOT NULL AND k."deviceId" IS NOT NULL GROUP BY 1, 2',
        KERNEL,
        "StringIds",
    )
    return [
        Work(process_of(each), device, kernels, nccl) for each, device, kernels, nccl in counted
    ]


def read(
    export: Export, process: int | None, launches: Launches, strings: Mapping[int, str], epoch: int
) -> Activity:
    """Return kernels, copies and memsets of `process`; `epoch` makes wall-clock times."""
    kernels, nccl, compute = _kernels(export, process, launches, strings, epoch)
    graphs = _graphs(export, process, launches, epoch)
    copies = _copies(export, process, launches, epoch)
    memsets = _memsets(export, process, launches, epoch)
    devices, counts = np.unique(kernels.column("device").to_numpy(), return_counts=True)
    device = int(devices[counts.argmax()]) if devices.size else None
    return Activity(
        table=joined("activity", [kernels, graphs, copies, memsets], by="start_ns"),
        nccl=nccl,
        compute=compute,
        kernels=kernels.num_rows,
        graphs=graphs.num_rows,
        device=device,
    )


def _read(
    export: Export, table: str, process: int | None, *columns: str
) -> tuple[dict[str, Ints], int]:
    names = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", *columns)
    raw = export.numbers(table, names, of_process("globalPid", process))
    mine = raw["end"] >= raw["start"]
    if not mine.all():
        raw = {name: values[mine] for name, values in raw.items()}
    return raw, raw["start"].size


def _common(
    raw: Mapping[str, Ints], call: Ints, launches: Launches, epoch: int
) -> dict[str, Column]:
    """Return the columns that every kind of activity has."""
    known = call >= 0
    correlation = raw["correlationId"]
    return {
        "start_ns": raw["start"] + epoch,
        "end_ns": raw["end"] + epoch,
        "device": raw["deviceId"].astype(np.int32),
        "stream": raw["streamId"],
        "correlation": nullable(correlation, correlation > 0),
        "launch_start_ns": nullable(_at(launches.start, call) + epoch, known),
        "launch_end_ns": nullable(_at(launches.end, call) + epoch, known),
        "launch_thread": nullable(_at(launches.thread, call), known),
    }


def _at(values: Ints, places: Ints) -> Ints:
    """Return `values[places]`, 0 where the place is -1."""
    if not values.size:
        return np.zeros(places.size, np.int64)
    return np.where(places >= 0, values[places], 0)


def names_of(ids: Ints, strings: Mapping[int, str]) -> tuple[Ints, list[str]]:
    """Return codes and names for string ids: `names[codes[i]]` is the string of `ids[i]`."""
    present = np.unique(ids)
    return np.searchsorted(present, ids), [strings.get(int(each), "") for each in present]


def _kernels(
    export: Export, process: int | None, launches: Launches, strings: Mapping[int, str], epoch: int
) -> tuple[pa.Table, NcclKernels, ComputeKernels]:
    raw, rows = _read(export, KERNEL, process, "shortName", "demangledName")
    ids = np.where(raw["shortName"] >= 0, raw["shortName"], raw["demangledName"])
    codes, names = names_of(ids, strings)
    call = launches.find(raw["correlationId"])
    is_nccl = matching(pa.array(names, pa.string()), NCCL_KERNEL)[codes] if rows else codes < 0
    table = fill(
        "activity",
        rows,
        {
            **_common(raw, call, launches, epoch),
            "kind": encoded(is_nccl.astype(np.int32), ["compute", "collective"]),
            "name": encoded(codes, names),
        },
    )
    # the short name of all of PyTorch's kernels for many tensors is one: the long one tells
    full, full_names = names_of(raw["demangledName"], strings)
    update = updates(pa.array(full_names, pa.string()))[full] if rows else is_nccl
    ours = np.flatnonzero(~is_nccl & (call >= 0))
    compute = ComputeKernels(launches.start[call[ours]], launches.end[call[ours]], update[ours])
    theirs = np.flatnonzero(is_nccl)
    theirs = theirs[np.argsort(raw["start"][theirs], kind="stable")]
    call = call[theirs]
    nccl = NcclKernels(
        start=raw["start"][theirs],
        end=raw["end"][theirs],
        stream=raw["streamId"][theirs],
        launch_start=np.where(call >= 0, _at(launches.start, call), -1),
        launch_end=np.where(call >= 0, _at(launches.end, call), -1),
        launch_thread=np.where(call >= 0, _at(launches.thread, call), -1),
        name=codes[theirs],
        names=tuple(names),
    )
    return table, nccl, compute


def _graphs(export: Export, process: int | None, launches: Launches, epoch: int) -> pa.Table:
    raw, rows = _read(export, GRAPH, process)
    call = launches.find(raw["correlationId"])
    columns = _common(raw, call, launches, epoch)
    return fill("activity", rows, {**columns, "kind": "compute", "name": "CUDA graph"})


def _copies(export: Export, process: int | None, launches: Launches, epoch: int) -> pa.Table:
    raw, rows = _read(export, MEMCPY, process, "bytes", "copyKind", "srcKind", "dstKind")
    call = launches.find(raw["correlationId"])
    direction_of = np.zeros(64, np.int32)
    direction_of[list(_DIRECTION_OF_KIND)] = list(_DIRECTION_OF_KIND.values())
    direction = direction_of[np.clip(raw["copyKind"], 0, 63)]
    host_memory = np.select([direction == 1, direction == 2], [raw["srcKind"], raw["dstKind"]], -1)
    known = (host_memory == _PAGEABLE) | (host_memory == _PINNED)
    return fill(
        "activity",
        rows,
        {
            **_common(raw, call, launches, epoch),
            "kind": "copy",
            "name": encoded(direction, _COPY_NAMES),
            "size_bytes": nullable(raw["bytes"], raw["bytes"] >= 0),
            "direction": encoded(direction, _DIRECTIONS),
            "pageable": nullable(host_memory == _PAGEABLE, known),
        },
    )


def _memsets(export: Export, process: int | None, launches: Launches, epoch: int) -> pa.Table:
    raw, rows = _read(export, MEMSET, process, "bytes")
    columns = _common(raw, launches.find(raw["correlationId"]), launches, epoch)
    size = nullable(raw["bytes"], raw["bytes"] >= 0)
    named = {"kind": "memset", "name": "memset", "size_bytes": size}
    return fill("activity", rows, {**columns, **named})
