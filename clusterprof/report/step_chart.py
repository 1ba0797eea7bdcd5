"""The steps of the whole run as bars, with the window and the steps that the profiler disturbed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from clusterprof import words
from clusterprof.columns import rows_by
from clusterprof.report.whole_job import Job
from clusterprof.results import Results, steps_to_look_at

#: bars that are wide enough to point at
_MOST_BARS = 160
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 170, 58, 8, 8, 24
_FLOOR = _TOP + _HEIGHT
#: with few bars the drawing is narrower: so much for a bar, but never less in all
_PER_BAR, _LEAST_WIDTH = 84, 400
#: a bar of a block of steps is so many times as wide as a single step's
_BLOCK_WIDTH = 3
#: this part of a bar's place is free at either side
_FREE = 0.08
#: how much of the height the longest undisturbed bar takes: what is longer is cut off and marked
_FULL = 0.82


@dataclass(frozen=True, order=True)
class Bar:
    """One step, or a block of steps: the median over ranks (ns), and the least and the most."""

    first: int
    count: int
    median_ns: float
    low_ns: float
    high_ns: float

    @property
    def wide(self) -> int:
        """How many times as wide as a single step's it is."""
        return _BLOCK_WIDTH if self.count > 1 else 1


def bars(results: Results, job: Job) -> list[Bar]:
    """All steps in order: those of the step logs, and the others in blocks; else the window's."""
    _, step, ns = job.logged
    if not len(step):
        window = results["steps"]
        rows = [(e["step"], account["duration_ns"]) for e in window for account in e["ranks"]]
        step, ns = np.array(rows, np.int64).reshape(-1, 2).T
    singles = []
    for number, rows_of_step in rows_by(step).items():
        of_ranks = ns[rows_of_step]
        median_ns, low_ns, high_ns = np.median(of_ranks), of_ranks.min(), of_ranks.max()
        singles.append(Bar(number, 1, float(median_ns), float(low_ns), float(high_ns)))
    # the blocks of all ranks, which begin and end in the same steps but for a few
    names = ("first_step", "count", "median_ns", "q1_ns", "q3_ns")
    times: dict[tuple[int, int], list[list[int]]] = {}
    for pace in job.paces.values():
        if all(name in pace for name in names):
            for first, count, *of_rank in np.stack([pace[name] for name in names], 1).tolist():
                times.setdefault((first, count), []).append(of_rank)
    blocks: list[Bar] = []
    for (first, count), of_block in sorted(times.items()):
        # another rank's block of the same steps is not drawn twice
        is_new = not blocks or first >= blocks[-1].first + blocks[-1].count
        if is_new and not any(first <= bar.first < first + count for bar in singles):
            blocks.append(Bar(first, count, *np.median(of_block, axis=0).tolist()))
    return sorted([*singles, *blocks], key=lambda bar: bar.first)


def chart(results: Results, job: Job) -> dict[str, Any] | None:
    """The drawing in units of `width` x `height`; None where fewer than three steps are known."""
    every = bars(results, job)
    if len(every) < 3:
        return None
    window = [step["step"] for step in results["steps"]]
    middle = (window[0] + window[-1]) / 2 if window else every[-1].first
    shown = sorted(sorted(every, key=lambda bar: abs(bar.first - middle))[:_MOST_BARS])
    unsteady = {step["step"] for step in results["steps"] if not step["settled"]}
    usual = [bar.median_ns for bar in shown if bar.first not in unsteady]
    # the first steps of a job compile; a scale up to them would make all others equal
    top_ns = float(np.quantile(usual or [bar.median_ns for bar in shown], 0.9)) / _FULL * 1.15
    places = [*accumulate((bar.wide for bar in shown), initial=0)]
    width = min(max(_LEFT + _RIGHT + _PER_BAR * places[-1], _LEAST_WIDTH), _WIDTH)
    # how wide a single step's place is
    unit = (width - _LEFT - _RIGHT) / places[-1]
    drawn = []
    for bar, before in zip(shown, places, strict=False):
        inside = bar.count == 1 and bar.first in window
        figure = _drawn(bar, _LEFT + before * unit, unit, top_ns, disturbed=bar.first in unsteady)
        drawn.append({**figure, "inside": inside})
    frame, inside_bars = None, [bar for bar in drawn if bar["inside"]]
    if job.steps and inside_bars:
        left = inside_bars[0]["x"] - _FREE * unit
        right = inside_bars[-1]["x"] + inside_bars[-1]["width"] + _FREE * unit
        frame = (round(left, 1), round(right - left, 1))
    return {
        "width": width,
        "height": _FLOOR + _BOTTOM,
        "floor": _FLOOR,
        "left": _LEFT,
        "bars": drawn,
        "window": frame,
        "marks": _marks(drawn, width),
        "scale": [(round(_y(ns, top_ns), 1), f"{ns / 1e6:g} ms") for ns in _round_times(top_ns)],
        "cut": any(bar["cut"] for bar in drawn),
        "left_out": len(every) - len(shown),
        "timeline": _shown_in_timeline(results, job),
        "of": f"{len(job.steps):,} ranks' step logs" if job.steps else "the profiled ranks' steps",
    }


def _y(ns: float, top_ns: float) -> float:
    """How far from the upper edge a time ends; what is longer than `top_ns` is cut off."""
    return _TOP + _HEIGHT * (1 - min(ns / top_ns, 1))


def _drawn(bar: Bar, left: float, unit: float, top_ns: float, *, disturbed: bool) -> dict[str, Any]:
    """A bar as it is drawn from `left` on."""
    x, y = round(left + _FREE * unit, 1), _y(bar.median_ns, top_ns)
    width = round(bar.wide * unit - 2 * _FREE * unit, 1)
    # across the bar, from its foot to its head
    lines = np.arange(_FLOOR - 3, y, -6).tolist() if disturbed else []
    kind, spread, numbers = "step", "ranks", f"{bar.first}"
    if bar.count > 1:
        kind, spread = "steps", "quartiles"
        numbers += f"–{bar.first + bar.count - 1}"
    times = [words.duration(ns) for ns in (bar.median_ns, bar.low_ns, bar.high_ns)]
    label = f"{kind} {numbers}: {times[0]}, {spread} {times[1]} to {times[2]}"
    return {
        "x": x,
        "width": width,
        "middle": round(left + bar.wide * unit / 2, 1),
        "y": round(y, 1),
        "height": round(_FLOOR - y, 1),
        "low": round(_y(bar.low_ns, top_ns), 1),
        "high": round(_y(bar.high_ns, top_ns), 1),
        "cut": max(bar.median_ns, bar.high_ns) > top_ns,
        "stripes": "".join(f"M{x} {line:.1f}h{width}" for line in lines),
        "label": label + (", not in steady state" if disturbed else ""),
        "numbers": numbers,
    }


def _shown_in_timeline(results: Results, job: Job) -> str:
    """Which steps the timeline shows: another one may be higher here, and this says why."""
    steps = steps_to_look_at(results)
    if len(steps) < 2:
        return ""
    steady = " in steady state" if any(step["settled"] for step in results["steps"]) else ""
    whose = " of the profiled ranks" if job.steps else ""
    return (
        f"The timeline shows step {steps[0]}, a typical one, and step {steps[1]}, the longest"
        f"{steady}{whose}."
    )


def _round_times(top: float) -> list[float]:
    """At most five round times (ns) up to `top`."""
    power = 10.0 ** math.floor(math.log10(max(top / 5, 1)))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= top / 5)
    return [count * apart for count in range(1, int(top / apart) + 1)]


def _marks(drawn: list[dict[str, Any]], width: int) -> list[tuple[float, str]]:
    """Step numbers below the bars, as many as fit."""
    marks: list[tuple[float, str]] = []
    free = -1.0
    for bar in drawn:
        half = 3.6 * len(bar["numbers"])
        if bar["middle"] - half > free and bar["middle"] + half < width:
            marks.append((bar["middle"], bar["numbers"]))
            free = bar["middle"] + half + 10
    return marks
