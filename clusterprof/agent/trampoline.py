"""The first thing that nsys starts: run the program in its own world, and tell how it ended.

nsys puts /dev/null and two pipes in the streams' place and mixes its own words in; a program
under a profiler must print what it prints, where it prints it. nsys has a TMPDIR of its own, the
program must not. And nsys' own status is not always the program's (0 where its disk is full): we
stay beside the program until it ends, outside of nsys, and tell the guard.

Run as a script by the guard:
`python -I -S trampoline.py SOCKET FD,FD,FD UMASK TMPDIR[=VALUE] PROGRAM...`.
"""

from __future__ import annotations

import os
import signal
import sys

#: For nsys' log; the program was not started.
REFUSED = 75

#: What makes nsys follow a process: it is not to follow us.
_FOLLOWED = ("LD_PRELOAD", "QUADD_", "NSYS_", "CUDA_INJECTION", "NVTX_INJECTION")


def main(argv: "list[str]") -> None:
    """Ask the guard, start the program with its own streams and TMPDIR, wait for its end."""
    address, descriptors, umask, temporary, program = *argv[:4], argv[4:]
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
        # A guard that has given this nsys up runs the program elsewhere: it must not run twice.
        if not admitted(guard, address):
            sys.exit(REFUSED)
        os.umask(int(umask, 8))  # nsys sets it to 0: all that is written would be everybody's
        name, given, value = temporary.partition("=")
        if given:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
        pid = spawned(program, [int(each) for each in descriptors.split(",")])
        guard.sendall(b"pid %d\n" % pid)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOLLOWED)}
    # What nsys sends to what it started is not for us.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    flags = ["-I" if sys.flags.isolated else "-s", "-S"]
    waiting = [sys.executable, *flags, os.path.abspath(__file__), "--wait", address, str(pid)]
    os.execve(sys.executable, waiting, environ)


def admitted(guard: object, address: str) -> bool:
    """Whether the guard wants the program to run here."""
    try:
        guard.settimeout(10)  # type: ignore[attr-defined]
        guard.connect(address)  # type: ignore[attr-defined]
        guard.sendall(b"hello %d\n" % os.getpid())  # type: ignore[attr-defined]
        return bool(guard.recv(16) == b"ok\n")  # type: ignore[attr-defined]
    except OSError:
        return False


def spawned(program: "list[str]", streams: "list[int]") -> int:
    """Start the program on these streams, in a process group of its own; its process id.

    Not by fork: nsys has threads in here by now.
    """
    actions = []
    for target, source in enumerate(streams):
        try:
            os.fstat(source)
        except OSError:  # this nsys closes what it does not know: keep its pipes
            break
        actions += [(os.POSIX_SPAWN_DUP2, source, target), (os.POSIX_SPAWN_CLOSE, source)]
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]  # Python ignores them, and the program inherits it
    pid = os.posix_spawnp(
        program[0], program, os.environ, file_actions=actions, setpgroup=0, setsigdef=defaults
    )
    for source in streams[: len(actions) // 2]:
        os.close(source)
    return pid


def wait(address: str, pid: int) -> None:
    """The program's end: tell the guard how, and end likewise. 128 + n stands for signal n."""
    import socket

    status = os.waitpid(pid, 0)[1]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
            guard.settimeout(5)
            guard.connect(address)
            guard.sendall(b"ended %d\n" % code)
    except OSError:
        pass
    sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--wait":
        wait(sys.argv[2], int(sys.argv[3]))
    main(sys.argv[1:])
