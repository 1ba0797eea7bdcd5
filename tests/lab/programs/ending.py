"""A job of two ranks that ends in a chosen way: ending.py HOW AT.

Rank 0 takes 30 steps of 20 ms (slow: as many as fit into 10 s); HOW says what becomes of it, and
AT after which step. Rank 1 only waits for a while. once: in the first attempt of an elastic job;
wait: until there is a file `go`.
Started with --steps 10:20, step 5 is before the window and 15 inside.
"""

import os
import signal
import sys
import time

import loop

began = time.monotonic()
how, at = sys.argv[1], int(sys.argv[2])
names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
rank = int(next(os.environ[name] for name in names if name in os.environ))
if how == "slow":  # as a program that Slurm warns of its end (--signal=USR1@60)
    signal.signal(signal.SIGUSR1, lambda *_: print(f"rank {rank} is warned", flush=True))
print(f"rank {rank} begins\n", end="", flush=True)
for count in range(1, 31):
    loop.step()
    if how == "once" and count == at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank == 0:
            sys.exit(3)
        time.sleep(600)  # as in a collective, until the launcher ends it
    elif rank == 0 and count == at:
        if how == "exit":
            sys.exit(3)
        elif how == "_exit":
            os._exit(4)
        elif how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raise":
            raise RuntimeError("planted")
        elif how == "wait":
            print("rank 0 waits", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.02)
        elif how == "hang":
            print("rank 0 hangs", flush=True)
            time.sleep(600)
while how == "slow" and time.monotonic() < began + 10:
    time.sleep(0.1)
    loop.step()
print(f"rank {rank} ends\n", end="", flush=True)
