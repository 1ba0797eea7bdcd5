"""`clusterprof status RUN`: how far each rank is, from what it has written so far. Only reads."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterprof import console, pauses, run_directory, watched, words
from clusterprof.agent.contracts.states import State
from clusterprof.agent.contracts.timing import REAL
from clusterprof.arguments import StepWindow, selected, shortest
from clusterprof.cli import Parser, verb_parser
from clusterprof.collect.live_windows import SILENT_S, current, silent_s, steps_logged
from clusterprof.errors import RunDirectoryError
from clusterprof.launch import screen
from clusterprof.launch.watch import LiveHang, hang_of
from clusterprof.merge_run import recorded_timeout, run_pauses
from clusterprof.results import PausesResults
from clusterprof.run_directory import Window

WATCH_S = 2.0
SCHEMA_VERSION = 1
#: who was late further back is in watched.csv
_LATE_SHOWN = 8
#: kinds of pauses, the costliest; and of how many ranks: most ranks of a job have each of them
_PAUSES_SHOWN, _PAUSES_OF = 6, 8


def parser(verb: str) -> Parser:
    """The verb's options."""
    summary = "How far the ranks of a run are, from what they have written so far."
    examples = ("status runs/...", "status runs/... --watch")
    parser = verb_parser(verb, summary, *examples, run="a run directory")
    parser.add_argument("--all", action="store_true", help="unprofiled ranks as well")
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    parser.add_argument("--watch", action="store_true", help="repeat until the run has ended")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print how far the run is; with --watch until it has ended."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    run = run_directory.opened(arguments.run)
    if arguments.json:
        print(json.dumps(look(run).as_json(), indent=1))
        return 0
    while True:
        now = look(run)
        print(render(now, everyone=arguments.all), flush=True)
        if not arguments.watch or now.ended:
            return 0
        REAL.sleep(WATCH_S)
        # A terminal shows the newest in place; a file has one after the other.
        clear = "\033[2J\033[H"
        console.styled(f"{clear if sys.stdout.isatty() else ''}\n", [clear])


def render(status: Status, *, everyone: bool) -> str:
    """The run, each rank to profile, and all others, a line each, within the terminal's width."""
    width = console.width(10_000)  # in a file a line each, as programs read them
    shown = [rank for rank in status.ranks if rank.chosen or everyone]
    others = [rank for rank in status.ranks if not rank.chosen and not everyone]
    table = ["", *_table(shown, status.window, width)] if shown else []
    lines = _summary(others, is_below=bool(shown)) if others else []
    lines += _below_ranks(status)
    head, *rest = [console.wrapped(line, width, "  ") for line in (_headline(status), *lines)]
    return "\n".join([*head, *table, *(printed for line in rest for printed in line)])


def _below_ranks(status: Status) -> list[str]:
    """What is told of the run as a whole: what hangs, who is late, its pauses, later windows."""
    lines: list[str] = []
    if status.hang is not None:
        lines += ["", *status.hang.lines()]
    lines += _watched(status)
    if status.pauses is not None:
        entries = pauses.costliest(status.pauses, _PAUSES_SHOWN)
        lines += ["", *map(pauses.sentence, entries), *pauses.warnings(status.pauses)]
    if not status.ranks:
        lines.append(f"no rank has reported in{'' if status.ended else ' yet'}")
    lines += map(_later, status.later_windows)
    return lines


def _summary(ranks: Sequence[RankStatus], *, is_below: bool) -> list[str]:
    """The states of unprofiled ranks, and how far they are; `is_below` the others, if there are."""
    # where nothing stands above, a later window may have profiled them
    whose = words.counted(len(ranks), "unprofiled rank" if is_below else "rank")
    reached = ""
    if steps := [rank.steps for rank in ranks if rank.steps is not None]:
        fewest = f"{min(steps)} to " if min(steps) < max(steps) else ""
        reached = f", {fewest}{words.counted(max(steps), 'step')}"
    states = _counts(rank.state for rank in ranks)
    return [f"{'and ' if is_below else ''}{whose}: {states}{reached}"]


def _counts(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())


def _table(ranks: Sequence[RankStatus], window: StepWindow, width: int) -> list[str]:
    """A line for each rank; where the terminal is narrower, its reason below it, then no host."""

    def progress(steps: int) -> str:
        if steps < window.first:
            return f"in {window.first - steps} steps"
        return f"step {steps - window.first + 1} of {len(window)}" if steps < window.end else "past"

    rows = [("rank", "state", "steps", "window", "host", "last update", "")]
    rows += [
        (
            str(rank.rank), rank.state, "-" if rank.steps is None else str(rank.steps),
            progress(rank.steps or 0), rank.host or "-", words.age(rank.silent_s), rank.reason,
        )
        for rank in ranks
    ]  # fmt: skip
    lines = console.table(rows)
    if max(map(len, lines)) <= width:
        return lines
    lines = console.table([row[:-1] for row in rows])
    if max(map(len, lines)) > width:
        lines = console.table([(*row[:4], row[5]) for row in rows])
    reasons = [console.wrapped(f"    {row[-1]}", width, "    ") if row[-1] else [] for row in rows]
    return [text for line, reason in zip(lines, reasons, strict=True) for text in (line, *reason)]


def _watched(status: Status) -> list[str]:
    """The present by the looks at all ranks, and who was late before."""
    if not status.looks:
        return []
    run = "" if status.ended else shortest(status.run)
    lines = ["", *screen.lines(status.looks, REAL.wall_ns(), run)]
    late = [rank for rank in watched.lateness(status.looks) if rank.until_step is not None]
    ended = watched.sentences(late)
    if len(ended) > _LATE_SHOWN:
        before = words.counted(len(ended) - _LATE_SHOWN, "time")
        lines.append(f"ranks were late {before} before:")
    return [*lines, *ended[-_LATE_SHOWN:]]


def _later(window: WindowStatus) -> str:
    which = selected(window.ranks) if window.profiler != "none" else "no rank"
    result = " (its result is the run's)" if window.is_result else ""
    states = _counts(window.states.values()) or "no rank has the order yet"
    text = f"window {window.number}{result}: steps {window.steps}, {which}: {states}"
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in window.reasons.items():
        ranks_of.setdefault(reason, []).append(rank)
    why = [f"{words.ranks(ranks)}: {reason}" for reason, ranks in ranks_of.items()]
    return "; ".join([text, *["merged"] * window.merged, *why])


def _headline(status: Status) -> str:
    until = datetime.fromisoformat(status.ended) if status.ended else datetime.now(timezone.utc)
    took = words.age((until - datetime.fromisoformat(status.began)).total_seconds())
    how = f"ended with status {status.exit_status} after {took}"
    if not status.ended:
        how = f"began {took} ago"
        # the training of a rank that was captured goes on
        alive = [
            rank.silent_s
            for rank in status.ranks
            if not rank.ended or (rank.state == State.CAPTURED and rank.is_updated)
        ]
        silent = min((s for s in alive if s is not None), default=None)
        next_step = f"if the job has ended: clusterprof collect {status.run}"
        if silent is not None and silent > SILENT_S:
            how += f"; no update for {words.age(silent)}; {next_step}"
        elif silent is None and any(rank.ended for rank in status.ranks):
            how += f"; its ranks have ended; {next_step}"
    return f"{status.run}: {how}; window {status.window}"


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
    def is_updated(self) -> bool:
        """Whether its step log was written lately."""
        return self.silent_s is not None and self.silent_s <= SILENT_S

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the rank's own processes."""
        state = State.of({"state": self.state})
        return state is not None and state.ended


@dataclass(frozen=True)
class WindowStatus:
    """A later window of the run."""

    number: int
    steps: str
    #: as they were asked for
    ranks: str
    profiler: str
    #: of the profiled ranks that have the order
    states: dict[int, str]
    #: of those of them that give any
    reasons: dict[int, str]
    merged: bool
    #: its result is the run's: it is the second window of `--ranks auto`
    is_result: bool


@dataclass(frozen=True)
class Status:
    """One run."""

    run: Path
    began: str
    ended: str | None
    exit_status: int | None
    window: StepWindow
    ranks: list[RankStatus]
    later_windows: list[WindowStatus]
    #: what hangs, or hung until the job ended; None for nothing
    hang: LiveHang | None = None
    #: what the looks at all ranks while the job ran have shown so far
    looks: list[watched.Row] = field(default_factory=list)
    #: what has interrupted it so far, by the step logs of some of its ranks; None for nothing
    pauses: PausesResults | None = None

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        content = {"schema_version": SCHEMA_VERSION, **asdict(self), "run": str(self.run)}
        content["hang"] = None if self.hang is None else self.hang.as_json()
        del content["looks"]
        content["late"] = [asdict(late) for late in watched.lateness(self.looks)]
        content["window"] = [self.window.first, self.window.end]
        return content


def look(run: Window) -> Status:
    """Read the run directory as it is now. Raises RunDirectoryError where it is none."""
    manifest = run.directory.read_manifest()
    expected = set(manifest.selection.expected(manifest.world_size) or ())
    run = run.directory.first(manifest.attempt)  # the whole run, from its first window on
    later = [_window(window) for window in run.directory.later_windows()]
    if manifest.ended is None:  # a job that was started again names its last attempt as it ends
        run = current(run)
    states = run.states()
    return Status(
        run.path, manifest.began, manifest.ended, manifest.exit_status, manifest.window,
        [_rank(run, rank, states.get(rank, {}), rank in expected)
         for rank in sorted(expected | set(states))],
        [window for window in later if window], hang_of(run),
        watched.read(watched.path_of(run.directory.path)), _pauses(run),
    )  # fmt: skip


def _pauses(run: Window) -> PausesResults | None:
    """What has interrupted the run so far."""
    interruptions = run_pauses(run, few=_PAUSES_OF)
    if interruptions is None:
        return None
    timeout = recorded_timeout(run)
    return {**interruptions, "timeout_ns": timeout.ns, "timeout_assumed": timeout.is_assumed}


def _window(run: Window) -> WindowStatus | None:
    """A later window; None where its order cannot be read."""
    try:
        order = run.order()
    except RunDirectoryError:
        return None
    assert order is not None
    run = current(run)
    states = {rank: state for rank, state in run.states().items() if state.get("chosen")}
    return WindowStatus(
        order.number, str(StepWindow(*order.steps)), order.selection.text, order.profiler,
        {rank: str(state.get("state", "not known")) for rank, state in states.items()},
        {rank: str(state["reason"]) for rank, state in states.items() if state.get("reason")},
        run.html.exists(), run.is_deep,
    )  # fmt: skip


def _rank(run: Window, rank: int, state: dict[str, Any], expected: bool) -> RankStatus:
    folder, steps = run.rank(rank), state.get("steps")
    if not isinstance(steps, int):
        steps = steps_logged(folder)
    silence_s = silent_s(folder)
    return RankStatus(
        rank=rank,
        chosen=bool(state.get("chosen", expected)),
        state=str(state.get("state", "not seen yet")),
        steps=steps,
        host=str(state.get("host", "")),
        silent_s=max(0.0, round(silence_s, 1)) if silence_s < math.inf else None,
        reason=str(state.get("reason", "")),
    )
