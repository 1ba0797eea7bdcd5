"""The steps of the whole run as bars, with the window and the steps that the profiler disturbed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterprof import pauses, words
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


@dataclass(frozen=True)
class Bar:
    """One step, or a block of steps: the median over ranks (ns), and the least and the most."""

    first: int
    count: int
    median_ns: float
    low_ns: float
    high_ns: float

    @property
    def numbers(self) -> str:
        """Which step, or from which to which."""
        return f"{self.first}" if self.count == 1 else f"{self.first}–{self.first + self.count - 1}"

    @property
    def wide(self) -> int:
        """How many times as wide as a single step's it is."""
        return _BLOCK_WIDTH if self.count > 1 else 1

    @property
    def label(self) -> str:
        """What it says when it is pointed at."""
        kind, spread = ("step", "ranks") if self.count == 1 else ("steps", "quartiles")
        apart = f"{words.duration(self.low_ns)} to {words.duration(self.high_ns)}"
        return f"{kind} {self.numbers}: {words.duration(self.median_ns)}, {spread} {apart}"


@dataclass(frozen=True)
class Scale:
    """What the drawing's full height stands for, and how wide a single step's place is."""

    top_ns: float
    unit: float

    def y(self, ns: float) -> float:
        """Return how far from the drawing's upper edge a time ends; what is longer is cut off."""
        return _TOP + _HEIGHT * (1 - min(ns / self.top_ns, 1))

    def drawn(
        self, bar: Bar, before: int, *, inside: bool, disturbed: bool, paused: str
    ) -> dict[str, Any]:
        """Return a bar as it is drawn behind so many places of single steps."""
        left, high, free = _LEFT + before * self.unit, self.y(bar.median_ns), _FREE * self.unit
        x, width = round(left + free, 1), round(bar.wide * self.unit - 2 * free, 1)
        # across the bar, from its foot to its head
        lines = np.arange(_FLOOR - 3, high, -6).tolist() if disturbed else []
        return {
            "x": x,
            "width": width,
            "middle": round(left + bar.wide * self.unit / 2, 1),
            "y": round(high, 1),
            "height": round(_FLOOR - high, 1),
            "low": round(self.y(bar.low_ns), 1),
            "high": round(self.y(bar.high_ns), 1),
            "cut": max(bar.median_ns, bar.high_ns) > self.top_ns,
            "inside": inside,
            "stripes": "".join(f"M{x} {line:.1f}h{width}" for line in lines),
            "label": bar.label + (", not in steady state" if disturbed else "") + paused,
            "paused": bool(paused),
            "numbers": bar.numbers,
        }


def bars(results: Results, job: Job) -> list[Bar]:
    """All steps in order: those of the step logs, and the others in blocks; else the window's."""
    _, step, ns = job.logged
    if not len(step):
        window = results["steps"]
        rows = [(e["step"], account["duration_ns"]) for e in window for account in e["ranks"]]
        step, ns = np.array(rows, np.int64).reshape(-1, 2).T
    by_step = {number: ns[rows] for number, rows in rows_by(step).items()}
    steps = [
        Bar(number, 1, float(np.median(of_ranks)), float(of_ranks.min()), float(of_ranks.max()))
        for number, of_ranks in by_step.items()
    ]
    blocks = _blocks(job.paces, [bar.first for bar in steps])
    return sorted([*steps, *blocks], key=lambda bar: bar.first)


def _blocks(
    paces: Mapping[int, Mapping[str, npt.NDArray[np.int64]]], logged: Iterable[int]
) -> list[Bar]:
    """The blocks of all ranks, which begin and end in the same steps but for a few."""
    names = ("first_step", "count", "median_ns", "q1_ns", "q3_ns")
    times: dict[tuple[int, int], list[list[int]]] = {}
    for pace in paces.values():
        if all(name in pace for name in names):
            for first, count, *of_rank in np.stack([pace[name] for name in names], 1).tolist():
                times.setdefault((first, count), []).append(of_rank)
    blocks: list[Bar] = []
    for (first, count), of_ranks in sorted(times.items()):
        # another rank's block of the same steps is not drawn twice
        if blocks and first < blocks[-1].first + blocks[-1].count:
            continue
        if not any(first <= step < first + count for step in logged):
            blocks.append(Bar(first, count, *np.median(of_ranks, axis=0).tolist()))
    return blocks


def _pauses(results: Results, job: Job) -> dict[int, str]:
    """What pauses there are, by their steps, in the attempt whose steps are drawn."""
    entries = results["pauses"]["entries"] if "pauses" in results else []
    return {
        step: pauses.what(entry)
        for entry in entries
        if entry["attempt"] == job.attempt and entry["kind"] != "restart"
        for step in (
            range(entry["first_step"], entry["last_step"] + 1)
            if entry["kind"] == "start" else entry["steps"]
        )
    }  # fmt: skip


def _paused(bar: Bar, pauses_by_step: Mapping[int, str]) -> str:
    """The pause in a step, or how many are in a block, to stand behind the bar's label."""
    if bar.count == 1:
        kind = pauses_by_step.get(bar.first)
        return f"; pause: {kind}" if kind else ""
    count = sum(bar.first <= step < bar.first + bar.count for step in pauses_by_step)
    return f"; {words.counted(count, 'pause')}" if count else ""


def chart(results: Results, job: Job) -> dict[str, Any] | None:
    """The drawing: bars, the window's place and the ticks, in units of `width` x `height`.

    None where fewer than three steps are known.
    """
    every = bars(results, job)
    if len(every) < 3:
        return None
    window = [step["step"] for step in results["steps"]]
    middle = (window[0] + window[-1]) / 2 if window else every[-1].first
    nearest = sorted(every, key=lambda bar: abs(bar.first - middle))[:_MOST_BARS]
    shown = sorted(nearest, key=lambda bar: bar.first)
    unsteady = {step["step"] for step in results["steps"] if not step["settled"]}
    usual = [bar.median_ns for bar in shown if bar.first not in unsteady]
    # the first steps of a job compile; a scale up to them would make all others equal
    top_ns = float(np.quantile(usual or [bar.median_ns for bar in shown], 0.9)) / _FULL * 1.15
    pauses_by_step = _pauses(results, job)
    places = [*accumulate((bar.wide for bar in shown), initial=0)]
    wide_enough = max(_LEFT + _RIGHT + _PER_BAR * places[-1], _LEAST_WIDTH)
    width = min(wide_enough, _WIDTH)
    scale = Scale(top_ns, (width - _LEFT - _RIGHT) / places[-1])
    drawn = [
        scale.drawn(
            bar,
            before,
            inside=bar.count == 1 and bar.first in window,
            disturbed=bar.first in unsteady,
            paused=_paused(bar, pauses_by_step),
        )
        for bar, before in zip(shown, places, strict=False)
    ]
    shown_first, steps = "", steps_to_look_at(results)
    if len(steps) > 1:  # another step may be higher here, and this says why
        steady = " in steady state" if any(step["settled"] for step in results["steps"]) else ""
        shown_first = (
            f"The timeline shows step {steps[0]}, a typical one, and step {steps[1]}, the longest"
            f"{steady}{' of the profiled ranks' if job.steps else ''}."
        )
    inside, frame = [bar for bar in drawn if bar["inside"]], None
    if job.steps and inside:
        left = inside[0]["x"] - _FREE * scale.unit
        right = inside[-1]["x"] + inside[-1]["width"] + _FREE * scale.unit
        frame = (round(left, 1), round(right - left, 1))
    return {
        "width": width,
        "height": _FLOOR + _BOTTOM,
        "floor": _FLOOR,
        "left": _LEFT,
        "bars": drawn,
        "window": frame,
        "marks": _marks(drawn, width),
        "scale": [(round(scale.y(ns), 1), f"{ns / 1e6:g} ms") for ns in _round_times(top_ns)],
        "cut": any(bar["cut"] for bar in drawn),
        "paused": any(bar["paused"] for bar in drawn),
        "left_out": len(every) - len(shown),
        "timeline": shown_first,
        "of": f"{len(job.steps):,} ranks' step logs" if job.steps else "the profiled ranks' steps",
    }


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
