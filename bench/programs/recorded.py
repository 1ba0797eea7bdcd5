"""A rank over gloo whose window ends with torch's flight recorder full, saved again and again.

Prints the processor time (ns) of each saving by the agent, and of each dump by torch alone, in
turn, and how many collectives there are.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

#: more than the recorder keeps, each with other sizes than its neighbours, as in a model
COLLECTIVES = 2_500


def took(function: Callable[[], object]) -> int:
    begin = time.thread_time_ns()
    function()
    return time.thread_time_ns() - begin


def main() -> None:
    """Train through the window, then measure as many rounds as the first argument says."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    for number in range(COLLECTIVES):
        dist.all_reduce(torch.ones(1000 + 16 * (number % 40)))
        if number % 100 == 0:
            optimizer.step()
    agent = next(m for name, m in sys.modules.items() if name.endswith("agent.rank.rank"))
    attending = [function.__self__ for _, function in agent.counter._attending]
    recorder = next(each.recorder for each in attending if hasattr(each, "recorder"))
    source = recorder.find(recorder.stacks)
    saving, bare = [], []
    for _ in range(int(sys.argv[1])):
        saving.append(took(recorder.save))
        bare.append(took(source.content))
    entries = len(json.loads(source.content())["entries"])
    print(json.dumps({"saving": saving, "bare": bare, "entries": entries}))


main()
