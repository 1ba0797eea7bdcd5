"""File systems that are stalled or are very slow: the run directory's, and the node's own.

No step of any rank waits for them outside the window: where it did, the rank would not end before
they move again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from lab import command
from lab.disk import MOST_S, Disk, disk
from lab.endings import OPTIONS, PROGRAMS, Running, words
from lab.tiers import long_but
from lab.warm import Warm

from clusterprof.agent.nsys import START_VARIABLE

pytestmark = [
    pytest.mark.usefixtures("scripted"), pytest.mark.needs_openmpi, pytest.mark.needs_root,
]  # fmt: skip

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
        self,
        workdir: Path,
        run: Path,
        steps: Sequence[int],
        *options: str,
        start: Sequence[str] = ("python",),
    ) -> None:
        """`steps`: the words of `still.py`; `start`: what starts it as each rank."""
        self.workdir = workdir
        program = [*start, str(PROGRAMS / "still.py"), *map(str, steps)]
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

    def tasks_end(self, disk: Disk) -> None:
        """The disk is stalled, and stays so until mpirun has ended with its ranks."""
        mpirun = Path(f"/proc/{self.running.launcher()}")
        (self.workdir / "stalled").touch()
        self.running.wait_until(lambda: not alive(mpirun), "without tasks")
        assert all(self.has_ended(rank) for rank in (0, 1)), self.running.printed()
        assert disk.still, "the disk moves again: it was no test"
        disk.thaw()

    def has_ended(self, rank: int) -> bool:
        return f"rank {rank} ends" in self.running.printed()

    def check(self, what: str, fault: Fault, lost: str = "") -> None:
        """It ended as it would have. `lost`: why its report is."""
        assert self.running.ends() == 0, self.running.printed()
        found = self.running.state()
        fault(what, 0, 0, 0.0, found)
        assert words(self.running.printed()) == WORDS
        assert "Traceback" not in self.running.printed()
        # Where the writer is as late as whoever collects, either has the last word.
        states = ("lost",) if lost else ("captured", "collected")
        assert found["state"] in states, self.running.printed()
        assert lost in found.get("reason", ""), self.running.printed()


def alive(process: Path) -> bool:
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_no_rank_waits_for_a_run_directory_that_is_stalled(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    # Past the window, until after the end of both ranks; the step log is due meanwhile.
    job = Job(workdir, still.place / "run", [300])
    report = still.place / "run/ranks/00000/report.nsys-rep"
    job.comes_to(30)
    job.running.wait_until(report.exists, "home")
    still.freeze()
    job.tasks_end(still)
    job.check("the run directory is stalled after the window", fault)


@pytest.mark.long
def test_ranks_that_start_while_the_run_directory_is_stalled_train_all_the_same(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    wait = 'touch held; until [ -e go ]; do sleep 0.1; done; exec python "$@"'
    job = Job(workdir, still.place / "run", [60], start=["bash", "-c", wait, "bash"])
    job.running.wait_until((workdir / "held").exists, "starting")
    still.freeze()
    (workdir / "go").touch()
    job.tasks_end(still)
    job.check("the run directory is stalled when the ranks start", fault)


@pytest.mark.parametrize("how", long_but(["still"], ["slow"]))
def test_a_window_that_opens_and_closes_while_the_run_directory_is_stalled_or_very_slow(
    how: str, still: Disk, workdir: Path, fault: Fault
) -> None:
    job = Job(workdir, still.place / "run", [150, 20], "--steps=60:70")
    job.comes_to(20)
    still.freeze() if how == "still" else still.slow(MOST_S)
    job.tasks_end(still)
    what = "is stalled over the window" if how == "still" else "takes a second for each change"
    job.check(f"the run directory {what}", fault)


@pytest.mark.parametrize("how", long_but(["still"], ["slow"]))
def test_a_temporary_folder_that_is_stalled_delays_no_rank_and_a_slow_one_no_unprofiled_rank(
    how: str, still: Disk, workdir: Path, fault: Fault, torch_process: Warm
) -> None:
    temporary = still.place / "tmp"
    temporary.mkdir()
    start = ["env", f"TMPDIR={temporary}", *torch_process.launcher(0)]
    job = Job(workdir, workdir / "run", [150, 20], "--steps=60:70", "--profiler=torch", start=start)
    job.comes_to(20)
    # The agent waits a second for the folder of its report, and goes on without.
    still.freeze() if how == "still" else still.slow(MOST_S, change_s=0.25)
    (workdir / "stalled").touch()
    ending = (0, 1) if how == "still" else (1,)
    job.running.wait_until(lambda: all(map(job.has_ended, ending)), "at the end of its ranks")
    assert still.still, "the disk moves again: it was no test"
    still.thaw()
    what = "is stalled" if how == "still" else "takes 0.25 s for each change"
    lost = f"{temporary} does not answer" if how == "still" else ""
    job.check(f"TMPDIR {what}, torch.profiler", fault, lost)


def test_no_rank_waits_for_a_guard_whose_temporary_folder_is_stalled_inside_the_window(
    workdir: Path, fault: Fault
) -> None:
    with disk(512) as large:  # nsys is not started where there is little space
        temporary = large.place / "tmp"
        temporary.mkdir()
        job = Job(workdir, workdir / "run", [150, 65], "--steps=60:70",
                  start=["env", f"TMPDIR={temporary}", "python"])  # fmt: skip
        job.comes_to(60)
        job.running.wait_for("capturing")
        assert any(temporary.glob("clusterprof-*")), "it is no test"
        large.freeze()
        (workdir / "stalled").touch()
        job.running.wait_until(lambda: all(map(job.has_ended, (0, 1))), "at the end of its ranks")
        assert large.still, "the disk moves again: it was no test"
        large.thaw()
        job.check("TMPDIR is stalled inside the window, nsys", fault)


def test_a_trace_comes_home_though_the_run_directory_is_stalled_while_its_window_closes(
    still: Disk, workdir: Path, fault: Fault, torch_process: Warm
) -> None:
    # The folder for the trace is the node's, which answers; it is taken home once the disk moves.
    start = torch_process.launcher(0)
    job = Job(workdir, still.place / "run", [150, 20], "--steps=60:70", "--profiler=torch",
              start=start)  # fmt: skip
    job.comes_to(20)
    still.freeze()
    job.tasks_end(still)
    job.check("the run directory is stalled over the window, torch.profiler", fault)


def test_clusterprof_ends_with_its_job_where_the_run_directory_is_stalled(
    still: Disk, workdir: Path, fault: Fault
) -> None:
    # Long enough that it still runs when the report is home.
    job = Job(workdir, still.place / "run", [250])
    report = still.place / "run/ranks/00000/report.nsys-rep"
    job.comes_to(30)
    job.running.wait_until(report.exists, "home")
    still.freeze()
    (workdir / "stalled").touch()
    status = job.running.ends()
    assert still.still, "the disk moves again: it was no test"
    printed = job.running.printed()
    fault("clusterprof itself, the run directory is stalled", 0, status, 0.0, {})
    assert status == 0, printed
    assert "clusterprof collect" in printed
    still.thaw()
    assert not job.running.left()
