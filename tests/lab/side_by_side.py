"""Which tests run in one process, one after the other, and which of them begin first.

The tests of a file share its fixtures, those of a study that study (`studied`, `simulated`), those
of the page one browser, and of several nsys that start at once some fail. All else may run beside
anything.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from lab import durations

#: what tests in several files need of which there is one
_ONE = ("needs_nsys", "needs_chromium")
#: the parameters by which tests in several files ask for one study
_STUDY = ("recording", "job_kind")


def group(item: pytest.Item) -> str:
    """What this test shares with all others of its group."""
    if item.get_closest_marker("golden"):
        return item.nodeid
    for need in filter(item.get_closest_marker, _ONE):
        return need
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    studies = [f"{name} {parameters[name]}" for name in _STUDY if name in parameters]
    return studies[0] if studies else item.nodeid.partition("::")[0]


def order(items: list[pytest.Item], root: Path) -> None:
    """Sort the tests by group, those groups first that take longest; in a group all stays."""
    seconds = durations.kept(root)
    counts: dict[str, int] = defaultdict(int)
    weights: dict[str, float] = defaultdict(float)
    for item in items:
        counts[item.nodeid.partition("::")[0]] += 1
    for item in items:
        path = item.nodeid.partition("::")[0]
        weights[group(item)] += seconds.get(path, 1.0) / counts[path]
    items.sort(key=lambda item: (-weights[group(item)], group(item)))


def write(items: list[pytest.Item], path: Path) -> None:
    """Tell the groups to the controller of pytest-xdist, which does not collect."""
    path.write_text(json.dumps({item.nodeid: group(item) for item in items}))
