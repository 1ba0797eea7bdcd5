"""What nsys' advanced tracing of NCCL (`nccl` in `--trace`, from 2025.6) has beside the calls.

Its ranges replace NCCL's own ones: calls without their prefix (`AllReduce`) inside an `API Group`,
at whose end (`GroupLaunch`) the kernels are launched; what NCCL schedules (`GroupRuntime`); and the
operations on the GPU, a range for each channel. Source: "Advanced NCCL Tracing" in nsys' user guide
and its list of composite tables. No such nsys could be had here: what they document is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.columns import Bools, Ints, first_by, greatest_by, least_by, row_among, where_known
from clusterprof.ingest.nsys.nccl_payloads import Payloads
from clusterprof.ingest.nsys.nvtx import Ranges
from clusterprof.ingest.operations import NCCL_CALL
from clusterprof.ingest.recording import span_around

#: ranges of NCCL's own work, in which operations come a second time; the second inside the first
_SCHEDULING = ("^GroupLaunch$", "^GroupRuntime$")
_API_GROUP = "^API Group$"


@dataclass(frozen=True)
class DeviceOperations:
    """NCCL's operations on the GPU, each merged over its channels: `first` is one of its ranges.

    `api` is its call's id, which is missing where the call lay before the capture (`known`).
    """

    first: Ints
    start: Ints
    end: Ints
    api: Ints
    known: Bools


def is_advanced(ranges: Ranges) -> bool:
    """Return whether these ranges of NCCL's domain are those of advanced tracing."""
    calls = ranges.named(NCCL_CALL)
    return bool((calls & ~ranges.named("^nccl")).any())


def operations(ranges: Ranges, payloads: Payloads) -> DeviceOperations:
    """Return the operations on the GPU: the channels of one have one `localId`."""
    number, on_device = payloads.at(ranges.row, "on_device")
    rows = np.flatnonzero(on_device & (ranges.end >= ranges.start))
    _, first, place = np.unique(number[rows], return_index=True, return_inverse=True)
    first_rows = rows[first]
    start = least_by(place, ranges.start[rows], ranges.start[first_rows])
    end = greatest_by(place, ranges.end[rows], ranges.end[first_rows])
    api, has_api = payloads.at(ranges.row[first_rows], "api")
    return DeviceOperations(first_rows, start, end, api, has_api)


def calls(ranges: Ranges, payloads: Payloads) -> Ints:
    """Return which ranges are the program's calls: neither NCCL's scheduling nor the GPU's part.

    `ranges` are sorted by thread, then begin. Of several ranges of one call the first is the call.
    """
    _, on_device = payloads.at(ranges.row, "on_device")
    is_call = ranges.named(NCCL_CALL) & ~on_device
    for name in _SCHEDULING:
        outer = np.flatnonzero(ranges.named(name))
        is_call &= inside(ranges, outer, ranges.thread, ranges.start) < 0
    rows = np.flatnonzero(is_call)
    api, has_api = payloads.at(ranges.row[rows], "api")
    once = np.zeros(rows.size, bool)
    once[first_by(api, ranges.start[rows])] = True
    return rows[once | ~has_api]


def groups(ranges: Ranges, calls: Ints) -> tuple[Ints, Ints]:
    """Return for each range its group's number and the range that launches it, -1 outside groups.

    The launching range is the `API Group`; one around a single call is no group.
    """
    around = inside(ranges, np.flatnonzero(ranges.named(_API_GROUP)), ranges.thread, ranges.start)
    of_calls, counts = np.unique(around[calls], return_counts=True)
    return row_among(of_calls[(counts > 1) & (of_calls >= 0)], around), around


def inside(ranges: Ranges, outer: Ints, thread: Ints, time: Ints) -> Ints:
    """Return for each time of a thread which of the ranges `outer` is around it, or -1.

    `outer` are places in `ranges`; one that was never closed reaches to the capture's end.
    """
    end = np.where(ranges.end < 0, np.iinfo(np.int64).max, ranges.end)
    place = span_around(ranges.start[outer], end[outer], ranges.thread[outer], thread, time)
    return where_known(outer, place, -1)
