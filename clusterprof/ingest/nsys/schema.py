"""The schema of nsys' SQLite export, 2021 to 2025, as far as it is read: a new column goes here.

nsys leaves out a table that has no rows, renames tables between versions (`..._V2`: asked for
without the ending, the newest form is found), adds columns, and from 2025.6 on does not sort rows.
So any table and column may be missing: `Export.numbers` has -1 for what is not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from clusterprof.columns import Ints


@dataclass(frozen=True)
class Table:
    """A table of events: its name, the global id of what a row belongs to, the numbers read."""

    name: str
    owner: str
    columns: tuple[str, ...]


def _device_work(name: str, *more: str) -> Table:
    columns = ("start", "end", "deviceId", "streamId", "correlationId", *more)
    return Table(f"CUPTI_ACTIVITY_KIND_{name}", "globalPid", columns)


KERNEL = _device_work("KERNEL", "shortName", "demangledName")
MEMCPY = _device_work("MEMCPY", "bytes", "copyKind", "srcKind", "dstKind")
MEMSET = _device_work("MEMSET", "bytes")
#: CUDA graphs traced as a whole
GRAPH = _device_work("GRAPH_TRACE")
RUNTIME = Table(
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "globalTid",
    ("start", "end", "globalTid", "correlationId", "nameId"),
)
OS_RUNTIME = Table("OSRT_API", "globalTid", ("start", "end", "globalTid", "nameId"))

#: NVTX ranges and what nsys files with them: text is in `text` or, by `textId`, in STRINGS
NVTX = "NVTX_EVENTS"
PUSH_POP_RANGE, START_END_RANGE, DOMAIN_CREATE = 59, 60, 75
NCCL_DOMAIN, GIL_DOMAIN = "NCCL", "GIL Trace"
PAYLOAD_ENTRIES = "NVTX_PAYLOAD_SCHEMA_ENTRIES"

STRINGS = "StringIds"
DIAGNOSTICS = "DIAGNOSTIC_EVENT"
WARNING, ERROR = 2, 3
GPUS = "TARGET_INFO_GPU"
SESSION_START = "TARGET_INFO_SESSION_START_TIME"
SYSTEM = "TARGET_INFO_SYSTEM_ENV"
CAPTURE = "META_DATA_CAPTURE"
#: what made the export: from 2023 on, and before
EXPORTED_BY = ("META_DATA_EXPORT", "EXPORT_META_DATA")

#: all that is read: tables of events that hold numbers only, and those that are small or hold text
OF_NUMBERS = {table.name for table in (KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME, OS_RUNTIME)}
COPIED = {
    NVTX, PAYLOAD_ENTRIES, STRINGS, DIAGNOSTICS, GPUS, SESSION_START, SYSTEM, CAPTURE, *EXPORTED_BY,
}  # fmt: skip

#: `CUPTI_ACTIVITY_KIND_KERNEL_V3` is the third form of `CUPTI_ACTIVITY_KIND_KERNEL`
VERSIONED = re.compile(r"^(?P<name>.+)_V(?P<version>[0-9]{1,4})$")
#: CUDA calls carry the version of their API (`cudaLaunchKernel_v7000`), which names nothing
API_VERSION = re.compile(r"_v\d+$")

#: `copyKind`, as the export's own ENUM_CUDA_MEMCPY_OPER has it; arrays lie on the device
DIRECTIONS = ("other", "host_to_device", "device_to_host", "device_to_device", "peer")
DIRECTION_OF_KIND = {1: 1, 3: 1, 11: 1, 2: 2, 4: 2, 12: 2, 5: 3, 6: 3, 7: 3, 8: 3, 13: 3, 10: 4}
#: `srcKind`, `dstKind`
PAGEABLE, PINNED = 0, 1

#: `globalTid` is 8 bits of hardware, 8 of VM, 24 of process and 24 of thread id
_THREAD_BITS = 24
_MASK = (1 << _THREAD_BITS) - 1

_Numbers = TypeVar("_Numbers", Ints, int)


def process_of(global_id: _Numbers) -> _Numbers:
    """Return the process ids inside nsys's `globalTid` or `globalPid`."""
    return (global_id >> _THREAD_BITS) & _MASK


def thread_of(global_id: Ints) -> Ints:
    """Return the thread ids inside nsys's `globalTid`."""
    return global_id & _MASK


def of_process(column: str, process: int) -> str:
    """Return the SQL condition that the global id in `column` is of `process`."""
    return f'("{column}" >> {_THREAD_BITS}) & {_MASK} = {process}'
