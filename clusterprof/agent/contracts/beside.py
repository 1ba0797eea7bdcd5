"""Processes beside the program, of which it learns nothing: the writer, the clock prober.

A program that waits for all its children would wait for ours, and take the end of ours for a
worker's. So one process, the starter, is made when the interpreter starts, before the program's
first line. It is no child of ours (its parent, a shell, ends at once), and starts the others when
told to. Until then it is that small shell, since most interpreters never train.

Where we adopt what has lost its parent (process 1 of a container), or there is no shell, it is a
child that the kernel does not report: made by clone(2) with no signal for its end, it is not seen
by wait(2) without __WALL. It keeps that only while it executes no other program. There is no other
thread yet that may hold a lock.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import contextlib
import errno
import os
import sys
from typing import Any, Iterator, List, NoReturn, Optional

from . import descriptors, processes
from .identity import FOLLOWED, profiled

#: The starter waits for the first word, then it is another program. A shell's own children have no
#: stdin, hence 3.
_SHELL = """exec 3<&0; trap '' HUP TERM USR1 USR2; (read word <&3 && exec "$@") & echo $!"""
_WITHOUT_WAITING = _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT

#: the processes of the agent's own: part -> the module whose `main(arguments)` it is
_PARTS = {
    "trampoline": "guard.trampoline",
    "starter": "contracts.beside",
    "writer": "guard.writer",
    "prober": "remote.prober",
}

#: our end of the starter's socket, and its process
_starter: Optional[Any] = None
_pid = 0


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Make the starter while the block imports what it needs; the program has not begun.

    Raises OSError.
    """
    global _starter, _pid
    with descriptors.no_streams():
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        shell = _shell(theirs.fileno())
    try:
        yield
    finally:
        if shell:
            with contextlib.suppress(ChildProcessError):  # SIGCHLD may be ignored
                os.waitpid(shell, 0)
    _pid = int(ours.recv(20, _socket.MSG_DONTWAIT)) if shell else 0
    if not _pid or _is_our_child(_pid):
        _pid = _clone() or main([str(theirs.fileno())])
    theirs.close()
    descriptors.hide([ours.fileno()])
    _starter = ours


def start(name: str, connection: _socket.socket, *arguments: str) -> None:
    """Start a part of the agent (see `run_part`): arguments are the socket's number, and these.

    Nothing comes back: of one that cannot be started the socket is closed. Raises OSError.
    """
    if _starter is None or not descriptors.is_hidden(_starter.fileno()):
        raise OSError("no process can be started beside this one")
    words, rights = "\0".join((name, *arguments)), descriptors.rights([connection.fileno()])
    _starter.send(b"\n", _WITHOUT_WAITING)
    _starter.sendmsg([os.fsencode(words)], rights, _WITHOUT_WAITING)


def wake() -> None:
    """Have go on what was stopped of the starter and those that it has started: it has to end."""
    if _starter is not None and descriptors.is_hidden(_starter.fileno()):
        with contextlib.suppress(OSError):
            os.kill(_pid, _signal.SIGCONT)
            _starter.send(b"\n", _WITHOUT_WAITING)


def _shell(connection: int) -> int:
    """A shell that leaves the starter, whose id it writes to the connection; 0 without one."""
    line = ["sh", "-c", _SHELL, "sh", *processes.part("starter"), "3"]
    # LD_PRELOAD may set the rank's clock, which a prober is to read; or it is nsys'.
    followed = FOLLOWED if profiled(os.environ) else set(FOLLOWED) - {"LD_PRELOAD"}
    environ = processes.environment_without(tuple(followed))
    actions: List[Any] = [(os.POSIX_SPAWN_DUP2, connection, stream) for stream in (0, 1)]
    actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0))
    actions += [(os.POSIX_SPAWN_CLOSE, number) for number in descriptors.inherited() if number > 2]
    with contextlib.suppress(OSError):
        return os.posix_spawn("/bin/sh", line, environ, file_actions=actions, setpgroup=0)
    return 0


def _is_our_child(pid: int) -> bool:
    """Whether the process became our child when its parent ended; it has ended then."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
        os.kill(pid, _signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        return True
    return False


def _clone() -> int:
    """As fork(2); the child is one that the kernel does not report."""
    import ctypes

    # the numbers of clone(2), which libc does not let return twice as fork(2) does
    calls = {"x86_64": 56, "aarch64": 220, "ppc64le": 120, "riscv64": 220}
    words = [calls.get(os.uname().machine, -1), 0, 0, 0, 0, 0]
    pid = int(ctypes.PyDLL(None).syscall(*map(ctypes.c_long, words)))
    if pid < 0:
        raise OSError(errno.ENOSYS, "no process can be made that this one does not adopt")
    return pid


def run_part(name: str, arguments: List[str]) -> None:
    """Be this part of the agent, in the interpreter that this is."""
    from importlib import import_module

    show_as(name)
    agent = __package__.rpartition(".")[0]
    import_module("%s.%s" % (agent, _PARTS[name])).main(arguments)


def show_as(name: str) -> None:
    """Have `top` show this process by this name, of at most 15 bytes: its command line may be that
    of the one that it is a copy of.
    """
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def main(argv: List[str]) -> NoReturn:
    """Be the starter: start what is asked for on a socket (argument FD) until no process of the
    program's is left, and then none of those that were started.
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
                started.append(_begin(name, [str(number), *arguments], requests))
                os.close(number)
                continue
            for pid in started:
                os.kill(pid, _signal.SIGCONT)
            while not text:
                os.wait()
    finally:
        os._exit(0)


def _begin(name: str, arguments: List[str], requests: _socket.socket) -> int:
    """Start a part of the agent; returns its process.

    As a copy of this one, since to start another Python takes 10 ms and more: where this is an
    interpreter of our own, not a copy of the program's, and holds nothing of LD_PRELOAD's, which a
    writer has to be without.
    """
    if not sys.flags.no_site or "LD_PRELOAD" in os.environ:
        line = [*processes.part(name), *arguments]
        leave_out = ("LD_PRELOAD",) if name == "writer" else ()
        os.set_inheritable(int(arguments[0]), True)
        environ = processes.environment_without(leave_out)
        return os.posix_spawn(line[0], line, environ, setsigmask=())
    pid = os.fork()
    if pid == 0:
        try:
            requests.close()
            _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
            run_part(name, arguments)
        finally:
            os._exit(0)
    return pid


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
