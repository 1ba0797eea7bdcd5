"""The pace of an unchanged program without any profiler, by the GPU's own clock.

    RANK=0 ... python3 tests/data/measure.py TO.json tests/data/train.py ...

Each rank writes `TO.json` with its rank in place of the first `%`. A CUDA event is recorded after
each step of the optimizer, and nothing waits for it before the program has ended: the host may run
as far ahead as it does without us.
"""

import faulthandler
import json
import os
import runpy
import statistics
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

#: steps before this one start the program up; the block is the last steps
FIRST_STEADY, BLOCK = 40, 60


def main(target: str, program: str) -> None:
    on_gpu = torch.cuda.is_available()
    hosts: list[float] = []
    events: list[torch.cuda.Event] = []

    def mark(*_: object) -> None:
        hosts.append(1e3 * time.perf_counter())
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)

    faulthandler.dump_traceback_later(50)  # where a run hangs, before its time is over
    register_optimizer_step_post_hook(mark)
    # NCCL waits forever to destroy a communicator that a live CUDA graph has captured
    dist.destroy_process_group = lambda *_: None
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")
    if on_gpu:
        torch.cuda.synchronize()
    ends = [events[0].elapsed_time(each) for each in events] if on_gpu else hosts
    steps = [after - before for before, after in pairwise(ends)]
    host_steps = [after - before for before, after in pairwise(hosts)]
    steady = steps[FIRST_STEADY:]
    rank = int(os.environ["RANK"])
    with open(target.replace("%", str(rank), 1), "w", encoding="utf-8") as file:
        json.dump(
            {
                "rank": rank,
                "steps": len(ends),
                "block_ms": (ends[-1] - ends[-1 - BLOCK]) / BLOCK,
                "median_ms": statistics.median(steady),
                "quartiles_ms": statistics.quantiles(steady)[::2],
                "host_median_ms": statistics.median(host_steps[FIRST_STEADY:]),
                "each_ms": [round(each, 3) for each in steps],
            },
            file,
        )


if __name__ == "__main__":
    target, program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    main(target, program)
    sys.stdout.flush()
    os._exit(0)
