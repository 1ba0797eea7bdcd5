"""Ranks that no environment numbers: each is the one that its process group says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab.command import Completed
from lab.endings import PROGRAMS, outcomes
from lab.warm import Warm

pytestmark = pytest.mark.needs_torch

Run = Callable[..., Completed]

#: `train(rank, world)` is one rank of a job, `steps(n)` trains without one. DDP and an optimizer
#: would have each process that does not find torch loaded import torch's compiler as well.
TRAIN = """
import os, subprocess, sys, time
import loop
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def steps(n):
    for _ in range(n):
        if dist.is_initialized():
            dist.all_reduce(torch.ones(3))
        loop.step()

def train(rank, world=2):
    meeting = "file://%s/meeting%d" % (os.getcwd(), world)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    steps(12)
    dist.destroy_process_group()
    # Gloo's threads outlive the group. One that still drops the last call's copy of Python's
    # context (torch 2.13, `autograd.graph._engine_run_backward`) as the interpreter ends aborts it.
    time.sleep(0.5)
    print("trained %d\\n" % rank, end="", flush=True)
"""


@pytest.fixture
def train(workdir: Path, run_clusterprof: Run, torch_process: Warm) -> Run:
    """Runs the program TRAIN with more behind it, as it stands."""
    shutil.copy(PROGRAMS / "loop.py", workdir)

    def start(more: str, *program: str, profiler: str = "torch", ranks: str = "all") -> Completed:
        (workdir / "train.py").write_text(TRAIN + dedent(more))
        return run_clusterprof(
            ["run", "--ranks", ranks, "--steps", "5:8", "--step-on", "loop:step", "--profiler",
             profiler, "--run-dir=run", "--no-merge", "--",
             *(program or [*torch_process.launcher(0), "train.py"])],
        )  # fmt: skip

    return start


def state(run: Path, rank: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / f"ranks/{rank:05d}/state.json").read_text())
    return read


def counted(run: Path) -> dict[int, int]:
    """How many steps each log holds; a rank that counted twice has two logs."""
    logs = {log: len(log.read_text().splitlines()) - 1 for log in run.glob("ranks/*/steps*.csv")}
    assert len({log.parent for log in logs}) == len(logs)
    return {int(log.parent.name): steps for log, steps in logs.items()}


def names(run: Path, rank: int) -> set[str]:
    return {path.name for path in (run / f"ranks/{rank:05d}").iterdir()}


def is_whole(run: Path, world: int, profiled: bool = True) -> None:
    """Every rank of the job has its own log, flight recorder and, if it is profiled, trace."""
    assert counted(run) == dict.fromkeys(range(world), 12)
    assert outcomes(run) == (dict.fromkeys(range(world), "collected") if profiled else {})
    for rank in range(world):
        stated = state(run, rank)
        assert (stated["rank"], stated["world_size"]) == (rank, world)
        assert (stated["identity"], stated["steps"]) == ("process group", 12)
        assert {"flight.json.gz"} <= names(run, rank)
        assert ("trace.json.gz" in names(run, rank)) == profiled


@pytest.mark.parametrize(
    ("method", "world", "profiler"),
    # One that was not forked loads torch, and where torch.profiler captures it torch's compiler.
    [("fork", 2, "torch"), ("spawn", 1, "none"),
     pytest.param("spawn", 2, "torch", marks=pytest.mark.long)],
)  # fmt: skip
def test_children_of_torch_multiprocessing_are_ranks_and_their_parent_is_none(
    train: Run, workdir: Path, method: str, world: int, profiler: str
) -> None:
    done = train(
        f"""
        if __name__ == "__main__":
            mp.start_processes(train, ({world},), nprocs={world}, start_method="{method}")
            sys.exit(7)
        """,
        profiler=profiler,
    )
    assert done.returncode == 7, done
    assert sorted(done.stdout.splitlines()) == [f"trained {rank}" for rank in range(world)]
    assert "USDT" not in done.stderr
    is_whole(workdir / "run", world, profiler == "torch")


@pytest.mark.long
def test_processes_that_a_script_of_the_user_s_starts_are_ranks(train: Run, workdir: Path) -> None:
    script = "for rank in 0 1; do python train.py $rank & done; wait"
    done = train("train(int(sys.argv[1]))", "sh", "-c", script)
    assert done.returncode == 0, done
    is_whole(workdir / "run", 2)


@pytest.mark.usefixtures("scripted")
def test_ranks_whose_starter_has_nsys_say_so_and_have_all_but_the_report(
    train: Run, workdir: Path
) -> None:
    more = 'mp.start_processes(train, nprocs=2, start_method="fork")'
    done = train(more, profiler="nsys")
    run = workdir / "run"
    assert done.returncode == 0, done
    assert counted(run) == {0: 12, 1: 12}
    assert outcomes(run) == {0: "lost", 1: "lost"}
    for rank in range(2):
        assert "--profiler torch" in state(run, rank)["reason"]
        assert {"flight.json.gz", "steps.csv"} <= names(run, rank)


@pytest.mark.long
@pytest.mark.usefixtures("scripted")
def test_without_an_nsys_above_them_they_are_captured_by_torch(train: Run, workdir: Path) -> None:
    more = 'if __name__ == "__main__": mp.spawn(train, nprocs=2)'
    done = train(more, profiler="nsys", ranks="1")
    assert done.returncode == 0, done
    assert counted(workdir / "run") == {0: 12, 1: 12}
    assert outcomes(workdir / "run") == {1: "collected"}
    assert {"flight.json.gz", "trace.json.gz"} <= names(workdir / "run", 1)


def test_the_only_rank_counts_its_own_steps_and_none_of_its_children_s(
    train: Run, workdir: Path
) -> None:
    done = train(
        """
        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                steps(2)
                return float(i)

        if __name__ == "__main__":
            helps = "import loop\\nfor _ in range(3): loop.step()"
            subprocess.run([sys.executable, "-c", helps], check=True)
            if os.fork() == 0:
                steps(3)
                sys.exit(0)
            os.wait()
            for way in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(
                    Numbers(), num_workers=1, multiprocessing_context=way
                )
                assert len(list(loader)) == 4
            steps(12)
        """
    )
    run = workdir / "run"
    assert done.returncode == 0, done
    assert counted(run) == {0: 12}
    assert outcomes(run) == {0: "collected"}
    assert (state(run, 0)["identity"], state(run, 0)["steps"]) == ("run", 12)
    with (run / "ranks/00000/steps.csv").open() as log:
        begins = [int(line.split(",")[1]) for line in list(log)[1:]]
    assert begins == sorted(begins)


@pytest.mark.long
def test_a_group_of_a_rank_s_helpers_changes_no_rank(train: Run, workdir: Path) -> None:
    done = train(
        """
        if __name__ == "__main__":
            train(0, 1)
            mp.spawn(train, nprocs=2)
        """
    )
    assert done.returncode == 0, done
    assert counted(workdir / "run") == {0: 12}
    assert state(workdir / "run", 0)["world_size"] == 1


def test_lightning_s_children_are_numbered_by_their_parent(train: Run, workdir: Path) -> None:
    done = train(
        """
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.update(NODE_RANK="0", WORLD_SIZE="2")
        rank = int(os.environ["LOCAL_RANK"])
        if rank == 0:
            environ = {**os.environ, "LOCAL_RANK": "1"}
            child = subprocess.Popen(sys.orig_argv, env=environ)
        train(rank)
        if rank == 0:
            sys.exit(child.wait())
        """
    )
    assert done.returncode == 0, done
    run = workdir / "run"
    assert counted(run) == {0: 12, 1: 12}
    assert outcomes(run) == {0: "collected", 1: "collected"}
    assert [state(run, rank)["identity"] for rank in (0, 1)] == ["process group", "lightning"]
    assert [state(run, rank)["local_rank"] for rank in (0, 1)] == [0, 1]
