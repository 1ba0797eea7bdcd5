"""Beacons: all ranks of a job send them, or none does, and the training never hangs for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab.command import Completed
from lab.job import until_written

from clusterprof.launch.planning import INJECT

pytestmark = pytest.mark.needs_torch

#: collectives of megabytes only, as a sharded training's are
TRAINING = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.ones(1 << 18))
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    whole = [torch.empty(1 << 18) for _ in range(world)]
    dist.all_gather(whole, weight.detach())
    weight.grad = torch.full_like(weight, float(rank))
    dist.all_reduce(weight.grad)
    optimizer.step()
"""
END = """
wrong = (weight.detach() - (1 - 0.1 * STEPS * world * (world - 1) / 2)).abs().max().item()
print(f"rank {rank} wrong by {wrong:.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


class Job:
    """A torchrun job with the agent in its ranks, and nothing else of clusterprof."""

    def __init__(self, folder: Path, run: Callable[..., Completed]) -> None:
        self.folder = folder
        self.run = run

    def __call__(
        self, script: str, *, ranks: int = 4, env: dict[str, str] | None = None, **plan: Any
    ) -> Completed:
        values = {
            "schema_version": 1, "run": str(self.folder), "identity": "torchrun",
            "selection": {"kind": "ranks", "ranks": [0, 2]}, "window": [3, 6], "step_on": None,
            "profiler": "torch", "beacons": 12, **plan,
        }  # fmt: skip
        self.folder.mkdir()
        (self.folder / "plan.json").write_text(json.dumps(values))
        program = self.folder / "train.py"
        program.write_text(TRAINING + dedent(script))
        environ = {
            "CLUSTERPROF_PLAN": str(self.folder / "plan.json"), "PYTHONPATH": str(INJECT),
            **(env or {}),
        }  # fmt: skip
        done = self.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={ranks}", program],
            env=environ,
        )  # fmt: skip
        until_written(self.folder / "plan.json")
        return done

    def beacons(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / "ranks" / f"{rank:05d}" / "beacons.json"
        entries: list[dict[str, Any]] = json.loads(path.read_text())
        return entries


@pytest.fixture
def job(tmp_path: Path, run_command: Callable[..., Completed]) -> Job:
    return Job(tmp_path / "run", run_command)


def test_all_ranks_of_a_job_send_beacons_at_both_ends_and_its_result_is_the_same(job: Job) -> None:
    done = job("STEPS = 8\nfor _ in range(STEPS): step()\n" + END)
    assert done.returncode == 0, done
    # the ranks' lines may run into each other
    assert done.stdout.count("wrong by 0.000") == 4, done
    for rank in range(4):
        entries = job.beacons(rank)
        assert [(each["event"], each["step"]) for each in entries] == [("open", 3), ("close", 6)]
        assert [each.get("reason") for each in entries] == [None, None]
        assert all(0 < each["end_ns"] - each["begin_ns"] < 10e9 for each in entries)
    from clusterprof.align.clock.readings import is_beacon, parsed
    from clusterprof.ingest import read_report

    for rank in (0, 2):
        folder = job.folder / "ranks" / f"{rank:05d}"
        calls = read_report(folder / "trace.json.gz", rank=rank).collective_calls
        found = is_beacon(calls, parsed(None, None, job.beacons(rank))).tolist()
        assert found == [True] * 12 + [False] * 2 * 3 + [True] * 12


def test_a_rank_that_steps_less_often_ends_the_beacons_and_not_the_training(job: Job) -> None:
    # Rank 3 steps in every second iteration only: its third step is the sixth of the others.
    done = job(
        """
        from _clusterprof_agent.rank import beacons
        beacons.PATIENCE_S = 3.0
        own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for turn in range(8):
            dist.all_reduce(torch.full((1 << 18,), 1.0))
            if rank != 3 or turn % 2:
                own.step()
        print(f"rank {rank} trained", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        """
    )
    assert done.returncode == 0, done
    assert done.stdout.count("trained") == 4
    reasons = {rank: job.beacons(rank)[0]["reason"] for rank in range(4)}
    assert len(set(reasons.values())) == 1, reasons
    assert all(len(job.beacons(rank)) == 1 for rank in range(4))


def test_ranks_that_differ_in_their_collectives_send_no_beacon(job: Job) -> None:
    # A collective that rank 1 has issued and the others have not yet: a beacon would meet it.
    done = job(
        """
        own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        early = []
        for turn in range(8):
            if rank == 1 and turn == 2:
                early.append(dist.all_reduce(torch.ones(5), async_op=True))
            own.step()
            if rank != 1 and turn == 2:
                early.append(dist.all_reduce(torch.ones(5), async_op=True))
        early[0].wait()
        print(f"rank {rank} trained", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        """
    )
    assert done.returncode == 0, done
    assert done.stdout.count("trained") == 4
    reasons = {job.beacons(rank)[0]["reason"] for rank in range(4)}
    assert len(reasons) == 1
    assert "3 steps" in reasons.pop()


def test_a_job_without_process_group_trains_on_without_beacons(job: Job) -> None:
    done = job(
        """
        dist.destroy_process_group()
        own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for turn in range(8):
            own.step()
        print("trained", flush=True)
        """,
        ranks=2,
    )
    assert done.returncode == 0, done
    assert done.stdout.count("trained") == 2
    assert "torch.distributed" in job.beacons(1)[0]["reason"]
