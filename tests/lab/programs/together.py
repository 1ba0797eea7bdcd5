"""A job whose ranks all end alike: together.py, under srun.

Each takes 30 steps of 20 ms (see `loop`) and ends with status 3. Started with --steps 10:20.
"""

import os
import sys

import loop

rank = os.environ["SLURM_PROCID"]
print(f"rank {rank} begins", os.environ.get("TMPDIR"), flush=True)
for _ in range(30):
    loop.step()
print(f"rank {rank} ends", flush=True)
sys.exit(3)
