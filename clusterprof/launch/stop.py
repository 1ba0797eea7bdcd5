"""Save reports while the job still runs: before srun kills its tasks, before the time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from clusterprof import words
from clusterprof.agent.contracts import files, paths, states
from clusterprof.agent.contracts.states import State
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.collect.outcomes import ended
from clusterprof.console import say
from clusterprof.errors import RunDirectoryError
from clusterprof.run_directory import Window

#: How long a signal may wait for the reports. A job that gets a signal ends at most 10 s later than
#: without us; the rest of them is for the launcher's own end and for collecting.
SAVING_S = 6.0

#: srun sends SIGKILL to all tasks, at once, when it gets one of these (Slurm 22.05) ...
_KILLS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: ... and a second after two SIGINT within this.
_TWICE_S = 1.0


class BeforeSrunKills:
    """Signals that make srun kill its tasks wait until the reports are saved.

    The tasks then end exactly as under srun alone, with its status and messages, a few seconds
    later. They get no signal that srun would not have sent them.
    """

    def __init__(
        self, run: Window, expected: Sequence[int] | None, longer_s: int = 0,
        clock: Clock = REAL,
    ) -> None:  # fmt: skip
        """`longer_s`: what the reports may take longer, see `NsysPlan.longer_s`."""
        self.run = run
        self.expected = expected
        self.saving_s = SAVING_S + longer_s
        self._clock = clock
        self._interrupted_at = -1e9

    def __call__(self, number: int, enough: Callable[[], bool]) -> Sequence[int]:
        """See `clusterprof.launch.job_processes.Before`."""
        numbers = [number]
        if number == signal.SIGINT:
            before, self._interrupted_at = self._interrupted_at, self._clock.now()
            if self._interrupted_at - before >= _TWICE_S:
                return numbers
            numbers = [number, number]  # by then srun has forgotten the first
        elif number not in _KILLS:
            return numbers
        # No longer than `saving_s`, nor than until `enough()`, which sleeps a little itself.
        if left := unsaved(self.run, self.expected):
            reason = f"clusterprof was sent {signal.Signals(number).name}"
            reports = words.counted(len(left), "report")
            say(f"{reason}: saving {reports}, at most {self.saving_s:g} s")
            request_stop(self.run.path, reason)
            self._clock.until(lambda: not unsaved(self.run, left) or enough(), self.saving_s, 0)
        return numbers


def request_stop(run: Path, reason: str) -> None:
    """Have the ranks close all open windows, if that can be written; the first reason stays."""
    if states.stop_requested(str(run)) is None:
        with contextlib.suppress(OSError):
            files.write(run / paths.CLOSE, reason + "\n")


def unsaved(run: Window, expected: Sequence[int] | None) -> list[int]:
    """The ranks that have a window open, or whose report is not yet in the run directory."""
    run = run.attempts()[-1]
    windows = [(run, expected)]
    for later in run.directory.later_windows(run.attempt):
        with contextlib.suppress(RunDirectoryError):  # its order cannot be read
            windows.append((later, later.expected_ranks()))
    ranks = []
    for window, chosen in windows:
        states_of = window.states().items() if chosen is None else window.states_of(chosen)
        for rank, content in states_of:
            is_open = State.of(content) in (State.CAPTURING, State.FINISHING)
            if is_open and not ended(window.rank(rank), content):
                ranks.append(rank)
    return ranks


def all_captured(run: Window, expected: Sequence[int] | None) -> bool:
    """Whether no rank that is to be profiled has its window open, or will."""
    states_of = run.attempts()[-1].states()
    chosen = expected or [rank for rank, state in states_of.items() if state.get("chosen")]
    windows = [State.of(states_of.get(rank, {})) for rank in chosen]
    over = [state and (state.has_captured or state is State.LOST) for state in windows]
    return bool(over) and all(over)


def close_before_limit(
    run: Window, expected: Sequence[int] | None, margin_s: float | None, clock: Clock = REAL
) -> None:
    """Close the windows shortly before the job's time limit; `margin_s`: None for `margin`'s.

    At the limit Slurm sends SIGTERM and, KillWait later, SIGKILL: a report that is being written
    then is lost. Slurm is asked repeatedly how much time is left, since a limit can be changed.
    """
    job: str | None = None
    wait_s = 1.0
    while True:
        clock.sleep(wait_s)
        if all_captured(run, expected):
            return  # no window is open, nor will be
        job = job or slurm_job(run, expected)
        answer = time_left(job) if job else None
        if answer is None:  # not yet, or not now
            wait_s = min(2 * wait_s, 60.0)
            continue
        left_s, limit_s = answer
        if left_s is None:
            return
        before_s = margin(limit_s) if margin_s is None else margin_s
        if left_s <= before_s:
            say(f"closing the windows: the job's time limit is in {left_s:.0f} s")
            request_stop(run.path, "the job's time limit is near")
            return
        # Half of what is left, so that a limit that is changed meanwhile is seen in time.
        often = 60.0 if unsaved(run, expected) else 300.0
        wait_s = min(max((left_s - before_s) / 2, 1.0), often)


def margin(limit_s: float | None) -> float:
    """How long before the limit a window is closed: a minute, or a tenth of a short limit.

    Measured: stopping takes up to 9 s, importing a report of the largest size half a minute, both
    while the training runs. Slurm checks limits every 30 s, and never early.
    """
    return 60.0 if limit_s is None else min(60.0, limit_s / 10)


def slurm_job(run: Window, expected: Sequence[int] | None) -> str | None:
    """The Slurm job that this runs in, or that srun has made; None where there is none (yet)."""
    if inside := os.environ.get("SLURM_JOB_ID"):
        return inside
    for _, state in run.states_of(expected or run.ranks()[:1]):
        job = state.get("slurm_job")
        if isinstance(job, str) and job.isdigit():
            return job
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
    fields = asked.stdout.split()
    if asked.returncode != 0 or len(fields) != 2:
        return None
    return seconds(fields[0]), seconds(fields[1])


def seconds(text: str) -> float | None:
    """Slurm's `1-02:03:04`, `02:03:04` or `3:04`; None for `UNLIMITED` and its like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (float(digits or 0) for digits in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
