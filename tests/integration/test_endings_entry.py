"""What goes on in the program's own process: its signals, and our own errors, are not in its way.

The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import OPTIONS as NSYS, PROGRAMS, Running, check_as_without_us, state, state_if_any
from lab.stub import FOLDER

import clusterprof
from clusterprof.agent.contracts import processes

Fault = Callable[..., None]

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
OPTIONS = ["--ranks=0", "--steps=5:15", "--run-dir=run", "--no-merge", "--profiler=torch"]

#: Trains; a signal has it save a checkpoint and leave with 75.
PREEMPTED = """
import signal, sys

class Preempted(Exception):
    pass

def preempt(*_):
    raise Preempted

signal.signal(signal.SIGUSR1, preempt)
import torch
optimizer = torch.optim.SGD()
try:
    for step in range(25):
        optimizer.step()
except Preempted:
    print("checkpoint saved after", step)
    sys.exit(75)
print("trained on")
"""
#: Trains, once the rest has come true.
TRAINS = """
import os, resource, shutil
{first}
import torch
optimizer = torch.optim.SGD()
for step in range(25):
    optimizer.step()
print("trained")
"""
#: a clock that is beyond what fits into a number of eight bytes, as the agent sees it
BEYOND = """
import sys
def beyond():
    if agent := sys.modules.get("_clusterprof_agent.rank.steps"):
        agent.counter._begin = 1 << 63
"""
#: A step that is a method of a class: what it is called with is what it has always been.
STEPS = """
class Trainer:
    @{kind}
    def step(*given):
        return given

expected = Trainer.step(1)

def step():
    assert Trainer.step(1) == expected, Trainer.step
"""


def trained(workdir: Path, program: str, *before: str, **env: str) -> Completed:
    """The program as one rank of a job, with clusterprof where `before` has it."""
    (workdir / "train.py").write_text(program)
    path = os.pathsep.join(filter(None, [str(FOLDER), env.pop("PYTHONPATH", "")]))
    words = [*before, "python", "train.py"]
    return command.run(words, env={**RANK, "PYTHONPATH": path, **env})


def with_us(*more: str) -> list[str]:
    return command.clusterprof(["run", *OPTIONS, *more, "--"])


def test_a_program_that_leaves_by_itself_while_our_profiler_starts_was_not_killed(
    workdir: Path, fault: Fault
) -> None:
    leaves = PREEMPTED.replace("    raise Preempted", "    sys.exit(75)")
    done = trained(workdir, leaves, *with_us(), EVENTS="start")
    found = state(workdir / "run")
    fault("sys.exit in our profiler's start", 75, done.returncode, 0.0, found)
    assert done.returncode == 75, (done, found)
    assert (found["state"], "the program ended" in found["reason"]) == ("collected", True), found


@pytest.mark.parametrize("event", ["start", "stop", "save"])
def test_a_preemption_that_comes_while_our_profiler_is_at_work_saves_its_checkpoint(
    workdir: Path, fault: Fault, event: str
) -> None:
    done = trained(workdir, PREEMPTED, *with_us(), EVENTS=event)
    found = state(workdir / "run")
    fault(f"preempted in our profiler's {event}", 75, done.returncode, 0.0, found)
    at = 4 if event == "start" else 14
    assert (done.returncode, done.stdout) == (75, f"checkpoint saved after {at}\n"), (done, found)
    assert "Traceback" not in done.stderr, done
    assert found["state"] == "collected", found
    assert ("reason" in found) == (event == "start"), found


#: what is wrong with us when the program imports torch
WRONG = {
    "one descriptor left": "free = os.open('/', os.O_RDONLY)\nos.close(free)\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))",
    "our files are gone": "shutil.rmtree(os.environ['AGENT'])",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_rank_trains_whatever_is_wrong_with_us(workdir: Path, fault: Fault, what: str) -> None:
    program = TRAINS.format(first=WRONG[what])
    copy = workdir / "copy"
    shutil.copytree(Path(clusterprof.__file__).parent, copy / "clusterprof")
    agent = str(copy / "clusterprof/agent")
    (workdir / "spare/nothing").mkdir(parents=True)
    plain = trained(workdir, program, AGENT=str(workdir / "spare/nothing"))
    done = trained(
        workdir, program, "python", "-m", "clusterprof", "run", *OPTIONS, "--",
        AGENT=agent, PYTHONPATH=str(copy),
    )  # fmt: skip
    found = state_if_any(workdir / "run")
    fault(what, plain.returncode, done.returncode, done.seconds - plain.seconds, found)
    check_as_without_us(plain, done)


def test_a_rank_whose_steps_cannot_be_counted_trains(workdir: Path, fault: Fault) -> None:
    program = TRAINS.format(first=BEYOND).replace("    optimizer", "    beyond()\n    optimizer")
    plain = trained(workdir, program)
    done = trained(workdir, program, *with_us())
    found = state_if_any(workdir / "run")
    added_s = done.seconds - plain.seconds
    fault("an error of ours in the step hook", plain.returncode, done.returncode, added_s, found)
    check_as_without_us(plain, done)
    assert (found["state"], "runs without profiling" in found["reason"]) == ("lost", True), found


@pytest.mark.parametrize("kind", ["staticmethod", "classmethod"])
def test_a_step_that_is_a_method_of_no_instance_stays_one(
    workdir: Path, fault: Fault, kind: str
) -> None:
    (workdir / "trainer.py").write_text(STEPS.format(kind=kind))
    program = TRAINS.format(first="import trainer").replace("optimizer.step", "trainer.step")
    plain = trained(workdir, program)
    done = trained(workdir, program, *with_us("--step-on=trainer:Trainer.step"))
    found, added_s = state_if_any(workdir / "run"), done.seconds - plain.seconds
    fault(f"--step-on of a {kind}", plain.returncode, done.returncode, added_s, found)
    check_as_without_us(plain, done)
    assert (found["state"], found["steps"]) == ("collected", 25), done


@pytest.mark.needs_root
def test_a_rank_that_has_no_dev_null_trains(workdir: Path, fault: Fault) -> None:
    program = TRAINS.format(first="assert not os.path.exists(os.devnull)")
    without = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev && exec "$@"', "-"]
    plain = trained(workdir, program, *without)
    done = trained(workdir, program, *with_us(), *without)
    fault("no /dev/null", plain.returncode, done.returncode, done.seconds - plain.seconds, {})
    check_as_without_us(plain, done)


@pytest.mark.needs_root
def test_a_job_runs_where_there_is_no_proc(workdir: Path, fault: Fault) -> None:
    program = TRAINS.format(first="assert not os.path.exists('/proc/self')")
    without = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "-"]
    plain = trained(workdir, program, *without)
    done = trained(workdir, program, *without, *with_us())
    fault("no /proc", plain.returncode, done.returncode, done.seconds - plain.seconds, {})
    assert done.returncode == plain.returncode == 0, (plain, done)
    assert done.stdout == plain.stdout == "trained\n", (plain, done)


def waiting_in_its_window(workdir: Path) -> Running:
    """A rank under nsys that waits inside its window for the file `go`."""
    program = ["python", PROGRAMS / "ending.py", "wait", "15"]
    line = ["run", *NSYS, "--run-dir=run", "--no-merge", "--", *program]
    running = Running(command.clusterprof(line), RANK, workdir / "out")
    running.wait_until(lambda: "rank 0 waits" in running.printed(), "waiting")
    return running


@pytest.mark.usefixtures("scripted")
def test_a_rank_under_nsys_that_is_suspended_stops_and_goes_on_with_its_guard(
    workdir: Path, fault: Fault
) -> None:
    # Ctrl-Z, and what a batch system sends: the program has a session of its own.
    running = waiting_in_its_window(workdir)
    guard, rank = running.state()["pid"], running.state()["program_pid"]
    os.kill(guard, signal.SIGTSTP)
    for each in (rank, guard):
        running.wait_until(lambda each=each: processes.work(each)[0] == "T", "stopped")
    os.kill(guard, signal.SIGCONT)
    running.wait_until(lambda: processes.work(rank)[0] != "T", "going on")
    (workdir / "go").touch()
    status = running.ends()
    fault("suspended and continued, nsys", 0, status, 0.0, running.state())
    assert status == 0, running.printed()
    assert running.state()["state"] == "collected"


@pytest.mark.usefixtures("scripted")
def test_a_rank_under_nsys_whose_guard_is_stopped_in_the_window_trains_to_its_end(
    workdir: Path, fault: Fault
) -> None:
    running = waiting_in_its_window(workdir)
    guard = running.state()["pid"]
    os.kill(guard, signal.SIGSTOP)
    running.wait_until(lambda: processes.work(guard)[0] == "T", "stopped")
    (workdir / "go").touch()
    running.wait_until(lambda: "rank 0 ends" in running.printed(), "at its end")
    assert processes.work(guard)[0] == "T"
    os.kill(guard, signal.SIGCONT)
    status = running.ends()
    fault("the guard is stopped inside the window", 0, status, 0.0, running.state())
    assert status == 0, running.printed()
    assert running.state()["state"] == "collected"
    assert not running.left()
