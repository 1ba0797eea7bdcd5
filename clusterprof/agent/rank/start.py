"""What an interpreter in the job does first: find out whether it is a rank, and which part it has.

Most interpreters are no rank (torchrun itself, DataLoader workers, a helper script) and leave
at once. A profiled rank becomes the guard of an nsys. Every rank counts only from the import of
torch's optimizers on: an interpreter that never trains costs nothing and claims nothing.

A process that nothing numbers (`clusterprof run -- python train.py`) may be the only rank, may
start the ranks, or may be one of several: of torch.multiprocessing.spawn, of Ray Train, of a script
of the user's. Its rank is that in torch's process group; once it steps without one it is the only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from types import ModuleType
from typing import Any, Dict, List, NamedTuple, Optional

from ..contracts import clocks, descriptors, identity, later_window, paths, processes, states
from ..contracts import plan as plans
from ..contracts.identity import COUNTING, GIVEN, PLAN, PROFILED, WAITING, WITHOUT_NSYS, Identity
from ..contracts.later_window import LaterWindow
from ..contracts.messages import complain
from ..contracts.plan import Plan
from ..contracts.states import State
from . import hooks
from .steps import counter


def main() -> None:
    """Decide and prepare; returns quickly, or never where the process becomes a guard."""
    environ, line = os.environ, command_line()
    identity.give_back(environ)
    guarded = GIVEN in environ
    if guarded:
        given = environ.pop(GIVEN).split(",")
        descriptors.hide(n for n in descriptors.open_ones() if str(n) not in given)
    own = str(os.getpid())
    if environ.get(COUNTING, own) != own or identity.is_starter(line):
        return
    plan_path = environ[PLAN]
    plan = plans.read(plan_path)
    me = identity.identify(environ, plan.identity)
    if me is None or (is_worker(line) and me.source != identity.ALONE):
        return
    plan = plan.of_attempt(environ)
    if me.source == identity.ALONE and (is_worker(line) or environ.get(WAITING, own) != own):
        Unnumbered(plan, me, False, guarded).wait_for_the_program()
        return
    if me.source == identity.LIGHTNING and PROFILED in environ and not guarded:
        leave_nsys([sys.executable, *line[1:]])
    picked, refused = is_picked(plan, me), None
    if (picked or plan.arms(me)) and PROFILED not in environ:
        from . import own_profilers

        refused = own_profilers.above(environ)
        if refused is None and plan.profiler == "nsys":
            from ..guard import guard

            start_prober(plan, me)
            guard.become(plan_path, me.rank, [sys.executable, *line[1:]])
    if me.source == identity.ALONE:
        guarded = guarded or environ.get(PROFILED) == WITHOUT_NSYS
        Unnumbered(plan, me, True, guarded).wait_for_the_program()
    else:
        Rank(plan, me, picked, refused).wait_for_the_program()


def is_picked(plan: Plan, me: Identity) -> bool:
    """Whether this rank is to be profiled, and was not in an earlier attempt."""
    return plan.profiles(me) and not states.captured_before(paths.rank_folder(plan.run, me.rank))


def leave_nsys(program: List[str]) -> None:
    """Begin again without the nsys of the rank that has started this one, and is followed here."""
    without = (*identity.FOLLOWED, PROFILED)
    os.execve(program[0], program, processes.environment_without(without))


def command_line() -> List[str]:
    """This interpreter's whole command line, as it was started."""
    if hasattr(sys, "orig_argv"):  # Python 3.10
        return list(sys.orig_argv)
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]


def is_worker(line: List[str]) -> bool:
    """Whether multiprocessing started this interpreter: a DataLoader worker, a tracker."""
    return "--multiprocessing-fork" in line or any(
        part.startswith(("from multiprocessing", "from joblib.externals.loky")) for part in line
    )


class Part(NamedTuple):
    """This rank's part in one window."""

    #: by which its files are written
    outbox: Any
    #: None where the rank is not profiled
    window: Any
    recorder: Any


class Rank:
    """The agent's part in one rank: count its steps and, where it is profiled, open its window."""

    def __init__(self, plan: Plan, me: Identity, picked: bool, refused: Optional[str]) -> None:
        """`refused`: another profiler that is at work here, for which ours is left out."""
        self.plan = plan
        self.me = me
        self.picked = picked
        self.refused = refused
        self.folder = paths.rank_folder(plan.run, me.rank)
        self.beacons: Any = None
        #: the windows, the plan's first
        self.parts: List[Part] = []
        #: the step with which the latest of them ends
        self.busy_until = plan.window[1]
        self.hanging: Any = None
        self.outbox: Any = None
        #: when the program was seen to train (monotonic, ns)
        self.trains_ns = 0
        #: before the program could change it
        self.began_with = dict(os.environ)
        #: where its guard listens; "" where it has none
        self.guard = os.environ.get(PROFILED, WITHOUT_NSYS).partition(":")[2]
        #: its nsys waits for a window; it captures one
        self.armed = bool(self.guard) and not picked
        self.pid = 0

    def wait_for_the_program(self) -> None:
        """Count from the import of torch's optimizers on, or of what `--step-on` names."""
        if self.picked or self.plan.log_s:
            # torch.profiler speaks on the training's stderr unless told before its import.
            identity.lend(os.environ, "KINETO_LOG_LEVEL", "99")
        actions: Dict[str, hooks.Action] = {"torch.optim.optimizer": self.count_optimizer_steps}
        if self.plan.step_on:
            module, _, function = self.plan.step_on.partition(":")
            actions = {module: lambda found: self.count_calls(found, function)}
        counter.on_first = self.begin
        hooks.after_import(actions)

    def count_optimizer_steps(self, found: ModuleType) -> None:
        """The program has imported torch's optimizers: it is going to train."""
        register = getattr(found, "register_optimizer_step_post_hook", None)
        if register is None:
            complain("this torch has no optimizer hooks (2.0 has): use --step-on module:function")
            return
        register(hooks.after_step(counter.optimizer_stepped))
        self.trains()

    def count_calls(self, module: ModuleType, function: str) -> None:
        """`--step-on`: a step ends whenever this function returns."""
        try:
            hooks.wrap(module, function, counter.say)
        except AttributeError as error:
            complain("--step-on %s: %s; no step will be counted" % (self.plan.step_on, error))
            return
        self.trains()

    def trains(self) -> None:
        """The program is going to train."""
        self.trains_ns = time.monotonic_ns()
        self.begin()

    @descriptors.no_streams()
    def begin(self) -> None:
        """This process is the rank's: claim it, open the step log, arm the window."""
        if counter.enabled:
            return
        self.pid = os.getpid()
        os.environ[COUNTING] = str(self.pid)
        from . import claim

        other = claim.take(self.folder)
        if other is not None:
            counter.on_first = None
            complain("process %d is left alone: rank %d is process %d, which this task has started "
                     "as well" % (self.pid, self.me.rank, other))  # fmt: skip
            return
        os.register_at_fork(after_in_child=self.leave)
        self.outbox = self.open_outbox()
        counter.begin(self.outbox, self.trains_ns)
        self.outbox.say(
            "begin", run=os.path.abspath(self.plan.run), folder=os.path.abspath(self.folder),
            window=self.plan.window, wall_ns=counter.wall(0), log_s=self.plan.log_s,
        )  # fmt: skip
        self.first_state(self.outbox, self.picked, self.plan.profiler)
        if self.plan.beacons:
            from .beacons import Beacons

            self.beacons = Beacons(self.plan.beacons, self.me.world_size)
        if PROFILED not in os.environ:
            start_prober(self.plan, self.me)
        if self.guard:
            from .profilers import end_with_the_guard

            end_with_the_guard(self.guard)
        captures = self.picked and os.environ.get(PROFILED) != WITHOUT_NSYS and not self.refused
        if self.plan.looks_first:
            counter.attend(self.plan.window[0], self.unless_seen)
            counter.attend(self.plan.window[1], self.expect_order)
        self.take_part(self.plan, self.outbox, captures)
        from .hanging import Hanging

        self.hanging = Hanging(self.plan, self.outbox, self.parts[0].recorder, counter)
        self.hanging.attend()
        if not captures and self.beacons is not None:
            self.beacons.attend(self.plan.window, counter)
        if captures or self.plan.log_s:
            # What a window imports is there before the program trains: no file is opened then.
            from . import own_profilers, profilers  # noqa: F401

            hooks.after_import({"torch.autograd.profiler": own_profilers.kineto.watch})
        if self.plan.log_s:
            counter.after_flush = self.look_for_windows
        atexit.register(self.finish)

    def take_part(self, plan: Plan, outbox: Any, captures: bool, number: int = 1) -> None:
        """Capture the plan's window, if it is to be, and save torch's flight recorder around it."""
        from . import own_profilers
        from .recorder import Recorder

        window = self.make_window(plan, outbox, number) if captures else None
        if window is not None:
            reduction = plan.reduces(self.me, self.began_with)
            if reduction is not None:
                outbox.say("reducing", **reduction._asdict())
            counter.attend(window.first, window.at)
        if captures and PROFILED not in os.environ:
            hooks.after_import({"torch.version": own_profilers.kineto.leaves})
        alone, clock = window is None, self.me.local_rank in (0, None)
        recorder = Recorder(plan, outbox, self.began_with, alone, clock)
        recorder.attend(counter)
        self.parts.append(Part(outbox, window, recorder))

    def make_window(self, plan: Plan, outbox: Any, number: int) -> Any:
        """The window with this number, by nsys where that waits for one."""
        from .window import Window

        by_nsys = self.armed or number == 1
        self.armed = False
        beacons = self.beacons if number == 1 else None
        tells = self.me.rank == min(plan.selection.ranks or (0,))
        return Window(plan, outbox, counter, beacons, number, by_nsys, tells)

    def unless_seen(self, count: int) -> int:
        """`--ranks auto`: capture the first window in rank 0 where there is nothing to look at: it
        is alone, or has no flight recorder. Returns when to come back.
        """
        if self.me.rank != 0 or self.refused:
            return -1
        outbox, window, recorder = self.parts[0]
        if window is None:
            if self.me.world_size != 1 and recorder.can_dump():
                return -1
            self.picked, recorder.alone = True, False
            self.first_state(outbox, True, self.plan.profiler)
            window = self.make_window(self.plan, outbox, 1)
            self.parts[0] = Part(outbox, window, recorder)
        found: int = window.at(count)
        return found

    def expect_order(self, count: int) -> int:
        """`--ranks auto`: the first window has ended, and an order for the second one may come."""
        counter.flush()
        self.outbox.say("expect", every_s=later_window.look_s(self.me.world_size))
        return -1

    def look_for_windows(self) -> None:
        """Take part in the later windows whose orders have come; see `contracts.later_window`."""
        for content in self.outbox.windows():
            try:
                order = LaterWindow.from_json(content, content["number"])
                self.obey(order)
            except Exception as error:  # the training goes on
                complain("a later window is left out: %s" % (error,))

    def obey(self, order: LaterWindow) -> None:
        """Take part in one later window, or have its state say why not."""
        outbox = self.outbox.of_window(order.number)
        plan = self.plan._replace(
            window=order.steps, selection=order.selection, profiler=order.profiler
        )
        picked = plan.profiles(self.me)
        if picked and PROFILED not in self.began_with:
            from . import own_profilers

            self.refused = self.refused or own_profilers.above(self.began_with)
        self.first_state(outbox, picked, plan.profiler)
        why, late = None, counter.count >= order.steps[0]
        if late:
            why = "the order for the steps %d:%d came too late: this rank had made %d steps" % (
                *order.steps, counter.count,
            )  # fmt: skip
        elif order.steps[0] < self.busy_until:
            why = "the steps %d:%d begin before the window before them ends, at step %d" % (
                *order.steps, self.busy_until,
            )  # fmt: skip
        if why:
            outbox.state(State.LOST if picked else State.COUNTED, why, flight=why, late=late)
            return
        self.busy_until = order.steps[1]
        self.take_part(plan, outbox, picked and not self.refused, order.number)

    def open_outbox(self) -> Any:
        """The way to this rank's writer: that of its guard, or one of its own."""
        from ..guard import outbox

        try:
            found = (outbox.of_guard(self.guard) if self.guard else None) or outbox.start()
        except OSError as error:
            complain("nothing is written of this rank: %s" % error)
            return outbox.Outbox(None)
        descriptors.hide([found.connection.fileno()] if found.connection else [])
        return found

    def first_state(self, outbox: Any, picked: bool, profiler: str) -> None:
        """The rank's first state in a window, with its place in the job."""
        facts: Dict[str, Any] = {
            "rank": self.me.rank, "world_size": self.me.world_size,
            "local_rank": self.me.local_rank, "identity": self.me.source,
            "chosen": picked, "program_pid": self.pid,
            "machine": clocks.machine(), "clock": clocks.reading("start"),
        }  # fmt: skip
        torch = sys.modules.get("torch")
        if torch is not None:
            facts["torch"] = str(getattr(torch, "__version__", ""))
        if "SLURM_JOB_ID" in os.environ:  # srun may have made it: whoever called srun asks here
            facts["slurm_job"] = os.environ["SLURM_JOB_ID"]
        if not picked:
            outbox.state(State.COUNTING, **facts)
            return
        if profiler == "torch":
            outbox.state(State.ARMED, **facts)
        outbox.state(State.WAITING, **facts)
        if self.refused:
            why = "the program runs under another profiler: %s; a rank can have one only"
            outbox.state(State.LOST, why % self.refused)

    def leave(self) -> None:
        """In a forked child: it is no rank, whatever it inherited."""
        from . import claim

        claim.release()
        identity.give_back(os.environ)
        counter.end()
        if self.outbox is not None:
            self.outbox.close()
        for part in self.parts:
            part.recorder.is_open = False
            if part.window is not None:
                part.window.is_open = False
        if self.hanging is not None:
            self.hanging.leave()

    def finish(self) -> None:
        """At the program's end: the rest of the step log, and what became of the window."""
        if os.getpid() != self.pid:
            return
        self.pid = 0
        counter.flush()
        self.hanging.finish()
        for part in reversed(self.parts):
            if part.window is not None:
                part.window.finish()
            part.recorder.finish(counter.count)
            if part.window is None and (self.parts[0] is not part or not self.picked):
                part.outbox.state(State.COUNTED, steps=counter.count)
        if self.beacons is not None:
            self.beacons.write(self.outbox)
        counter.end()
        if self.guard:
            self.outbox.hand_over()
        else:
            self.outbox.finish()


class Unnumbered(Rank):
    """A process that may be a rank, and which one is said by torch's process group."""

    def __init__(self, plan: Plan, me: Identity, alone: bool, guarded: bool) -> None:
        """`alone`: without a process group it is the only rank, once it steps: it is no child of
        such a process. `guarded`: the guard in its environment is its own, for the rank of `me`.
        """
        super().__init__(plan, me, plan.profiler != "none", None)
        self.alone = alone
        self.guarded = guarded
        self.forked = False

    def wait_for_the_program(self) -> None:
        """Count from the process group's beginning on, or from the first step."""
        super().wait_for_the_program()
        counter.on_first = self.steps_alone if self.alone else None
        os.register_at_fork(after_in_child=self.leave)
        hooks.after_import({"torch.distributed.distributed_c10d": self.wait_for_a_group})

    def leave(self) -> None:
        """In a forked child: it may be a rank as well (mp.start_processes), but never alone."""
        super().leave()
        self.guarded, self.forked, self.trains_ns = False, True, 0

    def wait_for_a_group(self, module: ModuleType) -> None:
        """`module` is the one whose functions all of torch's others have."""
        with contextlib.suppress(AttributeError):
            hooks.wrap(module, "init_process_group", self.has_a_group)

    def trains(self) -> None:
        """Which rank it is may not be known yet."""
        self.trains_ns = time.monotonic_ns()
        os.environ[WAITING] = str(os.getpid())

    def steps_alone(self) -> None:
        """A step without a process group: it is the only rank."""
        self.numbered(self.me)

    def has_a_group(self) -> None:
        """The program has a process group now."""
        from .recorder import initialised

        dist, own = initialised(), str(os.getpid())
        if dist is not None and os.environ.get(COUNTING, own) == own:
            self.numbered(identity.of_group(dist.get_rank(), dist.get_world_size(), os.environ))

    def numbered(self, me: Identity) -> None:
        """It is this rank: be it from now on, as those that were numbered from their start."""
        if counter.enabled:
            return
        try:
            own = self.guarded and me.rank == self.me.rank
            self.me, self.picked = me, is_picked(self.plan, me)
            self.folder = paths.rank_folder(self.plan.run, me.rank)
            if not own:
                self.without_guard()
            self.armed = bool(self.guard) and not self.picked
            identity.lend(os.environ, "KINETO_LOG_LEVEL", "99")
            self.begin()
            if self.forked and "multiprocessing.util" in sys.modules:
                # which ends its children without what atexit has
                sys.modules["multiprocessing.util"].Finalize(None, self.finish, exitpriority=0)
        except Exception as error:  # the training goes on
            complain("this process runs without profiling: %r" % (error,))

    def without_guard(self) -> None:
        """What profiles another rank is not ours; and nsys has to be there before the program."""
        from . import own_profilers

        self.guard = ""
        self.refused = own_profilers.above(os.environ)
        if self.refused and PROFILED in os.environ:
            self.refused += " or around what started it (--profiler torch starts none)"
        for environ in (os.environ, self.began_with):
            environ.pop(PROFILED, None)
        if self.plan.profiler == "nsys":
            self.plan = self.plan._replace(profiler="torch", window_by="session")


def start_prober(plan: Plan, me: Identity) -> None:
    """Have the hosts' clocks measured, where that was asked for; see `prober`."""
    if plan.clock_probe == "off":
        return
    from ..remote import prober

    try:
        if prober.wanted(plan, me, os.environ):
            prober.start(plan, me.rank)
    except Exception as error:  # the training goes on without it
        complain("the clocks are not measured: %s" % (error,))
