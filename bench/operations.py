"""How often a rank that is not chosen touches the run directory while it trains."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agent import armed
from figure import Figure, median
from process import Failed

_PROGRAM = Path(__file__).resolve().parent / "programs" / "paced.py"
#: From then on the rank is in its training: folder, log and first state are there.
_STARTED_S = 5.0

# From inotify(7): opened, changed in its attributes, created, moved, deleted.
_EVENTS = 0x20 | 0x4 | 0x100 | 0x40 | 0x80 | 0x200 | 0x400
_HEAD = struct.Struct("@iIII")
_NONBLOCK = os.O_NONBLOCK


class Watch:
    """Counts what is done in one folder, by whichever process."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(_NONBLOCK)
        if libc.inotify_add_watch(self.descriptor, os.fsencode(folder), _EVENTS) < 0:
            raise Failed(f"{folder} cannot be watched: {os.strerror(ctypes.get_errno())}")

    def count(self) -> int:
        """The operations since this was last asked."""
        events = 0
        while True:
            try:
                data = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return events
            at = 0
            while at < len(data):
                at += _HEAD.size + _HEAD.unpack_from(data, at)[3]
                events += 1


def per_minute(minutes: int) -> Figure:
    """File operations of one unprofiled rank outside its start and end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**os.environ, **armed(folder, "environment"), "RANK": "1", "WORLD_SIZE": "4"}
        line = [sys.executable, str(_PROGRAM), str(60 * minutes + 2 * _STARTED_S)]
        with subprocess.Popen(line, env=environ) as training:
            time.sleep(_STARTED_S)
            watch = Watch(folder / "run" / "ranks" / "00001")
            counts = []
            for _ in range(minutes):
                time.sleep(60)
                counts.append(watch.count())
            if training.wait() != 0:
                raise Failed("the training failed")
    return Figure(
        "file operations of a rank that is not chosen",
        "a minute",
        1.5,
        median(counts),
        "without clusterprof: 0",
        "opens, creations, renames, deletions and changes of times in its folder",
        runs=counts,
    )
