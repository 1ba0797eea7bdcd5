"""Two ranks over gloo of which rank 1 does not come: hanging.py HOW [FOLDER].

After twenty steps of 20 ms rank 0 waits in an AllReduce that rank 1 joins a second later, or under
clusterprof as soon as both ranks' flight recorders are dumped ("sleeps"; "fills": FOLDER's disk was
filled before, no dump comes, and it waits ten seconds), or never, as it is killed then ("dies").
"ends": rank 1, which has a handler for SIGTERM, gets it then, or under clusterprof while its
recorder is dumped. Started with --steps 3:5 --hang-after 6 --step-on
loop:step: an optimizer would import torch's compiler, which takes as long as torch itself.
"""

import gc
import os
import signal
import sys
import threading
import time

gc.disable()  # as in `lab.job.LOOP`

import loop  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
core = torch._C._distributed_c10d
plain_dump = core._dump_fr_trace_json


def dump_slowly(**given):
    if step == 20:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)
    return plain_dump(**given)


def end(*_):
    print("rank 1 is told to end", flush=True)
    sys.exit(5)


def newer(path, since):
    """Whether there is a file since then: where a machine stalls an earlier step hung as well."""
    try:
        return os.stat(path).st_mtime > since
    except OSError:
        return False


def wait():
    """Until the hang is to end."""
    began, began_at = time.monotonic(), time.time()
    plan = os.environ.get("CLUSTERPROF_PLAN")
    # told to end, it waits for that
    until = began + (1 if plan is None and how != "ends" else 10 if how == "fills" else 300)
    dumps = [f"ranks/{each:05d}/hang.json.gz" for each in range(2)]
    while time.monotonic() < until:
        time.sleep(0.1)
        if plan and all(newer(os.path.join(os.path.dirname(plan), d), began_at) for d in dumps):
            break


step = 0
gc.freeze()
gc.enable()
for step in range(30):
    if step == 20 and rank == 1:
        if how == "ends":
            signal.signal(signal.SIGTERM, end)
            if "CLUSTERPROF_PLAN" in os.environ:
                core._dump_fr_trace_json = dump_slowly
            else:
                threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if how == "fills":
            loop.fill(sys.argv[2])
        wait()
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))
    loop.step()
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} ends\n", end="", flush=True)
sys.exit(3 if rank else 0)
