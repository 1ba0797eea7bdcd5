"""The process that writes one rank's files, so that the rank never waits for a file system.

The rank hands it messages (see `outbox`): steps, states, the clock's readings, a trace to take
home. One thread listens and keeps what it hears, within bounds; another does all file operations,
one after the other, and may stand still as long as it likes. The step log is written once a
minute, a state at once. It lives until the rank has ended, however it ended, and all is written.

Run as a script: `python -I -S writer.py FD PID`.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from array import array
from typing import Any, Callable, Deque, Dict, List, Optional

if __package__:
    from . import clocks, files, orders, outbox, states, steplog
else:  # run as a script, isolated: our own folder is not on sys.path
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import clocks  # type: ignore[import-not-found,no-redef]
    import files  # type: ignore[import-not-found,no-redef]
    import orders  # type: ignore[import-not-found,no-redef]
    import outbox  # type: ignore[import-not-found,no-redef]
    import states  # type: ignore[import-not-found,no-redef]
    import steplog  # type: ignore[import-not-found,no-redef]

#: How often the step log is written; the first time after a part of it that differs by rank.
LOG_S = 60.0

#: How long it goes on after the rank's end where the file system stands still.
LINGER_S = 300.0

#: Beside the training, and yet soon.
NICE = 10

_CHUNK = 1 << 20


class Peer:
    """One process that has something to write: the rank's, or its guard's."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(True)
        self.heard = bytearray()

    def answer(self, **told: Any) -> None:
        """Tell the process something, if it is still there and reads."""
        body = json.dumps(told).encode("ascii")
        with contextlib.suppress(OSError):
            message = outbox.HEAD.pack(len(body), outbox.JSON) + body
            self.connection.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Writer:
    """All file operations of one rank, in the order in which they were asked for."""

    def __init__(self, first: socket.socket, pid: int) -> None:
        self.pid = pid
        self.peers: Dict[int, Peer] = {}
        self.poll = select.poll()
        self.attend(first)
        self.jobs: Deque[Callable[[], None]] = collections.deque()
        self.changed = threading.Condition()
        self.busy = False
        self.folder = ""
        self.run = ""
        self.log: Optional[steplog.StepLog] = None
        self.log_at = 0.0
        #: who waits for the order to close the window
        self.watching: List[Peer] = []
        #: folders that were made for the rank
        self.made: List[str] = []

    # -- what is heard -----------------------------------------------------------------------

    def attend(self, connection: socket.socket) -> None:
        """Listen to one more process."""
        self.peers[connection.fileno()] = Peer(connection)
        self.poll.register(connection, select.POLLIN)

    def serve(self) -> None:
        """Until nobody is left to listen to, and all is written or `LINGER_S` has passed."""
        threading.Thread(target=self.work, daemon=True).start()
        while self.peers:
            for descriptor, _ in self.poll.poll(1000 * self.pause_s()):
                self.hear(self.peers[descriptor])
            self.tend()
        self.later(self.end)
        with self.changed:
            self.changed.wait_for(lambda: not self.jobs and not self.busy, LINGER_S)

    def pause_s(self) -> float:
        """How long there is nothing to do unless somebody speaks."""
        return orders.EVERY_S if self.watching else max(0.1, self.log_at - time.monotonic())

    def tend(self) -> None:
        """Whatever is due."""
        now = time.monotonic()
        if self.watching and not self.jobs and not self.busy:
            self.later(self.look)
        if now >= self.log_at:
            self.log_at = now + LOG_S
            self.later(self.write_log)
            with contextlib.suppress(PermissionError):
                try:  # a child of the rank's may hold the socket
                    os.kill(self.pid, 0)
                except ProcessLookupError:
                    for peer in list(self.peers.values()):
                        self.forget(peer)

    def hear(self, peer: Peer) -> None:
        """One piece of what a process says."""
        try:
            piece = peer.connection.recv(1 << 18)
        except OSError:
            piece = b""
        if not piece:
            self.forget(peer)
        peer.heard += piece
        for kind, body in outbox.frames(peer.heard):
            if kind == outbox.STEPS:
                all_of_it = array("q", body)
                if self.log is not None:
                    pairs = range(1, len(all_of_it), 2)
                    self.log.add(all_of_it[0], [(all_of_it[i], all_of_it[i + 1]) for i in pairs])
            else:
                facts = json.loads(body)
                getattr(self, "do_" + facts.pop("do"))(peer, **facts)

    def forget(self, peer: Peer) -> None:
        """A process that has ended says nothing more."""
        self.poll.unregister(peer.connection)
        del self.peers[peer.connection.fileno()]
        peer.connection.close()
        self.do_ignore(peer)

    # -- what is asked for -------------------------------------------------------------------

    def do_begin(self, peer: Peer, run: str, folder: str, window: List[int], wall_ns: int) -> None:
        """Make the rank's folder and its step log."""
        self.run, self.folder = run, folder
        log = self.log = steplog.StepLog(self.folder, (window[0], window[1]), wall_ns)
        # The ranks of a job begin together, and are not to write together.
        self.log_at = time.monotonic() + LOG_S * random.uniform(0.2, 1)

        def make() -> None:
            try:
                states.make(self.folder)
                log.claim()
            except OSError as error:
                peer.answer(trouble="the run directory cannot be written: %s" % error)
                raise

        self.later(make)

    def do_state(
        self,
        peer: Peer,
        state: Optional[str],
        reason: Optional[str],
        at_ns: int,
        facts: Dict[str, Any],
    ) -> None:
        """Advance the rank's state (None: as it is), the steps until then before it."""
        log = self.log

        def advance() -> None:
            if log is not None and state not in ("counting", "armed", "waiting"):
                with contextlib.suppress(OSError):
                    log.write(all_of_it=state is None or state in ("counted", "lost"))
            now = state or str(states.read(self.folder).get("state", "finishing"))
            states.advance(self.folder, now, reason, at_ns, **facts)

        self.later(advance)

    def do_anchor(self, peer: Peer, wall_ns: int) -> None:
        """The log's times are by this difference of wall and monotonic clock."""
        if self.log is not None:
            self.log.anchor(wall_ns)

    def do_clock(self, peer: Peer, readings: List[Dict[str, Any]]) -> None:
        """Add to clock.json."""
        self.later(lambda: clocks.add(self.folder, readings))

    def do_file(self, peer: Peer, name: str, text: str) -> None:
        """Write a file `name.csv`, numbered as the step log, or any other."""

        def write() -> None:
            plain, ending = os.path.splitext(name)
            path = os.path.join(self.folder, name)
            if ending == ".csv" and self.log is not None:
                path = self.log.path(plain)
            files.write(path, text)

        self.later(write)

    def do_folder(self, peer: Peer) -> None:
        """Make a folder on the node for the rank to write to."""

        def make() -> None:
            folder = tempfile.mkdtemp(prefix="clusterprof-")
            self.made.append(folder)
            peer.answer(folder=folder)

        self.later(make)

    def do_trace(self, peer: Peer, path: str, facts: Optional[Dict[str, Any]]) -> None:
        """Pack a trace that lies on the node and take it home; `facts` of `captured`, if it is."""

        def bring() -> None:
            try:
                states.make(self.folder)
                pack(path, os.path.join(self.folder, "trace.json.gz"), peer)
            except OSError as error:
                why = "the report could not be written: %s" % (error.strerror or error)
                states.advance(self.folder, "lost", why)
            else:
                if facts is not None:
                    states.advance(self.folder, "captured", None, **facts)
            with contextlib.suppress(OSError):
                os.unlink(path)

        self.later(bring)

    def do_watch(self, peer: Peer) -> None:
        """Look for the order to close the window from now on, and say what was seen."""
        self.watching.append(peer)
        self.later(self.look)

    def do_ignore(self, peer: Peer) -> None:
        """Look for it no more."""
        self.watching = [each for each in self.watching if each is not peer]

    def do_finish(self, peer: Peer) -> None:
        """Write all there is, and say when that is done."""
        self.later(self.end)
        self.later(lambda: peer.answer(finished=True))

    # -- what is done, in the working thread ---------------------------------------------------

    def later(self, job: Callable[[], None]) -> None:
        """Do this when all before it is done."""
        with self.changed:
            self.jobs.append(job)
            self.changed.notify_all()

    def work(self) -> None:
        """The thread that waits for file systems."""
        while True:
            with self.changed:
                self.busy = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: bool(self.jobs))
                job = self.jobs.popleft()
                self.busy = True
            # A run directory that is gone, full or read-only hurts nobody.
            with contextlib.suppress(Exception):
                job()

    def look(self) -> None:
        """Look for the order to close the window."""
        reason = orders.read(self.run)
        for peer in self.watching:
            peer.answer(order=reason)

    def write_log(self) -> None:
        """The step log's new rows."""
        if self.log is not None:
            self.log.write()

    def end(self) -> None:
        """The rank ends: all of its log; nothing is left on the node."""
        if self.log is not None:
            with contextlib.suppress(OSError):
                self.log.write(all_of_it=True)
        while self.made:
            shutil.rmtree(self.made.pop(), ignore_errors=True)


def pack(source: str, target: str, peer: Peer) -> None:
    """Compress a file, by rename; says each piece. Raises OSError."""
    with open(source, "rb") as plain, files.new(target) as written:
        # Level 1: 6 takes four times as long for a tenth of the size.
        with gzip.GzipFile("", "wb", 1, written) as packed:
            while True:
                piece = plain.read(_CHUNK)
                if not piece:
                    break
                packed.write(piece)
                peer.answer(packed=plain.tell())


def alone(keep: int) -> None:
    """Hold nothing of the rank's: a launcher waits for its pipes to close."""
    os.setsid()
    os.chdir("/")
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)


def main(descriptor: int, pid: int) -> None:
    """Write what process `pid` and its guard hand over on the socket `descriptor`."""
    alone(descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    Writer(connection, pid).serve()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
