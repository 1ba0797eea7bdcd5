"""How the ends of one collective differ over its members, and whether causality ever fails.

`torchrun --nproc-per-node N bench/programs/ends.py FILE.json` on one host with N GPUs: for each
operation, size and rank that is made to come last, torch.profiler's times of the NCCL kernels,
all on that host's one clock. Writes, per case, the members' median end (relative to their mean, as
part of the transfer, by distance from the rank that came last) and the least `end - last start`.
`NCCL_ALGO`, `NCCL_PROTO` and the like apply as usual.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_SIZES = (2_048, 262_144, 6_291_456, 16_777_216)
_CALLS = 12
_LATE_CYCLES = 600_000


def collective(name: str, count: int, device: torch.device) -> Any:
    """Return a function that issues the collective `name` on `count` bfloat16 per rank."""
    world = dist.get_world_size()
    one = torch.ones(count, dtype=torch.bfloat16, device=device)
    if name == "AllReduce":
        return lambda: dist.all_reduce(one)
    many = torch.ones(count * world, dtype=torch.bfloat16, device=device)
    if name == "AllGather":
        return lambda: dist.all_gather_into_tensor(many, one)
    return lambda: dist.reduce_scatter_tensor(one, many)


def kernels(profile: Any) -> list[tuple[float, float]]:
    """Start and end (ns, host's clock) of the NCCL kernels, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    base = int(trace.get("baseTimeNanoseconds", 0)) % 10**15
    found = [
        (base + e["ts"] * 1000, base + (e["ts"] + e["dur"]) * 1000)
        for e in trace["traceEvents"]
        if e.get("cat") == "kernel" and "nccl" in e["name"].lower()
    ]
    return sorted(found)


def main() -> None:
    """Run every case in one profile and let rank 0 write what was seen."""
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    cases = [(o, n, last) for o in ("AllReduce", "AllGather", "ReduceScatter")
             for n in _SIZES for last in (*range(world), -1)]  # fmt: skip
    calls = {(o, n): collective(o, n, device) for o, n, _ in cases}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for operation, count, last in cases:
            for _ in range(_CALLS):
                if rank == last:
                    torch.cuda._sleep(_LATE_CYCLES)
                calls[operation, count]()
        torch.cuda.synchronize()
    every: list[Any] = [None] * world
    dist.all_gather_object(every, kernels(profile)[: len(cases) * _CALLS])
    if rank == 0:
        times = np.array(every)
        rows = []
        for k, (operation, count, last) in enumerate(cases):
            start, end = times[:, k * _CALLS : (k + 1) * _CALLS].transpose(2, 1, 0)
            transfer = (end - start).min(axis=1)
            part = (end - end.mean(axis=1, keepdims=True)) / transfer[:, None]
            by_distance = np.roll(np.median(part, axis=0), -max(last, 0))
            least = (end.min(axis=1) - start.max(axis=1)).min()
            rows.append(
                {"operation": operation, "bytes": 2 * count, "last": last,
                 "transfer_us": float(np.median(transfer)) / 1e3, "least_us": float(least) / 1e3,
                 "ends_percent": (100 * by_distance).round(1).tolist()}
            )  # fmt: skip
        Path(sys.argv[1]).write_text("\n".join(map(json.dumps, rows)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
