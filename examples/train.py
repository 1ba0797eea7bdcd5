"""A small data-parallel training with a planted slow rank, to try clusterprof on.

    torchrun --nproc-per-node 4 examples/train.py --slow-rank 2
    torchrun --nproc-per-node 4 examples/train.py --slow-rank 2 --slow-kind loader

Runs on GPUs (NCCL) where there are any, else on the CPU (gloo); under torchrun, srun or
mpirun. It knows nothing of clusterprof.
"""

import argparse
import gc
import io
import os
import subprocess
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader


def place() -> tuple[int, int, int]:
    """Rank, world size and local rank, from torchrun, srun or mpirun."""
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ):
        if all(name in os.environ for name in names):
            rank, world, local = (int(os.environ[name]) for name in names)
            return rank, world, local
    return 0, 1, 0


def first_host() -> str:
    """Where rank 0 runs: Slurm's first node, or here."""
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if not nodes:
        return "127.0.0.1"
    names = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    return names.stdout.split()[0]


class Samples(torch.utils.data.Dataset):
    """Samples, a batch of which takes `ms` to read, by one request."""

    def __init__(self, width: int, ms: float) -> None:
        self.width, self.ms = width, ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitems__(self, places: list[int]) -> list[torch.Tensor]:
        time.sleep(self.ms / 1e3)
        return [torch.ones(self.width) for _ in places]


def delay(kind: str, ms: float, step: int, model: nn.Module) -> None:
    """The planted cause: what delays this rank in front of the forward."""
    end = time.perf_counter() + ms / 1e3
    if kind == "host":
        time.sleep(ms / 1e3)
    elif kind == "compute":  # work that only this rank has
        big = torch.ones(1024, 1024)
        while time.perf_counter() < end:
            big @ big
    elif kind == "gc":  # looks at all objects that live: see `heap`
        gc.collect()
    elif kind == "checkpoint" and step and step % 40 == 0:  # to a slow file system
        torch.save(model.state_dict(), io.BytesIO())
        time.sleep(10 * ms / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--slow-rank", type=int, default=-1, help="this rank's host is late")
    parser.add_argument("--slow-ms", type=float, default=40.0)
    parser.add_argument(
        "--slow-kind", default="host", choices=("host", "loader", "compute", "gc", "checkpoint")
    )
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()

    rank, world, local = place()
    os.environ.setdefault("MASTER_ADDR", first_host())
    os.environ.setdefault(
        "MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 20000)
    )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=world)

    torch.manual_seed(0)
    width = arguments.dim
    layers = [
        module
        for _ in range(arguments.layers)
        for module in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    ]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    is_slow = rank == arguments.slow_rank
    batch = torch.randn(arguments.batch, width)
    batches = heap = None
    if is_slow and arguments.slow_kind == "gc":
        heap = [[] for _ in range(int(3_000 * arguments.slow_ms))]
    if arguments.slow_kind == "loader":
        samples = Samples(width, arguments.slow_ms if is_slow else 0.0)
        batches = iter(DataLoader(samples, arguments.batch))
    begin = time.perf_counter()
    for step in range(arguments.steps):
        if batches:
            batch = next(batches)
        elif is_slow:
            delay(arguments.slow_kind, arguments.slow_ms, step, model)
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del heap
    each = 1e3 * (time.perf_counter() - begin) / arguments.steps
    if rank == 0:
        print(f"{arguments.steps} steps on {world} ranks, {each:.1f} ms each", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
