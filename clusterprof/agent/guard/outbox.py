"""The rank's end of its writer: whatever is to be written is handed to another process.

A thread that waits for a file system that does not answer cannot be ended, not even by SIGKILL, and
keeps its process: so the training's process opens no file of ours at all. It only hands messages
to a socket, and never waits for that either; what does not fit stays in memory, up to a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from array import array
from itertools import chain
from typing import Any, Dict, Iterable, List, Optional, Tuple

from ..contracts import identity, messages, processes
from ..contracts.states import State

#: A message: the length of its body, its kind, its body.
HEAD = struct.Struct("<Ic")
JSON, STEPS = b"J", b"S"

#: More is not kept for a writer that does not read: steps are left out then.
MOST_B = 4_000_000

#: How long a rank waits at its end for what is still to be written: without a sign of progress,
#: and in all.
QUIET_S = 4.0
FINISH_S = 8.0
#: ... until the writer has taken it, where a guard waits for the rest.
TAKE_S = 1.0


#: The writer forks away at once, so that the program finds no child that it did not start.
_FORK = "import os, sys\nif os.fork(): os._exit(0)\nos.execv(sys.argv[1], sys.argv[1:])"


class Outbox:
    """Messages to the writer, and its answers; raises nothing."""

    def __init__(self, connection: Optional[socket.socket]) -> None:
        self.connection = connection
        self.pid = os.getpid()
        self.waiting = bytearray()
        self.answered = bytearray()
        #: the latest answer of each kind
        self.answers: Dict[str, Any] = {}
        #: which file our descriptor is: a program may close it, and open another in its place
        self._file = self._number()
        if connection is not None:
            connection.setblocking(False)

    def say(self, do: str, **facts: Any) -> None:
        """Have something done: `facts` are the arguments of the writer's `do_...`."""
        body = json.dumps(dict(facts, do=do)).encode("ascii")
        self._send(JSON, body)

    def state(self, state: Optional[State], reason: Optional[str] = None, **facts: Any) -> None:
        """Advance the rank's state, or only add facts to what it is (None); see `states`."""
        self.say("state", state=state, reason=reason, at_ns=time.time_ns(), facts=facts)

    def steps(self, first: int, steps: Iterable[Tuple[int, int]]) -> None:
        """Add to the step log the steps from number `first` on."""
        if len(self.waiting) < MOST_B:
            self._send(STEPS, array("q", chain((first,), *steps)).tobytes())

    def look(self) -> Dict[str, Any]:
        """What the writer has answered by now."""
        self._push()
        self._check()
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
        for kind, body in frames(self.answered):
            if kind == JSON:
                self.answers.update(json.loads(body))
        if "trouble" in self.answers:
            messages.complain(self.answers.pop("trouble"))
        return self.answers

    def wait(self, name: str, seconds: float, in_all: float = 0.0) -> Any:
        """The answer `name`; None where the writer says nothing more for `seconds`."""
        began = last = time.monotonic()
        self.look()
        while name not in self.answers:
            before = dict(self.answers)
            now = time.monotonic()
            left = min(last + seconds, began + max(seconds, in_all)) - now
            if self.connection is None or left <= 0:
                break
            poll = select.poll()
            poll.register(self.connection, select.POLLIN | (select.POLLOUT if self.waiting else 0))
            poll.poll(left * 1000)
            if self.look() != before:
                last = time.monotonic()
        return self.answers.pop(name, None)

    def share(self) -> Optional[socket.socket]:
        """A socket by which another process speaks to the same writer; None if that fails."""
        self._push()
        if self.connection is None or self.waiting:
            return None
        ours, theirs = socket.socketpair()
        body = json.dumps({"do": "nothing"}).encode("ascii")
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [ours.fileno()]))]
        try:
            self.connection.sendmsg([HEAD.pack(len(body), JSON) + body], beside)
        except OSError:
            theirs.close()
            return None
        finally:
            ours.close()
        return theirs

    def hand_over(self) -> None:
        """Have the writer take all that was said, which another process waits for."""
        deadline = time.monotonic() + TAKE_S
        while self.waiting and self.connection is not None and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self.connection, select.POLLOUT)
            poll.poll(TAKE_S * 1000)
            self._push()
        self.close()

    def finish(self) -> None:
        """Have all that was said written, as long as the writer gets on with it."""
        self.say("finish")
        self.wait("finished", QUIET_S, FINISH_S)
        self.close()

    def close(self) -> None:
        """Say nothing more; in a forked child, or where the writer is gone."""
        self._check()
        connection, self.connection = self.connection, None
        self.waiting.clear()
        if connection is not None:
            connection.close()

    def _send(self, kind: bytes, body: bytes) -> None:
        if self.connection is None or os.getpid() != self.pid:
            return
        self.waiting += HEAD.pack(len(body), kind) + body
        self._push()

    def _number(self) -> Optional[Tuple[int, int]]:
        try:
            found = os.fstat(self.connection.fileno()) if self.connection is not None else None
        except OSError:
            return None
        return (found.st_dev, found.st_ino) if found is not None else None

    def _check(self) -> None:
        """Leave our descriptor alone where it is the program's by now."""
        if self.connection is not None and self._number() != self._file:
            self.connection.detach()
            self.connection = None

    def _push(self) -> None:
        self._check()
        try:
            while self.connection is not None and self.waiting:
                sent = self.connection.send(self.waiting, socket.MSG_NOSIGNAL)
                del self.waiting[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()


def of_guard(address: str) -> Optional[Outbox]:
    """The guard's writer for the program that it guards; None where it does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
        try:
            guard.settimeout(5)
            guard.connect(address)
            guard.sendall(b"writer\n")
            _, beside, _, _ = guard.recvmsg(16, socket.CMSG_SPACE(4))
        except OSError:
            return None
    for _, _, descriptor in beside:
        return Outbox(socket.socket(fileno=array("i", descriptor)[0]))
    return None


def frames(buffer: bytearray) -> List[Tuple[bytes, bytes]]:
    """Take the whole messages off the beginning of `buffer`: kind and body."""
    found = []
    at = 0
    while len(buffer) >= at + HEAD.size:
        size, kind = HEAD.unpack_from(buffer, at)
        if len(buffer) < at + HEAD.size + size:
            break
        found.append((kind, bytes(buffer[at + HEAD.size : at + HEAD.size + size])))
        at += HEAD.size + size
    del buffer[:at]
    return found


def start() -> Outbox:
    """Start a writer for this process. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        # What makes nsys follow a process is not for this one.
        environ = {
            name: value for name, value in os.environ.items()
            if not name.startswith(identity.FOLLOWED)
        }  # fmt: skip
        arguments = [*processes.part("writer"), str(theirs.fileno()), str(os.getpid())]
        command = [*processes.isolated(), "-c", _FORK, *arguments]
        child = os.posix_spawn(sys.executable, command, environ, file_actions=nothing)
    with contextlib.suppress(ChildProcessError):  # SIGCHLD may be ignored
        os.waitpid(child, 0)
    return Outbox(ours)
