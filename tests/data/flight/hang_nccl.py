"""Jobs of two ranks that hang over NCCL: `torchrun --nproc-per-node 2 hang_nccl.py DIR`.

As hang.py: one process a rank and scenario, dumps after forty seconds; `watchdog` waits for NCCL's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SCENARIOS = ("skip", "other", "size", "recv", "send", "sleep", "late", "watchdog", "dtype")
INTO = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def job(scenario: str) -> None:
    """One rank of one scenario; never returns."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    watchdog = scenario == "watchdog"
    if watchdog:
        for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
            os.environ[name] = str(INTO / "nccl_trace_rank_")
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", timeout=timedelta(seconds=15 if watchdog else 300))
    tensor = dist.new_group([0, 1], group_desc="tensor parallel")
    if not watchdog:
        threading.Timer(40, dump, [INTO / f"{scenario}-{RANK}"]).start()
    x = torch.ones(1 << 20, device="cuda")
    y = torch.ones(1 << 21, device="cuda")
    for number in range(20 if scenario == "late" else 3):
        if scenario == "late" and RANK == 1 and number > 9:
            time.sleep(0.03)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(y, x, group=tensor)
        dist.reduce_scatter_tensor(x, y)
        dist.broadcast(x, 0)
        batch = [
            dist.P2POp(dist.isend, x, 1 - RANK),
            dist.P2POp(dist.irecv, y[: 1 << 20], 1 - RANK),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        (dist.send if RANK == 0 else dist.recv)(x, 1 - RANK)
        torch.cuda.synchronize()
        if number == 1:
            dist.group.WORLD._enable_collectives_timing()
            tensor._enable_collectives_timing()
    last(scenario, tensor, x, y)
    torch.cuda.synchronize()
    time.sleep(200)


def last(scenario: str, tensor: dist.ProcessGroup, x: torch.Tensor, y: torch.Tensor) -> None:
    """What hangs."""
    guilty = RANK == 1
    if scenario in {"sleep", "watchdog"} and guilty:
        time.sleep(200)
    if scenario == "recv" and guilty:
        dist.recv(x, 0)
    if scenario == "send" and not guilty:
        dist.send(x, 1)
    if scenario == "other" and guilty:
        dist.all_gather_into_tensor(y, x)
    elif scenario == "size" and guilty:
        dist.all_reduce(x[:1000])
    elif scenario == "dtype" and guilty:
        dist.all_reduce(x.half())
    elif not (scenario == "skip" and guilty):
        dist.all_reduce(x)
    if scenario != "late":
        dist.broadcast(x, 0)
        dist.all_gather_into_tensor(y, x, group=tensor)


def dump(name: Path) -> None:
    """Write both dumps and end."""
    recorder = torch._C._distributed_c10d
    name.with_suffix(".pickle").write_bytes(recorder._dump_nccl_trace(True, True, False))
    name.with_suffix(".json").write_bytes(recorder._dump_nccl_trace_json(True, False))
    os._exit(0)


if __name__ == "__main__":
    for place, scenario in enumerate(SCENARIOS):
        if os.fork() == 0:
            os.environ["MASTER_PORT"] = str(29600 + place)
            job(scenario)
    time.sleep(75)
    os._exit(0)
