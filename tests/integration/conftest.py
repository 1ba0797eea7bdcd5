"""What the tests of endings share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import cluster
from lab.command import Completed
from lab.job import Job


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds a row to the table that `make faults` prints."""

    def add(what: str, plain: int, ours: int, added_s: float, found: dict[str, Any]) -> None:
        state, reason = found.get("state", ""), found.get("reason", "")
        record_property("fault", (what, plain, ours, f"{added_s:+.1f} s", state, reason))

    return add


@pytest.fixture
def slurm_network() -> Iterator[Path]:
    """A Slurm whose nodes can be cut off (`lab.cluster.cut`), and are down after twenty seconds."""
    state = cluster.up(CLUSTERPROF_LAB_NETWORK="own", CLUSTERPROF_LAB_TIMEOUT="20")
    yield state
    cluster.down(state)


@pytest.fixture
def job(tmp_path: Path, run_command: Callable[..., Completed]) -> Job:
    return Job(tmp_path / "run", run_command)
