"""Processes below and beside us, read from /proc. Linux only, like nsys."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TYPE_CHECKING, Dict, Iterator, List, Optional, Tuple

from .timing import REAL, Clock

if TYPE_CHECKING:
    import subprocess

#: nsys' own programs. It asks its importer for its version, and one that hangs stays behind.
_NSYS = (b"nsys", b"nsys-launcher", b"nsys-tee", b"QdstrmImporter")

#: the status of a process whose parent has asked for it already
GONE = -1


def adopt_orphans() -> bool:
    """Become the parent of what our children leave behind, instead of process 1.

    nsys starts a daemon per session, which outlives a killed nsys for ever; and when nsys dies,
    only its launcher still knows how the program ended. Source: prctl(2).
    """
    try:
        import ctypes

        # PR_SET_CHILD_SUBREAPER
        return bool(ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def _fields(pid: int) -> List[str]:
    """/proc/PID/stat behind the program's name: state letter, parent, ...; [] where it is gone."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def work(pid: int) -> Tuple[str, int]:
    """State letter, and the CPU time that the process has taken (in ticks); X where it is gone."""
    fields = _fields(pid)
    return (fields[0], int(fields[11]) + int(fields[12])) if fields else ("X", 0)


def running(pid: int) -> bool:
    """Whether the process is there and has not ended (a zombie has)."""
    fields = _fields(pid)
    if fields:
        return fields[0] not in "ZX"
    try:  # gone, or we may open no file more: what cannot be determined still runs
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def parent(pid: int) -> Optional[int]:
    """The process's parent; None where the process is gone."""
    fields = _fields(pid)
    return int(fields[1]) if fields else None


def status_of(pid: int) -> Optional[int]:
    """An ended child's exit status, 128 + n for signal n; None for others, and if it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    if ended == 0:
        return None
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def last_status(pid: int) -> Optional[int]:
    """The exit status of any process that has ended, 128 + n for signal n; None while it runs.

    The kernel shows it until the parent has asked for it: `GONE` then. Source: proc(5), exit_code.
    """
    fields = _fields(pid)
    if not fields:
        return GONE
    if fields[0] not in "ZX":
        return None
    code = int(fields[49])
    return 128 + (code & 127) if code & 127 else code >> 8


def ended(status: int) -> str:
    """How a process ended, in words; `status` as subprocess has it."""
    return "ended with status %d" % status if status >= 0 else "was killed by signal %d" % -status


def of_session(session: str, children: bool = False) -> List[int]:
    """The running nsys processes that work for this session, whoever their parent is by now.

    `children`: and those that are children of ours, as our session's launcher and tee are.
    """
    return [
        pid
        for pid, line in _running_nsys()
        if (session and session.encode() in line) or (children and parent(pid) == os.getpid())
    ]


def _running_nsys() -> Iterator[Tuple[int, bytes]]:
    """Each running process of nsys, with its command line."""
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        line = b""
        with contextlib.suppress(OSError), open("/proc/%d/cmdline" % pid, "rb") as file:
            line = file.read()
        program = line.split(b"\0")[0].split(b"/")[-1].split(b" ")[0]
        if program in _NSYS and running(pid):
            yield pid, line


def part(name: str) -> List[str]:
    """The command line of a process of the agent's own (see `__main__`), without its arguments:
    this Python, into which nothing of the program's environment gets.
    """
    # Where Python is found by PYTHONHOME alone it cannot be told to ignore its environment.
    flags = ["-s", "-S"] if "PYTHONHOME" in os.environ else ["-I", "-S"]
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, *flags, folder, name]


def environment_without(prefixes: Tuple[str, ...]) -> Dict[str, str]:
    """Our environment, but for the variables that begin with one of these."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def end_first() -> None:
    """Be the first process that the kernel ends where memory runs out, if it lets us."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child that was started in a session of its own, and what it has started in it."""
    import signal
    import subprocess

    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1)


def status_within(
    child: "subprocess.Popen[bytes]", seconds: float, clock: Clock = REAL
) -> Optional[int]:
    """The status of a child, in a session of its own, that ends in time; None where we end it."""
    if not clock.until(lambda: child.poll() is not None, seconds):
        end_group(child)
        return None
    return child.returncode


def end_own_nsys(session: str, clock: Clock = REAL) -> None:
    """End what is left of our nsys, not of the program: TERM, which a daemon that spins ignores,
    then KILL, twice: what a killed one was waiting for becomes our child only then.
    """
    import signal

    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        left = of_session(session, children=True)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        clock.until(lambda: not any(map(running, left)), 0.5)  # noqa: B023 - within this pass


def forget_dead_sessions() -> None:
    """Remove nsys' list of sessions where no process is left to be in it.

    nsys keeps its sessions in /dev/shm; one that was killed stays there, and can refuse every
    later start on the node ("Connection refused", "Agent launcher failed"). Left alone while
    any nsys of this user runs, or anybody has it open.
    """
    import glob

    if any(_shares_memory(pid) for pid, _ in _running_nsys()):
        return
    for path in glob.glob("/dev/shm/NSys-*"):
        remove_unused(path)


def remove_unused(path: str) -> None:
    """Remove a file of nsys' in /dev/shm, where it is ours and no process uses it."""
    with contextlib.suppress(OSError):
        if is_unused(path):
            os.unlink(path)


def is_unused(path: str) -> bool:
    """Whether a file is this user's and no process has it open for writing, in any container.

    A container may share /dev/shm and not the process ids. The kernel grants a lease for reading
    only where no process has the file open for writing, and a mapping counts (fcntl(2)). Where it
    knows no leases, /proc is believed where it shows all processes. Raises OSError.
    """
    import fcntl
    import signal

    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        # Whoever opens it meanwhile has us signalled: not by SIGIO, which would end us.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        # PROC_PID_INIT_INO of the kernel's <linux/proc_ns.h>
        return os.readlink("/proc/self/ns/pid") == "pid:[%d]" % 0xEFFFFFFC
    finally:
        os.close(descriptor)
    return True


def _shares_memory(pid: int) -> bool:
    """Whether the process sees our /dev/shm; yes where that cannot be told."""
    try:
        return os.path.samefile("/proc/%d/root/dev/shm" % pid, "/dev/shm")
    except OSError:
        return True
