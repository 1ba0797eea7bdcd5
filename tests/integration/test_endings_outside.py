"""Jobs that are ended from outside end as they would have without us, with what could be saved.

Each ending is brought upon a job as it is, once for all tests, and upon one under clusterprof.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lab import command
from lab.endings import OPTIONS, PROGRAMS, Running, outcomes, window, words
from lab.job import LOOP
from lab.tiers import long_but
from lab.warm import Warm

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

#: what srun says of the first of two interrupts
ONE_MORE = "one more within 1 sec to abort"


@dataclass(frozen=True)
class Ending:
    """Which signals go to whom, after which step of rank 0, and what becomes of its report."""

    to: str
    signals: tuple[signal.Signals, ...]
    at: int
    state: str
    #: which signal clusterprof was sent, where it closed the window for it
    reason: str = ""
    #: where a launcher's own SIGKILL races with the program's end
    statuses: frozenset[int] = field(default=frozenset())

    def __str__(self) -> str:
        names = "+".join(each.name for each in self.signals)
        where = "before" if self.at < 10 else "inside" if self.at < 20 else "after"
        return f"{names} to {self.to}, {where} the window"

    def bring(self, running: Running, launcher: str, *, plain: bool) -> int:
        """Send the signals; the status with which it ends then."""
        while running.goes_on():
            for place, number in enumerate(self.signals):
                if place and launcher == "srun":
                    running.wait_until(lambda: ONE_MORE in running.printed(), "warned")
                elif place:
                    time.sleep(0.2)
                if self.to == "the group":
                    os.killpg(running.process.pid, number)
                elif self.to == "clusterprof" or plain:
                    running.process.send_signal(number)
                else:
                    os.kill(running.launcher(), number)
            if len(self.signals) == 1 or running.ended_within(30):
                break  # else srun saw them over a second apart
        status = running.ends()
        status = status if status >= 0 else 128 - status
        # torchrun aborts now and then while it exits: a C++ thread of its own is not joined
        aborted = status == 128 + signal.SIGABRT
        return 1 if aborted and "without an active exception" in running.printed() else status


def program(ending: Ending, launcher: list[str]) -> list[str]:
    line = ["python", str(PROGRAMS / "ending.py"), "hang", str(ending.at)]
    return line[1:] if launcher[0] == "torchrun" else line


#: how a torchrun ends that is told to, and what its job prints: loading torch takes long
KNOWN = 1, ["rank 0 begins", "rank 0 hangs", "rank 1 begins", "rank 1 ends"]
Plain = Callable[[Ending, list[str], dict[str, str]], tuple[int, list[str]]]


@pytest.fixture(scope="session")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """How a job ends without clusterprof, and what it prints; the same wherever its window is."""
    ended: dict[tuple[str, bool, tuple[int, ...]], tuple[int, list[str]]] = {}

    def end(ending: Ending, launcher: list[str], env: dict[str, str]) -> tuple[int, list[str]]:
        key = (launcher[0], ending.to == "the group", ending.signals)
        if key not in ended:
            folder = tmp_path_factory.mktemp("plain")
            running = Running([*launcher, *program(ending, launcher)], env, folder / "out")
            running.wait_until(running.hangs, "hanging")
            status = ending.bring(running, launcher[0], plain=True)
            ended[key] = (status, words(running.printed()))
        return ended[key]

    return end


def check(
    ending: Ending,
    launcher: list[str],
    env: dict[str, str],
    workdir: Path,
    fault: Callable[..., None],
    plainly: Plain,
) -> None:
    """Bring the ending upon the job with and without us, and compare."""
    expected, expected_words = plainly(ending, launcher, env)
    ours = Running(
        command.clusterprof(
            [launcher[0], *OPTIONS, "--run-dir", workdir / "run", *launcher[1:], "--",
             *program(ending, launcher)]
        ),
        env, workdir / "out", workdir / "run",
    )  # fmt: skip
    ours.wait_until(ours.hangs, "hanging")
    if ending.at >= 20:
        home = ours.run / "ranks/00000/report.nsys-rep"
        ours.wait_until(home.exists, "home")
    began = time.monotonic()
    status = ending.bring(ours, launcher[0], plain=False)
    printed = ours.printed()
    seconds = time.monotonic() - began
    fault(f"{launcher[0]}: {ending}", expected, status, seconds, ours.state())
    assert status == expected or {status, expected} <= ending.statuses, printed
    assert words(printed) == expected_words, printed
    found = ours.state()
    where = "before" if ending.at < 10 else "inside" if ending.at < 20 else "whole"
    # Who brings the report may say that it is there only after it was collected.
    states = {ending.state, "captured"} if ending.state == "collected" else {ending.state}
    assert found["state"] in states, printed
    assert ending.reason in found.get("reason", ""), printed
    # A window that was closed for a signal ends between two steps, and is whole so far.
    assert ending.reason or window(found) == where, printed
    assert ("reason" in found) == (where != "whole"), found
    assert outcomes(ours.run) == {0: ending.state}, printed
    assert not ours.left()


ABORTED = frozenset({130, 137})
SRUN = [
    Ending("clusterprof", (TERM,), 15, "collected", "SIGTERM"),
    Ending("clusterprof", (INT, INT), 15, "collected", "SIGINT", ABORTED),
    Ending("the group", (TERM,), 15, "lost"),
]
#: other signals that go the same way, and other places of the window
LONG_SRUN = [
    Ending("clusterprof", (TERM,), 25, "collected"),
    Ending("clusterprof", (TERM,), 5, "lost"),
    Ending("clusterprof", (HUP,), 15, "collected", "SIGHUP"),
    Ending("the group", (INT, INT), 15, "lost", "", ABORTED),
    Ending("srun", (TERM,), 15, "lost"),
    Ending("srun", (INT, INT), 15, "lost", "", ABORTED),
]
TORCHRUN = [Ending("clusterprof", (TERM,), 15, "collected")]
LAUNCHER = ["torchrun", "--standalone", "--nproc-per-node=2"]
LONG_TORCHRUN = [
    Ending("clusterprof", (TERM,), 5, "lost"),
    Ending("clusterprof", (INT,), 15, "collected"),
    Ending("the group", (TERM,), 15, "collected"),
    Ending("the group", (HUP,), 25, "collected"),
    Ending("torchrun", (INT,), 15, "collected"),
]
MPIRUN = [Ending("clusterprof", (TERM,), 15, "collected")]
LONG_MPIRUN = [
    Ending("the group", (INT, INT), 15, "collected"),
    Ending("mpirun", (TERM,), 15, "collected"),
]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("ending", long_but(SRUN, LONG_SRUN), ids=str)
def test_an_srun_ends_as_it_would_have_ended(
    ending: Ending,
    workdir: Path,
    slurm: dict[str, str],
    fault: Callable[..., None],
    plainly: Plain,
) -> None:
    check(ending, ["srun", "-n2"], slurm, workdir, fault, plainly)


@pytest.mark.needs_torch
def test_a_torch_profiler_too_is_closed_between_two_steps_before_srun_kills(
    workdir: Path, slurm: dict[str, str], torch_process: Warm
) -> None:
    # The window is far longer than a signal is on its way, on a slow machine too.
    (workdir / "train.py").write_text(LOOP + "import time\nwhile True: iterate(1); time.sleep(0.2)")
    argv = command.clusterprof(
        ["srun", "--profiler=torch", "--ranks=0", "--steps=5:200", "--run-dir=run", "--no-merge",
         "-n1", "--", *torch_process.launcher(0), "train.py"]
    )  # fmt: skip
    running = Running(argv, slurm, workdir / "out")
    running.wait_for("capturing")
    running.process.send_signal(TERM)
    assert running.ends() == 137, running.printed()
    found = running.state()
    assert found["state"] == "collected", running.printed()
    assert 5 < found["step_end"] < 200, found
    assert all(fact in found["reason"] for fact in (str(found["step_end"]), "5:200", "SIGTERM"))
    assert (running.run / "ranks/00000/trace.json.gz").stat().st_size
    assert outcomes(running.run) == {0: "collected"}


@pytest.mark.usefixtures("scripted")
def test_one_interrupt_ends_no_srun(workdir: Path, slurm: dict[str, str]) -> None:
    argv = command.clusterprof(
        ["srun", *OPTIONS, "--run-dir=run", "--no-merge", "-n2", "--",
         "python", PROGRAMS / "ending.py", "wait", "15"]
    )  # fmt: skip
    running = Running(argv, slurm, workdir / "out")
    running.wait_until(running.waits, "waiting")
    running.process.send_signal(INT)
    running.wait_until(lambda: ONE_MORE in running.printed(), "warned")
    (workdir / "go").touch()
    assert running.ends() == 0, running.printed()
    assert running.state().get("whole"), running.printed()
    assert outcomes(running.run) == {0: "collected"}


@pytest.mark.needs_torch
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("ending", long_but(TORCHRUN, LONG_TORCHRUN), ids=str)
def test_a_torchrun_ends_as_it_would_have_ended(
    ending: Ending, workdir: Path, fault: Callable[..., None], plainly: Plain
) -> None:
    check(
        ending, LAUNCHER, {}, workdir, fault, (lambda *_: KNOWN) if ending in TORCHRUN else plainly
    )


@pytest.mark.long
@pytest.mark.needs_torch
def test_a_torchrun_without_clusterprof_ends_as_is_known(plainly: Plain) -> None:
    assert plainly(TORCHRUN[0], LAUNCHER, {}) == KNOWN


@pytest.mark.long
@pytest.mark.needs_torch
@pytest.mark.needs_nsys
def test_a_torchrun_with_a_real_nsys_ends_as_it_would_have_ended(
    workdir: Path, fault: Callable[..., None], plainly: Plain
) -> None:
    check(TORCHRUN[0], LAUNCHER, {}, workdir, fault, plainly)


@pytest.mark.needs_openmpi
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("ending", long_but(MPIRUN, LONG_MPIRUN), ids=str)
def test_an_mpirun_ends_as_it_would_have_ended(
    ending: Ending, workdir: Path, fault: Callable[..., None], plainly: Plain
) -> None:
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    check(ending, ["mpirun", "--oversubscribe", "-n", "2"], env, workdir, fault, plainly)
