"""The program behind the recordings: one training in many shapes, with causes that can be planted.

    clusterprof torchrun --ranks all --steps 20:28 --nproc-per-node 4 -- tests/data/train.py ...

README.md beside it tells which recording was made with which arguments. Needs CUDA.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    """A transformer layer without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, 16, width // 16)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.between(x))))


class Samples(torch.utils.data.Dataset):
    """Items that cost the host `ms` each to make."""

    def __init__(self, width: int, ms: float) -> None:
        self.width, self.ms = width, ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        return torch.ones(512, self.width, dtype=torch.bfloat16)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--mode", default="ddp", choices=("ddp", "fsdp", "graph", "pipeline", "serial")
    )
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--stage-layers", default="", help="pipeline: layers of each stage, 2,2,2,5"
    )
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, default=-1, help="DataLoader workers; -1: none")
    parser.add_argument("--item-ms", type=float, default=0.0, help="what an item costs a worker")
    parser.add_argument("--item-rank", type=int, default=-1, help="of this rank only; -1: of all")
    parser.add_argument("--pageable", action="store_true", help="the batch is in pageable memory")
    parser.add_argument(
        "--uncaptured", action="store_true", help="graph: the very same work without the graph"
    )
    parser.add_argument(
        "--item", action="store_true", help="ddp, fsdp, serial: each step ends with loss.item()"
    )
    parser.add_argument("--slow-rank", default="", help="the rank with the cause, or all")
    parser.add_argument("--slow-kind", default="host", choices=("host", "gpu", "gc"))
    parser.add_argument("--slow-steps", default="", help="only in these steps: 22,25")
    parser.add_argument("--slow-ms", type=float, default=20.0)
    return parser.parse_args()


class Job:
    """The process group, the model and one way to make a step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a = arguments
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        torch.manual_seed(0)
        self.big = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        self.batch = torch.randn(
            self.a.batch, 1024, self.a.dim, dtype=torch.bfloat16, pin_memory=not self.a.pageable
        )
        layers = self.a.layers
        if self.a.stage_layers:
            layers = int(self.a.stage_layers.split(",")[self.rank])
        self.model = nn.Sequential(*[Block(self.a.dim) for _ in range(layers)])
        self.model.to(self.device, torch.bfloat16)
        if self.a.compile:
            self.model.compile()
        getattr(self, f"make_{self.a.mode}")()

    def make_ddp(self) -> None:
        self.wrapped = nn.parallel.DistributedDataParallel(
            self.model, device_ids=[self.device.index]
        )
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters(), lr=1e-4)
        self.iterate = self.eager

    def make_fsdp(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in self.model:
            fully_shard(layer)
        self.wrapped = fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters(), lr=1e-4)
        self.iterate = self.eager

    def make_serial(self) -> None:
        """Data parallel by one AllReduce for each parameter after the backward."""
        self.wrapped = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

        def iterate(batch: torch.Tensor) -> None:
            self.eager(batch)
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)

        self.iterate = iterate

    def eager(self, batch: torch.Tensor) -> None:
        self.loss = self.wrapped(batch).float().square().mean()
        self.loss.backward()

    def make_graph(self) -> None:
        """Forward, backward and the AllReduce of all gradients in one CUDA graph."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.static = self.batch.to(self.device)

        def whole() -> None:
            self.model(self.static).float().square().mean().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                whole()
                self.optimizer.zero_grad(set_to_none=False)
        torch.cuda.current_stream().wait_stream(side)

        def eager(batch: torch.Tensor) -> None:
            self.static.copy_(batch)
            whole()

        if self.a.uncaptured:
            self.iterate = eager
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole()

        def replay(batch: torch.Tensor) -> None:
            self.static.copy_(batch)
            graph.replay()

        self.iterate = replay

    def make_pipeline(self) -> None:
        """One stage a rank, 1F1B, by torch.distributed.pipelining."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        stage = PipelineStage(self.model, self.rank, self.world, self.device)
        schedule = Schedule1F1B(
            stage, self.a.microbatches, loss_fn=lambda out, _: out.float().square().mean()
        )

        def one(batch: torch.Tensor) -> None:
            if self.rank == 0:
                schedule.step(batch)
            elif self.rank == self.world - 1:
                schedule.step(target=batch)
            else:
                schedule.step()

        self.iterate = one

    def batches(self):
        if self.a.workers < 0:
            while True:
                yield self.batch
        slow = self.a.item_rank in (-1, self.rank)
        loader = torch.utils.data.DataLoader(
            Samples(self.a.dim, self.a.item_ms if slow else 0.0), batch_size=self.a.batch * 2,
            num_workers=self.a.workers, pin_memory=True,
        )  # fmt: skip
        yield from loader

    def delay(self, step: int) -> None:
        """The planted cause."""
        chosen = not self.a.slow_steps or step in map(int, self.a.slow_steps.split(","))
        if self.a.slow_rank not in ("all", str(self.rank)) or not chosen:
            return
        if self.a.slow_kind == "host":
            time.sleep(self.a.slow_ms / 1e3)
        elif self.a.slow_kind == "gpu":
            for _ in range(round(self.a.slow_ms / 1.4)):  # one takes 1.4 ms on an H200
                self.big @ self.big
        else:
            import gc

            junk = [[i] for i in range(int(self.a.slow_ms * 10_000))]
            gc.collect()
            del junk

    def train(self) -> None:
        nvtx, feed, times = torch.cuda.nvtx, self.batches(), []
        for step in range(self.a.iterations):
            begin = time.perf_counter()
            with nvtx.range(f"step {step}"):
                with nvtx.range("data"):
                    batch = next(feed).to(self.device, non_blocking=not self.a.pageable)
                self.delay(step)
                with nvtx.range("forward and backward"):
                    self.iterate(batch)
                with nvtx.range("optimizer"):
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=self.a.mode != "graph")
                if self.a.item:
                    self.loss.item()
            times.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        middle = sorted(times[8:])[len(times[8:]) // 2]
        print(f"rank {self.rank}: {middle:.1f} ms a step", flush=True)
        dist.barrier()
        del self.iterate  # NCCL waits for a captured graph's end before it destroys a communicator
        dist.destroy_process_group()


if __name__ == "__main__":
    Job(options()).train()
