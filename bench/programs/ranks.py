"""A small data-parallel training in which the agent's hook is on for one step and off for another.

All ranks switch at the same step. Writes one JSON file per rank into the folder of the first
argument: for each pair of steps the seconds of the one with the hook and of the one without.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

WARM_UP = 10
#: the device's part of a step, for which the host of a rank on a GPU waits. Were it computed here,
#: four ranks on two cores would wait for the scheduler, and differ by a fifth from step to step.
DEVICE_SECONDS = 0.010


def main() -> None:
    """Train for as many pairs of steps as the second argument says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 64)
    installed = dict(optimizers._global_optimizer_post_hooks)
    assert installed, "the agent registered no hook"

    def step(hooks: dict[int, object]) -> float:
        optimizers._global_optimizer_post_hooks.clear()
        optimizers._global_optimizer_post_hooks.update(hooks)
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        time.sleep(DEVICE_SECONDS)
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        step({})
        step(installed)
    pairs = []
    # The same on all ranks. Which of a pair goes first is drawn: nothing regular favours one.
    drawn = random.Random(0)
    for _ in range(int(sys.argv[2])):
        if drawn.random() < 0.5:
            without = step({})
            with_hook = step(installed)
        else:
            with_hook = step(installed)
            without = step({})
        pairs.append((with_hook, without))
    Path(sys.argv[1], f"{rank}.json").write_text(
        json.dumps({"pairs": pairs, "steps": WARM_UP + len(pairs)})
    )
    dist.barrier()
    dist.destroy_process_group()


main()
