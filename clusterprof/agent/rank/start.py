"""What an interpreter in the job does first: find out whether it is a rank, and which part it has.

Most interpreters are no rank (torchrun itself, DataLoader workers, a helper script) and leave
at once. A profiled rank becomes the guard of an nsys. Every rank counts only from the import of
torch's optimizers on: an interpreter that never trains claims nothing, and has a shell that waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Dict, List, Optional

from ..contracts import beside, descriptors, identity, paths, plan as plans, processes
from ..contracts.identity import COUNTING, GIVEN, PROFILED, WAITING, WITHOUT_NSYS, Identity
from ..contracts.plan import Plan


def main() -> None:
    """Decide and prepare; returns quickly, or never where the process becomes a guard."""
    environ, line = os.environ, command_line()
    identity.give_back(environ)
    fields = identity.fields(environ)
    if GIVEN in fields:
        given = fields[GIVEN].split(",")
        identity.set_field(environ, GIVEN, None)
        descriptors.hide(n for n in descriptors.open_ones() if str(n) not in given)
    own = str(os.getpid())
    if fields.get(COUNTING, own) != own or identity.is_starter(line):
        return
    plan = plans.read(identity.plan_path(environ))
    me = identity.identify(environ, plan.identity)
    if me is None or (is_worker(line) and me.source != identity.ALONE):
        return
    if me.source == identity.LIGHTNING and fields.get(PROFILED) and GIVEN not in fields:
        # Begin again without the nsys of the rank that has started this one, and is followed here.
        without = processes.environment_without(identity.FOLLOWED)
        identity.set_field(without, PROFILED, None)
        os.execve(sys.executable, [sys.executable, *line[1:]], without)
    prepare(plan.of_attempt(environ), me, line, fields)


def prepare(plan: Plan, me: Identity, line: List[str], fields: Dict[str, str]) -> None:
    """Be the rank `me`, or a process that may become one; `fields` as they came with the plan."""
    guarded, profiled, own = GIVEN in fields, fields.get(PROFILED), str(os.getpid())
    alone = me.source == identity.ALONE
    is_child = alone and (is_worker(line) or fields.get(WAITING, own) != own)
    picked, refused = False, None
    if not is_child:
        from ..contracts import states

        folder = paths.rank_folder(plan.run, me.rank)
        picked = plan.profiles(me) and not states.captured_before(folder)
        if (picked or plan.arms(me)) and not profiled:
            refused = be_guarded(plan, me, line)
    # A guard starts what its rank needs.
    with beside.prepared() if alone or not guarded else contextlib.nullcontext():
        # All that a rank may need comes with these, now: later a file of ours may be another
        # version's, or be gone, or there may be no descriptor left to open it with.
        from .rank import Rank, Unnumbered

    if alone:
        guarded = guarded or (not is_child and profiled == WITHOUT_NSYS)
        Unnumbered(plan, me, not is_child, guarded).wait_for_the_program()
    else:
        Rank(plan, me, picked, refused).wait_for_the_program()


def be_guarded(plan: Plan, me: Identity, line: List[str]) -> Optional[str]:
    """Become the guard where nsys is to profile this rank; returns what else profiles it already,
    for which ours is left out.
    """
    refused = identity.other_profiler(os.environ)
    if refused is None and plan.profiler == "nsys":
        from ..guard import becoming

        becoming.become(plan, me, [sys.executable, *line[1:]])
    return refused


def command_line() -> List[str]:
    """This interpreter's whole command line, as it was started."""
    if hasattr(sys, "orig_argv"):  # Python 3.10
        return list(sys.orig_argv)
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def is_worker(line: List[str]) -> bool:
    """Whether multiprocessing started this interpreter: a DataLoader worker, a tracker."""
    return "--multiprocessing-fork" in line or any(
        word.startswith(("from multiprocessing", "from joblib.externals.loky")) for word in line
    )
