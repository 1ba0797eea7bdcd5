"""Trainings as people write them, whose launches bind them on a GPU: what a capture leaves behind.

`nanogpt` is the loop of nanoGPT's train.py (accumulation, autocast, a scaler that is off, clipped
gradients, a loss that is read in each step); `trainer` is Hugging Face's Trainer. Both train a GPT
on random tokens: of the size of GPT-2 small or near it on a GPU, of next to none on a CPU.

Run by torchrun, with NCCL where there are GPUs, else with gloo. Each rank writes `RANK.json` into
`--folder`, as window.py does: when each optimizer step ended. Nothing here knows of a profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from pathlib import Path

from window import facts, write

VOCABULARY = 50304


def main() -> None:
    """Train, and write when each step ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("program", choices=("nanogpt", "trainer"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    chosen = parser.parse_args()
    train = nanogpt if chosen.program == "nanogpt" else trainer
    ends = train(chosen.steps, chosen.folder)
    rank = int(os.environ["RANK"])
    write(chosen.folder, rank, {"rank": rank, "ends": ends, **facts()})


def nanogpt(steps: int, _folder: Path) -> list[int]:
    """nanoGPT's loop, with its names."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    gpu, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(1337 + dist.get_rank())
    layers, width, heads, block, batch = (8, 512, 8, 256, 12) if gpu else (1, 16, 2, 8, 2)
    accumulation, vocabulary = 4, VOCABULARY if gpu else 64
    raw = _gpt(layers, width, heads, block, vocabulary).to(device)
    weights = [each for each in raw.parameters() if each.dim() >= 2]
    others = [each for each in raw.parameters() if each.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=gpu or None)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    model = DistributedDataParallel(raw, device_ids=[local] if gpu else None)
    data = torch.randint(vocabulary, (1 << 16,))

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(len(data) - block - 1, (batch,))
        x = torch.stack([data[i : i + block] for i in at.tolist()])
        y = torch.stack([data[i + 1 : i + 1 + block] for i in at.tolist()])
        if not gpu:
            return x, y
        return (x.pin_memory().to(device, non_blocking=True),
                y.pin_memory().to(device, non_blocking=True))  # fmt: skip

    context = torch.autocast("cuda", torch.bfloat16) if gpu else contextlib.nullcontext()
    ends: list[int] = []
    x, y = get_batch()
    for iteration in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (iteration + 1) / 100)
        for micro_step in range(accumulation):
            model.require_backward_grad_sync = micro_step == accumulation - 1
            with context:
                logits = model(x)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
                loss = loss / accumulation
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # its log of each step (log_interval 1), which waits for the GPU
        ends.append(time.time_ns())
    dist.barrier()
    dist.destroy_process_group()
    return ends


def _gpt(layers: int, width: int, heads: int, block: int, vocabulary: int):
    """A GPT of nanoGPT's parts: tokens and places in, logits out."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
            q, k, v = (part.view(b, t, heads, -1).transpose(1, 2) for part in parts)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, width))
            return x + self.down(functional.gelu(self.up(self.ln_2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
            self.h = nn.Sequential(*(Block() for _ in range(layers)))
            self.ln_f = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, vocabulary, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            return self.lm_head(self.ln_f(self.h(self.wte(tokens) + self.wpe(places))))

    return GPT()


def trainer(steps: int, folder: Path) -> list[int]:
    """Hugging Face's Trainer, with its own loop, logging each step."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    gpu = torch.cuda.is_available()
    if gpu:
        config = GPT2Config()
    else:
        torch.set_num_threads(1)
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    length, batch = (512, 4) if gpu else (8, 2)
    tokens = torch.randint(config.vocab_size, (64, length))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    ends: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.time_ns())

    arguments = TrainingArguments(
        str(folder / "trained"), max_steps=steps, per_device_train_batch_size=batch,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=not gpu,
        bf16=gpu,
    )  # fmt: skip
    made = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Clock()])
    made.train()
    # Freed after the process group is destroyed, gloo's threads and the interpreter's lock may wait
    # for each other (torch 2.13): one run in four hung here.
    del made
    gc.collect()
    torch.distributed.destroy_process_group()
    return ends


if __name__ == "__main__":
    main()
