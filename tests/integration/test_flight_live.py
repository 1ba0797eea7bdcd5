"""Jobs that really hang, over gloo, are diagnosed from the dumps that they write."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import command
from lab.warm import Warm

from clusterprof.align.match.flight_calls import match
from clusterprof.analysis.model.hang import Cause, diagnose
from clusterprof.ingest.flight.all_dumps import read_dumps

pytestmark = pytest.mark.needs_torch

PROGRAM = Path(__file__).resolve().parents[1] / "data/flight/hang.py"
RANKS = 4
#: scenario -> what is found, of rank 3, and the call: its group's name and number
PLANTED = {
    "skip": (Cause.OTHER_OPERATION, "0", 7),
    "other": (Cause.OTHER_OPERATION, "0", 7),
    "send": (Cause.NEVER_JOINED, "0", 7),
    "sleep": (Cause.NEVER_JOINED, "2", 3),
    "died": (Cause.NO_DUMP, "0", 7),
    "size": (Cause.OTHER_SIZE, "0", 7),
}


def test_jobs_that_hang_are_diagnosed(tmp_path: Path, torch_process: Warm) -> None:
    done = command.run(
        [*torch_process.launcher(RANKS), PROGRAM, tmp_path, *PLANTED], timeout=600,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    for scenario, (cause, group, sequence) in PLANTED.items():
        for ending in ("", ".json"):
            found = [tmp_path / scenario / f"rank_{rank}{ending}" for rank in range(RANKS)]
            flight = read_dumps([(path, None) for path in found if path.exists()])
            (first, *_) = diagnose(match(flight)).causes
            assert (first["cause"], first["ranks"]) == (cause, [RANKS - 1]), scenario
            assert (first["group"], first["sequence"]) == (group, sequence), scenario
