"""clock.json: readings of this host's clocks around the window; and the rank's side of its prober,
which measures them against other hosts'.

A list of readings: `open` before the profiler starts, `opened` after, `closing` before it stops,
`close` after (`start`, of every rank, is in state.json). The kernel's estimate bounds the wall
clock's distance from true time; marks relate the report's times to it.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import sys
import time
from typing import Any, Dict, List, Optional

from . import beside, files, identity, paths
from .messages import complain
from .plan import Plan

#: a range of this name, and a number, stands in the report where a clock was read
MARK = "clusterprof:clock:"
#: what a rank announces to its prober when it saves its flight recorder for `--watch`
LOOK = "look"


def kernel() -> Optional[Dict[str, Any]]:
    """The kernel's estimate of its wall clock's error (adjtimex, read only); None without one.

    `maxerror_ns` bounds the distance to true time as far as the time daemon is right, while
    `synchronised`; without a daemon it means nothing.
    """
    import ctypes
    import struct

    timex = ctypes.create_string_buffer(512)  # zeros: with modes 0 nothing is set
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    # the first members of struct timex: modes, offset, freq, maxerror, esterror, status
    _, offset, frequency, most, estimated, status = struct.unpack_from("@Illlli", timex)
    in_ns, unsynchronised, time_error = 0x2000, 0x0040, 5  # STA_NANO, STA_UNSYNC, TIME_ERROR
    return {
        "offset_ns": offset if status & in_ns else offset * 1000,
        "maxerror_ns": most * 1000,
        "esterror_ns": estimated * 1000,
        "synchronised": state != time_error and not status & unsynchronised,
        "frequency_ppm": frequency / 65536.0,
    }


def machine() -> str:
    """What distinguishes running kernels, whose processes read one wall clock; "" if unknown.

    The boot's random number, which virtual machines of one snapshot share, and the host name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return "%s %s" % (file.read().strip(), os.uname().nodename)
    except OSError:
        return ""


def reading(event: str, mark: bool = False) -> Dict[str, Any]:
    """Wall, monotonic and raw clock as nearly at once as Python can.

    The wall clock was read between the two readings of the monotonic clock, `gap_ns` apart.
    With the kernel's estimate where that costs no import: torch has imported ctypes. With `mark`
    also put ranges into the report that is being captured.
    """
    before = time.monotonic_ns()
    wall = time.time_ns()
    after = time.monotonic_ns()
    raw = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    now = {
        "event": event, "wall_ns": wall, "monotonic_ns": before, "gap_ns": after - before,
        "raw_ns": raw, "kernel": kernel() if "ctypes" in sys.modules else None,
    }  # fmt: skip
    return {**now, "marks": marks(wall)} if mark else now


def add(folder: str, readings: List[Dict[str, Any]]) -> None:
    """Add readings to the clock.json of a rank's folder. Raises OSError, ValueError."""
    path = os.path.join(folder, paths.CLOCK)
    earlier = files.load(path) if os.path.exists(path) else {}
    every = [*earlier.get("readings", []), *readings]
    files.write_json(path, {"schema_version": 1, "machine": machine(), "readings": every})


def marks(number: int) -> List[Dict[str, Any]]:
    """Ranges in the report, each between two readings of the wall clock; [] where none can be.

    Whatever the report's own times are, the range began after `before_ns` and ended before
    `after_ns`. The first of its kind includes the profiler's set-up, hence two of each.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    ways: List[Any] = [lambda name: torch.profiler.record_function(name)] * 2
    if torch.cuda.is_initialized():
        ways += [lambda name: torch.cuda.nvtx.range(name)] * 2
    kept: List[Dict[str, Any]] = []
    for way in ways:
        name = "%s%d" % (MARK, number + len(kept))
        with contextlib.suppress(Exception):  # a torch without this one, or one that is torn down
            around = way(name)
            before = time.time_ns()
            with around:
                pass
            kept.append({"name": name, "before_ns": before, "after_ns": time.time_ns()})
    return kept


def reference_rank(plan: Plan) -> int:
    """The rank whose host's clock all others are measured against: the lowest profiled one."""
    return min(plan.selection.ranks, default=0)


def start_prober(plan: Plan, me: identity.Identity) -> None:
    """Start this rank's prober, where the job's clocks are to be measured from beside it
    (`--clock-probe`); its socket's name is in the field PROBE then.
    """
    mode, reference = plan.clock_probe, reference_rank(plan)
    if mode == "off" or (mode == "auto" and identity.nodes(me, os.environ) < 2):
        return
    is_first = plan.profiles(me) if me.local_rank is None else me.local_rank == 0
    if me.rank != reference and not is_first:
        return
    name = "clusterprof-" + os.urandom(16).hex()
    facts = os.path.abspath(plan.run), me.rank, reference, os.getpid(), int(plan.watch_s > 0)
    with contextlib.closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)) as pipe:
        try:
            # By now: a window may open before the prober listens.
            pipe.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
            pipe.bind("\0" + name)
            beside.start("prober", pipe, *map(str, facts))
        except OSError as error:
            complain("the clocks are not measured: %s" % (error,))
        else:
            identity.set_field(os.environ, identity.PROBE, name)


def notify_prober(event: str) -> None:
    """Announce to our prober, if there is one, that the window opens or closes, or a look; never
    waits.
    """
    name = identity.fields(os.environ).get(identity.PROBE)
    if name is not None:
        with contextlib.suppress(OSError):
            pipe = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
            with contextlib.closing(pipe):
                pipe.setblocking(False)
                pipe.sendto(event.encode(), "\0" + name)
