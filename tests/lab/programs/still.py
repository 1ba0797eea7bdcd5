"""A rank that takes steps of 20 ms until its disk is stalled: still.py STEPS [torch].

So many, and further ones until there is a file `stalled`. It leaves a file `at.RANK.COUNT` here
after every tenth. torch: rank 0, which is profiled, has it.
"""

import os
import pathlib
import sys

import loop

rank = os.environ["OMPI_COMM_WORLD_RANK"]
if "torch" in sys.argv and rank == "0":
    import torch  # noqa: F401

print(f"rank {rank} begins\n", end="", flush=True)
count = 0
while count < int(sys.argv[1]) or not os.path.exists("stalled"):
    count += 1
    loop.step()
    if count % 10 == 0:
        pathlib.Path(f"at.{rank}.{count}").touch()
print(f"rank {rank} ends\n", end="", flush=True)
