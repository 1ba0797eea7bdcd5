"""The output of several hosts on one stream: whole lines, each with the name of its host."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import BinaryIO

#: A line with what ends it.
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
#: A line that has no end by then is passed on in lines of this length.
PIECE_B = 1 << 16


class Prefixed:
    """What one host prints, on its way to one of our streams.

    Lines of different hosts never mix. A progress bar ends its lines with a carriage return:
    that ends a line as well. A host cannot print a line that begins with another's name. With an
    empty `prefix` the bytes pass as they come.
    """

    def __init__(self, stream: BinaryIO, prefix: str, lock: threading.Lock) -> None:
        self._stream = stream
        self._prefix = prefix.encode()
        self._lock = lock
        self._rest = bytearray()
        self._returned = False

    def __call__(self, data: bytes) -> None:
        """Take bytes, and pass on what is a whole line by now."""
        if not self._prefix:
            self._pass(data)
            return
        if self._returned and data.startswith(b"\n"):  # the other half of a \r\n
            self._pass(b"\n")
            data = data[1:]
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        whole = b""
        if end:
            whole, self._rest = bytes(self._rest) + data[:end], bytearray()
        self._rest += data[end:]
        self._returned = not self._rest and whole.endswith(b"\r")
        lines = _LINE.findall(whole)
        while len(self._rest) >= PIECE_B:
            lines.append(bytes(self._rest[:PIECE_B]) + b"\n")
            del self._rest[:PIECE_B]
        if lines:
            self._pass(b"".join(self._prefix + line for line in lines))

    def finish(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest:
            self._pass(self._prefix + bytes(self._rest) + b"\n")
            self._rest.clear()

    def _pass(self, data: bytes) -> None:
        # Nobody may be reading any more (`| head`): the job goes on.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write(data)
            self._stream.flush()
