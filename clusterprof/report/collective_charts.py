"""Collectives as charts: how fast by size, how far apart ranks arrive, and who waits for whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import exchanges, words
from clusterprof.columns import Floats, count_by, integers, order_by, sums
from clusterprof.report import summary
from clusterprof.report.summary import Summary
from clusterprof.results import UNBOUNDED_NS

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 540, 230, 72, 14, 38
_FLOOR, _ACROSS = _TOP + _HEIGHT, _WIDTH - _LEFT - 14
_FRAME = {"width": _WIDTH, "height": _FLOOR + _BOTTOM, "left": _LEFT, "floor": _FLOOR}
#: points of the bandwidths, and ranks or hosts of the matrix
_MOST_POINTS, _MOST_NAMES = 60, 24
#: a matrix of so many has its values written in it, of so few in larger cells
_WRITTEN, _FEW = 12, 6
#: letters of a rank's or host's name beside the matrix
_NAME_LENGTH = 18
_SHAPES = ("circle", "square", "triangle", "diamond", "cross")
#: the spread of arrivals: from where it is drawn (ns), bars a decade, and how many in all
_LEAST_SPREAD_NS, _PER_DECADE, _MOST_BARS = 1e3, 3, 41

#: what one GPU sends over NVLink, in one direction, at most (GB/s): NVIDIA's data sheets, which
#: give both directions together; GPUs of these names have NVLink to all others of their host
_NVLINK = {
    "SXM2": ("V100", 150.0),
    "A100-SXM": ("A100", 300.0),
    "H100 80GB HBM3": ("H100", 450.0),
    "NVIDIA H200": ("H200", 450.0),
    "NVIDIA B200": ("B200", 900.0),
}
_POINT_TO_POINT = ("Send", "Recv", "SendRecv")


@dataclass(frozen=True)
class Calls:
    """All matched collectives with a time, in steady-state steps where there are any."""

    #: a row for each rank's part
    table: pa.Table
    #: how many steps they are of
    steps: int

    @cached_property
    def collectives(self) -> pa.Table:
        """Of each: begins, members, most bytes, time of the last to arrive, which does not wait."""
        names = ("operation", "communicator", "source")
        columns = {name: self.table[name].cast(pa.string()) for name in names}
        columns |= {name: self.table[name] for name in ("collective", "rank", "message_bytes")}
        begin, end = (pc.fill_null(self.table[f"aligned_{e}_ns"], 0) for e in ("start", "end"))
        columns |= {"begin": begin, "took": pc.subtract(end, begin)}
        sums = [("begin", "min"), ("begin", "max"), ("took", "min"), ("message_bytes", "max")]
        sums += [("rank", "count"), *((name, "first") for name in names)]
        return pa.table(columns).group_by("collective", use_threads=False).aggregate(sums)


def calls(run: Summary, collectives: pa.Table) -> Calls | None:
    """The collectives that charts are of; None where no wait is known."""
    table = exchanges.whole(collectives.filter(pc.is_valid(collectives["wait_ns"])))
    steps = run.evidence_steps
    inside = pc.is_in(table["step"], pa.array(steps, pa.int64()))
    if steps and pc.any(inside).as_py():
        table = table.filter(inside)
    return Calls(table, max(len(steps), 1)) if table.num_rows else None


def charts(run: Summary, collectives: pa.Table) -> dict[str, dict[str, Any] | None]:
    """All three, by name; None for one of which nothing is known."""
    matched = calls(run, collectives)
    drawings = {"bandwidth": bandwidth, "spread": spread, "waits": waits}
    return {name: draw(run, matched) if matched else None for name, draw in drawings.items()}


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
    return 1.0 if operation in ("Broadcast", "Reduce", *_POINT_TO_POINT) else None


def bandwidth(run: Summary, matched: Calls) -> dict[str, Any] | None:
    """The chart of sizes and bus bandwidths; None where no report says sizes."""
    points = _points(run, matched)
    if not points:
        return None
    sizes, speeds = ([point[key] for point in points] for key in ("bytes", "rate"))
    links = sorted({point["link"] for point in points} - {None})
    x, decades_across = _scale(min(sizes), max(sizes))
    y, decades_upwards = _scale(min(speeds), max([*speeds, *(rate for _, rate in links)]))
    names = sorted({point["operation"] for point in points})
    shapes = {name: _SHAPES[min(k, len(_SHAPES) - 1)] for k, name in enumerate(names)}

    def along(size: float) -> float:
        return round(_LEFT + _ACROSS * x(size), 1)

    def up(rate: float) -> float:
        return round(_TOP + _HEIGHT * (1 - y(rate)), 1)

    return {
        **_FRAME,
        "points": [
            {
                "x": along(point["bytes"]),
                "y": up(point["rate"]),
                "shape": shapes[point["operation"]],
                "label": point["label"],
            }
            for point in points
        ],
        "names": [*shapes.items()],
        "across": [(along(size), _round(words.size(size))) for size in decades_across],
        "upwards": [(up(rate), _rate(rate)) for rate in decades_upwards],
        "links": [(up(rate), f"NVLink of {name}: {_rate(rate)}") for name, rate in links],
        "least": any(point["least"] for point in points),
    }


def _points(run: Summary, matched: Calls) -> list[dict[str, Any]]:
    """One for each operation, number of members and size: the median over its calls."""
    groups = run.results["topology"]["groups"]
    links = {group["communicator"]: _link(run, group["ranks"]) for group in groups}
    sizes = {group["communicator"]: group["size"] for group in groups}
    times_ns: dict[tuple[Any, ...], list[int]] = {}
    for row in matched.collectives.to_pylist():
        operation, communicator = row["operation_first"], row["communicator_first"]
        size, profiled = row["message_bytes_max"] or 0, row["rank_count"]
        members = sizes.get(communicator) or profiled
        # ncclAlltoAll's payload is what goes to one member (collectives.cc); torch gives all of it
        if operation == "AllToAll" and row["source_first"] == "nvtx_payload":
            size *= members
        # not all members were profiled: the last to arrive, which does not wait, may be another
        is_bound = members > profiled and operation not in _POINT_TO_POINT
        if (bus_factor(operation, members) or 0) * size > 0 and row["took_min"] > 0:
            kind = (operation, members, size, is_bound, links.get(communicator))
            times_ns.setdefault(kind, []).append(row["took_min"])
    points: list[dict[str, Any]] = []
    for kind, times in sorted(times_ns.items(), key=str):
        operation, members, size, is_bound, link = kind
        median_ns, name = float(np.median(times)), words.plain(operation)
        rate = (bus_factor(operation, members) or 0) * size / median_ns
        label = (
            f"{name} of {words.counted(members, 'rank')}, {words.size(size)}: "
            f"{'at least ' if is_bound else ''}{_rate(rate)} "
            f"({words.duration(median_ns)}, {words.counted(len(times), 'call')})"
        )
        point = {"operation": name, "bytes": size, "rate": rate, "link": link, "label": label}
        points.append({**point, "least": is_bound, "ns": sum(times)})
    return sorted(points, key=lambda point: -point["ns"])[:_MOST_POINTS]


def _link(run: Summary, ranks: list[int]) -> tuple[str, float] | None:
    """The rate of NVLink where all of these ranks are on one host with such GPUs."""
    entries = [entry for entry in run.results["ranks"] if entry["rank"] in ranks]
    machines = {(entry["host"], entry["device"]) for entry in entries}
    host, device = machines.pop() if len(machines) == 1 else ("", "")
    # of these names there are cards without it
    if not host or any(name in device for name in ("NVL", "PCIe")):
        return None
    return next((link for name, link in _NVLINK.items() if name in device), None)


def _rate(value: float) -> str:
    return f"{value:,.0f} GB/s" if value >= 100 else f"{value:.3g} GB/s"


def _round(text: str) -> str:
    """A round quantity without the zeros behind it: `1.00 kB` is `1 kB`."""
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}"


def _scale(low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value lies on a logarithmic scale of whole decades, 0 to 1, and these decades."""
    first = math.floor(math.log10(max(low, 1e-3)) + 1e-9)
    last = max(math.ceil(math.log10(max(high, 1e-3)) - 1e-9), first + 1)
    decades = [10.0**power for power in range(first, last + 1)]
    return lambda value: (math.log10(max(value, 1e-3)) - first) / (last - first), decades


def spread(run: Summary, matched: Calls) -> dict[str, Any] | None:
    """How far apart the first and the last member arrive: how many collectives, by decades."""
    several = matched.collectives.filter(pc.greater(matched.collectives["rank_count"], 1))
    if not several.num_rows:
        return None
    apart = np.maximum(pc.subtract(several["begin_max"], several["begin_min"]).to_numpy(), 1)

    def along(ns: npt.ArrayLike) -> Any:
        return np.log10(np.maximum(np.asarray(ns) / _LEAST_SPREAD_NS, 1)) * _PER_DECADE

    counts = count_by(np.minimum(np.floor(along(apart)), _MOST_BARS - 1).astype(np.int64))
    # where each bar begins, and the last one ends
    edges = (_LEAST_SPREAD_NS * 10 ** (np.arange(len(counts) + 1) / _PER_DECADE)).tolist()
    wide = _ACROSS / max(len(counts), 6)
    bars = []
    for bar, count in enumerate(counts.tolist()):
        height = _HEIGHT * count / int(counts.max())
        between = f"{words.duration(edges[bar] if bar else 0)} to {words.duration(edges[bar + 1])}"
        bars.append({
            "x": round(_LEFT + bar * wide + 1, 1),
            "width": round(wide - 2, 1),
            "y": round(_FLOOR - height, 1),
            "height": round(height, 1),
            "label": f"{between}: {words.counted(count, 'collective')}",
        })  # fmt: skip
    bound = run.pair_bound_ns
    bounded = 0 < bound < UNBOUNDED_NS
    return {
        **_FRAME,
        "bars": bars,
        "marks": [
            (round(_LEFT + bar * wide, 1), _round(words.duration(edges[bar])))
            for bar in range(0, len(edges), _PER_DECADE)
        ],
        "most": f"{counts.max():,}",
        "unsure": round(min(float(along(bound)), len(counts)) * wide, 1) if bounded else 0.0,
        "bound": summary.bound(bound) if bounded else "",
        "median": words.duration(float(np.median(apart))),
        "largest": words.duration(float(apart.max())),
    }


def waits(run: Summary, matched: Calls) -> dict[str, Any] | None:
    """Who waits for whom, ms per step: rank × rank, or host × host of many ranks."""
    columns = ("rank", "last_rank", "step", "aligned_start_ns")
    rank, last, step, start = (integers(matched.table, name) for name in columns)
    certain = exchanges.certain_waits(matched.table, run.uncertainties) * (rank != last)
    start, certain = exchanges.within_steps(start, certain, step, run.begins)
    if not certain.any():
        return None
    ranks = np.unique(rank).tolist()
    names = {rank: f"{rank}" for rank in ranks}
    hosts = {rank: words.plain(host) for rank, host in run.hosts.items()}
    several = len({*hosts.values()}) > 1 and len(hosts) >= len(ranks)
    by_host = several and len(ranks) > 2 * _MOST_NAMES
    if by_host:
        names = {rank: hosts[rank] for rank in ranks}
    # node2 comes before node10
    nodes = sorted({*names.values()}, key=summary.natural)
    row = {name: number for number, name in enumerate(nodes)}
    node_of_rank = np.zeros(int(max(rank.max(), last.max())) + 1, dtype=np.intp)
    node_of_rank[ranks] = [row[names[rank]] for rank in ranks]
    certain = exchanges.counted_once(start, certain, rank, node_of_rank[last], step)
    pairs = node_of_rank[rank], node_of_rank[last]
    matrix = sums((len(nodes), len(nodes)), pairs, certain)
    matrix /= matched.steps * count_by(node_of_rank[ranks], len(nodes))[:, None]
    stragglers = set() if by_host else {str(rank) for rank in run.stragglers()}
    return _drawn(matrix, nodes, "host" if by_host else "rank", stragglers)


def _drawn(matrix: Floats, names: Sequence[str], noun: str, late: set[str]) -> dict[str, Any]:
    """The largest rows and columns of a matrix of waits, ns per step, by `names`."""
    down, across = _largest_places(matrix.sum(axis=1)), _largest_places(matrix.sum(axis=0))
    shown = matrix[np.ix_(down, across)]
    longest_side = max(len(down), len(across))
    cell = 60 if longest_side <= _FEW else 40 if longest_side <= _WRITTEN else 14
    longest_name = max(len(names[k]) for k in (*down, *across))
    gutter = 22 + 7.2 * min(longest_name, _NAME_LENGTH)
    rows, columns = (
        [(names[k][:_NAME_LENGTH], names[k] in late) for k in places] for places in (down, across)
    )
    waits = ((float(matrix[i, j]), names[i], names[j]) for i, j in np.argwhere(matrix))
    longest = sorted(waits, reverse=True)[:8]
    cells = []
    for row, column in np.argwhere(shown > 0).tolist():
        ns, waiting, last = float(shown[row, column]), names[down[row]], names[across[column]]
        cells.append({
            "row": row,
            "column": column,
            "share": round(ns / float(shown.max()), 3),
            "text": words.milliseconds(ns, 1) if cell > 20 else "",
            "label": f"{noun} {waiting} waits {words.ms(ns)} per step for {noun} {last}",
        })  # fmt: skip
    waited = np.count_nonzero(matrix.sum(axis=0) + matrix.sum(axis=1))
    return {
        "noun": noun,
        "cell": cell,
        "gutter": round(gutter, 1),
        "width": round(gutter + cell * len(across) + 8, 1),
        "height": round(gutter + cell * len(down) + 4, 1),
        "rows": rows,
        "columns": columns,
        "cells": cells,
        "left_out": waited - len({*down, *across}),
        "most": [f"{noun} {i} for {noun} {j}: {words.ms(ns)}" for ns, i, j in longest],
        "high": words.ms(float(shown.max())),
    }


def _largest_places(totals: Floats) -> list[int]:
    """The places of the largest totals, in their own order; of many names none without waits."""
    if len(totals) <= _WRITTEN:
        return list(range(len(totals)))
    largest = order_by(-totals)[:_MOST_NAMES]
    return sorted(largest[totals[largest] > 0].tolist())
