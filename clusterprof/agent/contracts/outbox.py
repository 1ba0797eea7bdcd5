"""The rank's end of its writer: whatever is to be written is sent to another process.

A thread that waits for a file system that does not answer cannot be ended, not even by SIGKILL, and
keeps its process: so the training's process opens no file of ours at all. It only sends messages
to a socket, and never waits for that either; what does not fit stays in memory, up to a bound.
"""

from __future__ import annotations

import _socket
import _struct  # `struct` is a file more
import contextlib
import json
import os
from itertools import chain
from typing import Any, Dict, Iterable, List, Optional, Tuple

from . import beside, descriptors, messages
from .states import State
from .timing import REAL, Clock

#: A message: the length of its body (little end first), its kind, its body. One of kind PEER comes
#: with a socket; one of kind FILE has a name, a line end, and the content.
_SIZE_B, _HEAD_B = 4, 5
JSON, STEPS, FILE, PEER = b"J", b"S", b"F", b"P"

#: An answer whose name begins so is the order for a later window: see `contracts.plan`.
WINDOW = "window "
#: What a rank computes on, as its writer is told to ask for samples of it; else nothing.
CUDA, ROCM = "cuda", "rocm"
#: More is not kept for a writer that does not read: steps are left out then.
MOST_B = 4_000_000
#: How long a rank waits at its end for what is still to be written: without a sign of progress,
#: in all, and until the writer has taken it, where a guard waits for the rest.
QUIET_S = 4.0
FINISH_S = 8.0
TAKE_S = 1.0


def message(values: Dict[str, Any]) -> bytes:
    """A message of the kind JSON."""
    return framed(JSON, json.dumps(values).encode("ascii"))


def framed(kind: bytes, body: bytes) -> bytes:
    """A message of any kind."""
    return len(body).to_bytes(_SIZE_B, "little") + kind + body


def frames(buffer: bytearray) -> List[Tuple[bytes, bytes]]:
    """Take the whole messages off the beginning of `buffer`: kind and body."""
    whole = []
    while len(buffer) >= _HEAD_B:
        end = _HEAD_B + int.from_bytes(buffer[:_SIZE_B], "little")
        if len(buffer) < end:
            break
        whole.append((bytes(buffer[_SIZE_B:_HEAD_B]), bytes(buffer[_HEAD_B:end])))
        del buffer[:end]
    return whole


class Outbox:
    """Messages to the writer, and its answers; raises nothing."""

    def __init__(self, connection: Optional[_socket.socket], clock: Clock = REAL) -> None:
        self.connection = connection
        self.clock = clock
        self.began_s = clock.now()
        self.pid = os.getpid()
        self.waiting = bytearray()
        self.answered = bytearray()
        #: the latest answer of each kind
        self.answers: Dict[str, Any] = {}
        if connection is not None:
            connection.setblocking(False)
            descriptors.hide([connection.fileno()])

    def say(self, do: str, **members: Any) -> None:
        """Have something done: `members` are the arguments of the writer's `do_...`."""
        self._send(message(dict(members, do=do)))

    def state(self, state: Optional[State], reason: Optional[str] = None, **facts: Any) -> None:
        """Advance the rank's state, or only add facts to what it is (None); see `states`."""
        self.say("state", state=state, reason=reason, at_ns=self.clock.wall_ns(), facts=facts)

    def steps(self, first: int, steps: Iterable[Tuple[int, int]]) -> None:
        """Add to the step log the steps from number `first` on."""
        if len(self.waiting) < MOST_B:
            times = [first, *chain(*steps)]
            self._send(framed(STEPS, _struct.pack("=%dq" % len(times), *times)))

    def file(self, name: str, content: bytes) -> None:
        """Have a file of these bytes written, numbered as the step log."""
        if len(self.waiting) < MOST_B:
            self._send(framed(FILE, name.encode() + b"\n" + content))

    def look(self) -> Dict[str, Any]:
        """What the writer has answered by now."""
        self._push()
        try:
            while self.connection is not None:
                piece = self.connection.recv(65536)
                if not piece:
                    self.close()
                self.answered += piece
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        for _, body in frames(self.answered):
            self.answers.update(json.loads(body))
        if "trouble" in self.answers:
            messages.complain(self.answers.pop("trouble"))
        return self.answers

    def wait(self, name: str, seconds: float, in_all: float = 0.0) -> Any:
        """The answer `name`; None where the writer answers nothing more for `seconds`."""
        began = last = self.clock.now()
        self.look()
        while name not in self.answers:
            before = dict(self.answers)
            left_s = min(last + seconds, began + max(seconds, in_all)) - self.clock.now()
            if left_s <= 0 or not self._ready(left_s):
                break
            if self.look() != before:
                last = self.clock.now()
        return self.answers.pop(name, None)

    def share(self) -> Optional[_socket.socket]:
        """A socket by which another process reaches the same writer; None if that fails."""
        self._push()
        if self.connection is None or self.waiting:
            return None
        ours, theirs = _socket.socketpair()
        with contextlib.closing(ours):
            try:
                rights = descriptors.rights([ours.fileno()])
                self.connection.sendmsg([framed(PEER, b"")], rights)
            except OSError:
                theirs.close()
                return None
        return theirs

    def hand_over(self) -> None:
        """Have the writer take all that was sent, which another process waits for."""
        deadline = self.clock.now() + TAKE_S
        while self.waiting and self.clock.now() < deadline and self._ready(TAKE_S, answers=False):
            self._push()
        self.close()

    def finish(self) -> None:
        """Have all that was sent written, as long as the writer gets on with it."""
        beside.wake()
        self.say("finish")
        self.wait("finished", QUIET_S, FINISH_S)
        self.close()

    def of_window(self, number: int) -> Outbox:
        """The way to the files of a later window."""
        return _OfWindow(self, number)

    def windows(self) -> List[Dict[str, Any]]:
        """The orders for later windows that have come since the last time, oldest first."""
        names = [name for name in self.answers if name.startswith(WINDOW)]
        return [self.answers.pop(name) for name in names]

    def interrupt(self) -> None:
        """Have a thread that waits for the writer wait no more."""
        self._check()
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        """Send nothing more; in a forked child, or where the writer is gone."""
        self._check()
        connection, self.connection = self.connection, None
        self.waiting.clear()
        if connection is not None:
            connection.close()

    def _ready(self, seconds: float, answers: bool = True) -> bool:
        """Wait to send what waits, and for answers; False where there is no writer any more."""
        if self.connection is None:
            return False
        sockets = [self.connection]
        self.clock.wait(sockets if answers else [], seconds, sockets if self.waiting else [])
        return True

    def _send(self, whole: bytes) -> None:
        if self.connection is not None and os.getpid() == self.pid:
            self.waiting += whole
            self._push()

    def _check(self) -> None:
        """Leave our descriptor alone where it is the program's by now."""
        if self.connection is not None and not descriptors.is_hidden(self.connection.fileno()):
            self.connection.detach()
            self.connection = None

    def _push(self) -> None:
        self._check()
        try:
            while self.connection is not None and self.waiting:
                sent = self.connection.send(self.waiting, _socket.MSG_NOSIGNAL)
                del self.waiting[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()


class _OfWindow(Outbox):
    """Speaks of a later window by the rank's own outbox."""

    def __init__(self, outbox: Outbox, number: int) -> None:
        super().__init__(None, outbox.clock)
        self.outbox = outbox
        self.number = number

    def say(self, do: str, **members: Any) -> None:
        self.outbox.say(do, later=self.number, **members)

    def file(self, name: str, content: bytes) -> None:
        self.outbox.file("%d/%s" % (self.number, name), content)

    def look(self) -> Dict[str, Any]:
        return self.outbox.look()

    def wait(self, name: str, seconds: float, in_all: float = 0.0) -> Any:
        return self.outbox.wait(name, seconds, in_all)


def of_guard(address: str) -> Optional[Outbox]:
    """The guard's writer for the program that it guards; None where it does not answer."""
    try:
        with contextlib.closing(descriptors.asked(address, "writer", 5)) as guard:
            given = descriptors.receive(guard)
    except OSError:
        return None
    return Outbox(_socket.socket(fileno=given.popitem()[1])) if given else None


def start() -> Outbox:
    """Start a writer for this process. Raises OSError."""
    ours, theirs = _socket.socketpair()
    with contextlib.closing(theirs):
        beside.start("writer", theirs, str(os.getpid()))
    return Outbox(ours)
