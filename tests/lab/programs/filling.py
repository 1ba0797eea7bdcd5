"""A rank that fills a disk: filling.py FOLDER AT.

It takes 60 steps of 20 ms (see `loop`), and after step AT it writes to FOLDER until there is no
space left. Started with --steps 10:20.
"""

import errno
import os
import sys

import loop

folder, at = sys.argv[1], int(sys.argv[2])
for count in range(1, 61):
    loop.step()
    if count == at:
        with open(os.path.join(folder, "filler"), "wb", buffering=0) as file:
            try:
                while file.write(b"x" * 65536) == 65536:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
print("rank 0 ends", flush=True)
sys.exit(3)
