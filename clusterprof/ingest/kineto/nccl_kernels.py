"""Collective calls from a Kineto trace's NCCL kernels, and from the operators that launch them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from clusterprof.ingest.columns import Ints, encoded, fill, matching, nullable
from clusterprof.ingest.kineto.launches import launches
from clusterprof.ingest.kineto.operators import Operator, operators
from clusterprof.ingest.kineto.process_groups import ProcessGroup, listed
from clusterprof.ingest.kineto.trace_events import Trace
from clusterprof.ingest.operations import NCCL_KERNEL, kernel_operation, operation

#: bytes of one element, by the names that torch gives its types in traces
DTYPE_BYTES = {
    "bool": 1, "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "short": 2, "short int": 2, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2,
    "int": 4, "float": 4, "complexhalf": 4,
    "long": 8, "long int": 8, "double": 8, "complexfloat": 8, "c10::complex<float>": 8,
    "complexdouble": 16, "c10::complex<double>": 16,
}  # fmt: skip


def read(trace: Trace, base: int, groups: Mapping[str, ProcessGroup]) -> tuple[pa.Table, list[str]]:
    """Return the calls in order of their launch, and warnings.

    What a kernel does not say itself (before PyTorch 2.3 it says nothing) is taken from the
    operator around its launch (see `operators`), and where it was launched before the window, from
    the other kernels of its stream. `message_bytes` is one rank's count times the type's size, as
    NCCL counts it: of a gather's or scatter's two sizes the smaller.
    """
    spans = trace.spans["kernel"]
    codes = spans.column("name")
    if not codes.size:
        return fill("collective_calls", 0, {}), []
    is_nccl = matching(pa.array(trace.names, pa.string()), NCCL_KERNEL)[codes]
    start, end = spans.times(base)
    issue, issue_end, thread, known = launches(trace, spans.column("correlation"), base)
    order = np.flatnonzero(is_nccl)
    order = order[np.argsort(np.where(known, issue, start)[order], kind="stable")]
    around = operators(trace, base, thread[order], issue[order], known[order])
    args = [
        spans.args.get(place) or each.args
        for place, each in zip(order.tolist(), around, strict=True)
    ]
    names = [trace.names[code] for code in codes[order].tolist()]
    stream = spans.column("stream")[order]
    members = _of_stream([_group(each, groups) for each in args], stream.tolist())
    members_count = _of_stream([_count(each, "Group size") for each in args], stream.tolist())
    operation = _operations(
        [_said(*each) for each in zip(args, around, strict=True)], names, stream
    )
    sizes = np.array([_bytes(each) for each in args], np.int64)
    peers = np.array([_peer(*each) for each in zip(args, around, strict=True)], np.int32)
    table = fill(
        "collective_calls",
        order.size,
        {
            "call": np.zeros(order.size, np.int32),
            "operation": pa.array(operation),
            "communicator": pa.array(
                [each.communicator if each else None for each in members], pa.string()
            ),
            "communicator_size": pa.array(members_count, pa.int32()),
            "members": pa.array(
                [list(each.ranks) if each and each.ranks else None for each in members],
                pa.list_(pa.int32()),
            ),
            "stream": stream,
            "message_bytes": nullable(sizes, sizes >= 0),
            "peer": nullable(peers, peers >= 0),
            "issue_start_ns": nullable(issue[order], known[order]),
            "issue_end_ns": nullable(issue_end[order], known[order]),
            "start_ns": start[order],
            "end_ns": end[order],
            "source": encoded(
                np.array([bool(a or o.name) for a, o in zip(args, around, strict=True)], np.int32),
                ["kernel_name", "kineto"],
            ),
        },
    )
    return table, _warnings(members, operation)


def _warnings(members: Sequence[ProcessGroup | None], operation: Sequence[str]) -> list[str]:
    out = []
    silent, unknown = sum(not each for each in members), operation.count("Unknown")
    if silent:
        out.append(
            f"{silent} of {len(members)} NCCL kernels do not name their process group (PyTorch"
            " before 2.3 does not record it)"
        )
    if unknown:
        out.append(
            f"the operation of {unknown} of {len(members)} NCCL kernels cannot be determined:"
            " launched before the window, by a kernel that does several operations"
        )
    return out


_T = TypeVar("_T")


def _of_stream(said: list[_T | None], stream: Sequence[int]) -> list[_T | None]:
    """Return `said` with what is missing filled in where all others of the stream say the same."""
    of: dict[int, set[_T]] = {}
    for each, number in zip(said, stream, strict=True):
        if each is not None:
            of.setdefault(number, set()).add(each)
    only = {number: next(iter(values)) for number, values in of.items() if len(values) == 1}
    return [only.get(number) if e is None else e for e, number in zip(said, stream, strict=True)]


def _operations(said: Sequence[str], names: Sequence[str], stream: Ints) -> list[str]:
    """Return the operations: as said, else as all kernels of that name and stream, else by name.

    NCCL before 2.19 has builds that do everything in a kernel named SendRecv: a name is believed
    where nobody says otherwise of the same name.
    """
    of: dict[object, set[str]] = {}
    keys = list(zip(names, stream.tolist(), strict=True))
    for each, key in zip(said, keys, strict=True):
        if each != "Unknown":
            of.setdefault(key, set()).add(each)
            of.setdefault(key[0], set()).add(each)
    out = []
    for each, key in zip(said, keys, strict=True):
        known = of.get(key) or of.get(key[0]) or {kernel_operation(key[0])}
        out.append(each if each != "Unknown" else min(known) if len(known) == 1 else "Unknown")
    return out


def _said(args: Mapping[str, Any], around: Operator) -> str:
    said = operation(str(args.get("Collective name", "")))
    return said if said != "Unknown" else operation(around.name)


#: how c10d names its operators for sends and receives: `nccl:send 0->1`, `nccl:recv 1<-0`
_DIRECTED = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")


def _peer(args: Mapping[str, Any], around: Operator) -> int:
    named = _DIRECTED.search(around.name)
    other = int(named[1]) if named else -1
    return int(args.get("Dst Rank", args.get("Src Rank", other)))


def _group(args: Mapping[str, Any], groups: Mapping[str, ProcessGroup]) -> ProcessGroup | None:
    if "Process Group Name" not in args:
        return None
    name = str(args["Process Group Name"])
    if name in groups:
        return groups[name]
    return ProcessGroup(name, listed(args.get("Process Group Ranks", "")))


def _bytes(args: Mapping[str, Any]) -> int:
    counts = [_count(args, each) for each in ("In msg nelems", "Out msg nelems")]
    known = [count for count in counts if count is not None]
    size = DTYPE_BYTES.get(str(args.get("dtype", "")).lower())
    return min(known) * size if known and size else -1


def _count(args: Mapping[str, Any], name: str) -> int | None:
    """Return a number that some versions write as text; None where it is none."""
    text = str(args.get(name, ""))
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None
