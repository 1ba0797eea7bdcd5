"""A rank that takes steps of 20 ms until its disk is stalled: still.py STEPS [COUNT].

So many, and further ones until there is a file `stalled`. It leaves a file `at.RANK.COUNT` here
after every tenth. COUNT: after so many it takes no other before there is that file.
"""

import os
import pathlib
import sys
import time

import loop

rank = os.environ["OMPI_COMM_WORLD_RANK"]

print(f"rank {rank} begins\n", end="", flush=True)
count = 0
while count < int(sys.argv[1]) or not os.path.exists("stalled"):
    count += 1
    loop.step()
    if count % 10 == 0:
        pathlib.Path(f"at.{rank}.{count}").touch()
    while str(count) in sys.argv[2:] and not os.path.exists("stalled"):
        time.sleep(0.02)
print(f"rank {rank} ends\n", end="", flush=True)
