"""A job that torchrun starts over: `torchrun --max-restarts 1 ... restarted.py DIR`, three ranks.

Every rank of the first attempt writes its flight recorder's dump, `DIR/first/rank_3`, and rank 1
fails. In the second attempt rank 2 never comes to AllReduce 7; the others wait in it and write
theirs, `DIR/second/rank_3`. The variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 keeps gloo from
hanging when it starts over (pytorch 135712).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace


def main(into: Path) -> None:
    """One rank of one attempt."""
    dist.init_process_group("gloo")
    rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    value = torch.ones(8)
    for _ in range(6):
        dist.all_reduce(value)
    store = dist.distributed_c10d._get_default_store()
    if not again:
        dump(into / "first", rank)
        store.set(f"dumped {rank}", "")
        store.wait([f"dumped {each}" for each in range(3)])
        os._exit(rank == 1)
    if rank < 2:
        dist.all_reduce(value, async_op=True)
        dump(into / "second", rank)
        store.set(f"dumped again {rank}", "")
    store.wait([f"dumped again {each}" for each in range(2)])
    os._exit(0)


def dump(into: Path, rank: int) -> None:
    """Write what the rank's recorder holds, as torch does."""
    time.sleep(0.5)  # a call that has ended is retired a moment later
    into.mkdir(exist_ok=True)
    (into / f"rank_{rank}").write_bytes(_dump_fr_trace(True, False, False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
