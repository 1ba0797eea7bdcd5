"""The agent's part in one rank: what it does in the program, and when.

A process that nothing numbers (`clusterprof run -- python train.py`) may be the only rank, may
start the ranks, or may be one of several: of torch.multiprocessing.spawn, of Ray Train, of a script
of the user's. Its rank is that in torch's process group; once it steps without one it is the only.
"""

from __future__ import annotations

import _socket
import atexit
import contextlib
import functools
import os
import sys
import time
from types import ModuleType
from typing import Any, Dict, List, Optional

from ..contracts import clocks, descriptors, identity, outbox as outboxes, paths, plan as plans
from ..contracts.identity import COUNTING, PROFILED, WAITING, WITHOUT_NSYS, Identity, profiled
from ..contracts.messages import complain
from ..contracts.outbox import Outbox
from ..contracts.plan import LaterWindow, Plan
from ..contracts.states import State, captured_before
from . import hooks, profilers
from .hanging import Hanging
from .hooks import entry
from .recorder import Recorder, Watching
from .steps import counter
from .window import Window


class Claim:
    """Which program of a task is its rank: the first that trains, for as long as it runs.

    A task may start several at once. The claim is an abstract Unix socket: it has no file, one
    process holds it until it ends, and who connects to it learns which.
    """

    def __init__(self) -> None:
        self.listener: Optional[_socket.socket] = None

    @staticmethod
    def name(folder: str) -> str:
        """The socket's, for the rank with this folder."""
        import hashlib

        digest = hashlib.sha256(os.fsencode(os.path.abspath(folder))).hexdigest()[:32]
        return "\0clusterprof-%d-%s" % (os.getuid(), digest)

    def take(self, folder: str) -> Optional[int]:
        """Claim the rank with this folder; returns the process that has it already.

        0 for one that cannot be determined, None also for another user's.
        """
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            listener.bind(self.name(folder))
            listener.listen(16)
        except OSError:
            listener.close()
        else:
            descriptors.hide([listener.fileno()])
            self.listener = listener
            return None
        with contextlib.closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)) as asking:
            asking.setblocking(False)
            try:
                asking.connect(self.name(folder))
                peer = asking.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
            except BlockingIOError:
                return 0  # asked too often
            except OSError:
                return None
        pid, uid, _ = memoryview(peer).cast("i")
        return pid if uid == os.getuid() else None

    def release(self) -> None:
        """In a forked child: it has inherited what is its parent's."""
        listener, self.listener = self.listener, None
        if listener is not None:
            (listener.close if descriptors.is_hidden(listener.fileno()) else listener.detach)()


class Rank:
    """The agent's part in one rank: count its steps and, where it is profiled, open its window."""

    def __init__(self, plan: Plan, me: Identity, picked: bool, refused: Optional[str]) -> None:
        """`refused`: another profiler that is at work here, for which ours is left out."""
        self.plan = plan
        self.me = me
        self.picked = picked
        self.refused = refused
        self.folder = paths.rank_folder(plan.run, me.rank)
        #: of each window, the plan's first
        self.recorders: List[Recorder] = []
        #: the step with which the latest of them ends
        self.busy_until = plan.window[1]
        #: answers the writer where a step does not end; None before the rank begins
        self.hanging: Optional[Hanging] = None
        #: the way to the process that writes the rank's files
        self.outbox = Outbox(None)
        #: when the program was seen to train (monotonic, ns)
        self.trains_ns = 0
        #: before the program could change it
        self.began_with = dict(os.environ)
        #: where its guard listens, the process that runs nsys with the program under it, and
        #: outlives the program; "" where it has none
        self.guard = profiled(os.environ).partition(":")[2]
        #: its nsys waits for a window; it captures one
        self.armed = bool(self.guard) and not picked
        #: this process, while it is the rank
        self.pid = 0
        self.claim = Claim()

    def wait_for_the_program(self) -> None:
        """Count from the import of torch's optimizers on, or of what `--step-on` names."""
        if self.picked or self.plan.log_s:
            # torch.profiler speaks on the training's stderr unless told before its import.
            identity.lend(os.environ, "KINETO_LOG_LEVEL", "99")
        actions: Dict[str, hooks.Action] = {"torch.optim.optimizer": self.count_optimizer_steps}
        if self.plan.step_on:
            module, _, function = self.plan.step_on.partition(":")
            actions = {module: lambda imported: self.count_calls(imported, function)}
        counter.on_first = self.begin
        hooks.after_import(actions)

    def count_optimizer_steps(self, optimizers: ModuleType) -> None:
        """The program has imported torch's optimizers: it is going to train."""
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is None:
            complain("this torch has no optimizer hooks (2.0 has): use --step-on module:function")
            return
        handle = register(hooks.after_step(counter.optimizer_stepped))
        entry.undo.append(lambda why: handle.remove())
        self.trains()

    def count_calls(self, module: ModuleType, function: str) -> None:
        """`--step-on`: a step ends whenever this function (`Trainer.step` or `step`) returns."""
        try:
            # half a microsecond: the program's signal handlers do not wait for it (see `hooks`)
            hooks.wrap(module, function, counter.say, lets_wait=False)
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
        identity.set_field(os.environ, COUNTING, str(self.pid))
        entry.undo.append(self.give_up)
        other = self.claim.take(self.folder)
        if other is not None:
            counter.on_first = None
            complain("process %d is left alone: rank %d is process %d, which this task has started "
                     "as well" % (self.pid, self.me.rank, other))  # fmt: skip
            return
        os.register_at_fork(after_in_child=self.forked)
        try:  # by the guard's writer, or one of our own
            self.outbox = (self.guard and outboxes.of_guard(self.guard)) or outboxes.start()
        except OSError as error:
            complain("nothing is written of this rank: %s" % error)
        counter.begin(self.outbox, self.trains_ns)
        self.outbox.say(
            "begin", run=os.path.abspath(self.plan.run), folder=os.path.abspath(self.folder),
            window=self.plan.window, wall_ns=counter.wall(0), log_s=self.plan.log_s,
        )  # fmt: skip
        self.first_state(self.outbox, self.picked, self.plan.profiler)
        if not profiled(os.environ):
            clocks.start_prober(self.plan, self.me)
        if self.guard:
            profilers.end_with_the_guard(self.guard)
        self.attend()
        atexit.register(entry.run, self.finish)

    def attend(self) -> None:
        """Have the counter call whatever the plan has due after some step."""
        captures = self.picked and profiled(os.environ) != WITHOUT_NSYS and not self.refused
        if self.plan.looks_first:
            counter.attend(self.plan.window[0], self.unless_seen)
            counter.attend(self.plan.window[1], self.expect_order)
        elif self.plan.profiler == "none":
            counter.attend(self.plan.window[1], self.log_steps)
        self.take_part(self.plan, self.outbox, captures)
        self.hanging = Hanging(self.plan, self.outbox, self.recorders[0], counter)
        if self.plan.hang_after:
            counter.attend(1, self.hanging.at)
        if self.plan.watch_s:
            watching = Watching(self.plan.watch_s, self.recorders, self.outbox, counter)
            counter.attend(self.plan.window[1], watching.at)
        if captures or self.plan.log_s:
            hooks.after_import({"torch.autograd.profiler": profilers.kineto.watch})
        if self.plan.log_s:
            counter.after_flush = self.look_for_windows

    def take_part(self, plan: Plan, outbox: Outbox, captures: bool, number: int = 1) -> None:
        """Capture the plan's window, if it is to be, and save torch's flight recorder around it."""
        window = self.make_window(plan, outbox, number) if captures else None
        if window is not None:
            reduction = plan.reduces(self.me, self.began_with)
            if reduction is not None:
                outbox.say("reducing", **reduction._asdict())
            counter.attend(window.first, window.at)
        if captures and not profiled(os.environ):
            hooks.after_import({"torch.version": profilers.kineto.leaves})
        clock = self.me.local_rank in (0, None)
        recorder = Recorder(plan, outbox, self.began_with, window, clock, self.me.rank == 0)
        counter.attend(recorder.due, recorder.at)  # after the window: no report shows it
        self.recorders.append(recorder)

    def make_window(self, plan: Plan, outbox: Outbox, number: int) -> Window:
        """The window with this number, by nsys where that waits for one."""
        by_nsys = self.armed or number == 1
        self.armed = False
        tells = self.me.rank == clocks.reference_rank(plan)
        return Window(plan, outbox, counter, number, by_nsys, tells)

    def unless_seen(self, count: int) -> int:
        """`--ranks auto`: capture the first window in rank 0 where there is nothing to look at: it
        is alone, or has no flight recorder. Returns when to come back.
        """
        if self.me.rank != 0 or self.refused:
            return -1
        recorder = self.recorders[0]
        if recorder.window is None:
            if self.me.world_size != 1 and recorder.can_dump():
                return -1
            self.picked = True
            self.first_state(recorder.outbox, True, self.plan.profiler)
            recorder.window = self.make_window(self.plan, recorder.outbox, 1)
        return recorder.window.at(count)

    def expect_order(self, count: int) -> int:
        """`--ranks auto`: the first window has ended, and an order for the second one may come."""
        counter.expect(plans.SOON_S)
        self.outbox.say("expect", every_s=plans.look_s(self.me.world_size))
        return -1

    def log_steps(self, count: int) -> int:
        """The steps that are looked at have ended: what is compared needs their log beside it."""
        counter.flush()
        self.outbox.say("log")
        return -1

    def look_for_windows(self) -> None:
        """Take part in the later windows whose orders have come since the last time.

        The rank's writer sends each once, as `LaterWindow.to_json` gives it.
        """
        for content in self.outbox.windows():
            try:
                order = LaterWindow.from_json(content, content["number"])
            except ValueError as error:
                complain("a later window is left out: %s" % (error,))
            else:
                self.obey(order)

    def obey(self, order: LaterWindow) -> None:
        """Take part in one later window, or have its state say why not."""
        counter.expect(0)
        outbox = self.outbox.of_window(order.number)
        plan = self.plan._replace(
            window=order.steps, selection=order.selection, profiler=order.profiler
        )
        picked = plan.profiles(self.me)
        if picked and not profiled(self.began_with):
            self.refused = self.refused or identity.other_profiler(self.began_with)
        self.first_state(outbox, picked, plan.profiler)
        (first, end), late = order.steps, counter.count >= order.steps[0]
        if late or first < self.busy_until:
            why = "the steps %d:%d begin before the window before them ends, at step %d"
            if late:
                why = "the order for the steps %d:%d came too late: this rank had made %d steps"
            why %= first, end, counter.count if late else self.busy_until
            outbox.state(State.LOST if picked else State.COUNTED, why, flight=why, late=late)
            return
        self.busy_until = end
        self.take_part(plan, outbox, picked and not self.refused, order.number)

    def first_state(self, outbox: Outbox, picked: bool, profiler: str) -> None:
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

    def forked(self) -> None:
        """This is a child."""
        entry.forked()
        entry.run(self.leave)

    def give_up(self, why: str) -> None:
        """Take no part any more: what is open is closed, and the rank's states say why."""
        self.pid = 0
        counter.end()
        profilers.kineto.comes = None
        for recorder in reversed(self.recorders):
            if recorder.window is not None:
                recorder.window.stop()
            recorder.outbox.state(State.LOST if recorder.window is not None else None, why)
        self.outbox.close()

    def leave(self) -> None:
        """In a forked child: it is no rank, whatever it inherited."""
        self.claim.release()
        identity.give_back(os.environ)
        counter.end()
        self.outbox.close()
        for recorder in self.recorders:
            recorder.is_open = False
            if recorder.window is not None:
                recorder.window.is_open = False
        if self.hanging is not None:
            self.hanging.leave()

    def finish(self) -> None:
        """At the program's end, once: hand the last steps to the writer, end what is open, and say
        the last states.

        A rank that captured no window has counted its steps only (COUNTED); but one that was picked
        for the first window has said why it has none.
        """
        if os.getpid() != self.pid:  # a child of the rank's, or what it has done already
            return
        self.pid = 0
        counter.flush()
        if self.hanging is not None:
            self.hanging.stop()
        # the latest window first: it may be open
        for recorder in reversed(self.recorders):
            if recorder.window is not None:
                recorder.window.finish()
            recorder.finish(counter.count)
            if recorder.window is None and (self.recorders[0] is not recorder or not self.picked):
                recorder.outbox.state(State.COUNTED, steps=counter.count)
        self.tell_exception()
        counter.end()
        # a guard waits until all is written; without one the rank does
        if self.guard:
            self.outbox.hand_over()
        else:
            self.outbox.finish()

    def tell_exception(self) -> None:
        """Say by which exception the program ends, if by one: Python keeps the one that nothing
        caught before it prints it. Its type alone, as its text may hold what is secret.
        """
        exception = getattr(sys, "last_type", None)
        if isinstance(exception, type):
            at_ns = self.outbox.clock.wall_ns()
            self.outbox.state(None, exception=exception.__name__, ended_ns=at_ns)


class Unnumbered(Rank):
    """A process that may be a rank, and which one is said by torch's process group."""

    def __init__(self, plan: Plan, me: Identity, alone: bool, guarded: bool) -> None:
        """`alone`: without a process group it is the only rank, once it steps: it is no child of
        such a process. `guarded`: the guard in its environment is its own, for the rank of `me`.
        """
        super().__init__(plan, me, plan.profiler != "none", None)
        self.alone = alone
        self.guarded = guarded
        self.is_child = False

    def wait_for_the_program(self) -> None:
        """Count from the process group's beginning on, or from the first step."""
        super().wait_for_the_program()
        # A step without a process group: it is the only rank.
        counter.on_first = functools.partial(self.numbered, self.me) if self.alone else None
        os.register_at_fork(after_in_child=self.forked)
        # the module whose functions all of torch's others have
        hooks.after_import({
            "torch.distributed.distributed_c10d":
            lambda module: hooks.wrap(module, "init_process_group", self.has_a_group)
        })  # fmt: skip

    def leave(self) -> None:
        """In a forked child: it may be a rank as well (mp.start_processes), but never alone."""
        super().leave()
        self.guarded, self.is_child, self.trains_ns = False, True, 0

    def trains(self) -> None:
        """Which rank it is may not be known yet."""
        self.trains_ns = time.monotonic_ns()
        identity.set_field(os.environ, WAITING, str(os.getpid()))

    def has_a_group(self) -> None:
        """The program has a process group now."""
        counting = identity.fields(os.environ).get(COUNTING)
        dist = profilers.initialised()
        if dist is not None and counting in (None, str(os.getpid())):
            self.numbered(identity.of_group(dist.get_rank(), dist.get_world_size(), os.environ))

    def numbered(self, me: Identity) -> None:
        """It is this rank: be it from now on, as those that were numbered from their start."""
        if counter.enabled:
            return
        own = self.guarded and me.rank == self.me.rank
        self.me, self.folder = me, paths.rank_folder(self.plan.run, me.rank)
        self.picked = self.plan.profiles(me) and not captured_before(self.folder)
        if not own:  # what profiles another rank is not ours
            self.guard = ""
            self.refused = identity.other_profiler(os.environ)
            if self.refused and profiled(os.environ):
                self.refused += " or around what started it (--profiler torch starts none)"
            for environ in (os.environ, self.began_with):
                identity.set_field(environ, PROFILED, None)
            if self.plan.profiler == "nsys":  # which has to be there before the program
                self.plan = self.plan._replace(profiler="torch", window_by="session")
        self.armed = bool(self.guard) and not self.picked
        identity.lend(os.environ, "KINETO_LOG_LEVEL", "99")
        self.begin()
        if self.is_child and "multiprocessing.util" in sys.modules:
            # which ends its children without what atexit has
            finish = functools.partial(entry.run, self.finish)
            sys.modules["multiprocessing.util"].Finalize(None, finish, exitpriority=0)
