"""Collectives as charts: how fast by size, how far apart ranks arrive, and who waits for whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import exchanges, words
from clusterprof.report import summary
from clusterprof.results import UNBOUNDED_NS, Results

Numbers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 540, 230, 72, 14, 38
#: points of the bandwidths, and ranks or hosts of the matrix
_MOST_POINTS, _MOST_NAMES = 60, 24
#: a matrix of so many has its values written in it, of so few in larger cells
_WRITTEN, _FEW = 12, 6
_SHAPES = ("circle", "square", "triangle", "diamond", "cross")

#: what one GPU sends over NVLink, in one direction, at most (GB/s): NVIDIA's data sheets, which
#: give both directions together; GPUs of these names have NVLink to all others of their host
_NVLINK = {
    "SXM2": ("V100", 150.0),
    "A100-SXM": ("A100", 300.0),
    "H100 80GB HBM3": ("H100", 450.0),
    "NVIDIA H200": ("H200", 450.0),
    "NVIDIA B200": ("B200", 900.0),
}
#: of these names there are cards without it
_OTHER_LINKS = ("NVL", "PCIe")


@dataclass(frozen=True)
class Calls:
    """All matched collectives with a time, in steady-state steps where there are any."""

    table: pa.Table
    #: place of each row's collective among all, and how many there are
    of: Numbers
    count: int
    #: how many steps they are of
    steps: int

    def column(self, name: str) -> Numbers:
        """A column of integers without nulls."""
        return np.asarray(pc.fill_null(self.table[name], 0).to_numpy(), dtype=np.int64)

    def over(self, how: np.ufunc, values: Numbers, start: int) -> Numbers:
        """Of each collective the least or most over its members."""
        out = np.full(self.count, start, dtype=np.int64)
        how.at(out, self.of, values)
        return out


def calls(results: Results, collectives: pa.Table) -> Calls | None:
    """The collectives that charts are of; None where no wait is known."""
    table = exchanges.whole(collectives.filter(pc.is_valid(collectives["wait_ns"])))
    steady = summary.evidence_steps(results)[0]
    inside = pc.is_in(table["step"], pa.array(steady, pa.int64()))
    if steady and pc.any(inside).as_py():
        table = table.filter(inside)
    if not table.num_rows:
        return None
    ids = np.asarray(table["collective"].to_numpy(), dtype=np.int64)
    found, of = np.unique(ids, return_inverse=True)
    return Calls(table, of.reshape(-1), len(found), max(len(steady), 1))


def charts(results: Results, collectives: pa.Table) -> dict[str, dict[str, Any] | None]:
    """All three, by name; None for one of which nothing is known."""
    known = calls(results, collectives)
    if known is None:
        return dict.fromkeys(("bandwidth", "spread", "waits"))
    return {
        "bandwidth": bandwidth(results, known),
        "spread": spread(results, known),
        "waits": waits(results, known),
    }


# --- size against bus bandwidth


def bus_factor(operation: str, members: int) -> float | None:
    """Bus bandwidth over one rank's bytes per time; None: not defined.

    As nccl-tests define it (doc/PERFORMANCE.md there). The bytes are one rank's, as NCCL counts
    them: of a gather or scatter the smaller side, of an all-to-all what goes to all members.
    """
    if operation == "AllReduce":
        return 2 * (members - 1) / members
    if operation == "AllToAll":
        return (members - 1) / members
    if operation in ("AllGather", "ReduceScatter"):
        return float(members - 1)
    return 1.0 if operation in ("Broadcast", "Reduce", "Send", "Recv", "SendRecv") else None


def bandwidth(results: Results, known: Calls) -> dict[str, Any] | None:
    """The chart of sizes and bus bandwidths; None where no report says sizes."""
    points = _points(results, known)
    if not points:
        return None
    sizes, speeds = ([point[key] for point in points] for key in ("bytes", "rate"))
    links = {point["link"] for point in points if point["link"]}
    top = max([*speeds, *(rate for _, rate in links)])
    x, y = _Scale(min(sizes), max(sizes)), _Scale(min(speeds), top)
    names = sorted({point["operation"] for point in points})
    across = [_LEFT + (_WIDTH - _LEFT - 14) * x(point["bytes"]) for point in points]
    return {
        "width": _WIDTH,
        "height": _TOP + _HEIGHT + _BOTTOM,
        "left": _LEFT,
        "floor": _TOP + _HEIGHT,
        "points": [
            {
                "x": round(at, 1),
                "y": round(_up(y(point["rate"])), 1),
                "shape": _SHAPES[min(names.index(point["operation"]), len(_SHAPES) - 1)],
                "label": point["label"],
            }
            for point, at in zip(points, across, strict=True)
        ],
        "names": [(name, _SHAPES[min(at, len(_SHAPES) - 1)]) for at, name in enumerate(names)],
        "across": _ticks(x, min(sizes), max(sizes), lambda v: _round(words.size(v))),
        "upwards": [
            (round(_up(y(v)), 1), text) for v, text in _decades(min(speeds), top, _rate)
        ],
        "links": [
            (round(_up(y(rate)), 1), f"NVLink of {name}: {_rate(rate)}")
            for name, rate in sorted(links)
        ],
        "least": any(point["least"] for point in points),
    }  # fmt: skip


def _points(results: Results, known: Calls) -> list[dict[str, Any]]:
    """One for each operation, number of members and size: the median over its calls."""
    start, end = (known.column(f"aligned_{edge}_ns") for edge in ("start", "end"))
    # The last to arrive does not wait: its own length, on its own clock, is the transfer.
    took = known.over(np.minimum, end - start, np.iinfo(np.int64).max)
    size = known.over(np.maximum, known.column("message_bytes"), 0)
    head = np.unique(known.of, return_index=True)[1]
    columns = ["operation", "communicator", "source"]
    rows = known.table.take(pa.array(head)).select(columns).to_pylist()
    groups = {each["communicator"]: each for each in results["topology"]["groups"]}
    members = np.bincount(known.of, minlength=known.count)
    kinds: dict[tuple[str, int, int, bool, tuple[str, float] | None], list[int]] = {}
    links = {name: _link(results, group["ranks"]) for name, group in groups.items()}
    for at, row in enumerate(rows):
        group = groups.get(row["communicator"])
        true = (group["size"] if group else None) or int(members[at])
        point_to_point = row["operation"] in ("Send", "Recv", "SendRecv")
        least = true > members[at] and not point_to_point
        link = links.get(row["communicator"])
        # ncclAlltoAll's payload is what goes to one member (collectives.cc); torch gives all of it
        to_one = row["operation"] == "AllToAll" and row["source"] == "nvtx_payload"
        key = (
            str(row["operation"]),
            true,
            int(size[at]) * (true if to_one else 1),
            bool(least),
            link,
        )
        if size[at] > 0 and took[at] > 0 and bus_factor(key[0], true):
            kinds.setdefault(key, []).append(int(took[at]))
    out: list[dict[str, Any]] = []
    for (operation, true, count, least, link), times in sorted(kinds.items(), key=lambda e: str(e)):
        ns = float(np.median(times))
        rate = (bus_factor(operation, true) or 0.0) * count / ns
        much = f"{'at least ' if least else ''}{_rate(rate)}"
        many = words.counted(len(times), "call")
        name = words.plain(operation)
        label = f"{name} of {words.counted(true, 'rank')}, {words.size(count)}: {much} "
        out.append(
            {
                "operation": name,
                "bytes": count,
                "rate": rate,
                "link": link,
                "label": f"{label}({words.duration(ns)}, {many})",
                "least": least,
                "ns": sum(times),
            }
        )
    return sorted(out, key=lambda point: -point["ns"])[:_MOST_POINTS]


def _link(results: Results, ranks: list[int]) -> tuple[str, float] | None:
    """The rate of NVLink where all of these ranks are on one host with such GPUs."""
    entries = [each for each in results["ranks"] if each["rank"] in ranks]
    hosts, devices = ({each[key] for each in entries} for key in ("host", "device"))
    if len(hosts) != 1 or len(devices) != 1 or "" in hosts:
        return None
    (device,) = devices
    if any(other in device for other in _OTHER_LINKS):
        return None
    return next((link for name, link in _NVLINK.items() if name in device), None)


def _rate(value: float) -> str:
    return f"{value:,.0f} GB/s" if value >= 100 else f"{value:.3g} GB/s"


def _round(text: str) -> str:
    """A round quantity without the zeros behind it: `1.00 kB` is `1 kB`."""
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}"


# --- spread of arrivals


def spread(results: Results, known: Calls) -> dict[str, Any] | None:
    """How far apart the first and the last member arrive: how many collectives, by decades."""
    start = known.column("aligned_start_ns")
    first = known.over(np.minimum, start, np.iinfo(np.int64).max)
    last = known.over(np.maximum, start, 0)
    several = np.bincount(known.of, minlength=known.count) > 1
    apart = np.maximum(last - first, 1)[several]
    if not len(apart):
        return None
    # three bars a decade, from 1 µs on
    low, per = 1e3, 3
    place = np.clip(np.floor(np.log10(np.maximum(apart / low, 1)) * per), 0, 40).astype(np.int64)
    counts = np.bincount(place)
    bound = summary.pair_bound_ns(results)
    wide = (_WIDTH - _LEFT - 14) / max(len(counts), 6)
    bars = []
    for at, count in enumerate(counts.tolist()):
        begin, end = low * 10 ** (at / per), low * 10 ** ((at + 1) / per)
        begin = 0 if at == 0 else begin
        height = _HEIGHT * count / counts.max()
        much = words.counted(count, "collective")
        bars.append(
            {
                "x": round(_LEFT + at * wide + 1, 1),
                "width": round(wide - 2, 1),
                "y": round(_TOP + _HEIGHT - height, 1),
                "height": round(height, 1),
                "label": f"{words.duration(begin)} to {words.duration(end)}: {much}",
            }
        )
    bounded = 0 < bound < UNBOUNDED_NS
    known_from = min(math.log10(max(bound / low, 1)) * per, len(counts)) if bounded else 0.0
    marks = [
        (round(_LEFT + at * wide, 1), _round(words.duration(low * 10 ** (at / per))))
        for at in range(0, len(counts) + 1, per)
    ]
    return {
        "width": _WIDTH,
        "height": _TOP + _HEIGHT + _BOTTOM,
        "left": _LEFT,
        "floor": _TOP + _HEIGHT,
        "bars": bars,
        "marks": marks,
        "most": f"{counts.max():,}",
        "unsure": round(known_from * wide, 1),
        "bound": summary.bound(bound) if bounded else "",
        "median": words.duration(float(np.median(apart))),
        "largest": words.duration(float(apart.max())),
    }


# --- who waits for whom


def waits(results: Results, known: Calls) -> dict[str, Any] | None:
    """Who waits for whom, ms per step: rank × rank, or host × host of many ranks."""
    rank, last, wait = (known.column(name) for name in ("rank", "last_rank", "wait_ns"))
    clocks = summary.rank_uncertainties(results)
    unsure = np.zeros(int(max(rank.max(), last.max())) + 1, dtype=np.int64)
    for one, ns in clocks.items():
        if one < len(unsure):
            unsure[one] = ns
    certain = (wait > unsure[rank] + unsure[last]) & (rank != last) & exchanges.once(known.table)
    if not certain.any():
        return None
    ranks = np.unique(rank)
    hosts = {each["rank"]: words.plain(each["host"]) for each in results["ranks"] if each["host"]}
    names = [f"{one}" for one in ranks.tolist()]
    of = np.arange(len(ranks))
    by_host = (
        len(ranks) > 2 * _MOST_NAMES and len({*hosts.values()}) > 1 and len(hosts) >= len(ranks)
    )
    if by_host:
        names, of = np.unique([hosts[one] for one in ranks.tolist()], return_inverse=True)  # type: ignore[assignment]
        # node2 comes before node10
        order = sorted(range(len(names)), key=lambda at: summary.natural(str(names[at])))
        names, of = [str(names[at]) for at in order], np.argsort(order)[of.reshape(-1)]
    place = np.full(len(unsure), 0)
    place[ranks] = of
    matrix = np.zeros((len(names), len(names)))
    np.add.at(matrix, (place[rank], place[last]), np.where(certain, wait, 0))
    matrix /= known.steps * np.bincount(of, minlength=len(names))[:, None]
    down, across = _most(matrix.sum(axis=1)), _most(matrix.sum(axis=0))
    stragglers = {str(one) for one in summary.stragglers(results)}
    noun = "host" if by_host else "rank"
    shown = matrix[np.ix_(down, across)]
    high = float(shown.max())
    most = max(len(down), len(across))
    cell = 60 if most <= _FEW else 40 if most <= _WRITTEN else 14
    longest = max(len(names[one]) for one in (*down, *across))
    gutter = 22 + 7.2 * min(longest, 18)
    found = zip(*np.nonzero(matrix), strict=True)
    pairs = sorted(((float(matrix[i, j]), names[i], names[j]) for i, j in found), reverse=True)
    return {
        "noun": noun,
        "cell": cell,
        "gutter": round(gutter, 1),
        "width": round(gutter + cell * len(across) + 8, 1),
        "height": round(gutter + cell * len(down) + 4, 1),
        "rows": [(names[one][:18], names[one] in stragglers and not by_host) for one in down],
        "columns": [(names[one][:18], names[one] in stragglers and not by_host) for one in across],
        "cells": [
            {
                "row": row,
                "column": column,
                "share": round(float(shown[row, column]) / high, 3),
                "text": words.milliseconds(float(shown[row, column]), 1) if cell > 20 else "",
                "label": f"{noun} {names[down[row]]} waits {words.ms(float(shown[row, column]))} "
                f"per step for {noun} {names[across[column]]}",
            }
            for row, column in np.argwhere(shown > 0).tolist()
        ],
        "left_out": int((matrix.sum(axis=0) + matrix.sum(axis=1) > 0).sum())
        - len({*down, *across}),
        "most": [f"{noun} {i} for {noun} {j}: {words.ms(ns)}" for ns, i, j in pairs[:8]],
        "high": words.ms(high),
    }


def _most(totals: Reals) -> list[int]:
    """The places of the largest totals, in their own order; of many names none without waits."""
    if len(totals) <= _WRITTEN:
        return list(range(len(totals)))
    largest = np.argsort(-totals, kind="stable")[:_MOST_NAMES]
    return sorted(largest[totals[largest] > 0].tolist())


# --- scales


def _up(share: float) -> float:
    return _TOP + _HEIGHT * (1 - share)


class _Scale:
    """Where a value lies on a logarithmic scale of whole decades, 0 to 1."""

    def __init__(self, low: float, high: float) -> None:
        self.low = math.floor(math.log10(max(low, 1e-3)) + 1e-9)
        self.high = max(math.ceil(math.log10(max(high, 1e-3)) - 1e-9), self.low + 1)

    def __call__(self, value: float) -> float:
        return (math.log10(max(value, 1e-3)) - self.low) / (self.high - self.low)


def _decades(low: float, high: float, text: Any) -> list[tuple[float, str]]:
    scale = _Scale(low, high)
    return [(10.0**power, text(10.0**power)) for power in range(scale.low, scale.high + 1)]


def _ticks(scale: _Scale, low: float, high: float, text: Any) -> list[tuple[float, str]]:
    return [
        (round(_LEFT + (_WIDTH - _LEFT - 14) * scale(value), 1), name)
        for value, name in _decades(low, high, text)
    ]
