"""The command behind `next` runs where it is shown."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import report_sample as sample

from clusterprof import masking, next_command
from clusterprof.agent.contracts import files, states
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.results import RANKS, Results
from clusterprof.run_directory import Window

BEGIN, REST = "clusterprof torchrun --steps=5:9 --ranks 2,0", "--nproc-per-node 4 -- train.py"
CLOSER = f"{BEGIN} --profiler nsys --pytorch emit-nvtx --cpu-sampling {REST}"
RECEIVED = "clusterprof srun --ranks 2,0 --profiler nsys ... -- PROGRAM..."


@pytest.fixture
def without_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_command, "installed", list)


def results_with(command: str, profiler: str = "torch.profiler") -> Results:
    results = sample.results()
    results["findings"][0]["next"] = command
    for entry in results["ranks"]:
        entry["profiler"] = profiler
    return results


def shown(command: str, run: Window | None = None, profiler: str = "torch.profiler") -> str:
    return next_command.runnable(results_with(command, profiler), run)["findings"][0]["next"]


@pytest.mark.usefixtures("without_nsys")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (CLOSER, f"{BEGIN} --profiler torch --stacks {REST}"),
        (f"{BEGIN} --profiler nsys {REST}", f"{BEGIN} --profiler torch {REST}"),
        (f"{BEGIN} --profiler nsys --trace cuda,nvtx,python-gil --cpu-sampling {REST}",
         f"{BEGIN} --profiler torch --stacks {REST}"),
        (f"{BEGIN} --profiler nsys --nsys-arg=--cuda-graph-trace=node {REST} --cpu-sampling",
         f"{BEGIN} --profiler torch {REST} --cpu-sampling"),
        # what the run's user asked of nsys cannot be left out
        (CLOSER.replace("--steps", "--trace=cuda --steps"),
         CLOSER.replace("--steps", "--trace=cuda --steps")),
        (f"{BEGIN} --profiler torch {REST}", f"{BEGIN} --profiler torch {REST}"),
        ("clusterprof compare runs/a runs/b", "clusterprof compare runs/a runs/b"),
        ("", ""),
    ],
)  # fmt: skip
def test_where_there_is_no_nsys_torch_profiles(command: str, expected: str) -> None:
    assert shown(command) == expected


@pytest.mark.usefixtures("without_nsys")
def test_what_torch_has_captured_with_all_that_it_can_show_is_not_captured_again() -> None:
    whole = CLOSER.replace("--steps", "--stacks --steps")
    by_torch = f"{BEGIN} --profiler torch {REST}".replace("--steps", "--stacks --steps")
    assert shown(whole) == ""
    assert shown(whole, profiler="nsys 2024.2.3") == by_torch
    assert shown(whole.replace("2,0", "2,7")) == by_torch.replace("2,0", "2,7")


def test_where_there_is_nsys_it_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_command, "installed", lambda: ["nsys"])
    assert shown(CLOSER) == CLOSER


@pytest.mark.usefixtures("without_nsys")
def test_received_reports_of_nsys_are_of_a_machine_that_has_one() -> None:
    assert shown(RECEIVED, profiler="nsys 2024.2.3") == RECEIVED
    assert shown(RECEIVED) == "clusterprof srun --ranks 2,0 --profiler torch ... -- PROGRAM..."


def job(folder: Path, **members: Any) -> Window:
    """A run whose only rank trains."""
    run = Window.at(folder)
    folder.mkdir(exist_ok=True)
    states.advance(str(run.rank(0)), "counting")
    run.directory.write_manifest({"schema_version": 1, "world_size": 1, **members})
    plan = Plan(str(folder), Selection("0", "ranks", (0,)), (5, 9), "torch", log_s=60)
    files.write_json(run.directory.plan, plan.to_json())
    return run


def test_while_the_job_goes_on_the_ranks_are_captured_in_it(tmp_path: Path) -> None:
    run = job(tmp_path / "a run")
    capturing = f"clusterprof capture '{run.path}' --ranks 2,0 --wait"
    assert shown(CLOSER, run) == capturing
    assert shown(CLOSER, Window(run.directory, 2)) == capturing  # of a later window
    assert shown(CLOSER) != capturing  # on the page, which is read later
    assert shown("clusterprof compare a b", run) == "clusterprof compare a b"


@pytest.mark.usefixtures("without_nsys")
@pytest.mark.parametrize("why", ["ended", "rank ended", "no order", "damaged", "no run"])
def test_a_job_that_captures_no_more_is_started_again(tmp_path: Path, why: str) -> None:
    run = job(tmp_path, ended="2026-01-02T03:05:05+00:00" if why == "ended" else None)
    if why == "rank ended":
        states.advance(str(run.rank(0)), "counted")
    elif why == "no order":
        plan = Plan(str(tmp_path), Selection("0", "ranks", (0,)), (5, 9), "torch")
        files.write_json(run.directory.plan, plan.to_json())
    elif why == "damaged":
        run.directory.plan.write_text("{")
    elif why == "no run":
        run.directory.manifest.unlink()
    assert shown(CLOSER, run) == f"{BEGIN} --profiler torch --stacks {REST}"


def test_who_launched_a_run_sees_the_values_of_its_command_before_the_ranks_too(
    tmp_path: Path,
) -> None:
    whole = ["clusterprof", "ssh", "--env=A=b c", RANKS, "--", "train.py", "--lr", "0.1"]
    masked = masking.again(whole, RANKS)
    run = job(tmp_path, again=masked)
    run.directory.write_again(whole)
    command = shlex.join(whole).replace(f"'{RANKS}'", "--ranks 3 --profiler torch")
    known = masking.command(masked).replace(f"'{RANKS}'", "--ranks 3 --profiler torch")
    assert "--env=<value>" in known
    made = next_command.with_values(results_with(known), run)
    assert made["findings"][0]["next"] == command


@pytest.mark.parametrize(
    ("command", "blanks"),
    [
        (RECEIVED, ["...", "PROGRAM..."]),
        ("clusterprof run --ranks 0 -- train.py --lr <value> --x=<value>", ["<value>"]),
        (f"{CLOSER} a...b ...", ["..."]),
        (CLOSER, []),
    ],
)
def test_what_is_to_be_filled_in_is_known(command: str, blanks: list[str]) -> None:
    assert masking.to_fill_in(command) == blanks
