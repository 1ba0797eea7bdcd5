"""However a rank ends: with its own status, its report saved where it could be, nothing left over.

Each ending is run with and without clusterprof, on the test Slurm with a real nsys.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.command import Completed

PROGRAMS = Path(__file__).resolve().parents[1] / "lab" / "programs"
OPTIONS = ["--ranks", "0", "--steps", "10:20", "--step-on", "loop:step", "--profiler=nsys"]
Cli = Callable[..., Completed]

pytestmark = pytest.mark.needs_nsys


@dataclass(frozen=True)
class Ending:
    how: str
    at: int
    status: int
    state: str
    reason: str


ENDINGS = [
    Ending("exit", 5, 3, "lost", "before the window 10:20 began"),
    Ending("exit", 15, 3, "collected", "inside the window 10:20"),
    Ending("exit", 20, 3, "collected", ""),
    Ending("raise", 15, 1, "collected", "inside the window 10:20"),
    Ending("_exit", 5, 4, "lost", "before the window began"),
    Ending("_exit", 15, 4, "collected", "inside the window"),
    Ending("_exit", 25, 4, "collected", ""),
    Ending("segv", 15, 139, "collected", "inside the window"),
    Ending("kill", 5, 137, "lost", "before the window began"),
    Ending("kill", 15, 137, "collected", "inside the window"),
    Ending("kill", 25, 137, "collected", ""),
    Ending("none", 0, 0, "collected", ""),
]


def state(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "ranks/00000/state.json").read_text())
    return found


def words(text: str) -> list[str]:
    """What the program itself printed, whatever the order of its ranks."""
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


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
    plain = run_command(["srun", "-n2", *line], env=slurm, timeout=60)
    done = run_clusterprof(
        ["srun", *OPTIONS, "--run-dir=run", "--no-merge", "-n2", "--", *line], env=slurm, timeout=60
    )
    assert done.returncode == plain.returncode == ending.status, done
    assert words(done.stdout) == words(plain.stdout), done
    assert done.seconds - plain.seconds < 10, done
    found = state(workdir / "run")
    when = f"{ending.how} after step {ending.at}" if ending.at else "ends by itself"
    fault(when, plain.returncode, done.returncode, done.seconds - plain.seconds, found)
    assert found["state"] == ending.state, (found, done)
    if ending.reason:
        assert ending.reason in found["reason"], found
    else:
        assert "reason" not in found
    report = workdir / "run/ranks/00000/report.nsys-rep"
    assert report.exists() == (ending.state == "collected")
    assert f"{int(report.exists())} of 1 reports" in done.stderr


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds a row to the table that `make faults` prints."""

    def add(what: str, plain: int, ours: int, added_s: float, found: dict[str, Any]) -> None:
        row = (what, plain, ours, f"{added_s:+.1f} s", found["state"], found.get("reason", ""))
        record_property("fault", row)

    return add


class Running:
    """A job that is running under clusterprof, to be ended from outside."""

    def __init__(self, workdir: Path, slurm: dict[str, str], *, how: str, at: int) -> None:
        self.env = slurm
        self.run = workdir / "run"
        argv = command.clusterprof(
            ["srun", *OPTIONS, "--run-dir", self.run, "--no-merge", "-n2", "--",
             "python", PROGRAMS / "ending.py", how, str(at)]
        )  # fmt: skip
        self.output = (workdir / "out").open("w+")
        self.process = subprocess.Popen(
            argv, env=command.environment(slurm), stdout=self.output, stderr=self.output,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, wanted: str) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if state(self.run)["state"] == wanted:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"never {wanted}: {self.said()}")

    def ends(self) -> int:
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end: {self.said()}") from None

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def job(self) -> str:
        listed = command.run(["squeue", "-h", "-o", "%i"], env=self.env).stdout.split()
        assert len(listed) == 1, listed
        return listed[0]

    def nsys(self) -> list[int]:
        """The nsys processes of this run's session."""
        found = subprocess.run(
            ["pgrep", "-f", f"session-n[a-z]*=clusterprof-{self.run.name}-00000"],
            capture_output=True, text=True,
        )  # fmt: skip
        return [int(pid) for pid in found.stdout.split()]


def test_a_cancelled_job_keeps_its_report(workdir: Path, slurm: dict[str, str]) -> None:
    running = Running(workdir, slurm, how="hang", at=15)
    running.wait_for("capturing")
    time.sleep(0.5)
    command.run(["scancel", running.job()], env=slurm)
    assert running.ends() == 143, running.said()
    assert state(running.run)["state"] == "collected", running.said()
    assert "inside the window" in state(running.run)["reason"]


def test_a_rank_that_hangs_after_its_window_has_its_report_home_already(
    workdir: Path, slurm: dict[str, str]
) -> None:
    running = Running(workdir, slurm, how="hang", at=25)
    running.wait_for("finishing")
    report = running.run / "ranks/00000/report.nsys-rep"
    deadline = time.monotonic() + 20
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert report.exists(), running.said()
    command.run(["scancel", running.job()], env=slurm)
    assert running.ends() == 143, running.said()
    assert state(running.run)["state"] == "collected", running.said()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_an_nsys_that_is_killed_takes_nothing_of_the_program_along(
    number: signal.Signals, workdir: Path, slurm: dict[str, str]
) -> None:
    running = Running(workdir, slurm, how="exit", at=28)
    running.wait_for("capturing")
    for pid in running.nsys():
        os.kill(pid, number)
    assert running.ends() == 3, running.said()
    assert words(running.said()) == ["rank 0 begins", "rank 1 begins", "rank 1 ends"]
    assert state(running.run)["state"] in ("collected", "lost")
    assert not running.nsys()


def test_a_guard_that_is_killed_takes_its_program_along(
    workdir: Path, slurm: dict[str, str]
) -> None:
    running = Running(workdir, slurm, how="hang", at=15)
    running.wait_for("capturing")
    time.sleep(0.3)
    program, guard = state(running.run)["program_pid"], state(running.run)["pid"]
    os.kill(guard, signal.SIGKILL)
    assert running.ends() == 137, running.said()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{program}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{program}").exists()
