"""`make demo`: the example with each cause that it can plant, and the script around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.command import Completed

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., Completed]


@pytest.mark.needs_torch
@pytest.mark.parametrize("kind", ["host", "loader", "compute", "gc", "checkpoint"])
def test_the_example_trains_with_each_planted_cause(
    kind: str, run_command: Run, workdir: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    options = ["--slow-rank", "0", "--slow-kind", kind, "--slow-ms", "1", "--steps", "42",
               "--dim", "8"]  # fmt: skip
    done = run_command([*torchrun, "1", ROOT / "examples/train.py", *options])
    assert done.returncode == 0, done
    assert "42 steps on 1 ranks" in done.stdout


def test_a_scenario_that_is_none_is_refused_with_those_there_are(run_command: Run) -> None:
    done = run_command([ROOT / "scripts/demo.sh"], env={"SCENARIO": "disk"})
    assert done.returncode == 2
    assert "choose host, loader, compute, gc or checkpoint" in done.stderr
