"""What a rank does for its prober: say whether there is one, start it, tell it of the window."""

from __future__ import annotations

import _socket
import contextlib
import os
from typing import Mapping

from ..contracts import beside, identity
from ..contracts.identity import PROBE, Identity, nodes
from ..contracts.messages import complain
from ..contracts.plan import Plan


def wanted(plan: Plan, me: Identity, environ: Mapping[str, str]) -> bool:
    """Whether the clocks of this job are to be measured (`--clock-probe`), and from beside us."""
    mode = plan.clock_probe
    if mode == "off" or (mode == "auto" and nodes(me, environ) < 2):
        return False
    if me.local_rank is None:
        return me.rank == reference(plan) or plan.profiles(me)
    return me.rank == reference(plan) or me.local_rank == 0


def reference(plan: Plan) -> int:
    """The rank whose host's clock all others are measured against: the lowest profiled one."""
    return min(plan.selection.ranks, default=0)


def start(plan: Plan, me: Identity) -> None:
    """Start the prober of this rank, if there is to be one; its socket's name is in PROBE then."""
    if not wanted(plan, me, os.environ):
        return
    name = "clusterprof-" + os.urandom(16).hex()
    facts = os.path.abspath(plan.run), me.rank, reference(plan), os.getpid()
    with contextlib.closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)) as pipe:
        try:
            # By now: a window may open before the prober listens.
            pipe.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
            pipe.bind("\0" + name)
            beside.start("prober", pipe, *map(str, facts))
        except OSError as error:
            complain("the clocks are not measured: %s" % (error,))
        else:
            identity.set_field(os.environ, PROBE, name)


def notify(event: str) -> None:
    """Announce to our prober, if there is one, that the window opens or closes; never waits."""
    name = identity.fields(os.environ).get(PROBE)
    if name is None:
        return
    with contextlib.suppress(OSError):
        pipe = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        with contextlib.closing(pipe):
            pipe.setblocking(False)
            pipe.sendto(event.encode(), "\0" + name)
