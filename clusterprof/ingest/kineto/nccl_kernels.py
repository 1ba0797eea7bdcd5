"""Collective calls from a Kineto trace's kernels that exchange data, NCCL's and others'.

What a kernel's name does not tell its arguments do, or the operator that launches it.

And its process groups, by which those of gloo's operations are named as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from clusterprof.ingest.exchange_kernels import exchange_of, exchanging_names, without_nccl
from clusterprof.ingest.kineto.trace_events import NO_ARGUMENTS, Arguments, Trace
from clusterprof.ingest.operations import operation
from clusterprof.ingest.recording import Bools, Ints, Launched, encoded, fill, nullable
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


class Operator(NamedTuple):
    """The operator of torch.distributed around a launch: its name ("": none) and arguments."""

    name: str
    #: of `record_param_comms`, from PyTorch 2.2 on: `Collective name` and its like
    args: Arguments


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
        return f"{self.name}[{_abridged(self.ranks)}]"


def process_groups(distributed: dict[str, Any]) -> dict[str, ProcessGroup]:
    """Return name -> group from a trace's `distributedInfo`, in order of creation."""
    groups = {}
    for entry in distributed.get("pg_config") or ():
        if isinstance(entry, dict) and "pg_name" in entry:
            name = str(entry["pg_name"])
            called = str(entry.get("pg_desc", ""))
            ranks = listed(entry.get("ranks", ()))
            groups[name] = ProcessGroup(name, ranks, "" if called == "undefined" else called)
    return groups


def listed(ranks: object) -> tuple[int, ...]:
    """Return the ranks of a list, or of its text; none where Kineto cut it short with dots.

    Half a list would name another group.
    """
    text = str(ranks)
    return () if "..." in text else tuple(int(rank) for rank in re.findall(r"\d+", text))


def _abridged(ranks: Sequence[int]) -> str:
    """Return `0-3,8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def exchanging(trace: Trace, launched: Launched) -> Bools:
    """Return which kernels exchange data between ranks.

    By their names; by their arguments, of which Kineto gives those of a collective to its kernels
    only; or by the operator around their launch, if it is the innermost and none of the others
    that it launches is known to exchange data.
    """
    spans = trace.spans["kernel"]
    found = exchanging_names(trace.names, spans.column("name"))
    found[[place for place, args in spans.args.items() if args.collective is not None]] = True
    operator = _innermost(trace, launched)
    explained = np.unique(operator[found])
    found |= (operator >= 0) & ~np.isin(operator, explained)
    return found


def _innermost(trace: Trace, launched: Launched) -> Ints:
    """Return the operator around each launch, if it communicates and has no other inside; or -1."""
    spans, is_ours = trace.spans["cpu_op"], trace.named("cpu_op", "|".join(_NESTED))
    thread, around = spans.column("thread"), []
    for which in (is_ours, ~is_ours & is_ours.any()):
        rows = np.flatnonzero(which)
        start, end = spans.start[rows], spans.end[rows]
        row = _around(start, end, thread[rows], launched.thread, launched.start)
        around.append(np.append(rows, -1)[row])
    ours, others = around
    began = np.append(spans.start, np.iinfo(np.int64).min)  # of none
    return np.where(launched.known & (began[ours] > began[others]), ours, -1)


def read(
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
    order = order[np.argsort(issued[order], kind="stable")]
    launched = launched.at(order)
    around = _operators(trace, launched)
    args = [
        spans.args.get(place) or each.args
        for place, each in zip(order.tolist(), around, strict=True)
    ]
    names = [trace.names[code] for code in spans.column("name")[order].tolist()]
    stream = spans.column("stream")[order]
    members = _of_stream([_group(each, groups) for each in args], stream.tolist())
    stated_size = _of_stream([_group_size(each) for each in args], stream.tolist())
    size = [len(each.ranks) if each and each.ranks else None for each in members]
    members_count = [one or other for one, other in zip(size, stated_size, strict=True)]
    stated = [_stated(*each) for each in zip(args, around, strict=True)]
    operations = _operations(stated, names, stream.tolist())
    sizes = np.array([_bytes(each) for each in args], np.int64)
    # of sends and receives it counts the rank's own: it is not the other side's
    ids = np.array([_count(each.number) or 0 for each in args], np.int64)
    ids[np.isin(operations, ("Send", "Recv", "SendRecv"))] = 0
    peers = np.array([_peer(*each) for each in zip(args, around, strict=True)], np.int32)
    described = [
        each != NO_ARGUMENTS or bool(op.name) for each, op in zip(args, around, strict=True)
    ]
    table = fill(
        "collective_calls",
        order.size,
        {
            **member_columns(members),
            "operation": pa.array(operations, pa.string()),
            "communicator_size": pa.array(members_count, pa.int32()),
            "stream": stream,
            "message_bytes": nullable(sizes, sizes >= 0),
            "peer": nullable(peers, peers >= 0),
            "operation_id": nullable(ids, ids > 0),
            "issue_start_ns": nullable(launched.start, launched.known),
            "issue_end_ns": nullable(launched.end, launched.known),
            "start_ns": spans.start[order],
            "end_ns": spans.end[order],
            "source": encoded(np.array(described, np.int32), ["kernel_name", "kineto"]),
        },
    )
    unlike = sum(
        one != other for one, other in zip(members_count, stated_size, strict=True) if other
    )
    return table, [*_warnings(members, operations, unlike), *without_nccl(names)]


def member_columns(groups: Sequence[ProcessGroup | None]) -> dict[str, pa.Array]:
    """Return the columns that name the process group of each call; null where it is unknown."""
    ids = [each.communicator if each else None for each in groups]
    ranks = [list(each.ranks) if each and each.ranks else None for each in groups]
    return {
        "communicator": pa.array(ids, pa.string()),
        "members": pa.array(ranks, pa.list_(pa.int32())),
    }


def _operators(trace: Trace, launched: Launched) -> list[Operator]:
    """Return the operator in which each launch lies (by its thread and time, ns)."""
    rows = len(launched.start)
    names, args = [""] * rows, [NO_ARGUMENTS] * rows
    for pattern in _NESTED:
        for category in ("cpu_op", "user_annotation"):
            spans, codes = trace.spans[category], trace.spans[category].column("name")
            places = np.flatnonzero(trace.named(category, pattern))
            of = spans.column("thread")[places]
            at = _around(
                spans.start[places], spans.end[places], of, launched.thread, launched.start
            )
            for k in np.flatnonzero(launched.known & (at >= 0)).tolist():
                row = int(places[at[k]])
                name = trace.names[codes[row]]
                if _operation(name) != "Unknown":
                    names[k] = name
                mine = spans.args.get(row, NO_ARGUMENTS)
                if mine.collective is not None:
                    args[k] = mine
    return [Operator(*each) for each in zip(names, args, strict=True)]


def _around(begin: Ints, end: Ints, of: Ints, thread: Ints, time: Ints) -> Ints:
    """Return for each time the place of the span of its thread that is around it, else -1."""
    found = np.full(len(time), -1, np.int64)
    for one in np.unique(thread):
        rows = np.flatnonzero(of == one)
        rows = rows[np.lexsort((-end[rows], begin[rows]))]
        if not rows.size:
            continue
        mine = np.flatnonzero(thread == one)
        last = np.searchsorted(begin[rows], time[mine], side="right") - 1
        # the one that began last, or where that has ended the one that reaches farthest
        reach = np.maximum.accumulate(end[rows])
        farthest = np.searchsorted(reach, reach, side="left")
        for at in (farthest[last], last):
            inside = (last >= 0) & (end[rows][at] >= time[mine])
            found[mine[inside]] = rows[at[inside]]
    return found


def _warnings(
    members: Sequence[ProcessGroup | None], operation: Sequence[str], unlike: int
) -> list[str]:
    silent, unknown = sum(not each for each in members), operation.count("Unknown")
    lines = {
        f"{silent} of {len(members)} communication kernels do not name their process group"
        " (recorded for NCCL's by PyTorch 2.3 and later, and not in CUDA graphs)": silent,
        f"the operation of {unknown} of {len(members)} communication kernels cannot be determined:"
        " their names and launches do not tell it": unknown,
        f"{unlike} of {len(members)} communication kernels give their process group another size"
        " than it has ranks in its list, which is taken": unlike,
    }
    return [line for line, count in lines.items() if count]


_T = TypeVar("_T")
_K = TypeVar("_K")


def _of_stream(stated: list[_T | None], stream: Sequence[int]) -> list[_T | None]:
    """Return `stated`, with what is missing filled in where all others of the stream agree."""
    of = _by(stream, stated)
    only = {number: next(iter(values)) for number, values in of.items() if len(values) == 1}
    return [only.get(number) if e is None else e for e, number in zip(stated, stream, strict=True)]


def _operations(
    stated: Sequence[str | None], names: Sequence[str], stream: Sequence[int]
) -> list[str]:
    """Return the operations: as stated, else as all kernels of that name and stream, else by name.

    NCCL before 2.19 has builds that do everything in a kernel named SendRecv: a name counts where
    no other kernel of the same name states another operation.
    """
    keys = list(zip(names, stream, strict=True))
    by_stream, by_name = _by(keys, stated), _by(names, stated)
    out = []
    for each, key in zip(stated, keys, strict=True):
        known = by_stream.get(key) or by_name.get(key[0]) or {exchange_of(key[0]) or "Unknown"}
        out.append(each or (min(known) if len(known) == 1 else "Unknown"))
    return out


def _by(keys: Iterable[_K], values: Iterable[_T | None]) -> dict[_K, set[_T]]:
    """Return what is stated of each key."""
    of: dict[_K, set[_T]] = {}
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            of.setdefault(key, set()).add(value)
    return of


def _stated(args: Arguments, around: Operator) -> str | None:
    names = (str(args.collective or ""), around.name)
    return next((found for name in names if (found := _operation(name)) != "Unknown"), None)


def _operation(name: str) -> str:
    """Return the operation of an operator's name, of torch.distributed or of another library."""
    known = operation(name)
    return known if known != "Unknown" else exchange_of(name) or known


#: how c10d names its operators for sends and receives: `nccl:send 0->1`, `nccl:recv 1<-0`
_DIRECTED = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")


def _peer(args: Arguments, around: Operator) -> int:
    named = _DIRECTED.search(around.name)
    stated = (args.to_rank, args.from_rank, named[1] if named else -1)
    return int(next(each for each in stated if each is not None))


def _group(args: Arguments, groups: Mapping[str, ProcessGroup]) -> ProcessGroup | None:
    if args.group is None:
        return None
    name = str(args.group)
    if name in groups:
        return groups[name]
    return ProcessGroup(name, listed(args.group_ranks))


def _group_size(args: Arguments) -> int | None:
    """Return how many members a process group has by its size; None for what is no such number."""
    size = _count(args.group_size) or 0
    return size if 0 < size <= HIGHEST_RANK else None


def _bytes(args: Arguments) -> int:
    counts = [_count(args.elements_in), _count(args.elements_out)]
    known = [count for count in counts if count is not None]
    size = DTYPE_BYTES.get(str(args.dtype).lower())
    return min(known) * size if known and size else -1


def _count(number: object) -> int | None:
    """Return a number that some versions write as text; None where it is none."""
    text = str(number)
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None
