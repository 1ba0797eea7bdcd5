"""What a rank's GPU and node say of themselves, once a second around looks and captures.

Nothing is set, and no process but the writer, beside the rank, asks. A driver may hang, fail or be
missing: it is asked by a thread of its own, which nothing waits for, and what it does not answer is
left empty.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, NamedTuple, Optional

from ..contracts.outbox import ROCM
from ..contracts.timing import REAL, Clock

if TYPE_CHECKING:
    from .gpu import Gpu

#: how often it is asked, and for how long after a look or a capture
EVERY_S = 1.0
GOES_ON_S = 10.0
#: an answer that takes longer is of another moment
LATEST_S = 0.5
#: more samples are not kept: those of four minutes, some 25 kB
MOST_SAMPLES = 240
#: nor more errors: the first ones
MOST_XIDS = 32
#: Columns of hardware.csv: of the GPU as `gpu.SAMPLED` has them, of the node load, steal (a share
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
        self.ticks = _ticks()

    def sample(self) -> Dict[str, Optional[float]]:
        """The columns of the node; None for what the kernel does not say.

        Steal is of the time since the sample before: without one it is None.
        """
        earlier, self.ticks = self.ticks, _ticks()
        passed = [now - then for now, then in zip(self.ticks, earlier)]  # noqa: B905 - Python 3.8
        mhz = [value / 1e3 for value in map(_number_in, self.frequencies) if value is not None]
        return {
            "load": _load(),
            "steal": passed[7] / sum(passed) if len(passed) > 7 and sum(passed) > 0 else None,
            # "some avg10=0.12 avg60=...": the share of time in which somebody waited for memory
            "memory_pressure": _number_in(_PRESSURE, b"avg10="),
            "cpu_mhz": sum(mhz) / len(mhz) if mhz else None,
        }


def _load() -> Optional[float]:
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


def _ticks() -> List[int]:
    """All processors' times by kind (user, nice, system, idle, iowait, irq, softirq, steal)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", "rb") as opened:
        return [int(ticks) for ticks in opened.readline().split()[1:9]]
    return []


def _number_in(path: str, after: bytes = b"") -> Optional[float]:
    """The first number of a file of the kernel's, after these characters."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, "rb") as opened:
        return float(opened.readline().partition(after)[2 if after else 0].split()[0])
    return None


def _text(value: float) -> str:
    return "%d" % value if isinstance(value, int) else "%.6g" % value


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


class Asked(NamedTuple):
    """A rank's GPU, as torch has it: what it computes with (`outbox.CUDA` or ROCM; else nothing),
    its UUID and its PCI address, if they are known.
    """

    uses: str = ""
    uuid: Optional[str] = None
    pci: Optional[str] = None


def _open(asked: Asked, pid: int) -> Gpu:
    if asked.uses == ROCM:
        from .amdgpu import AmdGpu

        return AmdGpu(asked.uuid, asked.pci)
    from .nvml import NvmlGpu  # a Python may have no ctypes

    return NvmlGpu(asked.uuid, pid)


class HardwareSampler:
    """Samples of one rank's GPU and node. All but `csv` and `state` is for one thread alone."""

    def __init__(
        self, pid: int, clock: Clock = REAL,
        start: Callable[[Callable[[], None]], None] = _in_a_thread,
        opened: Callable[[Asked, int], Gpu] = _open,
    ) -> None:  # fmt: skip
        """`start`: does what it is given, by a thread of its own; `opened`: a GPU, or the one of a
        process.
        """
        self.pid, self.clock = pid, clock
        self.start, self.opened = start, opened
        self.samples: Deque[Dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
        #: when to call `turn`, until when samples are taken, when the last one was (monotonic, s)
        self.due_at, self.until, self.sampled_at = math.inf, -math.inf, -math.inf
        self.asked = Asked()
        self.node: Optional[Node] = None
        self.gpu: Optional[Gpu] = None
        #: the GPU has not answered the last question yet; and it once did not within `LATEST_S`
        self.asking = self.is_late = False
        #: there is more than was last taken by `csv`; and it is not to wait for the last sample
        self.is_new = self.is_urgent = False
        #: UUID, name and limits of the GPU; and why there is none
        self.facts: Dict[str, Any] = {}
        self.trouble = ""
        #: the errors of the GPU: each one's number, and between which times it was (wall clock)
        self.xids: List[Dict[str, int]] = []
        self.listened_ns = 0

    def go_on(self, asked: Asked) -> None:
        """Sample for `GOES_ON_S` from now on."""
        if asked.uses != self.asked.uses:
            self.asked, self.trouble = asked, ""
        if self.node is None:
            self.node = Node(self.pid)
        now = self.clock.now()
        self.until = now + GOES_ON_S
        if math.isinf(self.due_at):
            self.due_at = max(now, self.sampled_at + EVERY_S)

    def go_on_again(self) -> None:
        """The same of what was sampled before, if anything was."""
        if self.node is not None:
            self.go_on(self.asked)

    def turn(self) -> bool:
        """Take a sample if one is due; whether what there is is to be written now: these were the
        last ones, or the GPU has reported an error.
        """
        if self.is_urgent:
            self.is_urgent = False
            return True
        now = self.clock.now()
        if now < self.due_at or self.node is None:
            return False
        if now >= self.until:
            self.due_at = math.inf
            return True
        self.sampled_at, self.due_at = now, now + EVERY_S
        sample: Dict[str, Any] = dict(self.node.sample(), time_ns=self.clock.wall_ns())
        self.samples.append(sample)
        self.is_new = True
        if self.asked.uses and not self.trouble:
            self._ask(sample)
        return False

    def end(self) -> None:
        """The rank has ended, of an error of its GPU maybe: ask for these once more, and wait for
        the answer for `LATEST_S` at most.
        """
        if self.gpu is not None and not self.asking:
            self._ask({})
            self.clock.until(lambda: not self.asking, LATEST_S)

    def _ask(self, sample: Dict[str, Any]) -> None:
        """Have the GPU's columns added to a sample; one question at a time."""
        if self.asking:
            self.is_late = True
            return
        self.asking = True
        try:
            self.start(functools.partial(self._answer, sample, self.clock.now()))
        except RuntimeError:  # the node has no place for another thread
            self.asking, self.is_late = False, True

    def _answer(self, sample: Dict[str, Any], asked_at: float) -> None:
        try:
            if self.gpu is None:
                self.gpu = self.opened(self.asked, self.pid)
                self.listened_ns = self.clock.wall_ns()
                self.facts = self.gpu.fixed()
                asked_at = self.clock.now()  # to load the library may take longer
            columns = self.gpu.sample()
            self._note(self.gpu.xids())
            if self.clock.now() - asked_at <= LATEST_S:
                sample.update(columns)
            else:
                self.is_late = True
        except Exception as why:  # no library, one that lacks a function, a Python without ctypes
            self.trouble = str(why) or type(why).__name__
        self.asking, self.is_new = False, True

    def _note(self, xids: List[int]) -> None:
        """Keep the errors since they were last asked for."""
        after_ns, self.listened_ns = self.listened_ns, self.clock.wall_ns()
        for xid in xids[: MOST_XIDS - len(self.xids)]:
            self.xids.append({"xid": xid, "after_ns": after_ns, "until_ns": self.listened_ns})
            self.is_urgent = True

    def csv(self) -> str:
        """The samples, a line each; what is not known is empty."""
        self.is_new = False
        lines = [",".join(COLUMNS)]
        for sample in list(self.samples):
            values = (sample.get(name) for name in COLUMNS)
            lines.append(",".join("" if value is None else _text(value) for value in values))
        return "\n".join(lines) + "\n"

    def state(self) -> Dict[str, Any]:
        """What the samples are of, for the rank's state; in `note` what could not be read."""
        notes = [self.trouble] if self.trouble else []
        waits_s = self.clock.now() - self.sampled_at if self.asking else 0.0
        if self.is_late or waits_s > LATEST_S:
            driver = "amdgpu" if self.asked.uses == ROCM else "NVML"
            notes.append("%s did not always answer in time" % driver)
        if self.gpu is not None:
            notes += self.gpu.notes()
        state = dict(self.facts, note="; ".join(notes)) if notes else dict(self.facts)
        return dict(state, xids=list(self.xids)) if self.xids else state
