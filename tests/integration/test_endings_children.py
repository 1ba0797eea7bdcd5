"""A program finds no child that it has not started, and none that ends.

The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import Running, state
from lab.stub import FOLDER

from clusterprof.agent.contracts import processes

Fault = Callable[..., None]

#: Trains as one that looks after its children does; `{way}` says how.
PROGRAM = """
import ctypes, os, signal, subprocess, sys, time
{begins}
import torch
optimizer = torch.optim.SGD()
for step in range(20):
    optimizer.step()
{ends}
print("ends")
"""
REAPS = """
try:
    while True:
        os.wait()
except ChildProcessError:
    print("all children are gone")
"""
SIGNALS = """
import pathlib
own = b"CLUSTERPROF_PLAN=" + os.environb.get(b"CLUSTERPROF_PLAN", b"none").partition(b";")[0]
for each in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        if own in (each / "environ").read_bytes() and int(each.name) != os.getpid():
            os.kill(int(each.name), signal.{name})
    except OSError:
        pass
"""
WAYS = {
    "a subreaper reaps until it has no children": (
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)", REAPS,
    ),
    "SIGCHLD means that a worker died": (
        "signal.signal(signal.SIGCHLD, lambda *_: os._exit(3))", "",
    ),
    "a SIGCHLD handler waits for any child": (
        ("worker = subprocess.Popen(['sleep', '1000'])\n"
        "signal.signal(signal.SIGCHLD, lambda *_: os.wait())"),
        "signal.signal(signal.SIGCHLD, signal.SIG_DFL)\nworker.kill()",
    ),
    "SIGCHLD is ignored": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", ""),
    "it closes what it has inherited": ("os.closerange(3, 4096)", ""),
    "a child trains in its place": (
        "child = os.fork()\nif child:\n    sys.exit(os.waitpid(child, 0)[1])", "",
    ),
    "it begins anew": (
        "if not sys.argv[1:]:\n    os.execv(sys.executable, [sys.executable, *sys.argv, 'anew'])",
        REAPS,
    ),
    "all processes of its job step are signalled": (SIGNALS.format(name="SIGUSR1"), ""),
}  # fmt: skip
#: what runs what follows it elsewhere
PLACES = {
    "as process 1 of a container": ["unshare", "--pid", "--fork", "--mount-proc"],
    "without a shell": [
        "unshare", "--mount", "bash", "-c", 'mount --bind /dev/null /bin/sh && exec "$@"', "-",
    ],
}  # fmt: skip
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(FOLDER)}
OPTIONS = ["--ranks=0", "--steps=5:15", "--run-dir=run", "--no-merge", "--profiler=torch"]


def check(workdir: Path, fault: Fault, what: str, *before: str) -> None:
    """The program with and without us."""
    line = [*before, "python", "train.py"]
    plain = command.run(line, env=RANK)
    done = command.run(command.clusterprof(["run", *OPTIONS, "--", *line]), env=RANK)
    found = state(workdir / "run")
    fault(what, plain.returncode, done.returncode, done.seconds - plain.seconds, found)
    assert done.returncode == plain.returncode == 0, (plain, done)
    assert done.stdout == plain.stdout, (plain, done)
    assert found["state"] == "collected", (found, done)


@pytest.mark.parametrize("what", WAYS)
def test_a_program_that_looks_after_its_children_ends_as_it_would_have_ended(
    workdir: Path, fault: Fault, what: str
) -> None:
    begins, ends = WAYS[what]
    (workdir / "train.py").write_text(PROGRAM.format(begins=begins, ends=ends))
    check(workdir, fault, what)


@pytest.mark.needs_root
@pytest.mark.parametrize("where", PLACES)
def test_a_program_that_reaps_all_finds_no_child(workdir: Path, fault: Fault, where: str) -> None:
    (workdir / "train.py").write_text(PROGRAM.format(begins="", ends=REAPS))
    check(workdir, fault, f"it reaps until it has no children, {where}", *PLACES[where])


@pytest.mark.parametrize("when", ["begins", "ends"])
def test_a_program_ends_as_it_would_without_what_was_killed_beside_it(
    workdir: Path, fault: Fault, when: str
) -> None:
    kill = {"begins": "", "ends": "", when: SIGNALS.format(name="SIGKILL")}
    (workdir / "train.py").write_text(PROGRAM.format(**kill))
    done = command.run(command.clusterprof(["run", *OPTIONS, "--", "python", "train.py"]), env=RANK)
    fault(f"all beside it is killed where it {when}", 0, done.returncode, 0.0, {})
    assert (done.returncode, done.stdout) == (0, "ends\n"), done
    assert "Traceback" not in done.stderr


def shown_as(pid: int) -> str:
    """What `top` shows a process as; "" for one that has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.parametrize("which", ["writer", "starter"])
def test_what_was_stopped_beside_a_rank_ends_with_it(
    workdir: Path, fault: Fault, which: str
) -> None:
    (workdir / "train.py").write_text(
        PROGRAM.format(begins="", ends="while not os.path.exists('go'):\n    time.sleep(0.02)")
    )
    running = Running(
        command.clusterprof(["run", *OPTIONS, "--", "python", "train.py"]), RANK, workdir / "out"
    )
    running.wait_until(lambda: running.state().get("state") == "captured", "captured")
    writer = next(pid for pid, _ in running.processes() if shown_as(pid) == "writer")
    stopped = writer if which == "writer" else processes.parent(writer)
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    running.wait_until(lambda: processes.work(stopped)[0] == "T", "stopped")
    (workdir / "go").touch()
    status = running.ends()
    fault(f"the {which} was stopped", 0, status, 0.0, running.state())
    assert status == 0, running.printed()
    assert not running.left()
