"""Whatever nsys does, the training ends as it would have ended, and the state tells what happened.

An nsys by a script fails on each rank of a job in another way. No launcher is needed for that: a
program starts the ranks, with and without clusterprof.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from lab import command
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, RANKS, Running, outcomes, state, words
from lab.fakes import scripted_nsys

from clusterprof.agent.contracts import processes
from clusterprof.agent.nsys import START_VARIABLE

Cli = Callable[..., Completed]
Fault = Callable[..., None]

PROGRAM = ["python", PROGRAMS / "together.py"]
#: so many ranks at most
MOST = 6
#: what is left, and what makes a report of it
KEPT = ("clusterprof collect", "report.qdstrm")
#: for `together.py`: past its window it waits until its report is home
HOME = "25:run/ranks/{rank:05d}/report.nsys-rep"


class Case(NamedTuple):
    """One rank whose nsys does something: the words of its row in the table, and what is stated."""

    what: str
    #: by verb, see `scripted_nsys`
    faults: Mapping[str, str]
    state: str
    #: what its reason names
    facts: Sequence[str] = ()


class Job:
    """A job of one rank for each case; `run` runs it with and without clusterprof."""

    def __init__(self, workdir: Path, fault: Fault, run_clusterprof: Cli, plain: Completed) -> None:
        self.workdir = workdir
        self.fault = fault
        self.run_clusterprof = run_clusterprof
        self.plain = plain

    def run(
        self, cases: Sequence[Case], *more: str, start_s: int = 60, waits: Sequence[str] = ()
    ) -> list[dict[str, object]]:  # fmt: skip
        """Run it, and check what is so for each; returns the states.

        `start_s`: what nsys may take to start, and longer than 6 s at its end. `waits`: for what
        the program waits under clusterprof (see `together.py`).
        """
        faults = {
            f"{rank}:{verb}": lines
            for rank, case in enumerate(cases) for verb, lines in case.faults.items()
        }  # fmt: skip
        nsys = scripted_nsys(self.workdir / "nsys", faults)
        line = [RANKS, str(len(cases)), *PROGRAM]
        options = [
            f"--ranks=0-{len(cases) - 1}",
            f"--nsys={nsys}",
            *more,
            "--run-dir=run",
            "--no-merge",
        ]
        plain = self.plain
        done = self.run_clusterprof(
            ["run", *OPTIONS, *options, "--", *line, *waits], env={START_VARIABLE: str(start_s)}
        )
        assert done.returncode == plain.returncode == 3, done
        assert words(done.stdout) == words_of(plain, len(cases)), done
        run = self.workdir / "run"
        assert outcomes(run) == {n: case.state for n, case in enumerate(cases)}, done
        states = [state(run, rank) for rank in range(len(cases))]
        for case, stated in zip(cases, states, strict=True):
            alike = f"{case.what} (one job of {len(cases)})"
            added_s = done.seconds - plain.seconds
            self.fault(alike, plain.returncode, done.returncode, added_s, stated)
            assert stated["state"] == case.state, (stated, done)
            assert all(fact in stated.get("reason", "") for fact in case.facts), (stated, done)
            assert processes.of_session(stated.get("session", "no session")) == []
        return states


@pytest.fixture(scope="module")
def plain() -> Completed:
    """The program without clusterprof."""
    return command.run([RANKS, str(MOST), *PROGRAM])


def words_of(plain: Completed, ranks: int) -> list[str]:
    """What so many of its ranks printed, and how they ended."""
    return [line for line in words(plain.stdout) if int(line.split()[1]) < ranks]


@pytest.fixture
def job(workdir: Path, fault: Fault, run_clusterprof: Cli, plain: Completed, scripted: None) -> Job:
    return Job(workdir, fault, run_clusterprof, plain)


def test_an_nsys_that_starts_neither_program_nor_window_is_done_without(job: Job) -> None:
    job.run([
        Case("nsys is killed at its start", {"launch": "sys.exit(137)"}, "lost", ("137",)),
        Case("nsys starts nothing, status 0", {"launch": "sys.exit(0)"}, "lost", ("status 0",)),
        Case("nsys segfaults at its start", {"launch": "die(signal.SIGSEGV)"}, "lost",
             ("signal 11",)),
        Case("nsys start segfaults", {"start": "die(signal.SIGSEGV)"}, "lost",
             ("nsys start", "signal 11")),
        Case("nsys start does nothing, status 0", {"start": "sys.exit(0)"}, "lost", ("report",)),
    ])  # fmt: skip


@pytest.mark.long  # by when it is given up: test_guard_deadlines
def test_an_nsys_that_starts_slowly_has_the_time_that_it_is_given(job: Job) -> None:
    states = job.run([
        Case("nsys takes 7 s to start, and may take 60", {"launch": "time.sleep(7)"}, "collected"),
        Case("nsys takes 5 s to say its version, and may take 40", {"--version": "time.sleep(5)"},
             "collected"),
    ], waits=[HOME])  # fmt: skip
    assert all("reason" not in stated for stated in states)


@pytest.mark.long  # by when it is taken to spin: test_nsys_endings
def test_a_process_of_nsys_that_stays_at_a_full_core_is_ended(job: Job) -> None:
    spinning = 'leave_spinning(); say("no such session"); sys.exit(1)'
    job.run([
        Case("nsys start fails, a process stays at a full core", {"start": spinning}, "lost",
             ("nsys start", "status 1", "no such session")),
    ], start_s=10)  # fmt: skip


def test_a_stop_that_fails_is_tried_again(job: Job) -> None:
    # The program goes on until there was a second one.
    again = f"touch('{job.workdir}/again.{{}}')"
    twice, once = f"once() or {again.format(0)}; sys.exit(1)", "once() and die(signal.SIGSEGV)"
    job.run([
        Case("nsys stop fails twice", {"stop": twice}, "collected", ("nsys stop", "status 1")),
        Case("nsys stop segfaults once", {"stop": f"{once}; {again.format(1)}"}, "collected",
             ("nsys stop", "signal 11")),
    ], waits=["25:again.{rank}"])  # fmt: skip


def test_what_is_not_imported_is_kept_and_collect_finishes_it(job: Job) -> None:
    job.run([
        Case("the importer fails", {"import": "sys.exit(9)"}, "lost", ("status 9", *KEPT)),
        Case("the importer is killed", {"import": "die()"}, "lost", ("signal 9", *KEPT)),
    ])  # fmt: skip
    collect(job, [0, 1])


def collect(job: Job, ranks: Sequence[int]) -> None:
    """Have what these ranks kept imported."""
    run = job.workdir / "run"
    finished = job.run_clusterprof(["collect", run, "--no-merge"])
    assert finished.returncode == 0, finished
    for rank in ranks:
        folder = run / f"ranks/{rank:05d}"
        assert state(run, rank)["state"] == "collected"
        assert (folder / "report.nsys-rep").stat().st_size > 0
        assert not (folder / "report.qdstrm").exists()


def test_an_nsys_that_hangs_is_ended_whatever_it_was_doing(job: Job) -> None:
    # All hang for as long as they are let, side by side. What is left of that when a stop is given
    # up may be too little for an import.
    job.run([
        Case("nsys hangs at its start", {"launch": "hang()"}, "lost", ("30 s",)),
        Case("nsys start hangs", {"start": "hang()"}, "lost", ("nsys start", "16 s")),
        Case("nsys stop hangs", {"stop": "hang()", "--start-agent": "find_importer()"},
             "collected", ("nsys stop",)),
        Case("nsys' agent is stopped at its stop", {"stop": "stop_agent()"}, "lost", ("nsys",)),
        Case("the importer hangs", {"import": "hang()"}, "lost", KEPT),
        Case("the importer is stopped", {"import": "die(signal.SIGSTOP)"}, "lost", KEPT),
    ], start_s=30)  # fmt: skip
    collect(job, [4, 5])


def test_a_reduction_that_fails_leaves_the_report_to_the_merge(job: Job) -> None:
    killed, hung = job.run([
        Case("what makes the tables is killed, reports are not kept",
             {"export": "os.kill(os.getppid(), signal.SIGKILL)"}, "collected"),
        Case("what makes the tables hangs, reports are not kept", {"export": "hang()"},
             "collected"),
    ], "--reduce=node", "--keep-reports=none")  # fmt: skip
    assert "signal 9" in str(killed["not_reduced"])
    assert "in time" in str(hung["not_reduced"])
    home = sorted(str(path.relative_to(job.workdir)) for path in job.workdir.glob("*/ranks/*/re*"))
    assert home == ["run/ranks/00000/report.nsys-rep", "run/ranks/00001/report.nsys-rep"]
    assert job.run_clusterprof(["merge", "run"]).returncode == 0
    results = json.loads((job.workdir / "run/merged/results.json").read_text())
    assert [rank["rank"] for rank in results["ranks"]] == [0, 1]


#: which of a rank's nsys are killed when, by a word of their command line
KILLS = [
    ("capturing", ("launch",), signal.SIGKILL, "nsys is killed in the window, its agent is not"),
    ("capturing", ("--start-agent",), signal.SIGKILL, "nsys' agent is killed in the window"),
    ("finishing", ("launch", "--start-agent", "stop"), signal.SIGKILL,
     "all of nsys is killed at its stop"),
    ("capturing", ("launch", "--start-agent"), signal.SIGHUP, "nsys is hung up in the window"),
]  # fmt: skip


def kill(workdir: Path, fault: Fault, plain: Completed, *, by_itself: bool) -> None:
    """Kill the nsys of each rank while it is at work; `by_itself`: its stop does."""
    line = [RANKS, str(len(KILLS)), *PROGRAM]
    running = Running(
        command.clusterprof(["run", *OPTIONS, "--ranks=0-3", "--run-dir=run", "--no-merge", "--",
                             *line, "15:go.{rank}"]),
        {}, workdir / "out",
    )  # fmt: skip
    for rank, (when, which, number, _) in enumerate(KILLS):
        go = workdir / f"go.{rank}"
        running.wait_for("capturing", rank)
        running.wait_until(lambda rank=rank: collecting(running, rank), "collecting")
        if when == "finishing":
            go.touch()
            if by_itself:
                continue
            running.wait_for("finishing", rank)
        for pid in running.nsys(rank):
            if any(word in of_process(pid, "cmdline") for word in which):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        go.touch()
    status = running.ends()
    assert status == plain.returncode, running.printed()
    assert words(running.printed()) == words_of(plain, len(KILLS))
    for rank, (when, _, number, what) in enumerate(KILLS):
        stated = running.state(rank)
        fault(what, plain.returncode, status, 0.0, stated)
        assert stated["state"] in ("collected", "lost")
        if by_itself or when == "capturing":  # else a stop may be over before it is killed
            assert re.search(f"signal {number:d}|status", stated.get("reason", "")), stated
        assert processes.of_session(stated["session"]) == []


def collecting(running: Running, rank: int) -> bool:
    """Whether the rank's nsys has begun to write."""
    values = [value for pid in running.nsys(rank) for value in of_process(pid, "environ")]
    folders = {value[7:] for value in values if value.startswith("TMPDIR=")}
    return any(list(Path(folder).glob("nsys-report-*")) for folder in folders)


def of_process(pid: int, name: str) -> list[str]:
    """Its words, or its variables; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def test_an_nsys_that_is_killed_takes_nothing_of_the_program_along(
    workdir: Path, fault: Fault, plain: Completed, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = {f"{rank}:stop": "die_all()" for rank, row in enumerate(KILLS) if row[0] == "finishing"}
    nsys = scripted_nsys(workdir / "nsys", faults=stops)
    monkeypatch.setenv("PATH", str(nsys.parent), prepend=os.pathsep)
    kill(workdir, fault, plain, by_itself=True)


@pytest.mark.long
@pytest.mark.needs_nsys
def test_a_real_nsys_that_is_killed_takes_nothing_of_the_program_along(
    workdir: Path, fault: Fault, plain: Completed
) -> None:
    kill(workdir, fault, plain, by_itself=False)


@pytest.mark.usefixtures("scripted")
def test_a_guard_that_is_killed_takes_its_program_along(workdir: Path) -> None:
    line = [RANKS, "1", "python", PROGRAMS / "ending.py", "hang", "15"]
    running = Running(
        command.clusterprof(["run", *OPTIONS, "--run-dir=run", "--no-merge", "--", *line]),
        {}, workdir / "out",
    )  # fmt: skip
    running.wait_until(lambda: "rank 0 hangs" in running.printed(), "hanging")
    running.wait_for("capturing")
    program, guard = running.state()["program_pid"], running.state()["pid"]
    os.kill(guard, signal.SIGKILL)
    assert running.ends() == 137, running.printed()
    assert "rank 0 ended with 137" in running.printed()
    running.wait_until(lambda: not Path(f"/proc/{program}").exists(), "without its program")


@pytest.fixture
def on_some_nodes(slurm_state: Path) -> Iterator[Callable[[Path, str], Path]]:
    """A program that the launching host and the nodes n1 to n3 have at one place, n4 has not."""
    places = [slurm_state / "scratch", *(slurm_state / f"local/n{n}" for n in (1, 2, 3))]

    def put(program: Path, name: str) -> Path:
        for place in places:
            shutil.copy(program, place / name)
        return places[0] / name

    yield put
    for place in places:
        for name in place.glob("nsys-lab*"):
            name.unlink()


@pytest.mark.usefixtures("scripted")
def test_nodes_with_another_nsys_or_none_do_what_they_can_and_say_it(
    workdir: Path,
    slurm: dict[str, str],
    on_some_nodes: Callable[[Path, str], Path],
    fault: Fault,
    run_clusterprof: Cli,
) -> None:
    flag = "--trace-fork-before-exec"
    without = f"FLAGS['launch'] = FLAGS['launch'].replace('{flag[2:]}', 'none')"
    nsys = scripted_nsys(workdir / "nsys", {
        "1:--version": "say('NVIDIA Nsight Systems version 2099.1.1.1'); sys.exit()",
        "1:launch:--help": without, "1:launch": without,
        "2:--version": "say('no such library'); sys.exit(127)",
    }, imports=True)  # fmt: skip
    line = ["-N4", "-n4", "python", PROGRAMS / "together.py"]
    plain = command.run(["srun", *line], env=slurm)
    # Those that have a report do not end before it is home, and nsys stop with it.
    for rank in range(4):
        home = f"run/ranks/{rank:05d}/report.nsys-rep" if rank < 2 else "."
        (workdir / f"home.{rank}").symlink_to(home)
    options = [f"--nsys={on_some_nodes(nsys, 'nsys-lab')}", f"--nsys-arg={flag}=true"]
    done = run_clusterprof(
        ["srun", *OPTIONS, "--ranks=0-3", *options, "--run-dir=run", "--no-merge", *line[:2],
         "--", *line[2:], "25:home.{rank}"],
        env=slurm,
    )  # fmt: skip
    assert done.returncode == plain.returncode == 3, done
    assert words(done.stdout) == words(plain.stdout), done
    added_s = done.seconds - plain.seconds
    for rank, (what, wanted, facts) in enumerate([
        ("the node's nsys is the launching host's", "collected", ()),
        ("the node's nsys is another version", "collected", ("2099.1.1.1", "2022.4.2.1", flag)),
        ("the node's nsys does not run", "lost", ("nsys-lab", "no such library")),
        ("the node has no nsys", "lost", ("nsys-lab",)),
    ]):  # fmt: skip
        stated = state(workdir / "run", rank)
        fault(f"{what} (one job of 4)", plain.returncode, done.returncode, added_s, stated)
        assert stated["state"] == wanted, (stated, done)
        assert all(fact in stated.get("reason", "") for fact in facts), (stated, done)
        assert ("reason" in stated) == (rank > 0)
        assert processes.of_session(stated.get("session", "no session")) == []
    wanted_of = ["collected", "collected", "lost", "lost"]
    assert outcomes(workdir / "run") == dict(enumerate(wanted_of))
