"""What an interpreter in the job does first: find out whether it is a rank, and which part it has.

Most interpreters are no rank (torchrun itself, DataLoader workers, a helper script) and leave
at once. A profiled rank becomes the guard of an nsys. Every rank counts only from the import of
torch's optimizers on: an interpreter that never trains costs nothing and claims nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType
from typing import Any, Dict, List, Optional

from ..contracts import clocks, descriptors, identity, paths, states
from ..contracts import plan as plans
from ..contracts.identity import COUNTING, GIVEN, PLAN, PROFILED, WITHOUT_NSYS, Identity
from ..contracts.messages import complain
from ..contracts.plan import Plan
from ..contracts.states import State
from . import hooks
from .steps import counter


def main() -> None:
    """Decide and prepare; returns quickly, or never where the process becomes a guard."""
    environ, line = os.environ, command_line()
    if GIVEN in environ:
        given = environ.pop(GIVEN).split(",")
        descriptors.hide(n for n in descriptors.open_ones() if str(n) not in given)
    if environ.get(COUNTING, str(os.getpid())) != str(os.getpid()):
        return
    if is_worker(line) or identity.is_starter(line):
        return
    plan_path = environ[PLAN]
    plan = plans.read(plan_path)
    me = identity.identify(environ, plan.identity)
    if me is None:
        return
    attempt = paths.attempt_of(environ)
    picked = plan.selection.includes(me) and not has_its_report(plan.run, me.rank, attempt)
    plan = plan.of_attempt(environ)
    refused: Optional[str] = None
    if picked and PROFILED not in environ:
        from . import own_profilers

        refused = own_profilers.above(environ)
        if refused is None and plan.profiler == "nsys":
            from ..guard import guard

            start_prober(plan, me)
            guard.become(plan_path, me.rank, [sys.executable, *line[1:]])
    Rank(plan, me, picked, refused).wait_for_the_program()


def has_its_report(run: str, rank: int, attempt: int) -> bool:
    """Whether this rank has captured already: in an earlier attempt, if it was the whole window."""
    for each in range(1, attempt + 1):
        before = states.read(paths.rank_folder(paths.attempt_folder(run, each), rank), ours=True)
        state = State.of(before)
        if state and state.has_captured and (each == attempt or before.get("whole")):
            return True
    return False


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


class Rank:
    """The agent's part in one rank: count its steps and, where it is profiled, open its window."""

    def __init__(self, plan: Plan, me: Identity, picked: bool, refused: Optional[str]) -> None:
        """`refused`: another profiler that is at work here, for which ours is left out."""
        self.plan = plan
        self.me = me
        self.picked = picked
        self.refused = refused
        self.folder = paths.rank_folder(plan.run, me.rank)
        self.window: Any = None
        self.beacons: Any = None
        self.outbox: Any = None
        #: where its guard listens; "" where it has none
        self.guard = os.environ.get(PROFILED, WITHOUT_NSYS).partition(":")[2]
        self.pid = 0

    def wait_for_the_program(self) -> None:
        """Count from the import of torch's optimizers on, or of what `--step-on` names."""
        if self.picked:
            # torch.profiler speaks on the training's stderr unless told before its import.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
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
        self.begin()

    def count_calls(self, module: ModuleType, function: str) -> None:
        """`--step-on`: a step ends whenever this function returns."""
        try:
            hooks.wrap(module, function, counter.say)
        except AttributeError as error:
            complain("--step-on %s: %s; no step will be counted" % (self.plan.step_on, error))
            return
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
        counter.begin(self.outbox)
        self.outbox.say(
            "begin", run=os.path.abspath(self.plan.run), folder=os.path.abspath(self.folder),
            window=self.plan.window, wall_ns=counter.wall(0),
        )  # fmt: skip
        self.first_state()
        if self.plan.beacons:
            from .beacons import Beacons

            self.beacons = Beacons(self.plan.beacons, self.me.world_size)
        if self.picked and PROFILED not in os.environ:
            start_prober(self.plan, self.me)
        if self.guard:
            from .profilers import end_with_the_guard

            end_with_the_guard(self.guard)
        if self.picked and os.environ.get(PROFILED) != WITHOUT_NSYS and not self.refused:
            from .own_profilers import kineto
            from .window import Window

            self.window = Window(self.plan, self.outbox, counter, self.beacons)
            hooks.after_import({"torch.autograd.profiler": kineto.watch})
        elif self.beacons is not None:
            self.beacons.attend(self.plan.window, counter)
        atexit.register(self.finish)

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

    def first_state(self) -> None:
        """The rank's first state, with its place in the job."""
        facts: Dict[str, Any] = {
            "rank": self.me.rank, "world_size": self.me.world_size,
            "local_rank": self.me.local_rank, "identity": self.me.source,
            "chosen": self.picked, "program_pid": self.pid,
            "machine": clocks.machine(), "clock": clocks.reading("start"),
        }  # fmt: skip
        if "SLURM_JOB_ID" in os.environ:  # srun may have made it: whoever called srun asks here
            facts["slurm_job"] = os.environ["SLURM_JOB_ID"]
        if not self.picked:
            self.outbox.state(State.COUNTING, **facts)
            return
        if self.plan.profiler == "torch":
            self.outbox.state(State.ARMED, **facts)
        self.outbox.state(State.WAITING, **facts)
        if self.refused:
            why = "the program runs under another profiler: %s; a rank can have one only"
            self.outbox.state(State.LOST, why % self.refused)

    def leave(self) -> None:
        """In a forked child: it is no rank, whatever it inherited."""
        from . import claim

        claim.release()
        counter.end()
        if self.outbox is not None:
            self.outbox.close()
        if self.window is not None:
            self.window.is_open = False

    def finish(self) -> None:
        """At the program's end: the rest of the step log, and what became of the window."""
        if os.getpid() != self.pid:
            return
        counter.flush()
        if self.window is not None:
            self.window.finish()
        if self.beacons is not None:
            self.beacons.write(self.outbox)
        if not self.picked:
            self.outbox.state(State.COUNTED, steps=counter.count)
        counter.end()
        if self.guard:
            self.outbox.hand_over()
        else:
            self.outbox.finish()


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
