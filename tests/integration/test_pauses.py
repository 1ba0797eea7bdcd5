"""What interrupts a job is named: its start, its checkpoints, a restart, live and in the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.command import Completed
from lab.warm import Warm

pytestmark = pytest.mark.needs_torch

#: Every 40 steps rank 0 writes a checkpoint that takes as long as twenty steps, whatever these take
#: on this machine.
PROGRAM = """
import datetime, os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[1])))
again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
took = []
for step in range(int(sys.argv[2])):
    began = time.monotonic()
    time.sleep(0.01)
    if dist.get_rank() == 0 and step and step % 40 == 0:
        time.sleep(20 * sorted(took)[len(took) // 2])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    took.append(time.monotonic() - began)
    if len(sys.argv) > 3 and step == 250 and not again:
        sys.exit("lost a node")
dist.destroy_process_group()
"""


def entries_of(run: Path) -> list[dict[str, Any]]:
    results = json.loads((run / "merged" / "results.json").read_text())
    entries: list[dict[str, Any]] = results["pauses"]["entries"]
    return entries


def checkpoints(entries: list[dict[str, Any]]) -> list[tuple[int, int, list[int]]]:
    """Of each series of 40 steps the attempt, how often it paused, and on which ranks."""
    return [(e["attempt"], e["count"], e["ranks"]) for e in entries if e["every_steps"] == 40]


def test_a_checkpoint_every_forty_steps_is_named_beside_the_watch(
    workdir: Path, torch_process: Warm, run_clusterprof: Callable[..., Completed]
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    done = run_clusterprof(
        ["run", "--watch", "2s", "--steps", "4:6", "--profiler=none", "--run-dir", workdir / "run",
         "--", *torch_process.launcher(3), workdir / "train.py", "600", "330"],
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    entries = entries_of(workdir / "run")
    # steps 40 to 320; a busy machine may lengthen others, and none of these
    assert checkpoints(entries) == [(1, 8, [])]
    assert [entry["first_step"] for entry in entries if entry["kind"] == "start"] == [0]
    assert "every 40 steps (a checkpoint or an evaluation): 8 pauses" in " ".join(
        done.stdout.split()
    )
    results = json.loads((workdir / "run" / "merged" / "results.json").read_text())["pauses"]
    # of the flight recorders, and not torch's default
    assert (results["timeout_ns"], results["timeout_assumed"]) == (600_000_000_000, False)
    assert "of the 600 s" not in done.stdout
    live = json.loads(run_clusterprof(["status", workdir / "run", "--json"]).stdout)["pauses"]
    assert (live["timeout_ns"], live["timeout_assumed"]) == (600_000_000_000, False)
    shown = run_clusterprof(["status", workdir / "run"])
    assert "every 40 steps (a checkpoint or an evaluation): 8 pauses" in shown.stdout
    assert 'id="pauses"' in (workdir / "run" / "report.html").read_text()


@pytest.mark.usefixtures("warm_torchrun")
def test_a_restart_stands_between_the_attempts_checkpoints(
    workdir: Path, run_clusterprof: Callable[..., Completed]
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    done = run_clusterprof(
        ["torchrun", "--steps", "4:6", "--profiler=none", "--run-dir", workdir / "run",
         "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--",
         workdir / "train.py", "600", "330", "fails"],
        env={"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    entries = [e for e in entries_of(workdir / "run") if e["kind"] != "single"]
    assert [(e["kind"], e["attempt"]) for e in entries if e["every_steps"] in (None, 40)] == [
        ("start", 1), ("regular", 1), ("restart", 2), ("start", 2), ("regular", 2),
    ]  # fmt: skip
    assert checkpoints(entries) == [(1, 6, []), (2, 8, [])]
