"""Simulated jobs as traces that other people's PyTorch would have written.

`trace` writes one rank's tables as Kineto does: NCCL kernels that all have one name and say nothing
of themselves (PyTorch before 2.3), or say it in their arguments (since then), c10d's operators
around their launches, and of what was launched before the window the kernel only.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterprof.tables import RankTables

#: what NCCL of 2023 could call every kernel
KERNEL = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
_CALLS = {
    "AllReduce": ("allreduce_", "all_reduce"),
    "AllGather": ("_allgather_base_", "_all_gather_base"),
    "ReduceScatter": ("_reduce_scatter_base_", "_reduce_scatter_base"),
    "AllToAll": ("alltoall_base_", "all_to_all"),
}
_ROUND_NS = 15_000
_OF_LAUNCH = ("correlation", "launch_start_ns", "launch_end_ns", "launch_thread")


def trace(
    tables: RankTables,
    folder: Path,
    *,
    begin_ns: int = 0,
    arguments: str = "",
    kernels: Mapping[str, str] | None = None,
    operators: bool = True,
    graphs: bool = False,
    steps: bool = True,
    listed: bool = True,
) -> Path:
    """Write the trace of one rank into `folder` and return its path.

    From `begin_ns` on (the rank's wall clock) host calls are recorded: kernels launched before have
    no launch. `arguments`: what tells the collective, `kernel`, `operator`, or neither (empty).
    `kernels` are the NCCL kernels' names by operation; around their launches are c10d's
    `operators`, or none. With `graphs` all kernels of a step are launched by one call. Ranks are
    `listed`, or the name of a group (that of its kind) and its size are all that is told of it.
    """
    events: list[dict[str, Any]] = []
    made_by: dict[int, tuple[int, int]] = {}

    def add(category: str, name: str, begin: int, end: int, tid: int, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": begin // 1000,
             "dur": max(end // 1000 - begin // 1000, 0), "args": args}
        )  # fmt: skip

    calls = {(row["stream"], row["start_ns"]): row for row in tables.collective_calls.to_pylist()}
    for row in _in_graphs(tables) if graphs else tables.activity.to_pylist():
        launch, launched = row["launch_start_ns"], row["launch_end_ns"]
        known = launch >= begin_ns
        if row["end_ns"] < begin_ns:
            continue
        where = {"device": row["device"], "stream": row["stream"]}
        where["correlation"] = row["correlation"] + 1
        span = (row["start_ns"], row["end_ns"], row["stream"])
        call = calls.get((row["stream"], row["start_ns"]))
        if row["kind"] == "copy":
            add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", *span, **where, bytes=4096)
        elif call is None:
            add("kernel", row["name"], *span, **where)
        else:
            stated = _stated(call, tables, listed) if arguments and known else {}
            own = stated if arguments == "kernel" else {}
            name = (kernels or {}).get(call["operation"], KERNEL)
            add("kernel", name, *span, **where, **own)
            operator, annotation = _CALLS[call["operation"]]
            around = (launch - _ROUND_NS, launched + _ROUND_NS, 1)
            if known and operators:
                add("cpu_op", f"c10d::{operator}", *around)
                add("cpu_op", "record_param_comms", *around, **stated)
                add("user_annotation", f"nccl:{annotation}", *around)
        if known:
            correlation = where["correlation"]
            made_by.setdefault(correlation, (launch, launched))
    for correlation, when in made_by.items():
        add("cuda_runtime", "cudaLaunchKernel", *when, 1, correlation=correlation)
    for row in tables.host_calls.to_pylist():
        if row["start_ns"] >= begin_ns:
            category = "cuda_runtime" if row["kind"] == "cuda" else "cpu_op"
            add(category, row["name"], row["start_ns"], row["end_ns"], 1)
    for row in tables.steps.to_pylist() if steps else []:
        if row["begin_ns"] >= begin_ns:
            name = f"ProfilerStep#{row['step']}"
            add("user_annotation", name, row["begin_ns"], row["end_ns"], 1)
    info = {"backend": "nccl", "rank": tables.rank, "world_size": tables.info.world_size}
    path = folder / f"rank{tables.rank}.json"
    content = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}
    path.write_text(json.dumps(content))
    return path


def _in_graphs(tables: RankTables) -> list[dict[str, Any]]:
    """The activities, the kernels of each step launched by the call that launched its first."""
    begins = tables.steps["begin_ns"].to_pylist()
    rows = sorted(tables.activity.to_pylist(), key=lambda row: row["launch_start_ns"])
    first: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = bisect_right(begins, row["launch_start_ns"])
        if row["kind"] != "copy" and step:
            launch = first.setdefault(step, row)
            row |= {name: launch[name] for name in _OF_LAUNCH}
    return rows


def _stated(call: Mapping[str, Any], tables: RankTables, listed: bool) -> dict[str, Any]:
    """The arguments by which PyTorch since 2.2 tells a collective."""
    world = range(tables.info.world_size or 1)
    ranks = {"Process Group Ranks": str(list(world)), "Group size": len(world)}
    name = call["communicator"] or ""
    unlisted = {"Process Group Name": name[2:4], "Group size": call["communicator_size"]}
    return {
        "Collective name": _CALLS[call["operation"]][1].strip("_"),
        **({"Process Group Name": "0", **ranks} if listed else unlisted),
        "In msg nelems": 1024,
        "Out msg nelems": 1024,
        "dtype": "Float",
        # since March 2026
        **({} if call["operation_id"] is None else {"Seq": call["operation_id"]}),
    }
