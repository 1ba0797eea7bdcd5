"""A job that trains over gloo, one rank of it late: looked_at.py LATE_RANK HOW [FOLDER] [light].

HOW: stop: until there is a file `stop`; a number: so many steps; once there is a file `go`, die:
rank 1 is killed, fill: rank 0 fills the disk of FOLDER and all train on for 30 steps.
light: without DDP and an optimizer, which import torch's compiler, as long as torch itself takes;
started with --step-on loop:step.
"""

import os
import signal
import sys
import time

import loop
import torch
import torch.distributed as dist

late, how = int(sys.argv[1]), sys.argv[2]
names = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
rank, world = next(
    [int(os.environ[name]) for name in pair] for pair in names if pair[0] in os.environ
)
dist.init_process_group("gloo", init_method=f"file://{os.path.abspath('store')}",
                        rank=rank, world_size=world)  # fmt: skip
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
if sys.argv[-1] == "light":

    def update() -> None:
        for each in model.parameters():
            dist.all_reduce(each.grad)
        model.zero_grad()

else:
    model = torch.nn.parallel.DistributedDataParallel(model)
    update = torch.optim.SGD(model.parameters(), lr=0.1).step
left = int(how) if how.isdigit() else None
while left != 0:
    loop.step()
    if rank == late:
        time.sleep(0.3)
    model(torch.ones(1, 64)).sum().backward()
    update()
    # All ranks see the same, in the same step.
    there = torch.tensor([float(os.path.exists(name)) for name in ("stop", "go")])
    dist.broadcast(there, 0)
    stop, go = there.tolist()
    if stop:
        break
    if left is not None:
        left -= 1
    elif go and how == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif go and how == "fill":
        left = 30
        if rank == 0:
            loop.fill(sys.argv[3])
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} ends\n", end="", flush=True)
sys.exit(3 if how == "fill" else 0)
