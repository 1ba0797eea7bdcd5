"""clock.json: readings of this host's clocks around the window.

A list of readings: `open` before the profiler starts, `opened` after, `closing` before it stops,
`close` after (`start`, of every rank, is in state.json). The kernel's estimate bounds the wall
clock's distance from true time; marks relate the report's times to it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, Dict, List, Optional

from . import files, paths

#: a range of this name, and a number, stands in the report where a clock was read
MARK = "clusterprof:clock:"


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
