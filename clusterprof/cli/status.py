"""`clusterprof status RUN`: how far each rank is, from what the ranks have written. Only reads."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterprof import console, run_directory
from clusterprof.agent.contracts import paths
from clusterprof.agent.contracts.states import State
from clusterprof.collect import newest_step_log
from clusterprof.launch.settings import path
from clusterprof.ranks import Selection
from clusterprof.run_directory import RunDirectory
from clusterprof.step_window import StepWindow

SCHEMA_VERSION = 1
WATCH_S = 2.0
#: Step logs are written once a minute, and no sooner than a step ends.
SILENT_S = 150.0

_NOT_SEEN = "not seen yet"


@dataclass(frozen=True)
class RankStatus:
    """One rank, as its files tell it."""

    rank: int
    chosen: bool
    state: str
    #: steps that had ended when the log was last written, a minute ago at most; None before that
    steps: int | None
    host: str
    #: since a file of this rank was last written, by the clock of the file system's server
    silent_s: float | None
    reason: str

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the rank's own processes."""
        state = State.of({"state": self.state})
        return state is not None and state.ended


@dataclass(frozen=True)
class Status:
    """One run."""

    run: Path
    began: str
    ended: str | None
    exit_status: int | None
    window: StepWindow
    ranks: list[RankStatus]

    @property
    def silent_s(self) -> float | None:
        """Since any rank that has not ended gave a sign of life; None where none is left."""
        alive = [
            each.silent_s for each in self.ranks if each.silent_s is not None and not each.ended
        ]
        return min(alive, default=None)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run": str(self.run),
            "began": self.began,
            "ended": self.ended,
            "exit_status": self.exit_status,
            "window": [self.window.first, self.window.end],
            "ranks": [asdict(each) for each in self.ranks],
        }


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print how far the run is; with --watch until it has ended."""
    parser = argparse.ArgumentParser(
        prog=f"clusterprof {verb}",
        description="How far the ranks of a run are, from what they have written so far.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=path, help="a run directory")
    parser.add_argument("--all", action="store_true", help="the ranks that are not chosen as well")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON, once")
    parser.add_argument("--watch", action="store_true", help="again and again, until it has ended")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(list(own))
    run = run_directory.opened(arguments.run)
    if arguments.json:
        print(json.dumps(look(run).as_json(), indent=1))
        return 0
    while True:
        now = look(run)
        print(render(now, everyone=arguments.all), flush=True)
        if not arguments.watch or now.ended:
            return 0
        time.sleep(WATCH_S)
        # A terminal shows the newest in place; a file has one after the other.
        clear = "\033[2J\033[H"
        console.styled(f"{clear if sys.stdout.isatty() else ''}\n", [clear])


def look(run: RunDirectory) -> Status:
    """Read the run directory as it is now. Raises RunDirectoryError where it is none."""
    manifest = run.read_manifest()
    selection = Selection.from_json(manifest["selection"])
    expected = set(selection.expected(manifest.get("world_size")) or ())
    if manifest.get("ended") is None:
        run = run.attempts()[-1]
    seen = run.states()
    first, end = manifest["window"]
    return Status(
        run.path, manifest["began"], manifest.get("ended"), manifest.get("exit_status"),
        StepWindow(first, end),
        [_rank(run, rank, seen.get(rank, {}), rank in expected)
         for rank in sorted(expected | set(seen))],
    )  # fmt: skip


def _rank(run: RunDirectory, rank: int, state: dict[str, Any], expected: bool) -> RankStatus:
    folder = run.rank(rank)
    steps = state.get("steps")
    return RankStatus(
        rank=rank,
        chosen=bool(state.get("chosen", expected)),
        state=str(state.get("state", _NOT_SEEN)),
        steps=steps if isinstance(steps, int) else _logged(folder),
        host=str(state.get("host", "")),
        silent_s=_silence(folder),
        reason=str(state.get("reason", "")),
    )


def _logged(folder: Path) -> int | None:
    """Steps in the rank's newest log, the summaries beside it included."""
    log = newest_step_log(folder)
    if log is None:
        return None
    pace = log.with_name(paths.beside_steps(log.name, paths.PACE))
    ends = [sum(_last_line(log, (0,), 1)), sum(_last_line(pace, (0, 1), 0))]
    return max(ends) or None


def _last_line(log: Path, columns: Sequence[int], more: int) -> list[int]:
    """These columns of the last whole line, and `more`; nothing where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 256))
            whole = file.read().rpartition(b"\n")[0]
        cells = whole.rpartition(b"\n")[2].split(b",")
        return [*(int(cells[column]) for column in columns), more]
    return []


def _silence(folder: Path) -> float | None:
    """Seconds since the newest of the rank's files was written; None where it has none."""
    newest = None
    with contextlib.suppress(OSError):
        newest = max((each.stat().st_mtime for each in folder.iterdir()), default=None)
    return None if newest is None else max(0.0, round(time.time() - newest, 1))


def render(status: Status, *, everyone: bool) -> str:
    """The run in one line, then a line for each chosen rank, and one for all others."""
    lines = [_headline(status), ""]
    shown = [each for each in status.ranks if each.chosen or everyone]
    if shown:
        rows = [("rank", "state", "steps", "window", "host", "heard", "")]
        rows += [
            (
                str(each.rank), each.state, "-" if each.steps is None else str(each.steps),
                _place(each.steps, status.window), each.host or "-", _age(each.silent_s),
                each.reason,
            )
            for each in shown
        ]  # fmt: skip
        wide = [max(len(row[column]) for row in rows) for column in range(6)]
        lines += [_row(row, wide) for row in rows]
    others = [each for each in status.ranks if not each.chosen]
    if others and not everyone:
        lines.append(_others(others))
    if not status.ranks:
        lines.append("no rank has been seen yet")
    return "\n".join(lines)


def _row(cells: Sequence[str], wide: Sequence[int]) -> str:
    columns = [cell.ljust(width) for cell, width in zip(cells, wide, strict=False)]
    return "  ".join([*columns, cells[len(wide)]]).rstrip()


def _headline(status: Status) -> str:
    if status.ended:
        how = f"ended with status {status.exit_status} after {_age(_between(status))}"
    else:
        since = (datetime.now(timezone.utc) - datetime.fromisoformat(status.began)).total_seconds()
        how = f"began {_age(since)} ago"
        silent = status.silent_s
        if silent is not None and silent > SILENT_S:
            how += (
                f", and has given no sign of life for {_age(silent)}; "
                f"if the job is gone: clusterprof collect {status.run}"
            )
        elif silent is None and any(each.ended for each in status.ranks):
            how += (
                ", its ranks have ended; if the job is gone: "
                f"clusterprof collect {status.run}"
            )  # fmt: skip
    return f"{status.run}: {how}; window {status.window}"


def _between(status: Status) -> float:
    ended = datetime.fromisoformat(status.ended or status.began)
    return (ended - datetime.fromisoformat(status.began)).total_seconds()


def _place(steps: int | None, window: StepWindow) -> str:
    if steps is None or steps < window.first:
        return f"in {window.first - (steps or 0)} steps"
    if steps < window.end:
        return f"step {steps - window.first + 1} of {len(window)}"
    return "past"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _others(ranks: Sequence[RankStatus]) -> str:
    """The ranks that are not chosen, in one line."""
    states = Counter(each.state for each in ranks)
    told = ", ".join(f"{count} {state}" for state, count in states.most_common())
    steps = [each.steps for each in ranks if each.steps is not None]
    far = f", {min(steps)} to {max(steps)} steps" if steps else ""
    return f"and {len(ranks)} that are not chosen: {told}{far}"
