"""The job while it runs: whom to capture (`--ranks auto`), who is late, and which ranks hang.

With `--ranks auto` the first window is captured on no rank: each leaves its steps, clock and flight
recorder. Once they are there, the ranks of a second window are chosen, and ordered as `clusterprof
capture` does. With `--watch` every rank saves its flight recorder at the same times
(`agent.rank.recorder`). What a look at all of them shows is added to `watched.csv`, what changes is
said in a line, and the present is written for Prometheus. That no step ends each rank's writer
notices by itself, and leaves what there is to be read here: since when, where, and what the rank
waits for.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof import priority, watched, words
from clusterprof.agent.contracts import files, paths, plan as plans
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.arguments import Selection, StepWindow, parse_ranks, shortest
from clusterprof.collect import live_windows
from clusterprof.collect.outcomes import flights, flights_over
from clusterprof.console import say
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.launch import screen
from clusterprof.results import HangResults, Suspect
from clusterprof.run_directory import Window
from clusterprof.watched import Row

if TYPE_CHECKING:
    import pyarrow as pa

    from clusterprof.columns import Floats
    from clusterprof.launch.planning import LaunchPlan
    from clusterprof.merge_run import Look

#: So many ranks are captured: as many as one reads reports of, and as a job should have stalled for
#: it.
MOST = 8
#: So often the second window is ordered, where the orders before came too late.
TRIES = 3
#: One rank is named by chance in a hundred hours of equal ranks, looked at once a minute.
CHANCE = 0.01 / 6_000
#: A clock tells who is late only where it is wrong by less than this part of a step: away from the
#: window, in which hosts' clocks are measured, they drift apart.
CLOCK_FRAC = 0.02
#: A look has so many steps at least, of which some were in the look before where few are new.
LEAST = 50
#: So long after the first new dump the others' are waited for, and after the latest that a first
#: window leaves.
PATIENCE_S = 10.0
#: So long what the nodes' probers measure at a look is waited for: they are asked as the dumps are.
MEASURED_S = 3.0
#: The first window's end is looked for this part of the time later that was waited for it, and at
#: most so many times as seldom as an order is.
PATIENT_FRAC = 0.02
SLOWER = 10
#: How often it is looked whether ranks hang.
HANG_LOOK_S = 5.0


# -- the look at all ranks after the first window ------------------------------------------------


def look_first(plan: LaunchPlan, run: Window, clock: Clock = REAL) -> None:
    """Wait for the first window's end, look at all ranks, and order the second window: again where
    the order came too late, since steps got shorter or the run directory is slow.
    """
    load()
    size = wait_for_ranks(plan, run, clock)
    if size == 0:
        return
    from clusterprof import merge_run

    run = live_windows.current(run)
    looked = merge_run.look(run)
    why = sentence(looked)
    if looked.steps:
        note(run, f"{why} (steps up to {plan.window.end - 1})")
    armed = {rank for rank, state in run.states().items() if "path" in state.get("nsys", {})}
    stages = parse_ranks("stages", pp=plan.arguments.pp or 1).stage_ranks(size)
    look_s = plans.look_s(size)
    server_s = live_windows.server_s(run)
    for _ in range(TRIES):
        if is_ending(run, why):
            return  # its result is that of the look
        ranks = chosen(looked, armed, stages)
        possible = live_windows.possible(run, look_s, clock.wall_ns() / 1e9, server_s)
        steps = StepWindow(possible.first, possible.first + len(plan.window))
        selection = Selection(",".join(map(str, ranks)), "ranks", tuple(ranks))
        window = live_windows.order(run, steps, selection, "torch", auto=True)
        began = clock.now()
        wait_s = max(0.0, possible.at_s(steps.first) - clock.wall_ns() / 1e9)
        say(f"{why}; capturing {words.ranks(ranks)} in steps {steps}, "
            f"in about {words.age(wait_s)}")  # fmt: skip
        late, reached = wait_for_order(window, ranks, look_s, wait_s + plans.SOON_S, clock)
        if not late:
            return
        # The next one may be on its way for as long. An nsys that has it captures no other.
        look_s, server_s = max(look_s, clock.now() - began), None
        looked, armed = without(looked, armed & reached), armed - reached
        why = f"the order came too late for {words.ranks(late)}"
    say(f"{why}, the last of {TRIES}: the result is that of the look at all ranks")


def is_ending(run: Window, why: str) -> bool:
    """Whether the job has ended, or will as a rank of it failed: that is said after `why`."""
    ended = [rank for rank, state in run.states().items() if "ended_ns" in state]
    if ended:
        say(f"{why}; nothing is captured, since {words.ranks(ended)} ended")
    return bool(ended) or live_windows.is_silent(run)


def look_once(plan: LaunchPlan, run: Window, clock: Clock = REAL) -> None:
    """Wait for the first window's end, look at all ranks, and say what that shows."""
    load()
    if wait_for_ranks(plan, run, clock):
        from clusterprof.merge_run import look

        looked = look(live_windows.current(run))
        line = f"{sentence(looked)} (steps up to {plan.window.end - 1})"
        say(line)
        if looked.steps:
            note(run, line)


def note(run: Window, line: str) -> None:
    """Keep what the first look has shown, in words, for a job that ends before it is merged."""
    with contextlib.suppress(OSError):
        files.write(run.directory.path / paths.LOOKED, f"{line}\n")


def load() -> None:
    """Load what a look needs, which takes a second, before ranks wait for what it shows."""
    for name in (
        "clusterprof.merge_run", "clusterprof.clock_probe", "clusterprof.align.clock.measured",
        "clusterprof.align.lateness", "clusterprof.analysis.model.shallow",
        "clusterprof.ingest.flight.all_dumps", "clusterprof.ingest.rank_steps",
        "clusterprof.report.whole_job", "pyarrow.csv",
    ):  # fmt: skip
        importlib.import_module(name)


def wait_for_order(
    window: Window, ranks: Sequence[int], every_s: float, seconds: float, clock: Clock = REAL
) -> tuple[list[int], set[int]]:
    """Wait until the ranks to be captured have the order, or one had it too late.

    Returns those that had it too late, and those that had it in time.
    """
    until, complete = clock.now() + seconds, False
    while True:
        clock.sleep(every_s)
        states = dict(live_windows.current(window).states_of(ranks))
        late = [rank for rank in states if states[rank].get("late")]
        # A rank's first state comes a moment before the one that says so.
        if late or complete or clock.now() > until:
            return late, {*states} - {*late}
        complete = len(states) == len(ranks)


def wait_for_ranks(plan: LaunchPlan, run: Window, clock: Clock = REAL) -> int:
    """Wait until all ranks have left what is to be looked at, or most have and the others are
    not coming; returns how many ranks there are, 0 where one is captured already.
    """
    came: set[int] = set()
    came_at = clock.now()
    began, size, every_s = came_at, plan.job.world_size, plans.LEAST_S
    while True:
        # not so often while a job starts that takes long to do so
        clock.sleep(max(every_s, min((clock.now() - began) * PATIENT_FRAC, every_s * SLOWER)))
        now = live_windows.current(run)
        states = now.states()
        if any(state.get("chosen") for state in states.values()):
            return 0
        sizes = [state.get("world_size") for state in states.values()]
        size = next((known_size for known_size in sizes if isinstance(known_size, int)), size)
        # Those of a job of unknown size may all be there the next moment.
        every_s = plans.look_s(size or 1)
        over = flights_over(now, states)
        if not over <= came:
            came, came_at = came | over, clock.now()
        if size is not None and len(over) >= size:
            return size
        if came and clock.now() > came_at + PATIENCE_S + every_s:
            return size or len(over)


def sentence(looked: Look) -> str:
    """What was seen, in words: of the few steps that it was seen in, and not of the job."""
    if not looked.ranks:
        return f"no rank can be looked at ({'; '.join(looked.warnings[:1])})"
    if not looked.steps:
        untimed = [text for text in looked.warnings if "are not timed" in text][:1]
        why = "; ".join(["no step is known of all members of a group", *untimed])
        return f"ranks cannot be compared: {why}"
    steps = words.counted(len(looked.steps), "step")
    if not looked.suspects:
        return f"no rank was late in {steps}, by their flight recorders"
    suspect = looked.suspects[0]
    late = words.ms(suspect["lateness_ns"])
    if not suspect["delays"]:
        return f"in {steps} the other ranks waited {late} per step for rank {suspect['rank']}"
    some = words.in_some(suspect["late_steps"], looked.steps) or f"in {steps}"
    return f"{some} rank {suspect['rank']} delayed the other ranks, by {late} per step"


def chosen(looked: Look, armed: Iterable[int], stages: Iterable[int]) -> list[int]:
    """The ranks to capture: suspects, each with a peer in each of its groups; at most `MOST`.

    Where no rank stands out these are rank 0 and the first rank of each stage, `stages` where the
    look shows none. Those that are `armed` run under an nsys that has a window still to take: they
    are taken as peers before others, and up to the limit, as they are slower by it anyway.
    """
    armed = sorted({*armed})
    suspects = [suspect["rank"] for suspect in looked.suspects]
    suspects = suspects or [0, *([min(stage) for stage in looked.stages] or stages)]
    ranks: list[int] = []
    for suspect in suspects:
        ranks.append(suspect)
        for members in looked.groups:
            if suspect in members:
                peers = [rank for rank in members if rank not in suspects]
                # of those that are captured anyway, if there is one
                ranks += [rank for rank in peers if rank in (*ranks, *armed)][:1] or peers[:1]
    return list(dict.fromkeys([*ranks, *armed]))[:MOST]


def without(looked: Look, spent: Collection[int]) -> Look:
    """The same, where these ranks are no peers."""
    groups = [tuple(r for r in members if r not in spent) for members in looked.groups]
    return looked._replace(groups=groups)


# -- the looks at all ranks of --watch -----------------------------------------------------------


def watch_lateness(
    run: Window, every_s: int, metrics: Path | None = None, clock: Clock = REAL,
    shows: bool = False,
) -> None:  # fmt: skip
    """Look whenever the ranks have saved their recorders, for as long as the job runs.

    `metrics`: the file that is written for Prometheus after each look, and where no step ends.
    `shows`: say after each look how the job is, and not only what has changed.
    """
    # the launching host may be one that trains
    priority.step_aside()
    watch = _Watch(run, every_s, metrics, clock, shows)
    while True:
        clock.sleep(every_s - clock.wall_ns() / 1e9 % every_s)
        watch.look_again()


@dataclass
class _Watch:
    """What the looks at a running job have shown so far, and what has been said of it."""

    run: Window
    every_s: int
    metrics: Path | None
    clock: Clock
    shows: bool
    #: the rows of all looks
    rows: list[Row] = field(default_factory=list)
    #: the lengths of the steps before each lateness that goes on, by rank (ns)
    usual: dict[int, Floats] = field(default_factory=dict)
    #: when each rank's newest dump was written (ns)
    newest: dict[int, int] = field(default_factory=dict)
    #: the ranks that left no dump for the last look, and those that left none for the last two
    silent: list[int] = field(default_factory=list)
    lacked: set[int] = field(default_factory=set)
    #: why there is no dump at all, once that is said
    why_none: str = ""
    #: it is said that ranks cannot be compared
    is_explained: bool = False
    #: what could not be written after the last look, and why
    unwritten: dict[Path, str] = field(default_factory=dict)

    def look_again(self) -> None:
        """Wait until the ranks have saved their recorders, and look at them."""
        now = live_windows.current(self.run)
        measured = _written(now, paths.PROBE)
        before = self.newest
        self.newest = wait_for_dumps(now, before, self.every_s, self.clock)
        if self.newest == before:
            # it may be that ranks hang, and no step ends
            _unwritten(self.metrics, partial(write_gauges, run=now, rows=self.rows))
            self._say_why_none(now)
            return
        self._say_who_lacks(now, before)
        wait_for_clocks(now, measured, self.clock)
        try:
            added = look(now, self.clock.wall_ns(), self.rows, self.usual)
        except (ClusterprofError, OSError) as error:
            # one look that fails does not end the watch: a file system may answer again
            say(f"all ranks could not be looked at: {str(error).splitlines()[0]}")
            return
        self._say_what_changed(added)
        self._write(now)

    def _say_why_none(self, now: Window) -> None:
        """Say once why no rank has left a dump so far."""
        if not self.newest and not self.why_none:
            self.why_none = flights(now)[1]
            if self.why_none:
                say(f"who is late cannot be determined so far: {self.why_none}")

    def _say_who_lacks(self, now: Window, before: Mapping[int, int]) -> None:
        """Say which ranks left no dump for two looks; `before`: when those before were written."""
        # one that comes late to a look is there in the next
        was_silent, was_lacking = self.silent, self.lacked
        self.silent = [r for r in now.ranks() if self.newest.get(r) == before.get(r)]
        self.lacked = {*self.silent} & {*was_silent}
        if self.lacked - was_lacking:
            say(f"{words.ranks(self.lacked)} left no flight recorder for two looks: groups with "
                "them cannot be compared")  # fmt: skip

    def _say_what_changed(self, added: list[Row]) -> None:
        """Take the rows of a look, and say what it has changed."""
        late = watched.lateness(self.rows)
        if not added and not self.is_explained:
            say("ranks cannot be compared in this look: they have too few steps in common, or "
                "no durations of collectives (gloo) and clocks that are not known to a "
                "fiftieth of a step")  # fmt: skip
        self.is_explained = self.is_explained or not added
        self.rows = [*self.rows, *added]
        for change in watched.news(late, watched.lateness(self.rows)):
            last = self.rows[-1]
            say(f"step {last.last_step}, {words.wall_time(last.wall_ns)}: {change}")
        if self.shows and added:
            name = shortest(self.run.directory.path)
            say(*screen.lines(self.rows, self.clock.wall_ns(), name))

    def _write(self, now: Window) -> None:
        """Write the table and the present for Prometheus; say what cannot be written."""
        was_unwritten, table = self.unwritten, watched.path_of(self.run.directory.path)
        self.unwritten = _unwritten(table, partial(watched.write, rows=self.rows))
        self.unwritten |= _unwritten(self.metrics, partial(write_gauges, run=now, rows=self.rows))
        for path in self.unwritten.keys() - was_unwritten.keys():
            say(f"{path} cannot be written: {self.unwritten[path]}; tried again after each look")


def _unwritten(path: Path | None, write: Callable[[Path], None]) -> dict[Path, str]:
    """Write a file, if it is asked for; returns why it could not be written."""
    if path is not None:
        try:
            write(path)
        except OSError as error:
            return {path: error.strerror or repr(error)}
    return {}


def wait_for_dumps(
    run: Window, before: Mapping[int, int], every_s: int, clock: Clock = REAL
) -> dict[int, int]:
    """Wait until all ranks have saved their recorders anew, or those that will have.

    Returns when each rank's newest dump was written (ns); as `before` where none is new.
    """
    ranks = run.ranks()
    wait_s, began_s = plans.look_s(len(ranks)), clock.now()
    while True:
        clock.sleep(min(wait_s, every_s / 4))
        saved = {rank: path.stat().st_mtime_ns for path, rank in _dumps(run)}
        new = sum(before.get(rank) != time_ns for rank, time_ns in saved.items())
        if new >= len(ranks) or clock.now() > began_s + min(PATIENCE_S + wait_s, every_s / 2):
            return saved if new else dict(before)


def wait_for_clocks(run: Window, before: Mapping[int, int], clock: Clock = REAL) -> None:
    """Wait until the nodes' clocks have been measured anew, where they were `before` (ns)."""
    wait_s, until_s = plans.look_s(len(before)), clock.now() + MEASURED_S
    while clock.now() < until_s:
        measured = _written(run, paths.PROBE)
        if all(measured.get(rank) != time_ns for rank, time_ns in before.items()):
            return
        clock.sleep(min(wait_s, MEASURED_S / 6))


def _written(run: Window, name: str) -> dict[int, int]:
    """When this file of each rank that has one was written (ns)."""
    times = dict[int, int]()
    for rank in run.ranks():
        with contextlib.suppress(OSError):
            times[rank] = (run.rank(rank) / name).stat().st_mtime_ns
    return times


def _dumps(run: Window) -> list[tuple[Path, int]]:
    """The newest dump of each rank that has one."""
    from clusterprof.ingest.flight.all_dumps import find_dumps

    with contextlib.suppress(ReportError):
        dumps = find_dumps(run.folder, "watch")
        return [(path, rank) for path, rank in dumps if rank is not None]
    return []


def look(
    run: Window, wall_ns: int, before: Sequence[Row] = (), usual: dict[int, Floats] | None = None
) -> list[Row]:
    """What the newest dumps of all ranks show; no row where they cannot be compared.

    Of the steps after those of the looks `before`, or of the last `LEAST` where fewer are new.
    `usual`: see `_with_cost`; it is kept from one look to the next.
    """
    from clusterprof.analysis.model.joint_suspects import joint_suspects
    from clusterprof.merge_run import all_ranks

    steps = _steps(run)
    newest = max((int(log["step"][-1].as_py()) for log in steps.values() if len(log)), default=0)
    seen_step = before[-1].last_step if before else -1
    begin = min(seen_step + 1, newest + 1 - LEAST)
    captures = live_windows.windows(run, profiled=True)
    disturbed = [*range(begin), *chain.from_iterable(window.disturbed for window in captures)]
    compared, _ = all_ranks(run, disturbed, steps, "watch", CHANCE, CLOCK_FRAC)
    if compared is None or not compared.results["steps"]:
        return []
    results = compared.results
    first, last, count = results["steps"][0], results["steps"][-1], len(results["steps"])
    of_look = Row(wall_ns, first, last, count, results["step_ns"])
    # what is late together makes steps longer once: it is stated of the first rank
    first_ranks = {late[0]["rank"] for late in joint_suspects(results)}
    rows = [_row(late, of_look, steps) for late in results["suspects"]]
    usual = {} if usual is None else usual
    for rank in usual.keys() - {row.rank for row in rows}:
        del usual[rank]
    rows = [
        _with_cost(row, steps, before, usual) if row.rank in first_ranks else row for row in rows
    ]
    return rows or [of_look]


def _row(late: Suspect, of_look: Row, steps: Mapping[int, pa.Table]) -> Row:
    """The row of one rank that is late by a look, of which `of_look` has no rank yet."""
    import numpy as np

    from clusterprof.analysis.model.shallow import mean_step

    first, last = of_look.first_step, of_look.last_step
    since = first if late["since_step"] is None else late["since_step"]
    until = last if late["until_step"] is None else late["until_step"]
    much = late["lateness_ns"], late["bound_ns"], int(late["delays"])
    step_ns = round(mean_step(steps, np.arange(since, until + 1)))
    return Row(
        of_look.wall_ns, first, last, of_look.steps, step_ns,
        late["rank"], late["host"] or "", late["group"], *much, since, until,
    )  # fmt: skip


def _with_cost(
    row: Row, steps: Mapping[int, pa.Table], before: Sequence[Row], usual: dict[int, Floats]
) -> Row:
    """The row of a rank that others wait for, with how much longer steps are since it began: that
    is what it delays, and no more than they wait for it. As it is where the steps do not tell.

    `usual` has the lengths of the steps before the lateness of each rank that is late still (ns).
    """
    from clusterprof.analysis.model.shallow import lengthened, step_lengths

    if healthy := _healthy(row.rank, row.first_step, row.since_step, before):
        usual[row.rank] = step_lengths(steps, healthy)
    if row.rank not in usual:
        return row
    late = step_lengths(steps, range(row.since_step, row.until_step + 1))
    longer = lengthened(usual[row.rank], late, CHANCE)
    if longer is None or (row.delays and sum(longer) >= row.lateness_ns - row.bound_ns):
        return row  # they do not tell, or agree: waits vary less than steps
    return replace(row, lateness_ns=longer[0], bound_ns=longer[1], delays=watched.BY_PACE)


def _healthy(rank: int, first: int, since: int, before: Sequence[Row]) -> range:
    """The steps in which a rank was not late yet, of this look from `first` on or of the last one;
    none where it was late in all of them.
    """
    if since > first or not before:
        return range(first, since)
    last = [row for row in before if row.wall_ns == before[-1].wall_ns]
    was_late = any(row.rank == rank and row.until_step == row.last_step for row in last)
    return range(0) if was_late else range(last[0].first_step, first)


def write_gauges(path: Path, run: Window, rows: Sequence[Row]) -> None:
    """Write the present for Prometheus. Raises OSError."""
    files.write(path, gauges(run, rows))


def gauges(run: Window, rows: Sequence[Row]) -> str:
    """The present for Prometheus: the last look, if any, who is late by it, and what hangs."""
    from clusterprof.export.prometheus import Gauge, rendered

    last = rows[-1:]
    late = [now for now in watched.lateness(rows) if now.until_step is None]
    labels = [{"rank": now.rank, "host": now.host} for now in late]
    hanging = len([*_hanging(run, run.ranks())])
    return rendered(
        [
            Gauge("look_timestamp_seconds", "When all ranks were last looked at.",
                  [({}, row.wall_ns / 1e9) for row in last]),
            Gauge("look_last_step", "The last step of that look.",
                  [({}, row.last_step) for row in last]),
            Gauge("look_step_seconds", "What a step took in that look.",
                  [({}, row.step_ns / 1e9) for row in last]),
            Gauge("rank_lateness_seconds", "By how much a rank is late per step, above noise.",
                  zip(labels, (now.lateness_ns / 1e9 for now in late), strict=True)),
            Gauge("rank_lateness_bound_seconds", "How far that may be wrong.",
                  zip(labels, (now.bound_ns / 1e9 for now in late), strict=True)),
            Gauge("hanging_ranks", "Ranks whose step does not end.", [({}, hanging)]),
        ],
        run.directory.path.name,
    )  # fmt: skip


def _steps(run: Window) -> dict[int, pa.Table]:
    """Each rank's latest steps, as they lie beside its dump; a damaged log leaves its rank out."""
    from clusterprof.ingest.flight.dump import OF_A_RUN
    from clusterprof.ingest.rank_steps import read_log

    logs = {}
    for path, rank in _dumps(run):
        named = OF_A_RUN.fullmatch(path.name)
        assert named is not None
        name = paths.numbered(paths.WATCH_STEPS, int(named[2] or 1))
        with contextlib.suppress(ReportError):
            logs[rank] = read_log(path.with_name(name))
    return logs


# -- ranks that hang -----------------------------------------------------------------------------


@dataclass(frozen=True)
class HangingRank:
    """One rank whose step does not end, by its state."""

    rank: int
    step: int
    #: when the step began, by the wall clock of the rank's host
    since_ns: int
    #: where its training was when it was noticed: `file:line function`
    line: str | None
    #: why there is no dump of its flight recorder
    no_dump: str | None
    #: the errors that its GPU has reported
    xids: tuple[int, ...] = ()


@dataclass(frozen=True)
class LiveHang:
    """What hangs in a run now, or hung until it ended; and why, if dumps tell."""

    ranks: tuple[HangingRank, ...]
    results: HangResults | None

    def lines(self) -> Iterator[str]:
        """The hang as text: since when, what is waited for, and where each rank is."""
        from clusterprof.report import text

        first = min(self.ranks, key=lambda rank: rank.since_ns)
        began = datetime.fromtimestamp(first.since_ns / 1e9, timezone.utc)
        does = "hangs" if len(self.ranks) == 1 else "hang"
        who = words.ranks(rank.rank for rank in self.ranks)
        yield f"{who} {does} in step {first.step}, since {began:%H:%M:%S} UTC"
        if self.results is None:
            reasons = sorted({rank.no_dump for rank in self.ranks if rank.no_dump})
            yield f"what they wait for cannot be determined: {'; '.join(reasons) or 'no dump yet'}"
        else:
            yield self.results["verdict"]
            yield from map(text.hang_sentence, self.results["hang"][1:])
        ranks_at: dict[str, list[int]] = defaultdict(list)
        for rank in self.ranks:
            ranks_at[rank.line or "an unknown line"].append(rank.rank)
        for line, ranks in sorted(ranks_at.items(), key=lambda pair: len(pair[1])):
            verb = "is" if len(ranks) == 1 else "are"
            yield f"{words.ranks(ranks)} {verb} at {words.plain(line)}"
        for rank in self.ranks:
            if rank.xids:
                numbers = words.listed(dict.fromkeys(rank.xids), 4)
                yield f"the GPU of rank {rank.rank} reported XID {numbers}"

    def as_json(self) -> dict[str, Any]:
        """What `clusterprof status --json` prints of it."""
        return {"ranks": [asdict(rank) for rank in self.ranks], "results": self.results}


def hang_of(run: Window) -> LiveHang | None:
    """What hangs in the run's last attempt; None for nothing."""
    from clusterprof.ingest.flight.all_dumps import find_dumps
    from clusterprof.merge_run import merge_dumps

    ranks = tuple(_hanging(run, run.ranks()))
    if not ranks:
        return None
    try:
        dumped_ranks = [rank.rank for rank in ranks if rank.no_dump is None]
        dumps = [pair for pair in find_dumps(run.folder, "hang") if pair[1] in dumped_ranks]
        return LiveHang(ranks, merge_dumps(dumps, {}))
    except ReportError:
        return LiveHang(ranks, None)


def _hanging(run: Window, ranks: list[int]) -> Iterator[HangingRank]:
    from clusterprof.hardware import xids_of

    for rank, state in run.states_of(ranks):
        hangs = state.get("hangs")
        if hangs is not None and hangs["until_ns"] is None:
            members = {name: hangs[name] for name in ("step", "since_ns", "line", "no_dump")}
            xids = tuple(error["xid"] for error in xids_of(state))
            yield HangingRank(rank, **members, xids=xids)


def watch_hangs(run: Window, clock: Clock = REAL) -> None:
    """Say of each hang what the job waits for, as long as it runs: again if more ranks hang."""
    before: set[int] = set()
    reported: set[int] = set()
    while True:
        clock.sleep(HANG_LOOK_S)
        latest = run.attempts()[-1]
        hanging = {rank.rank for rank in _hanging(latest, live_windows.sample(latest))}
        # Not at first sight: the ranks notice it within a few seconds of each other, and a rank
        # that has not would be taken for one without a dump.
        if hanging == before and not hanging <= reported:
            reported = hanging
            # Where no rank is known to wait for another the step may only be long.
            if (hang := hang_of(latest)) and (hang.results is None or hang.results["waiting"]):
                for line in hang.lines():
                    say(line)
        before, reported = hanging, reported & hanging
