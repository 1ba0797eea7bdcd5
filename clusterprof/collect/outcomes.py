"""The outcome of each profiled rank: its report, or why it is missing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterprof import installed_nsys
from clusterprof.agent import nsys
from clusterprof.agent.contracts import files, paths, states
from clusterprof.agent.contracts.states import State
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.run_directory import Window
from clusterprof.words import ranks as named_ranks

#: A shared filesystem may show a file, and a guard may finish, a little after the launcher ended.
PATIENCE_S = 3.0
#: For a rank whose state is FINISHING: its report is being written.
FINISHING_S = 8.0

#: nsys' first, as it was written or as its (scrubbed) export; the trace is beside it, or alone.
_REPORTS = (paths.REPORT, "report.sqlite", "report.sqlite.xz", paths.TRACE)

#: flight recorders of a rank's processes, as JSON or a pickle
_FLIGHTS = [name.replace(".", "*.", 1) for name in (paths.FLIGHT, paths.FLIGHT_PICKLE)]
#: Of the run directory.
DELETED = "was deleted while the job ran"

#: Why there is no report, by the state in which the rank was killed.
_KILLED: dict[State | None, str] = {
    State.ARMED: "the program ended before it trained, or was killed before the window began",
    State.WAITING: "killed before the window began",
    State.CAPTURING: "killed inside the window, or ended by os._exit",
    State.FINISHING: "killed while the report was being written",
}


@dataclass(frozen=True)
class Outcome:
    """How one profiled rank ended."""

    rank: int
    #: COLLECTED or LOST
    state: State
    #: why there is no report, or why it is shorter than requested; "" for a whole report
    reason: str = ""
    host: str = ""
    #: the report, or where it was before its tables alone were kept
    report: Path | None = None
    #: a torch.profiler trace of the same window beside an nsys report
    trace: Path | None = None
    steps: Path | None = None
    #: the report has all of the window that the program ran
    whole: bool = False
    #: where the report is on its node, of which the tables alone were gathered; "" for nowhere
    stays_at: str = ""
    #: why its tables were not made on its node; "" where they were, or were not to be
    not_reduced: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether there is no report."""
        return self.state is State.LOST

    @property
    def is_tables_alone(self) -> bool:
        """Whether of its report there are the tables alone."""
        return self.report is not None and not self.report.exists()

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{f' lost{where}' if self.is_lost else ''}: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Its entry in run.json."""
        return {"rank": self.rank, "state": self.state, "reason": self.reason}


def collect_attempts(
    run: Window,
    expected: Sequence[int] | None,
    *,
    patience_s: float = PATIENCE_S,
    finishing_s: float = FINISHING_S,
    write: bool = True,
) -> tuple[Window, list[Outcome]]:
    """The attempt that is to be merged, and its ranks' outcomes.

    `expected` and `write` as in `collect`.

    An elastic launcher starts all ranks over when one has failed. Reports of two attempts do not
    belong together: the attempt with most whole windows is taken, then that with most reports,
    then the last. A rank that has a report in another attempt only says so in its reason.
    """
    attempts, outcomes_of = run.attempts(), {}
    reported_in: dict[int, int] = {}
    for attempt in attempts:
        # Only in the last attempt may something still be written.
        patience = patience_s if attempt is attempts[-1] else 0
        outcomes_of[attempt] = collect(
            attempt, expected, patience_s=patience, finishing_s=finishing_s, write=write
        )
        reported_in.update((o.rank, attempt.attempt) for o in outcomes_of[attempt] if o.report)
    best = max(attempts, key=lambda attempt: (
        sum(outcome.whole for outcome in outcomes_of[attempt]),
        sum(outcome.report is not None for outcome in outcomes_of[attempt]),
        attempt.attempt,
    ))  # fmt: skip
    outcomes = outcomes_of[best]
    for index, outcome in enumerate(outcomes):
        if not outcome.report and (number := reported_in.get(outcome.rank)):
            why = f"{outcome.reason}; attempt {number} has a report of it"
            outcomes[index] = replace(outcome, reason=why)
    return best, outcomes


def collect(
    run: Window,
    expected: Sequence[int] | None,
    *,
    patience_s: float = PATIENCE_S,
    finishing_s: float = FINISHING_S,
    write: bool = True,
    clock: Clock = REAL,
) -> list[Outcome]:
    """The outcome of every profiled rank of a job that has ended, by the files in `run`.

    `expected` are the ranks to profile; None where only the ranks know: then those whose states
    say so. Each is COLLECTED or LOST; with `write` their states say so too. Who only merges writes
    none: a copy of a run may be without its reports.
    """
    if patience_s > 0:
        states_of = _last_states(run, expected, patience_s, finishing_s, clock)
    else:
        states_of = run.states()
    if not run.path.is_dir():
        gone = f"the run directory {DELETED}"
        return [Outcome(rank, State.LOST, gone) for rank in sorted(expected or ())]
    profiled = _profiled(run, expected, states_of)
    outcomes = [_outcome(run, rank, states_of.get(rank), list(states_of)) for rank in profiled]
    for outcome in outcomes if write else ():
        _write(run.rank(outcome.rank), states_of.get(outcome.rank), outcome)
    return outcomes


def _last_states(
    run: Window, expected: Sequence[int] | None, patience_s: float, finishing_s: float, clock: Clock
) -> dict[int, dict[str, Any]]:
    """The ranks' states once no profiled rank writes any more, or patience is at its end."""
    begin, stalled_s = clock.now(), 0.0
    while True:
        # A harmless write. While the file system stalls so do the ranks' writers: their patience
        # begins when it responds.
        asked = clock.now()
        with contextlib.suppress(OSError):
            os.utime(run.path)
        took_s = clock.now() - asked
        begin, stalled_s = begin + took_s, max(stalled_s, took_s)
        states_of = run.states()
        ranks = {*_profiled(run, expected, states_of)}
        # A harmless write takes milliseconds, and a rank gives its writer some seconds. Where that
        # may not have been enough, what unprofiled ranks leave is still to come as well.
        if stalled_s > 0.1:
            ranks.update(states_of)
        contents = [(rank, states_of.get(rank, {})) for rank in ranks]
        writing = [State.of(state) for rank, state in contents if not ended(run.rank(rank), state)]
        wait_s = max(patience_s, finishing_s) if State.FINISHING in writing else patience_s
        if not writing or clock.now() > begin + wait_s or not run.path.is_dir():
            return states_of
        clock.sleep(0.1)


def _profiled(
    run: Window, expected: Sequence[int] | None, states_of: Mapping[int, Mapping[str, Any]]
) -> list[int]:
    """The ranks to profile, and those that were, by their states."""
    profiled = {*(expected or ())}
    for rank, state in states_of.items():
        # who shares a run may leave out all but the reports
        if state.get("chosen") if state else reports_in(run.rank(rank)):
            profiled.add(rank)
    return sorted(profiled)


def ended(folder: Path, content: dict[str, Any]) -> bool:
    """Whether a rank needs no more waiting: it may be killed once its report is here.

    A shared filesystem may show a rank's state before its report.
    """
    state = State.of(content)
    if state is State.FINISHING:
        return paths.REPORT in [path.name for path in reports_in(folder)]
    if state is not None and state.has_report:
        return bool(reports_in(folder))
    return state is not None and state.ended


def reports_in(folder: Path) -> list[Path]:
    """The reports in a rank's folder, nsys' first, and the one whose tables alone are there.

    The folder is listed, since NFS may remember for half a minute that a file was not there.
    """
    try:
        entries = list(folder.iterdir())
        names = {path.name for path in entries if path.name in _REPORTS and path.stat().st_size}
    except OSError:
        return []
    if folder / paths.REDUCED in entries:
        reduced = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            reduced = files.load(folder / paths.REDUCED / paths.REDUCED_RANK)["report"]["name"]
        # tables that do not tell are those of the report that is there, if one is
        if reduced in _REPORTS or not names:
            names.add(reduced if reduced in _REPORTS else paths.REPORT)
    return [folder / name for name in _REPORTS if name in names]


def _outcome(run: Window, rank: int, content: dict[str, Any] | None, present: list[int]) -> Outcome:
    """The outcome of one rank, by its state: None without a folder, which `present` ranks have."""
    if content is None:
        return Outcome(rank, State.LOST, _absent(run, rank, present))
    state, host = State.of(content), str(content.get("host", ""))
    steps, reports = newest_step_log(run.logged(rank)), reports_in(run.rank(rank))
    late = state is State.LOST and bool(content.get("late"))
    # A report appears by rename: where it is, it is whole, even if the rank was killed after it.
    if not reports or not (late or not content or (state is not None and state.has_captured)):
        return Outcome(rank, State.LOST, _lost(run, rank, state, content), host, steps=steps)
    return Outcome(
        rank, State.COLLECTED,
        "its report appeared late" if late else str(content.get("reason", "")), host,
        report=reports[0],
        trace=next((path for path in reports[1:] if path.name == paths.TRACE), None),
        steps=steps,
        whole=bool(content.get("whole")),
        stays_at=str(content.get("report_at", "")),
        not_reduced=str(content.get("not_reduced", "")),
    )  # fmt: skip


def _absent(run: Window, rank: int, present: list[int]) -> str:
    """Why a rank has no folder in a window, in which the ranks `present` have one."""
    if run.number > 1 and run.directory.first(run.attempt).rank(rank).is_dir():
        return "it ended before its window"
    if not present:
        return "no rank reported in"
    if present == list(range(len(present))):
        return f"no such rank: the job has {named_ranks(present)}"
    return f"it did not report in; reported in: {named_ranks(present)}"


def _lost(run: Window, rank: int, state: State | None, content: dict[str, Any]) -> str:
    """Why a rank has no report, by its last state and the reason given there."""
    reason = str(content.get("reason") or "")
    if state is State.FINISHING and content.get("report_at"):
        where = f"{content.get('host', '')} as {content['report_at']}"
        return f"killed before the tables of its report were made; the report stays on {where}"
    if state is not None and state.has_report:
        return (
            "its state says that there is a report, but there is none; if the file system "
            f"is slow: clusterprof collect {run.path}"
        )
    killed = _KILLED.get(state)
    with contextlib.suppress(OSError):
        if killed and nsys.free_bytes(str(run.rank(rank))) < 16384:  # a state has some kB
            last = f'"{state}" was the last state that could be written'
            return f"no space left on {run.path}: {last}"
    if state is State.FINISHING and reason:
        return f"{killed}, {reason}"
    return reason or killed or "it did not capture"


def _write(folder: Path, content: dict[str, Any] | None, outcome: Outcome) -> None:
    """Advance a rank's state to its outcome, if that can be written: the outcome holds without."""
    before = State.of(content or {})
    is_alone = content == {} and not outcome.is_lost  # a report alone, as somebody shared it
    if content is None or is_alone or before is outcome.state is State.LOST:
        return
    facts: dict[str, Any] = {}
    if outcome.is_lost:
        # A node that was cut off may yet deliver its report.
        may_appear = (State.CAPTURING, State.FINISHING, State.CAPTURED, State.COLLECTED)
        facts = {"reason": outcome.reason, "late": before in may_appear}
    elif before is State.LOST:
        facts = {"reason": outcome.reason}
    with contextlib.suppress(OSError):
        states.advance(str(folder), outcome.state, **facts)


def flights(run: Window) -> tuple[list[int], str]:
    """The ranks that left their flight recorder, and why the first of the others did not."""
    states = run.states()
    recorded = [rank for rank in states if _has_flight(run.rank(rank))]
    reasons = {rank: state.get("flight") for rank, state in states.items() if rank not in recorded}
    return recorded, next((f"rank {rank}: {why}" for rank, why in reasons.items() if why), "")


def is_looked_at(run: Window) -> bool:
    """Whether ranks left flight recorders of the window, or looks were made while the job ran."""
    return bool(flights(run.results)[0]) or (run.directory.path / paths.WATCHED).exists()


def flights_over(run: Window, states_of: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """The ranks that left their flight recorder, or say in their states why they did not."""
    return {r for r, state in states_of.items() if "flight" in state or _has_flight(run.rank(r))}


def _has_flight(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in _FLIGHTS)


def newest_step_log(folder: Path) -> Path | None:
    """The newest step log in a rank's folder: of the last process that kept one."""
    logs = sorted(folder.glob("steps*.csv"), key=lambda path: path.stat().st_mtime_ns)
    return logs[-1] if logs else None


def import_raw(run: Window) -> Iterator[tuple[int, str]]:
    """Have nsys' importer make a report of each raw one; yields rank and problem, "" for none."""
    for rank in run.ranks():
        folder = run.rank(rank)
        if (folder / paths.RAW).is_file() and not (folder / paths.REPORT).exists():
            try:
                yield rank, _import(folder)
            except (OSError, subprocess.TimeoutExpired) as error:
                yield rank, f"the report could not be made of {folder / paths.RAW}: {error}"


def _import(folder: Path) -> str:
    raw = folder / paths.RAW
    importer = next(filter(None, (tool.importer for tool in installed_nsys.installed())), None)
    if importer is None:
        return f"there is no QdstrmImporter here for {raw}: name an nsys that has one: --nsys"
    # The importer replaces nothing: it gets a folder of its own. It takes some 7 µs for each range.
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as private:
        report = Path(private, paths.REPORT)
        done = subprocess.run(
            [importer, "-i", str(raw), "-o", str(report)], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=900.0, check=False,
        )  # fmt: skip
        if done.returncode != 0 or not report.exists():
            last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
            return f"{importer} failed with status {done.returncode}: {last}"
        report.replace(folder / paths.REPORT)
    why = f"its report was made of {paths.RAW} after the job"
    states.advance(str(folder), State.COLLECTED, why)
    raw.unlink(missing_ok=True)  # somebody else may be collecting too
    return ""
