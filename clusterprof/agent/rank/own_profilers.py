"""Profilers that are not ours: asked for before a window opens, and given way to when one comes.

torch has one profiler a process (Kineto): a second one that starts ends the program by a signal,
or comes out empty. CUPTI, below it and below nsys, has one user as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
from _thread import get_ident
from types import ModuleType
from typing import Any, Callable, Iterator, Mapping, Optional, Tuple

from ..contracts import identity
from . import hooks

TORCH = "torch.profiler"
NVTX = "emit_nvtx"


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
        if self._ours == get_ident():
            return
        first, self.program = self.program is None, profiler
        self.used = self.used or profiler == TORCH
        if first and self.comes is not None:
            self.comes(profiler)

    def _ended(self) -> None:
        if self._ours != get_ident():
            self.program = None


def above(environ: Mapping[str, str]) -> Optional[str]:
    """What profiles this process already, by its environment; None where nothing is seen."""
    if "NSYS_PROFILING_SESSION_ID" in environ or "QUADD_INJECTION_CONFIG" in environ:
        return "an nsys that was started around it"
    injected = environ.get("CUDA_INJECTION64_PATH")
    return "%s (CUDA_INJECTION64_PATH)" % injected if injected else None


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
