"""The things that can start and stop a capture from inside the program.

Each has `start()`, `stop()` and `save()`, called between two steps on the training's thread,
and raises what went wrong; `size()` says whether to stop early, and `excludes` which profilers of
the program's own it cannot be open beside (see `others`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
import warnings
from typing import Any, Iterator

from ..guard import size
from ..guard.outbox import Outbox
from . import own_profilers

#: How long a window that closes waits for a folder that was asked for when it opened.
FOLDER_S = 1.0


def torch() -> Any:
    """The program's own torch; RuntimeError where it has not imported one."""
    module = sys.modules.get("torch")
    if module is None:
        raise RuntimeError("the program has not imported torch")
    return module


def uses_cuda() -> bool:
    """Whether the program computes on a GPU by torch."""
    return "torch" in sys.modules and bool(torch().cuda.is_initialized())


def drain() -> None:
    """Let the queued work of the GPU end, so that the window holds whole steps and no others."""
    if uses_cuda():
        torch().cuda.synchronize()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The profiler's warnings are not the training's: keep them off its stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def on_its_thread(thread: int) -> None:
    """Raises others.OtherThreadError."""
    if threading.get_native_id() != thread:
        raise own_profilers.OtherThreadError(
            "torch's profiler was started on another thread, which alone can stop it"
        )


class CudaProfiler:
    """nsys waits for cudaProfilerStart and -Stop (`--capture-range=cudaProfilerApi`)."""

    excludes = ()

    def __init__(self, address: str) -> None:
        self.guard = NsysSession(address)

    def size(self) -> int:
        """Bytes that nsys has on the node's disk by now."""
        return self.guard.size()

    def start(self) -> None:
        """Begin the range that nsys waits for."""
        ours = own_profilers.cuda_range()
        if ours is None or not uses_cuda():
            raise RuntimeError("CUDA is not initialised in this process: nothing could be captured")
        drain()
        torch().cuda.check_error(ours.start())

    def stop(self) -> None:
        """End the range; nsys writes its report while the training goes on."""
        drain()
        ours = own_profilers.cuda_range()
        assert ours is not None
        torch().cuda.check_error(ours.stop())

    def save(self) -> None:
        """The guard brings the report home."""


class NsysSession:
    """The guard starts and stops a named nsys session."""

    #: nsys has CUPTI from the program's start to its end, whether a window is open or not: to
    #: close one gives the program's own profiler nothing (see `Window.deprived`)
    excludes = ()

    def __init__(self, address: str) -> None:
        self.address = address

    def start(self) -> None:
        """Returns once nsys is collecting."""
        drain()
        answer = self.ask("start")
        if answer != "ok":
            raise RuntimeError(answer or "the guard of nsys did not answer")

    def stop(self) -> None:
        """Returns at once: nsys writes its report while the training goes on."""
        drain()
        self.ask("stop")

    def size(self) -> int:
        """Bytes that nsys has on the node's disk by now."""
        return int(self.ask("size"))

    def save(self) -> None:
        """The guard brings the report home."""

    def ask(self, request: str) -> str:
        """One word to the guard; its answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
            guard.settimeout(20)
            guard.connect(self.address)
            guard.sendall(request.encode() + b"\n")
            return guard.recv(256).decode("utf-8", "replace").strip()


class EmitNvtx:
    """`--pytorch emit-nvtx`: an NVTX range around every operator, by torch itself."""

    excludes = (own_profilers.TORCH, own_profilers.NVTX)

    def __init__(self) -> None:
        self.context: Any = None

    def start(self) -> None:
        """From now on every operator pushes and pops a range."""
        self.thread = threading.get_native_id()
        self.context = torch().autograd.profiler.emit_nvtx()
        with own_profilers.kineto.ours():
            self.context.__enter__()

    def size(self) -> int:
        """The ranges are in nsys' report."""
        return 0

    def stop(self) -> None:
        """No more ranges."""
        on_its_thread(self.thread)
        with own_profilers.kineto.ours():
            self.context.__exit__(None, None, None)

    def save(self) -> None:
        """The ranges are in nsys' report."""


class TorchProfiler:
    """torch.profiler over the window: the embedded default where there is no nsys."""

    excludes = (own_profilers.TORCH, own_profilers.NVTX)

    def __init__(self, outbox: Outbox, *, alone: bool) -> None:
        """`alone`: its trace is the rank's report; nsys makes another otherwise."""
        self.outbox = outbox
        self.alone = alone
        self.profile: Any = None
        self.memory_before = 0

    def start(self) -> None:
        """CPU always, CUDA where the program uses it."""
        profiler = torch().profiler
        activities = [profiler.ProfilerActivity.CPU]
        if uses_cuda():
            activities.append(profiler.ProfilerActivity.CUDA)
        drain()
        spare_children()
        self.thread = threading.get_native_id()
        with quiet(), own_profilers.kineto.ours():
            self.profile = profiler.profile(activities=activities)
            self.profile.start()
        self.outbox.say("folder")
        self.memory_before = size.memory()

    def size(self) -> int:
        """About the bytes of the trace before it is packed.

        By the growth of the process since the start, which was 1.0 to 1.4 times those; the
        trace takes four times as much memory when it is written. Memory that the program itself
        takes in the window is counted too.
        """
        return max(0, size.memory() - self.memory_before)

    def stop(self) -> None:
        """End the trace with whole steps in it."""
        on_its_thread(self.thread)
        drain()
        with quiet(), own_profilers.kineto.ours():
            self.profile.stop()

    def save(self) -> None:
        """Write the trace to the node's own disk; it is packed and taken home beside the training.

        Only where that disk has just let another process make a folder: see `outbox`.
        """
        on_its_thread(self.thread)
        folder = self.outbox.wait("folder", FOLDER_S)
        if folder is None:
            raise RuntimeError("%s does not answer" % tempfile.gettempdir())
        path = os.path.join(folder, "trace.json")
        with quiet():
            self.profile.export_chrome_trace(path)
        self.profile = None
        self.outbox.say("trace", path=path, facts={} if self.alone else None)


_spared = False


def spare_children() -> None:
    """Let children that the program forks from now on end, whether in the window or after it.

    A process that has profiled with Kineto runs a thread for it. A forked child has not that
    thread, and its end by exit() waits for it for ever, in a destructor of libkineto. Such a
    child ends by _exit() instead, with its own status, after all that Python does at its end and
    with its C streams flushed; the destructors of C++ libraries are left out.
    """
    global _spared
    if _spared or sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None)
    on_exit, flush, end = (getattr(libc, name, None) for name in ("on_exit", "fcloseall", "_exit"))
    if on_exit is None or flush is None or end is None:
        return  # not glibc

    def in_child() -> None:
        # The last one registered is called first, with the status.
        on_exit(end, None)
        on_exit(flush, None)

    os.register_at_fork(after_in_child=in_child)
    _spared = True
