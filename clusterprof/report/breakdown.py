"""Where the steps' time goes, rank by rank, as the page's tables and bars show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from clusterprof import words
from clusterprof.report import summary
from clusterprof.report.summary import Average, Summary
from clusterprof.results import Results

#: rows of a table that are shown at first: so many of either end
ENDS = 8


class Ends(NamedTuple):
    """A long table's rows: the first and the last ones, and those between, shown on request."""

    first: Sequence[Any]
    between: Sequence[Any]
    last: Sequence[Any]


def ends(rows: Sequence[Any], first: int = ENDS, last: int = ENDS) -> Ends:
    """Split rows for a table; few ones stay together."""
    if len(rows) <= first + last:
        return Ends(rows, [], [])
    end = len(rows) - last
    return Ends(rows[:first], rows[first:end], rows[end:])


def account(run: Summary) -> dict[str, Any] | None:
    """Each rank's mean step; of many ranks those that wait least and most stand at the ends."""
    averages = run.averages
    if not averages:
        return None
    if len(averages) > 2 * ENDS:
        averages = sorted(averages, key=lambda row: row.exposed_wait_ns)
    longest = max(row.duration_ns for row in averages)
    stragglers = run.stragglers()
    hosts = {entry["rank"]: entry["host"] for entry in run.results["ranks"]}
    rows = ends([
        {
            "rank": row.rank,
            "host": hosts.get(row.rank, ""),
            "named": row.rank in stragglers,
            "step": row.step,
            **_row(row, longest, run.pair_bound_ns),
        }
        for row in averages
    ])  # fmt: skip
    return {
        "which": words.spans(run.evidence_steps, 6),
        "count": words.counted(len(run.evidence_steps), "steady-state step"),
        "steady": run.has_steady_steps,
        "rows": rows,
        "hosts": len({*hosts.values()}) > 1,
    }


def path(results: Results) -> list[list[str]]:
    """The critical path by what binds it: on it, its share, the mean per rank, GPU time lost."""
    critical = results["critical_path"]
    if critical is None or not critical["step_ns"]:
        return []
    return [
        [
            part["what"],
            words.milliseconds(part["path_ns"], 2),
            words.percent(part["path_ns"] / critical["step_ns"]),
            words.milliseconds(part["mean_ns"], 2) if part["what"] != "idle" else "-",
            words.milliseconds(part["imbalance_gpu_ns"], 2) if part["imbalance_gpu_ns"] else "-",
        ]
        for part in critical["parts"]
    ]


def _row(row: Average, longest_ns: float, floor_ns: int) -> dict[str, Any]:
    """A rank's step: a cell for each part, and a stacked bar in % of the longest step.

    The bar has (tone, left, width) of each part but idle, which is what the others leave.
    """
    parts = (
        ("compute", "compute", row.compute_ns),
        ("wait", "exposed wait", row.exposed_wait_ns),
        ("transfer", "exposed transfer", row.exposed_communication_ns - row.exposed_wait_ns),
        ("copies", "exposed copies", row.exposed_copy_ns),
        ("soft", "idle", row.idle_ns),
    )
    total = min(row.duration_ns / longest_ns, 1.0) * 100 if longest_ns else 0.0
    left, cells, bars, texts = 0.0, [], [], []
    for tone, name, ns in parts:
        frac = ns / row.duration_ns if row.duration_ns else 0.0
        ms, percent = summary.part_cells(row, ns, floor_ns if tone == "wait" else 0)
        # compute is what one hopes for: the shade is for what costs
        shade = round(max(frac, 0.0), 2) if percent and tone != "compute" else 0
        cells.append({"tone": tone, "share": shade, "ms": ms, "percent": percent})
        if frac:
            texts.append(f"{name} {words.percent(frac)}")
        if frac * total > 0 and name != "idle":
            # the style sheet knows these tones by their first letters, copies by m
            letter = "m" if tone == "copies" else tone[0]
            bars.append((letter, round(left, 2), round(frac * total, 2)))
        left += frac * total
    label = f"{words.ms(row.duration_ns)}: {', '.join(texts)}"
    return {"cells": cells, "bar": {"parts": bars, "total": round(total, 2), "label": label}}
