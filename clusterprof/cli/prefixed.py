"""The output of several hosts on one stream: whole lines, each with the name of its host."""

from __future__ import annotations

import contextlib
import threading
from typing import BinaryIO


class Prefixed:
    """What one host prints, on its way to one of our streams.

    Lines of different hosts never mix. A progress bar ends its lines with a carriage return:
    that ends a line as well. With an empty `prefix` the bytes pass as they come.
    """

    def __init__(self, stream: BinaryIO, prefix: str, lock: threading.Lock) -> None:
        self._stream = stream
        self._prefix = prefix.encode()
        self._lock = lock
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        """Take bytes, and pass on what is a whole line by now."""
        if not self._prefix:
            self._pass(data)
            return
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        whole, self._rest = data[:end], data[end:]
        if whole:
            self._pass(b"".join(self._prefix + line for line in _lines(whole)))

    def finish(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest:
            self._pass(self._prefix + self._rest + b"\n")
            self._rest = b""

    def _pass(self, data: bytes) -> None:
        # Nobody may be reading any more (`| head`): the job goes on.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write(data)
            self._stream.flush()


def _lines(data: bytes) -> list[bytes]:
    """Cut after every line feed and lone carriage return, and nowhere else."""
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\r\0").replace(b"\n", b"\n\0")
    return lines.split(b"\0")[:-1]
