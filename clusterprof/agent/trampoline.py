"""The first thing that nsys starts: give the program its own world back, and exec it.

nsys puts /dev/null and two pipes in the streams' place and mixes its own words in; a program
under a profiler must print what it prints, where it prints it. nsys has a TMPDIR of its own, the
program must not. Run as a script by the guard:
`python -I -S trampoline.py SOCKET FD,FD,FD UMASK TMPDIR[=VALUE] PROGRAM...`.
"""

from __future__ import annotations

import os
import sys

#: For nsys' log; the program was not started.
REFUSED = 75


def main(argv: "list[str]") -> None:
    """Tell the guard our process id, restore streams and TMPDIR, become the program."""
    address, descriptors, umask, temporary, program = *argv[:4], argv[4:]
    if not admitted(address):
        sys.exit(REFUSED)
    for target, source in enumerate(descriptors.split(",")):
        try:
            os.dup2(int(source), target)
            os.close(int(source))
        except OSError:  # this nsys closes what it does not know: keep its pipes
            break
    os.umask(int(umask, 8))  # nsys sets it to 0: whatever the program wrote would be everybody's
    name, given, value = temporary.partition("=")
    if given:
        os.environ[name] = value
    else:
        os.environ.pop(name, None)
    os.execvp(program[0], program)


def admitted(address: str) -> bool:
    """Whether the guard still wants the program to run here.

    One that has given this nsys up runs the program elsewhere: it must not run twice.
    """
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
        try:
            guard.settimeout(10)
            guard.connect(address)
            guard.sendall(b"hello %d\n" % os.getpid())
            return guard.recv(16) == b"ok\n"
        except OSError:
            return False


if __name__ == "__main__":
    main(sys.argv[1:])
