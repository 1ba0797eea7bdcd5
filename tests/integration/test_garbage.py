"""A real training whose one rank spends its time in Python's garbage collector."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.command import Completed
from lab.warm import Warm

pytestmark = pytest.mark.needs_torch

#: rank 1 spends 0.3 s of each step from the third on in its collector, in the window and out of it:
#: what the window alone shows the undisturbed steps contradict
TRAINING = """
import gc, os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
gc.disable()
def circles(count):
    made = [[] for _ in range(count)]
    for each in made:
        each.append(each)
    return made
stock = circles(1_000_000) if rank == 1 else []
for step in range(20):
    until = time.monotonic() + 0.3 * (rank == 1 and step >= 2)
    while time.monotonic() < until:
        circles(10_000)
        gc.collect()
    model(torch.ones(64, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_the_rank_that_collects_is_named_with_its_collector(
    run_clusterprof: Callable[..., Completed], workdir: Path, torch_process: Warm
) -> None:
    (workdir / "train.py").write_text(TRAINING)
    done = run_clusterprof(
        ["run", "--ranks", "all", "--steps", "8:14", "--profiler=torch", "--run-dir=run", "--",
         *torch_process.launcher(2), "train.py"],
    )  # fmt: skip
    assert done.returncode == 0, done
    with (workdir / "run" / "ranks" / "00001" / "gc.csv").open() as file:
        rows = [{name: int(v) for name, v in row.items()} for row in csv.DictReader(file)]
    collected = [row for row in rows if row["collected"] >= 10_000]
    steps = (workdir / "run" / "ranks" / "00001" / "steps.csv").read_text().splitlines()[1:]
    inside = [
        number
        for number, begin, end in (map(int, line.split(",")) for line in steps)
        if any(begin <= row["begin_ns"] and row["end_ns"] <= end for row in collected)
    ]
    # the window is opened within its first step's time, and the last one closes it
    assert inside[:6] == [*range(8, 14)] or inside[:5] == [*range(9, 14)], rows
    results = json.loads((workdir / "run" / "merged" / "results.json").read_text())
    found = results["findings"][0]
    assert (found["code"], found["rank"]) == ("straggler.host", 1), done
    assert "gc.freeze()" in found["advice"]
    assert "gc.freeze()" in done.stdout, done
    # nothing is noted once the window is closed, and of the other rank nothing at all
    assert json.loads((workdir / "run" / "ranks" / "00000" / "state.json").read_text())["chosen"]
    other = (workdir / "run" / "ranks" / "00000" / "gc.csv").read_text().splitlines()
    assert other == ["begin_ns,end_ns,generation,collected"]
