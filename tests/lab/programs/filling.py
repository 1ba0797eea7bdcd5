"""A rank that fills a disk: filling.py FOLDER AT [LEFT].

It takes 60 steps of 20 ms (see `loop`), and after step AT it writes to FOLDER until there are LEFT
bytes left, or none. Started with --steps 10:20. With LEFT it waits under clusterprof within that
step until its report is in the run directory.
"""

import os
import sys
import time

import loop

folder, at, *left = sys.argv[1:]
plan = os.environ.get("CLUSTERPROF_PLAN") if left else None
for count in range(1, 61):
    loop.step()
    if count == int(at):
        loop.fill(folder, *map(int, left))
        until = time.monotonic() + 90
        report = plan and os.path.join(os.path.dirname(plan), "ranks/00000/report.nsys-rep")
        while report and not os.path.exists(report) and time.monotonic() < until:
            time.sleep(0.02)
print("rank 0 ends", flush=True)
sys.exit(3)
