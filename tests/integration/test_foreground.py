"""What the launcher sees of the signals that are sent to clusterprof: each of them, once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from lab.endings import Running

#: Runs a command as the launch verbs do.
OURS = (
    "import sys; from clusterprof.launch.job_processes import Foreground as F;"
    "sys.exit(F(sys.argv[1:], {'ADDED': 'yes'}).run())"
)
#: Says each signal that reaches it, until SIGUSR2.
LAUNCHER = """
import os, signal, sys
print("ignored", signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, os.environ["ADDED"], flush=True)
names = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2")
for name in names:
    if name != "HUP" or "own" in sys.argv:
        signal.signal(getattr(signal, "SIG" + name), lambda *_: None)
numbers = {getattr(signal, "SIG" + name): name for name in names}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready", flush=True)
while (name := numbers[signal.sigwait(numbers)]) != "USR2":
    print("got", name, flush=True)
sys.exit(7)
"""


def started(workdir: Path, *before: str, how: str = "own") -> Running:
    argv = [*before, sys.executable, "-c", OURS, sys.executable, "-c", LAUNCHER, how]
    running = Running(argv, {}, workdir / "out")
    running.wait_until(lambda: "ready" in running.printed(), "ready")
    return running


def got(running: Running) -> list[str]:
    return [line.split()[1] for line in running.printed().splitlines() if line.startswith("got ")]


@pytest.mark.parametrize("to", ["process", "group"])
def test_the_launcher_gets_each_signal_once_whoever_it_was_sent_to(to: str, workdir: Path) -> None:
    running = started(workdir)
    send = os.kill if to == "process" else os.killpg
    expected = []
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "TERM"):
        expected.append(name)
        send(running.process.pid, getattr(signal, "SIG" + name))
        running.wait_until(lambda: len(got(running)) >= len(expected), f"got {name}")
    if to == "group":
        running.settle(0.6)  # handed on as well, they would come later than the first
    send(running.process.pid, signal.SIGUSR2)
    assert running.ends() == 7, running.printed()
    assert got(running) == expected
    assert not running.left()


def test_a_signal_to_us_and_then_to_the_group_is_one(workdir: Path) -> None:
    # As `timeout` does it.
    running = started(workdir)
    os.kill(running.process.pid, signal.SIGTERM)
    os.killpg(running.process.pid, signal.SIGTERM)
    running.settle(0.8)
    running.process.send_signal(signal.SIGUSR2)
    assert running.ends() == 7, running.printed()
    assert got(running) == ["TERM"]


def test_a_signal_to_the_group_is_one_where_the_machine_stalls(workdir: Path) -> None:
    running = started(workdir)
    [witness] = [
        int(each.parent.name)
        for each in Path("/proc").glob("[0-9]*/stat")
        if each.read_text().rpartition(")")[2].split()[1] == str(running.process.pid)
        and b"-I\0-S\0-c" in each.with_name("cmdline").read_bytes()
    ]
    os.kill(witness, signal.SIGSTOP)
    stated = Path(f"/proc/{witness}/status")
    running.wait_until(lambda: "State:\tT" in stated.read_text(), "stopped")
    os.killpg(running.process.pid, signal.SIGTERM)
    running.settle(0.8)
    os.kill(witness, signal.SIGCONT)
    running.process.send_signal(signal.SIGUSR2)
    assert running.ends() == 7, running.printed()
    assert got(running) == ["TERM"]


def test_what_we_are_told_to_ignore_the_launcher_ignores(workdir: Path) -> None:
    running = started(workdir, "nohup", how="as it is")
    assert "ignored True yes" in running.printed()
    running.process.send_signal(signal.SIGUSR2)
    assert running.ends() == 7


def test_a_launcher_that_is_killed_gives_its_signal(workdir: Path) -> None:
    running = started(workdir)
    os.kill(running.launcher(), signal.SIGKILL)
    assert running.ends() == 137
    assert not running.left()


def test_a_signal_that_comes_before_there_is_a_launcher_ends_it(workdir: Path) -> None:
    # Its whole group gets it, while the command is about to be started.
    early = (
        "import os, sys; from clusterprof.launch import job_processes as running;"
        "close = running.contextlib.closing;"
        "running.contextlib.closing = lambda each: (os.killpg(0, 15), close(each))[1];"
        "sys.exit(running.Foreground(['sleep', '60'], {}).run())"
    )
    running = Running([sys.executable, "-c", early], {}, workdir / "out")
    assert running.ends() == 143
    assert not running.left()


def test_a_launcher_s_end_is_seen_where_our_parent_has_blocked_sigchld(workdir: Path) -> None:
    blocked = (
        "import signal, sys; from clusterprof.launch.job_processes import Foreground;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD]);"
        "sys.exit(Foreground(['sh', '-c', 'sleep 0.2; exit 5'], {}).run())"
    )
    assert Running([sys.executable, "-c", blocked], {}, workdir / "out").ends() == 5


def test_nothing_stays_when_we_are_killed_but_the_launcher(workdir: Path) -> None:
    running = started(workdir)
    launcher = running.launcher()
    running.process.kill()
    running.ends()
    running.wait_until(lambda: len(running.left(0)) == 1, "alone")
    os.kill(launcher, signal.SIGKILL)
    assert not running.left()


#: A task beside a job, whose end it waits for: 'end' as its last argument.
BESIDE = """
import os, sys, time
from clusterprof.launch.job_processes import beside_job
def task():
    print("beside", os.getpid(), flush=True)
    {task}
beside = beside_job(task, "nothing is watched")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
beside.end()
print("closed", flush=True)
"""


def test_what_is_done_beside_a_job_outlives_signals_and_ends_with_it(workdir: Path) -> None:
    code = BESIDE.format(task="time.sleep(1000)")
    running = Running([sys.executable, "-c", code, "end"], {}, workdir / "out")
    running.wait_until(lambda: "beside" in running.printed(), "beside")
    beside = int(running.printed().split()[1])
    waiting = Path(f"/proc/{beside}/status")
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    numbers = (*ending, signal.SIGUSR1, signal.SIGUSR2)
    for number in numbers:
        os.kill(beside, number)
    ignored = int(waiting.read_text().partition("SigIgn:")[2].split()[0], 16)
    assert all(ignored & 1 << number - 1 for number in numbers)
    (workdir / "end").touch()
    assert running.ends() == 0, running.printed()
    assert not waiting.exists()
    assert not running.left()


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("open('missing')", "[Errno 2] No such file or directory: 'missing'"),
        ("raise OSError", "OSError()"),
        ("raise KeyError('a')", "KeyError('a')"),
    ],
)
def test_what_fails_beside_a_job_is_one_line(workdir: Path, fails: str, reason: str) -> None:
    code = BESIDE.format(task=fails)
    running = Running([sys.executable, "-c", code, "end"], {}, workdir / "out")
    running.wait_until(lambda: reason in running.printed(), "said")
    (workdir / "end").touch()
    assert running.ends() == 0
    _, error, closed = running.printed().splitlines()
    assert error == f"clusterprof: nothing is watched: {reason}"
    assert closed == "closed"
