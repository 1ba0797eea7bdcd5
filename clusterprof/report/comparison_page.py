"""A comparison as one HTML page, which loads nothing from anywhere and has no script."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from clusterprof.agent.contracts import files
from clusterprof.report import comparison_text
from clusterprof.results import Change, Comparison
from clusterprof.run_directory import writing


class Bar(NamedTuple):
    """A change and its noise about the middle of a drawing, %."""

    at: float
    width: float
    noise_at: float
    noise: float


def render(comparison: Comparison) -> str:
    """The page; the same comparison gives the same page."""
    from clusterprof.report import templates

    changes = comparison_text.changes(comparison)
    return (
        templates.environment()
        .get_template("comparison.html.j2")
        .render(
            comparison=comparison,
            text=comparison_text,
            title="comparison",
            changes=list(zip(changes, _bars(changes), strict=True)),
            findings=comparison_text.finding_rows(comparison),
        )
    )


def write(path: Path, comparison: Comparison) -> None:
    """Write the page by rename; raises `RunDirectoryError` if it cannot be written."""
    with writing(path, "--html"):
        files.write(path, render(comparison).encode(errors="backslashreplace"))


def _bars(changes: list[Change]) -> list[Bar]:
    """All on one scale: half of a drawing is the largest change or noise."""
    largest = max(max(abs(each["change_ns"]), each["noise_ns"]) for each in changes)
    scale = 50 / max(largest, 1)
    found = []
    for each in changes:
        change, noise = each["change_ns"] * scale, each["noise_ns"] * scale
        numbers = (min(50.0, 50 + change), abs(change), 50 - noise, 2 * noise)
        found.append(Bar(*(round(number, 2) for number in numbers)))
    return found
