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
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List, Optional

if __package__:
    from . import states, variables
else:  # run as a script, isolated: our own folder is not on sys.path
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import states  # type: ignore[import-not-found,no-redef]
    import variables  # type: ignore[import-not-found,no-redef]

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT,
)  # fmt: skip

#: nsys starting on a starved machine fails now and then when several start at once (about 4%
#: at eight): a lock on each node keeps their starts this far apart.
START_GAP_S = 0.3

START_TIMEOUT_S = 15
STOP_TIMEOUT_S = 120
IMPORT_TIMEOUT_S = 120


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
        self.folder = states.rank_directory(plan["run"], rank)
        self.mode = plan["window_by"]
        self.session = "clusterprof-%s-%05d" % (os.path.basename(plan["run"]), rank)
        self.private = tempfile.mkdtemp(prefix="clusterprof-", dir=short_temporary())
        self.report = os.path.join(self.private, "report")
        self.values = {
            "output": self.report,
            "session": self.session,
            "trace": self.nsys["trace"]["gpu" if sees_a_gpu() else "cpu"],
        }
        self.log_path = os.path.join(self.private, "log")
        self.program_pid: Optional[int] = None
        self.pending: List[int] = []
        self.capturing = False
        self.child: Optional[subprocess.Popen[bytes]] = None

    # -- the whole life ---------------------------------------------------------------------

    def run(self) -> int:
        """Run the program under nsys; returns the status to end with."""
        self.say("armed", mode=self.mode, pid=os.getpid(), session=self.session)
        try:
            with listening(os.path.join(self.private, "socket")) as listener:
                self.start(listener.getsockname())
                status = self.serve(listener)
        except OSError as error:
            return self.without_nsys("nsys could not be started: %s" % error)
        if self.program_pid is None:
            return self.without_nsys(
                "nsys ended with status %d before it started the program: %s"
                % (status, self.last_words())
            )
        self.bring_home(status)
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
        with one_at_a_time(), open(self.log_path, "ab") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                pass_fds=streams, start_new_session=True,
            )  # fmt: skip
            time.sleep(START_GAP_S)
        for descriptor in streams:
            os.close(descriptor)

    def serve(self, listener: socket.socket) -> int:
        """Answer the agent until nsys has ended; returns nsys' (the program's) status."""
        assert self.child is not None
        while True:
            status = self.child.poll()
            if status is not None:
                return status if status >= 0 else 128 - status
            ready, _, _ = select.select([listener], [], [], 0.05)
            if ready:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    self.answer(connection)

    def answer(self, connection: socket.socket) -> None:
        """One request of the trampoline (`hello PID`) or the agent (`start`, `stop`)."""
        words = connection.recv(64).decode("ascii", "replace").split()
        if words[:1] == ["hello"]:
            self.program_pid = int(words[1])
            connection.sendall(b"ok\n")
            for pending in self.pending:
                self.forward(pending)
        elif words == ["start"]:
            problem = self.nsys_does("start", START_TIMEOUT_S)
            self.capturing = problem is None
            connection.sendall(("ok" if problem is None else problem).encode()[:200] + b"\n")
        elif words == ["stop"]:
            # The program goes on while the report is written: this is why the guard stops.
            connection.sendall(b"ok\n")
            connection.close()
            self.capturing = False
            self.nsys_does("stop", STOP_TIMEOUT_S)

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

    def nsys_does(self, verb: str, timeout_s: float) -> Optional[str]:
        """Run `nsys start` or `nsys stop` on our session; returns what went wrong, or None."""
        command = [self.nsys["path"], *filled(self.nsys[verb], self.values)]
        try:
            with open(self.log_path, "ab") as log:
                status = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout_s
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return "nsys %s: %s" % (verb, error)
        return None if status == 0 else "nsys %s ended with status %d" % (verb, status)

    def last_words(self) -> str:
        """The last line that nsys wrote."""
        try:
            with open(self.log_path, encoding="utf-8", errors="replace") as log:
                lines = [line.strip() for line in log if line.strip()]
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"

    def without_nsys(self, reason: str) -> int:
        """The training comes first: run the program as if we had never been asked."""
        self.say("lost", reason + "; the program ran without it")
        sys.stderr.write("clusterprof: rank %d runs without nsys: %s\n" % (self.rank, reason))
        sys.stderr.flush()
        self.keep("log")
        shutil.rmtree(self.private, ignore_errors=True)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        for pending in self.pending:
            os.kill(os.getpid(), pending)
        os.environ[variables.PROFILED] = variables.WITHOUT_NSYS
        os.execvp(self.program[0], self.program)

    # -- the report -------------------------------------------------------------------------

    def bring_home(self, status: int) -> None:
        """Move the report to the run directory and say in the state what became of it."""
        before = states.read(self.folder).get("state")
        rescued = None
        if not os.path.exists(self.report + ".nsys-rep"):
            rescued = self.rescue()
        self.keep("log")
        problem = self.keep("report", ".nsys-rep")
        end = "" if status == 0 else " (the program ended with status %d)" % status
        if before == "lost":
            self.say("lost", program_status=status)
        elif problem is None:
            cut = ""
            if before == "capturing":
                cut = "the program ended inside the window" + end
            self.say("captured", cut or None, rescued=rescued, program_status=status)
        elif before in ("armed", "waiting"):
            self.say("lost", "the program ended before the window began" + end,
                     program_status=status)  # fmt: skip
        else:
            self.say("lost", "%s; nsys said: %s" % (problem, self.last_words()),
                     program_status=status)  # fmt: skip
        shutil.rmtree(self.private, ignore_errors=True)

    def rescue(self) -> Optional[str]:
        """Debian's nsys does not find its importer and leaves a .qdstrm: call it by hand."""
        raw = self.report + ".qdstrm"
        importer = self.nsys.get("importer")
        if not os.path.exists(raw) or not importer:
            return None
        try:
            with open(self.log_path, "ab") as log:
                subprocess.run(
                    [importer, "-i", raw, "-o", self.report + ".nsys-rep"],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=IMPORT_TIMEOUT_S,
                )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        if not os.path.exists(self.report + ".nsys-rep"):
            self.keep("report", ".qdstrm")
            return None
        return "nsys left a .qdstrm; %s made the report of it" % os.path.basename(importer)

    def keep(self, name: str, ending: str = "") -> Optional[str]:
        """Copy a private file to the rank's folder, by rename; what went wrong, or None."""
        source = os.path.join(self.private, name + ending)
        if not os.path.exists(source):
            return "nsys wrote no report"
        target = os.path.join(self.folder, name + ending)
        beside = "%s.%d.tmp" % (target, os.getpid())
        try:
            shutil.copyfile(source, beside)
            os.replace(beside, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            return "the report could not be written to %s: %s" % (self.folder, error.strerror)
        return None

    def say(self, state: str, reason: Optional[str] = None, **facts: Any) -> None:
        """Advance the state; a run directory that is gone or full must not hurt the program."""
        facts = {name: fact for name, fact in facts.items() if fact is not None}
        with contextlib.suppress(OSError):
            states.advance(self.folder, state, reason, **facts)


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
        end_by_signal(status - 128)
    sys.exit(status)


def end_by_signal(number: int) -> None:
    """End as the program did, for the launcher to see; without a second core file."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1)
    sys.exit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
