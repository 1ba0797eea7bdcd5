"""What a rank does for its prober: say whether there is one, start it, tell it of the window."""

from __future__ import annotations

import contextlib
import os
from typing import Mapping

from ..contracts import processes
from ..contracts.identity import FOLLOWED, Identity, nodes
from ..contracts.messages import complain
from ..contracts.plan import Plan

#: the Unix socket of this rank's prober, a name in the kernel's own list of those without a file
PROBE = "CLUSTERPROF_PROBE"
#: What makes nsys follow a process. LD_PRELOAD stays: it may set the clock of the rank.
_FOLLOWED = tuple(name for name in FOLLOWED if name != "LD_PRELOAD")


def wanted(plan: Plan, me: Identity, environ: Mapping[str, str]) -> bool:
    """Whether the clocks of this job are to be measured (`--clock-probe`), and from beside us."""
    mode = plan.clock_probe
    if mode == "off" or (mode == "auto" and not several_nodes(me, environ)):
        return False
    if me.local_rank is None:
        return me.rank == reference(plan) or plan.profiles(me)
    return me.rank == reference(plan) or me.local_rank == 0


def reference(plan: Plan) -> int:
    """The rank whose host's clock all others are measured against: the lowest profiled one."""
    return min(plan.selection.ranks, default=0)


def several_nodes(me: Identity, environ: Mapping[str, str]) -> bool:
    """Whether the job's ranks live on more than one node, as far as the launcher says."""
    return nodes(me, environ) > 1


def start(plan: Plan, me: Identity) -> None:
    """Start the prober of this rank, if there is to be one; its socket's name is in PROBE then."""
    if not wanted(plan, me, os.environ):
        return
    name = "clusterprof-" + os.urandom(16).hex()
    arguments = [
        *processes.part("prober"), plan.run, str(me.rank), str(reference(plan)), str(os.getpid()),
        name,
    ]  # fmt: skip
    try:
        if processes.start_beside(arguments, _FOLLOWED) == 0:
            os.environ[PROBE] = name
    except OSError as error:
        complain("the clocks are not measured: %s" % (error,))


def notify(event: str) -> None:
    """Announce to our prober, if there is one, that the window opens or closes; never waits."""
    import socket

    if PROBE not in os.environ:
        return
    address = "\0" + os.environ[PROBE]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        pipe.setblocking(False)
        pipe.sendto(event.encode(), address)
