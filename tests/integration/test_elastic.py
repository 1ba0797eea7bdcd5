"""An elastic launcher starts the ranks over: each attempt's reports stay, one attempt is merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, outcomes, state, window

pytestmark = [pytest.mark.usefixtures("scripted", "warm_torchrun"), pytest.mark.needs_torch]


def started_over(run_clusterprof: Callable[..., Completed], at: int) -> Completed:
    """Two ranks, both chosen, the first of which fails after step `at` of the first attempt."""
    done = run_clusterprof(
        ["torchrun", *OPTIONS, "--ranks=0,1", "--run-dir=run", "--no-merge", "--standalone",
         "--nproc-per-node=2", "--max-restarts=1", "--", PROGRAMS / "ending.py", "once", str(at)],
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    assert done.stdout.count("rank 0 begins") == 2
    return done


def test_a_window_that_was_cut_is_captured_again_by_the_next_attempt(
    run_clusterprof: Callable[..., Completed], workdir: Path
) -> None:
    started_over(run_clusterprof, 15)
    run = workdir / "run"
    assert outcomes(run) == {0: "collected", 1: "collected"}
    assert json.loads((run / "run.json").read_text())["attempt"] == 2
    for rank in (0, 1):
        first, second = state(run, rank), state(run / "attempt-2", rank)
        assert window(first) == "inside"
        assert (second["state"], second["whole"], second.get("reason")) == ("collected", True, None)
        assert first["session"] != second["session"]
        for folder in (run, run / "attempt-2"):
            assert (folder / f"ranks/0000{rank}/report.nsys-rep").stat().st_size
            assert (folder / f"ranks/0000{rank}/steps.csv").exists()


def test_a_whole_window_is_captured_once_however_often_the_ranks_start_over(
    run_clusterprof: Callable[..., Completed], workdir: Path
) -> None:
    started_over(run_clusterprof, 25)
    run = workdir / "run"
    assert outcomes(run) == {0: "collected", 1: "collected"}
    assert json.loads((run / "run.json").read_text()).get("attempt", 1) == 1
    for rank in (0, 1):
        first, second = state(run, rank), state(run / "attempt-2", rank)
        assert (first["state"], first["whole"]) == ("collected", True)
        assert second["steps"] == 30
        assert not (run / f"attempt-2/ranks/0000{rank}/report.nsys-rep").exists()
