"""A dump of the flight recorder while the training hangs: the rank's writer asks for it.

A training thread that hangs in a collective can do nothing for us. So one more thread waits, in the
kernel, for the writer, which sees that no step ends (see `guard.step_log`). It dumps as torch's own
watchdog does on a timeout. It is there only in a process that has a process group, which has
threads of torch's in any case.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
from typing import Any, Dict, Iterator, Tuple

from ..contracts import paths
from ..contracts.messages import users_line
from ..contracts.outbox import Outbox
from ..contracts.plan import Plan
from . import hooks
from .profilers import initialised
from .recorder import Recorder, UnavailableError, hand_over, members
from .steps import FLUSH_NS, Counter
from .window import first_line

#: One wait for the writer; there is always another one. poll(2) takes 24 days at most.
_DAY_S = 86_400.0


class Hanging:
    """What the writer asks in a rank whose step does not end."""

    def __init__(self, plan: Plan, outbox: Outbox, recorder: Recorder, counter: Counter) -> None:
        self.plan = plan
        self.outbox = outbox
        self.recorder = recorder
        self.counter = counter
        #: the thread's own way to the writer
        #: the thread's own way to the writer
        self.own = Outbox(None)
        #: held while dumping: no process group is destroyed meanwhile
        self.dumping = _thread.allocate_lock()
        self.destroying = False

    def at(self, count: int) -> int:
        """Between two steps: if the program has a process group, have the writer answered from now
        on, by a thread that no signal is delivered to; when to come back.
        """
        connection = self.outbox.share() if initialised() is not None else None
        if connection is None:
            return 2 * count
        self.own = Outbox(connection)
        self.own.say("listen", after_s=self.plan.hang_after, unseen_s=FLUSH_NS / 1e9)
        dist = sys.modules["torch.distributed"]
        hooks.wrap(dist, "destroy_process_group", self.destroyed, self.destroy)
        import signal

        # What waits for a signal has it blocked, and would not get one that another thread takes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self.wait, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return -1

    def wait(self) -> None:
        """Answer the writer until the program ends."""
        while self.own.connection is not None:
            with contextlib.suppress(Exception):
                if self.own.wait("hangs", _DAY_S):
                    self.own.say("hangs", **self.answer())

    def stop(self) -> None:
        """Have the thread wait for the writer no more: it ends with the program."""
        self.own.interrupt()

    def answer(self) -> Dict[str, Any]:
        """Hand over the dump; which step hangs, since when and where, and why there is no dump."""
        step, begin = self.counter.current()
        line = users_line(frames_of(self.counter.thread))
        no_dump = None
        try:
            with self.dumping:
                self.dump()
        except UnavailableError as why:
            no_dump = str(why)
        except Exception as error:  # torch raises what it likes
            no_dump = "torch's flight recorder could not be read: %s" % first_line(error)
        since_ns = self.counter.wall(begin)
        return {"step": step, "since_ns": since_ns, "line": line, "no_dump": no_dump}

    def dump(self) -> None:
        """Hand the dump to the writer. Raises UnavailableError, and what torch does."""
        if self.destroying:
            raise UnavailableError("the program was destroying a process group")
        # what torch imports to name the lines of a stack, which takes seconds
        can_name = "torch._inductor.codecache" in sys.modules
        source = self.recorder.find(stacks=self.plan.stacks or can_name)
        if sys.modules["torch"].cuda.is_initialized():
            spare_captures()
        hand_over(source, (paths.HANG, paths.HANG_PICKLE), members(), self.own)

    def destroy(self) -> None:
        """The program is about to destroy process groups, to whose CUDA events a dump refers."""
        with self.dumping:
            self.destroying = True

    def destroyed(self) -> None:
        """It has."""
        self.destroying = False

    def leave(self) -> None:
        """In a forked child: it has no such thread."""
        self.own.close()
        self.dumping = _thread.allocate_lock()


def frames_of(thread: int) -> Iterator[Tuple[str, int, str]]:
    """File, line and function of each frame of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def spare_captures() -> None:
    """Let what this thread asks of CUDA end no capture of a CUDA graph by another thread.

    The recorder queries events. Source: the CUDA driver API on
    cuThreadExchangeStreamCaptureMode; torch's watchdog does the same. Raises UnavailableError.
    """
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        mode = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        failed = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        raise UnavailableError("the CUDA driver cannot be asked: %s" % error) from None
    if failed:
        raise UnavailableError("the CUDA driver answered with error %d" % failed)
