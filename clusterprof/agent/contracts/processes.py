"""Processes below and beside us, read from /proc. Linux only, like nsys."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import signal
import subprocess
import sys
import time
from typing import List, Optional, Tuple

_PR_SET_CHILD_SUBREAPER = 36

#: PROC_PID_INIT_INO of the kernel's <linux/proc_ns.h>
_FIRST_PID_NAMESPACE = "pid:[%d]" % 0xEFFFFFFC

#: nsys' own programs. It asks its importer for its version, and one that hangs stays behind.
_NSYS = (b"nsys", b"nsys-launcher", b"nsys-tee", b"QdstrmImporter")


def adopt_orphans() -> bool:
    """Become the parent of what our children leave behind, instead of process 1.

    nsys starts a daemon per session, which outlives a killed nsys for ever; and when nsys dies,
    only its launcher still knows how the program ended. Source: prctl(2).
    """
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def _stat(pid: int) -> Optional[Tuple[str, int]]:
    """State letter and parent of a process; None where there is none."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def work(pid: int) -> Tuple[str, int]:
    """State letter, and the CPU time that the process has taken (in ticks); X where it is gone."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[11]) + int(fields[12])


def running(pid: int) -> bool:
    """Whether the process is there and has not ended (a zombie has)."""
    found = _stat(pid)
    if found is None:  # gone, or we may open no file more: what cannot be told still runs
        return _answers(pid)
    return found[0] not in "ZX"


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def parent(pid: int) -> Optional[int]:
    """The process's parent; None where the process is gone."""
    found = _stat(pid)
    return found[1] if found else None


def status_of(pid: int) -> Optional[int]:
    """The exit status of an ended child of ours, 128 + n for signal n; None if it has not ended.

    Also None where it is no child of ours (yet).
    """
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    if ended == 0:
        return None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    return code if code >= 0 else 128 - code


def ended(status: int) -> str:
    """How a process ended, in words; `status` as subprocess has it."""
    return "ended with status %d" % status if status >= 0 else "was killed by signal %d" % -status


def own_nsys() -> List[int]:
    """The nsys processes that are children of ours: our session's daemon, launcher and tee."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if parent(pid) == os.getpid() and _is_nsys(pid)]


def of_session(session: str) -> List[int]:
    """The nsys processes that work for this session, whoever their parent is by now."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or not _is_nsys(int(entry)) or not running(int(entry)):
            continue
        with contextlib.suppress(OSError), open("/proc/%s/cmdline" % entry, "rb") as file:
            if session.encode() in file.read():
                found.append(int(entry))
    return found


def _is_nsys(pid: int) -> bool:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            program = file.read().split(b"\0")[0]
    except OSError:
        return False
    return program.split(b"/")[-1].split(b" ")[0] in _NSYS


def isolated() -> List[str]:
    """This Python, for a script of ours: nothing of the program's environment gets into it."""
    # Where Python is found by PYTHONHOME alone it cannot be told to ignore its environment.
    flags = ["-s", "-S"] if "PYTHONHOME" in os.environ else ["-I", "-S"]
    return [sys.executable, *flags]


def part(name: str) -> List[str]:
    """The command line of a process of the agent's own (see `__main__`), without its arguments."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [*isolated(), folder, name]


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child that was started in a session of its own, and what it has started in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1)


def end_own_nsys(session: str, patience_s: float = 0.5) -> None:
    """End what is left of our nsys: TERM, then KILL; what the program left is not touched.

    A daemon that spins or is stopped does not hear the first; what a killed one was waiting for
    is ours only then.
    """
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        left = [pid for pid in {*own_nsys(), *of_session(session)} if running(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while any(running(pid) for pid in left) and time.monotonic() < deadline:
            time.sleep(0.02)


def forget_dead_sessions() -> None:
    """Remove nsys' list of sessions where no process is left to be in it.

    nsys keeps its sessions in /dev/shm; one that was killed stays there, and can refuse every
    later start on the node ("Connection refused", "Agent launcher failed"). Left alone while
    any nsys of this user runs, or anybody has it open.
    """
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    if any(_is_nsys(pid) and running(pid) and _shares_memory(pid) for pid in pids):
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

    A container may share /dev/shm and not the process ids: what /proc does not show may live, and
    a file that is named by a process id be another process'. The kernel grants a lease for reading
    only where no process has the file open for writing, and a mapping counts (fcntl(2)). Where it
    knows no leases, /proc is believed where it shows all processes. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_uid == os.getuid() and _has_no_writer(descriptor)
    finally:
        os.close(descriptor)


def _has_no_writer(descriptor: int) -> bool:
    try:
        # Whoever opens it meanwhile has us signalled: not by SIGIO, which would end us.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    return True


def _shares_memory(pid: int) -> bool:
    """Whether the process sees our /dev/shm; yes where that cannot be told."""
    try:
        theirs = os.stat("/proc/%d/root/dev/shm" % pid)
        ours = os.stat("/dev/shm")
    except OSError:
        return True
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def end_by_signal(number: int) -> None:
    """End as the program did, for the launcher to see; without a second core file."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1)
    sys.exit(128 + number)
