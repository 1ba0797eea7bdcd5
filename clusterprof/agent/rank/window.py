"""The window of steps: opened and closed between two steps, never in the way of the training.

Whatever goes wrong in here is written to the rank's state, and the training goes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, Callable, List, Optional

from ..contracts import clocks, paths
from ..contracts.identity import PROFILED
from ..contracts.plan import Plan
from ..contracts.states import State
from ..guard import size
from ..guard.outbox import Outbox
from . import garbage_collector, own_profilers
from .steps import Counter

#: How long a window that opens waits for word whether it was ordered closed already.
ORDER_S = 0.25


class Window:
    """One rank's capture of the steps [first, end)."""

    def __init__(self, plan: Plan, outbox: Outbox, counter: Counter, beacons: Any = None) -> None:
        self.first, self.end = plan.window
        self.outbox = outbox
        self.counter = counter
        self.beacons = beacons
        self.clock = clocks.Readings()
        self.garbage = garbage_collector.Pauses()
        self.switches: List[Any] = []
        self.plan = plan
        #: close early beyond so many bytes; 0 for no limit
        self.most = plan.max_report_mb * size.MB
        self.looks = size.Looks(self.first, 0)
        self.is_open = False
        self.was_open = False
        #: the switches that are on
        self.running: List[Any] = []
        self.thread_end: Optional[AtEnd] = None
        counter.next_event = self.first
        counter.at = self.at
        if os.environ.get(PROFILED, "").startswith("cuda:"):
            own_profilers.cuda_range()

    def at(self, count: int) -> None:
        """A step has just ended, and the window begins or ends here."""
        if not self.was_open:
            opened = self.open()
            if self.beacons is not None:
                # Also where the window is lost: all ranks send beacons, or none can.
                self.beacons.send("open", count)
            if opened or self.beacons is not None:
                self.counter.next_event = self.end
            if opened:
                self.counter.next_event = min(self.end, count + 1)
            return
        if count < self.end:
            self.counter.next_event = self.look(count) if self.is_open else self.afterwards()
            return
        if self.beacons is not None:
            self.beacons.send("close", count)
        if self.is_open:
            self.close(None, whole=True)

    def open(self) -> bool:
        """Start capturing; False where that failed (said in the state)."""
        self.was_open = True
        self.outbox.say("watch")
        order = self.outbox.wait("order", ORDER_S)
        if order is not None:
            self.say(State.LOST, "the window was not opened at step %d: %s" % (self.first, order))
            return False
        try:
            self.say(State.CAPTURING, step_begin=self.counter.count)
            self.clock.take("open")
            self.outbox.say("clock", readings=self.clock.new())
            self.counter.anchor()
            tell_prober("open")
            self.switches = self.make_switches()
            self.ask(own_profilers.kineto.program)
            for switch in self.switches:
                switch.start()
                self.running.append(switch)
        except Exception as error:  # torch, CUDA and nsys raise what they like
            self.stop()
            self.say(State.LOST, "the window could not be opened at step %d: %s"
                     % (self.first, first_line(error)))  # fmt: skip
            return False
        self.is_open = True
        self.thread_end = AtEnd(self.thread_ends)
        own_profilers.kineto.comes = self.give_way
        self.looks = size.Looks(self.first, time.monotonic_ns())
        self.quietly(lambda: self.clock.take("opened", mark=True))
        self.garbage.start()
        return True

    def look(self, count: int) -> int:
        """Inside the window: close it if it has become too large, or if that was ordered.

        Returns the count to come back at.
        """
        held = 0
        ordered = self.outbox.look().get("order")
        for switch in self.switches:
            try:
                held += switch.size()
            except Exception:  # what cannot be measured cannot be limited
                pass
        if ordered:
            why = ordered
        elif 0 < self.most < held:
            why = "the report reached %d MB" % (held // size.MB)
        else:
            again = self.looks.next(count, time.monotonic_ns())
            return again if again < self.end else int(self.end)
        self.close(
            "closed at step %d of %d:%d: %s" % (count, self.first, self.end, why), whole=True
        )
        return self.afterwards()

    def afterwards(self) -> int:
        """The count to come back at once the window is closed early."""
        # The other ranks' beacons wait for ours at the window's end.
        return int(self.end) if self.beacons is not None else -1

    def excludes(self, what: Optional[str]) -> bool:
        """Whether `what` the program itself has on, or begins, cannot be beside our window."""
        return any(what in switch.excludes for switch in self.switches)

    def ask(self, what: Optional[str]) -> None:
        """Raises RuntimeError where `what` the program itself has on excludes ours."""
        if self.excludes(what):
            raise RuntimeError("the program's own %s is on; choose other steps with --steps" % what)

    def give_way(self, what: str) -> None:
        """The program's own profiler is about to begin: ours ends first."""
        if self.is_open and self.excludes(what):
            self.close("closed at step %d of %d:%d: the program's own %s began"
                       % (self.counter.count, self.first, self.end, what), whole=True)  # fmt: skip

    def thread_ends(self) -> None:
        """The thread that opened the window ends: it alone can close it."""
        if self.is_open:
            self.close("the thread that trained ended after %d steps, inside the window %d:%d"
                       % (self.counter.count, self.first, self.end))  # fmt: skip
        self.stop()

    def close(self, cut: Optional[str], *, whole: bool = False) -> None:
        """Stop capturing; `cut` says why before the window's end, None at its end.

        `whole`: all is captured that is to be; another attempt of the job need not capture again.
        """
        self.is_open = False
        own_profilers.kineto.comes = None
        self.outbox.say("ignore")
        self.counter.flush()
        self.garbage.stop()
        self.quietly(lambda: self.clock.take("closing", mark=True))
        problem = self.stop()
        self.quietly(lambda: self.clock.take("close"))
        tell_prober("close")
        self.outbox.say("clock", readings=self.clock.new())
        self.outbox.say("file", name=paths.GARBAGE, text=self.garbage.text(self.counter))
        if problem is not None:
            self.say(State.LOST, "the window could not be closed: %s" % problem)
            return
        self.say(State.FINISHING, cut, step_end=self.counter.count, whole=whole)
        for switch in self.switches:
            problem = self.quietly(switch.save) or problem
        self.say(None, closed=True)
        if problem is not None:
            self.say(State.LOST, "the report could not be written: %s" % problem)

    def stop(self) -> Optional[str]:
        """Stop what runs; what went wrong, or None. What another thread must stop runs on."""
        problem = None
        for switch in reversed(tuple(self.running)):
            try:
                switch.stop()
            except Exception as error:
                problem = first_line(error)
                if isinstance(error, own_profilers.OtherThreadError):
                    continue
            self.running.remove(switch)
        return problem

    def finish(self) -> None:
        """The program ends: close what is open, and say how far it came."""
        count = self.counter.count
        if self.is_open:
            self.close("the program ended after %d steps, inside the window %d:%d"
                       % (count, self.first, self.end))  # fmt: skip
        elif not self.was_open:
            self.say(State.LOST, "the program ended after %d steps, before the window %d:%d began"
                     % (count, self.first, self.end), steps=count)  # fmt: skip
        else:
            self.say(None, self.deprived(), steps=count)
        self.stop()

    @staticmethod
    def deprived() -> Optional[str]:
        """What nsys has kept from a profiler of the program's own; None for nothing."""
        from . import profilers

        if PROFILED not in os.environ or not own_profilers.kineto.used or not profilers.uses_cuda():
            return None
        return ("the program's own torch.profiler saw no GPU beside nsys; it is left whole by"
                " --profiler torch")  # fmt: skip

    def make_switches(self) -> List[Any]:
        """What opens and closes this window, outermost first."""
        from . import profilers

        mode, _, address = os.environ.get(PROFILED, "").partition(":")
        if not mode:
            return [profilers.TorchProfiler(self.outbox, alone=True)]
        nsys: Any = profilers.NsysSession(address)
        if mode == "cuda":
            nsys = profilers.CudaProfiler(address)
        if "torch" not in sys.modules:
            return [nsys]
        if not profilers.uses_cuda():
            # Without CUDA nsys sees neither gloo nor the operators: torch.profiler does.
            return [nsys, profilers.TorchProfiler(self.outbox, alone=False)]
        # On CUDA the two exclude each other: both need CUPTI.
        return [nsys, profilers.EmitNvtx()] if self.plan.emit_nvtx else [nsys]

    def say(self, state: Optional[State], reason: Optional[str] = None, **facts: Any) -> None:
        """Have the state advanced; None: as it is, with more facts."""
        self.outbox.state(state, reason, **facts)

    @staticmethod
    def quietly(action: Any) -> Optional[str]:
        """Run `action`; returns what went wrong instead of raising it."""
        try:
            action()
        except Exception as error:
            return first_line(error)
        return None


def tell_prober(event: str) -> None:
    """Let the clocks be measured now, if they are to be (see `prober`)."""
    if "CLUSTERPROF_PROBE" in os.environ:
        from ..remote import prober

        prober.notify(event)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().split("\n")[0]
    return text or error.__class__.__name__


class AtEnd:
    """Calls `act` when the thread that made it ends, on that thread.

    torch's profilers live on one thread, and end the program on any other.

    Not the main thread's end, which is atexit's; and a thread that the interpreter leaves behind
    never ends.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._local = threading.local()
        self._local.last = _Last(act)


class _Last:
    """Local to a thread, and so deleted by it when it ends."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.pid = os.getpid()

    def __del__(self) -> None:
        # A forked child has one thread, and main's things are deleted with the interpreter.
        if os.getpid() == self.pid and threading.current_thread() is not threading.main_thread():
            self.act()
