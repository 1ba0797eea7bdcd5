"""Beacons: all ranks of a job send them, or none does, and the training never hangs for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab.command import Completed, free_port
from lab.job import until_written
from lab.warm import Warm

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
    """The ranks of a job as torchrun numbers them, with the agent in each of them."""

    def __init__(self, folder: Path, torch_process: Warm) -> None:
        self.folder = folder
        self.torch_process = torch_process

    def __call__(self, script: str, *, ranks: int = 3, **plan: Any) -> list[Completed]:
        values = {
            "schema_version": 1, "run": str(self.folder), "identity": "torchrun",
            "selection": {"kind": "ranks", "ranks": [0, 2]}, "window": [3, 6], "step_on": None,
            "profiler": "torch", "beacons": 12, **plan,
        }  # fmt: skip
        self.folder.mkdir()
        (self.folder / "plan.json").write_text(json.dumps(values))
        program = self.folder / "train.py"
        program.write_text(TRAINING + dedent(script))
        environment = {
            "CLUSTERPROF_PLAN": str(self.folder / "plan.json"), "PYTHONPATH": str(INJECT),
            "WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        done = self.torch_process.run_together([
            ([sys.executable, program], {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ])  # fmt: skip
        until_written(self.folder / "plan.json")
        assert [each.returncode for each in done] == [0] * ranks, done
        return done

    def beacons(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / "ranks" / f"{rank:05d}" / "beacons.json"
        entries: list[dict[str, Any]] = json.loads(path.read_text())
        return entries


@pytest.fixture
def job(tmp_path: Path, torch_process: Warm) -> Job:
    return Job(tmp_path / "run", torch_process)


def test_all_ranks_of_a_job_send_beacons_at_both_ends_and_its_result_is_the_same(job: Job) -> None:
    done = job("STEPS = 8\nfor _ in range(STEPS): step()\n" + END)
    assert [each.stdout for each in done] == [f"rank {k} wrong by 0.000\n" for k in range(3)]
    for rank in range(3):
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
    # Rank 2 steps in every second iteration only: its third step is the sixth of the others.
    done = job(
        """
        from _clusterprof_agent.rank import beacons
        beacons.PATIENCE_S = 3.0
        own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for turn in range(8):
            dist.all_reduce(torch.full((1 << 18,), 1.0))
            if rank != 2 or turn % 2:
                own.step()
        print(f"rank {rank} trained", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        """
    )
    assert all("trained" in each.stdout for each in done), done
    reasons = {rank: job.beacons(rank)[0]["reason"] for rank in range(3)}
    assert len(set(reasons.values())) == 1, reasons
    assert all(len(job.beacons(rank)) == 1 for rank in range(3))


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
    assert all("trained" in each.stdout for each in done), done
    reasons = {job.beacons(rank)[0]["reason"] for rank in range(3)}
    assert len(reasons) == 1
    assert "3 steps" in reasons.pop()


def test_a_job_without_process_group_trains_on_without_beacons(job: Job) -> None:
    done = job(
        """
        dist.barrier()  # rank 0 takes the store along, which the others need to begin
        dist.destroy_process_group()
        own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for turn in range(8):
            own.step()
        print("trained", flush=True)
        """,
        ranks=2,
    )
    assert all("trained" in each.stdout for each in done), done
    assert "torch.distributed" in job.beacons(1)[0]["reason"]
