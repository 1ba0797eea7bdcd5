"""Bounds on ranks' clocks from outside of the collectives: measurements, one machine, one report.

An offset is a rank's clock minus another's, ns; a clock is here the one that a *report's* times are
in. Three sources, each with what it rests on:

- `machine`: two processes under one running kernel read one wall clock;
- `probe`: an exchange of messages. A request sent at t1 (rank's clock) and received at t2 (other
  clock), answered at t3, received at t4: no message arrives before it is sent, hence the other
  clock is ahead by at most t2 - t1 and at least t3 - t4, whatever the two ways' delays (Cristian,
  NTP). Assumes nothing of the network;
- `report`: nsys puts all processes of one session on one time axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clusterprof.align.clock.blocks import Block
from clusterprof.align.clock.readings import (
    APART_NS,
    STAMP_NS,
    RankReadings,
    anchor,
    parsed,
    rows,
    stepped,
    stretched,
    warnings,
)
from clusterprof.columns import Ints
from clusterprof.tables import RankTables

#: of 65 collectives of two H200s in one report of nsys 2025.3 four fifths ended within 11 µs of
#: each other; some five times that, for drivers that have not been measured
ONE_REPORT_NS = 50_000


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
    #: rests on how far a report without marks is from its host's clock (`readings.ANCHOR_NS`)
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
    """Return all that a run's files contain about its clocks (see `clusterprof.probe.measurement`).

    `files` has for each rank what `readings.parsed` takes: `clock`, `state`, `before`;
    `probe` is clock_probe.json as parsed.
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
    bounds = tuple(pair_bounds(readings, probe))
    return KnownClocks(bounds, tuple(warnings(readings)), unusable)


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
        (rank, first, reading.wall_ns, 0, 0, "machine")
        for first, *others in machines.values()
        for rank in others
        for reading in sound[first].readings
        if reading.event != "start"
    ]
    exchanged = probe.get("bounds") if isinstance(probe, Mapping) else None
    for row in rows(exchanged, "at_ns", "low_ns", "high_ns"):
        machine, other = (str(row.get(name, "")) for name in ("machine", "other_machine"))
        low, high = row["low_ns"], row["high_ns"]
        possible = machine != other and {machine, other} <= machines.keys()
        if possible and -APART_NS <= low <= high <= APART_NS:
            pair = machines[machine][0], machines[other][0]
            bounds.append((*pair, row["at_ns"], low - STAMP_NS, high + STAMP_NS, "probe"))
    pairs = []
    for rank, reference, ns, low, high, source in bounds:
        # report + a = wall and report' + a' = wall', hence report - report' = wall - wall' + a' - a
        own, theirs = sound[rank], sound[reference]
        low += theirs.anchors[0] - own.anchors[1]
        high += theirs.anchors[1] - own.anchors[0]
        assumed = own.anchor is None or theirs.anchor is None
        pairs.append(PairBound(rank, reference, ns, low, high, source, assumed))
    return pairs


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
