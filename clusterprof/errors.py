"""The errors that end clusterprof: what happened, where, and what to do next.

One class per kind of failure, each with its exit status ("exit codes" in the documentation).
They are shown without a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class ClusterprofError(Exception):
    """Base of all errors that a user reads.

    `what` is one lower-case sentence without a full stop; `details` are further lines
    (where, what a tool printed), the last of which is the next step.
    """

    exit_code = 125
    #: its stack trace, where it comes from another process
    trace = ""

    def __init__(self, message: str, *details: str) -> None:
        super().__init__(message)
        self.what = message
        self.details: Sequence[str] = details

    def __str__(self) -> str:
        return "\n  ".join([self.what, *self.details])


class UsageError(ClusterprofError):
    """The command line, a selection of ranks or a window of steps is invalid."""

    exit_code = 2


class ReportError(ClusterprofError):
    """A report cannot be read: missing, empty, truncated, of an unknown format, no events."""

    exit_code = 3


class MergeError(ClusterprofError):
    """Readable reports that do not belong together: two jobs, or one rank twice."""

    exit_code = 4


class RunDirectoryError(ClusterprofError):
    """A run directory exists already, is not one, cannot be written, or is incomplete."""

    exit_code = 5


class RunDirectoryTaken(RunDirectoryError):  # noqa: N818 - it names what happened
    """The path of a new run directory exists already."""


class ProfilerError(ClusterprofError):
    """nsys or torch.profiler is missing, too old, or refuses what was asked of it."""

    exit_code = 6


class LaunchError(ClusterprofError):
    """The launcher itself (srun, torchrun, ...) cannot be found or started."""

    exit_code = 127


class HostError(ClusterprofError):
    """A host cannot be reached over SSH, or lacks what the job needs; the status is ssh's own."""

    exit_code = 255
