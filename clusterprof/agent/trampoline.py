"""The first thing that nsys starts: give the program its own streams back, and exec it.

nsys puts /dev/null and two pipes in their place and mixes its own words in; a program under
a profiler must print what it prints, where it prints it. Run as a script by the guard:
`python -I -S trampoline.py SOCKET FD,FD,FD UMASK PROGRAM...`.
"""

from __future__ import annotations

import os
import sys


def main(argv: "list[str]") -> None:
    """Tell the guard our process id, restore the streams, become the program."""
    address, descriptors, umask, program = argv[0], argv[1], argv[2], argv[3:]
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
        guard.settimeout(10)
        guard.connect(address)
        guard.sendall(b"hello %d\n" % os.getpid())
        guard.recv(16)
    for target, source in enumerate(descriptors.split(",")):
        try:
            os.dup2(int(source), target)
            os.close(int(source))
        except OSError:  # this nsys closes what it does not know: keep its pipes
            break
    os.umask(int(umask, 8))  # nsys sets it to 0: whatever the program wrote would be everybody's
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
