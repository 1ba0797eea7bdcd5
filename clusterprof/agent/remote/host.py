"""What `clusterprof ssh` runs on each host, piped to Python: this one file, standard library only.

    python -I -S - look REQUEST < host.py      describe this host, before anything is copied
    python -I -S host.py run FOLDER            run one host's launcher until it, or we, must end
    python -I -S host.py list FOLDER SECONDS   list the ranks' files, with checksums
    python -I -S host.py remove FOLDER         remove our temporary folder

`run` reads its command as one line of JSON from stdin, and after it the names of signals to
forward. The end of stdin is the end of the connection, whatever its cause: then the launcher is
ended too, so that nothing goes on running unattended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional

#: Longer than the 30 s in which torchrun ends its own workers.
GRACE_S = 40.0
#: For what is still being written once the launcher was ended.
SETTLING_S = 2.0

_FORWARDED = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL")
#: as `State.ended` has them: this file is sent alone, and can import nothing of ours
#: as `State.ended` has it, which cannot be imported where this file is piped to Python
_ENDED = ("captured", "collected", "lost", "counted")


# -- look -----------------------------------------------------------------------------------


def look(request: Dict[str, Any]) -> Dict[str, Any]:
    """What a launch needs to know of this host (read by `collect.answers`). Changes nothing."""
    folder = request["folder"]
    program, nsys = request.get("program"), request.get("nsys")
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "temporary": tempfile.gettempdir(),
        "folder": os.path.isdir(folder),
        "program": program is None or os.path.exists(os.path.join(folder, program)),
        "nsys": not nsys or shutil.which(nsys) is not None,
        "other_nsys": shutil.which(os.path.basename(nsys)) if nsys else None,
        "port": free_port(request.get("port")),
    }


def machine() -> str:
    """What distinguishes running kernels, "" where unknown; as `clocks.machine`."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return "%s %s" % (file.read().strip(), socket.gethostname())
    return ""


def free_port(wanted: Optional[int]) -> Optional[int]:
    """`wanted` where it is free here, else another that is; None where none is wanted."""
    if wanted is None:
        return None
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    return wanted


# -- run ------------------------------------------------------------------------------------


class Runner:
    """One launcher, and all that it starts."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pid = 0
        self.status: Optional[int] = None
        #: when it is killed (monotonic); set by the first signal to end
        self.deadline: Optional[float] = None
        #: bytes of stdin that are not handled yet, and whether more may come
        self.input = b""
        self.connected = True

    def run(self) -> int:
        """Run what the first line of stdin says; returns its status, 128 + n for signal n."""
        request = json.loads(self.first_line())
        adopt_orphans()
        lock = open(os.path.join(self.folder, "running"), "w")  # held to our end
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in _FORWARDED[:-1]:
            signal.signal(getattr(signal, "SIG" + name), self.on_signal)
        try:
            child = subprocess.Popen(
                request["argv"], cwd=request["folder"], stdin=subprocess.DEVNULL,
                env=self.environment(request["environment"]), start_new_session=True,
                preexec_fn=in_the_child,
            )  # fmt: skip
        except OSError as error:
            sys.stderr.write("clusterprof: %s: %s\n" % (request["argv"][0], error.strerror))
            return 126 if isinstance(error, PermissionError) else 127
        self.pid = child.pid
        while self.status is None:
            self.handle_input(0.1)
            self.reap()
            if self.deadline is not None and time.monotonic() > self.deadline:
                kill(descendants(os.getpid()))
        if self.deadline is not None:
            self.end_the_rest()
        child.returncode = self.status  # reaped by ourselves
        return self.status if self.status >= 0 else 128 - self.status

    def first_line(self) -> bytes:
        """The request; what follows it stays for `handle_input`."""
        while b"\n" not in self.input:
            part = os.read(0, 1 << 16)
            if not part:
                raise SystemExit("clusterprof: the connection ended before the command came")
            self.input += part
        line, _, self.input = self.input.partition(b"\n")
        return line

    def environment(self, given: Dict[str, str]) -> Dict[str, str]:
        """This host's own, what the user asked for, and the two variables of the agent."""
        environ = dict(os.environ)
        environ.update(given)
        before = environ.get("PYTHONPATH")
        inject = os.path.join(self.folder, "agent", "inject")
        environ["PYTHONPATH"] = inject + ":" + before if before else inject
        environ["CLUSTERPROF_PLAN"] = os.path.join(self.folder, "plan.json")
        return environ

    def handle_input(self, seconds: float) -> None:
        """Forward the signals that stdin names within `seconds`."""
        if not self.connected:
            time.sleep(seconds)
            return
        if not self.input and select.select([0], [], [], seconds)[0]:
            part = os.read(0, 4096)
            if not part:
                self.connected = False
                part = b"TERM\n"
            self.input += part
        while b"\n" in self.input:
            line, _, self.input = self.input.partition(b"\n")
            name = line.decode("ascii", "replace").strip()
            if name in _FORWARDED:
                self.forward(name)

    def on_signal(self, number: int, frame: Any) -> None:
        """A signal to us is the launcher's."""
        self.forward(signal.Signals(number).name[3:])

    def forward(self, name: str) -> None:
        """Send a signal to the launcher; one that ends it also sets a deadline."""
        if name == "KILL":
            self.deadline = time.monotonic()
            return
        if name in ("TERM", "INT", "HUP", "QUIT") and self.deadline is None:
            self.deadline = time.monotonic() + GRACE_S
        if self.pid and self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, getattr(signal, "SIG" + name))

    def reap(self) -> None:
        """Wait for every child that has ended, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.status = (
                        -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                    )

    def end_the_rest(self) -> None:
        """The launcher was ended by us: end what it left running as well."""
        until = time.monotonic() + SETTLING_S
        while descendants(os.getpid()) and time.monotonic() < until:
            time.sleep(0.05)
            self.reap()
        kill(descendants(os.getpid()))
        self.reap()


def in_the_child() -> None:
    """Default signal handlers, as a shell leaves them, and SIGTERM should we be killed."""
    for name in _FORWARDED[:-1]:
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_DFL)
    control(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of processes below us whose own has ended (Linux), to find them."""
    control(36, 1)  # PR_SET_CHILD_SUBREAPER


def control(option: int, value: int) -> None:
    """The system call prctl, where there is one."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> List[int]:
    """All living processes below `pid`."""
    children: Dict[int, List[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % entry, encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: List[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def kill(pids: List[int]) -> None:
    """End these for good."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


# -- list, remove -----------------------------------------------------------------------------


def listing(folder: str, seconds: float) -> List[Dict[str, Any]]:
    """Every file of the ranks: its path, size and SHA-256; waits for ranks that are not done.

    Paths are `00008/state.json` and, of later attempts, `attempt-2/00008/state.json`.
    """
    until = time.monotonic() + seconds
    found = []
    for attempt in ["", *sorted(name for name in os.listdir(folder) if "attempt-" in name)]:
        found += listed(os.path.join(folder, attempt, "ranks"), attempt, until)
    return found


def listed(ranks: str, attempt: str, until: float) -> List[Dict[str, Any]]:
    """The files of one attempt; waits for its ranks `until` (monotonic seconds)."""
    while not all_ranks_ended(ranks) and time.monotonic() < until:
        time.sleep(0.1)
    found = []
    for here, _, names in os.walk(ranks):
        for name in sorted(names):
            path = os.path.join(here, name)
            # Regular files only, and none that is still being written beside its place.
            if name.endswith(".tmp") or not stat.S_ISREG(os.lstat(path).st_mode):
                continue
            size, digest = checksum(path)
            shown = os.path.join(attempt, os.path.relpath(path, ranks))
            found.append({"path": shown, "size": size, "sha256": digest})
    return found


def still_running(folder: str, seconds: float) -> bool:
    """Whether a `run` in `folder` outlasts `seconds`: it holds a lock as long as it lives."""
    until = time.monotonic() + seconds
    try:
        with open(os.path.join(folder, "running")) as lock:
            while time.monotonic() <= until:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return False
                time.sleep(0.1)
    except OSError:  # it never began
        return False
    return True


def all_ranks_ended(ranks: str) -> bool:
    """Whether every rank that began here has ended."""
    for name in os.listdir(ranks) if os.path.isdir(ranks) else []:
        try:
            with open(os.path.join(ranks, name, "state.json"), encoding="utf-8") as file:
                state = json.load(file).get("state")
        except (OSError, ValueError):
            continue
        if state not in _ENDED:
            return False
    return True


def checksum(path: str) -> "tuple[int, str]":
    """A file's size and SHA-256, by what is read."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while True:
            part = file.read(1 << 20)
            if not part:
                return size, digest.hexdigest()
            size += len(part)
            digest.update(part)


def remove(folder: str) -> None:
    """Remove our temporary folder, and nothing that does not look like it."""
    if os.path.basename(folder).startswith("clusterprof-") and not os.path.islink(folder):
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: List[str]) -> None:
    """One verb; answers in JSON on stdout, where it has an answer."""
    verb, what = argv[0], argv[1]
    if verb == "look":
        print(json.dumps(look(json.loads(what))))
    elif verb == "run":
        sys.exit(Runner(what).run())
    elif verb == "list":
        # After a lost connection the job is still being ended: wait for that.
        if still_running(what, GRACE_S + 2 * SETTLING_S):
            print(json.dumps("running"))
        else:
            print(json.dumps(listing(what, float(argv[2]))))
    elif verb == "remove":
        remove(what)


if __name__ == "__main__":
    main(sys.argv[1:])
