"""What `clusterprof ssh` runs on each host, piped to Python: this one file, standard library only.

    python -I -S - look REQUEST < host.py      describe this host, before anything is copied
    python -I -S host.py run FOLDER            run one host's launcher until it, or we, must end
    python -I -S host.py list FOLDER SECONDS   list the ranks' files, with checksums
    python -I -S host.py remove FOLDER         remove our temporary folder

`run` reads its command as one line of JSON from stdin, then names of signals to forward. The end of
stdin is the end of the connection: the launcher is ended too, so that nothing runs unattended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
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
_FORWARDED = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")
#: as `State.ended` has it, which cannot be imported where this file is piped to Python
_ENDED = ("captured", "collected", "lost", "counted")


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
        "port": None if request.get("port") is None else free_port(request["port"]),
    }


def machine() -> str:
    """What distinguishes running kernels, "" where unknown; as `clocks.machine`."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return "%s %s" % (file.read().strip(), socket.gethostname())
    return ""


def free_port(wanted: int) -> int:
    """`wanted` where it is free here, else another that is."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    return wanted


class Runner:
    """One launcher, and all that it starts."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pid = 0
        self.status: Optional[int] = None
        #: when it is killed (monotonic); set by the first signal to end
        self.deadline = math.inf
        #: bytes of stdin that are no whole line yet, and whether more may come
        self.input = b""
        self.connected = True

    def run(self) -> int:
        """Run what the first line of stdin says; returns its status, 128 + n for signal n."""
        lines: List[str] = []
        while self.connected and not lines:
            lines = self.lines(GRACE_S)
        if not self.connected:
            raise SystemExit("clusterprof: the connection ended before the command came")
        request = json.loads(lines.pop(0))
        control(36, 1)  # PR_SET_CHILD_SUBREAPER: to find what loses its parent below us
        lock = open(os.path.join(self.folder, "running"), "w")  # held to our end
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in _FORWARDED:
            number = getattr(signal, "SIG" + name)
            signal.signal(number, lambda signum, _: self.forward(signal.Signals(signum).name[3:]))
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
            for name in lines or self.lines(0.1):
                self.forward(name)
            lines = []
            self.reap()
            if time.monotonic() > self.deadline:
                kill_descendants()
        if self.deadline < math.inf:  # ended by us: end what it left running as well
            until = time.monotonic() + SETTLING_S
            while descendants() and time.monotonic() < until:
                time.sleep(0.05)
                self.reap()
            kill_descendants()
            self.reap()
        child.returncode = self.status  # reaped by ourselves
        return self.status if self.status >= 0 else 128 - self.status

    def lines(self, seconds: float) -> List[str]:
        """What comes on stdin within `seconds`; TERM at its end, and nothing from then on."""
        if not self.connected:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            piece = os.read(0, 1 << 16)
            self.connected = bool(piece)
            self.input += piece or b"\nTERM\n"
        *lines, self.input = self.input.split(b"\n")
        return [line.decode("utf-8", "replace").strip() for line in lines]

    def environment(self, given: Dict[str, str]) -> Dict[str, str]:
        """This host's own, what the user asked for, and the two variables of the agent."""
        environ = {**os.environ, **given}
        inject = os.path.join(self.folder, "agent", "inject")
        environ["PYTHONPATH"] = ":".join(filter(None, [inject, environ.get("PYTHONPATH")]))
        environ["CLUSTERPROF_PLAN"] = os.path.join(self.folder, "plan.json")
        return environ

    def forward(self, name: str) -> None:
        """Send a signal to the launcher; one that ends it also sets a deadline."""
        if name == "KILL":
            self.deadline = time.monotonic()
        elif name in ("TERM", "INT", "HUP", "QUIT"):
            self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
        if name in _FORWARDED and self.pid and self.status is None:
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
                    killed = os.WIFSIGNALED(status)
                    self.status = -os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)


def in_the_child() -> None:
    """Default signal handlers, as a shell leaves them, and SIGTERM should we be killed."""
    for name in _FORWARDED:
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_DFL)
    control(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def control(option: int, value: int) -> None:
    """The system call prctl, where there is one."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants() -> List[int]:
    """All living processes below this one."""
    children: Dict[int, List[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open("/proc/%s/stat" % entry, "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(entry))
    pids = [os.getpid()]
    for pid in pids:
        pids += children.get(pid, [])
    return pids[1:]


def kill_descendants() -> None:
    """Kill all of them, once."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def listing(folder: str, seconds: float) -> List[Dict[str, Any]]:
    """Every file of the ranks, as `attempt-2/00008/log`, its size and SHA-256; waits for ranks."""
    until = time.monotonic() + seconds
    listed = []
    for attempt in ["", *sorted(name for name in os.listdir(folder) if "attempt-" in name)]:
        ranks = os.path.join(folder, attempt, "ranks")
        while not all_ranks_ended(ranks) and time.monotonic() < until:
            time.sleep(0.1)
        for parent, below, names in os.walk(ranks):
            below[:] = [name for name in below if not name.endswith(".tmp")]
            for path in [os.path.join(parent, name) for name in sorted(names)]:
                # Regular files only, and none that is still being written beside its place.
                if stat.S_ISREG(os.lstat(path).st_mode) and not path.endswith(".tmp"):
                    size, digest = checksum(path)
                    shown = os.path.join(attempt, os.path.relpath(path, ranks))
                    listed.append({"path": shown, "size": size, "sha256": digest})
    return listed


def still_running(folder: str, seconds: float) -> bool:
    """Whether a `run` in `folder` outlasts `seconds`: it holds a lock as long as it lives."""
    until = time.monotonic() + seconds
    with contextlib.suppress(OSError), open(os.path.join(folder, "running")) as lock:
        while time.monotonic() <= until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
            time.sleep(0.1)
        return True
    return False  # it never began


def all_ranks_ended(ranks: str) -> bool:
    """Whether every rank that began here has ended."""
    for name in os.listdir(ranks) if os.path.isdir(ranks) else []:
        path = os.path.join(ranks, name, "state.json")
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            if json.load(file).get("state") not in _ENDED:
                return False
    return True


def checksum(path: str) -> "tuple[int, str]":
    """A file's size and SHA-256, by what is read."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            size += len(piece)
            digest.update(piece)
    return size, digest.hexdigest()


def remove(folder: str) -> None:
    """Remove our temporary folder, and nothing that does not look like it."""
    if os.path.basename(folder).startswith("clusterprof-") and not os.path.islink(folder):
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: List[str]) -> None:
    """One verb; answers in JSON on stdout, where it has an answer."""
    verb, argument = argv[0], argv[1]
    if verb == "look":
        print(json.dumps(look(json.loads(argument))))
    elif verb == "run":
        sys.exit(Runner(argument).run())
    elif verb == "list":
        # After a lost connection the job is still being ended: wait for that.
        running = still_running(argument, GRACE_S + 2 * SETTLING_S)
        print(json.dumps("running" if running else listing(argument, float(argv[2]))))
    elif verb == "remove":
        remove(argument)


if __name__ == "__main__":
    main(sys.argv[1:])
