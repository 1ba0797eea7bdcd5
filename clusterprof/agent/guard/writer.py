"""The process that writes one rank's files, so that the rank never waits for a file system.

The rank sends it messages (see `outbox`). One thread receives and keeps them, within bounds; the
other does all file operations, one after the other, and may wait for any of them. The step log is
written once a minute, a state at once. It lives until the rank has ended and all is written.

Arguments: FD PID.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import math
import os
import queue
import random
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from array import array
from typing import Any, Callable, Dict, List, Optional

from ..contracts import clocks, files, paths, processes, states
from ..contracts.states import State
from . import outbox, report_transfer, step_log

#: How often the step log is written, the first time after a part of it that differs by rank.
LOG_S = 60.0
#: How long it goes on after the rank's end where the file system does not answer.
LINGER_S = 300.0
#: Beside the training, and yet soon.
NICE = 10
#: A guard was killed: how long nsys may take to write, and its importer after it.
WRITING_S = 20.0
IMPORT_S = 30.0
_CHUNK = 1 << 20
#: Messages that are handled when they are received; all others wait for the file operations before.
_AT_ONCE = ("begin", "watch", "ignore")


class Peer:
    """One process that has something to write: the rank's, or its guard's."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(True)
        self.buffer = bytearray()
        self.log: Optional[step_log.StepLog] = None

    def answer(self, **values: Any) -> None:
        """Send the process an answer, if it is still there and reads."""
        with contextlib.suppress(OSError):
            self.connection.send(outbox.message(values), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Writer:
    """All file operations of one rank, in order; `do_NAME` gets the members of a message NAME."""

    def __init__(self, first: socket.socket, pid: int) -> None:
        self.pid = pid
        self.peers: Dict[int, Peer] = {}
        self.poll = select.poll()
        self.attend(first)
        self.jobs: "queue.Queue[Callable[[], None]]" = queue.Queue()
        self.folder = self.run = ""
        self.log_at = math.inf
        #: who waits for the order to close the window
        self.watching: List[Peer] = []
        #: folders that were made for the rank
        self.made: List[str] = []
        #: what the rank's nsys has on this node, while its guard lives or until it is transferred
        self.transfer: Optional[report_transfer.ReportTransfer] = None
        self.session = ""

    # -- the receiving thread ----------------------------------------------------------------

    def attend(self, connection: socket.socket) -> None:
        """Receive from one more process."""
        self.peers[connection.fileno()] = Peer(connection)
        self.poll.register(connection, select.POLLIN)

    def serve(self) -> None:
        """Until no process is left to receive from, and all is written or `LINGER_S` has passed."""
        threading.Thread(target=self.work, daemon=True).start()
        while self.peers:
            due_s = max(0.1, min(self.log_at - time.monotonic(), LOG_S))
            pause_s = states.LOOK_S if self.watching else due_s
            for descriptor, _ in self.poll.poll(1000 * pause_s):
                self.receive(self.peers[descriptor])
            self.tend()
        self.jobs.put(self.take_over)
        self.jobs.put(self.clean)
        with self.jobs.all_tasks_done:
            self.jobs.all_tasks_done.wait_for(lambda: not self.jobs.unfinished_tasks, LINGER_S)

    def tend(self) -> None:
        """Whatever is due."""
        now = time.monotonic()
        if self.watching and not self.jobs.unfinished_tasks:
            self.jobs.put(self.look)
        if now >= self.log_at:
            self.log_at = now + LOG_S
            for peer in self.peers.values():
                if peer.log is not None:
                    self.jobs.put(peer.log.write)
            if not processes.running(self.pid):  # a child of the rank's may hold the socket
                for peer in list(self.peers.values()):
                    self.forget(peer)

    def receive(self, peer: Peer) -> None:
        """One piece of what a process sends."""
        try:
            piece, beside, _, _ = peer.connection.recvmsg(1 << 18, socket.CMSG_SPACE(4))
        except OSError:
            piece, beside = b"", []
        for _, _, descriptor in beside:  # a guard's program has something to write as well
            self.attend(socket.socket(fileno=array("i", descriptor)[0]))
        if not piece:
            self.forget(peer)
        peer.buffer += piece
        for kind, body in outbox.frames(peer.buffer):
            if kind == outbox.JSON:
                members = json.loads(body)
                name = members.pop("do")
                handle = functools.partial(getattr(self, "do_" + name), peer, **members)
                if name in _AT_ONCE:
                    handle()
                else:
                    self.jobs.put(handle)
            elif kind == outbox.STEPS and peer.log is not None:
                first, *times = array("q", body)
                peer.log.add(first, zip(times[::2], times[1::2]))  # noqa: B905 - Python 3.8

    def forget(self, peer: Peer) -> None:
        """A process that has ended sends nothing more."""
        self.poll.unregister(peer.connection)
        del self.peers[peer.connection.fileno()]
        peer.connection.close()
        self.do_ignore(peer)
        if peer.log is not None:
            self.jobs.put(functools.partial(peer.log.write, all_of_it=True))

    def do_begin(self, peer: Peer, run: str, folder: str, window: List[int], wall_ns: int) -> None:
        """Make the rank's folder and its step log."""
        self.run, self.folder = run, folder
        peer.log = step_log.StepLog(folder, (window[0], window[1]), wall_ns)
        # The ranks of a job begin together, and are not to write together.
        self.log_at = time.monotonic() + LOG_S * random.uniform(0.2, 1)
        self.jobs.put(functools.partial(self.make, peer, peer.log))

    def do_watch(self, peer: Peer) -> None:
        """Look for the order to close the window from now on, and answer it."""
        self.watching.append(peer)
        self.jobs.put(self.look)

    def do_ignore(self, peer: Peer) -> None:
        """Look for it no more."""
        self.watching = [each for each in self.watching if each is not peer]

    # -- the working thread ------------------------------------------------------------------

    def work(self) -> None:
        """Do one job after the other, waiting for file systems."""
        while True:
            job = self.jobs.get()
            # A run directory that is gone, full or read-only hurts no training.
            with contextlib.suppress(Exception):
                job()
            self.jobs.task_done()

    def make(self, peer: Peer, log: step_log.StepLog) -> None:
        """See `do_begin`."""
        try:
            states.make(self.folder)
            log.claim()
        except OSError as error:
            peer.answer(trouble="the run directory cannot be written: %s" % error)

    def do_state(
        self, peer: Peer, state: Optional[str], reason: Optional[str], at_ns: int,
        facts: Dict[str, Any],
    ) -> None:  # fmt: skip
        """Advance the rank's state (None: as it is), the steps until then before it."""
        if peer.log is not None and state not in (State.COUNTING, State.ARMED, State.WAITING):
            with contextlib.suppress(OSError):
                peer.log.write(all_of_it=state in (None, State.COUNTED, State.LOST))
        now = state or State.of(states.read(self.folder)) or State.FINISHING
        states.advance(self.folder, now, reason, at_ns, **facts)

    def do_anchor(self, peer: Peer, wall_ns: int) -> None:
        """The log's times are by this difference of wall and monotonic clock."""
        if peer.log is not None:
            peer.log.anchor(wall_ns)

    def do_clock(self, peer: Peer, readings: List[Dict[str, Any]]) -> None:
        """Add to clock.json."""
        clocks.add(self.folder, readings)

    def do_file(self, peer: Peer, name: str, text: str) -> None:
        """Write a file `name.csv`, numbered as the step log, or any other."""
        log = peer.log if name.endswith(".csv") else None
        files.write(log.path(name) if log else os.path.join(self.folder, name), text)

    def do_folder(self, peer: Peer) -> None:
        """Make a folder on the node for the rank to write to."""
        self.made.append(tempfile.mkdtemp(prefix="clusterprof-"))
        peer.answer(folder=self.made[-1])

    def do_trace(self, peer: Peer, path: str, facts: Optional[Dict[str, Any]]) -> None:
        """Transfer a trace from the node; with `facts`, the rank has captured then."""
        try:
            states.make(self.folder)
            pack(path, os.path.join(self.folder, paths.TRACE), peer)
        except OSError as error:
            why = "the report could not be written: %s" % (error.strerror or error)
            states.advance(self.folder, State.LOST, why)
        else:
            if facts is not None:
                states.advance(self.folder, State.CAPTURED, None, **facts)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def do_finish(self, peer: Peer) -> None:
        """Write all there is, and answer when that is done."""
        if peer.log is not None:
            with contextlib.suppress(OSError):
                peer.log.write(all_of_it=True)
        self.clean()
        peer.answer(finished=True)

    def look(self) -> None:
        """Look for the order to close the window."""
        reason = states.stop_requested(self.run)
        for peer in self.watching:
            peer.answer(order=reason)

    def clean(self) -> None:
        """Nothing of ours is left on the node."""
        while self.made:
            shutil.rmtree(self.made.pop(), ignore_errors=True)

    def do_guard(self, peer: Peer, run: str, folder: str) -> None:
        """This is the guard of a rank under nsys."""
        self.run, self.folder = run, folder

    def do_keep(self, peer: Peer, private: str, session: str, importer: Optional[str]) -> None:
        """Transfer what nsys leaves in `private`, of a killed guard too (Open MPI: in 0.5 s)."""
        self.transfer = report_transfer.ReportTransfer(private, self.folder, importer)
        self.session = session

    def do_bring(self, peer: Peer) -> None:
        """Transfer the report while the training goes on."""
        if self.transfer is not None:
            peer.answer(brought=self.transfer.bring() is None)

    def do_settle(self, peer: Peer, known: Dict[str, Any], **ending: Any) -> None:
        """The program has ended: `ReportTransfer.settle`; `known` are the guard's members of it."""
        transfer, self.transfer = self.transfer, None
        try:
            if transfer is not None:
                vars(transfer).update(known)
                transfer.got_on = lambda: peer.answer(at=time.monotonic_ns())
                transfer.settle(**ending)
        finally:
            peer.answer(settled=True)

    def do_give_up(self, peer: Peer) -> None:
        """The program runs without nsys: keep what nsys printed, and nothing else."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.keep(paths.LOG)
            shutil.rmtree(transfer.private, ignore_errors=True)

    def take_over(self) -> None:
        """The guard was killed, and the program with it: wait for nsys, transfer its report."""
        if self.transfer is None:
            return
        if State.of(states.read(self.folder)) is State.CAPTURING:
            with contextlib.suppress(OSError):  # whoever collects waits for a rank that finishes
                states.advance(
                    self.folder, State.FINISHING, "the rank was killed inside the window"
                )
        until = time.monotonic() + WRITING_S
        while processes.of_session(self.session) and time.monotonic() < until:
            time.sleep(0.05)
        processes.end_own_nsys(self.session)
        self.transfer.settle(128 + signal.SIGKILL, IMPORT_S, opened=True)


def pack(source: str, target: str, peer: Peer) -> None:
    """Compress a file, by rename; answers after each piece. Raises OSError."""
    with open(source, "rb") as plain, files.new(target) as written:
        # Level 1: 6 takes four times as long for a tenth of the size.
        with gzip.GzipFile("", "wb", 1, written) as packed:
            for piece in iter(lambda: plain.read(_CHUNK), b""):
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
