"""The things that can start and stop a capture from inside the program.

Each has `start()`, `stop()` and `save()`, called between two steps on the training's thread,
and raises what went wrong; `size()` and, after it, `ordered()` say whether to stop early.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import socket
import sys
import tempfile
import warnings
from typing import Any, Iterator, Optional

from . import files, orders, size


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


class CudaProfiler:
    """nsys waits for cudaProfilerStart and -Stop (`--capture-range=cudaProfilerApi`)."""

    def __init__(self, address: str, run: str) -> None:
        self.guard = NsysSession(address)
        self.run = run
        self.watch: Optional[orders.Watch] = None

    def size(self) -> int:
        """Bytes that nsys has on the node's disk by now."""
        return self.guard.size()

    def ordered(self) -> Optional[str]:
        """Why the window is to be closed now, if it is. The guard knows of no session here."""
        return self.watch.said if self.watch is not None else None

    def start(self) -> None:
        """Begin the range that nsys waits for."""
        cuda = torch().cuda
        if not uses_cuda():
            raise RuntimeError("CUDA is not initialised in this process: nothing could be captured")
        drain()
        cuda.check_error(cuda.cudart().cudaProfilerStart())
        self.watch = orders.Watch(self.run)

    def stop(self) -> None:
        """End the range; nsys writes its report while the training goes on."""
        if self.watch is not None:
            self.watch.end()
        drain()
        cuda = torch().cuda
        cuda.check_error(cuda.cudart().cudaProfilerStop())

    def save(self) -> None:
        """The guard brings the report home."""


class NsysSession:
    """The guard starts and stops a named nsys session: for machines without CUDA."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.order = ""

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
        held, _, self.order = self.ask("size").partition(" ")
        return int(held)

    def ordered(self) -> Optional[str]:
        """Why the window is to be closed now, if it is; the guard told it with the size."""
        return self.order or None

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

    def __init__(self) -> None:
        self.context: Any = None

    def start(self) -> None:
        """From now on every operator pushes and pops a range."""
        self.context = torch().autograd.profiler.emit_nvtx()
        self.context.__enter__()

    def size(self) -> int:
        """The ranges are in nsys' report."""
        return 0

    def ordered(self) -> Optional[str]:
        """The guard is asked by nsys' own switch."""
        return None

    def stop(self) -> None:
        """No more ranges."""
        self.context.__exit__(None, None, None)

    def save(self) -> None:
        """The ranges are in nsys' report."""


class TorchProfiler:
    """torch.profiler over the window: the embedded default where there is no nsys."""

    def __init__(self, folder: str, run: Optional[str] = None) -> None:
        """`run`: where orders are looked for; None where a guard does."""
        self.folder = folder
        self.run = run
        self.watch: Optional[orders.Watch] = None
        self.profile: Any = None
        self.memory_before = 0

    def start(self) -> None:
        """CPU always, CUDA where the program uses it."""
        profiler = torch().profiler
        activities = [profiler.ProfilerActivity.CPU]
        if uses_cuda():
            activities.append(profiler.ProfilerActivity.CUDA)
        drain()
        with quiet():
            self.profile = profiler.profile(activities=activities)
            self.profile.start()
        if self.run is not None:
            self.watch = orders.Watch(self.run)
        self.memory_before = size.memory()

    def size(self) -> int:
        """About the bytes of the trace before it is packed.

        By the growth of the process since the start, which was 1.0 to 1.4 times those; the
        trace takes four times as much memory when it is written. Memory that the program itself
        takes in the window is counted too.
        """
        return max(0, size.memory() - self.memory_before)

    def ordered(self) -> Optional[str]:
        """Why the window is to be closed now, if it is."""
        return self.watch.said if self.watch is not None else None

    def stop(self) -> None:
        """End the trace with whole steps in it."""
        if self.watch is not None:
            self.watch.end()
        drain()
        with quiet():
            self.profile.stop()

    def save(self) -> None:
        """Write trace.json.gz: first on the node's own disk, then home by rename."""
        with tempfile.TemporaryDirectory(prefix="clusterprof-") as private:
            plain = os.path.join(private, "trace.json")
            with quiet():
                self.profile.export_chrome_trace(plain)
            self.profile = None
            target = os.path.join(self.folder, "trace.json.gz")
            with open(plain, "rb") as source, files.new(target) as written:
                # Level 1: at 6 the training would wait four times as long for a tenth of the size.
                with gzip.GzipFile("", "wb", 1, written) as packed:
                    shutil.copyfileobj(source, packed, 1 << 20)
