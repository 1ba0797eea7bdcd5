"""A wall clock that somebody sets by an hour while a real training runs (libfaketime)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from lab.command import Completed, free_port
from lab.parts import faketime

Cli = Callable[..., Completed]
HOUR_NS = 3_600_000_000_000
pytestmark = [pytest.mark.needs_torch, pytest.mark.needs_faketime]

#: The library cannot be in a launcher (it breaks time.sleep), so each rank begins anew with it. Of
#: threads that let it read its file at once one may see any time, which has ended torch's profiler.
PROGRAM = dedent(
    """
    import os, sys, time

    if "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = os.environ["LIBRARY"]
        os.execv(sys.executable, [sys.executable, *sys.argv])

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    began = time.time() - time.monotonic()

    def set_the_clock(by):
        mine = os.environ["FAKETIME_TIMESTAMP_FILE"] + "." + os.environ["RANK"]
        with open(mine, "w") as file:
            file.write(by + "\\n")
        os.replace(mine, os.environ["FAKETIME_TIMESTAMP_FILE"])
        while time.time() - time.monotonic() < began + 1800:
            pass  # the library looks once a second

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        if step + 1 == int(os.environ["SET_AFTER"]):
            set_the_clock("+3600")
    dist.destroy_process_group()
    print("trained", flush=True)
    """
)


@pytest.fixture
def run(
    run_clusterprof: Cli, workdir: Path, light_path: str
) -> Callable[[int], tuple[Completed, Path]]:
    def started(after: int) -> tuple[Completed, Path]:
        (workdir / "train.py").write_text(PROGRAM)
        (workdir / "clock").write_text("+0\n")
        done = run_clusterprof(
            ["torchrun", "--ranks", "all", "--steps", "4:9", "--profiler=torch", "--run-dir=run",
             "--nproc-per-node", "2", "--master-port", str(free_port()), "--", "train.py"],
            env={
                "PATH": light_path, "LIBRARY": str(faketime()),
                "SET_AFTER": str(after), "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_TIMESTAMP_FILE": str(workdir / "clock"), "DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            },
        )  # fmt: skip
        assert done.returncode == 0, done
        assert done.stdout.count("trained") == 2
        for rank in (0, 1):
            log = (workdir / f"run/ranks/{rank:05d}/steps.csv").read_text().splitlines()[1:]
            times = [int(word) for line in log for word in line.split(",")[1:]]
            assert len(log) == 12
            assert times == sorted(times)
            assert times[-1] - times[0] < HOUR_NS / 10
        return done, workdir / "run"

    return started


def test_a_clock_set_before_the_window_is_said_and_changes_no_step_and_no_verdict(
    run: Callable[[int], tuple[Completed, Path]],
) -> None:
    _, folder = run(2)
    results = json.loads((folder / "merged/results.json").read_text())
    assert results["missing"] == []
    assert [step["step"] for step in results["steps"]] == [4, 5, 6, 7, 8]
    # a call that ends as the window does may be missing from one rank's report
    calls = results["collectives"]
    assert calls["matched"] >= 4
    assert calls["matched"] + calls["incomplete"] >= 5
    assert all(step["duration_ns"] < HOUR_NS / 10 for step in results["steps"])
    # two ranks of one machine: the truth is 0
    for rank in results["clock"]["ranks"]:
        assert abs(rank["offset_ns"]) <= rank["uncertainty_ns"] < HOUR_NS / 10
    # by an hour, to within what the reading itself took: on a busy machine some milliseconds
    printed = [
        each for each in results["warnings"] if re.search(r"was set by \+3(599|600)\d{3}\.", each)
    ]
    assert len(printed) == 2, results["warnings"]


@pytest.mark.long
def test_a_clock_set_inside_the_window_leaves_no_report_that_is_believed(
    run: Callable[[int], tuple[Completed, Path]],
) -> None:
    done, folder = run(6)
    results = json.loads((folder / "merged/results.json").read_text())
    assert results["ranks"] == []
    assert [each["rank"] for each in results["missing"]] == [0, 1]
    stretched = [re.search(r"\+\d{3,4}\.\d{3} s", each["reason"]) for each in results["missing"]]
    assert all(stretched), results["missing"]
    assert results["findings"] == []
    assert "Traceback" not in done.stderr
