"""What is known of ranks' clocks from outside of the collectives: readings, and bounds from them.

Pure functions of what the agent wrote (as parsed from JSON) and of the rank's report. A report's
times are not quite the wall clock that the agent read: the profiler ties them to it once. How far
they are from it is bounded by marks (ranges in the report that the agent put between two readings
of the wall clock), or, without marks, assumed (`ANCHOR_NS`).

An offset is a rank's clock minus another's, ns; a clock is here the one that a *report's* times are
in. It is bounded by three sources, each with what it rests on:

- `machine`: two processes under one running kernel read one wall clock;
- `probe`: an exchange of messages. A request sent at t1 (rank's clock) and received at t2 (other
  clock), answered at t3, received at t4: no message arrives before it is sent, hence the other
  clock is ahead by at most t2 - t1 and at least t3 - t4, whatever the two ways' delays (Cristian,
  NTP). Assumes nothing of the network;
- `report`: nsys puts all processes of one session on one time axis.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock.blocks import Block
from clusterprof.align.time_stamps import DRIFT_LIMIT_PPM
from clusterprof.columns import Floats, Ints
from clusterprof.tables import RankTables

#: the agent's own name, repeated: this package does not load what runs inside a rank
MARK = "clusterprof:clock:"
#: ... and what a measurement at a look of `--watch` says of when it was
LOOK = "look"

#: how far a report's wall-clock times are from the host's wall clock, where there is no mark:
#: +7 to +130 µs over 18 nsys reports, a few µs in torch.profiler's
ANCHOR_NS = 200_000
#: 1970 to 2116; 36 years, by which no clock is wrong: sums of such times fit into 64 bits
FARTHEST_NS, APART_NS = 1 << 62, 1 << 60
#: the readings of one clock by two processes, and the profilers' stamps, agree to within this
STAMP_NS = 1_000
#: a wall clock that was set by less is not worth a warning
STEP_NS = 1_000
#: of 65 collectives of two H200s in one report of nsys 2025.3 four fifths ended within 11 µs of
#: each other; some five times that, for drivers that have not been measured
ONE_REPORT_NS = 50_000
#: a report that was stretched by less cannot be told from one whose marks were delayed
STRETCHED_NS = 1_000_000
#: measurements as near to a span as this tell its clocks, and so many beyond them on both sides
_NEAR_NS, _BESIDE = 60_000_000_000, 2
#: a clock's rate changes by no more than this in the minutes between two measurements, as long as
#: no daemon corrects it: of a quartz by the temperature, some 0.1 ppm a degree
WANDER_PPM = 1.0
#: at so many times of a span it is looked how far clocks may be wrong
_MOMENTS = 65


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
    probe: object = None,
) -> RankReadings:
    """Read a rank's clock.json, state.json and probe.json; what is not understood is left out.

    `before` has the same files of windows and attempts before this one, the first ones first. What
    was read on this machine then comes first: a clock that was set since is seen.
    """
    of_clock = clock if isinstance(clock, Mapping) else {}
    of_state = state if isinstance(state, Mapping) else {}
    of_probe = probe if isinstance(probe, Mapping) else {}
    written = [of_state.get("clock")]
    for readings_of in (of_clock.get("readings"), of_probe.get("readings")):
        written += readings_of if isinstance(readings_of, list) else ()
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


def clock_warnings(readings: Mapping[int, RankReadings]) -> list[str]:
    """Return a warning for each rank whose host's wall clock was set inside the run."""
    steps = {rank: stepped(own.readings) for rank, own in sorted(readings.items())}
    return [
        f"rank {rank}: its host's wall clock was set by {sum(step) / 2e6:+.3f} ms during the run "
        "(NTP, or an administrator): times before and after are not on one clock"
        for rank, step in steps.items()
        if step is not None
    ]


# -- bounds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairBound:
    """At `at_ns` (the other's clock), clock(rank) - clock(other) lies in [low_ns, high_ns]."""

    rank: int
    other: int
    at_ns: int
    low_ns: int
    high_ns: int
    #: `machine`, `probe` or `report`
    source: str
    #: rests on how far a report without marks is from its host's clock (`ANCHOR_NS`)
    assumed: bool = False


@dataclass(frozen=True)
class KnownClocks:
    """What a run's files contain about its clocks, besides its reports."""

    bounds: tuple[PairBound, ...] = ()
    warnings: tuple[str, ...] = ()
    #: ranks whose report's times cannot be used, and why
    unusable: Mapping[int, str] = field(default_factory=dict)


def known_clocks(
    ranks: Sequence[RankTables], files: Mapping[int, Mapping[str, Any]], probe: object = None
) -> KnownClocks:
    """Return all that a run's files contain about its clocks (see `clusterprof.clock_probe`).

    `files` has for each rank what `parsed` takes: `clock`, `state`, `before`, `probe`;
    the argument `probe` is clock_probe.json as parsed.
    """
    readings, unusable = {}, {}
    for tables in ranks:
        own = parsed(**files.get(tables.rank, {"clock": None}))
        readings[tables.rank] = replace(own, anchor=anchor(tables.host_calls, own.readings))
        stretch = stretched(tables.host_calls, own.readings)
        if stretch is not None:
            unusable[tables.rank] = (
                f"its report's times are stretched by {stretch / 1e9:+.3f} s: the host's wall "
                "clock was set inside the window"
            )
    spans = machine_spans(
        readings, {tables.rank: (tables.info.begin_ns, tables.info.end_ns) for tables in ranks}
    )
    bounds = tuple(pair_bounds(readings, {"bounds": nearest(probe, spans)}))
    return KnownClocks(bounds, tuple(clock_warnings(readings)), unusable)


def of_one_report(ranks: Sequence[RankTables]) -> tuple[PairBound, ...]:
    """Return that ranks out of one report (`nsys profile torchrun …`) have one clock.

    They differ by how well each GPU's times were brought to the report's axis (`ONE_REPORT_NS`). A
    rank whose report gives no origin of its times gets no bound.
    """
    firsts: dict[tuple[str, int], RankTables] = {}
    bounds = []
    for tables in ranks:
        info = tables.info
        first = firsts.setdefault((str(info.source), info.epoch_ns), tables)
        if first is not tables and info.epoch_ns:
            bounds += [
                PairBound(tables.rank, first.rank, ns, -ONE_REPORT_NS, ONE_REPORT_NS, "report")
                for ns in (info.begin_ns, info.end_ns)
            ]
    return tuple(bounds)


def pair_bounds(readings: Mapping[int, RankReadings], probe: object = None) -> list[PairBound]:
    """Return every bound that readings and probe give on pairs of these ranks.

    `probe` is clock_probe.json as parsed. Bounds are for the *reports'* times: they include what is
    unknown of each report's distance to the wall clock. Ranks whose clock was set are left out.
    """
    sound = {rank: own for rank, own in sorted(readings.items()) if not stepped(own.readings)}
    machines: dict[str, list[int]] = {}
    for rank, own in sound.items():
        if own.machine:
            machines.setdefault(own.machine, []).append(rank)
    # a machine's ranks against its first, at each reading of that one: one wall clock, always
    bounds = [
        PairBound(rank, first, reading.wall_ns, 0, 0, "machine")
        for first, *others in machines.values()
        for rank in others
        for reading in sound[first].readings
        if reading.event != "start"
    ]
    first_of = {machine: ranks[0] for machine, ranks in machines.items()}
    pairs = []
    for pair in (*bounds, *_exchanged(probe, first_of)):
        # report + a = wall and report' + a' = wall', hence report - report' = wall - wall' + a' - a
        own, theirs = sound[pair.rank], sound[pair.other]
        low = pair.low_ns + theirs.anchors[0] - own.anchors[1]
        high = pair.high_ns + theirs.anchors[1] - own.anchors[0]
        assumed = own.anchor is None or theirs.anchor is None
        pairs.append(replace(pair, low_ns=low, high_ns=high, assumed=assumed))
    return pairs


def _exchanged(probe: object, first_of: Mapping[str, int]) -> Iterator[PairBound]:
    """What exchanges of messages bound, by the first rank of each of two machines."""
    exchanged = probe.get("bounds") if isinstance(probe, Mapping) else None
    for row in rows(exchanged, "at_ns", "low_ns", "high_ns"):
        machine, other = (str(row.get(name, "")) for name in ("machine", "other_machine"))
        low, high = row["low_ns"], row["high_ns"]
        possible = machine != other and {machine, other} <= first_of.keys()
        if possible and -APART_NS <= low <= high <= APART_NS:
            pair = first_of[machine], first_of[other]
            yield PairBound(*pair, row["at_ns"], low - STAMP_NS, high + STAMP_NS, "probe")


def machine_spans(
    readings: Mapping[int, RankReadings], spans: Mapping[int, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return from when until when each machine's ranks ran, of each rank's begin and end (ns).

    A machine that is not known is left out.
    """
    joined: dict[str, tuple[int, int]] = {}
    for rank in sorted(spans.keys() & readings.keys()):
        if machine := readings[rank].machine:
            begin, end = joined.get(machine, spans[rank])
            joined[machine] = min(begin, spans[rank][0]), max(end, spans[rank][1])
    return joined


def nearest(probe: object, spans: Mapping[str, tuple[int, int]]) -> list[Mapping[str, Any]]:
    """Return the measurements in clock_probe.json, as parsed, that tell the clocks in a span.

    `spans` are each machine's own (ns). Of each pair of machines those within it or a minute of it,
    and the two next ones on both sides, in the order of time: in hours a clock may have been set,
    or its rate have changed, which the second one tells. What is impossible is left out.
    """
    exchanged = probe.get("bounds") if isinstance(probe, Mapping) else None
    pairs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows(exchanged, "at_ns", "low_ns", "high_ns"):
        pair = str(row.get("machine", "")), str(row.get("other_machine", ""))
        possible = -APART_NS <= row["low_ns"] <= row["high_ns"] <= APART_NS
        if possible and pair[0] != pair[1] and pair[1] in spans:
            pairs.setdefault(pair, []).append(row)
    near: list[Mapping[str, Any]] = []
    for (_, other), measured in pairs.items():
        measured.sort(key=itemgetter("at_ns"))
        at, (begin, end) = [row["at_ns"] for row in measured], spans[other]
        first = min(bisect_left(at, begin - _NEAR_NS), bisect_left(at, begin) - _BESIDE)
        last = max(bisect_right(at, end + _NEAR_NS), bisect_right(at, end) + _BESIDE)
        near += measured[max(first, 0) : last]
    return near


def interpolated(
    measured: Sequence[Mapping[str, Any]], begin_ns: int, end_ns: int
) -> list[dict[str, Any]]:
    """Return what measurements of one pair of machines leave at begin and end of a span (ns).

    As two measurements, a line between which holds over the whole span. The rate at which one clock
    gains on the other is within the limit of drift and changes by `WANDER_PPM` at most: away from
    a measurement its bounds widen by what is left open of the rate, and those of all measurements
    hold. [] where no rate goes with all of them: a clock was set, or slewed by a daemon.
    """
    base = measured[0]["low_ns"]
    at = np.array([row["at_ns"] - begin_ns for row in measured], np.float64)
    low = np.array([row["low_ns"] - base for row in measured], np.float64)
    high = np.array([row["high_ns"] - base for row in measured], np.float64)
    rates = _rates(at, low, high)
    if rates is None:
        return []
    times = np.linspace(0.0, max(end_ns - begin_ns, 1), _MOMENTS)
    since = times[:, None] - at
    slower, faster = rates[0] * since, rates[1] * since
    lows = (low + np.minimum(slower, faster)).max(axis=1)
    highs = (high + np.maximum(slower, faster)).min(axis=1)
    middle = (lows + highs)[[0, -1]] / 2
    line = np.interp(times, times[[0, -1]], middle)
    wide = float(np.maximum(highs - line, line - lows).max())
    return [
        {
            **measured[0], "at_ns": begin_ns + int(times[place]),
            "low_ns": base + math.floor(line[place] - wide),
            "high_ns": base + math.ceil(line[place] + wide),
        }
        for place in (0, -1)
    ]  # fmt: skip


def _rates(at: Floats, low: Floats, high: Floats) -> tuple[float, float] | None:
    """Return the least and the greatest rate, with what it may wander; None where there is none.

    Offsets at `at` lie within `low` and `high` (ns); a rate is in ns per ns.
    """
    first, then = np.triu_indices(at.size, 1)
    apart = at[then] - at[first]
    first, then, apart = first[apart > 0], then[apart > 0], apart[apart > 0]
    limit, wander = DRIFT_LIMIT_PPM * 1e-6, WANDER_PPM * 1e-6
    least = ((low[then] - high[first]) / apart).max(initial=-limit)
    most = ((high[then] - low[first]) / apart).min(initial=limit)
    return None if least - most > wander else (least - wander, most + wander)


def as_blocks(bounds: Iterable[PairBound], ranks: Sequence[int], base: Ints) -> list[Block]:
    """Return the bounds as calls of two ranks, for `bounds` and `estimates`.

    A bound of half-width h is that of a collective of two in which both ranks were busy for h
    after the last arrival, and ended in the middle of what is possible. `base` is each rank's own
    origin of time (see `blocks.bases`); ranks that are not in `ranks` are left out.
    """
    index = {rank: k for k, rank in enumerate(ranks)}
    alike: dict[tuple[int, int, str], list[tuple[int, int, int]]] = {}
    for pair in bounds:
        if pair.rank in index and pair.other in index:
            key = (index[pair.rank], index[pair.other], pair.source)
            alike.setdefault(key, []).append((pair.at_ns, pair.low_ns, pair.high_ns))
    blocks = []
    for (i, j, _), times in alike.items():
        time, low, high = np.array(times, dtype=np.int64).T
        time, low, high = time - base[j], low + base[j] - base[i], high + base[j] - base[i]
        middle, half = low + (high - low) // 2, (high - low + 1) // 2
        start = np.stack([time + middle, time], axis=1).astype(np.float64)
        end = np.stack([time + middle + half, time + half], axis=1).astype(np.float64)
        both = np.ones(start.shape, dtype=bool)
        blocks.append(Block.plain((i, j), start, end, both, both))
    return blocks
