"""The process that writes one rank's files, so that the rank never waits for a file system.

The rank sends it messages (see `outbox`). One thread receives and keeps them, within bounds;
another does all file operations, one after the other, and may wait for any of them, and a third
makes folders on the node, which the run directory must not delay. The step log is
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
import shutil
import signal
import socket
import tempfile
import threading
from array import array
from typing import Any, Callable, Dict, List, Optional, Union

from ..contracts import clocks, descriptors, files, outbox, paths, plan as plans, processes, states
from ..contracts.plan import Reduction
from ..contracts.states import State
from ..contracts.timing import REAL, Clock
from . import step_log
from .hardware_sampler import Asked, HardwareSampler
from .report_transfer import Reducing, ReportTransfer

#: How often the step log is written, where the plan says nothing else; the first time after a part
#: of it that differs by rank.
LOG_S = 60.0
#: How long it goes on after the rank's end where the file system does not answer.
LINGER_S = 300.0
#: So long a process that closed its socket is given to end.
ENDING_S = 5.0
#: Beside the training, and yet soon.
NICE = 10
#: A guard was killed: how long nsys may take to write, and its importer after it.
WRITING_S = 20.0
IMPORT_S = 30.0
#: How long a rank under torch.profiler waits at its end for its trace's tables: what it may take
#: in all, but for what is written besides.
REDUCE_S = outbox.FINISH_S - 2.0
_CHUNK = 1 << 20
#: Messages that are handled when they are received; all others wait for the file operations before.
_AT_ONCE = ("begin", "watch", "ignore", "listen", "expect", "hardware", "held", "folder")


class Peer:
    """One process that has something to write: the rank's, or its guard's."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(True)
        self.buffer = bytearray()
        self.log: Optional[step_log.StepLog] = None
        #: the last window that it has the order for; None: it wants none
        self.window: Optional[int] = None

    def answer(self, **values: Any) -> None:
        """Send the process an answer, if it is still there and reads."""
        with contextlib.suppress(OSError):
            self.connection.send(outbox.message(values), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Writer:
    """All file operations of one rank, in order; `do_NAME` gets the members of a message NAME."""

    def __init__(self, first: socket.socket, pid: int, clock: Clock = REAL) -> None:
        self.pid = pid
        self.clock = clock
        self.peers: Dict[int, Peer] = {}
        self.attend(first)
        #: what is done one after the other; and what waits for the node's own disk alone, where
        #: the run directory may be stalled
        self.jobs: "queue.Queue[Callable[[], None]]" = queue.Queue()
        self.on_node: "queue.Queue[Callable[[], None]]" = queue.Queue()
        self.folder = self.run = ""
        self.log_s, self.log_at = LOG_S, math.inf
        #: who waits for the order to close the window
        self.watching: List[Peer] = []
        #: the rank's thread that answers where its training hangs
        self.listening: Optional[Peer] = None
        self.hangs = step_log.Hangs()
        #: when an order that is to come soon is looked for next, how often, and until when
        self.look_at, self.look_s, self.soon_until = math.inf, 0.0, 0.0
        #: folders that were made for the rank
        self.made: List[str] = []
        #: what the rank's nsys has on this node, while its guard lives or until it is transferred
        self.transfer: Optional[ReportTransfer] = None
        self.session = ""
        self.nsys: Optional[str] = None
        self.armed = False
        #: a guard started it, which knows how the program ended
        self.is_of_guard = False
        #: the rank has said that it ends
        self.has_finished = False
        #: what makes the tables of the report in each of the rank's folders, where that is to be
        self.reducing: Dict[str, Reducing] = {}
        #: what GPU and node say, of the rank with this step log
        self.hardware = HardwareSampler(pid, clock)
        self.sampled_by: Optional[step_log.StepLog] = None
        self.sampled_state: Optional[Dict[str, Any]] = None

    # -- the receiving thread ----------------------------------------------------------------

    def attend(self, connection: socket.socket) -> None:
        """Receive from one more process."""
        self.peers[connection.fileno()] = Peer(connection)

    def serve(self) -> None:
        """Until no process is left to receive from, and all is written or `LINGER_S` has passed."""
        for jobs in (self.jobs, self.on_node):
            threading.Thread(target=self.work, args=(jobs,), daemon=True).start()
        while self.peers:
            due_at = min(self.log_at, self.hangs.look_at, self.look_at, self.hardware.due_at)
            due_s = max(0.1, min(due_at - self.clock.now(), self.log_s))
            self.take(states.LOOK_S if self.watching else due_s)
        self.hardware.end()
        last = (
            functools.partial(self.note_end, self.clock.wall_ns()),
            self.take_over,
            self.write_hardware,
            self.stop_reducing,
            self.on_node.join,
            self.clean,
        )
        for job in last:
            self.jobs.put(job)
        self.clock.until(lambda: not self.jobs.unfinished_tasks, LINGER_S)

    def take(self, seconds: float) -> None:
        """Receive what comes within so long, and do whatever is due."""
        connections = [peer.connection for peer in self.peers.values()]
        for connection in self.clock.wait(connections, seconds):
            self.receive(self.peers[connection.fileno()])
        if self.hardware.turn():
            self.jobs.put(self.write_hardware)
        now = self.clock.now()
        if self.watching and not self.jobs.unfinished_tasks:
            self.jobs.put(self.look)
        if self.listening is not None and self.hangs.overdue(now):
            self.listening.answer(hangs=True)
            self.hardware.go_on_again()  # its GPU may say why
        if now >= self.look_at:
            self.look_at = now + self.look_s if now < self.soon_until else math.inf
            self.look_for_windows()
        if now >= self.log_at:
            self.log_at = now + self.log_s
            self.look_for_windows()
            for peer in self.peers.values():
                if peer.log is not None:
                    self.jobs.put(peer.log.write)
            if not processes.running(self.pid):  # a child of the rank's may hold the socket
                for peer in list(self.peers.values()):
                    self.forget(peer)

    def look_for_windows(self) -> None:
        """Look for the order for the next later window, if an earlier look has ended."""
        for peer in self.peers.values():
            if peer.window is not None and not self.jobs.unfinished_tasks:
                self.jobs.put(functools.partial(self.find_window, peer))

    def receive(self, peer: Peer) -> None:
        """One piece of what a process sends."""
        try:
            piece, beside, _, _ = peer.connection.recvmsg(1 << 18, socket.CMSG_SPACE(4))
        except OSError:
            piece, beside = b"", []
        for number in descriptors.came(beside):  # a guard's program has something to write as well
            self.attend(socket.socket(fileno=number))
        if not piece:
            self.forget(peer)
        peer.buffer += piece
        for kind, body in outbox.frames(peer.buffer):
            if kind == outbox.JSON:
                members = json.loads(body)
                name, number = members.pop("do"), members.pop("later", 1)
                handle = functools.partial(getattr(self, "do_" + name), peer, **members)
                if name in _AT_ONCE:
                    handle()
                else:
                    self.jobs.put(functools.partial(self.in_window, number, handle))
            elif kind == outbox.STEPS and peer.log is not None:
                first, *times = array("q", body)
                steps = list(zip(times[::2], times[1::2]))  # noqa: B905 - Python 3.8
                peer.log.add(first, steps)
                if self.hangs.ended(steps):
                    self.jobs.put(functools.partial(self.goes_on, self.clock.wall_ns()))
            elif kind == outbox.FILE:
                head, _, content = body.partition(b"\n")
                later, _, name = head.decode().rpartition("/")
                handle = functools.partial(self.do_file, peer, name, content)
                self.jobs.put(functools.partial(self.in_window, int(later or 1), handle))

    def forget(self, peer: Peer) -> None:
        """A process that has ended sends nothing more."""
        del self.peers[peer.connection.fileno()]
        peer.connection.close()
        self.do_ignore(peer)
        if peer is self.listening:
            self.listening, self.hangs = None, step_log.Hangs()
        if peer.log is not None:
            self.jobs.put(functools.partial(peer.log.write, all_of_it=True))

    def do_begin(
        self, peer: Peer, run: str, folder: str, window: List[int], wall_ns: int, log_s: int
    ) -> None:
        """Make the rank's folder and its step log; `log_s` as in the plan."""
        self.run, self.folder = run, folder
        if log_s:
            self.log_s, peer.window = float(log_s), 1
        peer.log = step_log.StepLog(folder, (window[0], window[1]), wall_ns)
        # The ranks of a job begin together, and are not to write together.
        self.log_at = self.clock.now() + self.log_s * random.uniform(0.2, 1)

        def make(log: step_log.StepLog = peer.log) -> None:
            try:
                states.make(folder)
                log.claim()
            except OSError as error:
                peer.answer(trouble="the run directory cannot be written: %s" % error)

        self.jobs.put(make)

    def do_expect(self, peer: Peer, every_s: float) -> None:
        """An order for a later window is to come soon: it is chosen by what was logged by now."""
        now = self.clock.now()
        # The ranks of a job begin together, and are not to look together.
        self.look_s, self.look_at = every_s, now + every_s * random.uniform(0.5, 1)
        self.soon_until = now + plans.SOON_S
        if peer.log is not None:
            self.jobs.put(peer.log.write)

    def do_log(self, peer: Peer) -> None:
        """Write the step log now: a look at all ranks follows."""
        if peer.log is not None:
            peer.log.write()

    def do_watch(self, peer: Peer) -> None:
        """Look for the order to close the window from now on, and answer it."""
        self.watching.append(peer)
        self.jobs.put(self.look)

    def do_ignore(self, peer: Peer) -> None:
        """Look for it no more."""
        self.watching = [watcher for watcher in self.watching if watcher is not peer]

    def do_folder(self, peer: Peer) -> None:
        """Make a folder on the node for the rank to write to."""
        peer.answer(begun=True)

        def make() -> None:
            try:
                self.made.append(tempfile.mkdtemp(prefix="clusterprof-"))
                peer.answer(folder=self.made[-1])
            except OSError as error:
                peer.answer(folder="", no_folder=str(error))

        self.on_node.put(make)

    def do_hardware(
        self, peer: Peer, uses: str, uuid: Optional[str], pci: Optional[str] = None
    ) -> None:
        """Sample what GPU and node say of themselves, for a while from now on."""
        self.sampled_by = peer.log
        self.hardware.go_on(Asked(uses, uuid, pci))
        self.hardware.turn()  # before a rank's end that has come with it

    def do_held(self, peer: Peer, size: int) -> None:
        """What nsys has on the node by now; its rank may have to close the window."""
        for watcher in self.watching:
            watcher.answer(held=size)

    def do_listen(self, peer: Peer, after_s: float, unseen_s: float) -> None:
        """This is a thread of the rank's that answers also where its training hangs."""
        self.listening = peer
        peer.log = next((process.log for process in self.peers.values() if process.log), None)
        self.hangs.listen(after_s, unseen_s)

    # -- the working threads -----------------------------------------------------------------

    def work(self, jobs: "queue.Queue[Callable[[], None]]") -> None:
        """Do one job after the other, waiting for file systems."""
        while True:
            self.do(jobs)

    def do(self, jobs: "queue.Queue[Callable[[], None]]") -> None:
        """The next job; a run directory that is gone, full or read-only hurts no training."""
        with contextlib.suppress(Exception):
            jobs.get()()
        jobs.task_done()

    def in_window(self, number: int, job: Callable[[], None]) -> None:
        """Do a job in the rank's folder of this window."""
        if number == 1:
            job()
            return
        usual, self.folder = self.folder, paths.in_window(self.folder, number)
        try:
            job()
        finally:
            self.folder = usual

    def find_window(self, peer: Peer) -> None:
        """Hand the order for the next later window to the rank, if there is one to be captured."""
        run = paths.run_of(self.run)
        order = plans.next_order(run, peer.window or 1)
        if order is None or peer.log is None:
            return
        peer.window, self.look_at, now = order.number, math.inf, self.clock.now()
        if order.auto and self.look_s:  # another one follows soon if this one comes too late
            self.look_at, self.soon_until = now + self.look_s, now + plans.SOON_S
        if not states.captured_before(paths.in_window(self.folder, order.number)):
            peer.log.attend(order.steps)
            peer.answer(**{"%s%d" % (outbox.WINDOW, order.number): order.to_json()})

    def do_state(
        self, peer: Peer, state: Optional[str], reason: Optional[str], at_ns: int,
        facts: Dict[str, Any],
    ) -> None:  # fmt: skip
        """Advance the rank's state (None: as it is), the steps until then before it."""
        if peer.log is not None and state not in (State.COUNTING, State.ARMED, State.WAITING):
            with contextlib.suppress(OSError):
                peer.log.write(all_of_it=state in (None, State.COUNTED, State.LOST))
        states.advance(self.folder, state, reason, at_ns, **facts)

    def do_anchor(self, peer: Peer, wall_ns: int, since: int) -> None:
        """The log's times, from step `since` on, are by this difference of the two clocks."""
        if peer.log is not None:
            peer.log.anchor(wall_ns, since)

    def do_clock(self, peer: Peer, readings: List[Dict[str, Any]]) -> None:
        """Add to clock.json."""
        clocks.add(self.folder, readings)

    def do_file(self, peer: Peer, name: str, text: Union[str, bytes]) -> None:
        """Write a file beside the step log, with its number."""
        if peer.log is not None:
            files.write(os.path.join(self.folder, paths.numbered(name, peer.log.number)), text)

    def do_latest_steps(self, peer: Peer) -> None:
        """Write the latest steps, beside what `--watch` has just saved of the flight recorder."""
        if peer.log is not None:
            peer.log.write_latest(paths.WATCH_STEPS)

    def do_trace(self, peer: Peer, path: str, facts: Optional[Dict[str, Any]]) -> None:
        """Transfer a trace from the node; with `facts`, the rank has captured then."""
        try:
            states.make(self.folder)
            pack(path, os.path.join(self.folder, paths.TRACE), peer)
        except OSError as error:
            file = "the report" if facts is not None else "torch's trace"
            why = "%s could not be written: %s" % (file, error.strerror or error)
            states.advance(self.folder, State.LOST if facts is not None else None, why)
        else:
            if facts is not None:
                states.advance(self.folder, State.CAPTURED, None, **facts)
                reducing = self.reducing.get(self.folder)
                if reducing is not None:
                    reducing.gathered(os.path.join(self.folder, paths.TRACE))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def do_hangs(self, peer: Peer, **facts: Any) -> None:
        """The rank's step hangs, unless it has gone on since."""
        facts["until_ns"] = None if self.hangs.found else self.clock.wall_ns()
        self.do_state(peer, None, None, self.clock.wall_ns(), {"hangs": facts})

    def goes_on(self, at_ns: int) -> None:
        """The step that hung has ended."""
        hangs = states.read(self.folder).get("hangs")
        if hangs is not None and hangs["until_ns"] is None:
            states.advance(self.folder, None, hangs={**hangs, "until_ns": at_ns})

    def do_finish(self, peer: Peer) -> None:
        """Write all there is, and answer when that is done."""
        self.has_finished = True
        with contextlib.suppress(OSError):
            if peer.log is not None:
                peer.log.write(all_of_it=True)
        self.write_hardware()
        self.clean()
        self.reduce(peer, REDUCE_S)
        peer.answer(finished=True)

    def note_end(self, at_ns: int) -> None:
        """Add to the state how the rank's process ended at `at_ns` (wall clock), but for status 0.

        Of one that has not finished (it was killed, or called os._exit) that much is known even
        where its parent has asked for its status first.
        """
        if self.is_of_guard:
            return
        statuses: List[Optional[int]] = [None]

        def has_ended() -> bool:
            statuses[0] = processes.last_status(self.pid)
            return statuses[0] is not None

        self.clock.until(has_ended, ENDING_S, 0.002)
        status = statuses[0] or 0
        if status > 0 or (status == processes.GONE and not self.has_finished):
            facts: Dict[str, Any] = {"program_status": status} if status > 0 else {}
            at_ns = states.read(self.folder).get("ended_ns", at_ns)
            states.advance(self.folder, None, ended_ns=at_ns, **facts)

    def write_hardware(self) -> None:
        """Write the samples so far, and what they are of, beside the step log."""
        log = self.sampled_by
        if log is not None and self.hardware.is_new:
            with contextlib.suppress(OSError):
                files.write(log.path(paths.HARDWARE), self.hardware.csv())
                state = self.hardware.state()
                if state != self.sampled_state:  # each writing is kept in its history
                    states.advance(log.folder, None, hardware=state)
                    self.sampled_state = state

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
        self.is_of_guard = True

    def do_keep(
        self, peer: Peer, private: str, session: str, importer: Optional[str], armed: bool = False,
        nsys: Optional[str] = None,
    ) -> None:  # fmt: skip
        """Transfer what nsys leaves in `private`, of a killed guard too (Open MPI: in 0.5 s).

        `armed`: it is to capture no window yet. `nsys` reads reports.
        """
        self.transfer = ReportTransfer(private, self.folder, importer, self.clock)
        self.transfer.reducing = self.reducing.get(self.folder)
        self.session, self.nsys, self.armed = session, nsys, armed

    def do_bring(self, peer: Peer) -> None:
        """Transfer the report while the training goes on."""
        if self.transfer is not None:
            peer.answer(brought=self.transfer.bring(beside=True) is None)

    def do_settle(self, peer: Peer, known: Dict[str, Any], **ending: Any) -> None:
        """The program has ended: `ReportTransfer.settle`; `known` are the guard's members of it."""
        transfer, self.transfer = self.transfer, None
        try:
            if transfer is not None:
                vars(transfer).update(known)
                transfer.got_on = lambda: peer.answer(at=self.clock.now_ns())
                transfer.settle(**ending)
        finally:
            peer.answer(settled=True)

    def do_reducing(self, peer: Peer, **order: Any) -> None:
        """The report of this window is to be reduced; `order` as in the plan."""
        reducing = Reducing(Reduction(**order), self.nsys, self.clock)
        self.reducing[self.folder] = reducing
        if self.transfer is not None and self.transfer.folder == self.folder:
            self.transfer.reducing = reducing

    def do_reduce(self, peer: Peer, patience_s: float) -> None:
        """Make the tables of the reports in the rank's folders: the rank waits so long."""
        self.reduce(peer, patience_s)
        peer.answer(reduced=True)

    def reduce(self, peer: Peer, patience_s: float) -> None:
        """See `do_reduce`; a trace that is not to be kept is removed once its tables are there."""
        until = self.clock.now() + patience_s
        for folder, reducing in self.reducing.items():
            if not os.path.exists(reducing.report):
                continue
            reducing.start(reducing.report, folder)
            left_s = until - self.clock.now()
            trouble = reducing.wait(left_s, lambda: peer.answer(at=self.clock.now_ns()))
            if trouble:
                states.advance(folder, None, not_reduced=trouble)
            elif reducing.order.keep_reports == "none":
                os.unlink(reducing.report)

    def stop_reducing(self) -> None:
        """The rank has ended: what is not reduced by now is the merge's."""
        for reducing in self.reducing.values():
            reducing.end("the rank was killed")

    def do_give_up(self, peer: Optional[Peer] = None) -> None:
        """nsys captured nothing: keep what it printed, and nothing else."""
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.keep(paths.LOG)
            shutil.rmtree(transfer.private, ignore_errors=True)

    def take_over(self) -> None:
        """The guard was killed, and the program with it: wait for nsys, transfer its report."""
        if self.transfer is None:
            return
        folder = self.transfer.folder
        if State.of(states.read(folder)) is State.CAPTURING:
            with contextlib.suppress(OSError):  # whoever collects waits for a rank that finishes
                states.advance(folder, State.FINISHING, "the rank was killed inside the window")
        self.clock.until(lambda: not processes.of_session(self.session), WRITING_S, 0.05)
        processes.end_own_nsys(self.session, clock=self.clock)
        if self.armed:
            self.do_give_up()
            return
        self.transfer.settle(128 + signal.SIGKILL, IMPORT_S, opened=True)


def pack(source: str, target: str, peer: Peer) -> None:
    """Compress a file, by rename; answers after each piece. Raises OSError."""
    with open(source, "rb") as plain, files.new(target) as written:
        # Level 1: 6 takes four times as long for a tenth of the size.
        with gzip.GzipFile("", "wb", 1, written) as packed:
            for piece in iter(lambda: plain.read(_CHUNK), b""):
                packed.write(piece)
                peer.answer(packed=plain.tell())


def main(argv: List[str]) -> None:
    """Write what process PID and its guard hand over on the socket FD: arguments FD PID."""
    descriptor, pid = map(int, argv)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    Writer(connection, pid).serve()
    os._exit(0)
