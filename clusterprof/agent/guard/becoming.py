"""How the interpreter that the launcher started becomes the guard of its rank.

The program's first line has not run in it, and never does: the program gets another interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import warnings
from typing import TYPE_CHECKING, List, NoReturn

from ..contracts import beside, clocks, identity, messages
from ..contracts.identity import Identity
from ..contracts.plan import Plan
from ..contracts.timing import REAL

if TYPE_CHECKING:
    from .guard import Guard


def become(plan: Plan, me: Identity, program: List[str]) -> NoReturn:
    """Be this rank's guard over `program` from here on; ends as the program ended."""
    isolate()
    try:
        with beside.prepared():
            from .guard import Guard

            guard = Guard(plan, me.rank, program)
        clocks.start_prober(plan, me)
    except Exception as error:  # the training comes first
        messages.complain("rank %d runs without nsys: %s" % (me.rank, error))
        run_alone(program)
    beside.show_as("guard")
    end(guard)


def isolate() -> None:
    """From now on nothing of the program's environment gets into this interpreter, which was
    started for the program, and in which nothing of the program's has run.
    """
    library = os.path.dirname(os.__file__)
    # A module in PYTHONPATH may have the name of one of Python's own.
    sys.path.sort(key=lambda folder: folder != library and not folder.endswith("lib-dynload"))
    # What a .pth file may have started (coverage does), and -W error, are for the program alone.
    sys.settrace(None)
    sys.setprofile(None)
    warnings.simplefilter("ignore")
    gc.enable()


def end(guard: Guard) -> NoReturn:
    """Run the guard, and end as its program ended: this interpreter goes on as the program in no
    case.
    """
    status = 1
    try:
        status = guard.run()
        if 128 < status < 128 + signal.NSIG:
            end_by_signal(status - 128)
    except Exception as error:
        messages.complain("the guard of rank %d failed: %r" % (guard.rank, error))
    finally:
        os._exit(status)


def end_by_signal(number: int) -> None:
    """End as the program did, for the launcher to see; without a second core file."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    REAL.sleep(1)


def run_alone(program: List[str]) -> NoReturn:
    """Become the program, without nsys."""
    identity.set_field(os.environ, identity.PROFILED, identity.WITHOUT_NSYS)
    os.execvp(program[0], program)
