"""What a program does to its own process inside a window: it trains on as it would without us.

The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import check_as_without_us, state_if_any
from lab.stub import OPTIONS, RANK
from lab.tiers import few

pytestmark = pytest.mark.usefixtures("scripted")

#: Trains; inside the window of the steps 5 to 15 it does `WHAT`, and at its end `LAST`.
PROGRAM = """
import ctypes, os, resource, shutil, signal, sys, tempfile, threading, time
import torch
optimizer, last = torch.optim.SGD(), os.environ["LAST"]
for step in range(1, 26):
    optimizer.step()
    if step == 10:
        exec(os.environ["WHAT"])
exec(last)
print("trained")
"""
RAISES = """
class Preempted(Exception):
    pass
def raises(frame, event, arg):
    if "clusterprof" in frame.f_code.co_filename:
        sys.setprofile(None)
        raise Preempted
sys.setprofile(raises)
try:
    for _ in range(10):
        optimizer.step()
except Preempted:
    pass
"""
OVER = """
mine = os.open(os.devnull, os.O_RDWR)
for each in range(3, 256):
    if each != mine:
        os.dup2(mine, each)
"""
FORKS = """
pid = os.fork()
if pid == 0:
    os.fstat(100), [os.fstat(each) for each in range(3, 256)]
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
ALARMS = """
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
"""
#: what it does in the window, and at its end
WAYS = {
    "no descriptor may be opened": ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", ""),
    "its working directory is removed": (
        "os.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())", "",
    ),
    "its TMPDIR is removed": ("shutil.rmtree(os.environ['TMPDIR'])", ""),
    "its environment is cleared": ("os.environ.clear()", ""),
    "no file may grow": (
        ("signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
         "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"), "",
    ),
    "no memory may be mapped": (
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))", "",
    ),
    "its profile function raises": (RAISES, ""),
    "its trace function is called": ("sys.settrace(lambda *_: None)", ""),
    "its descriptors are put in the place of all": (OVER, FORKS),
    "its root is an empty folder": ("os.chroot(tempfile.mkdtemp())", ""),
    "it is another user": ("os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)", ""),
    "its network is its own": ("ctypes.CDLL(None).unshare(0x40000000)", ""),
    "it may not be looked at": ("ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)", ""),
    "its memory is locked": ("ctypes.CDLL(None).mlockall(3)", ""),
    "a signal comes every millisecond": (ALARMS, "signal.setitimer(signal.ITIMER_REAL, 0)"),
    "modules are forgotten": (
        ("for each in list(sys.modules):\n"
         "    if each not in ('sys', 'builtins', '__main__'): del sys.modules[each]"), "",
    ),
    "what it imports from is emptied": ("sys.path.clear()\nsys.meta_path.clear()", ""),
    "time stands": (
        "time.time = time.monotonic = lambda: 0.0\ntime.time_ns = time.monotonic_ns = lambda: 0",
        "",
    ),
    "there are no streams": ("sys.stderr = sys.__stderr__ = None", ""),
    "collections are watched by none": ("import gc\ngc.callbacks.clear()\ngc.freeze()", ""),
}  # fmt: skip
CASES = {f"{what}, {profiler}": (profiler, what) for what in WAYS for profiler in ("torch", "nsys")}


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("profiler", "what"),
    few(
        CASES,
        "its descriptors are put in the place of all, torch",
        "no file may grow, torch",
        "its root is an empty folder, nsys",
    ),
)
def test_a_program_trains_to_its_end_whatever_it_does_to_its_own_process(
    profiler: str, what: str, workdir: Path, fault: Callable[..., None]
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    (workdir / "plain").mkdir()
    (workdir / "temporary").mkdir()
    line, (now, last) = ["python", "train.py"], WAYS[what]
    env = {**RANK, "WHAT": now, "LAST": last}
    plain = command.run(line, env={**env, "TMPDIR": str(workdir / "plain")})
    ours = command.clusterprof(["run", *OPTIONS, f"--profiler={profiler}", "--", *line])
    done = command.run(ours, env={**env, "TMPDIR": str(workdir / "temporary")})
    found, added_s = state_if_any(workdir / "run"), done.seconds - plain.seconds
    fault(f"{what}, {profiler}", plain.returncode, done.returncode, added_s, found)
    check_as_without_us(plain, done)
    report = workdir / "run/ranks/00000/report.nsys-rep"
    assert report.exists() == (found["state"] == "collected" and profiler == "nsys"), found
