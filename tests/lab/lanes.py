"""Which tests pytest-xdist may run at the same time (`--dist loadgroup`).

Of a lane one test runs at a time, all of them in one worker; a test without a lane runs anywhere.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

#: How many lanes the tests have that need a real nsys. They wait more than they compute, but of
#: several nsys that start at once some fail, and their ranks have seconds to end in.
_NSYS_LANES = 2


def lanes(items: list[pytest.Item]) -> dict[str, str]:
    """The lane of each test by its id; "" for none. A file's tests share their fixtures."""
    with_nsys = Counter(each.path for each in items if each.get_closest_marker("needs_nsys"))
    taken = [0] * _NSYS_LANES
    nsys = {}
    for path, count in with_nsys.most_common():
        lane = taken.index(min(taken))
        taken[lane] += count
        nsys[path] = f"nsys {lane}"
    found = {}
    for item in items:
        if item.get_closest_marker("needs_nsys"):
            found[item.nodeid] = nsys[item.path]
        else:
            # A training takes all processors for its seconds: one at a time.
            found[item.nodeid] = "training" if item.get_closest_marker("needs_torch") else ""
    return found


def write(items: list[pytest.Item], path: Path) -> None:
    """Tell them to the controller of pytest-xdist, which does not collect."""
    path.write_text(json.dumps(lanes(items)))


class Lanes(LoadScopeScheduling):
    """Gives a worker a whole lane, the longest first, or one test without a lane.

    pytest-xdist's own groups have no effect with pytest 9.2 (it renames the tests in a way that
    pytest no longer sees), and would be in every test's name.
    """

    def __init__(self, config: pytest.Config, log: Any, folder: Path) -> None:
        super().__init__(config, log)
        self._folder = folder
        self._lanes: dict[str, str] = {}

    def schedule(self) -> None:
        """Called when all workers have collected, and again for each that replaces another."""
        self._lanes = json.loads(next(self._folder.glob("lanes-*")).read_text())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._lanes[nodeid] or nodeid
