"""PyTorch's flight recorder of every rank, in real jobs over gloo."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from lab import command
from lab.command import Completed
from lab.job import CHOSEN, LOOP, Job
from lab.warm import Warm

from clusterprof.agent.contracts import paths
from clusterprof.ingest.flight.dump import read_dump

pytestmark = pytest.mark.needs_torch

Cli = Callable[..., Completed]

#: one rank alone with a process group, which iterates with an all_reduce in each step; gloo's
#: thread, which may have the last one in hand, must not meet the interpreter's end
GLOO = (
    LOOP
    + """
import os, time
import torch.distributed as dist
store = os.path.abspath(__file__) + ".store"
dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
def train(n):
    for _ in range(n):
        dist.all_reduce(torch.ones(3))
        iterate(1)
    time.sleep(0.3)
"""
)


def dump(folder: Path) -> dict[str, Any]:
    """A rank's dump."""
    found: dict[str, Any] = json.loads(gzip.decompress((folder / paths.FLIGHT).read_bytes()))
    return found


def train(folder: Path, steps: int, end: str = "") -> str:
    """The program of a job that trains with DDP; `end` is what it does afterwards."""
    program = folder / "train.py"
    program.write_text(
        "import os, signal, sys, time, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"for step in range({steps}):\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        f"{end}\n"
        "dist.destroy_process_group()\n"
    )
    return str(program)


def test_every_rank_leaves_its_dump_and_a_straggler_that_was_not_profiled_is_named_by_it(
    run_clusterprof: Cli, workdir: Path, torch_process: Warm
) -> None:
    program = train(workdir, 18)
    late = "    time.sleep(0.5 * (dist.get_rank() == 3))\n    model(torch"
    text = Path(program).read_text().replace("    model(torch", late)
    Path(program).write_text(text)
    done = run_clusterprof(
        ["run", "--ranks", "0,1", "--steps", "4:16", "--profiler=torch", "--run-dir=run", "--",
         *torch_process.launcher(4), program],
    )  # fmt: skip
    assert done.returncode == 0, done
    for rank in range(4):
        found = dump(workdir / "run" / "ranks" / f"{rank:05d}")
        reduced = [one for one in found["entries"] if one["profiling_name"] == "gloo:all_reduce"]
        assert len(reduced) >= 16, reduced  # of steps 0 to 15
        assert len(reduced) < 18, reduced  # before the program's end
        times = [one["time_created_ns"] for one in found["entries"]]
        assert times == sorted(times)
        state = json.loads((workdir / "run" / "ranks" / f"{rank:05d}/state.json").read_text())
        assert state["chosen"] == (rank < 2)
        assert "flight" not in state
    # the calls of the profiled ranks' reports are those of their recorders
    shallow, deep = (
        parquet.read_table(workdir / f"run/merged/{name}.parquet", columns=["rank", "collective"])
        for name in ("shallow", "collectives")
    )
    found = shallow.filter(shallow["collective"].is_valid()).to_pylist()
    key = itemgetter("rank", "collective")
    assert sorted(map(key, found)) == sorted(map(key, deep.to_pylist()))

    results = json.loads((workdir / "run/merged/results.json").read_text())
    first, *_ = results["shallow"]["suspects"]
    assert (first["rank"], first["delays"]) == (3, True)
    assert 200e6 < first["lateness_ns"] < 3000e6  # also on a busy machine
    assert [3] in [f["ranks"] for f in results["findings"] if f["code"] == "straggler.shallow"]


def test_a_run_that_profiles_no_rank_leaves_steps_clock_and_dump_and_merges(
    run_clusterprof: Cli, workdir: Path, torch_process: Warm
) -> None:
    done = run_clusterprof(
        ["run", "--profiler=none", "--stacks", "--steps", "3:6", "--run-dir=run", "--",
         *torch_process.launcher(2), train(workdir, 8)],
    )  # fmt: skip
    assert done.returncode == 0, done
    for rank in (0, 1):
        folder = workdir / "run" / "ranks" / f"{rank:05d}"
        names = sorted(each.name for each in folder.iterdir())
        clock = [paths.CLOCK] if rank == 0 else []  # one on each node
        files = [paths.FLIGHT_PICKLE, paths.GROUPS, paths.HARDWARE, paths.STATE, paths.STEPS]
        assert names == [*clock, *files]
        (listed,) = read_dump(folder / paths.FLIGHT_PICKLE, rank).groups
        assert listed.ranks == (0, 1)
        found = pickle.loads(gzip.decompress((folder / paths.FLIGHT_PICKLE).read_bytes()))
        sources = {frame["filename"] for one in found["entries"] for frame in one["frames"]}
        assert str(workdir / "train.py") in sources
        content = (folder / paths.STATE).read_text()
        assert json.loads(content)["state"] == "counted"
    clock = json.loads((workdir / "run" / "ranks" / "00000" / paths.CLOCK).read_text())
    assert [each["event"] for each in clock["readings"]] == ["open", "close"]
    for verb in ("merge", "collect"):
        assert run_clusterprof([verb, "run"]).returncode == 0


def test_a_rank_that_is_killed_after_its_window_has_left_its_dump(
    run_clusterprof: Cli, workdir: Path, torch_process: Warm
) -> None:
    dumped = "run/ranks/00001/flight.json.gz"
    end = (
        f"while dist.get_rank() == 1:\n    time.sleep(0.05)\n    if os.path.exists({dumped!r}):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run_clusterprof(
        ["run", "--profiler=none", "--steps", "2:4", "--run-dir=run", "--no-merge", "--",
         *torch_process.launcher(2), train(workdir, 5, end)],
    )  # fmt: skip
    assert done.returncode == 137, done
    folder = workdir / "run" / "ranks" / "00001"
    assert len(dump(folder)["entries"]) >= 4
    assert json.loads((folder / paths.STATE).read_text())["state"] == "counting"


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
@pytest.mark.parametrize("when", ["before", "by the program"])
def test_a_recorder_that_is_off_is_left_alone(warm_job: Job, name: str, when: str) -> None:
    by_program = f"import os\nos.environ[{name!r}] = '0'\n" if when != "before" else ""
    environ = {name: "0"} if when == "before" else {}
    done = warm_job(by_program + GLOO + "train(6); sys.exit(5)", environ=environ)
    assert (done.returncode, done.stdout) == (5, "")
    assert name in warm_job.state["flight"]
    assert not list(warm_job.rank.glob("flight*"))


def test_a_program_without_a_process_group_says_so_in_its_state(warm_job: Job) -> None:
    done = warm_job(LOOP + "iterate(6)", selection=CHOSEN)
    assert (done.returncode, done.stderr) == (0, "")
    assert warm_job.state["state"] == "captured"
    assert "torch.distributed" in warm_job.state["flight"]
    assert not list(warm_job.rank.glob("flight*"))


@pytest.mark.parametrize(
    ("then", "entries"),
    [
        ("train(3)", 3),  # ends inside the window
        ("train(3); dist.destroy_process_group()", 3),
        ("train(3); dist.destroy_process_group(); iterate(4)", 3),
        ("train(3)\nif os.fork():\n    os.wait()\nelse:\n    iterate(9); os._exit(0)", 3),
        ("train(3); raise SystemExit(0)", 3),
        ("train(1)", None),  # before it
        ("train(6)", 4),
    ],
)
def test_whatever_the_program_does_it_ends_as_it_would_have(
    warm_job: Job, then: str, entries: int | None
) -> None:
    done = warm_job(GLOO + then)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if entries is None:
        assert "2:4" in warm_job.state["flight"]
    else:
        assert len(dump(warm_job.rank)["entries"]) == entries
        assert "flight" not in warm_job.state


@pytest.mark.parametrize("broken", ["raises", "gives nothing", "is gone"])
def test_a_torch_that_was_changed_costs_the_dump_and_nothing_else(
    warm_job: Job, broken: str
) -> None:
    way = {
        "raises": "def dump(**k): raise RuntimeError('broken')\ncore._dump_fr_trace_json = dump\n",
        "gives nothing": "core._dump_fr_trace_json = lambda **k: None\n",
        "is gone": "del core._dump_fr_trace_json, core._dump_fr_trace\n",
    }[broken]
    done = warm_job(
        GLOO + "core = torch._C._distributed_c10d\n" + way + "train(6); print('trained')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert warm_job.state["flight"]
    assert not list(warm_job.rank.glob("flight*"))


@pytest.mark.long
def test_the_bench_still_finds_the_recorder_that_it_measures() -> None:
    root = Path(__file__).resolve().parents[2]
    done = command.run(
        [sys.executable, "-c", "import steps; print(len(steps.flight_recorder(1)))"],
        env={"PYTHONPATH": f"{root / 'tests'}:{root / 'bench'}"},
    )
    assert done.stdout.split() == ["2"], done
