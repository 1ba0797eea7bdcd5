"""The job while it runs: who is late (`--watch`), and which ranks hang.

With `--watch` every rank saves its flight recorder at the same times (`agent.rank.recorder`). What
a look at all of them shows is added to `watched.csv`, what changes is said in a line, and the
present is written for Prometheus. That no step ends each rank's writer notices by itself, and
leaves what there is to be read here: since when, where, and what the rank waits for.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof import priority, watched, words
from clusterprof.agent.contracts import files, paths
from clusterprof.agent.contracts.plan import look_s
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.collect import live_windows
from clusterprof.collect.outcomes import flights
from clusterprof.console import say
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.results import HangResults
from clusterprof.run_directory import Window
from clusterprof.watched import Row

if TYPE_CHECKING:
    import pyarrow as pa

#: One rank is named by chance in a hundred hours of equal ranks, looked at once a minute.
CHANCE = 0.01 / 6_000
#: A clock tells who is late only where it is wrong by less than this part of a step: away from the
#: window, in which hosts' clocks are measured, they drift apart.
CLOCK_FRAC = 0.02
#: A look has so many steps at least, of which some were in the look before where few are new.
LEAST = 50
#: So long after the first new dump the others' are waited for.
PATIENCE_S = 10.0
#: How often it is looked whether ranks hang.
HANG_LOOK_S = 5.0


def watch_lateness(
    run: Window, every_s: int, metrics: Path | None = None, clock: Clock = REAL
) -> None:
    """Look whenever the ranks have saved their recorders, for as long as the job runs.

    `metrics`: the file that is written for Prometheus after each look, and where no step ends.
    """
    # the launching host may be one that trains
    priority.step_aside()
    table = watched.path_of(run.directory.path)
    newest = dict[int, int]()
    rows, silent, lacked = list[Row](), list[int](), set[int]()
    unwritten, why_none, is_explained = dict[Path, str](), "", False
    while True:
        clock.sleep(every_s - clock.wall_ns() / 1e9 % every_s)
        now = live_windows.current(run)
        before, newest = newest, wait_for_dumps(now, newest, every_s, clock)
        if newest == before:
            # it may be that ranks hang, and no step ends
            if metrics is not None:
                _unwritten(metrics, files.write, gauges(now, rows))
            if not newest and not why_none and (why_none := flights(now)[1]):
                say(f"who is late cannot be determined so far: {why_none}")
            continue
        # one that comes late to a look is there in the next
        was_silent, silent = silent, [r for r in now.ranks() if newest.get(r) == before.get(r)]
        if (lacking := {*silent} & {*was_silent}) - lacked:
            say(f"{words.ranks(lacking)} left no flight recorder for two looks: groups with them "
                "cannot be compared")  # fmt: skip
        lacked = lacking
        late = watched.lateness(rows)
        try:
            added = look(now, clock.wall_ns(), rows)
            if not added and not is_explained:
                say("ranks cannot be compared in this look: they have too few steps in common, or "
                    "no durations of collectives (gloo) and clocks that are not known to a "
                    "fiftieth of a step")  # fmt: skip
            is_explained, rows = is_explained or not added, [*rows, *added]
        except (ClusterprofError, OSError) as error:
            # one look that fails does not end the watch: a file system may answer again
            say(f"all ranks could not be looked at: {str(error).splitlines()[0]}")
            continue
        for sentence in watched.news(late, watched.lateness(rows)):
            say(f"step {rows[-1].last_step}, {words.wall_time(rows[-1].wall_ns)}: {sentence}")
        was_unwritten = unwritten
        unwritten = _unwritten(table, watched.write, rows)
        if metrics is not None:
            unwritten |= _unwritten(metrics, files.write, gauges(now, rows))
        for path in unwritten.keys() - was_unwritten.keys():
            say(f"{path} cannot be written: {unwritten[path]}; tried again after each look")


def _unwritten(path: Path, write: Callable[[Path, Any], None], content: Any) -> dict[Path, str]:
    """Write a file; returns why it could not be written, nothing where it was."""
    try:
        write(path, content)
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
    wait_s, began_s = look_s(len(ranks)), clock.now()
    while True:
        clock.sleep(min(wait_s, every_s / 4))
        saved = {rank: path.stat().st_mtime_ns for path, rank in _dumps(run)}
        new = sum(before.get(rank) != time_ns for rank, time_ns in saved.items())
        if new >= len(ranks) or clock.now() > began_s + min(PATIENCE_S + wait_s, every_s / 2):
            return saved if new else dict(before)


def _dumps(run: Window) -> list[tuple[Path, int]]:
    """The newest dump of each rank that has one."""
    from clusterprof.ingest.flight.all_dumps import find_dumps

    with contextlib.suppress(ReportError):
        dumps = find_dumps(run.folder, "watch")
        return [(path, rank) for path, rank in dumps if rank is not None]
    return []


def look(run: Window, wall_ns: int, before: Sequence[Row] = ()) -> list[Row]:
    """What the newest dumps of all ranks show; no row where they cannot be compared.

    Of the steps after those of the looks `before`, or of the last `LEAST` where fewer are new.
    """
    import numpy as np

    from clusterprof.analysis.model.shallow import lengthened, mean_step
    from clusterprof.merge_run import all_ranks

    steps = _steps(run)
    newest = max((int(log["step"][-1].as_py()) for log in steps.values() if len(log)), default=0)
    seen_step = before[-1].last_step if before else -1
    begin = min(seen_step + 1, newest + 1 - LEAST)
    profiled = [step for window in live_windows.windows(run) for step in range(*window)]
    compared, _ = all_ranks(run, [*range(begin), *profiled], steps, "watch", CHANCE, CLOCK_FRAC)
    if compared is None or not compared.results["steps"]:
        return []
    results = compared.results
    first, last = results["steps"][0], results["steps"][-1]
    of_look = (wall_ns, first, last, len(results["steps"]))
    rows = []
    for late in results["suspects"]:
        since = first if late["since_step"] is None else late["since_step"]
        until = last if late["until_step"] is None else late["until_step"]
        step_ns = round(mean_step(steps, np.arange(since, until + 1)))
        of_rank = late["rank"], late["host"] or "", late["group"]
        much = late["lateness_ns"], late["bound_ns"], int(late["delays"])
        if not late["delays"] and (healthy := _healthy(late["rank"], first, since, before)):
            # what its lateness delays is how much longer steps are since it began
            longer = lengthened(steps, healthy, range(since, until + 1), CHANCE)
            much = (*longer, 1) if longer is not None else much
        rows.append(Row(*of_look, step_ns, *of_rank, *much, since, until))
    return rows or [Row(*of_look, results["step_ns"])]


def _healthy(rank: int, first: int, since: int, before: Sequence[Row]) -> range:
    """The steps in which a rank was not late yet, of this look from `first` on or of the last one;
    none where it was late in all of them.
    """
    if since > first or not before:
        return range(first, since)
    last = [row for row in before if row.wall_ns == before[-1].wall_ns]
    was_late = any(row.rank == rank and row.until_step == row.last_step for row in last)
    return range(0) if was_late else range(last[0].first_step, first)


def gauges(run: Window, rows: Sequence[Row]) -> str:
    """The present for Prometheus: the last look, if any, who is late by it, and what hangs."""
    from clusterprof.export.prometheus import Gauge, rendered

    last = rows[-1:]
    late = [now for now in watched.lateness(rows) if now.until_step is None]
    labels = [{"rank": now.rank, "host": now.host} for now in late]
    hanging = sum(
        state.get("hangs", {}).get("until_ns", 0) is None for state in run.states().values()
    )
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
    for rank, state in run.states_of(ranks):
        hangs = state.get("hangs")
        if hangs is not None and hangs["until_ns"] is None:
            members = {name: hangs[name] for name in ("step", "since_ns", "line", "no_dump")}
            yield HangingRank(rank, **members)


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
