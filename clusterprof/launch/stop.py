"""Having reports saved while the job still runs: before a launcher kills, before its time is up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from clusterprof.agent.contracts import stop_request
from clusterprof.agent.contracts.states import State
from clusterprof.collect import reports_in
from clusterprof.console import say
from clusterprof.run_directory import RunDirectory

#: How long a signal may wait for the reports. A job that is told to end ends at most 10 s later
#: than without us; what is left is for the launcher's own end and the collecting.
SAVING_S = 6.0

#: srun sends SIGKILL to all tasks, at once, when it gets one of these (Slurm 22.05) ...
_KILLS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: ... and a second after two SIGINT within this.
_TWICE_S = 1.0


class BeforeSrunKills:
    """The signals that make srun kill its tasks wait until the reports are saved.

    The tasks then end exactly as srun alone would have ended them, with its status and words, a
    few seconds later. Nothing is sent to them before: a program must not see a SIGTERM that it
    would not have seen.
    """

    def __init__(self, run: RunDirectory, expected: Iterable[int] | None) -> None:
        self.run = run
        self.expected = None if expected is None else list(expected)
        self._interrupted_at = -1e9

    def __call__(self, number: int, enough: Callable[[], bool]) -> Sequence[int]:
        """See `clusterprof.launch.foreground.Before`."""
        numbers = [number]
        if number == signal.SIGINT:
            second = time.monotonic() - self._interrupted_at < _TWICE_S
            self._interrupted_at = time.monotonic()
            if not second:
                return numbers
            numbers = [number, number]  # by the time we are done, the first is forgotten
        elif number not in _KILLS:
            return numbers
        name = signal.Signals(number).name
        save(self.run, self.expected, f"clusterprof was sent {name}", enough)
        return numbers


def save(
    run: RunDirectory,
    expected: Sequence[int] | None,
    reason: str,
    enough: Callable[[], bool],
    within_s: float = SAVING_S,
) -> None:
    """Have all open windows closed, and wait until their reports are home.

    Not longer than `within_s`, nor after `enough()`, which waits a little itself.
    """
    left = unsaved(run, expected)
    if not left:
        return
    say(f"{reason}: {len(left)} reports are being saved, for {within_s:g} s at most")
    with contextlib.suppress(OSError):
        stop_request.give(str(run.path), reason)
    deadline = time.monotonic() + within_s
    while unsaved(run, left) and time.monotonic() < deadline and not enough():
        pass


def unsaved(run: RunDirectory, expected: Sequence[int] | None) -> list[int]:
    """The ranks whose window is open, or whose report is being written."""
    found = []
    run = run.attempts()[-1]
    for rank, state in run.states().items() if expected is None else run.states_of(expected):
        at = State.of(state)
        if at is State.CAPTURING or (at is State.FINISHING and not is_home(run, rank)):
            found.append(rank)
    return found


def is_home(run: RunDirectory, rank: int) -> bool:
    """Whether nsys' report is in the run directory."""
    return any(path.suffix == ".nsys-rep" for path in reports_in(run.rank(rank)))


class TimeLimit:
    """Has the windows closed when the job's time limit nears.

    Slurm's limit ends in SIGKILL, KillWait after a SIGTERM, and a report that is being written
    then is lost. Slurm is asked now and then how much is left, since a limit can be changed.
    """

    def __init__(
        self, run: RunDirectory, expected: Sequence[int] | None, margin_s: float | None
    ) -> None:
        """`margin_s`: None for the default, see `margin`."""
        self.run = run
        self.expected = expected
        self.margin_s = margin_s
        self._over = threading.Event()
        if margin_s != 0:
            threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """The job has ended."""
        self._over.set()

    def _watch(self) -> None:
        job: str | None = None
        wait_s = 1.0
        while not self._over.wait(wait_s) and not self._through():
            job = job or slurm_job(self.run, self.expected)
            told = None if job is None else time_left(job)
            if told is None:  # not yet, or not now
                wait_s = min(2 * wait_s, 60.0)
                continue
            left_s, limit_s = told
            if left_s is None:
                return
            margin_s = margin(limit_s) if self.margin_s is None else self.margin_s
            if left_s <= margin_s:
                say(f"the job's time limit is {left_s:.0f} s away: windows are closed")
                with contextlib.suppress(OSError):
                    stop_request.give(str(self.run.path), "the job's time limit is near")
                return
            # Half of what is left, so that a limit that is changed meanwhile is seen in time.
            often = 60.0 if unsaved(self.run, self.expected) else 300.0
            wait_s = min(max((left_s - margin_s) / 2, 1.0), often)

    def _through(self) -> bool:
        """Whether no window is left to be closed."""
        seen = self.run.attempts()[-1].states()
        chosen = self.expected or [rank for rank in seen if seen[rank].get("chosen")]
        found = [State.of(seen.get(rank, {})) for rank in chosen]
        return bool(found) and all(each is not None and each.window_ended for each in found)


def margin(limit_s: float | None) -> float:
    """How long before the limit a window is closed: a minute, or a tenth of a short limit.

    Stopping has taken up to 9 s and importing a report of the largest size allowed half a minute,
    both beside the training; Slurm itself looks at limits every 30 s, and never early.
    """
    return 60.0 if limit_s is None else min(60.0, limit_s / 10)


def slurm_job(run: RunDirectory, expected: Sequence[int] | None) -> str | None:
    """The Slurm job that this runs in, or that srun has made; None where there is none (yet)."""
    inside = os.environ.get("SLURM_JOB_ID")
    if inside:
        return inside
    for rank in expected or run.ranks()[:1]:
        told: Any = dict(run.states_of([rank])).get(rank, {}).get("slurm_job")
        if isinstance(told, str) and told.isdigit():
            return told
    return None


def time_left(job: str) -> tuple[float | None, float | None] | None:
    """Seconds until the job's time limit, and the limit itself: each None where there is none.

    None where Slurm cannot be asked.
    """
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", "%L %l"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = asked.stdout.split()
    if asked.returncode != 0 or len(words) != 2:
        return None
    return seconds(words[0]), seconds(words[1])


def seconds(text: str) -> float | None:
    """Slurm's `1-02:03:04`, `02:03:04` or `3:04`; None for `UNLIMITED` and its like."""
    days, _, rest = text.rpartition("-")
    try:
        parts = [int(part) for part in rest.split(":")]
        total = int(days or 0) * 86400.0
    except ValueError:
        return None
    if len(parts) > 3:
        return None
    return total + sum(
        part * unit for part, unit in zip(reversed(parts), (1, 60, 3600), strict=False)
    )
