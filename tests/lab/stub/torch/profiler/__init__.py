"""A profiler that takes its time, as torch's does."""

import enum
import os
import signal
import time


class ProfilerActivity(enum.Enum):
    """As torch's."""

    CPU = 0
    CUDA = 1


def _takes_its_time(what):
    if what in os.environ.get("EVENTS", "").split():
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.05)


class profile:  # noqa: N801
    """A trace without events."""

    def __init__(self, activities):
        """Of any activities."""

    def start(self):
        """Begin."""
        _takes_its_time("start")

    def stop(self):
        """End."""
        _takes_its_time("stop")

    def export_chrome_trace(self, path):
        """Write it."""
        _takes_its_time("save")
        with open(path, "w") as file:
            file.write('{"traceEvents": []}')
