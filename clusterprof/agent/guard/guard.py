"""The process that a profiled rank becomes: nsys under it, the program under nsys.

The launcher (srun, torchrun) sees one process, which ends when the program has ended *and*
the report is safe. In between, this process

- hands the launcher's signals to the program and never to nsys, which would lose its report;
- starts and stops the nsys session when the agent in the program asks for it, so that nsys
  writes its report beside the training;
- makes the report of a `.qdstrm` that nsys left behind, and moves it to the run directory;
- ends with the program's own status, and runs the program without nsys if nsys fails to.

Arguments: PLAN RANK PROGRAM...
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import select
import signal
import socket
import sys
import tempfile
import time
import zlib
from typing import Any, Iterator, List, Optional

from .. import nsys as profiler
from ..contracts import descriptors, identity, messages, paths, processes
from ..contracts import plan as plans
from ..contracts.plan import Plan
from ..contracts.states import State
from . import outbox, report_transfer, session

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT,
)  # fmt: skip

#: An nsys that was killed leaves things behind over which the next one stumbles, once.
STARTS = 2

#: How long all starts together may take until the program runs: it waits for them.
STARTING_S = 6.0

#: All in all a rank may take so much longer than without us: what nsys' start took is not there
#: at its end, when nsys writes; and then we ourselves take the report home.
BUDGET_S = 9.2
SETTLING_S = 0.9

#: How often nsys is looked at once the program has ended.
LOOK_S = 0.2

#: A socket's name may have 107 bytes: ours and nsys' own (`/nsys/0123-4567-89ab-cdef`) are in
#: a private folder (`/clusterprof-01234567`) in this one.
LONGEST_FOLDER = 107 - 26 - 21

MB = 1_000_000


def become(plan_path: str, rank: int, program: List[str]) -> None:
    """Replace this process by a guard over `program`. Raises OSError if that is not possible."""
    os.execv(sys.executable, [*processes.part("guard"), plan_path, str(rank), *program])


class Guard:
    """One profiled rank's nsys."""

    def __init__(self, plan: Plan, rank: int, program: List[str]) -> None:
        self.plan = plan
        self.rank = rank
        self.program = program
        #: the descriptors that it is to have
        self.given = descriptors.inherited()
        descriptors.fill_streams()
        self.mode = plan.window_by
        self.name = session_name(plan.run, rank)
        self.folder = paths.rank_folder(plan.run, rank)
        self.home: Optional[report_transfer.ReportTransfer] = None
        self.outbox = outbox.Outbox(None)
        self.session: Optional[session.Session] = None
        self.listener: Optional[socket.socket] = None
        self.program_pid: Optional[int] = None
        #: the program's parent, and what it has told us of the program's end
        self.trampoline_pid: Optional[int] = None
        self.status: Optional[int] = None
        self.began = time.monotonic()
        #: how long the program waited for nsys, and how long nsys may keep the rank at its end
        self.starting_s = 0.0
        #: when whatever nsys still does after the program's end must be done
        self.deadline: Optional[float] = None
        self.ended_at = 0.0
        self.looked_at = 0.0
        #: nsys ended while the program ran: its status is not the program's
        self.nsys_left_early = False
        self.pending: List[int] = []
        #: open for as long as we live: the program sees it when we are killed
        self.watchers: List[socket.socket] = []
        #: what nsys leaves outside of its folder
        self.temporary_files: List[str] = []

    # -- the whole life ---------------------------------------------------------------------

    def run(self) -> int:
        """Run the program under nsys; returns the status to end with."""
        for number in FORWARDED:
            # What our launcher has had ignored (nohup) the program must ignore as well.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)
        try:
            reason = self.begin()
        except Exception as error:  # whatever it is: the training comes first
            reason = "nsys could not be started: %s" % (error,)
        if self.program_pid is None:
            return self.without_nsys(reason or "nsys did not start the program")
        self.serve()
        status = self.program_status()
        self.end(status)
        return status

    def begin(self) -> Optional[str]:
        """Start the program under nsys; returns why not, None where it runs."""
        self.outbox = outbox.start()
        self.outbox.say(
            "guard", run=os.path.abspath(self.plan.run), folder=os.path.abspath(self.folder)
        )
        if self.plan.nsys is None:
            return "the plan is for another profiler"
        nsys, differs = profiler.here(self.plan.nsys, self.mode)
        folder = profiler.temporary(LONGEST_FOLDER)
        free = profiler.free_bytes(folder)
        if free < profiler.LEAST_FREE_B:
            return session.no_space(folder, free)
        self.home = report_transfer.ReportTransfer(
            tempfile.mkdtemp(prefix="clusterprof-", dir=folder), self.folder
        )
        self.home.importer = nsys.importer
        self.outbox.say(
            "keep", private=self.home.private, session=self.name, importer=nsys.importer
        )
        processes.adopt_orphans()
        most = self.plan.max_report_mb * MB
        self.session = session.Session(self.name, nsys, self.mode, self.home, most, self.outbox)
        if len(differs) > 1:  # the report has less in it than was asked for
            self.session.troubles += differs
        self.outbox.state(State.ARMED, mode=self.mode, pid=os.getpid(), session=self.name,
                          nsys={"path": nsys.path, "version": nsys.version})  # fmt: skip
        until = time.monotonic() + STARTING_S
        reason = None
        for attempt in range(STARTS):
            reason = self.start(attempt, until)
            if reason is None or time.monotonic() > until:
                break
            processes.forget_dead_sessions()
        return "; ".join([reason, *differs]) if reason else None

    def start(self, attempt: int, until: float) -> Optional[str]:
        """Start nsys and wait for the program in it; returns why there is none."""
        assert self.session is not None
        assert self.home is not None
        # One address for each attempt: the program of an nsys that we gave up must not start.
        with listening(os.path.join(self.home.private, "socket%d" % attempt)) as listener:
            self.session.launch(listener.getsockname(), self.program)
            assert self.session.child is not None
            while not self.started(listener):
                status = self.session.child.poll()
                if status is not None:
                    reason = "nsys %s before it started the program: %s" % (
                        processes.ended(status), self.home.last_words(),
                    )  # fmt: skip
                    break
                if time.monotonic() > until:
                    reason = "nsys did not start the program within %d s" % STARTING_S
                    break
            else:
                self.listener = listener.dup()
                return None
        self.session.end()
        return reason

    def started(self, listener: socket.socket) -> bool:
        """Hear what there is to hear; whether the program is about to run."""
        self.hear(listener)
        return self.program_pid is not None

    def serve(self) -> None:
        """Answer the agent until the program has ended and nsys has done what it can in time."""
        while not self.over():
            try:
                self.tend()
            except Exception as error:  # the program goes on, and ends as it ends
                self.note("the guard stumbled: %s" % (error,))
                time.sleep(0.05)

    def tend(self) -> None:
        """One turn: whatever is due."""
        assert self.session is not None
        self.session.tend()
        if self.deadline is None:
            self.session.obey()
        if self.listener is not None:
            self.hear(self.listener)

    def over(self) -> bool:
        """Whether the program has ended, and everything is saved or the time for that is up."""
        assert self.session is not None
        assert self.session.child is not None
        assert self.program_pid is not None
        nsys_ended = self.session.child.poll() is not None
        if processes.running(self.program_pid):
            self.nsys_left_early = nsys_ended
            return False
        if self.deadline is None:
            self.ended_at = time.monotonic()
            self.deadline = self.ended_at + self.patience_s()
        if self.left() <= 0:
            return True
        # It reads all of /proc, beside an nsys that needs the processor.
        every = LOOK_S if nsys_ended and not self.session.helping() else 5 * LOOK_S
        now = time.monotonic()
        if now < self.looked_at + every:
            return False
        self.looked_at = now
        at_work = self.session.processes()
        if nsys_ended and not self.session.at_work(at_work):
            return True
        return self.session.hangs(at_work)

    def left(self) -> float:
        """Seconds that nsys may still take after the program's end."""
        return self.patience_s() if self.deadline is None else self.deadline - time.monotonic()

    def patience_s(self) -> float:
        """What the start has left of the budget."""
        assert self.session is not None
        return max(1.0, BUDGET_S - SETTLING_S - self.starting_s - self.session.starting_s)

    def program_status(self) -> int:
        """How the program ended, as a launcher would see it: 128 + n for signal n.

        The trampoline tells. Where it was killed the program is our child, as all orphans below
        us (see `processes.adopt_orphans`), and nsys' own word is the last resort.
        """
        assert self.session is not None
        assert self.session.child is not None
        nsys = self.session.child.poll()
        if nsys is None:
            after = time.monotonic() - self.ended_at
            self.note("nsys did not end within %.2g s of the program" % after)
        elif nsys < 0 or self.nsys_left_early:
            when = "while the program ran" if self.nsys_left_early else "after the program"
            self.note("nsys %s %s" % (processes.ended(nsys), when))
        for _ in range(10):
            if self.status is not None:
                return self.status
            found = processes.status_of(self.program_pid) if self.program_pid else None
            if found is not None:
                return found
            if self.listener is not None:
                self.hear(self.listener)
        return nsys if nsys is not None and nsys >= 0 else 1

    def note(self, trouble: str) -> None:
        """Keep for the rank's state what went wrong beside the training."""
        if self.session is not None and trouble not in self.session.troubles:
            self.session.troubles.append(trouble)

    def end(self, status: int) -> None:
        """Leave nothing behind but the report in the run directory, and what became of it."""
        assert self.session is not None
        assert self.home is not None
        for last in (
            self.session.end,
            lambda: self.settle(status, max(self.left(), 0.0) + SETTLING_S),
            lambda: profiler.remove(self.temporary_files),
        ):  # fmt: skip
            with contextlib.suppress(Exception):  # the program's own status is what counts
                last()

    def settle(self, status: int, patience_s: float) -> None:
        """What nsys left becomes a report, and is transferred by our writer: see `writer`.

        A writer that waits for a run directory that does not answer is left: see `outbox` for when.
        """
        assert self.session is not None
        assert self.home is not None
        deadline = time.monotonic() + patience_s
        if not self.outbox.look().get("brought"):
            self.home.leave_torn()
            self.home.rescue(max(0.2, patience_s - report_transfer.COPYING_S))
        left_s = max(0.2, deadline - time.monotonic())
        # A program that is the rank asks to be watched.
        self.home.others = not self.watchers
        self.outbox.say(
            "settle", status=status, patience_s=left_s, opened=self.session.opened,
            troubles=self.session.troubles, known=self.home.known(),
        )  # fmt: skip
        self.outbox.wait("settled", min(left_s, outbox.QUIET_S), left_s)

    # -- the agent in the program -----------------------------------------------------------

    def hear(self, listener: socket.socket) -> None:
        """Wait a moment for a request, and answer it."""
        ready, _, _ = select.select([listener], [], [], 0.05)
        if ready:
            connection, _ = listener.accept()
            # Whoever ends in the middle of a word has said nothing.
            with connection, contextlib.suppress(OSError, ValueError, IndexError):
                connection.settimeout(5)
                self.answer(connection)

    def answer(self, connection: socket.socket) -> None:
        """One request of the trampoline (`hello PID`) or the agent (`start`, `size`, ...).

        Once the trampoline may start the program it says `pid PID`, and at its end `ended STATUS`.
        """
        assert self.session is not None
        words = connection.recv(64).decode("ascii", "replace").split()
        if words[:1] == ["hello"]:
            self.trampoline_pid = int(words[1])
            self.temporary_files += profiler.temporary_files(self.trampoline_pid)
            descriptors.send(connection, self.given)
            self.program_pid = int(connection.recv(64).split()[1])
            descriptors.release(self.given)
            self.temporary_files.append("/dev/shm/sem.nsys_sem_%d" % self.program_pid)
            self.starting_s = time.monotonic() - self.began
            for pending in self.pending:
                self.forward(pending)
        elif words[:1] == ["ended"]:
            self.status = int(words[1])
        elif words == ["watch"]:
            self.watchers.append(connection.dup())
            connection.sendall(b"ok\n")
        elif words == ["writer"]:
            self.share(connection)
        elif words == ["start"]:
            connection.sendall((self.session.start() or "ok").encode()[:250] + b"\n")
        elif words == ["size"]:
            connection.sendall(b"%d\n" % self.session.files.bytes())
        elif words == ["stop"]:
            # The program goes on while the report is written: this is why the guard stops.
            connection.sendall(b"ok\n")
            self.session.stop()

    def share(self, connection: socket.socket) -> None:
        """The program's agent writes by our writer: so what both say is written in order."""
        theirs = self.outbox.share()
        if theirs is None:
            connection.sendall(b"none\n")
            return
        with theirs:
            rights = array.array("i", [theirs.fileno()])
            connection.sendmsg([b"ok\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    # -- signals ----------------------------------------------------------------------------

    def on_signal(self, number: int, frame: Any) -> None:
        """A signal of the launcher is the program's."""
        if self.program_pid is None:
            self.pending.append(number)
        else:
            self.forward(number)

    def forward(self, number: int) -> None:
        """Send it on; once the program is gone it is swallowed, since nsys is writing."""
        with contextlib.suppress(ProcessLookupError, PermissionError, TypeError):
            os.kill(self.program_pid, number)  # type: ignore[arg-type]

    # -- without nsys -----------------------------------------------------------------------

    def without_nsys(self, reason: str) -> int:
        """The training comes first: run the program as if we had never been asked."""
        with contextlib.suppress(Exception):
            self.give_up(reason)
        messages.complain("rank %d runs without nsys: %s" % (self.rank, reason))
        for number in FORWARDED:
            if signal.getsignal(number) == self.on_signal:
                signal.signal(number, signal.SIG_DFL)
        for pending in self.pending:
            os.kill(os.getpid(), pending)
        os.environ[identity.PROFILED] = identity.WITHOUT_NSYS
        os.execvp(self.program[0], self.program)

    def give_up(self, reason: str) -> None:
        """Say so, and leave nothing of nsys."""
        self.outbox.say("give_up", reason=reason + "; the program ran without nsys")
        self.outbox.hand_over()
        profiler.remove(self.temporary_files)


def session_name(run: str, rank: int) -> str:
    """A name for nsys' session that no other run on this node has, nor another guard of the rank.

    nsys cannot find a session with a blank in its name, nor open any other afterwards, and hangs
    at a quote; a run directory may have any name, and two of one name may be at work here.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(run))[:40]
    number = zlib.crc32(os.fsencode(run))
    return "clusterprof-%s-%08x-%05d-%07d" % (plain, number, rank, os.getpid())


@contextlib.contextmanager
def listening(path: str) -> Iterator[socket.socket]:
    """A Unix socket in our private (0700) folder: no other user reaches it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(4)
        yield listener


def main(argv: List[str]) -> None:
    """Run as the guard of rank argv[1]; ends as the program ended."""
    try:
        guard = Guard(plans.read(argv[0]).of_attempt(os.environ), int(argv[1]), argv[2:])
    except Exception as error:  # it was there a moment ago: the program runs all the same
        messages.complain("rank %s runs without nsys: %s" % (argv[1], error))
        os.environ[identity.PROFILED] = identity.WITHOUT_NSYS
        os.execvp(argv[2], argv[2:])
    status = guard.run()
    if 128 < status < 128 + signal.NSIG:
        processes.end_by_signal(status - 128)
    sys.exit(status)
