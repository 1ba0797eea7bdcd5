"""How far the ranks of a run are, from what they have written so far. Only reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterprof.agent.contracts import paths
from clusterprof.agent.contracts.states import State
from clusterprof.arguments import StepWindow
from clusterprof.collect.outcomes import newest_step_log
from clusterprof.run_directory import RunDirectory

SCHEMA_VERSION = 1
#: Without an update for so long a rank may be gone: step logs are written once a minute, at the
#: end of a step.
SILENT_S = 150.0


@dataclass(frozen=True)
class RankStatus:
    """One rank, according to its files."""

    rank: int
    chosen: bool
    state: str
    #: steps that had ended when the log was last written, a minute ago at most; None before that
    steps: int | None
    host: str
    #: seconds since a file of this rank was last written, by the clock of the file server
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
        """Seconds since the last update by a rank that has not ended; None where all have."""
        alive = [each.silent_s for each in self.ranks if not each.ended]
        return min((each for each in alive if each is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        content = {**asdict(self), "run": str(self.run)}
        content["window"] = [self.window.first, self.window.end]
        return {"schema_version": SCHEMA_VERSION, **content}


def look(run: RunDirectory) -> Status:
    """Read the run directory as it is now. Raises RunDirectoryError where it is none."""
    manifest = run.read_manifest()
    expected = set(manifest.selection.expected(manifest.world_size) or ())
    if manifest.ended is None:
        run = run.attempts()[-1]
    states = run.states()
    return Status(
        run.path, manifest.began, manifest.ended, manifest.exit_status, manifest.window,
        [_rank(run, rank, states.get(rank, {}), rank in expected)
         for rank in sorted(expected | set(states))],
    )  # fmt: skip


def _rank(run: RunDirectory, rank: int, state: dict[str, Any], expected: bool) -> RankStatus:
    folder = run.rank(rank)
    steps = state.get("steps")
    newest = None
    with contextlib.suppress(OSError):
        newest = max((each.stat().st_mtime for each in folder.iterdir()), default=None)
    return RankStatus(
        rank=rank,
        chosen=bool(state.get("chosen", expected)),
        state=str(state.get("state", "not seen yet")),
        steps=steps if isinstance(steps, int) else _logged(folder),
        host=str(state.get("host", "")),
        silent_s=None if newest is None else max(0.0, round(time.time() - newest, 1)),
        reason=str(state.get("reason", "")),
    )


def _logged(folder: Path) -> int | None:
    """Steps in the rank's newest log and its summaries."""
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
