"""Collective calls from a Kineto trace's NCCL kernels, which carry the collective in `args`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.ingest.columns import encoded, fill, matching, nullable
from clusterprof.ingest.launches import launches
from clusterprof.ingest.operations import NCCL_KERNEL, kernel_operation, operation
from clusterprof.ingest.process_groups import ProcessGroup
from clusterprof.ingest.trace_events import Trace

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

    `message_bytes` is one rank's count times the type's size, as NCCL counts it: of a gather's
    or scatter's two sizes the smaller.
    """
    spans = trace.spans["kernel"]
    codes = spans.column("name")
    if not codes.size:
        return fill("collective_calls", 0, {}), []
    is_nccl = matching(pa.array(trace.names, pa.string()), NCCL_KERNEL)[codes]
    start, end = spans.times(base)
    issue, issue_end, _, known = launches(trace, spans.column("correlation"), base)
    order = np.flatnonzero(is_nccl)
    order = order[np.argsort(np.where(known, issue, start)[order], kind="stable")]
    args = [spans.args.get(place, {}) for place in order.tolist()]
    names = [trace.names[code] for code in codes[order].tolist()]
    members = [_group(each, groups) for each in args]
    sizes = np.array([_bytes(each) for each in args], np.int64)
    peers = np.array([each.get("Dst Rank", each.get("Src Rank", -1)) for each in args], np.int32)
    table = fill(
        "collective_calls",
        order.size,
        {
            "call": np.zeros(order.size, np.int32),
            "operation": pa.array([_operation(*pair) for pair in zip(args, names, strict=True)]),
            "communicator": pa.array(
                [each.communicator if each else None for each in members], pa.string()
            ),
            "communicator_size": pa.array([each.get("Group size") for each in args], pa.int32()),
            "members": pa.array(
                [list(each.ranks) if each and each.ranks else None for each in members],
                pa.list_(pa.int32()),
            ),
            "stream": spans.column("stream")[order],
            "message_bytes": nullable(sizes, sizes >= 0),
            "peer": nullable(peers, peers >= 0),
            "issue_start_ns": nullable(issue[order], known[order]),
            "issue_end_ns": nullable(issue_end[order], known[order]),
            "start_ns": start[order],
            "end_ns": end[order],
            "source": encoded(
                np.array([bool(each) for each in args], np.int32), ["kernel_name", "kineto"]
            ),
        },
    )
    silent = sum(not each for each in args)
    warning = (
        f"{silent} of {order.size} NCCL kernels do not say which collective they are: their"
        " operation is read off the kernel's name, and their process group is unknown"
    )
    return table, [warning] if silent else []


def _operation(args: Mapping[str, Any], kernel: str) -> str:
    said = operation(str(args.get("Collective name", "")))
    return said if said != "Unknown" else kernel_operation(kernel)


def _group(args: Mapping[str, Any], groups: Mapping[str, ProcessGroup]) -> ProcessGroup | None:
    if "Process Group Name" not in args:
        return None
    name = str(args["Process Group Name"])
    if name in groups:
        return groups[name]
    listed = str(args.get("Process Group Ranks", ""))
    # Kineto cuts a long list short with dots: half a list would name another group.
    ranks = () if "..." in listed else tuple(int(rank) for rank in re.findall(r"\d+", listed))
    return ProcessGroup(name, ranks)


def _bytes(args: Mapping[str, Any]) -> int:
    counts = [args[each] for each in ("In msg nelems", "Out msg nelems") if each in args]
    size = DTYPE_BYTES.get(str(args.get("dtype", "")).lower())
    return min(counts) * size if counts and size else -1
