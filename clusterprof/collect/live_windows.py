"""Later windows of a job that runs: which steps can still be captured, and whether one is over."""

from __future__ import annotations

import bisect
import contextlib
import getpass
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof import words
from clusterprof.agent.contracts import files, paths, plan as plans, states
from clusterprof.agent.contracts.plan import LaterWindow, Plan
from clusterprof.agent.contracts.states import State
from clusterprof.arguments import Selection, StepWindow
from clusterprof.collect.outcomes import Outcome, flights_over, newest_step_log
from clusterprof.errors import RunDirectoryError
from clusterprof.folders import beside_steps
from clusterprof.run_directory import Manifest, Window, writing

#: Without an update for so long a rank may be gone: step logs are written once a minute, at the
#: end of a step.
SILENT_S = 150.0
#: How long an order is on its way once it was read: the rank looks for it each 2 s
#: (`steps.FLUSH_NS`), and hosts' clocks may differ by as much.
ON_ITS_WAY_S = 4.0
#: The same where ranks expect it (`--ranks auto`): they look for it each 0.1 s (`steps.SOON_NS`),
#: and clocks need not be compared (`Pace.written_s`). One that comes too late is repeated.
SOON_ON_ITS_WAY_S = 0.75
#: no time of a log is beyond it
_BEYOND_NS = 1 << 62
#: Of so many seconds between two looks for an order, half as many are added: a rank may get on
#: faster than it did.
FASTER = 0.5
#: the end of a step log that tells a rank's pace: some 50 steps
LATEST_B = 2048
#: A rank's latest steps are so many, or the last block of its summary, and the usual step is that
#: of as many before, or more.
LATEST = 20


class Pace(NamedTuple):
    """How far a rank is."""

    #: steps that had ended at `at_s` (wall clock)
    steps: int
    at_s: float
    #: what a step takes
    step_s: float
    #: when that was written, by the clock of the file server, s
    written_s: float = math.inf

    def age_s(self, now_s: float, server_now_s: float | None) -> float:
        """How long that is ago: by two hosts' clocks, or longer by the file server's alone."""
        by_server_s = 0.0 if server_now_s is None else server_now_s - self.written_s
        return max(now_s - self.at_s, by_server_s)


def current(run: Window) -> Window:
    """The run, or a later window of it, in the latest attempt."""
    return replace(run, attempt=run.directory.first().attempts()[-1].attempt)


def silent_s(folder: Path) -> float:
    """Seconds since a file in a rank's folder was written; infinite where there is none."""
    with contextlib.suppress(OSError):
        newest = max((file.stat().st_mtime for file in folder.iterdir()), default=-math.inf)
        return time.time() - newest
    return math.inf


def trains(run: Window, rank: int) -> bool:
    """Whether this rank's program runs, by what it has written."""
    folder = run.logged(rank)
    state = State.of(states.read(str(folder)))
    # The first window's report is collected only where somebody takes the job for ended.
    ended = state in (State.COUNTED, State.COLLECTED)
    return state is not None and not ended and silent_s(folder) < SILENT_S


def sample(run: Window) -> list[int]:
    """Some of the ranks: a job slows or hangs as a whole."""
    ranks = run.ranks()
    return ranks[:: max(1, len(ranks) // 8)]


def is_silent(run: Window) -> bool:
    """Whether ranks have reported in, and none of them runs any more."""
    run = current(run)
    ranks = run.ranks()
    return bool(ranks) and not any(trains(run, rank) for rank in ranks)


def going_on(run: Window) -> list[int]:
    """The ranks that may yet leave something of a later window; none where it is over."""
    manifest, order = run.directory.read_manifest(), run.order()
    if order is None or manifest.ended:
        return []
    run, root = current(run), current(run.directory.first())
    profiled, states_of = root.ranks(), run.states()
    over = flights_over(run, states_of)
    if order.profiler != "none":
        expected = run.expected_ranks() or ()
        if states_of or expected:
            chosen = {rank for rank, state in states_of.items() if state.get("chosen")}
            profiled = sorted(chosen.union(expected))
        over = {rank for rank in profiled if _has_ended(run, rank, states_of.get(rank))}
    return [rank for rank in profiled if rank not in over and trains(root, rank)]


def _has_ended(run: Window, rank: int, state: Mapping[str, Any] | None) -> bool:
    """Whether no report of this rank is to come, by its state; None where it has left nothing."""
    if state is None:
        # The whole window in an earlier attempt: the rank is not asked again.
        return states.captured_before(str(run.rank(rank)))
    now = State.of(state)
    return now is not None and now.ended


def check_running(run: Window, manifest: Manifest) -> Plan:
    """What the run's ranks do, which look for orders. Raises RunDirectoryError where none does."""
    owner = run.path.stat().st_uid
    _refuse([
        (run.number > 1, f"{run.path} is a later window of a run",
         f"name the run: clusterprof capture {run.directory.path}"),
        (manifest.ended, f"the job of {run.path} has ended",
         f"its reports: clusterprof merge {run.path}"),
        (manifest.hosts,
         f"the hosts of {run.path} share no folder with this one, in which they could look",
         "choose the steps when the job is started: clusterprof ssh --steps A:B"),
        (os.geteuid() not in (0, owner),
         f"{run.path} is another user's ({owner}), whose ranks obey no order of yours",
         "have that user order the window"),
    ])  # fmt: skip
    try:
        for_agent = plans.read(str(run.directory.plan))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{run.directory.plan} cannot be read", str(error)) from None
    _refuse([
        (not for_agent.log_s,
         f"the ranks of {run.path} look for no order: its clusterprof was an older one",
         "later windows can be captured once the job is started again"),
        (is_silent(run),
         f"no rank of {run.path} has written anything for {words.age(SILENT_S)}",
         f"if the job has ended: clusterprof collect {run.path}"),
    ])  # fmt: skip
    return for_agent


def _refuse(refusals: Iterable[tuple[object, str, str]]) -> None:
    """Raise RunDirectoryError for the first that is so, with its next step."""
    for is_so, what, then in refusals:
        if is_so:
            raise RunDirectoryError(what, then)


def of_running(run: Window, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """What was collected of a window; of ranks that may yet leave a report, that they run.

    The state in which such a rank is tells what happened to it only once the job has ended.
    """
    if run.directory.read_manifest().ended:
        return [*outcomes]
    status = f"clusterprof status {run.directory.path}"
    why = f"its program still runs: merge again when it has ended ({status})"
    return [
        outcome if outcome.report or not trains(run, outcome.rank) else replace(outcome, reason=why)
        for outcome in outcomes
    ]


def check_over(run: Window) -> None:
    """Raise RunDirectoryError for a later window that ranks may still capture."""
    if going := going_on(run):
        raise RunDirectoryError(
            f"window {run.number} of {run.directory.path} is not over on {words.ranks(going)}",
            f"clusterprof status {run.directory.path} shows how far each rank is",
        )


def logged(folder: Path, size_b: int) -> tuple[list[list[int]], list[list[int]]]:
    """The last rows, of so many bytes, of a rank's newest step log and of its summary."""
    log = newest_step_log(folder)
    if log is None:
        return [], []
    summary = log.with_name(beside_steps(log.name, paths.PACE))
    return _last_rows(log, 3, size_b), _last_rows(summary, 8, size_b)


def steps_logged(folder: Path) -> int | None:
    """How many steps a rank had made when its log was last written; None where it has no step."""
    rows, blocks = logged(folder, LATEST_B)
    ends = [row[0] + 1 for row in rows[-1:]] + [sum(block[:2]) for block in blocks[-1:]]
    return max(ends, default=None)


def extent_ns(folder: Path) -> tuple[int, int] | None:
    """When the first step of a rank began and the last one had ended, by its newest step log.

    Wall clock, ns; None where it has no step.
    """
    log = newest_step_log(folder)
    if log is None:
        return None
    begins, ends = list[int](), list[int]()
    for name, cells, place in ((paths.STEPS, 3, 1), (paths.PACE, 8, 2)):
        table = log.with_name(beside_steps(log.name, name))
        rows = [*_first_row(table, cells), *_last_rows(table, cells, LATEST_B)]
        rows = [row for row in rows if 0 <= row[place] <= row[place + 1] < _BEYOND_NS]
        begins += [row[place] for row in rows]
        ends += [row[place + 1] for row in rows]
    return (min(begins), max(ends)) if begins else None


def _first_row(table: Path, columns: int) -> list[list[int]]:
    """The first line below the names of a step log's columns, as a list; none where it is none."""
    with contextlib.suppress(OSError, ValueError), files.opened(table) as file:
        line = file.read(LATEST_B).split(b"\n")[1:-1][:1]
        return [row for text in line if len(row := [*map(int, text.split(b","))]) == columns]
    return []


def pace_of(folder: Path) -> Pace | None:
    """How far the rank with this folder is; None where its step log does not tell."""
    steps, blocks = logged(folder, LATEST_B)
    log, written_s = newest_step_log(folder), math.inf
    if log is not None:
        with contextlib.suppress(OSError):
            written_s = log.stat().st_mtime
        # a look at all ranks may have had the steps written since the log was
        watched = log.with_name(beside_steps(log.name, paths.WATCH_STEPS))
        latest = _last_rows(watched, 3, LATEST_B)
        steps = max(steps, latest, key=lambda rows: rows[-1][0] if rows else -1)
    paces = []
    if steps:
        last, _, end_ns = steps[-1]
        paces.append((last + 1, end_ns, _quick_ns([end - begin for _, begin, end in steps])))
    if blocks:
        first, count, _, end_ns, median_ns, *_ = blocks[-1]
        paces.append((first + count, end_ns, float(median_ns)))
    if not paces:
        return None
    done, end_ns, step_ns = max(paces)
    return Pace(done, end_ns / 1e9, max(step_ns, 1.0) / 1e9, written_s)


def _quick_ns(took: list[int]) -> float:
    """The mean step of the quickest so many in a row, of a rank's latest (ns).

    Not of all: with one that waited for a report the next ones would seem far away, and of those
    before a first window many are slower; ranks rather come too soon. Nor of single ones: a host
    that runs ahead of its GPU makes several in no time, and waits for it in the next.
    """
    count = min(LATEST, max(1, len(took) // 2))
    until = [*accumulate(took, initial=0)]
    return min(end - begin for begin, end in zip(until, until[count:], strict=False)) / count


class Slower(NamedTuple):
    """A rank whose latest steps take longer than those before."""

    rank: int
    #: the medians of the latest steps, and of all before
    step_ns: int
    usual_ns: int


def slower(run: Window, times: float) -> Slower | None:
    """The rank whose latest steps are most above its usual, if they are above `times` that.

    Steps inside of windows do not count: a profiler makes them longer.
    """
    run = current(run)
    inside = [window.disturbed for window in windows(run)]
    paces = [
        Slower(rank, *both)
        for rank in sample(run)
        if (both := _latest_and_usual(run.logged(rank), inside))
    ]
    slowest = max(paces, key=lambda pace: pace.step_ns / pace.usual_ns, default=None)
    return slowest if slowest and slowest.step_ns > times * slowest.usual_ns else None


def _latest_and_usual(folder: Path, windows: list[range]) -> tuple[int, int] | None:
    """What the latest steps take, and those before, ns; None where a rank has made too few."""
    steps, blocks = logged(folder, 1 << 20)  # more than a log and its summary have
    rows = [  # end, how many, what each takes
        *((end, 1, end - begin) for step, begin, end in steps
          if not any(step in window for window in windows)),
        *((row[3], row[1], row[4]) for row in blocks),
    ]  # fmt: skip
    rows.sort(reverse=True)
    counts = [*accumulate(count for _, count, _ in rows)]
    latest = bisect.bisect_left(counts, LATEST) + 1
    if not rows or counts[-1] < counts[min(latest, len(rows)) - 1] + LATEST:
        return None
    return _median(rows[:latest]), _median(rows[latest:])


def _median(rows: list[tuple[int, int, int]]) -> int:
    """The middle one of all steps of the rows, ns; at least 1."""
    rows = sorted(rows, key=itemgetter(2))
    counts = [*accumulate(count for _, count, _ in rows)]
    return max(1, rows[bisect.bisect_left(counts, counts[-1] / 2)][2])


def _last_rows(table: Path, columns: int, size: int) -> list[list[int]]:
    """The last whole lines, of so many bytes, of a step log or its summary: none of no such."""
    with contextlib.suppress(OSError, ValueError), files.opened(table) as file:
        file.seek(max(0, table.stat().st_size - size))
        lines = file.read().rpartition(b"\n")[0].split(b"\n")[1:]
        return [row for line in lines if len(row := [*map(int, line.split(b","))]) == columns]
    return []


class Possible(NamedTuple):
    """What can still be captured."""

    #: no rank will have reached it once it has an order that is written now
    first: int
    #: each rank's
    paces: list[Pace]

    def at_s(self, step: int) -> float:
        """About when ranks come to this step (wall clock, s), by the newest log, of equals by that
        of the last rank: steps may have been of another length before.
        """
        pace = max(self.paces, key=lambda pace: (pace.at_s, -pace.steps))
        return pace.at_s + (step - pace.steps) * pace.step_s


def server_s(run: Window) -> float | None:
    """What the clock of the run directory's file server says now, s; None where it does not."""
    try:
        os.utime(run.directory.path)
        return run.directory.path.stat().st_mtime
    except OSError:
        return None


def possible(
    run: Window, log_s: float, now_s: float, server_now_s: float | None = None
) -> Possible:
    """What can be captured by an order that is written now, where ranks look each `log_s`.

    `server_now_s`: now by the file server's clock, where ranks expect the order and have just had
    their steps written: by it no clock of a host is needed. Raises RunDirectoryError where no
    rank's steps are known.
    """
    run = current(run)
    ranks = [rank for rank in run.ranks() if trains(run, rank)]
    paces = [pace for rank in ranks if (pace := pace_of(run.logged(rank)))]
    if not paces:
        raise RunDirectoryError(
            f"no rank of {run.directory.path} has written its steps yet",
            f"try again in {log_s:g} s: step logs are written that often",
        )
    way_s = ON_ITS_WAY_S if server_now_s is None else SOON_ON_ITS_WAY_S
    later_s = (1 + FASTER) * log_s + way_s
    steps_of = ((pace, (pace.age_s(now_s, server_now_s) + later_s) / pace.step_s) for pace in paces)
    reached = (pace.steps + math.ceil(max(0.0, steps)) for pace, steps in steps_of)
    # A window that opens at a step begins when the one before it ends.
    free = max((window.end for window in windows(run)), default=0)
    return Possible(max(max(reached) + 1, free), paces)


def windows(run: Window, *, profiled: bool = False) -> Iterator[StepWindow]:
    """The steps of each window that is there already; of those alone in which ranks are `profiled`.

    Of all, recorders are saved after the last step.
    """
    for window in (run.directory.first(), *run.directory.later_windows()):
        with contextlib.suppress(RunDirectoryError):  # obeyed by no rank
            if not profiled or _is_profiled(window):
                yield window.window()


def switching_steps(run: Window) -> list[int]:
    """The steps in which the profiler's start or stop shows, of a window with reports.

    And of the run's other ones, which flight recorders may hold as well. Raises RunDirectoryError.
    """
    captures = {run.window(), *windows(run, profiled=True)}
    return sorted({step for window in captures for step in window.switching})


def _is_profiled(window: Window) -> bool:
    """Whether ranks capture a window; with `--ranks auto` the first one only shows which."""
    if (order := window.order()) is not None:
        return order.profiler != "none"
    manifest = window.directory.read_manifest()
    profiler = manifest.content.get("profiler")
    name = profiler.get("name") if isinstance(profiler, dict) else None
    return name != "none" and manifest.selection.kind != "auto"


def order(
    run: Window, steps: StepWindow, selection: Selection, profiler: str, auto: bool = False
) -> Window:
    """Write the order for the run's next window, and return that window.

    Each rank's writer, the process that writes its files, looks for orders and hands them on.
    `selection`: the ranks to profile; `profiler`: "torch", or "none" for flight recorders alone;
    `auto`: its result is to be the run's, as of `--ranks auto`, which captures no rank in the first
    window, looks at all, and then orders one for those that delay the others. Whoever makes the
    window's folder has its number. Raises RunDirectoryError.
    """
    user = f"user {os.getuid()}"
    with contextlib.suppress(KeyError, OSError):
        user = getpass.getuser()
    by, root = f"{user} on {os.uname().nodename}", run.directory.path
    number = max((window.number for window in run.directory.later_windows()), default=1)
    with writing(root / paths.WINDOWS, option="another run"):
        while True:
            number += 1
            ordered = Window(run.directory, number)
            with contextlib.suppress(FileExistsError):  # somebody else orders one as well
                ordered.path.mkdir(parents=True)
                break
        content = LaterWindow(number, (steps.first, steps.end), selection, profiler, by, auto)
        files.write_json(plans.order_path(str(root), number), content.to_json(), indent=1)
    return ordered
