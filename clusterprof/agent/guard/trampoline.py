"""The first thing that nsys starts: run the program in its own world, and tell how it ended.

nsys puts /dev/null and two pipes in the streams' place and prints in between; a program under a
profiler must print what it prints, where it prints it, and have its own TMPDIR. nsys' own status is
not always the program's (0 where its disk is full): we stay beside the program until it ends.

Arguments: SOCKET UMASK TMPDIR[=VALUE] PROGRAM..., or --wait SOCKET PID.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from ..contracts import descriptors, identity, processes

REFUSED = 75  # for nsys' log: the program was not started


def main(argv: "list[str]") -> None:
    """Ask the guard, start the program with its own streams and TMPDIR, wait for its end."""
    if argv[0] == "--wait":
        wait(argv[1], int(argv[2]))
    address, umask, temporary, program = *argv[:3], argv[3:]
    try:
        guard = descriptors.asked(address, "hello %d" % os.getpid(), 10)
        given = descriptors.receive(guard)
        actions = descriptors.placed(given)
    except OSError:
        # A guard that has given this nsys up runs the program elsewhere: it must not run twice.
        sys.exit(REFUSED)
    with contextlib.closing(guard):
        identity.set_field(os.environ, identity.GIVEN, ",".join(map(str, given)))
        os.umask(int(umask, 8))  # nsys sets it to 0: all that is written would be everybody's
        os.environ.pop("TMPDIR", None)
        if "=" in temporary:
            os.environ["TMPDIR"] = temporary.partition("=")[2]
        # Not by fork: nsys has threads in here by now. In a process group of its own.
        pid = os.posix_spawnp(
            program[0], program, os.environ, file_actions=actions, setpgroup=0,
            # Python ignores them, and the program would inherit it.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )  # fmt: skip
        guard.sendall(b"pid %d\n" % pid)
    # What nsys sends to what it started is not for us.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    waiting = [*processes.part("trampoline"), "--wait", address, str(pid)]
    os.execve(sys.executable, waiting, processes.environment_without(identity.FOLLOWED))


def wait(address: str, pid: int) -> None:
    """The program's end: tell the guard how, and end likewise. 128 + n stands for signal n."""
    processes.end_first()
    status = os.waitpid(pid, 0)[1]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    with contextlib.suppress(OSError):
        descriptors.asked(address, "ended %d" % code, 5).close()
    sys.exit(code)
