"""A small data-parallel training whose full flight recorder is saved as `--watch` does it.

Arguments: a folder, how many pairs of blocks, steps a block, ms of a step's device part. A block
either begins with a look and has the agent's hook on, or has neither; all ranks do the same. Writes
one JSON file per rank: for each pair the seconds of the block with and without, and of each saving.
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

#: more than the recorder keeps, each with other sizes than its neighbours, as in a model
COLLECTIVES = 2_500
WARM_UP = 10


def main() -> None:
    """Train in pairs of blocks."""
    folder, pairs, steps, device_ms = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 64)
    installed = dict(optimizers._global_optimizer_post_hooks)
    assert installed, "the agent registered no hook"
    for number in range(COLLECTIVES):
        dist.all_reduce(torch.ones(1000 + 16 * (number % 40)))
    agent = next(m for name, m in sys.modules.items() if name.endswith("agent.rank.rank"))
    savings: list[float] = []

    def look() -> None:
        attending = [function.__self__ for _, function in agent.counter._attending]
        watching = next(each for each in attending if type(each).__name__ == "Watching")
        begin = time.perf_counter()
        watching.save()
        savings.append(time.perf_counter() - begin)

    def block(watched: bool) -> float:
        optimizers._global_optimizer_post_hooks.clear()
        optimizers._global_optimizer_post_hooks.update(installed if watched else {})
        dist.barrier()
        begin = time.perf_counter()
        if watched:
            look()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            time.sleep(device_ms / 1e3)
        return time.perf_counter() - begin

    for _ in range(WARM_UP):  # the window opens and closes, and the watch begins
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    # The same on all ranks. Which of a pair goes first is drawn: nothing regular favours one.
    drawn, measured = random.Random(0), list[tuple[float, float]]()
    for _ in range(pairs):
        first = drawn.random() < 0.5
        both = {first: block(first), (not first): block(not first)}
        measured.append((both[True], both[False]))
    (folder / f"{dist.get_rank()}.json").write_text(
        json.dumps({"pairs": measured, "savings": savings})
    )
    dist.barrier()
    dist.destroy_process_group()


main()
