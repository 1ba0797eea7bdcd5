"""More ranks than cores: none is in another's way.

The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import RANKS, state, words
from lab.stub import FOLDER

RANKS_OF_A_NODE = 64
OPTIONS = ["--ranks=all", "--steps=5:15", "--run-dir=run", "--no-merge", "--profiler=torch"]
PROGRAM = """
import torch
optimizer = torch.optim.SGD()
for step in range(25):
    optimizer.step()
"""


@pytest.mark.long  # what a writer that begins late is given: test_outbox
def test_ranks_whose_writers_begin_after_their_windows_end_with_their_reports(
    workdir: Path, fault: Callable[..., None]
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    line = [RANKS, str(RANKS_OF_A_NODE), "python", "train.py"]
    env = {"PYTHONPATH": str(FOLDER), "STEP_S": "0"}
    plain = command.run(line, env=env)
    done = command.run(command.clusterprof(["run", *OPTIONS, "--", *line]), env=env)
    states = [state(workdir / "run", rank) for rank in range(RANKS_OF_A_NODE)]
    added_s = done.seconds - plain.seconds
    fault("64 ranks with steps of no time", plain.returncode, done.returncode, added_s, states[0])
    assert done.returncode == plain.returncode == 0, done
    assert words(done.stdout) == words(plain.stdout), done
    assert {each["state"] for each in states} == {"collected"}, done
