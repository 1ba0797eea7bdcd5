"""What a process of our own does: it ends with the one that it works for, leaves the rest of the
machine processor, disk and memory, and imports no pandas.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from clusterprof.agent.contracts import processes

#: whether what makes tables steps aside: "normal" is for nodes whose processors are never idle
VARIABLE = "CLUSTERPROF_REDUCE_PRIORITY"
#: the numbers of ioprio_set(2), for which libc has no function
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "riscv64": 30}
#: of <linux/ioprio.h>: this process, and the class that gets the disk when no other wants it
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


def end_with_parent() -> None:
    """Be killed when the thread ends that started us; a Ctrl-C is its, not ours. See prctl(2)."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def step_aside() -> None:
    """Take only what no other process wants of processor and disk; children inherit it.

    Where memory runs out, the kernel is to end this process first. What it refuses is left out.
    """
    import ctypes

    processes.end_first()
    if os.environ.get(VARIABLE) == "normal":
        return
    with contextlib.suppress(OSError):
        os.nice(19)  # niceness goes no further
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


class _WithoutPandas:
    @staticmethod
    def find_spec(name: str, _path: object, _target: object = None) -> None:
        """Raise ModuleNotFoundError for pandas."""
        if name == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=name)


def without_pandas() -> None:
    """Let pandas be missing in this process.

    pyarrow looks for it when it is first given a list, to ask whether that is one of its arrays: a
    fifth of the time in which two large reports are merged, and 40 MB of each process.
    """
    sys.meta_path.insert(0, _WithoutPandas)
