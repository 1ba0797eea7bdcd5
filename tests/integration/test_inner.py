"""Launchers inside of a launcher's tasks: their workers are the ranks, whatever started them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab.command import Completed
from lab.endings import outcomes
from lab.tiers import few

Run = Callable[..., Completed]

#: Counts its steps without torch, which takes long to import.
TRAIN = """
import os, time
import loop
for _ in range(20):
    loop.step()
print("trained", os.environ.get("RANK", 0), flush=True)
"""

MEETING = "--nnodes=2 --nproc-per-node=2 --master-addr=n1 --master-port=$MASTER_PORT"
ACCELERATE = """exec accelerate launch --multi_gpu --num_processes 4 --num_machines 2 \\
    --machine_rank $SLURM_NODEID --main_process_ip n1 --main_process_port $MASTER_PORT train.py"""

#: What srun starts on each of two nodes.
STARTS = {
    "a script that prepares and starts": ["./run.sh"],
    "torchrun from a shell": [
        "bash", "-c", f"exec torchrun {MEETING} --node-rank=$SLURM_NODEID train.py",
    ],
    "accelerate": ["bash", "-c", ACCELERATE],
    "a module behind env": [
        "env", "A=1", "python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        "--rdzv-backend=c10d", "--rdzv-endpoint=n1:{port}", "train.py",
    ],
}  # fmt: skip


@pytest.fixture
def project(workdir: Path) -> Path:
    (workdir / "train.py").write_text(TRAIN)
    (workdir / "loop.py").write_text("import time\ndef step():\n    time.sleep(0.02)\n")
    (workdir / "run.sh").write_text(
        dedent(f"""\
        #!/bin/bash
        export PYTHONPATH=/somewhere:$PYTHONPATH
        python -c 'print("prepared")'
        torchrun {MEETING} --node-rank=$SLURM_NODEID train.py
        """)
    )
    (workdir / "run.sh").chmod(0o755)
    return workdir


def state(run: Path, rank: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / f"ranks/{rank:05d}/state.json").read_text())
    return read


def steps(run: Path) -> dict[int, int]:
    """How many steps each log holds; a rank that counted twice has two."""
    return {
        int(log.parent.name): len(log.read_text().splitlines()) - 1
        for log in run.glob("ranks/*/steps*.csv")
    }


@pytest.mark.needs_accelerate
@pytest.mark.needs_torch
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("starter", "torchrun"),
    # a real torchrun on each node runs always in test_batch.py
    [
        ("a script that prepares and starts", "light"),
        *(pytest.param(starter, "real", marks=pytest.mark.long) for starter in STARTS),
    ],
)
def test_the_workers_on_each_node_are_the_ranks(
    run_clusterprof: Run, project: Path, slurm: Mapping[str, str], light_path: str,
    starter: str, torchrun: str,
) -> None:  # fmt: skip
    program = [word.replace("{port}", slurm["MASTER_PORT"]) for word in STARTS[starter]]
    if torchrun == "light":
        slurm = {**slurm, "PATH": light_path}
    done = run_clusterprof(
        ["srun", "--ranks", "0,3", "--steps", "5:12", "--step-on", "loop:step", "--profiler=nsys",
         "--run-dir=run", "--no-merge", "-N2", "--ntasks-per-node=1", "--", *program],
        env=slurm,
    )  # fmt: skip
    run = project / "run"
    assert done.returncode == 0, done
    assert sorted(line for line in done.stdout.splitlines() if "trained" in line) == [
        f"trained {rank}" for rank in range(4)
    ], done
    assert outcomes(run) == {0: "collected", 3: "collected"}, done
    assert steps(run) == dict.fromkeys(range(4), 20)
    reports = sorted(path.parent.name for path in run.glob("ranks/*/report.nsys-rep"))
    assert reports == ["00000", "00003"]
    for rank in range(4):
        stated = state(run, rank)
        assert (stated["world_size"], stated["local_rank"]) == (4, rank % 2)
        assert stated["identity"] == "torchrun"


#: Started as they stand, and how many ranks there are then.
ALONE = {
    "accelerate": (["accelerate", "launch", "--multi_gpu", "--num_processes=2", "train.py"], 2),
    "accelerate with one process": (["accelerate", "launch", "--num_processes=1", "train.py"], 1),
    "one process of a script": (["sh", "-c", "python -c pass; exec python train.py"], 1),
}


@pytest.mark.needs_accelerate
@pytest.mark.needs_torch
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("program", "ranks"), few(ALONE, "one process of a script"))
def test_a_program_that_is_run_as_it_stands_has_the_ranks_that_it_starts(
    run_clusterprof: Run, project: Path, program: list[str], ranks: int
) -> None:
    done = run_clusterprof(
        ["run", "--ranks", "all", "--steps", "5:12", "--step-on", "loop:step", "--profiler=nsys",
         "--run-dir=run", "--no-merge", "--", *program],
    )  # fmt: skip
    assert done.returncode == 0, done
    assert outcomes(project / "run") == dict.fromkeys(range(ranks), "collected"), done
    assert steps(project / "run") == dict.fromkeys(range(ranks), 20)
    assert [state(project / "run", rank)["world_size"] for rank in range(ranks)] == [ranks] * ranks
