"""Collective calls of a Kineto trace: from kernels that exchange data, and from gloo's spans.

What a kernel's name does not tell its arguments do, or the operator that launches it. gloo runs an
operation on one of its worker threads; the span's begin is the rank's arrival (assumes that a
worker was free), and it ends with the operation. Spans do not name their process group. Every group
has worker threads of its own (two), made when the group is made: where the trace shows two per
group, the n-th pair by thread id belongs to the n-th group.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from clusterprof.columns import Bools, Ints, order_by, row_of, where_known
from clusterprof.ingest import recording
from clusterprof.ingest.kineto.trace_events import NO_ARGUMENTS, Arguments, Spans, Trace
from clusterprof.ingest.operations import exchange_of, exchanging_names, operation, without_nccl
from clusterprof.ingest.recording import (
    Launched,
    encoded,
    fill,
    not_launched,
    nullable,
    span_around,
)
from clusterprof.tables import HIGHEST_RANK

#: bytes of one element, by the names that torch gives its types in traces
DTYPE_BYTES = {
    "bool": 1, "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "short": 2, "short int": 2, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2,
    "int": 4, "float": 4, "complexhalf": 4,
    "long": 8, "long int": 8, "double": 8, "complexfloat": 8, "c10::complex<float>": 8,
    "complexdouble": 16, "c10::complex<double>": 16,
}  # fmt: skip


#: from the outside in, as PyTorch nests them: `c10d_functional::all_to_all_single` around
#: `c10d::alltoall_base_` around `record_param_comms` around `nccl:all_to_all`. The inner wins.
_NESTED = (
    r"^_?c10d_functional::", r"^c10d::", r"^record_param_comms$", r"^nccl:",
    r"(?i)^[a-z_]\w*::\w*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)\w*$",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessGroup:
    """One process group that this rank belongs to, with the global ranks of its members."""

    name: str
    ranks: tuple[int, ...]
    #: what the program calls it; empty where it gives no name
    description: str = ""

    @property
    def communicator(self) -> str:
        """Its id, equal on all members: name and ranks (`1[0-3,8]`), for names are counted."""
        spans: list[list[int]] = []
        for rank in sorted(self.ranks):
            if spans and rank == spans[-1][1] + 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        ranks = (str(low) if low == high else f"{low}-{high}" for low, high in spans)
        return f"{self.name}[{','.join(ranks)}]"


def process_groups(distributed: dict[str, Any]) -> dict[str, ProcessGroup]:
    """Return name -> group from a trace's `distributedInfo`, in order of creation."""
    groups = {}
    for entry in distributed.get("pg_config") or ():
        if isinstance(entry, dict) and "pg_name" in entry:
            name, text = str(entry["pg_name"]), str(entry.get("pg_desc", ""))
            ranks = listed(entry.get("ranks", ()))
            groups[name] = ProcessGroup(name, ranks, "" if text == "undefined" else text)
    return groups


def listed(ranks: object) -> tuple[int, ...]:
    """Return the ranks of a list or its text; none of one that Kineto cut short with dots."""
    text = str(ranks)  # half a list would name another group
    return () if "..." in text else tuple(int(rank) for rank in re.findall(r"\d+", text))


# -- kernels -------------------------------------------------------------------------------------


def exchanging_kernels(trace: Trace, launched: Launched) -> Bools:
    """Return which kernels exchange data between ranks.

    By their names; by their arguments, of which Kineto gives those of a collective to its kernels
    only; or by the operator around their launch, if it is the innermost and none of the others
    that it launches is known to exchange data.
    """
    kernels, operators = trace.spans["kernel"], trace.spans["cpu_op"]
    exchanges = exchanging_names(trace.names, kernels.column("name"))
    exchanges[[place for place, args in kernels.args.items() if args.collective is not None]] = True
    communicates = trace.named("cpu_op", "|".join(_NESTED))
    ours, others = (
        _around(operators, np.flatnonzero(rows), launched)
        for rows in (communicates, ~communicates & communicates.any())
    )
    began = np.append(operators.start, np.iinfo(np.int64).min)  # of none
    innermost = np.where(launched.known & (began[ours] > began[others]), ours, -1)
    return exchanges | ((innermost >= 0) & ~np.isin(innermost, innermost[exchanges]))


def calls_of_kernels(
    trace: Trace, launched: Launched, exchanging: Bools, groups: Mapping[str, ProcessGroup]
) -> tuple[pa.Table, list[str]]:
    """Return the calls in order of their launch, and warnings.

    What a kernel does not name itself (before PyTorch 2.3 it names nothing) is taken from the
    operator around its launch, and where it was launched before the window, from the other kernels
    of its stream. `message_bytes` is one rank's count times the type's size, as NCCL counts it: of
    a gather's or scatter's two sizes the smaller. `operation_id` is the collective's number in its
    process group (`Seq`, from PyTorch of March 2026 on; 0 where the group does not count).
    """
    spans = trace.spans["kernel"]
    order = np.flatnonzero(exchanging)
    issued = np.where(launched.known, launched.start, spans.start)
    order = order[order_by(issued[order])]
    launched = launched.at(order)
    operators, given = _operators(trace, launched)
    for row, place in enumerate(order.tolist()):
        given[row] = spans.args.get(place) or given[row]
    launches = [_stated(*launch, groups) for launch in zip(given, operators, strict=True)]
    stated = {name: [launch[name] for launch in launches] for name in _STATED}
    names = [trace.names[code] for code in spans.column("name")[order].tolist()]
    streams = spans.column("stream")[order].tolist()
    members, stated_sizes = (_agreed(stated[name], streams) for name in ("group", "size"))
    sizes = [
        len(group.ranks) if group and group.ranks else size
        for group, size in zip(members, stated_sizes, strict=True)
    ]
    operations = _operations(stated["operation"], names, streams)
    columns = {
        **_member_columns(members),
        "operation": pa.array(operations, pa.string()),
        "communicator_size": sizes,
        "stream": streams,
        "message_bytes": stated["bytes"],
        "peer": stated["peer"],
        "operation_id": [
            # of sends and receives it counts the rank's own: it is not the other side's
            None if operation in ("Send", "Recv", "SendRecv") else number
            for number, operation in zip(stated["number"], operations, strict=True)
        ],
        "issue_start_ns": nullable(launched.start, launched.known),
        "issue_end_ns": nullable(launched.end, launched.known),
        "start_ns": spans.start[order],
        "end_ns": spans.end[order],
        "source": encoded(np.array(stated["described"], np.int32), ["kernel_name", "kineto"]),
    }
    unlike = sum(size != other for size, other in zip(sizes, stated_sizes, strict=True) if other)
    doubts = _doubts(members, operations.count("Unknown"), unlike)
    return fill("collective_calls", order.size, columns), [*doubts, *without_nccl(names)]


def _doubts(members: Sequence[ProcessGroup | None], unknown: int, unlike: int) -> list[str]:
    silent = sum(not group for group in members)
    warnings = {
        f"{silent} of {len(members)} communication kernels do not name their process group"
        " (recorded for NCCL's by PyTorch 2.3 and later, and not in CUDA graphs)": silent,
        f"the operation of {unknown} of {len(members)} communication kernels cannot be determined:"
        " their names and launches do not tell it": unknown,
        f"{unlike} of {len(members)} communication kernels give their process group another size"
        " than it has ranks in its list, which is taken": unlike,
    }
    return [line for line, count in warnings.items() if count]


def _member_columns(groups: Sequence[ProcessGroup | None]) -> dict[str, pa.Array]:
    """Return the columns that name the process group of each call; null where it is unknown."""
    ids = [group.communicator if group else None for group in groups]
    ranks = [list(group.ranks) if group and group.ranks else None for group in groups]
    return {
        "communicator": pa.array(ids, pa.string()),
        "members": pa.array(ranks, pa.list_(pa.int32())),
    }


def _operators(trace: Trace, launched: Launched) -> tuple[list[str], list[Arguments]]:
    """Return the operator of torch.distributed around each launch: its name ("": none), arguments.

    These are of `record_param_comms`, from PyTorch 2.2 on: `Collective name` and its like.
    """
    rows = len(launched.start)
    names, args = [""] * rows, [NO_ARGUMENTS] * rows
    for pattern, category in product(_NESTED, ("cpu_op", "user_annotation")):
        spans = trace.spans[category]
        codes = spans.column("name")
        row = _around(spans, np.flatnonzero(trace.named(category, pattern)), launched)
        for k in np.flatnonzero(launched.known & (row >= 0)).tolist():
            name = trace.names[codes[row[k]]]
            if _operation(name) != "Unknown":
                names[k] = name
            own = spans.args.get(int(row[k]), NO_ARGUMENTS)
            if own.collective is not None:
                args[k] = own
    return names, args


def _around(spans: Spans, rows: Ints, launched: Launched) -> Ints:
    """Return for each launch which of these spans of its thread is around it, else -1."""
    start, end, thread = spans.start[rows], spans.end[rows], spans.column("thread")[rows]
    place = span_around(start, end, thread, launched.thread, launched.start)
    return where_known(rows, place, -1)


def _operations(
    stated: Sequence[str | None], names: Sequence[str], streams: Sequence[int]
) -> list[str]:
    """Return the operations: as stated, else as all kernels of that name and stream, else by name.

    NCCL before 2.19 has builds that do everything in a kernel named SendRecv: a name counts where
    no other kernel of the same name states another operation.
    """
    agreed = _agreed(_agreed(stated, [*zip(names, streams, strict=True)]), names)
    unlike = {name for name, operation in zip(names, stated, strict=True) if operation}
    return [
        operation or (name not in unlike and exchange_of(name)) or "Unknown"
        for name, operation in zip(names, agreed, strict=True)
    ]


_T = TypeVar("_T")


def _agreed(stated: Sequence[_T | None], keys: Sequence[Hashable]) -> list[_T | None]:
    """Return what is stated, with what is missing filled in where all others of its key agree."""
    values: dict[Hashable, set[_T]] = {}
    for key, value in zip(keys, stated, strict=True):
        if value is not None:
            values.setdefault(key, set()).add(value)
    only = {key: next(iter(some)) for key, some in values.items() if len(some) == 1}
    return [
        only.get(key) if value is None else value for key, value in zip(keys, stated, strict=True)
    ]


#: what is stated of a call: its `group` is a `ProcessGroup`, its `number` in that the operation's
_STATED = ("operation", "peer", "bytes", "group", "size", "number", "described")
#: how c10d names its operators for sends and receives: `nccl:send 0->1`, `nccl:recv 1<-0`
_DIRECTED = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")


def _stated(args: Arguments, operator: str, groups: Mapping[str, ProcessGroup]) -> dict[str, Any]:
    """Return `_STATED` by a kernel's arguments and the operator around its launch, else None."""
    operations = map(_operation, (str(args.collective or ""), operator))
    directed = _DIRECTED.search(operator)
    peers = (args.to_rank, args.from_rank, directed[1] if directed else -1)
    peer = int(next(number for number in peers if number is not None))
    name, size = str(args.group), _count(args.group_size) or 0
    group = groups.get(name) or ProcessGroup(name, listed(args.group_ranks))
    return {
        "operation": next((stated for stated in operations if stated != "Unknown"), None),
        "peer": peer if peer >= 0 else None,
        "bytes": _message_bytes(args),
        "group": None if args.group is None else group,
        "size": size if 0 < size <= HIGHEST_RANK else None,
        "number": _count(args.number) or None,
        "described": args != NO_ARGUMENTS or bool(operator),
    }


def _message_bytes(args: Arguments) -> int | None:
    counts = map(_count, (args.elements_in, args.elements_out))
    elements = min((count for count in counts if count is not None), default=None)
    width = DTYPE_BYTES.get(str(args.dtype).lower())
    return None if elements is None or width is None else elements * width


def _operation(name: str) -> str:
    """Return the operation of an operator's name, of torch.distributed or of another library."""
    named = operation(name)
    return named if named != "Unknown" else exchange_of(name) or named


def _count(number: object) -> int | None:
    """Return a number that some versions write as text; None where it is none."""
    text = str(number)
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None


# -- gloo ----------------------------------------------------------------------------------------


UNFINISHED = "the operation had not ended when the capture did"

_WORKERS_PER_GROUP = 2

#: of the others an input is not what one rank gives or gets
_SIZED = ("AllReduce", "AllGather", "Broadcast", "Reduce", "Send", "Recv", "Gather")

#: operation -> how the operators that hand it to gloo are named
_ISSUED_BY = {
    "AllReduce": ("allreduce_", "allreduce_coalesced_"),
    "AllGather": ("allgather_", "_allgather_base_"),
    "ReduceScatter": ("reduce_scatter_", "_reduce_scatter_base_"),
    "AllToAll": ("alltoall_", "alltoall_base_"),
    "Broadcast": ("broadcast_",), "Reduce": ("reduce_",), "Gather": ("gather_",),
    "Scatter": ("scatter_",), "Barrier": ("barrier",), "Send": ("send",), "Recv": ("recv_",),
}  # fmt: skip


def _gloo_rows(trace: Trace) -> Ints:
    """Return where gloo's spans are among the annotations, in order of their begin."""
    spans = trace.spans["user_annotation"]
    is_gloo = trace.named("user_annotation", "^gloo:")
    places = np.array([place for place in spans.args if is_gloo[place]], np.int64)
    return places[order_by(spans.start[places])]


def gloo_spans(trace: Trace) -> pa.Table:
    """Return gloo's spans as activity of kind `collective`, by worker thread."""
    spans = trace.spans["user_annotation"]
    chosen = _gloo_rows(trace)
    none = not_launched(chosen.size)
    name = encoded(spans.column("name")[chosen], trace.names)
    lanes = (none.start, spans.column("thread")[chosen])
    times = (spans.start[chosen], spans.end[chosen])
    return recording.activity(*times, *lanes, none, kind="collective", name=name)


def calls_of_gloo(trace: Trace, groups: Mapping[str, ProcessGroup]) -> tuple[pa.Table, list[str]]:
    """Return gloo's operations in order of their begin over all threads, and warnings.

    `stream` is the process group's number on this rank. An operation still running at the
    end has a begin and no end.
    """
    spans = trace.spans["user_annotation"]
    chosen = _gloo_rows(trace)
    if not chosen.size:
        return fill("collective_calls", 0, {}), []
    start = spans.start[chosen]
    operations = [operation(trace.names[code]) for code in spans.column("name")[chosen].tolist()]
    args = [spans.args[place] for place in chosen.tolist()]
    owners, lanes, warnings = _owners(trace, spans.column("thread")[chosen], groups)
    operator = _operators_of_gloo(trace, operations, start)
    issuing, issued = trace.spans["cpu_op"], operator >= 0
    ended = np.array([str(arguments.finished).lower() != "false" for arguments in args], bool)
    columns = {
        **_member_columns(owners),
        "operation": pa.array(operations),
        "communicator_size": [len(group.ranks) if group else None for group in owners],
        "stream": lanes,
        "message_bytes": [*map(_gloo_bytes, operations, args)],
        "issue_start_ns": nullable(where_known(issuing.start, operator, 0), issued),
        "issue_end_ns": nullable(where_known(issuing.end, operator, 0), issued),
        "start_ns": start,
        "end_ns": nullable(spans.end[chosen], ended),
        "source": "gloo",
        "reason": encoded(np.where(ended, -1, 0), [UNFINISHED]).cast(pa.string()),
    }
    return fill("collective_calls", chosen.size, columns), warnings


def _owners(
    trace: Trace, threads: Ints, groups: Mapping[str, ProcessGroup]
) -> tuple[list[ProcessGroup | None], Ints, list[str]]:
    """Return each operation's process group (None: unknown), its number, and warnings."""
    listed, none = list(groups.values()), np.zeros(threads.size, np.int64)
    if len(listed) == 1:
        return [listed[0]] * threads.size, none, []
    named = {thread for thread, name in trace.threads.items() if "pt_gloo_runloop" in name}
    workers = np.array(sorted(named | set(threads.tolist())), np.int64)
    if listed and workers.size == _WORKERS_PER_GROUP * len(listed):
        lanes = row_of(workers, threads) // _WORKERS_PER_GROUP
        return [listed[lane] for lane in lanes.tolist()], lanes, []
    unknown = "the trace lists no process groups: gloo's operations are taken as of one"
    if listed:
        unknown = (
            f"gloo does not name which of {len(listed)} process groups an operation is of, and the"
            f" trace shows {workers.size} worker threads, not {_WORKERS_PER_GROUP} per group"
        )
    return [None] * threads.size, none, [unknown]


def _operators_of_gloo(trace: Trace, operations: list[str], start: Ints) -> Ints:
    """Return the n-th operator of its kind for the n-th operation; -1 where they do not agree."""
    spans = trace.spans["cpu_op"]
    operator, kinds = np.full(start.size, -1), np.array(operations)
    for kind in set(operations):
        names = [f"c10d::{name}" for name in _ISSUED_BY.get(kind, ())]
        wanted = [place for place, name in enumerate(trace.names) if name in names]
        handed = np.flatnonzero(np.isin(spans.column("name"), wanted))
        handed = handed[order_by(spans.start[handed])]
        rows = np.flatnonzero(kinds == kind)
        if handed.size == rows.size and (spans.start[handed] <= start[rows]).all():
            operator[rows] = handed
    return operator


def _gloo_bytes(kind: str, args: Arguments) -> int | None:
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
