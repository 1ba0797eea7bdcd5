"""A small data-parallel training whose samples take time to read, to profile, repair and compare.

    torchrun --nproc-per-node 2 examples/slow_input.py              # each step waits for its batch
    torchrun --nproc-per-node 2 examples/slow_input.py --workers 4  # read by other processes, ahead

Runs on GPUs (NCCL) where there are any, else on the CPU (gloo). It knows nothing of clusterprof.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    """Random samples, each of which takes as long to read as one from a busy file server."""

    def __init__(self, count: int, width: int, read_ms: float) -> None:
        self.count, self.width, self.read_ms = count, width, read_ms

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> torch.Tensor:
        time.sleep(self.read_ms / 1e3)
        return torch.full((self.width,), float(place % 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=0, help="processes that read ahead")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--read-ms", type=float, default=8.0, help="for each sample")
    parser.add_argument("--dim", type=int, default=256)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda" if on_gpu else "cpu")

    torch.manual_seed(0)
    width = arguments.dim
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, *layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = Samples(arguments.steps * arguments.batch, width, arguments.read_ms)
    loader = DataLoader(samples, arguments.batch, num_workers=arguments.workers, pin_memory=on_gpu)
    for batch in loader:
        loss = model(batch.to(device, non_blocking=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
