"""`--ranks auto` in real jobs: a rank that was not selected is named, then captured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.command import Completed
from lab.endings import PROGRAMS, Running, state
from lab.job import LOOP, Job
from lab.warm import Warm

from clusterprof.agent.contracts import paths

pytestmark = pytest.mark.needs_torch

PROGRAM = str(PROGRAMS / "looked_at.py")
#: eighteen steps
QUICK = """
import time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(18):
    time.sleep(0.02)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def captured(running: Running) -> bool:
    """Whether the second window of a job is over on all its profiled ranks."""
    try:
        order = json.loads((running.run / "windows/2" / paths.ORDER).read_text())
        found = [state(running.run / "windows/2", rank) for rank in order["selection"]["ranks"]]
    except (OSError, ValueError):
        return False
    return all(each.get("closed") for each in found)


def until_captured(
    argv: list[str], workdir: Path, env: Mapping[str, str | None]
) -> tuple[Running, dict[str, Any]]:
    """A job that trains until its second window is over, and the run's results."""
    running = Running(command.clusterprof(argv), {"OMP_NUM_THREADS": "1", **env}, workdir / "out")
    running.wait_until(lambda: captured(running), "captured")
    (workdir / "stop").touch()
    assert running.ends() == 0, running.printed()
    found: dict[str, Any] = json.loads((running.run / paths.MERGED / paths.RESULTS).read_text())
    return running, found


def stragglers(results: Mapping[str, Any]) -> list[list[int]]:
    """The ranks of each straggler that was captured."""
    codes = ("straggler.host", "straggler.gpu")
    return [each["ranks"] for each in results["findings"] if each["code"] in codes]


def reduced(running: Running, results: Mapping[str, Any]) -> bool:
    """Whether each profiled rank has the tables of its report, or said why not: a busy machine."""
    second = running.run / "windows/2"
    ranks = [each["rank"] for each in results["ranks"]]
    return all(
        (second / f"ranks/{rank:05d}" / paths.REDUCED / paths.REDUCED_RANK).exists()
        or "not_reduced" in state(second, rank)
        for rank in ranks
    )


@pytest.mark.usefixtures("scripted")
def test_a_rank_that_was_not_selected_is_named_then_captured(
    run_clusterprof: Any, workdir: Path, torch_process: Warm
) -> None:
    running, found = until_captured(
        ["run", "--ranks", "auto", "--step-on", "loop:step", "--run-dir", str(workdir / "run"),
         "--reduce=node", "--", *torch_process.launcher(4), PROGRAM, "2", "stop", "light"],
        workdir, {},
    )  # fmt: skip
    printed = running.printed()
    assert [line for line in printed.splitlines() if "rank 2 delayed the other ranks, by" in line]
    assert stragglers(found)[:1] == [[2]], found["verdict"]  # a busy machine may delay another
    assert {0, 2} <= {each["rank"] for each in found["ranks"]}
    # Rank 0 waited under nsys, whose first session is that of the second window.
    second = running.run / "windows/2/ranks"
    assert (second / "00000" / paths.REPORT).exists()
    assert not (second / "00002" / paths.REPORT).exists()
    assert reduced(running, found)
    assert not list((running.run / "ranks").rglob("report*"))
    for rank in range(4):
        assert state(running.run, rank)["state"] == "counted"
    # The result is the run's, and there is no other.
    assert not (running.run / "windows/2" / paths.MERGED).exists()
    merged = run_clusterprof(["merge", "run", "--json"])
    assert json.loads(merged.stdout)["verdict"] == found["verdict"], merged
    assert run_clusterprof(["collect", "run"]).returncode == 0


@pytest.mark.long
def test_of_sixteen_ranks_on_four_nodes_the_last_is_named_then_captured(
    workdir: Path, slurm: Mapping[str, str]
) -> None:
    running, found = until_captured(
        ["srun", "--ranks", "auto", "--profiler=torch", "--step-on", "loop:step", "--run-dir",
         str(workdir / "run"), "--keep-reports=none", "-n16", "-N4", "--ntasks-per-node=4", "--",
         "python", PROGRAM, "15", "stop", "light"],
        workdir, slurm,
    )  # fmt: skip
    assert stragglers(found)[:1] == [[15]], found["verdict"]  # a busy machine may delay another
    hosts = {each["rank"]: each["host"] for each in found["ranks"]}
    assert (hosts.get(0), hosts.get(15)) == ("n1", "n4"), running.printed()
    assert reduced(running, found)
    for rank in hosts:
        folder = running.run / f"windows/2/ranks/{rank:05d}"
        not_reduced = "not_reduced" in state(running.run / "windows/2", rank)
        assert (folder / paths.TRACE).exists() == not_reduced, running.printed()


def test_a_job_that_ends_before_its_capture_keeps_the_verdict_of_the_look(
    run_clusterprof: Any, workdir: Path, torch_process: Warm
) -> None:
    """It ends with the window that is looked at: there is no step that could be captured."""
    (workdir / "train.py").write_text(QUICK)
    done = run_clusterprof(
        ["run", "--profiler=torch", "--steps", "4:18", "--run-dir=run", "--",
         *torch_process.launcher(2), workdir / "train.py"],
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    results = json.loads((workdir / "run" / paths.MERGED / paths.RESULTS).read_text())
    assert results["shallow"]["ranks"] == [0, 1]
    assert results["shallow"]["steps"], results["shallow"]
    assert "no second window is captured:" not in done.stderr, done
    assert done.stdout.startswith(results["verdict"].split(". ")[0]), done


def test_rank_0_is_captured_at_once_where_there_is_nothing_to_look_at(warm_job: Job) -> None:
    plan = {"selection": {"kind": "auto"}, "profiler": "torch"}
    environ = {"RANK": "0", "LOCAL_RANK": "0"}
    done: Completed = warm_job(LOOP + "iterate(6)\n", environ=environ, **plan)
    assert done.returncode == 0, done
    found = state(warm_job.folder)
    assert (found["state"], found["chosen"], found["step_begin"]) == ("captured", True, 2)
    assert (warm_job.folder / "ranks/00000" / paths.TRACE).exists()
    assert warm_job(LOOP + "iterate(6)\n", **plan).returncode == 0
    assert (warm_job.state["state"], warm_job.state["chosen"]) == ("counted", False)
