"""`clusterprof capture`: later windows of a real job that runs, over gloo."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.command import Completed
from lab.endings import Running
from lab.warm import Warm
from users import MALLORY

from clusterprof.agent.contracts import paths

pytestmark = pytest.mark.needs_torch

Cli = Callable[..., Completed]
#: seconds of a step, of which 500 last longer than a busy machine starts things for, and by how
#: much rank 1 is late in it: more in ten steps than a machine stalls
STEP_S, LATE_S = 0.1, 0.2
#: clusterprof whose ranks look for orders once a second
LAUNCH = (
    "import sys; from clusterprof.launch import planning; planning.LOG_S = 1; "
    "from clusterprof.cli.main import main; sys.exit(main())"
)
#: clusterprof that orders a window for 1.5 s from now, by steps seven times as short as they are
SOON = (
    "import sys; from clusterprof.collect import live_windows; live_windows.ON_ITS_WAY_S = 0; "
    "from clusterprof.cli.main import main; sys.exit(main())"
)
#: train.py LATE_S
PROGRAM = f"""
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
usual_s, began = {STEP_S}, time.monotonic()
for step in range(20_000):
    late_s = float(sys.argv[1]) * (dist.get_rank() == 1)
    slow = os.path.exists("slow")
    if step and not slow:
        usual_s = max({STEP_S}, (time.monotonic() - began) / step)
    time.sleep({STEP_S} + late_s + 6 * usual_s * slow)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    over = torch.tensor([float(os.path.exists("stop"))])
    dist.all_reduce(over)
    if over.item():
        break
dist.destroy_process_group()
"""


def running(folder: Path, warm: Warm, profiler: str, late_s: float = 0.0) -> Iterator[Path]:
    """The run directory of two ranks that train until the file `stop` is there.

    `profiler`: of its own window, of rank 0, which is over. Rank 1 is so late in each step.
    """
    (folder / "train.py").write_text(PROGRAM)
    line = [
        sys.executable, "-c", LAUNCH, "run", "--ranks", "0", "--steps", "5:8", "--profiler",
        profiler, "--run-dir", "run", "--no-merge", "--", *warm.launcher(2), "train.py",
        str(late_s),
    ]  # fmt: skip
    started = Running(line, {"OMP_NUM_THREADS": "1"}, folder / "output", cwd=folder)
    ranks = started.run / paths.RANKS
    needed = [
        ranks / "00000" / paths.TRACE,
        *(ranks / f"0000{rank}" / paths.STEPS for rank in (0, 1)),
    ]
    if profiler == "nsys":
        needed[0] = ranks / "00000" / paths.REPORT
    started.wait_until(lambda: all(each.exists() for each in needed), "captured")
    started.wait_until(lambda: min(map(logged, needed[1:])) > 20, "logged")
    yield started.run
    (folder / "stop").touch()
    assert started.ends() == 0, started.printed()


def logged(log: Path) -> int:
    """How many steps the log holds."""
    return len(log.read_text().splitlines()) - 1


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, torch_process: Warm) -> Iterator[Path]:
    """The run directory of one job, of which several tests capture windows."""
    yield from running(tmp_path_factory.mktemp("job"), torch_process, "torch", LATE_S)


@pytest.fixture
def nsys_job(scripted: None, tmp_path: Path, torch_process: Warm) -> Iterator[Path]:
    """The run directory of the test's own job, whose own window is by nsys."""
    yield from running(tmp_path, torch_process, "nsys")


def windows(run: Path) -> list[int]:
    """The numbers of the later windows that have been ordered."""
    return sorted(int(each.name) for each in (run / "windows").iterdir())


def results(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / paths.MERGED / paths.RESULTS).read_text())
    return found


def test_orders_that_cannot_be_given_are_refused_with_what_to_do(
    run_clusterprof: Cli, job: Path
) -> None:
    before = windows(job)
    for arguments, code in (
        ([job, "--steps", "5:8"], 2),
        ([job, "--steps", "+5:+5"], 2),
        ([job, "--ranks", "7"], 2),
        ([job.parent], 5),
    ):
        done = run_clusterprof(["capture", *arguments])
        assert (done.returncode, done.stderr.count("\n") >= 2) == (code, True), done
    plan = (job / paths.PLAN).read_text()
    (job / paths.PLAN).write_text(
        json.dumps({**json.loads(plan), "log_s": 0})
    )  # as of an older clusterprof
    done = run_clusterprof(["capture", job])
    (job / paths.PLAN).write_text(plan)
    assert done.returncode == 5, done
    assert run_clusterprof(["collect", job, "--window", "99"]).returncode == 2
    assert windows(job) == before


def test_two_later_windows_capture_ranks_that_were_not_selected(
    run_clusterprof: Cli, job: Path
) -> None:
    done = run_clusterprof(["capture", job, "--ranks", "0,1", "--steps", "+15:+25", "--wait"])
    assert done.returncode == 0, done
    first = json.loads((job / "windows/2" / paths.ORDER).read_text())
    found = results(job / "windows/2")
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    straggler = [each for each in found["findings"] if each["code"].startswith("straggler")]
    assert [each["ranks"] for each in straggler][:1] == [[1]], found["verdict"]
    for rank in (0, 1):
        folder = job / "windows/2/ranks" / f"{rank:05d}"
        state = json.loads((folder / paths.STATE).read_text())
        assert (state["step_begin"], state["step_end"]) == tuple(first["steps"])
        assert {paths.TRACE, paths.FLIGHT, paths.CLOCK} <= {each.name for each in folder.iterdir()}
        log = (job / "ranks" / f"{rank:05d}" / paths.STEPS).read_text().splitlines()[1:]
        logged = {int(line.split(",")[0]) for line in log}
        assert set(range(*first["steps"])) <= logged

    # An order of another user is none of ours, and a second window follows the first.
    other = job / "windows/3"
    other.mkdir()
    (other / paths.ORDER).write_text(json.dumps({**first, "number": 3}))
    if os.geteuid() == 0:
        os.chown(other / paths.ORDER, MALLORY, MALLORY)
    else:
        (other / paths.ORDER).write_text("{}")
    begin = first["steps"][1]
    refused = run_clusterprof(["capture", job, "--ranks", "1", "--steps", f"{begin}:{begin + 3}"])
    assert refused.returncode == 2, refused
    done = run_clusterprof(["capture", job, "--ranks", "1", "--steps", "+15:+18", "--wait"])
    assert done.returncode == 0, done
    assert [each["rank"] for each in results(job / "windows/4")["ranks"]] == [1]
    assert not (other / paths.RANKS).exists()
    status = json.loads(run_clusterprof(["status", job, "--json"]).stdout)
    windows = {each["number"]: each for each in status["later_windows"]}
    assert windows[2]["states"] == {"0": "collected", "1": "collected"}
    assert windows[4]["states"] == {"1": "collected"}
    assert windows[4]["merged"]
    # The run's own window is as it was.
    assert status["window"] == [5, 8]
    assert [each["state"] for each in status["ranks"]] == ["captured", "counting"]


def test_a_window_of_a_rank_under_nsys_waits_until_steps_get_slower_and_is_torch_s(
    nsys_job: Path, tmp_path: Path
) -> None:
    def waits(times: str, *more: str) -> Running:
        argv = ["capture", nsys_job, "--when", f"step > {times}", *more]
        started = Running([sys.executable, "-c", SOON, *argv], {}, tmp_path / times)
        started.wait_until(lambda: "waiting until" in started.printed(), "waiting")
        started.settle(2)  # some looks
        assert started.goes_on(), started.printed()
        return started

    # Within its first 500 steps: of later ones the log has a minute's together.
    # Steps become seven times as long as they are on this machine: one on which all take twice as
    # long neither begins the window nor keeps it from beginning.
    capturing = waits("3.5x", "--steps=+2:+6", "--wait")
    assert windows(nsys_job) == []
    (nsys_job.parent / "slow").touch()
    assert capturing.ends() == 0, capturing.printed()
    steps = json.loads((nsys_job / "windows/2" / paths.ORDER).read_text())["steps"]
    lengths = [each["duration_ns"] for each in results(nsys_job / "windows/2")["steps"]]
    assert len(lengths) == steps[1] - steps[0]
    assert min(lengths) > 6 * STEP_S * 1e9
    folder = nsys_job / "windows/2/ranks/00000"
    assert (folder / paths.TRACE).exists()
    assert not (folder / paths.REPORT).exists()
    assert [each["profiler"][:5] for each in results(nsys_job / "windows/2")["ranks"]] == ["torch"]
    # a job that gets no slower ends, and with it the waiting
    again = waits("20x")
    (nsys_job.parent / "stop").touch()
    assert again.ends() == 0, again.printed()
    assert windows(nsys_job) == [2]
