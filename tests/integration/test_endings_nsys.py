"""Whatever nsys does, the training ends as it would have ended, and the state tells what happened.

Each job is run with and without clusterprof, on the test Slurm with a real nsys; where that cannot
be made to show an ending, one that wraps it fails on some ranks, each in another way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, Running, allowed_s, outcomes, state, words
from lab.fakes import faulty_importer, faulty_nsys

Cli = Callable[..., Completed]
Fault = Callable[..., None]

pytestmark = pytest.mark.needs_nsys

LINE = ["-N4", "-n4", "python", PROGRAMS / "together.py"]
HANG = "exec sleep 600"
#: what is left, and what makes a report of it
KEPT = ("clusterprof collect", "report.qdstrm")


def nsys() -> Path:
    """The real one."""
    found = shutil.which("nsys")
    assert found
    return Path(found)


def importer() -> Path:
    """The real one's QdstrmImporter, where Debian has it or NVIDIA."""
    places = (nsys().resolve().parents[1], Path("/usr/lib/nsight-systems"))
    return next(
        path for each in places if (path := each / "host-linux-x64/QdstrmImporter").exists()
    )


@pytest.fixture(scope="module")
def plain(slurm_state: Path) -> Completed:
    """The job as it ends without us."""
    env = {"SLURM_CONF": str(slurm_state / "slurm.conf")}
    done = command.run(["srun", *LINE], env=env)
    assert done.returncode == 3, done
    return done


class Job:
    """The job under a faulty nsys, ended; `faults` are the words that its table has."""

    def __init__(self, plain: Completed, fault: Fault, slurm: Mapping[str, str]) -> None:
        self.plain = plain
        self.fault = fault
        self.slurm = slurm

    def run(
        self,
        workdir: Path,
        nsys: Path,
        expected: Mapping[int, tuple[str, str, tuple[str, ...]]],
        more: tuple[str, ...] = (),
        start_s: int = 30,
    ) -> None:
        """Run it; `expected`: each rank's words for the table, its state, what its reason names.

        `start_s`: what nsys may take to start, and longer than 6 s at its end. It is enough for one
        that works on a busy machine; one that hangs is noticed much sooner.
        """
        env = {**self.slurm, "CLUSTERPROF_NSYS_START_S": str(start_s)}
        at = OPTIONS.index("0")
        options = [*OPTIONS[:at], ",".join(map(str, expected)), *OPTIONS[at + 1 :]]
        count = LINE.index("python")
        done = command.run(
            command.clusterprof(
                ["srun", *options, f"--nsys={nsys}", *more, "--run-dir=run", "--no-merge",
                 *LINE[:count], "--", *LINE[count:]]
            ),
            env=env,
        )  # fmt: skip
        added = done.seconds - self.plain.seconds
        assert done.returncode == self.plain.returncode, done
        assert words(done.stdout) == words(self.plain.stdout), done
        assert added < allowed_s(env), done
        states = {rank: wanted for rank, (_, wanted, _) in expected.items()}
        assert outcomes(workdir / "run") == states, done
        for rank, (what, wanted, facts) in expected.items():
            found = state(workdir / "run", rank)
            assert found["state"] == wanted, (found, done)
            assert all(fact in found.get("reason", "") for fact in facts), (found, done)
            alike = f"{what} (one job of {len(expected)})"
            self.fault(alike, self.plain.returncode, done.returncode, added, found)
            assert of_session(found.get("session", "no session")) == []


@pytest.fixture
def job(plain: Completed, fault: Fault, slurm: dict[str, str]) -> Job:
    return Job(plain, fault, slurm)


def of_session(name: str) -> list[tuple[int, list[str]]]:
    """The processes that have this session in their command line: pid and words."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if name.encode() in line:
            found.append((int(entry.name), line.decode(errors="replace").split("\0")))
    return found


def test_an_nsys_that_does_not_start_the_program_is_done_without(workdir: Path, job: Job) -> None:
    # As soon as it is nsys, long before it starts anything.
    killed = (
        '"$real" "$@" & while [ /proc/$!/exe -ef /proc/$$/exe ]; do :; done; kill -9 $!; exit 137'
    )
    fake = faulty_nsys(workdir / "nsys", nsys(), {
        (0, "launch"): killed, (1, "launch"): "exit 0", (2, "launch"): "kill -SEGV $$",
        (3, "launch"): HANG,
    })  # fmt: skip
    job.run(workdir, fake, {
        0: ("nsys is killed at its start", "lost", ("137",)),
        1: ("nsys starts nothing, status 0", "lost", ("status 0",)),
        2: ("nsys segfaults at its start", "lost", ("signal 11",)),
        3: ("nsys hangs at its start", "lost", ("10 s",)),
    }, start_s=10)  # fmt: skip


def test_an_nsys_that_starts_slowly_has_the_time_that_it_is_given(workdir: Path, job: Job) -> None:
    fake = faulty_nsys(workdir / "nsys", nsys(), {
        (0, "launch"): "sleep 7", (1, "--version"): "sleep 5",
    })  # fmt: skip
    job.run(workdir, fake, {
        0: ("nsys takes 7 s to start, and may take 60", "collected", ()),
        1: ("nsys takes 5 s to say its version, and may take 40", "collected", ()),
    })  # fmt: skip
    assert all("reason" not in state(workdir / "run", rank) for rank in (0, 1))


def test_a_window_that_nsys_does_not_open_is_lost_and_the_training_goes_on(
    workdir: Path, job: Job
) -> None:
    spinner = "trap : TERM; while :; do :; done"
    spinning = (
        f'(exec -a nsys bash -c "{spinner}" nsys "$2") & echo no such session >&2; exit 1'
    )  # fmt: skip
    fake = faulty_nsys(workdir / "nsys", nsys(), {
        (0, "start"): spinning, (1, "start"): "kill -SEGV $$",
        (2, "start"): HANG, (3, "start"): "exit 0",
    })  # fmt: skip
    job.run(workdir, fake, {
        0: ("nsys start fails, a process stays at a full core", "lost",
            ("nsys start", "status 1", "no such session")),
        1: ("nsys start segfaults", "lost", ("nsys start", "signal 11")),
        2: ("nsys start hangs", "lost", ("nsys start", "16 s")),
        3: ("nsys start does nothing, status 0", "lost", ("report",)),
    })  # fmt: skip


def test_a_stop_that_fails_is_tried_again_and_one_that_hangs_is_ended(
    workdir: Path, job: Job
) -> None:
    once = "[ -e $TMPDIR/once ] || { touch $TMPDIR/once; kill -SEGV $$; }"
    stopped = 'kill -STOP $(pgrep -f -- "--session-name=${2#*=}")'
    fake = faulty_nsys(workdir / "nsys", nsys(), {
        (0, "stop"): "exit 1", (1, "stop"): once, (2, "stop"): HANG, (3, "stop"): stopped,
    })  # fmt: skip
    job.run(workdir, fake, {
        0: ("nsys stop fails twice", "collected", ("nsys stop", "status 1")),
        1: ("nsys stop segfaults once", "collected", ("nsys stop", "signal 11")),
        2: ("nsys stop hangs", "collected", ("nsys stop",)),
        3: ("nsys' agent is stopped at its stop", "lost", ("nsys",)),
    })  # fmt: skip


def test_what_is_not_imported_in_time_is_kept_and_collect_finishes_it(
    workdir: Path, job: Job, run_clusterprof: Cli
) -> None:
    fake = faulty_nsys(workdir / "nsys", nsys(), {})
    stopped = '"$real" "$@" & kill -STOP $!; wait'
    faulty_importer(workdir / "nsys", importer(), {
        0: "exit 9", 1: HANG, 2: stopped, 3: "kill -KILL $$",
    })  # fmt: skip
    job.run(workdir, fake, {
        0: ("the importer fails", "lost", ("status 9", *KEPT)),
        1: ("the importer hangs", "lost", KEPT),
        2: ("the importer is stopped", "lost", KEPT),
        3: ("the importer is killed", "lost", ("signal 9", *KEPT)),
    })  # fmt: skip
    finished = run_clusterprof(["collect", "run", "--no-merge"])
    assert finished.returncode == 0, finished
    for rank in range(4):
        folder = workdir / f"run/ranks/{rank:05d}"
        assert state(workdir / "run", rank)["state"] == "collected"
        assert (folder / "report.nsys-rep").stat().st_size > 0
        assert not (folder / "report.qdstrm").exists()


def test_a_reduction_that_fails_leaves_the_report_to_the_merge(
    workdir: Path, job: Job, run_clusterprof: Cli
) -> None:
    fake = faulty_nsys(workdir / "nsys", nsys(), {
        (0, "export"): "kill -9 $PPID", (1, "export"): HANG,
    })  # fmt: skip
    job.run(workdir, fake, {
        0: ("what makes the tables is killed, reports are not kept", "collected", ()),
        1: ("what makes the tables hangs, reports are not kept", "collected", ()),
        2: ("tables are made on the node, reports are not kept", "collected", ()),
    }, ("--reduce=node", "--keep-reports=none"))  # fmt: skip
    run = workdir / "run"
    assert "signal 9" in state(run, 0)["not_reduced"]
    assert "in time" in state(run, 1)["not_reduced"]
    assert "not_reduced" not in state(run, 2)
    there = sorted(str(each.relative_to(run)) for each in run.glob("ranks/*/re*"))
    assert there == [f"ranks/0000{each}" for each in ("0/report.nsys-rep", "1/report.nsys-rep",
                                                      "2/reduced")]  # fmt: skip
    assert run_clusterprof(["merge", "run"]).returncode == 0
    ranks = json.loads((run / "merged/results.json").read_text())["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1, 2]


def test_a_real_nsys_that_is_killed_takes_nothing_of_the_program_along(
    workdir: Path, slurm: dict[str, str], slurm_state: Path, plain: Completed, fault: Fault
) -> None:
    count = LINE.index("python")
    options = ["0,1,2" if each == "0" else each for each in OPTIONS]
    running = Running(
        command.clusterprof(["srun", *options, "--run-dir=run", "--no-merge", *LINE[:count], "--",
                             *LINE[count:], "wait"]),
        slurm, workdir / "out",
    )  # fmt: skip
    began = time.monotonic()
    kills = [
        (0, "capturing", ("launch",), "nsys is killed in the window, its agent is not"),
        (1, "capturing", ("--start-agent",), "nsys' agent is killed in the window"),
        (2, "finishing", ("launch", "--start-agent", "stop"), "all of nsys is killed at its stop"),
    ]
    (workdir / "go.3").touch()
    for rank, when, which, _ in kills:
        go = workdir / f"go.{rank}"
        running.wait_for("capturing", rank)
        stream = f"local/n{rank + 1}/clusterprof-*/nsys/nsys-report-*"
        running.wait_until(lambda stream=stream: list(slurm_state.glob(stream)) != [], "collecting")
        if when == "finishing":
            go.touch()
            running.wait_for("finishing", rank)
        for pid, line in of_session(running.state(rank)["session"]):
            if line[0].endswith("nsys") and any(word in line for word in which):
                os.kill(pid, signal.SIGKILL)
        go.touch()
    assert running.ends() == plain.returncode, running.printed()
    added = time.monotonic() - began - plain.seconds
    assert added < allowed_s()
    assert words(running.printed()) == words(plain.stdout)
    for rank, _, _, what in kills:
        found = running.state(rank)
        fault(what, plain.returncode, plain.returncode, added, found)
        assert found["state"] in ("collected", "lost")
        assert re.search("signal 9|status", found["reason"]), found
        assert of_session(found["session"]) == []


@pytest.fixture
def on_some_nodes(slurm_state: Path) -> Iterator[Callable[[Path, str], Path]]:
    """A program that the launching host and the nodes n1 to n3 have at one place, n4 has not."""
    places = [slurm_state / "scratch", *(slurm_state / f"local/n{each}" for each in (1, 2, 3))]

    def put(program: Path, name: str) -> Path:
        for place in places:
            shutil.copy(program, place / name)
        return places[0] / name

    yield put
    for place in places:
        for name in place.glob("nsys-lab*"):
            name.unlink()


def test_nodes_with_another_nsys_or_none_do_what_they_can_and_say_it(
    workdir: Path, job: Job, on_some_nodes: Callable[[Path, str], Path]
) -> None:
    flag = "--trace-fork-before-exec"
    fake = faulty_nsys(workdir / "nsys", nsys(), {
        (1, "--version"): "echo NVIDIA Nsight Systems version 2099.1.1.1; exit",
        (1, "launch:--help"): f'"$real" launch --help | sed s/{flag}/--none/; exit',
        (1, "launch"): f'case "$*" in *{flag}*) echo unrecognised option >&2; exit 1;; esac',
        (2, "--version"): "echo no such library; exit 127",
    })  # fmt: skip
    job.run(workdir, on_some_nodes(fake, "nsys-lab"), {
        0: ("the node's nsys is the launching host's", "collected", ()),
        1: ("the node's nsys is another version", "collected", ("2099.1.1.1", version(), flag)),
        2: ("the node's nsys does not run", "lost", ("nsys-lab", "no such library")),
        3: ("the node has no nsys", "lost", ("nsys-lab",)),
    }, (f"--nsys-arg={flag}=true",))  # fmt: skip
    assert "reason" not in state(workdir / "run", 0)


def version() -> str:
    """The real one's."""
    printed = command.run([nsys(), "--version"]).stdout
    return re.findall(r"\d{4}[.\d]+", printed)[0]
