"""File systems that are stalled or are very slow: the run directory's, and the node's own.

No step of any rank waits for them outside the window, and every rank ends in time.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import command
from lab.disk import MOST_S, Disk, disk
from lab.endings import OPTIONS, PROGRAMS, Running, words

from clusterprof.agent.nsys import START_VARIABLE
from clusterprof.collect.outcomes import PATIENCE_S

pytestmark = [
    pytest.mark.usefixtures("scripted"), pytest.mark.needs_openmpi, pytest.mark.needs_root,
]  # fmt: skip

#: A step takes 20 ms.
LONGEST_NS = 2_000_000_000
WORDS = ["rank 0 begins", "rank 0 ends", "rank 1 begins", "rank 1 ends"]

#: Open MPI will not start as root unless it is told to.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
#: nsys may take its time on a busy machine, and all together less than a disk is stalled for
ENVIRONMENT = {**OPEN_MPI, START_VARIABLE: "40"}

Fault = Callable[..., None]


@pytest.fixture
def still() -> Iterator[Disk]:
    with disk() as made:
        yield made


class Job:
    """Two ranks of `still.py`, rank 0 profiled; what is asked for happens after some step."""

    def __init__(
        self, workdir: Path, run: Path, steps: int, *options: str, tmp: str = "", held: bool = False
    ) -> None:
        """`tmp`: their TMPDIR, with torch; `held`: they wait for the file `go` to start."""
        self.workdir = workdir
        program = ["python", str(PROGRAMS / "still.py"), str(steps)]
        if tmp:
            program = ["env", f"TMPDIR={tmp}", *program, "torch"]
        if held:
            wait = "touch held; until [ -e go ]; do sleep 0.1; done; exec"
            program = ["bash", "-c", f"{wait} {shlex.join(program)}"]
        self.running = Running(
            command.clusterprof(
                ["mpirun", *OPTIONS, *options, "--run-dir", run, "--no-merge", "--oversubscribe",
                 "-n", "2", "--", *program]
            ),
            ENVIRONMENT, workdir / "out", run,
        )  # fmt: skip

    def comes_to(self, count: int) -> None:
        """Wait until both ranks have taken so many steps."""
        marks = [self.workdir / f"at.{rank}.{count}" for rank in (0, 1)]
        self.running.wait_until(lambda: all(mark.exists() for mark in marks), f"at step {count}")

    def tasks_end(self) -> float:
        """The disk is stalled: wait until mpirun has ended; returns how long after the programs."""
        mpirun = Path(f"/proc/{self.running.launcher()}")
        (self.workdir / "stalled").touch()
        marks = [self.workdir / f"{rank}.json" for rank in (0, 1)]
        self.running.wait_until(lambda: all(mark.exists() for mark in marks), "at its end")
        self.running.wait_until(lambda: not alive(mpirun), "without tasks")
        return time.monotonic() - max(self.stated(rank)["ended"] for rank in (0, 1))

    def stated(self, rank: int) -> dict[str, float]:
        stated: dict[str, float] = json.loads((self.workdir / f"{rank}.json").read_text())
        return stated

    def check(self, what: str, added_s: float, fault: Fault) -> None:
        """It ended as it would have, and no step was delayed."""
        assert self.running.ends() == 0, self.running.printed()
        found = self.running.state()
        fault(what, 0, 0, added_s, found)
        assert words(self.running.printed()) == WORDS
        assert "Traceback" not in self.running.printed()
        # Where the writer is as late as whoever collects, either has the last word.
        assert found["state"] in ("captured", "collected"), self.running.printed()


def alive(process: Path) -> bool:
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_no_rank_waits_for_a_run_directory_that_is_stalled(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    # Past the window, until after the end of both ranks; the step log is due meanwhile.
    job = Job(workdir, still.place / "run", 300)
    report = still.place / "run/ranks/00000/report.nsys-rep"
    job.comes_to(30)
    job.running.wait_until(report.exists, "home")
    still.freeze()
    added_s = job.tasks_end()
    assert still.still, "the disk moves again: it was no test"
    still.thaw()
    job.check("the run directory is stalled after the window", added_s, fault)
    assert max(job.stated(rank)["longest_ns"] for rank in (0, 1)) < LONGEST_NS


def test_ranks_that_start_while_the_run_directory_is_stalled_train_all_the_same(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    job = Job(workdir, still.place / "run", 60, held=True)
    job.running.wait_until((workdir / "held").exists, "starting")
    still.freeze()
    (workdir / "go").touch()
    added_s = job.tasks_end()
    assert still.still, "the disk moves again: it was no test"
    still.thaw()
    job.check("the run directory is stalled when the ranks start", added_s, fault)
    assert job.stated(1)["longest_ns"] < LONGEST_NS, "rank 1 has no window"


def test_a_window_that_opens_and_closes_while_the_run_directory_is_stalled(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    job = Job(workdir, still.place / "run", 150, "--steps=60:70")
    job.comes_to(20)
    still.freeze()
    added_s = job.tasks_end()
    time.sleep(PATIENCE_S + 1)
    assert still.still, "the disk moves again: it was no test"
    still.thaw()
    job.check("the run directory is stalled over the window", added_s, fault)
    assert job.stated(1)["longest_ns"] < LONGEST_NS, "rank 1 has no window"


def test_a_very_slow_run_directory_is_waited_for_by_no_one(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    job = Job(workdir, still.place / "run", 150, "--steps=60:70")
    job.comes_to(20)
    still.slow(MOST_S)
    added_s = job.tasks_end()
    assert still.still
    still.thaw()
    job.check("a run directory that takes a second for each change", added_s, fault)
    assert job.stated(1)["longest_ns"] < LONGEST_NS


@pytest.mark.parametrize("how", ["still", "slow"])
def test_a_temporary_folder_that_is_stalled_or_is_slow_delays_no_unprofiled_rank(
    how: str, still: Disk, workdir: Path, fault: Fault
) -> None:
    temporary = still.place / "tmp"
    temporary.mkdir()
    job = Job(
        workdir, workdir / "run", 150, "--steps=60:70", "--profiler=torch", tmp=str(temporary)
    )
    job.comes_to(20)
    if how == "still":
        still.freeze(20)
    else:
        # The agent waits a second for the folder of its report.
        still.slow(60, change_s=0.25)
    added_s = job.tasks_end()
    still.thaw()
    what = "is stalled" if how == "still" else "takes 0.25 s for each change"
    job.check(f"TMPDIR {what}, torch.profiler", added_s, fault)
    assert job.stated(1)["longest_ns"] < LONGEST_NS


def test_clusterprof_ends_with_its_job_where_the_run_directory_is_stalled(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    # Long enough that it still runs when the report is home.
    job = Job(workdir, still.place / "run", 250)
    report = still.place / "run/ranks/00000/report.nsys-rep"
    job.comes_to(30)
    job.running.wait_until(report.exists, "home")
    still.freeze()
    (workdir / "stalled").touch()
    status = job.running.ends()
    added_s = time.monotonic() - max(job.stated(rank)["ended"] for rank in (0, 1))
    assert still.still, "the disk moves again: it was no test"
    printed = job.running.printed()
    fault("clusterprof itself, the run directory is stalled", 0, status, added_s, {})
    assert status == 0, printed
    assert "clusterprof collect" in printed
    still.thaw()
    assert not job.running.left()
