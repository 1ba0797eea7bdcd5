"""A run that has been collected and not been merged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from seeds import content

from clusterprof import run_directory
from clusterprof.agent.contracts import states
from clusterprof.arguments import parse_ranks


@pytest.fixture
def run(tmp_path: Path) -> run_directory.Window:
    """A run of three ranks, all profiled, that has been collected."""
    made = run_directory.create(tmp_path / "run")
    for rank in range(3):
        states.advance(str(made.rank(rank)), "captured", chosen=True)
        trace = json.dumps(content(rank, world_size=3)).encode()
        (made.rank(rank) / "trace.json.gz").write_bytes(gzip.compress(trace))
    made.directory.write_manifest(
        {
            "schema_version": 1,
            "launcher": "torchrun",
            "world_size": None,
            "selection": parse_ranks("all")._asdict(),
            "window": [5, 10],
            "outcomes": [{"rank": rank, "state": "collected", "reason": ""} for rank in range(3)],
        }
    )
    return made
