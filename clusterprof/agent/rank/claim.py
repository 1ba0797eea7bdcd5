"""Which program of a task is its rank: the first that trains, for as long as it runs.

A task may start several at once. The claim is an abstract Unix socket: it has no file, one process
holds it until it ends, and who connects to it learns which.
"""

from __future__ import annotations

import _socket
import contextlib
import os
from typing import Optional

from ..contracts import descriptors, paths, states
from ..contracts.identity import Identity
from ..contracts.plan import Plan

_PEER_B = 12  # pid, uid and gid: an `int` each

_held: Optional[_socket.socket] = None


def is_picked(plan: Plan, me: Identity) -> bool:
    """Whether this rank is to be profiled, and was not in an earlier attempt."""
    return plan.profiles(me) and not states.captured_before(paths.rank_folder(plan.run, me.rank))


def take(folder: str) -> Optional[int]:
    """Claim the rank with this folder; returns the process that has it already, see `holder`."""
    global _held
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        listener.bind(_name(folder))
        listener.listen(16)
    except OSError:
        listener.close()
        return holder(folder)
    descriptors.hide([listener.fileno()])
    _held = listener
    return None


def release() -> None:
    """In a forked child: it has inherited what is its parent's."""
    global _held
    if _held is not None:
        held, _held = _held, None
        (held.close if descriptors.is_hidden(held.fileno()) else held.detach)()


def holder(folder: str) -> Optional[int]:
    """The process that has claimed the rank with this folder.

    0 for one that cannot be determined, None for none, or another user's.
    """
    with contextlib.closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_name(folder))
            peer = asking.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER_B)
        except BlockingIOError:
            return 0  # asked too often
        except OSError:
            return None
    pid, uid, _ = memoryview(peer).cast("i")
    return pid if uid == os.getuid() else None


def _name(folder: str) -> str:
    import hashlib

    digest = hashlib.sha256(os.fsencode(os.path.abspath(folder))).hexdigest()[:32]
    return "\0clusterprof-%d-%s" % (os.getuid(), digest)
