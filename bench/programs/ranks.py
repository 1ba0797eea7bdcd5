"""A small data-parallel training in which the agent's hook is on and off in alternating blocks.

All ranks switch at the same step. Writes one JSON file per rank into the folder of the first
argument: for each pair of blocks the seconds a step with the hook and without, of wall time and
of this process's own processor time.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

#: short blocks: what else the machine does lasts longer than a pair and so meets both sides
BLOCK = 2


def main() -> None:
    """Train for as many pairs of blocks as the second argument says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 256)
    installed = dict(optimizers._global_optimizer_post_hooks)
    assert installed, "the agent registered no hook"

    def block(hooks: dict[int, object], steps: int = BLOCK) -> tuple[float, float]:
        optimizers._global_optimizer_post_hooks.clear()
        optimizers._global_optimizer_post_hooks.update(hooks)
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - begin) / steps, (time.process_time() - busy) / steps

    block({}, 10)
    block(installed, 10)
    pairs = []
    # The same on all ranks. Which side goes first is drawn, so that nothing regular favours one.
    drawn = random.Random(0)
    for _ in range(int(sys.argv[2])):
        if drawn.random() < 0.5:
            without = block({})
            with_hook = block(installed)
        else:
            with_hook = block(installed)
            without = block({})
        pairs.append((with_hook, without))
    Path(sys.argv[1], f"{rank}.json").write_text(
        json.dumps({"pairs": pairs, "steps": 10 + len(pairs) * BLOCK, "pid": os.getpid()})
    )
    dist.barrier()
    dist.destroy_process_group()


main()
