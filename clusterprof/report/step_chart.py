"""The steps of the whole run as bars, with the window and the steps that the profiler disturbed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterprof import words
from clusterprof.report.whole_job import Job
from clusterprof.results import Results, steps_to_look_at

Reals = npt.NDArray[np.float64]

#: bars that are wide enough to point at
_MOST_BARS = 160
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 170, 58, 8, 8, 24
#: with few bars the drawing is narrower: so much for a bar, but never less in all
_PER_BAR, _LEAST_WIDTH = 84, 400
#: a bar of a block of steps is so many times as wide as a single step's
_BLOCK_WIDTH = 3
#: how much of the height the longest undisturbed bar takes: what is longer is cut off and marked
_FULL = 0.82


@dataclass(frozen=True)
class Bar:
    """One step, or a block of steps: the median over ranks (ns), and the least and the most."""

    first: int
    count: int
    median_ns: float
    low_ns: float
    high_ns: float


def bars(results: Results, job: Job) -> list[Bar]:
    """All steps in order: those of the step logs, and the others in blocks; else the window's."""
    logged: dict[int, list[float]] = {}
    for log in job.steps.values():
        took = log["end_ns"].to_numpy() - log["begin_ns"].to_numpy()
        for step, ns in zip(log["step"].to_pylist(), took.tolist(), strict=True):
            logged.setdefault(step, []).append(ns)
    if not logged:
        logged = {
            step["step"]: [each["duration_ns"] for each in step["ranks"]]
            for step in results["steps"]
            if step["ranks"]
        }
    found = [
        Bar(step, 1, float(np.median(each)), min(each), max(each)) for step, each in logged.items()
    ]
    found += _blocks(job.paces, [*logged])
    return sorted(found, key=lambda bar: bar.first)


def _blocks(paces: Mapping[int, Mapping[str, Any]], logged: list[int]) -> list[Bar]:
    """The blocks of all ranks, which begin and end in the same steps but for a few."""
    blocks: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for pace in paces.values():
        names = ("first_step", "count", "median_ns", "q1_ns", "q3_ns")
        if not all(name in pace for name in names):
            continue
        for first, count, *times in zip(*(pace[name].tolist() for name in names), strict=True):
            blocks.setdefault((first, count), []).append(tuple(times))
    out: list[Bar] = []
    for (first, count), times in sorted(blocks.items()):
        # another rank's block of the same steps is not drawn twice
        if out and first < out[-1].first + out[-1].count:
            continue
        median, low, high = np.median(np.asarray(times, np.float64), axis=0).tolist()
        if not any(first <= step < first + count for step in logged):
            out.append(Bar(first, count, median, low, high))
    return out


def chart(results: Results, job: Job) -> dict[str, Any] | None:
    """The drawing: bars, the window's place and the ticks, in units of `width` x `height`.

    None where fewer than three steps are known.
    """
    every = bars(results, job)
    window = [step["step"] for step in results["steps"]]
    shown = _nearest(every, window)
    if len(shown) < 3:
        return None
    unsteady = {step["step"] for step in results["steps"] if not step["settled"]}
    usual = [bar.median_ns for bar in shown if bar.first not in unsteady]
    # the first steps of a job compile; a scale up to them would make all others equal
    top = float(np.quantile(usual or [bar.median_ns for bar in shown], 0.9)) / _FULL * 1.15
    widths = np.asarray([_BLOCK_WIDTH if bar.count > 1 else 1 for bar in shown], np.float64)
    wide_enough = max(_LEFT + _RIGHT + _PER_BAR * float(widths.sum()), _LEAST_WIDTH)
    width = round(min(wide_enough, _WIDTH))
    unit = (width - _LEFT - _RIGHT) / float(widths.sum())
    left = _LEFT + (np.cumsum(widths) - widths) * unit

    def up(ns: float) -> float:
        return _TOP + _HEIGHT * (1 - min(ns / top, 1))

    drawn = [
        {
            "x": round(x + 0.08 * unit, 1),
            "width": round(wide * unit - 0.16 * unit, 1),
            "middle": round(x + wide * unit / 2, 1),
            "y": round(up(bar.median_ns), 1),
            "height": round(_TOP + _HEIGHT - up(bar.median_ns), 1),
            "low": round(up(bar.low_ns), 1),
            "high": round(up(bar.high_ns), 1),
            "cut": max(bar.median_ns, bar.high_ns) > top,
            "inside": bar.count == 1 and bar.first in window,
            "stripes": _stripes(
                round(x + 0.08 * unit, 1), up(bar.median_ns), round(wide * unit - 0.16 * unit, 1)
            )
            if bar.first in unsteady
            else "",
            "label": _label(bar, bar.first in unsteady),
        }
        for bar, x, wide in zip(shown, left.tolist(), widths.tolist(), strict=True)
    ]
    inside = [each for each in drawn if each["inside"]]
    return {
        "width": width,
        "height": _TOP + _HEIGHT + _BOTTOM,
        "floor": _TOP + _HEIGHT,
        "left": _LEFT,
        "bars": drawn,
        "window": _span(inside, unit) if job.steps and inside else None,
        "marks": _marks(shown, drawn, width),
        "scale": _scale(top, up),
        "cut": any(each["cut"] for each in drawn),
        "left_out": len(every) - len(shown),
        "timeline": _timeline(results, whole=bool(job.steps)),
        "of": f"{len(job.steps):,} ranks' step logs" if job.steps else "the profiled ranks' steps",
    }


def _timeline(results: Results, whole: bool) -> str:
    """Which steps the timeline shows at first: another may be higher here, and that says why."""
    shown = steps_to_look_at(results)
    if len(shown) < 2:
        return ""
    of = " of the profiled ranks" if whole else ""
    steady = " in steady state" if any(step["settled"] for step in results["steps"]) else ""
    return (
        f"The timeline shows step {shown[0]}, a typical one, and step {shown[1]}, the longest"
        f"{steady}{of}."
    )


def _scale(top: float, up: Callable[[float], float]) -> list[tuple[float, str]]:
    """Round times, where they stand, and how they are written."""
    rough = top / 5
    power = 10.0 ** math.floor(math.log10(max(rough, 1)))
    every = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    ticks = (np.arange(1, int(top / every) + 1) * every).tolist()
    return [(round(up(ns), 1), f"{ns / 1e6:g} ms") for ns in ticks]


def _nearest(every: list[Bar], window: list[int]) -> list[Bar]:
    if len(every) <= _MOST_BARS:
        return every
    middle = (window[0] + window[-1]) / 2 if window else every[-1].first
    nearest = sorted(every, key=lambda bar: abs(bar.first - middle))[:_MOST_BARS]
    return sorted(nearest, key=lambda bar: bar.first)


def _label(bar: Bar, unsteady: bool) -> str:
    """What a bar says when it is pointed at."""
    which = (
        f"step {bar.first}" if bar.count == 1 else f"steps {bar.first}–{bar.first + bar.count - 1}"
    )
    apart = f"{words.duration(bar.low_ns)} to {words.duration(bar.high_ns)}"
    spread = f", quartiles {apart}" if bar.count > 1 else f", ranks {apart}"
    disturbed = ", not in steady state" if unsteady else ""
    return f"{which}: {words.duration(bar.median_ns)}{spread}{disturbed}"


def _numbers(bar: Bar) -> str:
    return f"{bar.first}" if bar.count == 1 else f"{bar.first}–{bar.first + bar.count - 1}"


def _stripes(x: float, y: float, width: float) -> str:
    """Lines across a bar, from its foot to its head."""
    lines = np.arange(_TOP + _HEIGHT - 3, y, -6)
    return "".join(f"M{x} {line:.1f}h{width}" for line in lines.tolist())


def _span(inside: list[dict[str, Any]], unit: float) -> tuple[float, float]:
    """From where to where the window lies."""
    begin = inside[0]["x"] - 0.08 * unit
    return round(begin, 1), round(inside[-1]["x"] + inside[-1]["width"] + 0.08 * unit - begin, 1)


def _marks(shown: list[Bar], drawn: list[dict[str, Any]], width: int) -> list[tuple[float, str]]:
    """Step numbers below the bars, as many as fit."""
    out: list[tuple[float, str]] = []
    free = -1.0
    for bar, each in zip(shown, drawn, strict=True):
        text = _numbers(bar)
        half = 3.6 * len(text)
        if each["middle"] - half > free and each["middle"] + half < width:
            out.append((each["middle"], text))
            free = each["middle"] + half + 10
    return out
