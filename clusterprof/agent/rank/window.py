"""The window of steps: opened and closed between two steps, never in the way of the training.

Whatever goes wrong in here is written to the rank's state, and the training goes on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from _thread import _local, get_ident
from typing import Any, Callable, Dict, List, Optional, Tuple

from ..contracts import clocks, messages, paths, plan as plans
from ..contracts.identity import profiled
from ..contracts.outbox import Outbox
from ..contracts.plan import Plan
from ..contracts.states import State
from . import profilers
from .hooks import entry
from .steps import Counter, ended_before

#: A shorter collection of garbage delays no rank; of the youngest generation there are thousands.
LONG_NS = 20_000
#: More are not kept: a program that collects so often says so in the first of them.
MOST = 100_000


class Window:
    """One rank's capture of the steps [first, end)."""

    def __init__(
        self, plan: Plan, outbox: Outbox, counter: Counter, number: int = 1, by_nsys: bool = True,
        tells: bool = True,
    ) -> None:  # fmt: skip
        """`number`: of a later window, whose steps are the plan's, and whose files the outbox's.

        `by_nsys`: nsys captures it, where the rank runs under one. `tells`: of all ranks that
        capture it prints what holds for each. `at` is to attend.
        """
        self.tells = tells
        self.plan = plan
        self.number = number
        self.by_nsys = by_nsys
        self.first, self.end = plan.window
        self.outbox = outbox
        self.counter = counter
        #: the clocks' readings that the writer has not yet
        self.readings: List[Dict[str, Any]] = []
        self.garbage = Pauses(counter)
        self.opened_ns = 0
        self.switches: List[Any] = []
        #: the switches that are on
        self.running: List[Any] = []
        self.is_open = self.was_open = False
        #: a stall that is longer than the process groups' timeout was said
        self.warned = False
        #: holds an `_AtEnd` of the thread that opened the window, which alone can close it
        self.local = _local()
        if by_nsys and profiled(os.environ).startswith("cuda:"):
            profilers.cuda_range()

    def at(self, count: int) -> int:
        """A step has just ended, and the window begins or ends here; when to come back."""
        if not self.was_open:
            return min(self.end, count + 1) if self.open() else -1
        if not self.is_open:
            return -1
        if count < self.end:
            return self.look(count)
        self.close(None, whole=True)
        return -1

    def open(self) -> bool:
        """Start capturing; False where that failed (its state says why)."""
        self.was_open = True
        self.outbox.look().pop("order", None)  # of an earlier window
        self.outbox.say("watch")
        order = self.outbox.wait("order", 0.25)  # it may have been ordered closed already
        if order is not None:
            why = "the window was not opened at step %d: %s" % (self.first, order)
            self.outbox.state(State.LOST, why)
            return False
        try:
            self.outbox.state(State.CAPTURING, step_begin=self.counter.count)
            self.readings.append(clocks.reading("open"))
            self.hand_over_readings()
            # The steps of the windows before have the clock of their own reports.
            self.counter.anchor(0 if self.number == 1 else self.first)
            clocks.notify_prober("open")
            self.switches = self.make_switches()
            self.foresee(0)
            for switch in self.switches:
                switch.start()
                self.running.append(switch)
        except Exception as error:  # torch, CUDA and nsys raise what they like
            self.stop()
            why = "the window could not be opened at step %d: %s" % (self.first, first_line(error))
            self.outbox.state(State.LOST, why)
            return False
        self.is_open = True
        self.local.at_end = _AtEnd(self.thread_ends)
        profilers.kineto.comes = self.give_way
        self.opened_ns = self.counter.clock.now_ns()
        with contextlib.suppress(Exception):
            self.readings.append(clocks.reading("opened", mark=True))
        self.garbage.start()
        return True

    def look(self, count: int) -> int:
        """Inside the window: close it if it has become too large, or if that was ordered.

        Returns the count to come back at, -1 for none.
        """
        held = 0
        why = self.outbox.look().get("order")
        for switch in self.switches:
            with contextlib.suppress(Exception):  # what cannot be measured cannot be limited
                held += switch.size()
        self.foresee(count - self.first)
        if not why and 0 < self.plan.max_report_mb * plans.MB < held:
            why = "the report reached %d MB" % (held // plans.MB)
        if not why:
            now_ns = self.counter.clock.now_ns()
            return min(next_look(self.first, self.opened_ns, count, now_ns), self.end)
        self.close_early(why)
        return -1

    def foresee(self, done: int) -> None:
        """Warn once where the capture stalls longer than the other ranks wait; `done`: its steps
        that have ended.
        """
        with contextlib.suppress(Exception):  # what cannot be measured is not known
            timeout_s = None if self.warned else profilers.shortest_timeout_s()
            left = self.end - self.first - done
            stall_s = max(switch.stall_s(done, left) for switch in self.switches)
            if timeout_s is not None and stall_s > timeout_s:
                self.warned = True
                stall = (
                    "the window %d:%d stalls this rank for about %.0f s, and a process group gives "
                    "up after %.0f s: choose fewer steps, or a longer timeout in init_process_group"
                ) % (self.first, self.end, stall_s, timeout_s)
                self.outbox.state(None, stall=stall)
                if self.tells:
                    messages.complain(stall)

    def give_way(self, profiler: str) -> None:
        """The program's own profiler is about to begin: ours ends first."""
        if self.is_open and any(profiler in switch.excludes for switch in self.switches):
            self.close_early("the program's own %s began" % profiler)

    def thread_ends(self) -> None:
        """The thread that opened the window ends: it alone can close it."""
        if self.is_open:
            self.close("the thread that trained ended after %d steps, inside the window %d:%d"
                       % (self.counter.count, self.first, self.end))  # fmt: skip
        self.stop()

    def close_early(self, why: str) -> None:
        """Stop capturing between two steps, all of them whole."""
        where = (self.counter.count, self.first, self.end)
        self.close("closed at step %d of %d:%d: %s" % (*where, why), whole=True)

    def close(self, cut: Optional[str], *, whole: bool = False) -> None:
        """Stop capturing; `cut` says why before the window's end, None at its end.

        `whole`: all is captured that is to be; another attempt of the job need not capture again.
        """
        self.is_open = False
        profilers.kineto.comes = None
        self.outbox.say("ignore")
        self.counter.flush()
        self.garbage.stop()
        with contextlib.suppress(Exception):
            self.readings.append(clocks.reading("closing", mark=True))
        problem = self.stop()
        with contextlib.suppress(Exception):
            self.readings.append(clocks.reading("close"))
        clocks.notify_prober("close")
        self.hand_over_readings()
        self.outbox.say("file", name=paths.GARBAGE, text=self.garbage.text())
        if problem is not None:
            cut, whole = "the window could not be closed: %s" % problem, False
            if not self.is_guarded():
                self.outbox.state(State.LOST, cut)
                return
        self.outbox.state(State.FINISHING, cut, step_end=self.counter.count, whole=whole)
        for switch in self.switches:
            try:
                switch.save()
            except Exception as error:
                file = "torch's trace" if self.is_guarded() else "the report"
                problem = "%s could not be written: %s" % (file, first_line(error))
                self.outbox.state(None if self.is_guarded() else State.LOST, problem)
        self.outbox.state(None, closed=True)

    def is_guarded(self) -> bool:
        """Whether the report is nsys': its guard knows whether there is one."""
        return any(isinstance(switch, profilers.NsysSession) for switch in self.switches)

    def stop(self) -> Optional[str]:
        """Stop what runs; what went wrong, or None. What another thread must stop runs on."""
        problem = None
        for switch in reversed(tuple(self.running)):
            try:
                switch.stop()
            except Exception as error:
                problem = first_line(error)
                if isinstance(error, profilers.OtherThreadError):
                    continue
            self.running.remove(switch)
        return problem

    def finish(self) -> None:
        """The program ends: close what is open, and record how far it came."""
        count = self.counter.count
        where = (count, self.first, self.end)
        if self.is_open:
            self.close("the program ended after %d steps, inside the window %d:%d" % where)
        elif not self.was_open:
            self.outbox.state(State.LOST, ended_before(*where), steps=count)
        else:
            deprived = None
            if profiled(os.environ) and profilers.kineto.used and profilers.uses_cuda():
                deprived = ("the program's own torch.profiler saw no GPU beside nsys; it is left "
                            "whole by --profiler torch")  # fmt: skip
            self.outbox.state(None, deprived, steps=count)
        self.stop()

    def make_switches(self) -> List[Any]:
        """What opens and closes this window, outermost first. Raises RuntimeError."""
        mode, _, address = profiled(os.environ).partition(":")
        if not self.by_nsys and address and profilers.uses_cuda():
            raise RuntimeError("nsys, under which this rank runs, has the GPU's tracing to itself, "
                               "and captures one window only")  # fmt: skip
        switches: List[Any] = []
        if self.by_nsys and address:
            session = profilers.CudaProfiler if mode == "cuda" else profilers.NsysSession
            start_s = self.plan.nsys.begin_s if self.plan.nsys else plans.MOST_BEGIN_S
            switches.append(session(address, self.outbox, start_s, self.number))
        if not switches or ("torch" in sys.modules and not profilers.uses_cuda()):
            # Without CUDA nsys sees neither gloo nor the operators: torch.profiler does.
            switches.append(profilers.TorchProfiler(self.outbox, alone=not switches))
        elif "torch" in sys.modules and self.plan.emit_nvtx:
            # On CUDA the two exclude each other: both need CUPTI.
            switches.append(profilers.EmitNvtx())
        own = profilers.kineto.program
        if any(own in switch.excludes for switch in switches):
            why = "the program's own %s is on; choose other steps with --steps"
            raise RuntimeError(why % own)
        return switches

    def hand_over_readings(self) -> None:
        """Have the clocks' readings since the last time written."""
        readings, self.readings = self.readings, []
        self.outbox.say("clock", readings=readings)


class Pauses:
    """When Python's garbage collector ran inside the window: begin and end by the monotonic clock,
    generation, collected. No profiler sees it.

    A collection holds the interpreter: the rank launches nothing meanwhile, and the others wait. A
    signal that came during one has its handler called in here, where Python lets nothing out that
    it raises. So that is kept, and raised when the step has ended.
    """

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.kept: List[Tuple[int, int, int, int]] = []
        self._begin = 0
        self._unraisable = sys.unraisablehook

    def start(self) -> None:
        """Note collections from now on."""
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self.unraisable
        gc.callbacks.append(self.note)

    def stop(self) -> None:
        """Note no more; a program may have emptied the list of callbacks itself."""
        while self.note in gc.callbacks:
            gc.callbacks.remove(self.note)
        if sys.unraisablehook == self.unraisable:
            sys.unraisablehook = self._unraisable

    def unraisable(self, hook_args: Any) -> None:
        """What Python calls with what cannot be let out."""
        if hook_args.object != self.note:
            self._unraisable(hook_args)
            return
        entry.owed = hook_args.exc_value
        self.counter.hurry()

    def note(self, phase: str, info: Dict[str, Any]) -> None:
        """What the collector calls before and after each collection; raises nothing."""
        now = time.monotonic_ns()
        if phase == "start":
            self._begin = now
        elif self._begin and now - self._begin >= LONG_NS and len(self.kept) < MOST:
            collection = info.get("generation", -1), info.get("collected", 0)
            self.kept.append((self._begin, now, *collection))

    def text(self) -> str:
        """gc.csv, timed as the step log; an empty one says that the collector was not the cause."""
        at = self.counter.wall
        lines = ["%d,%d,%d,%d\n" % (at(begin), at(end), *rest) for begin, end, *rest in self.kept]
        return "begin_ns,end_ns,generation,collected\n" + "".join(lines)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    return str(error).strip().split("\n")[0] or error.__class__.__name__


def next_look(first: int, began_ns: int, count: int, now_ns: int) -> int:
    """The step after which to look again, at least one further on, by how long steps have taken
    since step `first` began at `began_ns`.
    """
    each_ns = max(1, (now_ns - began_ns) // max(1, count - first))
    return count + max(1, plans.LOOK_NS // each_ns)


class _AtEnd:
    """Local to a thread, and so deleted by it when it ends: then it calls `act`, on that thread.

    torch's profilers live on one thread, and end the program on any other. Not the main thread's
    end, which is atexit's; and a thread that the interpreter leaves behind never ends.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.pid = os.getpid()

    def __del__(self) -> None:
        # A forked child has one thread, and main's things are deleted with the interpreter.
        if os.getpid() == self.pid and get_ident() != entry.main:
            self.act()
