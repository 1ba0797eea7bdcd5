"""A rank that tells how long its steps took: still.py STEPS [torch].

It takes 20 ms a step, leaves a file `at.RANK.COUNT` here after every tenth, and at its end
`RANK.json` with its longest step (ns) and when it ended.
"""

import json
import os
import pathlib
import sys
import time

import loop

if "torch" in sys.argv:
    import torch  # noqa: F401

rank = os.environ["OMPI_COMM_WORLD_RANK"]
print(f"rank {rank} begins\n", end="", flush=True)
longest = 0
for count in range(1, int(sys.argv[1]) + 1):
    began = time.monotonic_ns()
    loop.step()
    longest = max(longest, time.monotonic_ns() - began)
    if count % 10 == 0:
        pathlib.Path(f"at.{rank}.{count}").touch()
stated = {"longest_ns": longest, "ended": time.monotonic()}
pathlib.Path(f"{rank}.json").write_text(json.dumps(stated))
print(f"rank {rank} ends\n", end="", flush=True)
