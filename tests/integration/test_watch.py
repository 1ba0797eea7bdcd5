"""`--watch`: who becomes late while the job runs is said live, in status, and in the result."""

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
#: the last rank turns slow when the test says so, and the job ends when it does
PROGRAM = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
last = dist.get_rank() == dist.get_world_size() - 1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ends = torch.zeros(1)
while not ends:
    time.sleep(0.02 + 0.2 * (last and os.path.exists("slow")))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ends += last and os.path.exists("end")
    dist.all_reduce(ends)
dist.destroy_process_group()
"""


def test_a_rank_that_turns_slow_is_named_while_the_job_runs_and_afterwards(
    workdir: Path, torch_process: Warm, run_clusterprof: Callable[..., Completed]
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    argv = command.clusterprof(
        ["look", "--watch", "2s", "--metrics", workdir / "job.prom", "--steps", "4:6",
         "--run-dir", workdir / "run", "--",
         *torch_process.launcher(RANKS), workdir / "train.py"]
    )  # fmt: skip
    job = Running(argv, {"OMP_NUM_THREADS": "1"}, workdir / "out")
    looks = workdir / "run" / "watched.csv"
    # several looks that are healthy: the program's first steps are no evidence
    job.wait_until(lambda: looks.exists() and len(looks.read_text().splitlines()) > 3, "looks")
    (workdir / "slow").touch()
    job.wait_until(lambda: "rank 2 (" in job.printed(), "named")
    shown = run_clusterprof(["status", workdir / "run"])
    assert "run --ranks late --wait" in shown.stdout, shown
    late = json.loads(run_clusterprof(["status", workdir / "run", "--json"]).stdout)["late"]
    assert [rank["rank"] for rank in late if rank["until_step"] is None] == [2]
    assert 'rank="2"' in (workdir / "job.prom").read_text()
    ordered = run_clusterprof(["capture", workdir / "run", "--when", "late > 5%"])
    assert "window 2 profiles ranks 2,0 " in ordered.stderr, ordered
    ordered = run_clusterprof(["capture", workdir / "run", "--ranks", "late"])
    assert "window 3 profiles ranks 2,0 " in ordered.stderr, ordered
    (workdir / "end").touch()
    assert job.ends() == 0, job.printed()
    printed = job.printed()
    assert "no rank is profiled; flight recorders are saved after step 5" in printed
    assert "(steps up to 5)" in printed
    results = json.loads((workdir / "run" / "merged" / "results.json").read_text())
    assert results["shallow"]["watch"]["looks"] >= 3
    (found,) = [f for f in results["findings"] if f["code"] == "straggler.shallow"]
    assert found["ranks"] == [2], printed
    assert found["saved_ns_per_step"] > 100_000_000
