"""The program behind recordings of parallel shapes in which no step is marked.

    clusterprof torchrun --ranks all --steps 15:20 --nproc-per-node 4 -- tests/data/shapes.py tp

README.md beside it tells which recording was made with which arguments. Needs CUDA.
"""

import argparse
import contextlib
import gc
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # all_to_all_single with a backward; `dist` alone has none
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

HEADS, LENGTH = 12, 1024


class SumForward(torch.autograd.Function):
    """The sum over a tensor parallel group; its gradient is every rank's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class SumBackward(torch.autograd.Function):
    """The input itself; its gradient is the sum over a tensor parallel group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Block(nn.Module):
    """A transformer layer without dropout; with a group, this rank's share of it."""

    def __init__(self, width: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        parts = 1 if group is None else dist.get_world_size(group)
        self.group, self.heads = group, HEADS // parts
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width // parts, bias=False)
        self.k = nn.Linear(width, width // parts, bias=False)
        self.v = nn.Linear(width, width // parts, bias=False)
        self.out = nn.Linear(width // parts, width, bias=False)
        self.gate = nn.Linear(width, 3 * width // parts, bias=False)
        self.up = nn.Linear(width, 3 * width // parts, bias=False)
        self.down = nn.Linear(3 * width // parts, width, bias=False)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else SumBackward.apply(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else SumForward.apply(x, self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.enter(self.before(x))
        q, k, v = (
            each(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.leave(self.out(attended.reshape(batch, length, -1)))
        y = self.enter(self.between(x))
        return x + self.leave(self.down(silu(self.gate(y)) * self.up(y)))


class Convolutions(nn.Module):
    """Nine convolutions, eight with BatchNorm, whose buffers DDP broadcasts before each forward."""

    def __init__(self) -> None:
        super().__init__()
        layers, width = [nn.Conv2d(3, 64, 7, 2, 3)], 64
        for i in range(8):
            more = min(512, width * (2 if i % 2 else 1))
            stride = 2 if i in (1, 3, 5) else 1
            layers += [nn.Conv2d(width, more, 3, stride, 1, bias=False), nn.BatchNorm2d(more)]
            layers += [nn.ReLU()]
            width = more
        self.layers, self.out = nn.Sequential(*layers), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x).mean((2, 3)))


class Experts(nn.Module):
    """A layer, then one expert a rank: tokens travel to it and back by an uneven all-to-all.

    `favourite` gets all tokens that the other experts lack, which get half of an even share.
    """

    def __init__(self, width: int, favourite: int | None) -> None:
        super().__init__()
        self.block, self.favourite = Block(width), favourite
        self.expert = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def shares(self, tokens: int) -> list[int]:
        """How many of a rank's tokens go to each expert."""
        world = dist.get_world_size()
        if self.favourite is None:
            return [tokens // world] * world
        less = tokens // world // 2
        shares = [less] * world
        shares[self.favourite] = tokens - less * (world - 1)
        return shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exchange = torch.distributed.nn.functional.all_to_all_single
        x = self.block(x)
        tokens = x.reshape(-1, x.shape[-1])
        sent = self.shares(len(tokens))
        received = [sent[dist.get_rank()]] * dist.get_world_size()
        here = tokens.new_empty(sum(received), tokens.shape[1])
        here = self.expert(exchange(here, tokens.contiguous(), received, sent))
        back = exchange(torch.empty_like(tokens), here.contiguous(), sent, received)
        return x + back.view_as(x)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mode", choices=("accum", "conv", "ddp", "item", "tp", "inter", "moe"))
    parser.add_argument("--it", type=int, default=34, help="iterations")
    parser.add_argument("--cause", default="", choices=("", "busy", "gc", "gpu", "tokens"))
    parser.add_argument("--who", type=int, default=-1, help="the rank with the cause")
    parser.add_argument("--ms", type=float, default=15.0, help="what it costs, in every step")
    parser.add_argument("--dim", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=6, help="inter: of each of two chunks")
    parser.add_argument("--batch", type=int, default=8)
    return parser.parse_args()


class Job:
    """The process group, the model and one way to make a step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a = arguments
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        torch.manual_seed(1)
        self.big = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        batch = torch.randn(self.a.batch, LENGTH, self.a.dim, dtype=torch.bfloat16)
        self.batch = batch.pin_memory()
        self.model: nn.Module
        getattr(self, f"make_{self.a.mode}")()
        if self.a.cause == "gc" and self.rank == self.a.who:
            self.objects = [{i: [i]} for i in range(400_000)]  # what the collector goes through
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def stack(self, group: dist.ProcessGroup | None = None) -> nn.Sequential:
        layers = nn.Sequential(*[Block(self.a.dim, group) for _ in range(self.a.layers)])
        return layers.to(self.device, torch.bfloat16)

    def take(self) -> torch.Tensor:
        """A batch, from pinned memory."""
        return self.batch.to(self.device, non_blocking=True)

    def forward_and_backward(self) -> None:
        self.model(self.take()).float().square().mean().backward()

    def wrap(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(
            self.stack(), device_ids=[self.device.index], bucket_cap_mb=25
        )

    def make_accum(self) -> None:
        """Data parallel; four microbatches, of which the last one's gradients are reduced."""
        self.wrap()

        def iterate() -> None:
            for micro in range(4):
                with self.model.no_sync() if micro < 3 else contextlib.nullcontext():
                    self.forward_and_backward()

        self.iterate = iterate

    def make_conv(self) -> None:
        """Data parallel, images, mixed precision."""
        self.model = nn.parallel.DistributedDataParallel(
            Convolutions().to(self.device), device_ids=[self.device.index], bucket_cap_mb=25
        )
        images = torch.randn(256, 3, 160, 160).pin_memory()

        def iterate() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                made = self.model(images.to(self.device, non_blocking=True))
            made.float().logsumexp(1).mean().backward()

        self.iterate = iterate

    def make_ddp(self) -> None:
        """Data parallel: `item` without its waits."""
        self.wrap()
        self.iterate = self.forward_and_backward

    def make_item(self) -> None:
        """Data parallel; the host looks at every parameter's largest gradient."""
        self.wrap()

        def iterate() -> None:
            self.forward_and_backward()
            for parameter in self.model.parameters():
                parameter.grad.abs().max().item()

        self.iterate = iterate

    def make_tp(self) -> None:
        """Tensor parallel of two × data parallel, whose gradients go in one AllReduce.

        Of the sum nothing is made: what counts here is the time that it takes.
        """
        mesh = dist.device_mesh.init_device_mesh(
            "cuda", (self.world // 2, 2), mesh_dim_names=("dp", "tp")
        )
        self.model = self.stack(mesh["tp"].get_group())
        self.reduced, self.group = list(self.model.parameters()), mesh["dp"].get_group()
        self.iterate = self.reduce_at_the_end

    def make_moe(self) -> None:
        """Expert parallel over all ranks; the other half of each layer is data parallel."""
        favourite = self.a.who if self.a.cause == "tokens" else None
        layers = [Experts(self.a.dim, favourite) for _ in range(self.a.layers // 2)]
        self.model = nn.Sequential(*layers).to(self.device, torch.bfloat16)
        self.reduced = [p for layer in layers for p in layer.block.parameters()]
        self.group = dist.group.WORLD
        self.iterate = self.reduce_at_the_end

    def reduce_at_the_end(self) -> None:
        self.forward_and_backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in self.reduced])
        dist.all_reduce(flat, group=self.group)

    def make_inter(self) -> None:
        """Interleaved 1F1B: two chunks a rank, stages of two ranks × data parallel."""
        from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

        mesh = dist.device_mesh.init_device_mesh(
            "cuda", (self.world // 2, 2), mesh_dim_names=("dp", "pp")
        )
        pipeline, data = mesh["pp"].get_group(), mesh["dp"].get_group()
        here, ranks = dist.get_rank(pipeline), dist.get_world_size(pipeline)
        chunks = [self.stack() for _ in range(2)]
        self.model = nn.ModuleList(chunks)
        stages = [
            PipelineStage(chunk, here + ranks * i, 2 * ranks, self.device, group=pipeline)
            for i, chunk in enumerate(chunks)
        ]
        schedule = ScheduleInterleaved1F1B(
            stages, 8, loss_fn=lambda out, _: out.float().square().mean()
        )

        def iterate() -> None:
            batch = self.take()
            inputs = (batch,) if here == 0 else ()
            target = {"target": batch} if here == ranks - 1 else {}
            schedule.step(*inputs, **target)
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=data)

        self.iterate = iterate

    def delay(self) -> None:
        """The planted cause, before each step; `tokens` is in the model."""
        if self.rank != self.a.who:
            return
        if self.a.cause == "busy":
            end = time.perf_counter() + self.a.ms / 1e3
            while time.perf_counter() < end:
                pass
        elif self.a.cause == "gc":
            gc.collect()
        elif self.a.cause == "gpu":
            for _ in range(round(self.a.ms / 1.4)):  # one takes 1.4 ms on an H200
                self.big @ self.big

    def train(self) -> None:
        times = []
        for _ in range(self.a.it):
            begin = time.perf_counter()
            self.delay()
            self.iterate()
            self.optimizer.step()
            self.optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        middle = statistics.median(times[8:] or times)
        print(f"rank {self.rank}: {middle:.1f} ms a step", flush=True)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    Job(options()).train()
