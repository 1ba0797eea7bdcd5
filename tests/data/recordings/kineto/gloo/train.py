"""Record the traces of this folder: `torchrun --nproc-per-node 3 train.py OUTPUT`.

A small DDP model over gloo with a second process group of ranks 0 and 1; rank 1 sleeps 50 ms
before every step, so that the others wait for it in the first AllReduce of the backward.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
pair = dist.new_group([0, 1])
layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
profiler = profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=2, warmup=1, active=4, repeat=1),
    record_shapes=True,
    on_trace_ready=lambda done: done.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.json.gz"),
)
with profiler:
    for _ in range(8):
        batch = torch.randn(32, 128)
        if rank == 1:
            time.sleep(0.05)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        word = torch.ones(10)
        if rank < 2:
            dist.all_reduce(word, group=pair)
        dist.broadcast(word, 0)
        dist.barrier()
        profiler.step()
dist.destroy_process_group()
