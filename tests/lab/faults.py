"""The table of endings that `make faults` prints."""

from __future__ import annotations

import os

import pytest

_HEAD = ("ending", "status without", "with", "added", "state", "reason")


def print_table(reporter: pytest.TerminalReporter) -> None:
    """Print what the tests recorded under `fault`, where CLUSTERPROF_TESTS_FAULTS asks for it."""
    if not os.environ.get("CLUSTERPROF_TESTS_FAULTS"):
        return
    rows = [
        tuple(map(str, value))
        for report in reporter.getreports("passed") + reporter.getreports("failed")
        for name, value in report.user_properties
        if name == "fault" and report.when == "call"
    ]
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    reporter.section("endings")
    for row in [_HEAD, *rows]:
        reporter.line(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
