"""Collective calls of one rank: NCCL's NVTX ranges joined to the kernels that they launched.

A call is an NVTX range in NCCL's domain. Its kernel is the NCCL kernel whose launching CUDA
call lies, on the same thread, inside that range; between `ncclGroupStart` and `ncclGroupEnd`
nothing is launched, and the kernels of the whole group come from the outermost
`ncclGroupEnd`. `ncclCommInit*` ranges are never taken as enclosing anything: nsys before
2024 does not close them.

nsys' advanced tracing of NCCL (`nccl` in `--trace`, from 2025.6) has its own ranges in their place:
calls without their prefix (`AllReduce`) inside an `API Group`, at whose end (`GroupLaunch`) the
kernels are launched; what NCCL schedules (`GroupRuntime`); and the operations on the GPU, a range
for each channel. Source: "Advanced NCCL Tracing" in nsys' user guide and its list of composite
tables. No such nsys could be had here: what they document is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.columns import (
    Bools,
    Ints,
    Stretches,
    count_by,
    first_by,
    greatest_by,
    last_at_or_before,
    least_by,
    order_by,
    row_among,
    where_known,
)
from clusterprof.ingest.nsys import nccl_payloads, schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.events import NcclKernels, Ranges
from clusterprof.ingest.nsys.nccl_payloads import Payloads
from clusterprof.ingest.operations import NCCL_CALL, exchange_of, operation
from clusterprof.ingest.recording import encoded, fill, joined, nullable, span_around

#: the payloads of these ranges, out of another file
Elsewhere = Callable[[Ranges], Payloads]

#: the collectives that NCCL counts each by itself, numbered
FUNCTIONS = {"AllGather": 0, "AllReduce": 1, "Broadcast": 2, "Reduce": 3, "ReduceScatter": 4}

NO_KERNEL = "no NCCL kernel was launched inside this call's range"
NO_GROUP_END = "the capture ended before this group was launched"
NO_CALL = "no NVTX range of NCCL launched this kernel"
#: a group of sends and receives whose peers are unknown
EXCHANGE = "AllToAll"
UNCLEAR = "several kernels of the group cannot be separated: their whole span is given"


@dataclass(frozen=True)
class Communicators:
    """What `ncclCommInit*` in the capture was given: id -> (size, this rank in it)."""

    by_id: dict[int, tuple[int, int]]

    @property
    def largest(self) -> int:
        """The size of the largest; 0 where none is known."""
        return max((size for size, _ in self.by_id.values()), default=0)

    def world_rank(self, world_size: int | None) -> int | None:
        """Return the rank in the communicator of all ranks, None where it is not known.

        Assumes that a communicator as large as the world numbers its ranks as the world does
        (PyTorch's default process group does).
        """
        if not self.by_id or self.largest != (world_size or self.largest):
            return None
        ranks = {rank for size, rank in self.by_id.values() if size == self.largest}
        return ranks.pop() if len(ranks) == 1 else None


def read(
    export: Export,
    ranges: Ranges,
    kernels: NcclKernels,
    elsewhere: Elsewhere | None = None,
) -> tuple[pa.Table, Communicators, Ints]:
    """Return the COLLECTIVE_CALLS table of one process, its communicators, and the GPU's part.

    That is the NVTX rows of what is no range of the host, in advanced tracing.

    `ranges` are the NVTX ranges of that process. `elsewhere` has NCCL's payloads where this
    export holds none. Calls without a kernel and kernels without a call stay in the table, each
    with its reason.
    """
    in_domain = ranges.in_domains(schema.NCCL_DOMAIN)
    ranges = ranges.where(in_domain if in_domain.any() else ranges.named("^nccl[A-Z]"))
    ranges = ranges.where(order_by(ranges.thread, ranges.start))
    is_call = ranges.named(NCCL_CALL)
    advanced = bool((is_call & ~ranges.named("^nccl")).any())
    payloads = nccl_payloads.read(export, ranges.row, advanced=advanced)
    if ranges.row.size and not payloads.row.size and elsewhere is not None:
        payloads = elsewhere(ranges)
    on_device = device_operations(ranges, payloads)
    if advanced:
        calls = program_calls(ranges, payloads)
        group, closing = api_groups(ranges, calls)
    else:
        calls = np.flatnonzero(is_call)
        group, closing = _groups(ranges)
    names = np.array([operation(name) for name in ranges.names], object)
    # the communicator is 0 where there is none
    communicator, named = payloads.at(ranges.row[calls], "communicator")
    kept, exchanges = _exchanges(names[ranges.name[calls]], group[calls], named)
    calls, exchange = calls[kept], exchanges[kept]
    launcher = np.where((group[calls] >= 0) | (closing[calls] >= 0), closing[calls], calls)
    launchers = np.unique(launcher[launcher >= 0])
    launched = kernels.launched
    inside = range_around(ranges, launchers, launched.thread, launched.start)
    inside = _executing(ranges.row[calls], launcher, inside, kernels, on_device, payloads)
    links = _link(launcher, inside, communicator[kept], kernels)
    communicators = _communicators(ranges, payloads)
    operations = np.where(exchange, EXCHANGE, names[ranges.name[calls]])
    links["operation_id"] = _ids(ranges.row[calls], operations, on_device, ranges, payloads)
    called = ranges.where(calls)
    table = _call_table(called, operations, group[calls], links, payloads, communicators)
    # a stream is a communicator's: one that otherwise only exchanges has done so before as well
    only = np.setdiff1d(links["stream"][exchange], links["stream"][~exchange])
    left = np.flatnonzero(inside < 0)
    orphans = _kernel_table(kernels, left, np.isin(kernels.stream[left], only))
    table = joined("collective_calls", [table, orphans])
    # of a kernel without a launch: in order of its begin
    issued = pc.coalesce(table["issue_start_ns"], table["start_ns"]).to_numpy()
    table = table.take(pa.array(order_by(issued)))
    _, is_device = payloads.at(ranges.row, "on_device")
    return table, communicators, ranges.row[is_device]


def _exchanges(
    operations: npt.NDArray[np.object_], group: Ints, named: Bools
) -> tuple[Bools, Bools]:
    """Return which calls to keep, and which of them are a whole group that is an exchange.

    Where no communicator is known, who sends to whom is unknown; but a group of sends and receives
    (more than one of each, or it may be two neighbours of a pipeline) is one kernel that ends on no
    member before all have come: PyTorch's all-to-all. Its first call represents it.
    """
    keep, exchange = np.ones(group.size, bool), np.zeros(group.size, bool)
    sends, receives = operations == "Send", operations == "Recv"
    inside = group >= 0
    if not inside.any() or named.any():
        return keep, exchange
    count = int(group.max()) + 1
    sent, received, others = (
        count_by(group[inside & of_kind], count)
        for of_kind in (sends, receives, ~sends & ~receives)
    )
    whole = (sent > 0) & (received > 0) & (sent + received > 2) & (others == 0)
    members = inside & whole[np.maximum(group, 0)]
    first = np.zeros(group.size, bool)
    first[first_by(group)] = True
    return keep & (~members | first), members & first


def _groups(ranges: Ranges) -> tuple[Ints, Ints]:
    """Return for each range its group's number and the range that launches it.

    Both are -1 outside groups; the launching range is -1 too where the outermost
    `ncclGroupEnd` is not in the capture. `ranges` are sorted by thread, then begin. A thread
    whose first event is a `ncclGroupEnd` was inside a group when the capture began.
    """
    group, closing = np.full((2, ranges.thread.size), -1, np.int64)
    opens, closes = ranges.named("^ncclGroupStart$"), ranges.named("^ncclGroupEnd$")
    if not closes.any():
        return group, closing
    delta = opens.astype(np.int64) - closes
    number = 0
    of_thread = Stretches.of(ranges.thread)
    for begin, end in zip(of_thread.first.tolist(), (of_thread.last + 1).tolist(), strict=True):
        first, depth = begin, -min(int(np.cumsum(delta[begin:end]).min()), 0)
        for row in (begin + np.flatnonzero(delta[begin:end])).tolist():
            if depth == 0:
                first = row + 1
            depth += int(delta[row])
            if depth == 0:
                group[first : row + 1], closing[first : row + 1] = number, row
                number += 1
        if depth:
            group[first:end] = number
            number += 1
    return group, closing


def _executing(
    rows: Ints, launcher: Ints, inside: Ints, kernels: NcclKernels,
    on_device: DeviceOperations, payloads: Payloads,
) -> Ints:  # fmt: skip
    """Return `inside` with kernels that another thread launched, by the operations in them.

    `rows` are the calls'. A kernel in which operations of several launching ranges lie stays where
    it is.
    """
    left = np.flatnonzero(inside < 0)
    api, has_api = payloads.at(rows, "api")
    empty = has_api & (launcher >= 0) & ~np.isin(launcher, inside)
    if not left.size or not empty.any() or not on_device.has_api.any():
        return inside
    wanted = dict(zip(api[empty].tolist(), launcher[empty].tolist(), strict=True))
    ours = np.flatnonzero(on_device.has_api & np.isin(on_device.api, api[empty]))
    middle = (on_device.start[ours] + on_device.end[ours]) // 2
    place = left[np.maximum(last_at_or_before(kernels.start[left], middle), 0)]
    within = (kernels.start[place] <= middle) & (middle <= kernels.end[place])
    executing: Ints = inside.copy()
    for kernel in np.unique(place[within]).tolist():
        calls = on_device.api[ours[within & (place == kernel)]].tolist()
        launchers = {wanted[call] for call in calls}
        executing[kernel] = launchers.pop() if len(launchers) == 1 else -1
    return executing


def _ids(
    rows: Ints, operations: npt.NDArray[np.object_], on_device: DeviceOperations,
    ranges: Ranges, payloads: Payloads,
) -> pa.Array:  # fmt: skip
    """Return the ids of the calls' operations: their own, else those of their part on the GPU.

    `operationId`, or NCCL's `seqNumber` of a collective. That counts each function of a
    communicator apart (`seqNumber[NCCL_NUM_FUNCTIONS]` in its comm.h): the function is put beside.
    """
    api, has_api = payloads.at(rows, "api")
    order = order_by(on_device.api)
    order = order[on_device.has_api[order]]
    place = np.where(has_api, row_among(on_device.api[order], api), -1)
    device_row = where_known(ranges.row[on_device.first[order]], place, -1)
    # of a call's own payload, else of its part on the GPU
    own_or_device = np.where(place >= 0, device_row, rows)

    def of_either(name: str) -> tuple[Ints, Bools]:
        (first, given), (second, present) = (payloads.at(r, name) for r in (rows, own_or_device))
        return np.where(given, first, second), given | present

    ids, present = of_either("operation")
    if not present.any():
        ids, present = of_either("sequence")
        number = np.array([FUNCTIONS.get(name, -1) for name in operations.tolist()], np.int64)
        ids, present = ids * len(FUNCTIONS) + number, present & (number >= 0)
    return nullable(ids, present)


def _link(launcher: Ints, inside: Ints, communicator: Ints, kernels: NcclKernels) -> dict[str, Any]:
    """Return the columns of each call's kernels: `stream`, `start_ns`, `end_ns`, and the `reason`.

    They are those launched `inside` the range `launcher` (-1: no such range).

    All calls of a range have its one kernel. A group launches one kernel per communicator, more
    where the operations differ: its calls have those on their communicator's stream, since
    frameworks keep one stream per communicator, which groups with a single kernel have shown. Such
    groups are few (one Python step per group).
    """
    used = inside >= 0
    launching, counts = np.unique(inside[used], return_counts=True)
    # the last of each range's kernels; the last element is of calls whose range launched none
    last = np.full(int(max(launcher.max(initial=0), inside.max(initial=0))) + 2, -1)
    last[inside[used]] = np.flatnonzero(used)
    kernel = last[launcher]
    columns = (kernels.start, kernels.end, kernels.stream)
    start, end, stream = (where_known(column, kernel, -1) for column in columns)
    has_kernel, unclear = kernel >= 0, np.zeros(kernel.size, bool)
    several = launching[counts > 1]
    single = has_kernel & ~np.isin(launcher, several) & (communicator != 0)
    owner = dict(zip(stream[single].tolist(), communicator[single].tolist(), strict=True))
    for group in several.tolist():
        launched = np.flatnonzero(inside == group)
        owners = np.array([owner.get(lane, 0) for lane in kernels.stream[launched].tolist()])
        members = np.flatnonzero(launcher == group)
        ids = np.unique(communicator[members]).tolist()
        for wanted in ids:
            theirs = members[communicator[members] == wanted]
            chosen = launched if len(ids) == 1 else launched[owners == wanted]
            if not chosen.size or wanted == 0:
                chosen = launched
                unclear[theirs] = len(ids) > 1 or np.unique(kernels.stream[launched]).size > 1
            start[theirs], end[theirs] = kernels.start[chosen].min(), kernels.end[chosen].max()
            stream[theirs] = kernels.stream[chosen[0]]
    reasons = np.select([has_kernel & unclear, has_kernel, launcher < 0], [2, -1, 1], 0)
    return {
        "stream": stream,
        "start_ns": nullable(start, has_kernel),
        "end_ns": nullable(end, has_kernel),
        "reason": encoded(reasons, [NO_KERNEL, NO_GROUP_END, UNCLEAR]).cast(pa.string()),
    }


def _communicators(ranges: Ranges, payloads: Payloads) -> Communicators:
    # of advanced tracing any range that has all three
    is_init = ranges.named("^ncclComm(Init|Split|Shrink)") | ~ranges.named("^nccl")
    rows = ranges.row[is_init]
    fields = [payloads.at(rows, name) for name in ("communicator", "ranks", "rank")]
    whole = np.logical_and.reduce([present for _, present in fields])
    columns = [values[whole].tolist() for values, _ in fields]
    return Communicators({cid: (n, r) for cid, n, r in zip(*columns, strict=True)})


def _call_table(
    calls: Ranges,
    operations: npt.NDArray[np.object_],
    group: Ints,
    links: Mapping[str, Any],
    payloads: Payloads,
    communicators: Communicators,
) -> pa.Table:
    """Return the calls; `links` are their columns of kernels, and their operations' ids."""
    (communicator, has_communicator), (bytes_, has_bytes), (root, has_root), (peer, has_peer) = (
        payloads.at(calls.row, name) for name in ("communicator", "bytes", "root", "peer")
    )
    distinct, place = np.unique(communicator, return_inverse=True)
    codes = np.where(has_communicator, place, -1)
    names = [f"{number % (1 << 64):#018x}" for number in distinct.tolist()]  # as NCCL prints them
    size = np.array([communicators.by_id.get(c, (-1, -1))[0] for c in communicator.tolist()], int)
    columns = {
        "operation": pa.array(operations, pa.string()).dictionary_encode(),
        "communicator": encoded(codes, names).cast(pa.string()),
        "communicator_size": nullable(size.astype(np.int32), size > 0),
        **links,
        "message_bytes": nullable(bytes_, has_bytes),
        "root": nullable(root.astype(np.int32), has_root),
        "peer": nullable(peer.astype(np.int32), has_peer),
        "group": nullable(group.astype(np.int32), group >= 0),
        "issue_start_ns": calls.start,
        "issue_end_ns": nullable(calls.end, calls.end >= calls.start),
        "source": encoded(has_bytes.astype(np.int32), ["nvtx_name", "nvtx_payload"]),
    }
    return fill("collective_calls", calls.start.size, columns)


def _kernel_table(kernels: NcclKernels, orphans: Ints, exchange: Bools) -> pa.Table:
    """Return calls made from kernels that no NVTX range launched (`-t cuda` alone, graphs)."""
    names = [exchange_of(name) or "Unknown" for name in kernels.names]
    codes = kernels.name[orphans]
    sent = np.array([name == "SendRecv" for name in names], bool)[codes] & exchange
    launched = kernels.launched.at(orphans)
    columns = {
        "operation": encoded(np.where(sent, len(names), codes), [*names, EXCHANGE]),
        "stream": kernels.stream[orphans],
        "issue_start_ns": nullable(launched.start, launched.known),
        "issue_end_ns": nullable(launched.end, launched.known),
        "start_ns": kernels.start[orphans],
        "end_ns": kernels.end[orphans],
        "source": "kernel_name",
        "reason": NO_CALL,
    }
    return fill("collective_calls", orphans.size, columns)


# -- advanced tracing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceOperations:
    """NCCL's operations on the GPU, each merged over its channels: `first` is one of its ranges.

    `api` is its call's id, which is missing where the call lay before the capture (`has_api`).
    """

    first: Ints
    start: Ints
    end: Ints
    api: Ints
    has_api: Bools


def device_operations(ranges: Ranges, payloads: Payloads) -> DeviceOperations:
    """Return the operations on the GPU: the channels of one have one `localId`."""
    number, on_device = payloads.at(ranges.row, "on_device")
    rows = np.flatnonzero(on_device & (ranges.end >= ranges.start))
    _, first, place = np.unique(number[rows], return_index=True, return_inverse=True)
    first = rows[first]
    start = least_by(place, ranges.start[rows], ranges.start[first])
    end = greatest_by(place, ranges.end[rows], ranges.end[first])
    return DeviceOperations(first, start, end, *payloads.at(ranges.row[first], "api"))


def program_calls(ranges: Ranges, payloads: Payloads) -> Ints:
    """Return which ranges are the program's calls: neither NCCL's scheduling nor the GPU's part.

    `ranges` are sorted by thread, then begin. Of several ranges of one call the first is the call.
    """
    _, on_device = payloads.at(ranges.row, "on_device")
    is_call = ranges.named(NCCL_CALL) & ~on_device
    # NCCL's own work, in which operations come a second time; the second inside the first
    for name in ("^GroupLaunch$", "^GroupRuntime$"):
        outer = np.flatnonzero(ranges.named(name))
        is_call &= range_around(ranges, outer, ranges.thread, ranges.start) < 0
    rows = np.flatnonzero(is_call)
    api, has_api = payloads.at(ranges.row[rows], "api")
    once = np.zeros(rows.size, bool)
    once[first_by(api, ranges.start[rows])] = True
    return rows[once | ~has_api]


def api_groups(ranges: Ranges, calls: Ints) -> tuple[Ints, Ints]:
    """Return for each range its group's number and the range that launches it, -1 outside groups.

    The launching range is the `API Group`; one around a single call is no group.
    """
    api_ranges = np.flatnonzero(ranges.named("^API Group$"))
    around = range_around(ranges, api_ranges, ranges.thread, ranges.start)
    of_calls, counts = np.unique(around[calls], return_counts=True)
    return row_among(of_calls[(counts > 1) & (of_calls >= 0)], around), around


def range_around(ranges: Ranges, outer: Ints, thread: Ints, time: Ints) -> Ints:
    """Return for each time of a thread which of the ranges `outer` is around it, or -1.

    `outer` are places in `ranges`; one that was never closed reaches to the capture's end.
    """
    end = np.where(ranges.end < 0, np.iinfo(np.int64).max, ranges.end)
    place = span_around(ranges.start[outer], end[outer], ranges.thread[outer], thread, time)
    return where_known(outer, place, -1)
