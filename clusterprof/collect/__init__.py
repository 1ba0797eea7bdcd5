"""What became of each chosen rank: bring its report to the run directory, or name the hole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterprof.agent.contracts import paths, states
from clusterprof.agent.contracts.states import State
from clusterprof.agent.nsys import free_bytes
from clusterprof.arguments import Selection
from clusterprof.run_directory import RunDirectory

#: A shared filesystem may show a file, and a guard may finish, a little after the launcher ended.
PATIENCE_S = 3.0
#: For a rank that says that its report is being written.
FINISHING_S = 8.0

#: nsys' first, as it was written or as its (scrubbed) export; the trace is beside it, or alone.
_REPORTS = (paths.REPORT, "report.sqlite", "report.sqlite.xz", paths.TRACE)

#: Of the run directory.
DELETED = "was deleted while the job ran"

#: A state has some kB.
_STATE_B = 16384

#: Why there is no report, by the state in which the rank was killed.
_KILLED = {
    State.ARMED: "the program ended before it trained, or was killed before the window began",
    State.WAITING: "killed before the window began",
    State.CAPTURING: "killed inside the window",
    State.FINISHING: "killed while the report was being written",
}


@dataclass(frozen=True)
class Outcome:
    """One chosen rank's end."""

    rank: int
    #: COLLECTED or LOST
    state: State
    #: why there is no report, or why it is shorter than asked for; "" where all is well
    reason: str = ""
    host: str = ""
    report: Path | None = None
    #: a torch.profiler trace of the same window beside an nsys report
    trace: Path | None = None
    steps: Path | None = None
    #: the report has all of the window that there was to be had
    whole: bool = False


def expected(manifest: Mapping[str, Any]) -> list[int] | None:
    """The ranks that a run was to profile, by its run.json; None where only the ranks knew.

    Those that were settled before are among them: one whose folder is gone since is missing.
    """
    told = set(Selection.from_json(manifest["selection"]).expected(manifest["world_size"]) or ())
    told.update(each["rank"] for each in manifest.get("outcomes", []))
    return sorted(told) or None


def collect_attempts(
    run: RunDirectory,
    expected: Iterable[int] | None,
    *,
    patience_s: float = PATIENCE_S,
    finishing_s: float = FINISHING_S,
) -> tuple[RunDirectory, list[Outcome]]:
    """Settle the ranks of every attempt; returns the attempt to merge, and its outcomes.

    An elastic launcher starts all ranks over when one has failed. Reports of two attempts do not
    belong together: the attempt with most whole windows is taken, then that with most reports,
    then the last. A rank that has none there but one elsewhere says so.
    """
    expected = None if expected is None else list(expected)
    every = run.attempts()
    settled = []
    for each in every:
        last = each is every[-1]
        settled.append(
            collect(
                each,
                expected,
                patience_s=patience_s if last else 0,
                finishing_s=finishing_s if last else 0,
            )
        )

    def worth(place: int) -> tuple[int, int, int]:
        reports = [one for one in settled[place] if one.report]
        return sum(one.whole for one in reports), len(reports), place

    best = max(range(len(every)), key=worth)
    elsewhere = {
        one.rank: every[place].attempt
        for place, outcomes in enumerate(settled)
        for one in outcomes
        if one.report and place != best
    }
    return every[best], [
        replace(one, reason=f"{one.reason}; attempt {elsewhere[one.rank]} has a report of it")
        if one.report is None and one.rank in elsewhere
        else one
        for one in settled[best]
    ]


def collect(
    run: RunDirectory,
    expected: Iterable[int] | None,
    *,
    patience_s: float = PATIENCE_S,
    finishing_s: float = FINISHING_S,
) -> list[Outcome]:
    """Settle every chosen rank of a job that has ended, over a shared filesystem.

    `expected` are the ranks that were chosen; None where only the ranks knew: then those
    that say they were. Each ends as `collected` or `lost`, on disk as well.
    """
    begin = time.monotonic()
    while True:
        if not run.path.is_dir():
            return [
                Outcome(rank, State.LOST, f"the run directory {DELETED}")
                for rank in sorted(expected or ())
            ]
        seen = run.states()
        chosen = sorted(
            set(expected or ())
            | {rank for rank, state in seen.items() if state.get("chosen")}
            # who shares a run may leave out all but the reports
            | {rank for rank, state in seen.items() if not state and reports_in(run.rank(rank))}
        )
        running = [rank for rank in chosen if not _ended(run, rank, seen.get(rank, {}))]
        finishing = [rank for rank in running if State.of(seen.get(rank, {})) is State.FINISHING]
        patience = max(patience_s, finishing_s) if finishing and patience_s else patience_s
        if not running or time.monotonic() > begin + patience:
            break
        time.sleep(0.1)
    return [_settle(run, rank, seen.get(rank), sorted(seen)) for rank in chosen]


def _ended(run: RunDirectory, rank: int, state: dict[str, Any]) -> bool:
    """Whether nothing more is to be waited for: a rank may be killed once its report is home.

    A shared filesystem may show a rank's state before its report.
    """
    found = State.of(state)
    if found is State.FINISHING:
        return paths.REPORT in [path.name for path in reports_in(run.rank(rank))]
    if found is None or found.has_report:
        return found is not None and bool(reports_in(run.rank(rank)))
    return found.ended


def reports_in(folder: Path) -> list[Path]:
    """The reports in a rank's folder, nsys' first.

    The folder is listed, since NFS may remember for half a minute that a file was not there.
    """
    try:
        here = [path for path in folder.iterdir() if path.name in _REPORTS and path.stat().st_size]
        return sorted(here, key=lambda path: _REPORTS.index(path.name))
    except OSError:
        return []


def _settle(run: RunDirectory, rank: int, state: dict[str, Any] | None, seen: list[int]) -> Outcome:
    """The end of one rank; advances its state."""
    folder = run.rank(rank)
    if state is None:
        return Outcome(rank, State.LOST, _never_seen(seen))
    host = str(state.get("host", ""))
    found = State.of(state)
    steps = newest_step_log(folder)
    reports = reports_in(folder)
    late = found is State.LOST and state.get("late")
    # A report appears by rename: where it is, it is whole, even if the rank was killed after it.
    if reports and (late or not state or (found is not None and found.has_captured)):
        reason = "its report appeared late" if late else str(state.get("reason", ""))
        if state:
            _advance(folder, State.COLLECTED, reason if late else None)
        beside = next((each for each in reports[1:] if each.name == paths.TRACE), None)
        return Outcome(
            rank, State.COLLECTED, reason, host, reports[0], beside, steps,
            whole=bool(state.get("whole")),
        )  # fmt: skip
    killed = _KILLED.get(found) if found is not None else None
    reason = str(state.get("reason") or killed or "it did not capture")
    if found is State.FINISHING and state.get("reason"):
        reason = f"{killed}, {reason}"
    if killed and _full(folder):
        reason = f'no space left on {run.path}: the rank could say no more than "{found}"'
    missing = found is not None and found.has_report
    if missing:
        reason = (
            "its state says that there is a report, but none is to be seen; if the file system "
            f"is slow: clusterprof collect {run.path}"
        )
    if found is not State.LOST:
        # A node that was cut off may yet bring its report.
        late = missing or found in (State.CAPTURING, State.FINISHING)
        _advance(folder, State.LOST, reason, late=late)
    return Outcome(rank, State.LOST, reason, host, steps=steps)


def _full(folder: Path) -> bool:
    """Whether there is no space for another state."""
    try:
        return free_bytes(str(folder)) < _STATE_B
    except OSError:
        return False


def _advance(folder: Path, state: State, reason: str | None = None, **facts: Any) -> None:
    """Say it in the rank's folder, if that can be written: what we return is true anyway."""
    with contextlib.suppress(OSError):
        states.advance(str(folder), state, reason, **facts)


def _never_seen(seen: list[int]) -> str:
    if not seen:
        return "no rank of the job was ever seen"
    if seen == list(range(len(seen))):
        return f"it was never seen: the job had ranks 0 to {seen[-1]}"
    return f"it was never seen; those that were: {', '.join(map(str, seen))}"


def newest_step_log(folder: Path) -> Path | None:
    """The step log of the last attempt that kept one."""
    logs = sorted(folder.glob("steps*.csv"), key=lambda path: path.stat().st_mtime_ns)
    return logs[-1] if logs else None
