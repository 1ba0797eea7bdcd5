"""What starts and stops a capture from inside the program, on the training's thread; and profilers
that are not ours, which are asked for before a window opens, and given way to when one comes.

torch has one profiler a process (Kineto): a second one that starts ends the program by a signal,
or comes out empty. CUPTI, below it and below nsys, has one user as well.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import contextlib
import functools
import os
import sys
from _thread import get_ident, get_native_id, start_new_thread
from types import ModuleType
from typing import Any, Callable, Iterator, Optional, Tuple

from ..contracts import descriptors, identity, messages
from ..contracts.outbox import Outbox
from ..contracts.plan import MB
from ..contracts.timing import REAL, Clock
from . import hooks

#: How long the guard may take to answer, beyond what nsys takes.
GUARD_S = 2.0
#: How long torch.profiler stalls a rank at the end for each byte by which the process has grown:
#: 31 ms of processor time for each MB (torch 2.13, CPU operators, 22 to 210 MB, one core).
BYTE_S = 0.031 / MB
#: How long a window that closes waits for a folder that was asked for when it opened.
FOLDER_S = 1.0
#: How long after the rank's own start its writer may begin, where 32 ranks on each core do.
BEGIN_S = 30.0
#: the program's own profilers
TORCH, NVTX = "torch.profiler", "emit_nvtx"


def torch() -> Any:
    """The program's own torch; RuntimeError where it has not imported one."""
    if "torch" not in sys.modules:
        raise RuntimeError("the program has not imported torch")
    return sys.modules["torch"]


def uses_cuda() -> bool:
    """Whether the program computes on a GPU by torch."""
    return "torch" in sys.modules and bool(torch().cuda.is_initialized())


def drain() -> None:
    """Let the queued work of the GPU end, so that the window holds whole steps and no others."""
    if uses_cuda():
        torch().cuda.synchronize()


def initialised() -> Any:
    """torch.distributed where the program has a process group; None where it has none."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist and dist.is_available() and dist.is_initialized() else None


def shortest_timeout_s() -> Optional[float]:
    """After how long the first of this rank's process groups gives up; None where it has none."""
    dist = initialised()
    if dist is None:
        return None
    return min(
        float(group._get_backend(device).options._timeout.total_seconds())
        for group in dist.distributed_c10d._world.pg_map for device in group._device_types
    )  # fmt: skip


class OtherThreadError(RuntimeError):
    """torch's profilers live on one thread: elsewhere their end is the program's, by a signal."""


class Kineto:
    """Who has torch's profiler: the program, or we."""

    def __init__(self) -> None:
        #: what the program itself has prepared or started (TORCH, NVTX); None for nothing
        self.program: Optional[str] = None
        #: whether the program has ever had a profiler of its own
        self.used = False
        #: called on the program's thread before its own begins, while a window is open
        self.comes: Optional[Callable[[str], None]] = None
        self._ours: Optional[int] = None

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """What is started and stopped in here is not the program's, nor are its warnings."""
        import warnings

        self._ours = get_ident()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self._ours = None

    def watch(self, module: ModuleType) -> None:
        """See every start and stop from Python; `module` is torch.autograd.profiler."""
        for name, before, after in (
            ("_prepare_profiler", lambda: self._begins(TORCH), None),
            # It follows a preparation, except for the ranges of emit_nvtx and emit_itt.
            ("_enable_profiler", lambda: self._begins(self.program or NVTX), None),
            ("_disable_profiler", None, self._ended),
        ):
            with contextlib.suppress(AttributeError):  # another torch: it cannot be seen
                hooks.wrap(module, name, after, before)

    @staticmethod
    def leaves(module: ModuleType) -> None:
        """Have Kineto let go of CUPTI after each trace; `module` is torch.version.

        Else each later launch costs some 2 µs more, until the program ends. Only from CUDA 12.6 on:
        with an older one a program with CUDA graphs dies at the next trace (pytorch pull 150957).
        Kineto reads the variable at each start and stop; what the user has set stays.
        """
        numbers = [int(number) for number in (module.cuda or "").split(".")[:2] if number.isdigit()]
        if tuple(numbers) >= (12, 6):
            identity.lend(os.environ, "TEARDOWN_CUPTI", "1")

    def _begins(self, profiler: str) -> None:
        if self._ours != get_ident():
            first, self.program = self.program is None, profiler
            self.used = self.used or profiler == TORCH
            if first and self.comes is not None:
                self.comes(profiler)

    def _ended(self) -> None:
        if self._ours != get_ident():
            self.program = None


#: This process's; it sees nothing until `watch`.
kineto = Kineto()
_cuda_range: Optional[Tuple[Callable[[], Any], Callable[[], Any]]] = None


def cuda_range() -> Optional[Tuple[Callable[[], Any], Callable[[], Any]]]:
    """torch's cudaProfilerStart and -Stop, ours from the first call on; None without a CUDA torch.

    nsys takes the first pair of calls for its window, and no other. A program that has such calls
    itself has them without any effect from then on, as where no profiler listens.
    """
    global _cuda_range
    cudart = getattr(sys.modules.get("torch._C"), "_cudart", None)
    if _cuda_range is None and cudart is not None:
        _cuda_range = cudart.cudaProfilerStart, cudart.cudaProfilerStop
        success = getattr(getattr(cudart, "cudaError", None), "success", 0)
        cudart.cudaProfilerStart = cudart.cudaProfilerStop = lambda: success
    return _cuda_range


class Switch:
    """What starts and stops a capture. Called between two steps, raises what went wrong."""

    #: the profilers of the program's own that it cannot be open beside
    excludes: Tuple[str, ...] = ()
    #: how long its start or stop stalls a rank, where that does not depend on what is captured
    stalls_s = 0.0

    def size(self) -> int:
        """Bytes by now, to stop early by; 0 where they are in another switch's report."""
        return 0

    def stall_s(self, done: int, left: int) -> float:
        """How long it stalls the training, where `done` steps have ended and `left` have not."""
        return self.stalls_s

    def save(self) -> None:
        """Write the report, where it is not the guard that transfers it."""


class NsysSession(Switch):
    """The guard starts and stops a named nsys session.

    nsys has CUPTI from the program's start to its end, whether a window is open or not: to close
    one gives the program's own profiler nothing (see `Window.finish`).
    """

    #: its start: it is stopped beside the training (four H200s of one host, docs/nsys.md)
    stalls_s = 1.6

    def __init__(self, address: str, outbox: Outbox, start_s: float, window: int = 1) -> None:
        """`start_s`: what nsys may take to begin."""
        self.address = address
        self.outbox = outbox
        self.patience_s = start_s + GUARD_S
        self.window = window

    def start(self) -> None:
        """Returns once nsys is collecting: of all that the guard is asked, this alone waits."""
        drain()
        self.outbox.look().pop("held", None)  # of an earlier window
        asked = descriptors.asked(self.address, "start %d" % self.window, 0)
        with contextlib.closing(asked) as guard:
            answer = _answer(guard, self.patience_s, self.outbox.clock)
        if answer != "ok":
            raise RuntimeError(answer or "the guard of nsys did not answer")

    def stop(self) -> None:
        """Returns at once: nsys writes its report while the training goes on."""
        drain()
        descriptors.asked(self.address, "stop", 0).close()

    def size(self) -> int:
        """Bytes that nsys has on the node's disk by the last answer; what it is now comes later."""
        descriptors.asked(self.address, "size", 0).close()
        return int(self.outbox.look().get("held", 0))


class CudaProfiler(NsysSession):
    """nsys waits for cudaProfilerStart and -Stop (`--capture-range=cudaProfilerApi`)."""

    #: its stop, which is the longer one
    stalls_s = 3.1

    def start(self) -> None:
        """Begin the range that nsys waits for."""
        ours = cuda_range()
        if ours is None or not uses_cuda():
            raise RuntimeError("CUDA is not initialised in this process: nothing could be captured")
        begin, self.end = ours
        drain()
        torch().cuda.check_error(begin())

    def stop(self) -> None:
        """End the range; nsys writes its report while the training goes on."""
        drain()
        torch().cuda.check_error(self.end())


class OfOneThread(Switch):
    """One of torch's own, which lives on the thread that started it."""

    excludes = (TORCH, NVTX)
    thread = 0

    def on_its_thread(self) -> None:
        """Raises OtherThreadError."""
        if get_native_id() != self.thread:
            why = "torch's profiler was started on another thread, which alone can stop it"
            raise OtherThreadError(why)


class EmitNvtx(OfOneThread):
    """`--pytorch emit-nvtx`: an NVTX range around every operator, by torch itself."""

    def start(self) -> None:
        """Ranges from now on."""
        self.thread = get_native_id()
        self.context: Any = torch().autograd.profiler.emit_nvtx()
        with kineto.ours():
            self.context.__enter__()

    def stop(self) -> None:
        """No more ranges."""
        self.on_its_thread()
        with kineto.ours():
            self.context.__exit__(None, None, None)


class TorchProfiler(OfOneThread):
    """torch.profiler over the window: the embedded default where there is no nsys."""

    memory_before = 0
    #: steps that had ended, and `size`, when it was first asked for its stall
    grown: Tuple[int, int] = (0, 0)

    def __init__(self, outbox: Outbox, *, alone: bool) -> None:
        """`alone`: its trace is the rank's report; nsys makes another otherwise."""
        self.outbox = outbox
        self.alone = alone

    def start(self) -> None:
        """CPU always, CUDA where the program uses it."""
        profiler = torch().profiler
        kinds = profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if uses_cuda() else [kinds.CPU]
        drain()
        spare_children()
        self.outbox.look().pop("folder", None)  # of an earlier window
        self.thread = get_native_id()
        with kineto.ours():
            self.profile: Any = profiler.profile(activities=activities)
            self.profile.start()
        self.outbox.say("folder")
        self.memory_before = memory()

    def size(self) -> int:
        """About the bytes of the trace before it is packed: the growth of the process.

        That was 1.0 to 1.4 times those; the trace takes four times as much memory when it is
        written. What the program itself takes in the window is counted too.
        """
        return max(0, memory() - self.memory_before)

    def stall_s(self, done: int, left: int) -> float:
        """Its stop's, by what the steps since the first time have added; 0 until then."""
        held, (before, first) = self.size(), self.grown
        if not before:
            self.grown = done, held
        if not 0 < before < done:
            return 0.0
        return BYTE_S * (held + left * max(0, held - first) / (done - before))

    def stop(self) -> None:
        """End the trace with whole steps in it."""
        self.on_its_thread()
        drain()
        with kineto.ours():
            self.profile.stop()

    def save(self) -> None:
        """Write the trace to the node's own disk; the writer packs and transfers it.

        Only where that disk has just let another process make a folder: see `outbox`.
        """
        self.on_its_thread()
        late_s = self.outbox.began_s + BEGIN_S - self.outbox.clock.now()
        begun = self.outbox.wait("begun", max(FOLDER_S, late_s))
        folder = self.outbox.wait("folder", FOLDER_S) if begun else None
        if not folder:
            # Not by tempfile, which may write to it to see whether it can.
            which = os.environ.get("TMPDIR", "/tmp") if begun else "what writes this rank's files"
            why = self.outbox.look().get("no_folder") or "%s does not answer" % which
            raise RuntimeError(why)
        path = os.path.join(folder, "trace.json")
        with kineto.ours(), messages.unsignalled():
            self.profile.export_chrome_trace(path)
        self.profile = None
        self.outbox.say("trace", path=path, facts={} if self.alone else None)


def memory() -> int:
    """Bytes of memory that this process has in use (resident)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _answer(guard: _socket.socket, patience_s: float, clock: Clock = REAL) -> str:
    """What the guard has answered, "" for nothing. Raises OSError."""
    if not clock.wait([guard], patience_s):
        return ""
    return guard.recv(256).decode("utf-8", "replace").strip()


def end_with_the_guard(address: str) -> None:
    """From now on the program ends when the guard is gone, as it would if it were the rank itself.

    A launcher that loses patience kills the process that it knows, which is the guard: the program
    runs in a session of its own and would live on, holding its GPU.
    """
    pid = os.getpid()
    try:
        guard = descriptors.asked(address, "watch", 0)
        if _answer(guard, 5) != "ok":
            return
        guard.setblocking(True)
        descriptors.hide([guard.fileno()])
    except OSError:
        return  # a guard that does not answer is no reason to end

    def wait() -> None:
        received = b""
        with contextlib.suppress(OSError):
            received = guard.recv(1)
        if not received and os.getpid() == pid:
            os.kill(pid, _signal.SIGKILL)

    start_new_thread(wait, ())


@functools.lru_cache(maxsize=None)  # once
def spare_children() -> None:
    """Let children that the program forks from now on end, whether in the window or after it.

    Kineto has run a thread in this process. A forked child lacks it, and its exit() waits for it
    for ever, in a destructor of libkineto. Such a child ends by _exit() instead, with its own
    status, after all that Python does at its end and with its C streams flushed; the destructors of
    C++ libraries are left out.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # not glibc
        on_exit, flush, end = libc.on_exit, libc.fcloseall, libc._exit
        # The last one registered is called first, with the status.
        os.register_at_fork(after_in_child=lambda: (on_exit(end, None), on_exit(flush, None)))
