"""Takes a step every five milliseconds for as many seconds as the first argument says."""

from __future__ import annotations

import sys
import time

import clusterprof

until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    time.sleep(0.005)
    clusterprof.step()
