"""`--watch`: who becomes late while the job runs is said live, in status, and in the result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command, drifting_clock
from lab.command import Completed
from lab.endings import Running
from lab.warm import Warm

from clusterprof import watched

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


#: each node's clock: by how much it is ahead (ns), and gains (ppm)
CLOCKS = ((0, 0), (5_000_000, 90), (-2_000_000_000, -50), (700_000, 30))
#: Rank 2 is slow from the start; the job ends when the test says so. Waits are relative: whoever
#: waits until a time of a clock of ours waits longer.
ON_NODES = """
import os, select, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ends = torch.zeros(1)
while not ends:
    select.select([], [], [], 0.05 + 0.05 * (dist.get_rank() == 2))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ends += dist.get_rank() == 0 and os.path.exists("end")
    dist.all_reduce(ends)
dist.destroy_process_group()
"""
#: a rank of its own on each node, on its node's clock
NODE = """
clocks=({clocks})
read -r DRIFTING_OFFSET_NS DRIFTING_PPM <<<"${{clocks[$SLURM_NODEID]}}"
export DRIFTING_OFFSET_NS DRIFTING_PPM LD_PRELOAD={library} OMP_NUM_THREADS=1
export RANK=$SLURM_PROCID LOCAL_RANK=0 WORLD_SIZE=$SLURM_NTASKS
exec {python} train.py
"""


@pytest.mark.needs_compiler
def test_ranks_of_nodes_whose_clocks_drift_are_compared_long_after_the_window(
    workdir: Path, slurm: dict[str, str]
) -> None:
    """A fiftieth of a step of 0.1 s is what 150 ppm are in 14 seconds."""
    (workdir / "train.py").write_text(ON_NODES)
    library = drifting_clock.library(workdir)
    clocks = " ".join(f"'{offset} {ppm}'" for offset, ppm in CLOCKS)
    (workdir / "node.sh").write_text(
        NODE.format(clocks=clocks, library=library, python=sys.executable)
    )
    argv = command.clusterprof(
        ["srun", "--watch", "15s", "--steps", "4:6", "--profiler=none", "--run-dir",
         workdir / "run", "-N4", "--ntasks-per-node=1", "--", "bash", workdir / "node.sh"]
    )  # fmt: skip
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(command.free_port())}
    address["DRIFTING_SINCE_NS"] = str(time.monotonic_ns())
    job = Running(argv, {**slurm, **address}, workdir / "out")
    table = workdir / "run" / "watched.csv"

    def late_looks() -> list[watched.Row]:
        return [row for row in watched.read(table) if row.rank == 2 and row.delays]

    job.wait_until(lambda: len(late_looks()) >= 2, "two looks")
    (workdir / "end").touch()
    assert job.ends() == 0, job.printed()
    assert {row.rank for row in watched.read(table)} == {2}
    # its clock is two seconds behind, and loses 140 ppm against that of rank 1
    for row in late_looks():
        assert 30_000_000 < row.lateness_ns < 80_000_000, row
    probe = json.loads((workdir / "run" / "ranks" / "00002" / "probe.json").read_text())
    measured = [row for row in probe["bounds"] if row["when"] == "look"]
    assert all(row["low_ns"] < -2_000_000_000 < row["low_ns"] + 1_000_000_000 for row in measured)
