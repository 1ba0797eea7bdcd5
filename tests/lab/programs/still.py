"""A rank that tells how long its steps took: still.py STEPS [torch].

It takes 20 ms a step, and further steps until there is a file `stalled`. It leaves a file
`at.RANK.COUNT` here after every tenth, and at its end `RANK.json` with its longest step (ns),
without what it waited in it for a processor, and when it ended.
"""

import json
import os
import pathlib
import sys
import time

import loop

if "torch" in sys.argv:
    import torch  # noqa: F401


def without_processor_ns():
    """For how long the thread could have run and was not let, so far."""
    return int(pathlib.Path("/proc/thread-self/schedstat").read_text().split()[1])


rank = os.environ["OMPI_COMM_WORLD_RANK"]
print(f"rank {rank} begins\n", end="", flush=True)
longest = 0
count = 0
while count < int(sys.argv[1]) or not os.path.exists("stalled"):
    count += 1
    began = time.monotonic_ns() - without_processor_ns()
    loop.step()
    longest = max(longest, time.monotonic_ns() - without_processor_ns() - began)
    if count % 10 == 0:
        pathlib.Path(f"at.{rank}.{count}").touch()
stated = {"longest_ns": longest, "ended": time.monotonic()}
pathlib.Path(f"{rank}.json").write_text(json.dumps(stated))
print(f"rank {rank} ends\n", end="", flush=True)
