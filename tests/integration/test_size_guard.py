"""Windows that would become too large: closed early between two steps, and said so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.command import Completed
from lab.fakes import scripted_nsys

from clusterprof.agent.nsys import VARIABLE

pytestmark = pytest.mark.needs_torch

Cli = Callable[..., Completed]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"


def state(run: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / "ranks" / "00000" / "state.json").read_text())
    return read


@pytest.mark.parametrize(
    "profiler", ["torch", "script", pytest.param("nsys", marks=pytest.mark.needs_nsys)]
)
def test_a_window_that_becomes_too_large_is_closed_early_and_its_report_is_whole(
    run_clusterprof: Cli, workdir: Path, profiler: str
) -> None:
    if profiler == "script":
        grows = {"*:--start-agent": "globals().update(GROWTH_B=300_000)"}
        command.settings[VARIABLE] = str(scripted_nsys(workdir / "nsys", grows))
        profiler = "nsys"
    done = run_clusterprof(
        ["torchrun", "--ranks", "0", "--steps", "3:190", "--max-report-mb", "5",
         f"--profiler={profiler}", "--run-dir=run", "--nproc-per-node", "1", "--",
         EXAMPLE, "--steps", "200", "--layers", "24", "--dim", "64"],
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "200 steps on 1 ranks" in done.stdout
    stated = state(workdir / "run")
    assert stated["state"] == "collected"
    assert 3 < stated["step_end"] < 190
    (reached,) = re.findall(r"\b(\d+) MB", stated["reason"])
    assert int(reached) >= 5
    assert str(stated["step_end"]) in stated["reason"]
    assert stated["reason"] in done.stderr
    results = json.loads((workdir / "run" / "merged" / "results.json").read_text())
    assert results["steps"], "the part that was captured has whole steps"


def test_without_a_limit_the_window_is_as_long_as_asked(
    run_clusterprof: Cli, workdir: Path
) -> None:
    done = run_clusterprof(
        ["torchrun", "--ranks", "0", "--steps", "3:60", "--max-report-mb", "0", "--profiler=torch",
         "--run-dir=run", "--nproc-per-node", "1", "--", EXAMPLE, "--steps", "62", "--dim", "64"],
    )  # fmt: skip
    assert done.returncode == 0, done
    stated = state(workdir / "run")
    assert (stated["state"], stated["step_end"], stated.get("reason")) == ("collected", 60, None)
