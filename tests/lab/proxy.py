"""A connection that can be frozen, cut or limited on its way: a TCP proxy in threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Listens on `address` and hands every byte on to the loopback's port `to`."""

    def __init__(self, to: int, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.bind((address, 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        #: how many were taken
        self.connections = 0
        #: cleared: bytes are taken and not handed on, as by a host that hangs
        self.flows = threading.Event()
        self.flows.set()
        #: all connections end when the server has sent so many bytes more; None for never
        self.remaining: int | None = None
        #: and none is taken afterwards
        self.for_good = False
        self._to = to
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections; new ones are taken."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all, and listen no more."""
        self.flows.set()
        with contextlib.suppress(OSError):  # closing alone would leave `accept` waiting
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self.connections += 1
                self._open += [near, far]
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self.flows.wait()
                if counted and self.remaining is not None:
                    self.remaining -= len(data)
                    if self.remaining < 0:
                        self.remaining = None
                        if self.for_good:
                            self.close()
                        self.cut()
                        return
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(to: int, address: str = "127.0.0.1") -> Iterator[Proxy]:
    """One for the length of a test."""
    made = Proxy(to, address)
    try:
        yield made
    finally:
        made.close()
