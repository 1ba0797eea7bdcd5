"""What the watch saw: who was late in each look at all ranks, and from when until when.

A look compares all ranks over the latest steps that their flight recorders hold. `watched.csv` in
the run directory has a row for each rank that was late in a look, and one without a rank for a look
in which none was: looks without a late rank are evidence as well.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from math import hypot, sqrt
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from clusterprof import words
from clusterprof.agent.contracts import files, paths
from clusterprof.results import (
    Count,
    Length,
    Number,
    ShallowResults,
    Step,
    StepLength,
    Suspect,
    WatchEntry,
)

#: a row's `delays` where the steps' pace told it
BY_PACE = 2
#: looks at fewer undisturbed steps than these confirm a window, and do not contradict it
ENOUGH_STEPS = 50


@dataclass(frozen=True)
class Row:
    """One late rank of one look; or a look in which no rank was late, as rank -1."""

    #: when the look was made (wall clock of the launching host, ns)
    wall_ns: Count
    #: the steps that were compared: the first, the last, and how many of them
    first_step: Step
    last_step: Step
    steps: Number
    #: what a step took, the middle of the ranks' medians (ns); of a late rank while it was late
    step_ns: StepLength
    rank: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    host: str = ""
    group: str = ""
    #: how long its peers waited for it per step, and how far that may be wrong (ns)
    lateness_ns: Length = 0
    bound_ns: Length = 0
    #: 1: its peers' work was delayed by as much; 2: steps were longer by as much than before; 0:
    #: whether anything was delayed cannot be determined
    delays: Annotated[int, Meta(ge=0, le=2)] = 0
    #: the first and the last of the steps in which it was late
    since_step: Step = 0
    until_step: Step = 0

    @property
    def late_steps(self) -> int:
        """In about how many of the steps that were compared the rank was late."""
        return min(self.until_step + 1 - self.since_step, self.steps)

    @property
    def all_steps(self) -> range:
        """The steps from the first to the last that was compared."""
        return range(self.first_step, self.last_step + 1)


_COLUMNS = [field.name for field in fields(Row)]


@dataclass(frozen=True)
class Late:
    """A rank that delayed the others in one look or in several in a row."""

    rank: int
    host: str
    group: str
    #: the first step in which it was late, and about when that was (ns)
    since_step: int
    since_ns: int
    #: a step by which it was late no more; None: it was so in the last look
    until_step: int | None
    #: it is no more late for certain: one look alone may not show it
    is_over: bool
    #: mean over the steps of all looks, and how far that may be wrong (ns)
    lateness_ns: float
    bound_ns: float
    #: what a step took meanwhile (ns)
    step_ns: float
    #: those that have no late step in common, and in how many steps it was late
    looks: int
    steps: int
    #: it was late in the run's first step that was compared
    from_start: bool = False
    #: the lateness is how much longer steps were than before
    by_pace: bool = False

    @property
    def end_step(self) -> int:
        """A step by which it was late no more, or the first that no look has had."""
        return self.since_step + self.steps if self.until_step is None else self.until_step

    @property
    def is_chronic(self) -> bool:
        """Whether it was late in several looks in a row: it has become usual for the run."""
        return self.looks >= 3

    def suspect(self, first_step: int = -1) -> Suspect:
        """The same as a suspect of all ranks; late always where it was so from `first_step` on."""
        return {
            "rank": self.rank,
            "lateness_ns": round(self.lateness_ns),
            "bound_ns": round(self.bound_ns),
            "group": self.group,
            "host": self.host or None,
            "since_step": self.since_step if self.since_step > first_step else None,
            "until_step": None if self.until_step is None else self.until_step - 1,
            "late_steps": None,
            "delays": True,
            "line": None,
            "step_ns": round(self.step_ns),
            "looked_steps": self.steps,
            "by_pace": self.by_pace,
        }

    def sentence(self) -> str:
        """Who is late, by how much, and since when."""
        where = f" ({words.plain(self.host)})" if self.host else ""
        verb, then = "was", f", until step {self.until_step}"
        if self.until_step is None:
            verb, then = "is", "; chronic" if self.is_chronic else ""
        lateness = words.with_bound(self.lateness_ns, self.bound_ns)
        share = words.percent(self.lateness_ns / max(self.step_ns, 1.0))
        since = "from the start" if self.from_start else f"since step {self.since_step}"
        much = f"{verb} late by {lateness} per step ({share} of it)"
        return f"rank {self.rank}{where} {much} {since}{then}"


def path_of(run: Path) -> Path:
    """The table's place in a run directory."""
    return run / paths.WATCHED


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write a table of all looks so far. Raises OSError."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    table.writerows(map(astuple, rows))
    files.write(str(path), text.getvalue())


def read(path: Path) -> list[Row]:
    """The rows of a table, in order; none where there is no table. What is no row is left out."""
    rows = list[Row]()
    with contextlib.suppress(OSError, ValueError, csv.Error):  # what comes before is read
        # a table of a look a minute over a month, several ranks late in each, is smaller
        text = files.content(path, 64 << 20).decode(errors="replace")
        rows += filter(None, map(_row, csv.DictReader(text.splitlines())))
    return rows


def _row(entry: dict[str, str]) -> Row | None:
    try:
        row = msgspec.convert(entry, Row, strict=False)
    except msgspec.ValidationError:
        return None
    within = row.rank < 0 or row.first_step <= row.since_step <= row.until_step <= row.last_step
    return row if within and row.first_step <= row.last_step else None


def lateness(rows: Sequence[Row]) -> list[Late]:
    """Who delayed the others from when until when, over all looks, in the order in which it began.

    A rank that is late in looks that follow each other is late all that time: what happens in
    the steps between two looks is not known. One look in which noise hides it is none without it.
    Once it delays the others, looks that show it late and do not tell whether that delays anything
    go on with it; alone they name no rank.
    """
    times = _Times()
    for look in _looks(rows):
        late_rows = {row.rank: row for row in look if row.rank >= 0}
        for rank in [rank for rank in times.going if rank not in late_rows]:
            times.miss(rank, look[0].first_step)
        for rank in times.begun.keys() - late_rows.keys():
            del times.begun[rank]
        for row in late_rows.values():
            times.take(row)
    first = min((row.first_step for row in rows), default=0)
    every = [replace(late, from_start=late.since_step <= first) for late in times.all()]
    return sorted(every, key=lambda late: (late.since_ns, late.rank))


class _Times:
    """When ranks were late, by the looks so far."""

    def __init__(self) -> None:
        self.ended: list[Late] = []
        #: the rows of those that are late still, by rank
        self.going: dict[int, list[Row]] = {}
        #: the first step of the look before, for those that it does not show
        self.absent: dict[int, int] = {}
        #: the row of the look before of a rank that it shows late to its end, whatever that delays
        self.begun: dict[int, Row] = {}

    def miss(self, rank: int, first_step: int) -> None:
        """Take that a look from `first_step` on does not show a rank: the second one ends it."""
        if rank in self.absent:
            self._end(rank, self.absent.pop(rank))
        else:
            self.absent[rank] = first_step

    def take(self, row: Row) -> None:
        """Take the row of a rank that a look shows late."""
        self.absent.pop(row.rank, None)
        begun, goes_on = self.begun.pop(row.rank, None), row.until_step == row.last_step
        if row.delays or row.rank in self.going:
            from_before = [begun] if begun and row.since_step == row.first_step else []
            self.going.setdefault(row.rank, from_before).append(row)
        elif goes_on:
            self.begun[row.rank] = row
        if row.rank in self.going and not goes_on:
            self._end(row.rank, row.until_step + 1)

    def _end(self, rank: int, until_step: int) -> None:
        self.ended.append(_late(self.going.pop(rank), until_step, is_over=True))

    def all(self) -> list[Late]:
        """Those that have ended, and those that go on."""
        going = [_late(rows, self.absent.get(rank)) for rank, rows in self.going.items()]
        return [*self.ended, *going]


def _looks(rows: Sequence[Row]) -> list[list[Row]]:
    when = attrgetter("wall_ns")
    return [[*look] for _, look in itertools.groupby(sorted(rows, key=when), when)]


def _late(rows: Sequence[Row], until_step: int | None, *, is_over: bool = False) -> Late:
    """One rank's rows of looks in a row."""
    first, telling = rows[0], [row for row in rows if row.delays]
    steps = sum(row.late_steps for row in telling)
    return Late(
        first.rank, first.host, first.group,
        since_step=first.since_step,
        since_ns=first.wall_ns - (first.last_step + 1 - first.since_step) * first.step_ns,
        until_step=until_step,
        is_over=is_over,
        lateness_ns=sum(row.lateness_ns * row.late_steps for row in telling) / steps,
        # what chance has in one look it has not in the next, as far as that is of other steps
        bound_ns=hypot(*(row.bound_ns * row.late_steps for row in telling)) / steps
        * sqrt(steps / _once(telling)),
        step_ns=sum(row.step_ns * row.late_steps for row in telling) / steps,
        looks=_apart(rows),
        steps=_once(telling),
        by_pace=any(row.delays == BY_PACE for row in telling),
    )  # fmt: skip


def _apart(rows: Sequence[Row]) -> int:
    """How many of the looks have no late step in common. `rows` are in the order of the looks.

    Looks that follow each other closely compare mostly the same steps, and count as one.
    """
    count, until = 0, -math.inf
    for row in rows:
        # after a restart of the job its steps are counted anew
        if row.since_step > until or row.last_step < until:
            count, until = count + 1, row.until_step
    return count


def _once(rows: Sequence[Row]) -> int:
    """In about how many steps the rank was late, those of several looks counted once."""
    count, until = 0, -1
    for row in rows:
        again = min(until, row.until_step) + 1 - row.since_step if row.last_step >= until else 0
        count += max(row.late_steps - max(again, 0), 0)
        until = row.until_step
    return max(count, 1)


def over_the_run(shallow: ShallowResults, rows: Sequence[Row]) -> ShallowResults:
    """What the window's flight recorders show, with what all looks at the running job show.

    Of a rank that is late in both the looks tell more: they have more steps, and no profiler is in
    them.
    """
    if not rows:
        return shallow
    first_step, looks = min(row.first_step for row in rows), _looks(rows)
    watch: WatchEntry = {
        "looks": len(looks),
        "first_step": first_step,
        "last_step": max(row.last_step for row in rows),
        "steps": _step_count(look[0].all_steps for look in looks),
        "step_ns": looks[-1][0].step_ns,
        "late": [{"rank": rank, "steps": _once(late)} for rank, late in _rows_of(rows).items()],
    }
    late = [rank.suspect(first_step) for rank in _by_rank(lateness(rows))]
    # of one that was late in the window's steps the looks tell until when as well
    window = max(shallow["steps"], default=first_step)
    covered = {
        s["rank"]
        for s in late
        if s["until_step"] is None or (s["since_step"] or 0) <= window <= s["until_step"]
    }
    of_window = [s for s in shallow["suspects"] if s["rank"] not in covered]
    every = [*late, *(s for s in of_window if not _is_overruled(s, watch))]
    every.sort(key=lambda s: (not s["delays"], -s["lateness_ns"], s["rank"]))
    return {**shallow, "suspects": every, "watch": watch}


def _is_overruled(suspect: Suspect, watch: WatchEntry) -> bool:
    """Whether many more steps of looks show that one was not usually late that was so in the
    window's steps.
    """
    late = sum(entry["steps"] for entry in watch["late"] if entry["rank"] == suspect["rank"])
    return watch["steps"] >= ENOUGH_STEPS and late <= watch["steps"] / 2


def _rows_of(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows of each rank that was late in any look."""
    of_rank: dict[int, list[Row]] = {}
    for row in sorted(rows, key=attrgetter("rank", "wall_ns")):
        if row.rank >= 0:
            of_rank.setdefault(row.rank, []).append(row)
    return of_rank


def _by_rank(late: Sequence[Late]) -> list[Late]:
    """Each rank once; of one that was late again and again the mean over all steps from the first
    in which it was to the last.
    """
    times_of: dict[int, list[Late]] = {}
    for one_time in late:
        times_of.setdefault(one_time.rank, []).append(one_time)
    return [times[0] if len(times) == 1 else _overall(times) for times in times_of.values()]


def _overall(times: Sequence[Late]) -> Late:
    first, last = times[0], times[-1]
    whole = max(last.end_step - first.since_step, 1)
    parts = [(t, (t.end_step - t.since_step) / whole) for t in times]
    return replace(
        first,
        until_step=last.until_step,
        is_over=last.is_over,
        lateness_ns=sum(t.lateness_ns * part for t, part in parts),
        bound_ns=hypot(*(t.bound_ns * part for t, part in parts)),
        looks=sum(t.looks for t in times),
        steps=sum(t.steps for t in times),
    )


def _step_count(spans: Iterable[range]) -> int:
    """How many steps there are in spans that may overlap."""
    count = until = 0
    for span in sorted(spans, key=lambda span: span.start):
        count += max(span.stop - max(span.start, until), 0)
        until = max(until, span.stop)
    return count


def news(before: Sequence[Late], now: Sequence[Late]) -> list[str]:
    """What a look has changed, in sentences: who is late now, chronically, or no longer."""
    was = {(late.rank, late.since_step): _state(late) for late in before}
    changed = [late for late in now if was.get((late.rank, late.since_step)) != _state(late)]
    return sentences(changed)


def _state(late: Late) -> tuple[bool, bool]:
    return late.is_over, late.is_chronic and not late.is_over


def sentences(late: Sequence[Late]) -> list[str]:
    """A sentence for each node and each group whose ranks are late at the same time, the latest
    rank first.

    At the same time: what is late of it at all is late, or was until about the same step.
    """
    joint: dict[tuple[object, ...], list[Late]] = {}
    for rank in late:
        place = (rank.host,) if rank.host else ("", rank.group)
        joint.setdefault((*place, rank.until_step, _state(rank)), []).append(rank)
    return list(map(_sentence, joint.values()))


def _sentence(late: Sequence[Late]) -> str:
    """One node's late ranks, or one group's."""
    first, *others = sorted(late, key=lambda rank: (-rank.lateness_ns, rank.rank))
    if not others:
        return first.sentence()
    where = "this node" if first.host else f"group {words.plain(first.group)}"
    tense = ("is", "are") if first.until_step is None else ("was", "were")
    ranks = words.ranks(rank.rank for rank in others)
    return f"{first.sentence()}; {ranks} of {where} {tense[len(others) > 1]} late as well"
