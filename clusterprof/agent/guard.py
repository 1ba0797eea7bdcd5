"""The process that a chosen rank becomes: nsys under it, the program under nsys.

The launcher (srun, torchrun) sees one process, which ends when the program has ended *and*
the report is safe. In between, this process

- hands the launcher's signals to the program and never to nsys, which would lose its report;
- starts and stops the nsys session when the agent in the program asks for it, so that nsys
  writes its report beside the training;
- makes the report of a `.qdstrm` that nsys left behind, and moves it to the run directory;
- ends with the program's own status, and runs the program without nsys if nsys fails to.

Run as a script: `python -I -S guard.py PLAN RANK PROGRAM...`.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any, Dict, Iterator, List, Optional

if __package__:
    from . import homecoming, keeper, orders, processes, size, states, variables
else:  # run as a script, isolated: our own folder is not on sys.path
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import homecoming  # type: ignore[import-not-found,no-redef]
    import keeper  # type: ignore[import-not-found,no-redef]
    import orders  # type: ignore[import-not-found,no-redef]
    import processes  # type: ignore[import-not-found,no-redef]
    import size  # type: ignore[import-not-found,no-redef]
    import states  # type: ignore[import-not-found,no-redef]
    import variables  # type: ignore[import-not-found,no-redef]

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT,
)  # fmt: skip

#: nsys starting on a starved machine fails now and then when several start at once (about 4%
#: at eight): a lock on each node keeps their starts this far apart.
START_GAP_S = 0.3

#: An nsys that was killed leaves things behind over which the next one stumbles, once.
STARTS = 2

#: The agent waits for nsys' start between two steps: a hanging one must not hang the training.
START_TIMEOUT_S = 8

#: An order to close the window is the agent's, between two steps; this long after it, ours.
ORDER_GRACE_S = 1.5

#: How long saving the report may keep the rank after its program has ended.
PATIENCE_S = 9.0


def become(plan: Dict[str, Any], plan_path: str, rank: int, program: List[str]) -> None:
    """Replace this process by a guard over `program`. Raises OSError if that is not possible."""
    here = os.path.abspath(__file__.replace(".pyc", ".py"))
    os.execv(sys.executable, [sys.executable, "-I", "-S", here, plan_path, str(rank), *program])


class Guard:
    """One chosen rank's nsys."""

    def __init__(self, plan: Dict[str, Any], rank: int, program: List[str]) -> None:
        self.nsys = plan["nsys"]
        self.rank = rank
        self.program = program
        self.mode = plan["window_by"]
        self.session = session_name(plan["run"], rank)
        self.private = tempfile.mkdtemp(prefix="clusterprof-", dir=short_temporary())
        folder = states.rank_directory(plan["run"], rank)
        self.home = homecoming.Homecoming(self.private, folder, self.nsys)
        self.values = {
            "output": self.home.report,
            "session": self.session,
            "trace": self.nsys["trace"]["gpu" if sees_a_gpu() else "cpu"],
        }
        self.child: Optional[subprocess.Popen[bytes]] = None
        self.program_pid: Optional[int] = None
        self.launcher_pid: Optional[int] = None
        self.pending: List[int] = []
        #: open for as long as we live: the program sees it when we are killed
        self.watchers: List[socket.socket] = []
        self.files = size.NsysFiles(self.private, processes.own_nsys)
        self.most = int(plan.get("max_report_mb", 0)) * size.MB
        #: when the session's size is looked at next; 0 while it is not collecting
        self.look_at = 0
        #: while it is collecting: whether it is to be stopped early
        self.run_directory = str(plan["run"])
        self.orders: Optional[orders.Watch] = None
        #: nsys' stop, then the import of what it left, one after the other beside the training
        self.beside: List[subprocess.Popen[bytes]] = []

    # -- the whole life ---------------------------------------------------------------------

    def run(self) -> int:
        """Run the program under nsys; returns the status to end with."""
        self.keeper = keeper.Keeper(self.home, self.session)
        processes.adopt_orphans()
        self.home.say("armed", mode=self.mode, pid=os.getpid(), session=self.session)
        try:
            with listening(os.path.join(self.private, "socket")) as listener:
                for _ in range(STARTS):
                    self.start(listener.getsockname())
                    status = self.serve(listener)
                    if self.program_pid is not None:
                        break
                    processes.end_own_nsys()
                    processes.forget_dead_sessions()
        except OSError as error:
            return self.without_nsys("nsys could not be started: %s" % error)
        if self.program_pid is None:
            return self.without_nsys(
                "nsys ended with status %d before it started the program: %s"
                % (status, self.home.last_words())
            )
        self.home.settle(status, self.left())
        processes.end_own_nsys()
        self.keeper.dismiss()
        return status

    def start(self, address: str) -> None:
        """Start nsys with the trampoline under it, its own words going to the log."""
        streams = [os.dup(descriptor) for descriptor in (0, 1, 2)]
        umask = os.umask(0o077)
        os.umask(umask)
        verb = "profile" if self.mode == "cuda" else "launch"
        trampoline = os.path.join(os.path.dirname(os.path.abspath(__file__)), "trampoline.py")
        command = [
            self.nsys["path"],
            *filled(self.nsys[verb], self.values),
            *(sys.executable, "-I", "-S", trampoline, address),
            *(",".join(map(str, streams)), oct(umask)),
            *self.program,
        ]
        environment = dict(os.environ, **{variables.PROFILED: "%s:%s" % (self.mode, address)})
        # nsys ignores ranges whose names are not registered strings unless it is told not to.
        environment.setdefault("NSYS_NVTX_PROFILER_REGISTER_ONLY", "0")
        for number in FORWARDED:
            signal.signal(number, self.on_signal)
        with one_at_a_time(), open(self.home.log, "ab") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                pass_fds=streams, start_new_session=True,
            )  # fmt: skip
            time.sleep(START_GAP_S)
        for descriptor in streams:
            os.close(descriptor)

    def serve(self, listener: socket.socket) -> int:
        """Answer the agent until the program and nsys have ended; returns the program's status."""
        assert self.child is not None
        self.deadline: Optional[float] = None
        while True:
            nsys_ended = self.child.poll() is not None
            if self.program_pid is None:
                program_ended = nsys_ended
            else:
                program_ended = not processes.running(self.program_pid)
            if program_ended and self.deadline is None:
                self.deadline = time.monotonic() + PATIENCE_S
            if program_ended and (self.all_saved(nsys_ended) or self.left() <= 0):
                return self.program_status()
            self.work_beside()
            self.stop_if_too_large()
            self.stop_if_ordered()
            ready, _, _ = select.select([listener], [], [], 0.05)
            if ready:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    self.answer(connection)

    def left(self) -> float:
        """Seconds that saving the report may still take."""
        return PATIENCE_S if self.deadline is None else self.deadline - time.monotonic()

    def all_saved(self, nsys_ended: bool) -> bool:
        """Whether nothing that could still write the report is at work."""
        if not nsys_ended or any(each.poll() is None for each in self.beside):
            return False
        # A killed nsys leaves its daemon, which writes the report when the program ends.
        return not any(processes.running(pid) for pid in processes.own_nsys())

    def program_status(self) -> int:
        """How the program ended, as a launcher would see it: 128 + n for signal n."""
        assert self.child is not None
        status = self.child.poll()
        if status is not None and status >= 0:
            return status
        # nsys hangs, or was killed: its launcher, the program's parent, knows; it is ours
        # (see `processes.adopt_orphans`) once nsys is gone.
        self.child.kill()
        self.child.wait()
        for _ in range(100):
            found = processes.status_of(self.launcher_pid) if self.launcher_pid else None
            if found is not None:
                return found
            time.sleep(0.01)
        return 128 - status if status is not None else 1

    def answer(self, connection: socket.socket) -> None:
        """One request of the trampoline (`hello PID`) or the agent (`start`, `size`, ...)."""
        words = connection.recv(64).decode("ascii", "replace").split()
        if words[:1] == ["hello"]:
            self.program_pid = int(words[1])
            self.launcher_pid = processes.parent(self.program_pid)
            connection.sendall(b"ok\n")
            for pending in self.pending:
                self.forward(pending)
        elif words == ["watch"]:
            self.watchers.append(connection.dup())
            connection.sendall(b"ok\n")
        elif words == ["start"]:
            connection.sendall((self.start_session() or "ok").encode()[:200] + b"\n")
        elif words == ["size"]:
            order = (self.orders.said if self.orders is not None else None) or ""
            connection.sendall(("%d %s" % (self.files.bytes(), order)).encode()[:200] + b"\n")
        elif words == ["stop"]:
            # The program goes on while the report is written: this is why the guard stops.
            connection.sendall(b"ok\n")
            self.stop_session()

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

    # -- nsys -------------------------------------------------------------------------------

    def session_command(self, verb: str) -> List[str]:
        """`nsys start` or `nsys stop` on our session."""
        return [self.nsys["path"], *filled(self.nsys[verb], self.values)]

    def start_session(self) -> Optional[str]:
        """Returns what went wrong, or None once nsys is collecting."""
        starting = self.spawn(self.session_command("start"))
        try:
            status = starting.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            starting.kill()
            return "nsys start did not end within %d s" % START_TIMEOUT_S
        self.look_at = time.monotonic_ns() + 2 * size.EVERY_NS
        self.orders = orders.Watch(self.run_directory)
        return None if status == 0 else "nsys start ended with status %d" % status

    def stop_session(self) -> None:
        """Have nsys write its report, beside the training."""
        if self.look_at and not self.beside:
            self.beside.append(self.spawn(self.session_command("stop")))
        self.look_at = 0
        if self.orders is not None:
            self.orders.end()

    def stop_if_ordered(self) -> None:
        """Where the step does not end in which the order came, its window ends inside it."""
        order = self.orders
        if not self.look_at or order is None or order.said is None:
            return
        if time.monotonic() > order.since + ORDER_GRACE_S:
            self.stop_session()
            self.home.say("finishing", "closed within a step: %s" % order.said)

    def stop_if_too_large(self) -> None:
        """The agent closes a window that has become too large, but between two steps only: a
        step that does not end must not fill the disk meanwhile.
        """
        if not self.look_at or time.monotonic_ns() < self.look_at:
            return
        self.look_at = time.monotonic_ns() + 2 * size.EVERY_NS
        if 0 < 1.25 * self.most < self.files.bytes():
            self.stop_session()

    def spawn(self, command: List[str], nice: int = 0) -> subprocess.Popen[bytes]:
        """Start a helper of nsys with its words going to the log."""
        with open(self.home.log, "ab") as log:
            return subprocess.Popen(
                command if not nice else ["nice", "-n", str(nice), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def work_beside(self) -> None:
        """While the training goes on: once nsys has stopped, make the report and bring it home.

        What is home early is safe from whatever ends the job later.
        """
        if not self.beside or self.beside[-1].poll() is None:
            return
        if len(self.beside) == 1 and (command := self.home.import_command()):
            self.beside.append(self.spawn(command, nice=19))
        elif os.path.exists(self.home.report + ".nsys-rep") and not self.home.brought:
            self.home.bring()

    def without_nsys(self, reason: str) -> int:
        """The training comes first: run the program as if we had never been asked."""
        self.keeper.dismiss()
        self.home.say("lost", reason + "; the program ran without it")
        sys.stderr.write("clusterprof: rank %d runs without nsys: %s\n" % (self.rank, reason))
        sys.stderr.flush()
        self.home.keep("log")
        processes.end_own_nsys()
        shutil.rmtree(self.private, ignore_errors=True)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        for pending in self.pending:
            os.kill(os.getpid(), pending)
        os.environ[variables.PROFILED] = variables.WITHOUT_NSYS
        os.execvp(self.program[0], self.program)


def session_name(run: str, rank: int) -> str:
    """A name for nsys' session that no other run on this node has.

    nsys cannot find a session with a blank in its name, nor open any other afterwards, and hangs
    at a quote; a run directory may have any name, and two of one name may be at work here.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(run))[:40]
    return "clusterprof-%s-%08x-%05d" % (plain, zlib.crc32(os.fsencode(run)), rank)


def filled(arguments: List[str], values: Dict[str, str]) -> List[str]:
    """The plan's arguments with {output} and its like filled in; other braces are the user's."""
    for name, value in values.items():
        arguments = [argument.replace("{%s}" % name, value) for argument in arguments]
    return arguments


def sees_a_gpu() -> bool:
    """Whether this rank can use a GPU: nsys traces CUDA then, else the OS runtime."""
    # The driver's control node alone is no GPU: nsys itself makes one on machines without.
    devices = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")
    return bool(devices) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def short_temporary() -> str:
    """A node-local folder whose name leaves room for a socket's (107 bytes in all)."""
    folder = tempfile.gettempdir()
    return folder if len(folder) < 70 else "/tmp"


@contextlib.contextmanager
def listening(path: str) -> Iterator[socket.socket]:
    """A Unix socket in our private (0700) folder: nobody else reaches it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(4)
        yield listener


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold this node's lock on starting nsys; without it where it cannot be had."""
    import fcntl

    path = os.path.join(tempfile.gettempdir(), "clusterprof-%d.lock" % os.getuid())
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def main(argv: List[str]) -> None:
    """Run as the guard of rank argv[1]; ends as the program ended."""
    with open(argv[0], encoding="utf-8") as file:
        plan = json.load(file)
    status = Guard(plan, int(argv[1]), argv[2:]).run()
    if 128 < status < 128 + signal.NSIG:
        processes.end_by_signal(status - 128)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
