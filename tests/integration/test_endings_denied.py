"""What a kernel denies us, as a container's filter of system calls may, the training does not miss.

The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import PROGRAMS, check_as_without_us, state_if_any
from lab.stub import OPTIONS, PROGRAM, RANK
from lab.tiers import few

pytestmark = pytest.mark.usefixtures("scripted")

#: what we use, and what a program can do without
OURS = [
    "bind", "clone3", "connect", "fchmod", "flock", "getsockopt", "kill", "link", "listen", "mkdir",
    "poll", "prctl", "prlimit64", "readlink", "recvmsg", "rename", "select", "sendmsg", "sendto",
    "setpgid", "setsid", "setsockopt", "shutdown", "socket", "socketpair", "statfs", "umask",
    "unlink", "wait4",
]  # fmt: skip
#: what containers and batch systems are known to deny
STRICT = ["adjtimex", "clock_adjtime", "clone3", "close_range", "inotify_init1", "ioprio_set",
          "memfd_create", "pidfd_open", "process_vm_readv", "sched_setscheduler", "setpriority",
          "unlink"]  # fmt: skip
CASES = {
    f"{name}, {profiler}": (profiler, calls)
    for profiler in ("torch", "nsys")
    for name, calls in {"a strict filter": STRICT, **{each: [each] for each in OURS}}.items()
}  # fmt: skip


@pytest.mark.parametrize(
    ("profiler", "calls"), few(CASES, "a strict filter, torch", "a strict filter, nsys")
)
def test_a_program_trains_to_its_end_whatever_the_kernel_denies_it_and_us(
    profiler: str, calls: list[str], workdir: Path, fault: Callable[..., None]
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    denied = ["python", PROGRAMS / "denied.py", str(errno.EPERM), *calls, "--"]
    line = [*denied, "python", "train.py"]
    plain = command.run(line, env=RANK)
    ours = command.clusterprof(["run", *OPTIONS, f"--profiler={profiler}", "--", *line])
    done = command.run(ours, env=RANK)
    found = state_if_any(workdir / "run")
    what = f"denied: {' '.join(calls)}, {profiler}"
    fault(what, plain.returncode, done.returncode, done.seconds - plain.seconds, found)
    check_as_without_us(plain, done)
