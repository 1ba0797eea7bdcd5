"""What each rank's agent read of its host's clocks: readings and marks.

Pure functions of what the agent wrote (as parsed from JSON) and of the rank's report. A report's
times are not quite the wall clock that the agent read: the profiler ties them to it once. How far
they are from it is bounded by marks (ranges in the report that the agent put between two readings
of the wall clock), or, without marks, assumed (`ANCHOR_NS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.time_stamps import DRIFT_LIMIT_PPM

#: the agent's own name, repeated: this package does not load what runs inside a rank
MARK = "clusterprof:clock:"

#: how far a report's wall-clock times are from the host's wall clock, where there is no mark:
#: +7 to +130 µs over 18 nsys reports, a few µs in torch.profiler's
ANCHOR_NS = 200_000
#: 1970 to 2116; 36 years, by which no clock is wrong: sums of such times fit into 64 bits
FARTHEST_NS, APART_NS = 1 << 62, 1 << 60
#: the readings of one clock by two processes, and the profilers' stamps, agree to within this
STAMP_NS = 1_000
#: a wall clock that was set by less is not worth a warning
STEP_NS = 1_000
#: a report that was stretched by less cannot be told from one whose marks were delayed
STRETCHED_NS = 1_000_000


@dataclass(frozen=True)
class Mark:
    """A range of this name in the report, put between two readings of the wall clock (ns)."""

    name: str
    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class Reading:
    """What the host's clocks read at one event; the two readings lie `gap_ns` apart at most."""

    event: str
    wall_ns: int
    monotonic_ns: int
    gap_ns: int
    marks: tuple[Mark, ...] = ()

    @property
    def apart_ns(self) -> tuple[int, int]:
        """Least and most of wall minus monotonic time."""
        apart = self.wall_ns - self.monotonic_ns
        return apart - self.gap_ns, apart


@dataclass(frozen=True)
class RankReadings:
    """What one rank's agent wrote of its clocks; empty where it wrote nothing."""

    machine: str = ""
    readings: tuple[Reading, ...] = ()
    #: report time + this lies within [low, high] of the wall clock; None without marks
    anchor: tuple[int, int] | None = None

    @property
    def anchors(self) -> tuple[int, int]:
        """`anchor`, or what is assumed where it is unknown."""
        return self.anchor or (-ANCHOR_NS, ANCHOR_NS)


def parsed(
    clock: object,
    state: object = None,
    before: Iterable[Mapping[str, Any]] = (),
) -> RankReadings:
    """Read a rank's clock.json and state.json; what is not understood is left out.

    `before` has the same files of windows and attempts before this one, the first ones first. What
    was read on this machine then comes first: a clock that was set since is seen.
    """
    of_clock = clock if isinstance(clock, Mapping) else {}
    of_state = state if isinstance(state, Mapping) else {}
    written = of_clock.get("readings")
    written = [of_state.get("clock"), *(written if isinstance(written, list) else ())]
    readings = tuple(
        Reading(
            str(row.get("event", "")),
            row["wall_ns"],
            row["monotonic_ns"],
            row["gap_ns"],
            tuple(
                Mark(mark["name"], mark["before_ns"], mark["after_ns"])
                for mark in rows(row.get("marks"), "before_ns", "after_ns")
                if isinstance(mark.get("name"), str)
            ),
        )
        for row in rows(written, "wall_ns", "monotonic_ns", "gap_ns")
    )
    machine = str(of_clock.get("machine") or of_state.get("machine") or "")
    earlier = [parsed(**files) for files in before] if machine else []
    of_machine = [rank.readings for rank in earlier if rank.machine == machine]
    return RankReadings(machine, (*chain.from_iterable(of_machine), *readings))


def rows(values: object, *names: str) -> list[Mapping[str, Any]]:
    """Return the objects of a JSON list in which all these are integers of a possible size."""
    return [
        row
        for row in (values if isinstance(values, list) else ())
        if isinstance(row, Mapping)
        and all(type(row.get(name)) is int and abs(row[name]) < FARTHEST_NS for name in names)
    ]


def stepped(readings: Sequence[Reading]) -> tuple[int, int] | None:
    """By how much the wall clock was set (jumped) between the readings; None if it was not.

    Returns the least and the most, ns, of the largest jump between two neighbours. Exact: wall
    minus monotonic time is constant unless somebody sets the clock (a daemon that slews moves
    both), and each reading knows it to within its gap.
    """
    jumps = [
        (after.apart_ns[0] - before.apart_ns[1], after.apart_ns[1] - before.apart_ns[0])
        for before, after in pairwise(readings)
    ]
    steps = [(low, high) for low, high in jumps if low > STEP_NS or high < -STEP_NS]
    return max(steps, key=lambda step: abs(sum(step)), default=None)


def _marked_calls(host_calls: pa.Table) -> list[dict[str, Any]]:
    """Name, start and end of the marks in a report."""
    names = host_calls["name"].cast(pa.string())
    marks = host_calls.filter(pc.starts_with(names, MARK))
    return list(marks.select(["name", "start_ns", "end_ns"]).to_pylist())


def anchor(host_calls: pa.Table, readings: Sequence[Reading]) -> tuple[int, int] | None:
    """Bound what must be added to a report's times to get the wall clock, from its marks.

    `host_calls` has the schema of `clusterprof.tables`. None where the report has no mark, or
    its marks contradict each other (a report whose times were stretched or shifted).
    """
    marks = {mark.name: mark for reading in readings for mark in reading.marks}
    calls = [(marks[row["name"]], row) for row in _marked_calls(host_calls) if row["name"] in marks]
    if not calls:
        return None
    low = max(mark.before_ns - row["start_ns"] for mark, row in calls) - STAMP_NS
    high = min(mark.after_ns - row["end_ns"] for mark, row in calls) + STAMP_NS
    return (low, high) if -APART_NS < low <= high < APART_NS else None


def stretched(host_calls: pa.Table, readings: Sequence[Reading]) -> int | None:
    """By how much longer (ns) a report took between its marks than the monotonic clock says.

    None where the two agree, as far as clocks may drift, marks are missing, or the wall clock was
    not set between them. torch.profiler ties its times to the wall clock at both ends of the
    window: where that was set in between, it stretches or folds all of them. nsys does not.
    """
    if stepped([reading for reading in readings if reading.marks]) is None:
        return None
    began = {row["name"]: int(row["start_ns"]) for row in _marked_calls(host_calls)}
    # by the monotonic clock, in the report, and how long the mark took
    times = sorted(
        (mark.before_ns - reading.apart_ns[1], began[mark.name], mark.after_ns - mark.before_ns)
        for reading in readings
        for mark in reading.marks
        if mark.name in began
    )
    if len(times) < 2:
        return None
    first, last = times[0], times[-1]
    true = last[0] - first[0]
    stretch = last[1] - first[1] - true
    known_to = STRETCHED_NS + first[2] + last[2] + true * DRIFT_LIMIT_PPM * 1e-6
    return stretch if abs(stretch) > known_to else None


def warnings(readings: Mapping[int, RankReadings]) -> list[str]:
    """Return a warning for each rank whose host's wall clock was set inside the run."""
    steps = {rank: stepped(own.readings) for rank, own in sorted(readings.items())}
    return [
        f"rank {rank}: its host's wall clock was set by {sum(step) / 2e6:+.3f} ms during the run "
        "(NTP, or an administrator): times before and after are not on one clock"
        for rank, step in steps.items()
        if step is not None
    ]
