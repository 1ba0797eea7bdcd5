"""However a rank ends: with its own status, its report saved where it could be, nothing left over.

Each ending is run with and without clusterprof, on the test Slurm with a real nsys.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import (
    OPTIONS,
    PROGRAMS,
    Running,
    allowed_s,
    outcomes,
    state,
    window,
    words,
)

Cli = Callable[..., Completed]

pytestmark = pytest.mark.needs_nsys


@dataclass(frozen=True)
class Ending:
    how: str
    at: int
    status: int
    state: str
    window: str


ENDINGS = [
    Ending("exit", 5, 3, "lost", "before"),
    Ending("exit", 15, 3, "collected", "inside"),
    Ending("exit", 20, 3, "collected", "whole"),
    Ending("raise", 15, 1, "collected", "inside"),
    Ending("_exit", 5, 4, "lost", "before"),
    Ending("_exit", 15, 4, "collected", "inside"),
    Ending("_exit", 25, 4, "collected", "whole"),
    Ending("segv", 15, 139, "collected", "inside"),
    Ending("kill", 5, 137, "lost", "before"),
    Ending("kill", 15, 137, "collected", "inside"),
    Ending("kill", 25, 137, "collected", "whole"),
    Ending("none", 0, 0, "collected", "whole"),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda each: f"{each.how}-{each.at}")
def test_a_rank_ends_as_it_would_have_ended(
    ending: Ending,
    run_clusterprof: Cli,
    run_command: Cli,
    workdir: Path,
    slurm: dict[str, str],
    fault: Callable[..., None],
) -> None:
    line = ["python", PROGRAMS / "ending.py", ending.how, str(ending.at)]
    plain = run_command(["srun", "-n2", *line], env=slurm)
    done = run_clusterprof(
        ["srun", *OPTIONS, "--run-dir=run", "--no-merge", "-n2", "--", *line],
        env=slurm,
    )  # fmt: skip
    assert done.returncode == plain.returncode == ending.status, done
    assert words(done.stdout) == words(plain.stdout), done
    assert done.seconds - plain.seconds < allowed_s(), done
    found = state(workdir / "run")
    when = f"{ending.how} after step {ending.at}" if ending.at else "ends by itself"
    fault(when, plain.returncode, done.returncode, done.seconds - plain.seconds, found)
    assert (found["state"], window(found)) == (ending.state, ending.window), (found, done)
    # Why there is no more, and that it is for the program's own end.
    assert found["program_status"] == ending.status, found
    assert ("reason" in found) == (ending.window != "whole"), found
    report = workdir / "run/ranks/00000/report.nsys-rep"
    assert report.exists() == (ending.state == "collected")
    assert outcomes(workdir / "run") == {0: ending.state}


def test_a_cancelled_job_keeps_its_report(workdir: Path, slurm: dict[str, str]) -> None:
    running = Running.ending(workdir, slurm, how="hang", at=15)
    running.wait_for("capturing")
    time.sleep(0.5)
    command.run(["scancel", running.job()], env=slurm)
    assert running.ends() == 143, running.printed()
    assert state(running.run)["state"] == "collected", running.printed()
    assert window(state(running.run)) == "inside"


def test_a_rank_that_hangs_after_its_window_has_its_report_home_already(
    workdir: Path, slurm: dict[str, str]
) -> None:
    running = Running.ending(workdir, slurm, how="hang", at=25)
    running.wait_for("finishing")
    report = running.run / "ranks/00000/report.nsys-rep"
    running.wait_until(report.exists, "home")
    command.run(["scancel", running.job()], env=slurm)
    assert running.ends() == 143, running.printed()
    assert state(running.run)["state"] == "collected", running.printed()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_an_nsys_that_is_killed_takes_nothing_of_the_program_along(
    number: signal.Signals, workdir: Path, slurm: dict[str, str]
) -> None:
    running = Running.ending(workdir, slurm, how="exit", at=28)
    running.wait_for("capturing")
    for pid in running.nsys():
        os.kill(pid, number)
    assert running.ends() == 3, running.printed()
    assert words(running.printed()) == ["rank 0 begins", "rank 1 begins", "rank 1 ends"]
    assert state(running.run)["state"] in ("collected", "lost")
    assert not running.nsys()


def test_a_guard_that_is_killed_takes_its_program_along(
    workdir: Path, slurm: dict[str, str]
) -> None:
    running = Running.ending(workdir, slurm, how="hang", at=15)
    running.wait_for("capturing")
    time.sleep(0.3)
    program, guard = state(running.run)["program_pid"], state(running.run)["pid"]
    os.kill(guard, signal.SIGKILL)
    assert running.ends() == 137, running.printed()
    running.wait_until(lambda: not Path(f"/proc/{program}").exists(), "without its program")
