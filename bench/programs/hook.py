"""Steps a real torch optimizer with the agent's hook and without, in alternating blocks.

Prints JSON: nanoseconds per step of each block, `with` and `without`. A block with the hook
includes writing its steps to the log.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch.optim import optimizer as optimizers

BLOCK = 2000


def main() -> None:
    """Run as many pairs of blocks as the first argument says."""
    counter = sys.modules["_clusterprof_agent.rank.steps"].counter
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    installed = dict(optimizers._global_optimizer_post_hooks)
    assert installed, "the agent registered no hook"

    def block(hooks: dict[int, object]) -> float:
        optimizers._global_optimizer_post_hooks.clear()
        optimizers._global_optimizer_post_hooks.update(hooks)
        begin = time.perf_counter_ns()
        for _ in range(BLOCK):
            optimizer.step()
        if hooks:
            counter.flush()
        return (time.perf_counter_ns() - begin) / BLOCK

    block({})
    block(installed)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(int(sys.argv[1])):
        times["without"].append(block({}))
        times["with"].append(block(installed))
    print(json.dumps({**times, "counted": counter.count}))


main()
