"""The program under nsys ends with its guard, as it would have ended had it been the rank itself.

A launcher that loses patience kills the process that it knows, which is the guard: the program
runs in a session of its own and would live on, holding its GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import threading

from ..contracts import descriptors


def end_with_the_guard(address: str) -> None:
    """Watch the guard from a thread that sleeps until the guard is gone."""
    guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        guard.settimeout(5)
        guard.connect(address)
        guard.sendall(b"watch\n")
        if guard.recv(16) != b"ok\n":
            return
        guard.settimeout(None)
        descriptors.hide([guard.fileno()])
    except OSError:
        return  # a guard that does not answer is no reason to end
    threading.Thread(target=_wait, args=(guard, os.getpid()), daemon=True).start()


def _wait(guard: socket.socket, pid: int) -> None:
    try:
        gone = guard.recv(1) == b""
    except OSError:
        gone = True
    if gone and os.getpid() == pid:
        os.kill(pid, signal.SIGKILL)
