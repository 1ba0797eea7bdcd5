"""A job that hangs is said to while it runs, and ends as it would have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import Running
from lab.warm import Warm

pytestmark = pytest.mark.needs_torch

RANKS = 3
PROGRAM = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
last = dist.get_rank() == dist.get_world_size() - 1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def evaluate():
    while not os.path.exists("go"): time.sleep(0.1)
for number in range(50):
    if number == 40 and last:
        dist.all_reduce(torch.ones(3)) if sys.argv[1] == "other" else evaluate()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
print(f"rank {os.environ['RANK']} ends\\n", end="", flush=True)
sys.exit(0 if sys.argv[1] == "sleep" else 3)
"""


def test_a_rank_that_sleeps_is_named_and_the_job_ends_as_it_would_have(
    workdir: Path, torch_process: Warm, run_clusterprof: Callable[..., Completed]
) -> None:
    program = workdir / "train.py"
    program.write_text(PROGRAM)
    argv = command.clusterprof(
        ["run", "--hang-after", "5", "--steps", "10:12", "--profiler=none", "--run-dir",
         workdir / "run", "--", *torch_process.launcher(RANKS), program, "sleep"]
    )  # fmt: skip
    job = Running(argv, {"OMP_NUM_THREADS": "1"}, workdir / "out")

    def hangs(rank: int) -> bool:
        """In the step that is to hang: on a machine that stalls another one may have before."""
        found = job.state(rank).get("hangs", {})
        return found.get("step") == 40 and found["until_ns"] is None

    job.wait_until(lambda: all(map(hangs, range(RANKS))), "hanging")
    named = "Rank 2 never joined AllReduce"
    job.wait_until(lambda: named in job.printed(), "named")
    asked = run_clusterprof(["status", workdir / "run", "--json"])
    hang = json.loads(asked.stdout)["hang"]
    assert [(each["rank"], each["step"]) for each in hang["ranks"]] == [
        (r, 40) for r in range(RANKS)
    ]
    assert hang["ranks"][2]["line"] == f"{program}:9 evaluate"
    assert hang["results"]["hang"][0]["cause"] == "never_joined"
    assert hang["results"]["hang"][0]["ranks"] == [2]
    assert hang["results"]["hang"][0]["waiting"] == [0, 1]
    (workdir / "go").touch()
    assert job.ends() == 0, job.printed()
    printed = job.printed()
    assert printed.count(named) == 1, printed
    assert printed.count(" ends\n") == RANKS
    for rank in range(RANKS):
        found = job.state(rank)
        assert (found["state"], found["steps"]) == ("counted", 50)
        assert found["hangs"]["until_ns"] > found["hangs"]["since_ns"]
    after = run_clusterprof(["status", workdir / "run", "--json"])
    assert json.loads(after.stdout)["hang"] is None
