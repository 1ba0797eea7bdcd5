"""A job that ends in a chosen way: ending.py HOW AT, or ending.py each HOW:AT HOW:AT...

Rank 0 takes 30 steps of 20 ms; HOW says what becomes of it, and AT after which step. Rank 1 only
waits for a while. each: this for every rank, which waits past its window under nsys until its
report is home. slow: all go on until they were warned and rank 0's window was closed for the time
limit, and then for as long again.
once: in the first attempt of an elastic job, when rank 1 is there, too; wait: until there is a file
`go`.
Started with --steps 10:20, step 5 is before the window and 15 inside.
"""

import json
import os
import signal
import sys
import time

import loop

names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
rank = int(next(os.environ[name] for name in names if name in os.environ))
how, at = sys.argv[1:3]
ends = rank == 0 or how == "once"
home = ""
if how == "each":
    if ";profiled=session:" in os.environ.get("CLUSTERPROF_PLAN", ""):
        run = os.path.dirname(os.environ["CLUSTERPROF_PLAN"])
        home = f"{run}/ranks/{rank:05d}/report.nsys-rep"
    how, _, at = sys.argv[2 + rank].partition(":")
    ends = True
warned = []


def warn(*_):
    warned.append(rank)
    print(f"rank {rank} is warned\n", end="", flush=True)


def closed():
    """Whether rank 0's window was closed."""
    with open("run/ranks/00000/state.json") as file:
        return json.load(file)["state"] in ("finishing", "captured", "collected", "lost")


if how == "slow":  # as a program that Slurm warns of its end (--signal=USR1@60)
    signal.signal(signal.SIGUSR1, warn)
print(f"rank {rank} begins\n", end="", flush=True)
for count in range(1, 31):
    loop.step()
    while home and count == 22 and not os.path.exists(home):
        time.sleep(0.02)
    if not ends or count != int(at):
        continue
    if how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        open(f"at-{rank}", "w").close()
        while rank == 0 and not os.path.exists("at-1"):
            time.sleep(0.02)
        if rank == 0:
            sys.exit(3)
        loop.stay()  # as in a collective, until the launcher ends it
    elif how == "exit":
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
        print(f"rank {rank} waits\n", end="", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.02)
    elif how == "hang":
        print(f"rank {rank} hangs\n", end="", flush=True)
        loop.stay()
while how == "slow" and not (warned and os.path.exists("run/close") and closed()):
    loop.step()
for _ in range(30 if how == "slow" else 0):
    loop.step()
print(f"rank {rank} ends\n", end="", flush=True)
