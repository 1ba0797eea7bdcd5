"""Run directories that fail under a job: deleted, read-only, slow to show what is in them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, Running, outcomes, state, words
from lab.tiers import long_but

pytestmark = pytest.mark.usefixtures("scripted")

#: for the table of endings, where no state can be read
GONE = {"state": "lost", "reason": "deleted"}
#: what a job of two ranks prints that takes its 30 steps
WORDS = ["rank 0 begins", "rank 0 ends", "rank 1 begins", "rank 1 ends"]


def says_deleted(printed: str) -> bool:
    """Whether a line of clusterprof's names the run directory `run` as deleted."""
    ours = [line.split() for line in printed.splitlines() if line.startswith("clusterprof: ")]
    return any({"run", "deleted"} <= set(line) for line in ours)


def own_mounts(mounts: str, at: str = "0") -> list[str | Path]:
    """The job's ranks in a mount namespace of their own, `mounts` made; waits after step `at`."""
    program = f"""
    run=$PWD/run
    {mounts}
    exec python {PROGRAMS}/ending.py wait {at}
    """
    return ["unshare", "--mount", "bash", "-euc", program]


def job(workdir: Path, slurm: dict[str, str], *program: str | Path) -> Running:
    argv = command.clusterprof(
        ["srun", *OPTIONS, "--run-dir=run", "--no-merge", "-n2", "--", *program]
    )
    return Running(argv, slurm, workdir / "out")


@pytest.mark.parametrize("at", long_but([15], [5, 25]))
def test_a_run_directory_that_is_deleted_hurts_no_one_and_is_named(
    at: int, workdir: Path, slurm: dict[str, str], slurm_state: Path, fault: Callable[..., None]
) -> None:
    # What was killed as a whole, in other tests, may have left some.
    reports = "*/clusterprof-*/report*"
    before = set((slurm_state / "local").glob(reports))
    running = job(workdir, slurm, "python", PROGRAMS / "ending.py", "wait", str(at))
    running.wait_until(lambda: "rank 0 waits" in running.printed(), "waiting")
    if at > 20:
        home = running.run / "ranks/00000/report.nsys-rep"
        running.wait_until(home.exists, "home")
    shutil.rmtree(running.run)
    (workdir / "go").touch()
    began = time.monotonic()
    status = running.ends()
    added_s = time.monotonic() - began - 0.02 * (30 - at)
    printed = running.printed()
    fault(f"run directory deleted after step {at}", 0, status, added_s, GONE)
    assert status == 0, printed
    assert [line for line in words(printed) if line != "rank 0 waits"] == WORDS
    assert says_deleted(printed), printed
    assert "Traceback" not in printed
    assert "error" not in printed
    assert not running.run.exists()
    assert not running.left()
    # A report holds the environment, and no one would look for it there.
    assert set((slurm_state / "local").glob(reports)) <= before


def test_a_run_directory_that_is_gone_before_the_ranks_start_is_named_by_them(
    run_clusterprof: Callable[..., Completed], workdir: Path, slurm: dict[str, str]
) -> None:
    program = f"rm -rf run; exec python {PROGRAMS}/ending.py none 0"
    done = run_clusterprof(
        ["srun", *OPTIONS, "--run-dir=run", "-n2", "--", "bash", "-c", program], env=slurm
    )
    assert done.returncode == 0, done
    assert words(done.stdout) == WORDS
    # Each rank and clusterprof itself: a line each.
    named = [line for line in done.stderr.splitlines() if line.startswith("clusterprof: ")]
    assert len(named) >= 3, done
    assert says_deleted(done.stderr), done
    assert "Traceback" not in done.stderr


def test_a_run_directory_that_the_ranks_cannot_write_hurts_no_one(
    workdir: Path, slurm: dict[str, str]
) -> None:
    mounts = 'mount --bind "$run" "$run"; mount -o remount,bind,ro "$run"'
    running = job(workdir, slurm, *own_mounts(mounts))
    assert running.ends() == 0, running.printed()
    printed = running.printed()
    assert words(printed) == WORDS
    assert [line for line in printed.splitlines() if str(running.run / "ranks") in line], printed
    assert outcomes(running.run) == {0: "lost"}
    assert "Traceback" not in printed
    assert not running.left()


def slow_filesystem(workdir: Path, slurm: dict[str, str]) -> Running:
    """A job whose nodes' files appear here once its report is home: its state, then the report."""
    there = workdir / "node"
    there.mkdir()
    running = job(workdir, slurm, *own_mounts(f'mount --bind "{there}" "$run/ranks"'))
    report = there / "00000/report.nsys-rep"
    running.wait_until(lambda: "rank 0 ends" in running.printed() and report.exists(), "done")
    running.wait_until(lambda: '"captured"' in (report.parent / "state.json").read_text(), "home")
    here = workdir / "run/ranks/00000"
    here.mkdir()
    shutil.copy(report.parent / "state.json", here)
    return running


@pytest.mark.long  # how long for: test_rundir
def test_a_report_that_a_shared_filesystem_shows_late_is_waited_for(
    workdir: Path, slurm: dict[str, str]
) -> None:
    running = slow_filesystem(workdir, slurm)
    running.wait_until(lambda: not running.runs("srun"), "without srun")
    shutil.copytree(workdir / "node", workdir / "run/ranks", dirs_exist_ok=True)
    assert running.ends() == 0, running.printed()
    assert outcomes(running.run) == {0: "collected"}
    assert state(running.run)["state"] == "collected"


def test_a_report_that_appears_too_late_is_found_afterwards(
    run_clusterprof: Callable[..., Completed], workdir: Path, slurm: dict[str, str]
) -> None:
    running = slow_filesystem(workdir, slurm)
    assert running.ends() == 0, running.printed()
    assert outcomes(running.run) == {0: "lost"}
    assert state(running.run)["late"]
    assert "clusterprof collect" in running.printed()
    report = workdir / "run/ranks/00000/report.nsys-rep"
    shutil.copy(workdir / "node/00000/report.nsys-rep", report)
    done = run_clusterprof(["collect", "--no-merge", "run"])
    assert done.returncode == 0, done
    assert state(running.run)["state"] == "collected"
    assert "rank 0: " in done.stderr


def test_a_file_in_the_place_of_the_run_directory_is_named_before_the_job_begins(
    run_clusterprof: Callable[..., Completed], workdir: Path
) -> None:
    (workdir / "run").write_text("mine")
    for place in ("run", "run/below"):
        done = run_clusterprof(["srun", f"--run-dir={place}", "-n1", "--", "true"])
        assert done.returncode == 5, done
        assert "Traceback" not in done.stderr
        assert "--run-dir" in done.stderr
    assert (workdir / "run").read_text() == "mine"
