"""The program's file descriptors: under nsys it has those that its launcher gave it, and no others.

nsys gives it streams of its own and none from 3 on (a shell's `<(...)`, srun's PMI connection). So
the guard sends all of them to the trampoline, which puts them back in their places.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import sys
from typing import Any, Dict, Iterable, Iterator, List, Tuple

#: in one message; the kernel takes 253, each an `int`
_AT_ONCE, _INT_B = 200, 4


def inherited() -> List[int]:
    """Those that this process was started with, in order; what we open ourselves is O_CLOEXEC."""
    numbers = []
    for number in open_ones():
        with contextlib.suppress(OSError):  # another thread has closed it since
            numbers += [number] if os.get_inheritable(number) else []
    return numbers


def open_ones() -> List[int]:
    """All that are open, in order."""
    open_numbers: List[int] = []
    numbers: Iterable[int] = range(min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
    with contextlib.suppress(OSError):  # there may be no /proc
        numbers = sorted(map(int, os.listdir("/proc/self/fd")))
    for number in numbers:
        with contextlib.suppress(OSError):  # the listing's own
            os.fstat(number)
            open_numbers.append(number)
    return open_numbers


def fill_streams() -> List[int]:
    """Open /dev/null where 0, 1 or 2 is closed: the next file that we open would be a stream.

    Returns those; they are closed again in whatever is started from here (O_CLOEXEC).
    """
    filled = [os.open(os.devnull, os.O_RDWR)]
    while filled[-1] <= 2:
        filled.append(os.open(os.devnull, os.O_RDWR))
    os.close(filled.pop())
    return filled


@contextlib.contextmanager
def no_streams() -> Iterator[None]:
    """What is opened in here is none of the streams 0 to 2, closed as they may be."""
    filled = fill_streams()
    try:
        yield
    finally:
        for number in filled:
            os.close(number)


def release(given: List[int]) -> None:
    """Close all but the streams, once another process has them: no reader may wait for us."""
    for number in given:
        if number > 2:
            os.close(number)


def asked(address: str, request: str, seconds: float) -> _socket.socket:
    """A way to the guard that listens here, by which it was asked this; it is waited for so long.

    Raises OSError.
    """
    guard = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        guard.settimeout(seconds)
        guard.connect(address)
        guard.sendall(request.encode() + b"\n")
    except OSError:
        guard.close()
        raise
    return guard


def send(connection: _socket.socket, descriptors: List[int]) -> None:
    """Send them with their numbers, a line for each message, and a line `ok`. Raises OSError."""
    for first in range(0, len(descriptors), _AT_ONCE):
        batch = descriptors[first : first + _AT_ONCE]
        connection.sendmsg([",".join(map(str, batch)).encode() + b"\n"], rights(batch))
    connection.sendall(b"ok\n")


def rights(descriptors: List[int]) -> List[Tuple[int, int, bytes]]:
    """What goes beside a message for its receiver to have them as well; see unix(7)."""
    numbers = b"".join(number.to_bytes(_INT_B, sys.byteorder) for number in descriptors)
    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)]


def came(beside: Iterable[Tuple[int, int, bytes]]) -> List[int]:
    """The descriptors that came beside a message, by the numbers that they have here."""
    numbers: List[int] = []
    for _, kind, data in beside:
        if kind == _socket.SCM_RIGHTS:
            numbers += memoryview(data[: len(data) // _INT_B * _INT_B]).cast("i")
    return numbers


def receive(connection: _socket.socket) -> Dict[int, int]:
    """What `send` sent: the number that each had, and the one that it has here, O_CLOEXEC.

    Raises OSError where the sender has sent nothing, or we can open no more.
    """
    text, arrived = b"", []
    space = _socket.CMSG_SPACE(_AT_ONCE * _INT_B)
    while not text.endswith(b"ok\n"):
        piece, beside, flags, _ = connection.recvmsg(4096, space, _socket.MSG_CMSG_CLOEXEC)
        arrived += came(beside)
        if not piece or flags & _socket.MSG_CTRUNC:
            raise OSError(errno.EPROTO, "the descriptors did not come")
        text += piece
    numbers = [int(number) for line in text.split(b"\n")[:-2] for number in line.split(b",")]
    if len(numbers) != len(arrived):
        raise OSError(errno.EPROTO, "not all descriptors came")
    return dict(zip(numbers, arrived))  # noqa: B905 - Python 3.8


def placed(given: Dict[int, int]) -> List[Tuple[Any, ...]]:
    """posix_spawn's actions for a program that has these descriptors (see `receive`) and no others.

    A stream that was closed is /dev/null: nsys would open its own in its place, in the program.
    Raises OSError where we can open no more.
    """
    import fcntl

    given.update((fd, os.open(os.devnull, os.O_RDWR)) for fd in (0, 1, 2) if fd not in given)
    ours = [number for number in inherited() if number not in given]
    actions: List[Tuple[Any, ...]] = []
    for number, source in sorted(given.items()):
        while source in given:  # not where another one is going to be
            source = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, source + 1)
        actions.append((os.POSIX_SPAWN_DUP2, source, number))
    return actions + [(os.POSIX_SPAWN_CLOSE, number) for number in ours]


#: what the program does not know of: number, and which file it is
_hidden: Dict[int, os.stat_result] = {}
_close, _closerange = os.close, os.closerange


def hide(numbers: Iterable[int]) -> None:
    """From now on the program cannot close these descriptors of its process, ours and nsys'.

    A program that closes all it may have (`os.closerange(3, 4096)`, as one that becomes a daemon
    does) would hang at its end, where nsys waits for threads that it can no longer wake; and what
    the program opens in their place would get what is ours. Raises OSError for one not open.
    """
    _hidden.update((number, os.fstat(number)) for number in numbers)
    os.close, os.closerange = _close_one, _close_some


def is_hidden(number: int) -> bool:
    """Whether it is (still) one of those; its number may be the program's by now."""
    with contextlib.suppress(OSError):
        return number in _hidden and os.path.samestat(_hidden[number], os.fstat(number))
    return False


def _close_one(fd: int) -> None:
    if is_hidden(fd):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _close(fd)


def _close_some(fd_low: int, fd_high: int) -> None:
    for number in sorted(_hidden):
        if fd_low <= number < fd_high and is_hidden(number):
            _closerange(fd_low, number)
            fd_low = number + 1
    _closerange(fd_low, fd_high)
