"""A job that can be preempted: each time it trains 30 steps from its checkpoint on, a file.

At SIGTERM its handler raises, as those of frameworks do: the rank then saves a checkpoint and ends
with 75. Without a checkpoint rank 0 hangs after step 15, and rank 1 ends.
"""

import os
import signal
import sys

import loop

rank = int(os.environ["SLURM_PROCID"])
path = f"checkpoint.{rank}"


class Preempted(Exception):
    """What the handler raises."""


def preempt(*_):
    raise Preempted


def train(first):
    global step
    for step in range(first + 1, first + 31):
        loop.step()
        if step == 15 and not first and rank == 0:
            print("rank 0 hangs", flush=True)
            loop.stay()


step = 0
if os.path.exists(path):
    with open(path) as saved:
        step = int(saved.read())
print(f"rank {rank} begins at {step}", flush=True)
if rank == 0 or step:
    signal.signal(signal.SIGTERM, preempt)
    try:
        train(step)
    except Preempted:
        with open(path, "w") as file:
            file.write(str(step))
        print(f"rank {rank} is preempted after {step}", flush=True)
        sys.exit(75)
print(f"rank {rank} ends", flush=True)
