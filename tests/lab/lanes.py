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

#: How many lanes the tests have by what they need; the first counts.
_LANES = {
    # They wait more than they compute, but of several nsys that start at once some fail, and their
    # ranks have seconds to end in.
    "needs_nsys": 1,
    # Several ranks that each load torch: all processors for some seconds.
    "needs_torch": 1,
}


def lanes(items: list[pytest.Item]) -> dict[str, str]:
    """The lane of each test by its id; "" for none. The tests of a file share their fixtures."""
    found = dict.fromkeys((item.nodeid for item in items), "")
    for need, count in reversed(_LANES.items()):
        needing = [item for item in items if item.get_closest_marker(need)]
        taken = [0] * count
        lane = {}
        for path, tests in Counter(item.path for item in needing).most_common():
            lane[path] = taken.index(min(taken))
            taken[lane[path]] += tests
        found.update((item.nodeid, f"{need} {lane[item.path]}") for item in needing)
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

    def _reschedule(self, node: Any) -> None:
        """A worker that replaces another is given nothing before it has collected."""
        if node in self.registered_collections:
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return self._lanes[nodeid] or nodeid
