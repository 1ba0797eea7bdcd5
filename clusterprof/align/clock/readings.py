"""What is known of the clocks beside the collectives: readings, probes, marks and beacons.

Pure functions from what the agent and the probe wrote (as parsed from JSON) to bounds on the
offset between two ranks' *report* clocks. An offset is a rank's clock minus another's, ns.

Three sources, each with what it rests on:

- `machine`: two processes under one running kernel read one wall clock;
- `probe`: an exchange of messages. A request sent at t1 (rank's clock) and received at t2 (other
  clock), answered at t3, received at t4: no message arrives before it is sent, hence the other
  clock is ahead by at most t2 - t1 and at least t3 - t4, whatever the two ways' delays (Cristian,
  NTP). Assumes nothing of the network;
- `kernel`: each kernel's own bound on its distance to true time (adjtimex' maxerror), as right
  as the time daemon's servers are. Good to begin with, and no proof.

A report's own times are not quite the wall clock that probes read: the profiler ties them to it
once. How far they are from it is bounded by marks (ranges in the report that the agent put
between two readings of the wall clock), or, without marks, assumed (`ANCHOR_NS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock.blocks import Block
from clusterprof.tables import RankTables

#: the agent's own names, written again: the science does not load what runs inside a rank
MARK = "clusterprof:clock:"
BEACON_BYTES = 13

#: how far a report's wall-clock times are from the host's wall clock, where no mark tells:
#: +7 to +130 µs over 18 nsys reports, a few µs in torch.profiler's
ANCHOR_NS = 200_000
#: 1970 to 2116; 36 years, by which no clock is wrong: sums of such times fit into 64 bits
FARTHEST_NS, APART_NS = 1 << 62, 1 << 60
#: the readings of one clock by two processes, and the profilers' stamps, agree to within this
STAMP_NS = 1_000
#: a wall clock that was set by less is not worth a warning
STEP_NS = 1_000
#: a report that was stretched by less is not told from one whose marks were held up
STRETCHED_NS = 1_000_000
DRIFT_LIMIT_PPM = 150

Reading = Mapping[str, Any]


#: ns; of 65 collectives of two H200s in one report of nsys 2025.3 four fifths ended within 11 µs
#: of each other; some five times that, for drivers that nobody measured
ONE_REPORT_NS = 50_000


@dataclass(frozen=True)
class PairBound:
    """At `at_ns` (the other's clock), clock(rank) - clock(other) lies in [low_ns, high_ns]."""

    rank: int
    other: int
    at_ns: int
    low_ns: int
    high_ns: int
    #: `machine`, `probe`, `kernel` or `report`
    source: str
    #: rests on how far a report without marks is from its host's clock (`ANCHOR_NS`)
    assumed: bool = False


@dataclass(frozen=True)
class RankReadings:
    """What one rank's agent wrote of its clocks; empty where it wrote nothing."""

    machine: str = ""
    readings: tuple[Reading, ...] = ()
    #: (begin, end) in the rank's own wall clock, ns: whatever was issued in it is a beacon
    beacons: tuple[tuple[int, int], ...] = ()
    #: report time + this lies within [low, high] of the wall clock; None where no mark told
    anchor: tuple[int, int] | None = None


def parsed(clock: object, state: object = None, beacons: object = None) -> RankReadings:
    """Read a rank's clock.json, state.json and beacons.json; what is not understood is left out."""
    known = clock if isinstance(clock, Mapping) else {}
    told = state if isinstance(state, Mapping) else {}
    readings = [told.get("clock"), *_list(known.get("readings"))]
    whole = tuple(
        {**each, "marks": _marks(each)}
        for each in readings
        if isinstance(each, Mapping) and _ints(each, "wall_ns", "monotonic_ns", "gap_ns")
    )
    sent = tuple(
        (each["begin_ns"], each["end_ns"])
        for each in _list(beacons)
        if isinstance(each, Mapping) and _ints(each, "begin_ns", "end_ns")
    )
    return RankReadings(str(known.get("machine") or told.get("machine") or ""), whole, sent)


def _marks(reading: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        each
        for each in _list(reading.get("marks"))
        if isinstance(each, Mapping)
        and isinstance(each.get("name"), str)
        and _ints(each, "before_ns", "after_ns")
    ]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _ints(row: Mapping[str, Any], *names: str) -> bool:
    return all(type(row.get(name)) is int and abs(row[name]) < FARTHEST_NS for name in names)


# --- one rank's own readings


def stepped(readings: Sequence[Reading]) -> tuple[int, int] | None:
    """By how much the wall clock was set (jumped) between the readings; None if it was not.

    Returns the least and the most, ns, of the largest jump between two neighbours. Exact: wall
    minus monotonic time is constant unless somebody sets the clock (a daemon that slews moves
    both), and each reading knows it to within its gap.
    """
    found: tuple[int, int] | None = None
    for one, next_ in pairwise(readings):
        low = _apart(next_)[0] - _apart(one)[1]
        high = _apart(next_)[1] - _apart(one)[0]
        if (low > STEP_NS or high < -STEP_NS) and (
            found is None or abs(low + high) > abs(sum(found))
        ):
            found = (low, high)
    return found


def _apart(reading: Reading) -> tuple[int, int]:
    """Least and most of wall minus monotonic time."""
    first = int(reading["wall_ns"]) - int(reading["monotonic_ns"])
    return first - int(reading["gap_ns"]), first


def anchor(host_calls: pa.Table, readings: Sequence[Reading]) -> tuple[int, int] | None:
    """Bound what must be added to a report's times to get the wall clock, from its marks.

    `host_calls` has the schema of `clusterprof.tables`. None where the report has no mark, or
    its marks contradict each other (a report whose times were stretched or shifted).
    """
    told = {
        mark["name"]: (int(mark["before_ns"]), int(mark["after_ns"]))
        for reading in readings
        for mark in _list(reading.get("marks"))
    }
    names = host_calls["name"].cast(pa.string())
    marks = host_calls.filter(pc.starts_with(names, MARK))
    low, high = None, None
    for row in marks.select(["name", "start_ns", "end_ns"]).to_pylist():
        if row["name"] not in told:
            continue
        before, after = told[row["name"]]
        least = before - row["start_ns"] - STAMP_NS
        most = after - row["end_ns"] + STAMP_NS
        low = least if low is None else max(low, least)
        high = most if high is None else min(high, most)
    if low is None or high is None or not -APART_NS < low <= high < APART_NS:
        return None
    return low, high


def stretched(host_calls: pa.Table, readings: Sequence[Reading]) -> int | None:
    """By how much longer (ns) a report took between its marks than the monotonic clock says.

    None where the two agree, as far as clocks may drift, marks are missing, or the wall clock was
    not set between them. torch.profiler ties its times to the wall clock at both ends of the
    window: where that was set in between, it stretches or folds all of them. nsys does not.
    """
    marked = [each for each in readings if _list(each.get("marks"))]
    if stepped(marked) is None:
        return None
    began: dict[str, int] = {
        row["name"]: row["start_ns"]
        for row in host_calls.filter(pc.starts_with(host_calls["name"].cast(pa.string()), MARK))
        .select(["name", "start_ns"])
        .to_pylist()
    }
    seen = [
        (
            int(mark["before_ns"]) - _apart(each)[1],
            began[mark["name"]],
            int(mark["after_ns"]) - int(mark["before_ns"]),
        )
        for each in readings
        for mark in _list(each.get("marks"))
        if mark["name"] in began
    ]
    if len(seen) < 2:
        return None
    first, last = min(seen), max(seen)
    true = last[0] - first[0]
    more = last[1] - first[1] - true
    known_to = STRETCHED_NS + first[2] + last[2] + true * DRIFT_LIMIT_PPM // 1_000_000
    return more if abs(more) > known_to else None


def warnings(readings: Mapping[int, RankReadings]) -> list[str]:
    """Say which ranks' wall clocks were set inside the run, and which no daemon keeps."""
    out = []
    for rank, mine in sorted(readings.items()):
        step = stepped(mine.readings)
        if step is not None:
            by = (step[0] + step[1]) / 2e6
            out.append(
                f"rank {rank}: its host's wall clock was set by {by:+.3f} ms during the run (NTP, "
                "or an administrator): times before and after are not on one clock"
            )
    return out


# --- two ranks


@dataclass(frozen=True)
class KnownClocks:
    """What is known of a run's clocks beside its reports."""

    bounds: tuple[PairBound, ...] = ()
    warnings: tuple[str, ...] = ()
    readings: Mapping[int, RankReadings] = field(default_factory=dict)
    #: ranks whose report's times cannot be used, and why
    unusable: Mapping[int, str] = field(default_factory=dict)


def of_one_report(ranks: Sequence[RankTables]) -> tuple[PairBound, ...]:
    """Return that ranks out of one report (`nsys profile torchrun …`) have one clock.

    nsys puts all processes of a session on one time axis; what differs is how well each GPU's
    times were brought to it (see `ONE_REPORT_NS`). One without a time of its own says nothing.
    """
    firsts: dict[tuple[str, int], RankTables] = {}
    found = []
    for tables in ranks:
        info = tables.info
        first = firsts.setdefault((str(info.source), info.epoch_ns), tables)
        if first is not tables and info.epoch_ns:
            found += [
                PairBound(tables.rank, first.rank, at, -ONE_REPORT_NS, ONE_REPORT_NS, "report")
                for at in (info.begin_ns, info.end_ns)
            ]
    return tuple(found)


def known_clocks(
    ranks: Sequence[RankTables],
    files: Mapping[int, Mapping[str, Any]],
    probe: object = None,
) -> KnownClocks:
    """Return everything that a run's files tell of its clocks (`clusterprof.probe.clock_files`).

    `files` has for each rank what `parsed` takes: `clock`, `state`, `beacons`; `probe` is
    clock_probe.json as parsed.
    """
    readings, unusable = {}, {}
    for tables in ranks:
        mine = parsed(**files.get(tables.rank, {"clock": None}))
        readings[tables.rank] = replace(mine, anchor=anchor(tables.host_calls, mine.readings))
        more = stretched(tables.host_calls, mine.readings)
        if more is not None:
            unusable[tables.rank] = (
                f"its report's times are stretched by {more / 1e9:+.3f} s: the host's wall clock "
                "was set inside the window"
            )
    bounds = tuple(pair_bounds(readings, probe))
    return KnownClocks(bounds, tuple(warnings(readings)), readings, unusable)


def pair_bounds(
    readings: Mapping[int, RankReadings], probe: object = None, *, kernel: bool = False
) -> list[PairBound]:
    """Return every bound that readings and probe give on pairs of these ranks.

    `probe` is clock_probe.json as parsed. With `kernel` also what the hosts believe of their own
    clocks, which is no proof. Bounds are for the *reports'* times: they include what is not known
    of each report's tie to the wall clock. Pairs with a rank whose clock was set are left out.
    """
    sound = {rank: mine for rank, mine in readings.items() if stepped(mine.readings) is None}
    out = [*_one_machine(sound), *_probed(sound, probe)]
    if kernel:
        out += _believed(sound)
    return out


def _by_machine(readings: Mapping[int, RankReadings]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, mine in sorted(readings.items()):
        if mine.machine:
            groups.setdefault(mine.machine, []).append(rank)
    return groups


def _at(mine: RankReadings) -> int:
    return int(mine.readings[-1]["wall_ns"]) if mine.readings else 0


def _anchors(mine: RankReadings) -> tuple[int, int]:
    return mine.anchor if mine.anchor is not None else (-ANCHOR_NS, ANCHOR_NS)


def _assumed(*both: RankReadings) -> bool:
    return any(mine.anchor is None for mine in both)


def _one_machine(readings: Mapping[int, RankReadings]) -> list[PairBound]:
    """Ranks of one machine, each against its machine's first: one wall clock, two reports."""
    out = []
    for ranks in _by_machine(readings).values():
        for rank in ranks[1:]:
            # report + a = wall = report' + a', hence report - report' = a' - a
            mine, others = _anchors(readings[rank]), _anchors(readings[ranks[0]])
            low, high = others[0] - mine[1], others[1] - mine[0]
            guess = _assumed(readings[rank], readings[ranks[0]])
            # the same at all times of the run, hence said where it is needed
            out += [
                PairBound(rank, ranks[0], int(each["wall_ns"]), low, high, "machine", guess)
                for each in readings[ranks[0]].readings
                if each.get("event") != "start"
            ]
    return out


def _probed(readings: Mapping[int, RankReadings], probe: object) -> list[PairBound]:
    """The probe's bounds between machines, given to the first rank on each of them."""
    if not isinstance(probe, Mapping):
        return []
    first = {machine: ranks[0] for machine, ranks in _by_machine(readings).items()}
    out = []
    for row in _list(probe.get("bounds")):
        if not isinstance(row, Mapping) or not _ints(row, "at_ns", "low_ns", "high_ns"):
            continue
        if max(abs(row["low_ns"]), abs(row["high_ns"])) > APART_NS:
            continue
        rank, other = first.get(row.get("machine", "")), first.get(row.get("other_machine", ""))
        if rank is None or other is None or rank == other or row["low_ns"] > row["high_ns"]:
            continue
        mine, others = _anchors(readings[rank]), _anchors(readings[other])
        out.append(
            PairBound(
                rank,
                other,
                row["at_ns"],
                row["low_ns"] + others[0] - mine[1] - STAMP_NS,
                row["high_ns"] + others[1] - mine[0] + STAMP_NS,
                "probe",
                _assumed(readings[rank], readings[other]),
            )
        )
    return out


def _believed(readings: Mapping[int, RankReadings]) -> list[PairBound]:
    """Machines that a daemon keeps, against the first of them."""
    out: list[PairBound] = []
    kept = []
    for ranks in _by_machine(readings).values():
        errors = [
            int(each["kernel"]["maxerror_ns"])
            for each in readings[ranks[0]].readings
            if isinstance(each.get("kernel"), Mapping)
            and each["kernel"].get("synchronised")
            and _ints(each["kernel"], "maxerror_ns")
        ]
        if errors:
            kept.append((ranks[0], max(errors)))
    for rank, error in kept[1:]:
        other, others = kept[0]
        mine, theirs = _anchors(readings[rank]), _anchors(readings[other])
        low, high = theirs[0] - mine[1] - error - others, theirs[1] - mine[0] + error + others
        guess = _assumed(readings[rank], readings[other])
        out.append(PairBound(rank, other, _at(readings[other]), low, high, "kernel", guess))
    return out


def as_blocks(
    bounds: Iterable[PairBound], ranks: Sequence[int], base: npt.NDArray[np.int64]
) -> list[Block]:
    """Return the bounds as calls of two ranks, for `bounds` and `estimates`.

    A bound of half-width h says what a collective of two says in which both ranks were busy
    for h after the last arrival, and ended in the middle of what is possible. `base` is each
    rank's own origin of time (see `blocks.bases`); ranks that are not in `ranks` are left out.
    """
    index = {rank: k for k, rank in enumerate(ranks)}
    groups: dict[tuple[int, int, str], list[PairBound]] = {}
    for each in bounds:
        if each.rank in index and each.other in index:
            groups.setdefault((each.rank, each.other, each.source), []).append(each)
    out = []
    for (rank, other, _), rows in groups.items():
        i, j = index[rank], index[other]
        at = np.array([row.at_ns for row in rows], dtype=np.int64) - base[j]
        low = np.array([row.low_ns for row in rows], dtype=np.int64) + base[j] - base[i]
        high = np.array([row.high_ns for row in rows], dtype=np.int64) + base[j] - base[i]
        middle, half = low + (high - low) // 2, (high - low + 1) // 2
        start = np.stack([at + middle, at], axis=1).astype(np.float64)
        end = np.stack([at + middle + half, at + half], axis=1).astype(np.float64)
        both = np.ones(start.shape, dtype=bool)
        out.append(Block((i, j), start, end, both, both))
    return out


def tied(bounds: Sequence[PairBound]) -> list[tuple[int, int]]:
    """Return the pairs of ranks that some bound ties, each once, lower rank first."""
    pairs = {(min(b.rank, b.other), max(b.rank, b.other)) for b in bounds}
    return sorted(pairs)


# --- beacons


def is_beacon(calls: pa.Table, mine: RankReadings) -> npt.NDArray[np.bool_]:
    """Return which of a rank's collective calls (canonical schema) are beacons and not its own.

    A beacon is an AllReduce issued while the agent sent beacons: the training's thread was in
    the agent then. Where the report tells message sizes, it must have theirs; where the wall
    clock was set during the run, the size alone tells. Reports that do not tell when a call was
    issued (gloo) are judged by its start.
    """
    issued = pc.coalesce(calls["issue_start_ns"], calls["start_ns"])
    at = np.asarray(pc.fill_null(issued, 0).to_numpy(), dtype=np.int64)
    low, high = _anchors(mine)
    inside = np.zeros(len(at), dtype=bool)
    for begin, end in mine.beacons:
        inside |= (at + high >= begin) & (at + low <= end)
    if stepped(mine.readings) is not None:
        inside |= np.asarray(pc.is_valid(calls["message_bytes"]).to_numpy(), dtype=np.bool_)
    size = np.asarray(pc.fill_null(calls["message_bytes"], BEACON_BYTES).to_numpy())
    kind = np.asarray(pc.equal(calls["operation"].cast(pa.string()), "AllReduce").to_numpy(False))
    return np.asarray(inside & kind & (size == BEACON_BYTES), dtype=np.bool_)


def without_beacons(
    matched: pa.Table, ranks: Sequence[RankTables], readings: Mapping[int, RankReadings]
) -> pa.Table:
    """Return matched calls (schema MATCHED) without the beacons: they tell clocks, and no cost."""
    rank, call = matched["rank"].to_numpy(), matched["call"].to_numpy()
    theirs = np.zeros(len(rank), dtype=bool)
    for tables in ranks:
        mine = readings.get(tables.rank)
        if mine is not None and mine.beacons:
            beacons = np.flatnonzero(is_beacon(tables.collective_calls, mine))
            theirs |= (rank == tables.rank) & np.isin(call, beacons)
    collective = matched["collective"].to_numpy()
    return matched.filter(pa.array(~np.isin(collective, collective[theirs])))
