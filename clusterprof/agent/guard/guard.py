"""The process that a profiled rank becomes: nsys under it, the program under nsys.

The launcher (srun, torchrun) sees one process, which ends as the program ended, once the report is
safe. It hands the launcher's signals to the program and never to nsys, which would lose its report;
starts and stops the nsys session for the agent in the program; makes the report of a `.qdstrm` that
nsys left behind; and runs the program without nsys if nsys fails to.

It is the interpreter that the launcher started, before the first line of the program's: the program
gets another one, under nsys.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import zlib
from typing import Any, Dict, List, NoReturn, Optional

from .. import nsys as profiler
from ..contracts import (
    beside,
    descriptors,
    messages,
    outbox,
    paths,
    plan as plans,
    processes,
)
from ..contracts.plan import Plan
from ..contracts.states import State
from ..contracts.timing import REAL, Clock
from .becoming import run_alone
from .report_transfer import ReportTransfer
from .session import Session, no_space

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT,
    signal.SIGTSTP, signal.SIGCONT,
)  # fmt: skip
#: How often nsys is started (one that was killed leaves things behind over which the next one
#: fails, once), within what that may take altogether (`NsysPlan.start_s`): the program waits.
STARTS = 2
#: All in all a rank may take what nsys may take to start, and so much, longer than without us: what
#: the start took is not there at the end, when nsys writes; and then we ourselves transfer the
#: report.
BUDGET_S = 3.2
SETTLING_S = 0.9
#: While the program trains, what makes a report runs beside it.
NICE = 10
#: How often nsys is looked at once the program has ended.
LOOK_S = 0.2
#: A socket's name may have 107 bytes: ours and nsys' own (`/nsys/0123-4567-89ab-cdef`) are in
#: a private folder (`/clusterprof-01234567`) in this one.
LONGEST_FOLDER = 107 - 26 - 21


class Guard:
    """One profiled rank's nsys."""

    #: made by `begin` and `start`, before nsys is started
    transfer: ReportTransfer
    session: Session
    #: of both, for our writer
    known: Dict[str, Any]
    listener: socket.socket

    def __init__(self, plan: Plan, rank: int, program: List[str], clock: Clock = REAL) -> None:
        self.plan = plan
        self.clock = clock
        self.rank = rank
        self.program = program
        self.folder = paths.rank_folder(os.path.abspath(plan.run), rank)
        #: its descriptors
        self.given = descriptors.inherited()
        descriptors.fill_streams()
        self.outbox = outbox.Outbox(None)
        self.program_pid: Optional[int] = None
        #: how the program ended, by its parent
        self.status: Optional[int] = None
        self.began = clock.now()
        #: how long the program waited for nsys
        self.starting_s = 0.0
        #: when the program ended, and when nsys was looked at since
        self.ended_at: Optional[float] = None
        self.looked_at = 0.0
        self.nsys_left_early = False
        #: nsys waits for an order for a later window, which may never come
        self.armed = plan.looks_first
        #: the window that it captures
        self.window = 1
        self.pending: List[int] = []
        #: open for as long as we live: the program sees it when we are killed
        self.watchers: List[socket.socket] = []
        self.temporary_files: List[str] = []

    def run(self) -> int:
        """Run the program under nsys; returns the status to end with."""
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # the program ignores it as well (nohup)
                signal.signal(number, self.on_signal)
        try:
            reason = self.begin()
        except Exception as error:  # the training comes first
            reason = "nsys could not be started: %s" % (error,)
        if self.program_pid is None:
            self.without_nsys(reason or "nsys did not start the program")
        while not self.over(self.program_pid):
            try:
                self.session.tend(NICE if self.ended_at is None else 0)
                if self.ended_at is None:
                    self.session.obey()
                self.receive()
            except Exception as error:  # the program goes on, and ends as it ends
                self.session.note("the guard failed: %s" % (error,))
                self.clock.sleep(0.05)
        status = self.program_status()
        for last in (
            self.session.end,
            lambda: self.settle(status, max(self.left_s(), 0.0) + SETTLING_S),
            lambda: profiler.remove(self.temporary_files),
        ):  # fmt: skip
            with contextlib.suppress(Exception):  # the program's own status is what counts
                last()
        return status

    def begin(self) -> Optional[str]:
        """Start the program under nsys; returns why not, None where it runs."""
        self.open_outbox()
        if self.plan.nsys is None:
            return "the plan is for another profiler"
        nsys, differs = profiler.here(self.plan.nsys, self.plan.window_by)
        folder = profiler.temporary(LONGEST_FOLDER)
        free = profiler.free_bytes(folder)
        if free < profiler.LEAST_FREE_B:
            return no_space(folder, free)
        private = tempfile.mkdtemp(prefix="clusterprof-", dir=folder)
        name = session_name(self.plan.run, self.rank)
        self.transfer = ReportTransfer(private, self.folder, nsys.importer, clock=self.clock)
        self.known = {
            "private": private, "session": name, "importer": nsys.importer, "nsys": nsys.path,
        }  # fmt: skip
        self.outbox.say("keep", armed=self.armed, **self.known)
        processes.adopt_orphans()
        mode, most = self.plan.window_by, self.plan.max_report_mb * plans.MB
        self.session = Session(name, nsys, mode, self.transfer, most, self.outbox, self.clock)
        if len(differs) > 1:  # the report has less in it than was asked for
            self.session.troubles += differs
        self.outbox.state(
            State.COUNTING if self.armed else State.ARMED, mode=mode, pid=os.getpid(),
            session=name, nsys={"path": nsys.path, "version": nsys.version},
        )  # fmt: skip
        until = self.clock.now() + nsys.start_s
        reasons: List[str] = []
        for attempt in range(STARTS):
            reason = self.start(attempt, until)
            if reason is None:
                return None
            reasons.append(reason)
            if self.clock.now() > until:
                break
            processes.forget_dead_sessions()
        return "; ".join(dict.fromkeys([*reasons, *differs]))

    def open_outbox(self) -> None:
        """Start our writer. Raises OSError."""
        self.outbox = outbox.start()
        self.outbox.say("guard", run=os.path.abspath(self.plan.run), folder=self.folder)

    def start(self, attempt: int, until: float) -> Optional[str]:
        """Start nsys and wait for the program in it; returns why there is none."""
        # One address for each attempt: the program of an nsys that we gave up must not start. In
        # our private (0700) folder: no other user reaches it.
        address = os.path.join(self.transfer.private, "socket%d" % attempt)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(address)
        self.listener.listen(4)
        self.session.launch(address, self.program)
        reason = None
        while reason is None:
            self.receive()
            status = self.session.child.poll()
            if self.program_pid is not None:
                return None
            if status is not None:
                reason = "nsys %s before it started the program; it printed: %s" % (
                    processes.ended(status), self.transfer.last_line(),
                )  # fmt: skip
            elif self.clock.now() > until:
                reason = "nsys did not start the program within %d s (%s gives it up to %d)" % (
                    self.session.nsys.start_s, profiler.START_VARIABLE, plans.MOST_START_S,
                )  # fmt: skip
        self.listener.close()
        self.session.end()
        return reason

    def over(self, program_pid: int) -> bool:
        """Whether the program has ended, and everything is saved or the time for that is up."""
        nsys_ended = self.session.child.poll() is not None
        if processes.running(program_pid):
            self.nsys_left_early = nsys_ended
            return False
        now = self.clock.now()
        if self.ended_at is None:
            self.ended_at = now
        # Looking reads all of /proc, beside an nsys that needs the processor.
        every_s = LOOK_S if nsys_ended and not self.session.helpers() else 5 * LOOK_S
        if self.left_s() <= 0 or now < self.looked_at + every_s:
            return self.left_s() <= 0
        self.looked_at = now
        pids = self.session.processes()
        # The daemon of a killed nsys writes when the program ends; without it no `nsys stop` does.
        writers = {*pids} - {stop.pid for stop in self.session.stops}
        # An import may have ended since we looked: its report has no name yet.
        is_written = nsys_ended and self.session.importing is None and not writers
        return is_written or self.session.hangs(pids)

    def left_s(self) -> float:
        """What nsys may still take after the program's end: what its start left of the budget."""
        started_s = self.starting_s + self.session.starting_s
        patience_s = max(1.0, self.session.nsys.start_s + BUDGET_S - SETTLING_S - started_s)
        return patience_s - (self.clock.now() - self.ended_at if self.ended_at else 0.0)

    def program_status(self) -> int:
        """How the program ended, as a launcher would see it: 128 + n for signal n.

        By the trampoline. Where that was killed the program is our child (`adopt_orphans`), and
        nsys' own status is the last resort.
        """
        nsys = self.session.child.poll()
        if nsys is None:
            after_s = self.clock.now() - (self.ended_at or 0.0)
            self.session.note("nsys did not end within %.2g s of the program" % after_s)
        elif nsys < 0 or self.nsys_left_early:
            when = "while the program ran" if self.nsys_left_early else "after the program"
            self.session.note("nsys %s %s" % (processes.ended(nsys), when))
        for _ in range(10):
            if self.status is None and self.program_pid:
                self.status = processes.status_of(self.program_pid)
            if self.status is not None:
                return self.status
            self.receive()
        return nsys if nsys is not None and nsys >= 0 else 1

    def settle(self, status: int, patience_s: float) -> None:
        """Have our writer transfer what nsys left; one that its file system holds is left alone."""
        beside.wake()
        if self.armed:
            self.outbox.say("give_up")
            self.outbox.hand_over()
            return
        deadline = self.clock.now() + patience_s
        if not self.outbox.look().get("brought"):
            self.transfer.rescue(patience_s)
        # A program that is the rank asks to be watched.
        self.transfer.others = not self.watchers
        settled = self.settled(status, deadline)
        if self.outbox.connection is None:  # it was killed, and whoever collects would wait for it
            self.open_outbox()
            self.keep()
            settled = self.settled(status, deadline)
        left_s = deadline - self.clock.now()
        # After a signal whoever sent it waits; the merge reads the report then.
        if self.plan.reduction is not None and settled and status <= 128 and left_s > 0:
            self.outbox.say("reduce", patience_s=left_s)
            self.outbox.wait("reduced", min(left_s, outbox.QUIET_S), left_s)

    def settled(self, status: int, deadline: float) -> bool:
        """Whether our writer has transferred what nsys left, by then."""
        left_s = max(0.2, deadline - self.clock.now())
        self.outbox.say(
            "settle", status=status, patience_s=left_s, opened=self.session.opened,
            troubles=self.session.troubles, known=self.transfer.known(),
        )  # fmt: skip
        return bool(self.outbox.wait("settled", min(left_s, outbox.QUIET_S), left_s))

    def receive(self) -> None:
        """Wait a moment for a request, and answer it."""
        if self.clock.wait([self.listener], 0.05):
            connection, _ = self.listener.accept()
            # Whoever ends in the middle of a request has asked for nothing.
            with connection, contextlib.suppress(OSError, ValueError, IndexError):
                connection.settimeout(5)
                self.answer(connection)

    def answer(self, connection: socket.socket) -> None:
        """One request of the trampoline (`hello PID`, `ended STATUS`) or the agent (`start`...)."""
        request, *words = connection.recv(64).decode("ascii", "replace").split()
        if request == "hello":
            self.temporary_files += profiler.temporary_files(int(words[0]))
            descriptors.send(connection, self.given)
            self.program_pid = int(connection.recv(64).split()[1])
            descriptors.release(self.given)
            self.temporary_files.append("/dev/shm/sem.nsys_sem_%d" % self.program_pid)
            self.starting_s = self.clock.now() - self.began
            for pending in self.pending:
                self.on_signal(pending)
        elif request == "ended":
            self.status = int(words[0])
            if self.status:
                at_ns = self.clock.wall_ns()
                self.outbox.state(None, program_status=self.status, ended_ns=at_ns)
        elif request == "watch":
            self.watchers.append(connection.dup())
            connection.sendall(b"ok\n")
        elif request == "writer":
            # The program's agent writes by our writer: so what both send is written in order.
            writer = self.outbox.share()
            with contextlib.closing(writer) if writer else contextlib.nullcontext():
                descriptors.send(connection, [writer.fileno()] if writer else [])
        elif request == "start" and not left(connection):
            self.armed, self.window = False, int(words[0])
            if self.window > 1:
                self.keep()
            connection.sendall((self.session.start() or "ok").encode()[:250] + b"\n")
        elif request == "size":
            self.outbox.say("held", size=self.session.files.bytes())
        elif request == "stop":
            # The program goes on while the report is written: this is why the guard stops.
            self.session.stop()

    def keep(self) -> None:
        """Have our writer transfer what nsys leaves to where this window's files are."""
        self.session.outbox = self.outbox.of_window(self.window)
        self.session.outbox.say("keep", **self.known)

    def on_signal(self, number: int, frame: Any = None) -> None:
        """A signal of the launcher is the program's; no one's once that is gone and nsys writes."""
        if self.program_pid is None:
            self.pending.append(number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.program_pid, number)
        if number == signal.SIGTSTP:  # it has a process group of its own, and so have we
            os.kill(os.getpid(), signal.SIGSTOP)

    def without_nsys(self, reason: str) -> NoReturn:
        """The training comes first: run the program as if we had never been asked."""
        with contextlib.suppress(Exception):  # leave nothing of nsys
            without = reason + "; the program ran without nsys"
            if self.armed:
                self.outbox.state(State.COUNTING, nsys={"missing": without})
            else:
                self.outbox.state(State.LOST, without, chosen=True)
            self.outbox.say("give_up")
            self.outbox.hand_over()
            profiler.remove(self.temporary_files)
        messages.complain("rank %d runs without nsys: %s" % (self.rank, reason))
        for number in FORWARDED:
            if signal.getsignal(number) == self.on_signal:
                signal.signal(number, signal.SIG_DFL)
        for pending in self.pending:
            os.kill(os.getpid(), pending)
        run_alone(self.program)


def left(connection: socket.socket) -> bool:
    """Whether whoever has asked waits for no answer any more."""
    return bool(REAL.wait([connection], 0)) and not connection.recv(1, socket.MSG_PEEK)


def session_name(run: str, rank: int) -> str:
    """A name for nsys' session that no other run on this node has, nor another guard of the rank.

    nsys cannot find a session with a blank in its name, nor open any other afterwards, and hangs
    at a quote; a run directory may have any name, and two of one name may be at work here.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(run))[:40]
    number = zlib.crc32(os.fsencode(run))
    return "clusterprof-%s-%08x-%05d-%07d" % (plain, number, rank, os.getpid())
