"""A run that has been collected and not been merged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clusterprof import run_directory
from clusterprof.agent.contracts import states
from clusterprof.arguments import parse_ranks

#: traces of three ranks
GLOO = Path(__file__).parents[1] / "data" / "recordings" / "kineto" / "gloo"


@pytest.fixture
def run(tmp_path: Path) -> run_directory.RunDirectory:
    """A run of three ranks, all profiled, that has been collected."""
    made = run_directory.create(tmp_path / "run")
    for rank in range(3):
        states.advance(str(made.rank(rank)), "captured", chosen=True)
        shutil.copy(GLOO / f"rank{rank}.json.gz", made.rank(rank) / "trace.json.gz")
    made.write_manifest(
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
