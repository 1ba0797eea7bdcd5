"""However a rank ends: with its own status, its report saved where it could be, nothing left over.

The tasks of one job end each in its own way, without clusterprof and with it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, RANKS, Running, outcomes, state, window, words
from lab.tiers import few

from clusterprof.agent.contracts import processes

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


def last_lines(printed: str) -> dict[str, str]:
    """What the last four lines of a run say, by their first words."""
    lines = [line.removeprefix("clusterprof: ") for line in printed.splitlines()[-4:]]
    texts = {
        name: text.strip() for name, _, text in (line.strip().partition(":") for line in lines)
    }
    assert [*texts] == ["ended", "saved", "verdict", "next"], printed
    return texts


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
        assert ("ended_ns" in stated) == (ending.status != 0), stated
        assert stated.get("exception") == ("RuntimeError" if ending.how == "raise" else None)
        if ending.at == 20:  # it may end, and nsys with it, before its nsys stop does
            assert stated.get("reason", "nsys stop").startswith("nsys stop"), stated
        else:
            assert ("reason" in stated) == (ending.window != "whole"), stated
        report = workdir / f"run/ranks/{rank:05d}/report.nsys-rep"
        assert report.exists() == (ending.state == "collected")
    assert outcomes(workdir / "run") == {rank: each.state for rank, each in enumerate(endings)}
    assert f"; the job's status is {done.returncode}" in last_lines(done.stderr)["ended"]
    assert last_lines(done.stderr)["next"] == "clusterprof collect run"


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


#: no rank is profiled, none has a guard, and none torch
PLAIN = ["run", "--profiler=none", "--steps=3:6", "--step-on=loop:step", "--run-dir=run"]

KILLED = r"killed( by SIGKILL|, or by os\._exit)"
EXITED = "with status 3, after 12 steps; the job's status is 3|with status 3, after 30 steps"


@pytest.mark.parametrize(
    ("how", "ended"),
    [
        ("raise:15", "rank 1 first, by RuntimeError, after 15 steps; the job's status is 1"),
        # its parent may have asked for its status first
        ("kill:25", f"rank 1 first, {KILLED}, after at least \\d+ steps; the job's status is 137"),
        ("exit:12", f"(rank 1 first, )?({EXITED})"),
        ("none:0", "with status 0, after 30 steps"),
    ],
)  # fmt: skip
def test_the_last_lines_name_the_rank_that_ended_its_job(
    how: str, ended: str, run_clusterprof: Cli, workdir: Path
) -> None:
    program = ["python", PROGRAMS / "ending.py", "each", "none:0", how]
    done = run_clusterprof([*PLAIN, "--", RANKS, "2", *program])
    last = last_lines(done.stderr)
    assert re.fullmatch(ended, last["ended"]), done
    assert last["saved"] == "the steps of 2 of 2 ranks, no flight recorder, in run"
    assert last["verdict"].startswith("none: rank 0: "), last


@pytest.mark.parametrize(
    ("program", "status", "next_step"),
    [
        (
            ["python", "trian.py"],
            2,
            "there is no file trian.py here; with the right name: clusterp",
        ),
        (["python", "-c", "import no_such_module"], 1, "once that is repaired: clusterprof run "),
        (["true"], 0, "if the program is Python that keeps PYTHONPATH, and steps without a torch"),
    ],
)
def test_a_program_that_never_trains_is_told_so(
    program: list[str], status: int, next_step: str, run_clusterprof: Cli, workdir: Path
) -> None:
    done = run_clusterprof(["run", "--run-dir=run", "--", *program])
    assert done.returncode == status
    last = last_lines(done.stderr)
    assert f"with status {status}, before a rank trained" in last["ended"]
    assert last["verdict"].startswith("none: no rank ")
    assert last["next"].startswith(next_step)


def test_an_interrupted_job_says_so_and_what_it_can_still_become(workdir: Path) -> None:
    program = ["python", PROGRAMS / "ending.py", "wait", "15"]
    argv = command.clusterprof([*PLAIN, "--", *program])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    running = Running(argv, alone, workdir / "out")
    running.wait_until(lambda: "rank 0 waits" in running.printed(), "waiting")
    os.killpg(running.process.pid, signal.SIGINT)
    status = running.ends()
    last = last_lines(running.printed())
    assert last["ended"] == f"by SIGINT, after 15 steps; the job's status is {status}"
    assert last["next"].startswith("clusterprof run ")
    assert not running.left()


@pytest.mark.parametrize(("how", "status"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_the_status_of_a_process_that_has_ended_is_known_until_its_parent_asks(
    how: str, status: int
) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {how}"], stdin=subprocess.PIPE) as process:
        assert processes.last_status(process.pid) is None
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert processes.last_status(process.pid) == status
    assert processes.last_status(process.pid) == processes.GONE
