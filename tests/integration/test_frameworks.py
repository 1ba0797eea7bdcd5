"""Programs of the frameworks that people train with, on the CPU with gloo: each rank is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
from lab import deepspeed
from lab.command import Completed
from lab.endings import outcomes
from lab.warm import Warm

pytestmark = pytest.mark.needs_torch

Run = Callable[..., Completed]


class Framework(NamedTuple):
    """A program, what starts it, how its ranks 0 and 1 are known, and its environment.

    What nothing starts are two ranks that find torch loaded (`Warm.launcher`).
    """

    program: str
    start: tuple[str, ...]
    identities: tuple[str, str] = ("torchrun", "torchrun")
    environment: Mapping[str, str] = {}


TORCHRUN = ("torchrun", "--nproc-per-node=2")

#: transformers' Trainer, with gradient accumulation and a worker that loads
TRANSFORMERS = """
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}

data = [{"x": torch.ones(4), "labels": torch.zeros(1)} for _ in range(64)]
arguments = TrainingArguments(
    "out", max_steps=12, per_device_train_batch_size=1, gradient_accumulation_steps=2,
    report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_num_workers=1,
)
Trainer(Model(), arguments, train_dataset=data).train()
torch.distributed.destroy_process_group()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.ones(48, 4))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
"""

#: Lightning's own launcher: rank 0 starts rank 1
LIGHTNING = """
import pytorch_lightning as pl
import torch

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

pl.Trainer(
    max_steps=12, accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Model(), torch.utils.data.DataLoader(torch.ones(64, 4)))
"""

#: the loop of nanoGPT's train.py: DDP that synchronises in the last micro-step only, a scaler that
#: is switched off, two groups of parameters, gradients that are clipped
NANOGPT = """
import contextlib, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
raw = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
weights = [each for each in raw.parameters() if each.dim() >= 2]
others = [each for each in raw.parameters() if each.dim() < 2]
optimizer = torch.optim.AdamW([
    {"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0},
])
scaler = torch.amp.GradScaler("cpu", enabled=False)
model = DistributedDataParallel(raw)
for iteration in range(12):
    for each in optimizer.param_groups:
        each["lr"] = 1e-3 / (1 + iteration)
    for micro_step in range(4):
        model.require_backward_grad_sync = micro_step == 3
        with contextlib.nullcontext():
            loss = model(torch.randn(2, 4)).mean() / 4
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
"""

#: ZeRO's first stage, whose optimizer is DeepSpeed's own
DEEPSPEED = """
import deepspeed
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
for _ in range(12):
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.step()
torch.distributed.destroy_process_group()
"""

FRAMEWORKS = {
    "transformers": Framework(TRANSFORMERS, TORCHRUN),
    "accelerate": Framework(
        ACCELERATE, ("accelerate", "launch", "--multi_gpu", "--num_processes=2")
    ),
    "lightning": Framework(LIGHTNING, ("python",), ("process group", "lightning")),
    "nanogpt": Framework(NANOGPT, (), ("environment", "environment")),
    "nanogpt-torchrun": Framework(NANOGPT, TORCHRUN),
    "deepspeed": Framework(DEEPSPEED, TORCHRUN, environment=deepspeed.environment()),
    "deepspeed-launcher": Framework(
        DEEPSPEED,
        ("deepspeed", "--num_gpus=2"),
        ("deepspeed", "deepspeed"),
        deepspeed.environment(),
    ),
}
_LONG_DEEPSPEED = [pytest.mark.long, pytest.mark.needs_deepspeed]
#: of those that are not only long
_MARKS = {"nanogpt": [], "deepspeed": _LONG_DEEPSPEED, "deepspeed-launcher": _LONG_DEEPSPEED}


@pytest.mark.needs_transformers
@pytest.mark.needs_lightning
@pytest.mark.needs_accelerate
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(framework, id=name, marks=_MARKS.get(name, [pytest.mark.long]))
        for name, framework in FRAMEWORKS.items()
    ],
)
def test_each_rank_of_a_framework_s_program_is_counted_and_captured(
    run_clusterprof: Run, workdir: Path, torch_process: Warm, framework: Framework
) -> None:
    (workdir / "train.py").write_text(dedent(framework.program))
    done = run_clusterprof(
        ["run", "--ranks", "all", "--steps", "5:8", "--profiler=torch", "--run-dir=run",
         "--no-merge", "--", *(framework.start or torch_process.launcher(2)), "train.py"],
        env={"TOKENIZERS_PARALLELISM": "false", **framework.environment},
    )  # fmt: skip
    run = workdir / "run"
    assert done.returncode == 0, done
    assert outcomes(run) == {0: "collected", 1: "collected"}, done
    for rank, identity in enumerate(framework.identities):
        folder = run / f"ranks/{rank:05d}"
        stated: dict[str, Any] = json.loads((folder / "state.json").read_text())
        assert (stated["identity"], stated["world_size"]) == (identity, 2)
        assert (stated["step_begin"], stated["step_end"], stated["steps"]) == (5, 8, 12)
        names = {path.name for path in folder.iterdir()}
        assert {"trace.json.gz", "flight.json.gz"} <= names
        assert len((folder / "steps.csv").read_text().splitlines()) == 13
