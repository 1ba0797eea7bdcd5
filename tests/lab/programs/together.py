"""A job whose ranks all end alike: together.py [wait].

Each takes 30 steps of 20 ms (see `loop`) and ends with status 3. Started with --steps 10:20.
wait: inside the window each waits until there is a file `go.RANK`.
"""

import os
import sys
import time

import loop

rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
print(f"rank {rank} begins {os.environ.get('TMPDIR')}\n", end="", flush=True)
for count in range(30):
    loop.step()
    while count == 15 and "wait" in sys.argv and not os.path.exists(f"go.{rank}"):
        time.sleep(0.02)
print(f"rank {rank} ends\n", end="", flush=True)
sys.exit(3)
