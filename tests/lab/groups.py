"""How pytest-xdist gives tests to its workers (`--dist loadgroup`): a whole group to one of them.

pytest-xdist's own groups have no effect with pytest 9.2 (it renames the tests in a way that pytest
no longer sees), and would be in every test's name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class Groups(LoadScopeScheduling):
    """In the order of the collection, which `lab.side_by_side` has made."""

    def __init__(self, config: pytest.Config, log: Any, folder: Path) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._folder = folder
        self._groups: dict[str, str] = {}

    def schedule(self) -> None:
        """Called when all workers have collected, and again for each that replaces another."""
        self._groups = json.loads(next(self._folder.glob("*.groups")).read_text())
        super().schedule()

    def _reschedule(self, node: Any) -> None:
        """A worker that replaces another is given nothing before it has collected."""
        if node in self.registered_collections:
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]
