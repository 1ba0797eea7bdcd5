"""What a rank's GPU and node say of themselves, once a second around looks and captures.

Nothing is set, and no process but the writer, beside the rank, asks. A driver may hang, fail or be
missing: it is asked by a thread of its own, which nothing waits for, and what it does not answer is
left empty.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional

from ..contracts.timing import REAL, Clock

if TYPE_CHECKING:
    from .nvml import Gpu

#: how often it is asked, and for how long after a look or a capture
EVERY_S = 1.0
GOES_ON_S = 10.0
#: more samples are not kept: those of four minutes
MOST_SAMPLES = 240
#: Columns of hardware.csv: of the GPU as `nvml.SAMPLED` has them, of the node load, steal (a share
#: of all processors' time), memory pressure (% of 10 s) and the frequency of the rank's processors.
COLUMNS = (
    "time_ns", "sm_mhz", "memory_mhz", "power_mw", "limit_mw", "energy_mj", "reasons",
    "temperature_c", "pcie_generation", "pcie_width", "ecc_uncorrected", "busy_percent",
    "load", "steal", "memory_pressure", "cpu_mhz",
)  # fmt: skip
_PRESSURE = "/proc/pressure/memory"
_FREQUENCY = "/sys/devices/system/cpu/cpu%d/cpufreq/scaling_cur_freq"
#: of so many processors of the rank the frequency is read: each is a file
_MOST_PROCESSORS = 4


class Node:
    """What the kernel says of the node, and of the processors that a process may use."""

    def __init__(self, pid: int) -> None:
        processors: List[int] = []
        with contextlib.suppress(OSError):
            processors = sorted(os.sched_getaffinity(pid))[:_MOST_PROCESSORS]
        self.frequencies = [_FREQUENCY % number for number in processors]
        self.before = self._times()

    def sample(self) -> Dict[str, Optional[float]]:
        """The columns of the node; None for what the kernel does not tell."""
        before, self.before = self.before, self._times()
        passed = [now - then for now, then in zip(self.before, before)]  # noqa: B905 - Python 3.8
        mhz = [value / 1e3 for value in map(_number_in, self.frequencies) if value is not None]
        return {
            "load": os.getloadavg()[0],
            "steal": passed[7] / sum(passed) if len(passed) > 7 and sum(passed) > 0 else None,
            # "some avg10=0.12 avg60=...": the share of time in which somebody waited for memory
            "memory_pressure": _number_in(_PRESSURE, b"avg10="),
            "cpu_mhz": sum(mhz) / len(mhz) if mhz else None,
        }

    def _times(self) -> List[int]:
        """All processors' times by kind (user, nice, system, idle, iowait, irq, softirq, steal)."""
        with contextlib.suppress(OSError, ValueError), open("/proc/stat", "rb") as opened:
            return [int(ticks) for ticks in opened.readline().split()[1:9]]
        return []


def _number_in(path: str, behind: bytes = b"") -> Optional[float]:
    """The first number of a file of the kernel's, behind these characters."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, "rb") as opened:
        return float(opened.readline().partition(behind)[2].split()[0])
    return None


def _text(value: float) -> str:
    return "%d" % value if isinstance(value, int) else "%.6g" % value


class Hardware:
    """Samples of one rank's GPU and node, by a thread of its own."""

    def __init__(self, pid: int, clock: Clock = REAL) -> None:
        self.pid, self.clock = pid, clock
        self.samples: Deque[Dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
        #: UUID, name and limits of the GPU, or in `note` why there is none
        self.facts: Dict[str, Any] = {}
        self.until = 0.0
        self.sampling = False

    def go_on(self, cuda: bool, uuid: Optional[str], then: Callable[[], None]) -> None:
        """Sample for `GOES_ON_S` from now on, and do `then`.

        `cuda`: the rank uses a GPU, of this UUID if it is known.
        """
        self.until = self.clock.now() + GOES_ON_S
        if not self.sampling:
            self.sampling = True
            threading.Thread(target=self._sample, args=(cuda, uuid, then), daemon=True).start()

    def csv(self) -> str:
        """The samples, a line each; what is not known is empty."""
        lines = [",".join(COLUMNS)]
        for sample in list(self.samples):
            values = (sample.get(name) for name in COLUMNS)
            lines.append(",".join("" if value is None else _text(value) for value in values))
        return "\n".join(lines) + "\n"

    def _sample(self, cuda: bool, uuid: Optional[str], then: Callable[[], None]) -> None:
        gpu, node = self._gpu(uuid) if cuda else None, Node(self.pid)
        while self.clock.now() < self.until:
            self.clock.sleep(EVERY_S)  # steal is of the time since the sample before
            of_gpu = gpu.sample() if gpu else {}
            self.samples.append(dict(of_gpu, time_ns=self.clock.wall_ns(), **node.sample()))
        self.sampling = False
        then()

    def _gpu(self, uuid: Optional[str]) -> Optional[Gpu]:
        try:
            from .nvml import Gpu

            gpu = Gpu(uuid, self.pid)
            self.facts = gpu.fixed()
        except Exception as why:  # a Python without ctypes, a library that lacks a function
            self.facts = {"note": str(why)}
            return None
        return gpu
