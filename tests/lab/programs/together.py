"""A job whose ranks all end alike: together.py [COUNT:FILE...].

Each takes 30 steps of 20 ms (see `loop`) and ends with status 3. Started with --steps 10:20.
COUNT:FILE: after so many steps each waits until there is this file, `go.{rank}` for example.
"""

import os
import sys
import time

import loop

rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
waits = dict(word.split(":", 1) for word in sys.argv[1:])
print(f"rank {rank} begins {os.environ.get('TMPDIR')}\n", end="", flush=True)
for count in range(1, 31):
    loop.step()
    awaited = waits.get(str(count), ".").format(rank=int(rank))
    while not os.path.exists(awaited):
        time.sleep(0.02)
print(f"rank {rank} ends\n", end="", flush=True)
sys.exit(3)
