"""Keeps what a writer and a guard hear and answer, in a copy of the product: see `record`.

It stands beside `writer.py` and `guard.py` there, and writes a line of JSON for each message.
"""

from __future__ import annotations

import base64
import json
import os
from typing import Any

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tapped")


def keep(process: str, *what: Any) -> None:
    """Add a line; a writer closes what is open when it starts, so that no file stays open."""
    os.makedirs(FOLDER, exist_ok=True)
    with open(os.path.join(FOLDER, f"{process}-{os.getpid()}"), "a") as file:
        file.write(json.dumps(what) + "\n")


def writer(module: Any) -> None:
    """Tap the module `writer`: by number of its peer what each sends, and the answers."""
    peers: list[Any] = []
    receive, frames = module.Writer.receive, module.outbox.frames
    answer, forget = module.Peer.answer, module.Writer.forget

    def number(peer: Any) -> int:
        if peer not in peers:
            peers.append(peer)
        return peers.index(peer)

    def received(self: Any, peer: Any) -> None:
        def kept_frames(buffer: bytearray) -> list[tuple[bytes, bytes]]:
            whole: list[tuple[bytes, bytes]] = frames(buffer)
            for kind, body in whole:
                text = body if kind == module.outbox.JSON else base64.b64encode(body)
                keep("writer", number(peer), kind.decode(), text.decode())
            return whole

        module.outbox.frames = kept_frames
        receive(self, peer)

    def answered(self: Any, **values: Any) -> None:
        keep("writer", number(self), "answer", json.dumps(values))
        answer(self, **values)

    def forgot(self: Any, peer: Any) -> None:
        keep("writer", number(peer), "end", "")
        forget(self, peer)

    module.Writer.receive, module.Peer.answer = received, answered
    module.Writer.forget = forgot


def guard(module: Any) -> None:
    """Tap the module `guard`: each request and what it is answered."""

    class Tapped:
        """The connection of one request."""

        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def recv(self, size: int, flags: int = 0) -> bytes:
            data: bytes = self.connection.recv(size, flags)
            if not flags:
                keep("guard", "request", data.decode())
            return data

        def sendall(self, data: bytes) -> None:
            keep("guard", "reply", data.decode())
            self.connection.sendall(data)

        def sendmsg(self, pieces: list[bytes], beside: list[Any]) -> None:
            keep("guard", "reply", f"{sum(len(data) for _, _, data in beside)} descriptors")
            self.connection.sendmsg(pieces, beside)

        def fileno(self) -> int:
            number: int = self.connection.fileno()
            return number

        def dup(self) -> Any:
            return self.connection.dup()

    answer = module.Guard.answer
    module.Guard.answer = lambda self, connection: answer(self, Tapped(connection))
