"""Run a job under its launcher, save its reports while it still runs, collect and merge them."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterprof import __version__, console, gate, installed_nsys, masking, run_directory, words
from clusterprof.agent.contracts import files, paths, states
from clusterprof.agent.contracts.states import State
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.arguments import selected, shortest
from clusterprof.collect.outcomes import (
    FINISHING_S,
    PATIENCE_S,
    Outcome,
    collect_attempts,
    ended as process_ended,
    flights,
)
from clusterprof.console import command as show_command, say
from clusterprof.errors import ClusterprofError, RunDirectoryError, RunDirectoryTaken
from clusterprof.jobs import find_program
from clusterprof.launch import ending
from clusterprof.launch.ending import Ending
from clusterprof.launch.job_processes import Foreground, beside_job, unless_stalled
from clusterprof.launch.planning import GATE_FAILED, PROFILE_FAILED, LaunchPlan
from clusterprof.launch.watch import look_first, look_once, watch_hangs, watch_lateness
from clusterprof.results import RANKS
from clusterprof.run_directory import Manifest, Window

#: seconds for late files of a job that got a signal to end: its reports were waited for before
HASTY_S = 1.0
#: how many runs of one job may begin in the same second
TURNS = 100
#: How long a signal may wait for the reports. A job that gets a signal ends at most 10 s later than
#: without us; the rest of them is for the launcher's own end and for collecting.
SAVING_S = 6.0

#: srun sends SIGKILL to all tasks, at once, when it gets one of these (Slurm 22.05) ...
_KILLS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: ... and a second after two SIGINT within this.
_TWICE_S = 1.0


def run(plan: LaunchPlan, again: Callable[[int], LaunchPlan], turn: int = 1) -> int:
    """Run the job; returns its own status.

    `again(turn)` plans once more, where the default run directory was taken a moment before.
    """
    launcher = find_program(plan.job.command[0])
    try:
        directory, manifest = begin(plan)
    except RunDirectoryTaken:
        if plan.origins["run_dir"] != "default" or turn >= TURNS:
            raise
        return run(again(turn + 1), again, turn + 1)
    return launch(launcher, plan, directory, manifest)


def launch(launcher: str, plan: LaunchPlan, run: Window, manifest: Manifest) -> int:
    """Run the job, then collect and merge its reports; returns the job's status."""
    show_command(plan.job.command)
    srun = plan.job.launcher == "srun"
    longer_s = plan.for_agent.nsys.longer_s if plan.for_agent.nsys else 0
    before = BeforeSrunKills(run, plan.expected, longer_s) if srun else None
    job = Foreground([launcher, *plan.job.command[1:]], plan.environment, before)
    with contextlib.ExitStack() as beside:
        for watch, otherwise in watching(plan, run):
            beside.callback(beside_job(watch, otherwise).end)
        status = job.run()
    signals = signals_to_end(job, status)
    patience_s, finishing_s = PATIENCE_S, FINISHING_S + longer_s
    if srun:
        # When srun has ended, so has all that it started: no process is left that could write.
        patience_s = finishing_s = HASTY_S if signals else PATIENCE_S
    ended = unless_stalled(
        lambda: conclude(plan, run, manifest, status, patience_s, finishing_s, signals), run.path
    )
    if ended is None:
        ending.say(stalled(run, status, signals))
    elif ended >= 0:
        return ended
    # Not collected, or the collecting process was ended by a signal; the job was not.
    return final_status(plan, status, complete=False, passed=not plan.arguments.fail_on)


def signals_to_end(job: Foreground, status: int) -> list[str]:
    """The signals that ended a job with this status, by name."""
    if status == 0:  # at a single SIGINT srun prints how far its tasks are, and continues
        return []
    return [*dict.fromkeys(signal.Signals(number).name for number in job.end_signals)]


def watching(plan: LaunchPlan, run: Window) -> list[tuple[Callable[[], None], str]]:
    """What watches the job while it runs, and what there is not where that fails."""
    asked, every_s = plan.arguments, plan.for_agent.watch_s
    looks_alone = getattr(asked, "looks_alone", False)
    shows = looks_alone and os.isatty(2)
    tasks: tuple[tuple[object, Callable[[], None], str], ...] = (
        (asked.hang_after, lambda: watch_hangs(run), "a job that hangs is not noticed any more"),
        (plan.for_agent.looks_first, lambda: look_first(plan, run), "no second window is captured"),
        (looks_alone, lambda: look_once(plan, run), "all ranks are not looked at so soon"),
        (every_s, lambda: watch_lateness(run, every_s, asked.metrics, shows=shows),
         "who is late is not said any more"),
        (asked.time_margin != 0,
         lambda: close_before_limit(run, plan.expected, asked.time_margin),
         "windows are not closed before the time limit any more"),
    )  # fmt: skip
    return [(watch, otherwise) for is_wanted, watch, otherwise in tasks if is_wanted]


def stalled(run: Window, status: int, signals: Sequence[str]) -> Ending:
    """How a job ended whose run directory does not answer."""
    where = shortest(run.path)
    return Ending(
        where, status, signals, can_merge=True, first_do="once both respond: ",
        saved=f"not known: {where} or the temporary folder is stalled",
        why_none="the reports were not collected",
    )  # fmt: skip


def final_status(plan: LaunchPlan, status: int, *, complete: bool, passed: bool) -> int:
    """The job's own status; of a job that succeeded what `--strict` and `--fail-on` make of it."""
    if status == 0 and plan.arguments.strict and not complete:
        return PROFILE_FAILED
    return GATE_FAILED if status == 0 and not passed else status


def begin(plan: LaunchPlan) -> tuple[Window, Manifest]:
    """Make the run directory and print what will be profiled. Raises RunDirectoryError."""
    run = run_directory.create(plan.run, force=plan.arguments.force)
    if (first := run_directory.first_start(plan.run, os.environ)) is not None:
        say(f"this job was restarted; reports of its first start: clusterprof collect {first}")
    run.directory.write_plan(plan.for_agent)
    run.directory.write_again(masking.suspected(plan.again))
    manifest = run.directory.write_manifest(first_members(plan))
    if (parent := run_directory.exposed(run.path)) is not None:
        say(f"other users can rename what is in {parent} (no sticky bit), this run directory "
            "included: ranks then run unprofiled, and reports may be lost; choose another place "
            "with --run-dir DIR")  # fmt: skip
    for remark in (*plan.job.remarks, *plan.capture.remarks):
        say(remark)
    if plan.job.closed:
        say(f"no rank can be profiled: {plan.job.closed}")
    say(f"{will_profile(plan)}, into {shortest(run.path)}")
    return run, manifest


def will_profile(plan: LaunchPlan) -> str:
    """What is profiled and looked at, in words."""
    step, every_s = plan.window.end - 1, plan.for_agent.watch_s
    line = (
        f"profiling steps {plan.window} on {selected(plan.selection.text)} with {plan.capture.name}"
    )
    if plan.capture.name == "none":
        line = f"no rank is profiled; flight recorders are saved after step {step}"
    elif plan.for_agent.looks_first:
        line = f"looking at all ranks after step {step}, then capturing those that delay the others"
    return f"{line}, watching all ranks each {words.age(every_s)}" if every_s else line


def conclude(
    plan: LaunchPlan, run: Window, manifest: Manifest, status: int,
    patience_s: float = PATIENCE_S, finishing_s: float = FINISHING_S, signals: Sequence[str] = (),
) -> int:  # fmt: skip
    """Collect and merge the reports of a job that has ended; returns the status to end with.

    `signals`: those to end that we got; merging may take longer than we have, and is for later.
    """
    ended = now_text()
    installed_nsys.prefer(plan.capture.path)
    complete, results, outcomes = False, None, list[Outcome]()
    known = Ending(shortest(run.directory.path), status, signals)
    try:
        run, outcomes = collected(plan, run, patience_s, finishing_s)
        complete = print_problems(run, outcomes)
        record(run, manifest, outcomes, ended=ended, exit_status=status)
        can_merge = ending.can_merge(run, outcomes)
        why_none = why_unmerged(plan, run, signals, can_merge=can_merge)
        known = replace(known, can_merge=can_merge, why_none=why_none)
        if known.can_merge and not known.why_none:
            from clusterprof.merge_run import merge_and_print

            results = merge_and_print(run, outcomes, plan.arguments.gpu_hour)
            known = replace(known, is_merged=True)
    except KeyboardInterrupt:
        known = replace(known, can_merge=True, why_none="interrupted before it was merged")
    except Exception as error:  # noqa: BLE001 - the job has ended with its own status
        complete, results = False, getattr(error, "results", None)
        if plan.arguments.debug:
            traceback.print_exc()
        known = failed(error, known, shortest(run.path))
    passed = not plan.arguments.fail_on
    if results is not None:
        from clusterprof.report.summary import Summary

        figures = Summary(results).figures
        passed = not gate.fails(plan.arguments.fail_on, results["findings"], figures=figures)
    elif not passed:
        say("--fail-on could not be checked: nothing was merged")
    name_later_windows(run)
    try:
        known = ending.of_run(run, outcomes, manifest, results, known)
    except Exception as error:  # noqa: BLE001 - as above
        known = failed(error, known, shortest(run.path))
    ending.say(known)
    return final_status(plan, status, complete=complete, passed=passed)


def name_later_windows(run: Window) -> None:
    """Say which windows of `clusterprof capture` are not merged yet."""
    for later in run.directory.later_windows():
        if later.ranks() and not later.is_auto and not later.html.exists():
            say(f"window {later.number} was captured later: clusterprof collect "
                f"{shortest(run.directory.path)} --window {later.number}")  # fmt: skip


def collected(
    plan: LaunchPlan, run: Window, patience_s: float, finishing_s: float
) -> tuple[Window, list[Outcome]]:
    """The window, in the attempt to be merged, that has the run's reports, and its outcomes."""
    if plan.job.closed and not run.ranks():
        patience_s = 0
    deep = run.deep()
    expected = plan.expected if deep == run else deep.expected_ranks()
    run, outcomes = collect_attempts(deep, expected, patience_s=patience_s, finishing_s=finishing_s)
    if plan.job.closed and not run.ranks():
        outcomes = [replace(outcome, reason=plan.job.closed) for outcome in outcomes]
    return run, outcomes


def record(
    run: Window, manifest: Manifest, outcomes: Sequence[Outcome], **ending_of_job: object
) -> None:
    """Note in run.json how the job ended; a full disk keeps nothing from being merged."""
    if run.path.is_dir():
        shown = [outcome.as_json() for outcome in outcomes]
        try:
            manifest.record(**ending_of_job, attempt=run.attempt, outcomes=shown)
        except RunDirectoryError as error:
            console.error(error.what)


def why_unmerged(plan: LaunchPlan, run: Window, signals: Sequence[str], *, can_merge: bool) -> str:
    """Why what there is of a run is not merged now; "" where it is, or the ranks tell it."""
    if not can_merge:
        return "" if run.ranks() else plan.job.closed
    if plan.arguments.no_merge:
        return "not merged, by --no-merge"
    return f"not merged, because of {words.listed(signals)}" if signals else ""


def failed(error: Exception, known: Ending, where: str) -> Ending:
    """Print why the reports in `where` could not be merged; what is known of the ending by that."""
    what, *details = failure(error, where)
    console.error(what, *details)
    if isinstance(error, (ClusterprofError, OSError)):
        is_unsaved = hasattr(error, "results")  # `merge_run.UnsavedError`, which is not loaded here
        what_first = f"{where} can be written" if is_unsaved else "that is repaired"
        return replace(known, can_merge=True, why_none=what, first_do=f"once {what_first}: ")
    return replace(known, why_none=what, command=f"clusterprof merge --debug {where}")


def failure(error: Exception, where: str) -> list[str]:
    """Why the reports in `where` could not be merged, and what to do."""
    if isinstance(error, ClusterprofError):
        return [error.what, *error.details]
    line = "the reports could not be merged"
    if isinstance(error, OSError):
        return [f"{line}: {error}", f"once they can be read: clusterprof collect {where}"]
    return [
        f"{line}: {type(error).__name__}: {error}",
        f"this is a bug in clusterprof; the reports are in {where}",
        f"to see where: clusterprof merge --debug {where}",
    ]


def first_members(plan: LaunchPlan) -> dict[str, Any]:
    """run.json as it stands before the job runs. Holds no environment but our own two variables."""
    return {
        "schema_version": run_directory.SCHEMA_VERSION,
        "clusterprof": __version__,
        "python": sys.version.split()[0],
        "launcher": plan.job.launcher,
        "argv": masking.words(plan.job.command),
        "again": masking.again(plan.again, RANKS),
        "world_size": plan.job.world_size,
        "selection": plan.selection._asdict(),
        "window": [plan.window.first, plan.window.end],
        "profiler": {
            "name": plan.capture.name,
            "version": plan.capture.version,
            "path": plan.capture.path,
        },
        "origins": dict(plan.origins),
        "began": now_text(),
        "ended": None,
        "exit_status": None,
    }


def now_text() -> str:
    """The time in UTC, ISO 8601."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")


#: What is said of reports that are there, in one line of all `ranks` of which it holds.
CASES: dict[str, Callable[[Outcome], object]] = {
    "the tables of {ranks} were not made on their nodes, merging reads their reports: "
    "rank {first.rank}: {first.not_reduced}": lambda outcome: outcome.not_reduced,
    "of {ranks} the tables were gathered, and no report": lambda outcome: outcome.is_tables_alone,
    "the reports stay on their nodes: rank {first.rank}'s is {first.stays_at} on "
    "{first.host}{others}": lambda outcome: outcome.is_tables_alone and outcome.stays_at,
}
OTHERS = ", and so on (report_at in each rank's state.json)"


def problems(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What is said of ranks, a line for each missing or incomplete report."""
    yield from (str(outcome) for outcome in outcomes if outcome.is_lost)
    for line, holds in CASES.items():
        if concerned := list(filter(holds, outcomes)):
            ranks, others = words.ranks(outcome.rank for outcome in concerned), concerned[1:]
            yield line.format(ranks=ranks, first=concerned[0], others=OTHERS if others else "")
    yield from (str(outcome) for outcome in outcomes if outcome.reason and not outcome.is_lost)


def print_problems(run: Window, outcomes: Sequence[Outcome]) -> bool:
    """Print what is wrong with reports; returns whether all are there."""
    for line in problems(outcomes):
        say(line)
    if outcomes:
        return not any(outcome.is_lost for outcome in outcomes)
    return bool(flights(run)[0])


# -- reports are saved before srun kills its tasks, and before the time limit --------------------


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
            if is_open and not process_ended(window.rank(rank), content):
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
