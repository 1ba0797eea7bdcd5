"""Jobs that really hang, over gloo under torchrun, are diagnosed from the dumps that they write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_jobs_that_hang_under_torchrun_are_diagnosed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={RANKS}", str(PROGRAM), str(tmp_path), *PLANTED]  # fmt: skip
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    subprocess.run(command, env=quiet, check=True, timeout=600, capture_output=True)
    for scenario, (cause, group, sequence) in PLANTED.items():
        for ending in ("", ".json"):
            found = [tmp_path / scenario / f"rank_{rank}{ending}" for rank in range(RANKS)]
            flight = read_dumps([(path, None) for path in found if path.exists()])
            (first, *_) = diagnose(match(flight)).causes
            assert (first["cause"], first["ranks"]) == (cause, [RANKS - 1]), scenario
            assert (first["group"], first["sequence"]) == (group, sequence), scenario
