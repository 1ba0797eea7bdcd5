"""Collective calls on the CPU: gloo's spans in a Kineto trace.

gloo runs an operation on one of its worker threads; the span's begin is the rank's arrival
(assumes that a worker was free), and it ends with the operation. Spans do not name their
process group. Every group has worker threads of its own (two), made when the group is made:
where the trace shows two per group, the n-th pair by thread id belongs to the n-th group.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import msgspec
import numpy as np
import pyarrow as pa

from clusterprof.columns import Bools, Ints, order_by, row_of
from clusterprof.ingest import recording
from clusterprof.ingest.kineto.nccl_kernels import DTYPE_BYTES, ProcessGroup, member_columns
from clusterprof.ingest.kineto.trace_events import Arguments, Trace
from clusterprof.ingest.operations import operation
from clusterprof.ingest.recording import encoded, fill, not_launched, nullable

UNFINISHED = "the operation had not ended when the capture did"

_WORKER = "pt_gloo_runloop"
_WORKERS_PER_GROUP = 2

#: of the others an input is not what one rank gives or gets
_SIZED = ("AllReduce", "AllGather", "Broadcast", "Reduce", "Send", "Recv", "Gather")

#: operation -> how the operators that hand it to gloo are named
_ISSUED_BY = {
    "AllReduce": ("allreduce_", "allreduce_coalesced_"),
    "AllGather": ("allgather_", "_allgather_base_"),
    "ReduceScatter": ("reduce_scatter_", "_reduce_scatter_base_"),
    "Broadcast": ("broadcast_",),
    "Reduce": ("reduce_",),
    "AllToAll": ("alltoall_", "alltoall_base_"),
    "Gather": ("gather_",),
    "Scatter": ("scatter_",),
    "Barrier": ("barrier",),
    "Send": ("send",),
    "Recv": ("recv_",),
}


def _spans(trace: Trace) -> Ints:
    """Return where gloo's spans are among the annotations, in order of their begin."""
    spans = trace.spans["user_annotation"]
    codes = spans.column("name")
    is_gloo = [name.startswith("gloo:") for name in trace.names]
    places = np.array([place for place in spans.args if is_gloo[codes[place]]], np.int64)
    return places[order_by(spans.start[places])]


def activity(trace: Trace) -> pa.Table:
    """Return gloo's spans as activity of kind `collective`, by worker thread."""
    spans = trace.spans["user_annotation"]
    chosen = _spans(trace)
    none = not_launched(chosen.size)
    name = encoded(spans.column("name")[chosen], trace.names)
    lanes = (none.start, spans.column("thread")[chosen])
    times = (spans.start[chosen], spans.end[chosen])
    return recording.activity(*times, *lanes, none, kind="collective", name=name)


def read(trace: Trace, groups: Mapping[str, ProcessGroup]) -> tuple[pa.Table, list[str]]:
    """Return gloo's operations in order of their begin over all threads, and warnings.

    `stream` is the process group's number on this rank. An operation still running at the
    end has a begin and no end.
    """
    spans = trace.spans["user_annotation"]
    chosen = _spans(trace)
    if not chosen.size:
        return fill("collective_calls", 0, {}), []
    start = spans.start[chosen]
    operations = [operation(trace.names[code]) for code in spans.column("name")[chosen].tolist()]
    args = [spans.args[place] for place in chosen.tolist()]
    owners, lanes, warnings = _owners(trace, spans.column("thread")[chosen], groups)
    issue, issue_end, issued = _issues(trace, operations, start)
    ended = np.array([str(arguments.finished).lower() != "false" for arguments in args], bool)
    table = fill(
        "collective_calls",
        chosen.size,
        {
            **member_columns(owners),
            "operation": pa.array(operations),
            "communicator_size": [len(group.ranks) if group else None for group in owners],
            "stream": lanes,
            "message_bytes": [*map(_bytes, operations, args)],
            "issue_start_ns": nullable(issue, issued),
            "issue_end_ns": nullable(issue_end, issued),
            "start_ns": start,
            "end_ns": nullable(spans.end[chosen], ended),
            "source": "gloo",
            "reason": encoded(np.where(ended, -1, 0), [UNFINISHED]).cast(pa.string()),
        },
    )
    return table, warnings


def _owners(
    trace: Trace, threads: Ints, groups: Mapping[str, ProcessGroup]
) -> tuple[list[ProcessGroup | None], Ints, list[str]]:
    """Return each operation's process group (None: unknown), its number, and warnings."""
    listed = list(groups.values())
    if len(listed) == 1:
        return [listed[0]] * threads.size, np.zeros(threads.size, np.int64), []
    named = {thread for thread, name in trace.threads.items() if _WORKER in name}
    workers = np.array(sorted(named | set(threads.tolist())), np.int64)
    if listed and workers.size == _WORKERS_PER_GROUP * len(listed):
        lanes = row_of(workers, threads) // _WORKERS_PER_GROUP
        return [listed[lane] for lane in lanes.tolist()], lanes, []
    unknown = (
        f"gloo does not name which of {len(listed)} process groups an operation is of, and the"
        f" trace shows {workers.size} worker threads, not {_WORKERS_PER_GROUP} per group"
        if listed
        else "the trace lists no process groups: gloo's operations are taken as of one"
    )
    return [None] * threads.size, np.zeros(threads.size, np.int64), [unknown]


def _issues(trace: Trace, operations: list[str], start: Ints) -> tuple[Ints, Ints, Bools]:
    """Return when each operation was handed over; unknown where numbers or order do not agree.

    The n-th operator of a kind is taken for the n-th span of that kind.
    """
    spans = trace.spans["cpu_op"]
    issue, until = np.zeros(start.size, np.int64), np.zeros(start.size, np.int64)
    issued = np.zeros(start.size, bool)
    kinds = np.array(operations)
    for kind in set(operations):
        names = [f"c10d::{name}" for name in _ISSUED_BY.get(kind, ())]
        wanted = [place for place, name in enumerate(trace.names) if name in names]
        handed = np.flatnonzero(np.isin(spans.column("name"), wanted))
        handed = handed[order_by(spans.start[handed])]
        rows = np.flatnonzero(kinds == kind)
        if handed.size == rows.size and (spans.start[handed] <= start[rows]).all():
            issue[rows], until[rows], issued[rows] = spans.start[handed], spans.end[handed], True
    return issue, until, issued


def _bytes(kind: str, args: Arguments) -> int | None:
    """Return one rank's message in bytes, None where the trace has no shapes (record_shapes)."""
    if kind not in _SIZED:
        return None
    try:
        shapes = msgspec.json.decode(args.shapes, type=list[list[int]])
        types = msgspec.json.decode(args.types, type=list[str])
        sizes = [DTYPE_BYTES[name.lower()] for name in types]
    except (KeyError, ValueError):
        return None
    size = sum(prod(shape) * size for shape, size in zip(shapes, sizes, strict=False))
    return size if size >= 0 else None
