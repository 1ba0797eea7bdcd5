"""Windows that would become too large: closed early between two steps, and said so."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.command import Completed
from lab.endings import PROGRAMS, RANKS
from lab.fakes import scripted_nsys
from lab.warm import Warm

from clusterprof.agent.nsys import VARIABLE

Cli = Callable[..., Completed]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"

#: train.py [torch]: a rank that goes on until its window is closed
PROGRAM = """
import pathlib, sys
import loop
stated = pathlib.Path("run/ranks/00000/state.json")
def calculate(): pass
if "torch" in sys.argv:
    import torch
    model = torch.nn.Linear(4, 4)
    def calculate():
        for _ in range(200): model(torch.ones(1, 4))
count, closed = 0, False
while not closed:
    calculate()
    loop.step()
    count += 1
    if count > 3 and stated.exists():
        closed = '"closed"' in stated.read_text()
print(f"{count} steps", flush=True)
"""
OPTIONS = ["--ranks", "0", "--step-on=loop:step", "--run-dir=run"]
ENDLESS = ["--steps=3:100000", "--max-steps=100000", "--max-report-mb=5"]


@pytest.fixture
def project(workdir: Path) -> Path:
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "train.py").write_text(PROGRAM)
    return workdir


def state(run: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / "ranks" / "00000" / "state.json").read_text())
    return read


def was_closed_early(run: Path, done: Completed) -> None:
    """The window ended before the program did, and what there was of it is whole."""
    assert done.returncode == 0, done
    (steps,) = re.findall(r"^(\d+) steps", done.stdout, re.MULTILINE)
    stated = state(run)
    assert stated["state"] == "collected"
    assert 3 < stated["step_end"] < int(steps)
    (reached,) = re.findall(r"\b(\d+) MB", stated["reason"])
    assert int(reached) >= 5
    assert str(stated["step_end"]) in stated["reason"]
    assert stated["reason"] in done.stderr
    results = json.loads((run / "merged" / "results.json").read_text())
    assert results["steps"], "the part that was captured has whole steps"


@pytest.mark.needs_torch
def test_a_trace_that_becomes_too_large_is_closed_early_and_is_whole(
    run_clusterprof: Cli, project: Path, torch_process: Warm
) -> None:
    done = run_clusterprof(
        ["run", *OPTIONS, *ENDLESS, "--profiler=torch", "--",
         *torch_process.launcher(1), "train.py", "torch"],
    )  # fmt: skip
    was_closed_early(project / "run", done)


def test_a_report_that_becomes_too_large_is_closed_early_and_is_whole(
    run_clusterprof: Cli, project: Path
) -> None:
    grows = {"*:--start-agent": "globals().update(GROWTH_B=300_000)"}
    command.settings[VARIABLE] = str(scripted_nsys(project / "nsys", grows))
    done = run_clusterprof(
        ["run", *OPTIONS, *ENDLESS, "--profiler=nsys", "--",
         RANKS, "1", sys.executable, "train.py"],
    )  # fmt: skip
    was_closed_early(project / "run", done)


@pytest.mark.long
@pytest.mark.needs_torch
@pytest.mark.needs_nsys
def test_a_real_report_that_becomes_too_large_is_closed_early_and_is_whole(
    run_clusterprof: Cli, workdir: Path
) -> None:
    done = run_clusterprof(
        ["torchrun", "--ranks=0", "--run-dir=run", "--steps=3:190", "--max-report-mb=5",
         "--profiler=nsys", "--nproc-per-node=1", "--", EXAMPLE, "--steps=200", "--layers=24",
         "--dim=64"],
    )  # fmt: skip
    was_closed_early(workdir / "run", done)


@pytest.mark.needs_torch
def test_without_a_limit_the_window_is_as_long_as_asked(
    run_clusterprof: Cli, project: Path, torch_process: Warm
) -> None:
    done = run_clusterprof(
        ["run", *OPTIONS, "--steps=3:60", "--max-report-mb=0", "--profiler=torch", "--no-merge",
         "--", *torch_process.launcher(1), "train.py", "torch"],
    )  # fmt: skip
    assert done.returncode == 0, done
    stated = state(project / "run")
    assert (stated["state"], stated["step_end"], stated.get("reason")) == ("collected", 60, None)
