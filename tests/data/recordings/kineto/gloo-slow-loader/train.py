"""Record this folder's traces or those of ../gloo-heavy-compute: `train.py loader|compute OUTPUT`.

`torchrun --nproc-per-node 3`: a small DDP model over gloo. Rank 1's data set sleeps for each
sample, or rank 1 multiplies large matrices before the forward, so that the others wait for it.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

what, output = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)


class Samples(Dataset):
    """Random samples; rank 1 takes its time for each."""

    def __len__(self):
        return 1000

    def __getitem__(self, at):
        if what == "loader" and rank == 1:
            time.sleep(0.015)
        return torch.randn(128)


layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(2)])
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
batches = iter(DataLoader(Samples(), batch_size=4))
square = torch.randn(512, 512)
profiler = profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=2, warmup=1, active=5, repeat=1),
    record_shapes=True,
    on_trace_ready=lambda done: done.export_chrome_trace(f"{output}/rank{rank}.json.gz"),
)
with profiler:
    for _ in range(9):
        batch = next(batches)
        if what == "compute" and rank == 1:
            for _ in range(8):
                square = torch.mm(square, square).clamp(-1, 1)
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
dist.destroy_process_group()
