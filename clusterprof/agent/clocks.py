"""clock.json: what this host's clocks said when the window opened and closed."""

from __future__ import annotations

import json
import os
import time

from .states import write_beside


def reading(event: str) -> "dict[str, object]":
    """Wall clock and monotonic clock as nearly at once as Python can, with the gap between."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    after = time.monotonic_ns()
    return {"event": event, "wall_ns": wall, "monotonic_ns": before, "gap_ns": after - before}


def write(folder: str, event: str) -> None:
    """Add a reading to the rank's clock.json."""
    path = os.path.join(folder, "clock.json")
    readings = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            readings = json.load(file)
    write_beside(path, json.dumps([*readings, reading(event)]) + "\n")
