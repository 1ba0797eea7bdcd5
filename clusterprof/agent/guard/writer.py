"""The process that writes one rank's files, so that the rank never waits for a file system.

The rank hands it messages (see `outbox`): steps, states, the clock's readings, a trace to take
home. One thread listens and keeps what it hears, within bounds; another does all file operations,
one after the other, and may wait for any of them. The step log is written once a
minute, a state at once. It lives until the rank has ended, however it ended, and all is written.

Arguments: FD PID.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import math
import os
import random
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from array import array
from typing import Any, Callable, Deque, Dict, List, Optional

from ..contracts import clocks, files, paths, processes, states
from ..contracts.states import State
from . import outbox, report_transfer, step_log

#: How often the step log is written; the first time after a part of it that differs by rank.
LOG_S = 60.0

#: How long it goes on after the rank's end where the file system does not answer.
LINGER_S = 300.0

#: Beside the training, and yet soon.
NICE = 10

#: A guard was killed: how long nsys may take to write, and its importer after it.
WRITING_S = 20.0
IMPORT_S = 30.0

_CHUNK = 1 << 20
#: Space for one file descriptor beside a message.
_BESIDE = socket.CMSG_SPACE(4)


class Peer:
    """One process that has something to write: the rank's, or its guard's."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(True)
        self.buffer = bytearray()
        self.log: Optional[step_log.StepLog] = None

    def answer(self, **values: Any) -> None:
        """Tell the process something, if it is still there and reads."""
        body = json.dumps(values).encode("ascii")
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
        self.log_at = math.inf
        #: who waits for the order to close the window
        self.watching: List[Peer] = []
        #: folders that were made for the rank
        self.made: List[str] = []
        #: what the rank's nsys has on this node, while its guard lives or until it is home
        self.home: Optional[report_transfer.ReportTransfer] = None
        self.session = ""

    # -- messages ----------------------------------------------------------------------------

    def attend(self, connection: socket.socket) -> None:
        """Listen to one more process."""
        self.peers[connection.fileno()] = Peer(connection)
        self.poll.register(connection, select.POLLIN)

    def serve(self) -> None:
        """Until no process is left to listen to, and all is written or `LINGER_S` has passed."""
        threading.Thread(target=self.work, daemon=True).start()
        while self.peers:
            for descriptor, _ in self.poll.poll(1000 * self.pause_s()):
                self.hear(self.peers[descriptor])
            self.tend()
        if self.home is not None:
            self.later(self.take_over)
        self.later(self.clean)
        with self.changed:
            self.changed.wait_for(lambda: not self.jobs and not self.busy, LINGER_S)

    def pause_s(self) -> float:
        """How long to wait for the next message."""
        due = min(self.log_at - time.monotonic(), LOG_S)
        return states.LOOK_S if self.watching else max(0.1, due)

    def tend(self) -> None:
        """Whatever is due."""
        now = time.monotonic()
        if self.watching and not self.jobs and not self.busy:
            self.later(self.look)
        if now >= self.log_at:
            self.log_at = now + LOG_S
            for peer in self.peers.values():
                if peer.log is not None:
                    self.later(peer.log.write)
            with contextlib.suppress(PermissionError):
                try:  # a child of the rank's may hold the socket
                    os.kill(self.pid, 0)
                except ProcessLookupError:
                    for peer in list(self.peers.values()):
                        self.forget(peer)

    def hear(self, peer: Peer) -> None:
        """One piece of what a process says."""
        try:
            piece, beside, _, _ = peer.connection.recvmsg(1 << 18, _BESIDE)
        except OSError:
            piece, beside = b"", []
        for _, _, descriptor in beside:  # a guard's program has something to write as well
            self.attend(socket.socket(fileno=array("i", descriptor)[0]))
        if not piece:
            self.forget(peer)
        peer.buffer += piece
        for kind, body in outbox.frames(peer.buffer):
            if kind == outbox.STEPS:
                all_of_it = array("q", body)
                if peer.log is not None:
                    pairs = range(1, len(all_of_it), 2)
                    peer.log.add(all_of_it[0], [(all_of_it[i], all_of_it[i + 1]) for i in pairs])
            else:
                facts = json.loads(body)
                getattr(self, "do_" + facts.pop("do"))(peer, **facts)

    def forget(self, peer: Peer) -> None:
        """A process that has ended says nothing more."""
        self.poll.unregister(peer.connection)
        del self.peers[peer.connection.fileno()]
        peer.connection.close()
        self.do_ignore(peer)
        if peer.log is not None:
            self.later(lambda log=peer.log: log.write(all_of_it=True))  # type: ignore[misc]

    # -- what is asked for -------------------------------------------------------------------

    def do_begin(self, peer: Peer, run: str, folder: str, window: List[int], wall_ns: int) -> None:
        """Make the rank's folder and its step log."""
        self.run, self.folder = run, folder
        log = peer.log = step_log.StepLog(self.folder, (window[0], window[1]), wall_ns)
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
        log = peer.log

        def advance() -> None:
            if log is not None and state not in (State.COUNTING, State.ARMED, State.WAITING):
                with contextlib.suppress(OSError):
                    log.write(all_of_it=state is None or state in (State.COUNTED, State.LOST))
            now = state or State.of(states.read(self.folder)) or State.FINISHING
            states.advance(self.folder, now, reason, at_ns, **facts)

        self.later(advance)

    def do_anchor(self, peer: Peer, wall_ns: int) -> None:
        """The log's times are by this difference of wall and monotonic clock."""
        if peer.log is not None:
            peer.log.anchor(wall_ns)

    def do_clock(self, peer: Peer, readings: List[Dict[str, Any]]) -> None:
        """Add to clock.json."""
        self.later(lambda: clocks.add(self.folder, readings))

    def do_file(self, peer: Peer, name: str, text: str) -> None:
        """Write a file `name.csv`, numbered as the step log, or any other."""

        def write() -> None:
            path = os.path.join(self.folder, name)
            if peer.log is not None and name.endswith(".csv"):
                path = peer.log.path(name)
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
                pack(path, os.path.join(self.folder, paths.TRACE), peer)
            except OSError as error:
                why = "the report could not be written: %s" % (error.strerror or error)
                states.advance(self.folder, State.LOST, why)
            else:
                if facts is not None:
                    states.advance(self.folder, State.CAPTURED, None, **facts)
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
        if peer.log is not None:
            self.later(lambda log=peer.log: log.write(all_of_it=True))  # type: ignore[misc]
        self.later(self.clean)
        self.later(lambda: peer.answer(finished=True))

    def do_nothing(self, peer: Peer) -> None:
        """A message that goes along with a socket."""

    # ... by a guard

    def do_guard(self, peer: Peer, run: str, folder: str) -> None:
        """This is the guard of a rank under nsys."""
        self.run, self.folder = run, folder

    def do_keep(self, peer: Peer, private: str, session: str, importer: Optional[str]) -> None:
        """What this session of nsys leaves in the folder `private` is to come home.

        Also where the guard is killed: a launcher that ends its ranks gives them less time than
        nsys needs to write (Open MPI: half a second).
        """
        self.home = report_transfer.ReportTransfer(private, self.folder)
        self.home.importer, self.session = importer, session

    def do_bring(self, peer: Peer) -> None:
        """Take the report home while the training goes on."""
        home = self.home

        def bring() -> None:
            if home is not None:
                peer.answer(brought=home.bring() is None)

        self.later(bring)

    def do_settle(
        self,
        peer: Peer,
        status: int,
        patience_s: float,
        opened: bool,
        troubles: List[str],
        known: Dict[str, Any],
    ) -> None:
        """The program has ended: `ReportTransfer.settle`; `known` are the guard's members of it."""
        home, self.home = self.home, None

        def settle() -> None:
            try:
                if home is not None:
                    vars(home).update(known)
                    home.got_on = lambda: peer.answer(at=time.monotonic_ns())
                    home.settle(status, patience_s, opened=opened, troubles=troubles)
            finally:
                peer.answer(settled=True)

        self.later(settle)

    def do_give_up(self, peer: Peer, reason: str) -> None:
        """The program runs without nsys."""
        home, self.home = self.home, None
        at_ns = time.time_ns()

        def settle() -> None:
            states.advance(self.folder, State.LOST, reason, at_ns)
            if home is not None:
                home.keep(paths.LOG)
                shutil.rmtree(home.private, ignore_errors=True)

        self.later(settle)

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
            # A run directory that is gone, full or read-only hurts no training.
            with contextlib.suppress(Exception):
                job()

    def look(self) -> None:
        """Look for the order to close the window."""
        reason = states.stop_requested(self.run)
        for peer in self.watching:
            peer.answer(order=reason)

    def clean(self) -> None:
        """Nothing of ours is left on the node."""
        while self.made:
            shutil.rmtree(self.made.pop(), ignore_errors=True)

    def take_over(self) -> None:
        """The guard was killed, and the program with it: wait for nsys, bring its report home."""
        home = self.home
        if home is None:
            return
        if State.of(states.read(self.folder)) is State.CAPTURING:
            # Whoever collects waits for a rank that is finishing.
            home.say(State.FINISHING, "the rank was killed inside the window")
        until = time.monotonic() + WRITING_S
        while processes.of_session(self.session) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in processes.of_session(self.session):
            os.kill(pid, signal.SIGKILL)
        home.settle(128 + signal.SIGKILL, IMPORT_S, opened=True)


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


def main(argv: List[str]) -> None:
    """Write what process PID and its guard hand over on the socket FD: arguments FD PID."""
    descriptor, pid = map(int, argv)
    alone(descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    Writer(connection, pid).serve()
    os._exit(0)
