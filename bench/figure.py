"""One figure: what is promised, what was measured, and against what."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measured figure. All values are in `unit`; it should be below `limit`."""

    name: str
    unit: str
    limit: float
    #: None where it could not be measured; `remark` then says why
    measured: float | None
    #: what the same run measured for the baseline, in words
    baseline: str = ""
    remark: str = ""
    #: the single measurements behind the median
    runs: Sequence[float] = field(default=(), repr=False)
    #: where the noise is of the limit's size: the 95% interval of `measured`
    interval: tuple[float, float] | None = None
    #: what cannot be had for less, and what takes the rest, where the limit is missed
    floor: str = ""

    @property
    def verdict(self) -> str:
        """In words; `unclear` where the limit lies within the noise of a busy machine."""
        if self.measured is None:
            return "not measured"
        low, high = self.interval or (self.measured, self.measured)
        return "ok" if high < self.limit else "unclear" if low < self.limit else "NOT OK"

    @property
    def missed(self) -> str:
        """The floor, where the limit is missed."""
        return f"floor: {self.floor}" if self.floor and self.verdict == "NOT OK" else ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "runs": list(self.runs), "verdict": self.verdict}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """A 95% interval for the median, from the order of the values alone.

    The binomial bounds: between the k-th smallest and the k-th largest, whatever the
    distribution. With fewer than six values these are the smallest and the largest.
    """
    ordered = sorted(values)
    count = len(ordered)
    k = max(0, int(count / 2 - 0.98 * count**0.5))
    return ordered[k], ordered[count - 1 - k]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def table(figures: Sequence[Figure]) -> str:
    """The figures as a Markdown table, which is what bench/README.md keeps."""
    rows = [("figure", "limit", "measured", "", "baseline in the same run")]
    for each in figures:
        measured = "—" if each.measured is None else f"{_number(each.measured)} {each.unit}"
        if each.interval:
            measured += f" ({each.interval[0]:+.2f} to {each.interval[1]:+.2f})"
        rows.append(
            (
                each.name,
                f"< {_number(each.limit)} {each.unit}",
                measured,
                each.verdict,
                "; ".join(filter(None, (each.baseline, each.remark, each.missed))),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
