"""Where the steps' time goes, rank by rank, as the page's tables and bars show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from clusterprof import words
from clusterprof.report import summary
from clusterprof.report.summary import Average
from clusterprof.results import Results

#: rows of a table that are shown at first: so many of either end
ENDS = 8
#: steps of the still table, as many as fit on paper
_MOST_STEPS = 12

_Row = TypeVar("_Row")


class Ends(NamedTuple):
    """A long table's rows: the first and the last ones, and those between, shown on request."""

    first: list[Any]
    between: list[Any]
    last: list[Any]


def ends(rows: Sequence[_Row], first: int = ENDS, last: int = ENDS) -> Ends:
    """Split rows for a table; few ones stay together."""
    if len(rows) <= first + last:
        return Ends([*rows], [], [])
    end = len(rows) - last
    return Ends([*rows[:first]], [*rows[first:end]], [*rows[end:]])


def account(results: Results) -> dict[str, Any] | None:
    """Each rank's mean step: of many the eight that wait least, the eight that wait most, the rest.

    With it the single steps of those that are shown, for paper and browsers without scripts.
    """
    every = summary.averages(results)
    if not every:
        return None
    many = len(every) > 2 * ENDS
    rows = sorted(every, key=lambda row: row.exposed_wait_ns) if many else every
    longest = max(row.duration_ns for row in every)
    evidence, steady = summary.evidence_steps(results)
    floor = summary.pair_bound_ns(results)
    stragglers = summary.stragglers(results)
    hosts = {each["rank"]: each["host"] for each in results["ranks"]}
    split = ends(
        [
            {
                "rank": row.rank,
                "host": hosts.get(row.rank, ""),
                "named": row.rank in stragglers,
                "step": words.milliseconds(row.duration_ns, words.column_decimals(row.duration_ns)),
                "cells": _cells(row, floor),
                "bar": _bar(row, longest),
            }
            for row in rows
        ]
    )
    return {
        "which": words.spans(evidence, 6),
        "count": words.counted(len(evidence), "steady-state step"),
        "steady": steady,
        "rows": split,
        "hosts": len({*hosts.values()}) > 1,
        "still": _still(results, [row["rank"] for row in (*split.first, *split.last)]),
    }


def _still(results: Results, ranks: Sequence[int]) -> dict[str, Any]:
    """The accounts of these ranks step by step."""
    stragglers = summary.stragglers(results)
    steps = results["steps"][:_MOST_STEPS]
    accounts = [(step, each) for step in steps for each in step["ranks"] if each["rank"] in ranks]
    steady = [each["duration_ns"] for step, each in accounts if step["settled"]]
    widest = max(steady or (each["duration_ns"] for _, each in accounts), default=1)
    cells = {
        (step["step"], each["rank"]): _bar(summary.average(each["rank"], [each]), widest)
        | {"steady": step["settled"], "ms": words.milliseconds(each["duration_ns"])}
        for step, each in accounts
    }
    caption = f"ms per step; a full bar is {words.duration(widest)}, the longest steady-state step"
    if len(steps) < len(results["steps"]):
        caption += f"; the first {len(steps)} of {len(results['steps'])} steps"
    return {
        "caption": caption,
        "steps": [{"number": step["step"], "steady": step["settled"]} for step in steps],
        "rows": [
            {
                "rank": rank,
                "named": rank in stragglers,
                "steps": [cells.get((step["step"], rank)) for step in steps],
            }
            for rank in ranks
        ],
    }


def path(results: Results) -> list[list[str]]:
    """The critical path by what binds it: on it, its share, the mean per rank, GPU time lost."""
    found = results["critical_path"]
    if found is None or not found["step_ns"]:
        return []
    return [
        [
            part["what"],
            words.milliseconds(part["path_ns"], 2),
            words.percent(part["path_ns"] / found["step_ns"]),
            words.milliseconds(part["mean_ns"], 2) if part["what"] != "idle" else "-",
            words.milliseconds(part["imbalance_gpu_ns"], 2) if part["imbalance_gpu_ns"] else "-",
        ]
        for part in found["parts"]
    ]


def _parts(row: Average) -> list[tuple[str, str, float]]:
    """(tone, name, ns) of the parts of a step; the last one is what the others leave."""
    return [
        ("compute", "compute", row.compute_ns),
        ("wait", "exposed wait", row.exposed_wait_ns),
        ("transfer", "exposed transfer", row.exposed_transfer_ns),
        ("copies", "exposed copies", row.exposed_copy_ns),
        ("soft", "idle", row.idle_ns),
    ]


def _cells(row: Average, floor: int) -> list[dict[str, Any]]:
    cells = []
    for tone, _, ns in _parts(row):
        ms, percent = summary.part_cells(row, ns, floor if tone == "wait" else 0)
        # compute is what one hopes for: the shade is for what costs
        shaded = percent and tone != "compute" and row.duration_ns
        share = _round(max(ns / row.duration_ns, 0)) if shaded else 0
        cells.append({"tone": tone, "share": share, "ms": ms, "percent": percent})
    return cells


def _bar(row: Average, longest: float) -> dict[str, Any]:
    """A stacked bar: (tone, left, width) of each part but idle, in % of the longest step."""
    total = min(row.duration_ns / longest, 1) * 100 if longest else 0
    every = [(t, name, ns / row.duration_ns) for t, name, ns in _parts(row) if row.duration_ns]
    left, parts = 0.0, []
    for tone, _, share in every[:-1]:
        width = share * total
        if width > 0:
            # the style sheet knows these tones by their first letters, copies by m
            parts.append(("m" if tone == "copies" else tone[0], _round(left), _round(width)))
        left += width
    shares = ", ".join(f"{name} {words.percent(share)}" for _, name, share in every if share)
    label = f"{words.ms(row.duration_ns)}: {shares}"
    return {"parts": parts, "total": _round(total), "label": label}


def _round(value: float) -> float:
    return round(float(value), 2)
