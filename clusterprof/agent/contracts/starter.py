"""The starter's own side, and how each process of the agent's own begins: see `beside`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import contextlib
import errno
import os
import sys
from importlib import import_module
from typing import List, NoReturn

from . import descriptors, processes

#: the numbers of clone(2), which libc does not let return twice as fork(2) does
_CLONE = {"x86_64": 56, "aarch64": 220, "ppc64le": 120, "riscv64": 220}
#: the processes of the agent's own: part -> the module whose `main(arguments)` it is
_PARTS = {
    "trampoline": "guard.trampoline",
    "starter": "contracts.starter",
    "writer": "guard.writer",
    "prober": "remote.prober",
}


def run_part(name: str, arguments: List[str]) -> None:
    """Be this part of the agent, in the interpreter that this is."""
    show_as(name)
    agent = __package__.rpartition(".")[0]
    import_module("%s.%s" % (agent, _PARTS[name])).main(arguments)


def show_as(name: str) -> None:
    """Have `top` show this process by this name, of at most 15 bytes: its command line may be that
    of the one that it is a copy of.
    """
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def clone() -> int:
    """As fork(2); the child is one that the kernel does not report."""
    import ctypes

    words = [_CLONE.get(os.uname().machine, -1), 0, 0, 0, 0, 0]
    pid = int(ctypes.PyDLL(None).syscall(*map(ctypes.c_long, words)))
    if pid < 0:
        raise OSError(errno.ENOSYS, "no process can be made that this one does not adopt")
    return pid


def main(argv: List[str]) -> NoReturn:
    """Start what is asked for on the socket FD until no process of the program's is left, and then
    what was started: argument FD.
    """
    started: List[int] = []
    try:
        requests = _socket.socket(fileno=int(argv[0]))
        _leave_the_program(requests.fileno())
        while True:
            space = _socket.CMSG_SPACE(4)
            text, beside, _, _ = requests.recvmsg(1 << 16, space, _socket.MSG_CMSG_CLOEXEC)
            if beside:
                (number,) = descriptors.came(beside)
                name, *arguments = os.fsdecode(text).split("\0")
                begin = _fork if _can_fork() else _spawn
                started.append(begin(name, [str(number), *arguments], requests))
                os.close(number)
                continue
            for pid in started:
                os.kill(pid, _signal.SIGCONT)
            while not text:
                os.wait()
    finally:
        os._exit(0)


def _can_fork() -> bool:
    """Whether what is started may be a copy of this process: it is an interpreter of our own, not a
    copy of the program's, and holds nothing of LD_PRELOAD's, which a writer has to be without.
    """
    return bool(sys.flags.no_site) and "LD_PRELOAD" not in os.environ


def _fork(name: str, arguments: List[str], requests: _socket.socket) -> int:
    """A part of the agent as a copy of this process: to start another Python takes 10 ms and more.

    Returns its process.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        requests.close()
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        run_part(name, arguments)
    finally:
        os._exit(0)


def _spawn(name: str, arguments: List[str], requests: _socket.socket) -> int:
    """A part of the agent in an interpreter of its own; returns its process."""
    line = [*processes.part(name), *arguments]
    leave_out = ("LD_PRELOAD",) if name == "writer" else ()
    os.set_inheritable(int(arguments[0]), True)
    return os.posix_spawn(line[0], line, processes.environment_without(leave_out), setsigmask=())


def _leave_the_program(keep: int) -> None:
    """Hold nothing of the program's, since a launcher waits for its pipes to close; get no signal
    that is for its processes, and be ended before them where memory runs out.
    """
    processes.end_first()
    os.setsid()
    os.chdir("/")
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # it may be ignored
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for number in descriptors.open_ones():
        if number > 2 and number != keep:
            os.close(number)
