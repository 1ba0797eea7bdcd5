"""However a rank ends: with its own status, its report saved where it could be, nothing left over.

The tasks of one job end each in its own way, without clusterprof and with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, Running, outcomes, state, window, words
from lab.tiers import few

Cli = Callable[..., Completed]
Fault = Callable[..., None]


@dataclass(frozen=True)
class Ending:
    how: str
    at: int
    status: int
    state: str
    window: str


ENDINGS = [
    Ending("exit", 5, 3, "lost", "before"),
    Ending("exit", 20, 3, "collected", "whole"),
    Ending("raise", 15, 1, "collected", "inside"),
    Ending("segv", 15, 139, "collected", "inside"),
    Ending("kill", 15, 137, "collected", "inside"),
    Ending("none", 0, 0, "collected", "whole"),
]
#: the same ends elsewhere, and one that nothing of Python sees
FURTHER = [
    Ending("exit", 15, 3, "collected", "inside"),
    Ending("_exit", 5, 4, "lost", "before"),
    Ending("_exit", 15, 4, "collected", "inside"),
    Ending("_exit", 25, 4, "collected", "whole"),
    Ending("kill", 5, 137, "lost", "before"),
    Ending("kill", 25, 137, "collected", "whole"),
]
#: what the real nsys is asked to show
REAL = {"is killed": [ENDINGS[4]], "others": [FURTHER[0], ENDINGS[3], ENDINGS[5]]}


def line(endings: list[Ending]) -> list[str | Path]:
    """A task for each, which srun starts, and whose shell says how it ended."""
    how = " ".join(f"{each.how}:{each.at}" for each in endings)
    script = f'python {PROGRAMS}/ending.py each {how}; s=$?; echo "rank $SLURM_PROCID: $s"; exit $s'
    return ["bash", "-c", script]


def statuses(done: Completed) -> dict[int, int]:
    """How each rank ended, by its shell."""
    rows = re.findall(r"^rank (\d+): (\d+)$", done.stdout, re.MULTILINE)
    return {int(rank): int(status) for rank, status in rows}


def check(endings: list[Ending], workdir: Path, slurm: dict[str, str], fault: Fault) -> None:
    """The job with and without us, rank by rank."""
    tasks = f"-n{len(endings)}"
    plain = command.run(["srun", tasks, *line(endings)], env=slurm)
    options = ["--ranks=all", "--run-dir=run", "--no-merge"]
    done = command.run(
        command.clusterprof(["srun", *OPTIONS, *options, tasks, "--", *line(endings)]), env=slurm
    )
    assert done.returncode == plain.returncode == max(each.status for each in endings), done
    assert words(done.stdout) == words(plain.stdout), done
    assert statuses(plain) == {rank: each.status for rank, each in enumerate(endings)}
    for rank, ending in enumerate(endings):
        stated = state(workdir / "run", rank)
        when = f"{ending.how} after step {ending.at}" if ending.at else "ends by itself"
        added_s = done.seconds - plain.seconds
        fault(when, statuses(plain)[rank], statuses(done)[rank], added_s, stated)
        assert statuses(done)[rank] == ending.status, done
        assert (stated["state"], window(stated)) == (ending.state, ending.window), (stated, done)
        # Why there is no more, and that it is for the program's own end.
        assert stated["program_status"] == ending.status, stated
        if ending.at == 20:  # it may end, and nsys with it, before its nsys stop does
            assert stated.get("reason", "nsys stop").startswith("nsys stop"), stated
        else:
            assert ("reason" in stated) == (ending.window != "whole"), stated
        report = workdir / f"run/ranks/{rank:05d}/report.nsys-rep"
        assert report.exists() == (ending.state == "collected")
    assert outcomes(workdir / "run") == {rank: each.state for rank, each in enumerate(endings)}


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("endings", few({"usual": ENDINGS, "further": FURTHER}, "usual"))
def test_each_rank_ends_as_it_would_have_ended(
    endings: list[Ending], workdir: Path, slurm: dict[str, str], fault: Fault
) -> None:
    check(endings, workdir, slurm, fault)


@pytest.mark.needs_nsys
@pytest.mark.parametrize("endings", few(REAL, "is killed"))
def test_each_rank_under_a_real_nsys_ends_as_it_would_have_ended(
    endings: list[Ending], workdir: Path, slurm: dict[str, str], fault: Fault
) -> None:
    check(endings, workdir, slurm, fault)


@pytest.mark.usefixtures("scripted")
def test_a_cancelled_job_keeps_its_reports_whether_a_window_is_open_or_over(
    workdir: Path, slurm: dict[str, str]
) -> None:
    # Rank 1 hangs after its window: its report is home before it is cancelled.
    argv = command.clusterprof(
        ["srun", *OPTIONS, "--ranks=0,1", "--run-dir=run", "--no-merge", "-n2", "--",
         "python", PROGRAMS / "ending.py", "each", "hang:15", "hang:25"]
    )  # fmt: skip
    running = Running(argv, slurm, workdir / "out")
    running.wait_for("capturing", 0)
    running.wait_until(lambda: "rank 0 hangs" in running.printed(), "hanging")
    running.wait_for("finishing", 1)
    running.wait_until((running.run / "ranks/00001/report.nsys-rep").exists, "home")
    command.run(["scancel", running.job()], env=slurm)
    assert running.ends() == 143, running.printed()
    for rank, where in enumerate(("inside", "whole")):
        assert state(running.run, rank)["state"] == "collected", running.printed()
        assert window(state(running.run, rank)) == where
    assert not running.left()
