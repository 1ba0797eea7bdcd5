"""One rank with the agent in it, without a launcher around it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from textwrap import dedent
from typing import Any

from clusterprof.agent.contracts.identity import PLAN
from clusterprof.launch.planning import INJECT
from lab import command
from lab.command import Completed

#: Of what torch's imports make, those of its optimizers too, nearly all stays: looking for garbage
#: in it, then and again at the end, takes a third of such a program's time.
LOOP = """
import gc
import sys
gc.disable()
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gc.freeze()
gc.enable()
def iterate(n):
    for _ in range(n):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def until_written(plan: Path) -> None:
    """Wait until all ranks with this plan, which have ended, have left what they leave.

    A rank waits some seconds for its writer. One that a stalled disk holds for longer goes on
    without the rank, and ends when all is written.
    """
    deadline = time.monotonic() + command.PATIENCE_S
    while any(map(is_writer, Path("/proc").glob("[0-9]*"), repeat(plan))):
        assert time.monotonic() < deadline, f"a writer of {plan} does not end"
        time.sleep(0.02)


def is_writer(process: Path, plan: Path) -> bool:
    """Whether a process, by its folder in /proc, writes for a rank with this plan."""
    try:
        environ = (process / "environ").read_bytes().split(b"\0")
        return f"{PLAN}={plan}".encode() in environ and (process / "comm").read_text() == "writer\n"
    except OSError:  # it has ended
        return False


@dataclass
class Job:
    """One rank of a job, run with the agent in it."""

    folder: Path
    run: Callable[..., Completed]

    def __call__(
        self, script: str, *, environ: dict[str, str] | None = None, **plan: Any
    ) -> Completed:
        self.folder.mkdir(exist_ok=True)
        values = {
            "schema_version": 1, "run": str(self.folder), "identity": "torchrun",
            "selection": {"kind": "ranks", "ranks": []}, "window": [2, 4], "step_on": None,
            "profiler": "torch", **plan,
        }  # fmt: skip
        (self.folder / "plan.json").write_text(json.dumps(values))
        file = self.folder / "train.py"
        file.write_text(dedent(script))
        env = {
            "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "none",
            "CLUSTERPROF_PLAN": str(self.folder / "plan.json"), "PYTHONPATH": str(INJECT),
            **(environ or {}),
        }  # fmt: skip
        done = self.run([sys.executable, str(file)], env=env)
        until_written(self.folder / "plan.json")
        return done

    @property
    def rank(self) -> Path:
        return self.folder / "ranks" / "00003"

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.rank / "state.json").read_text())
        return state

    def steps(self) -> list[int]:
        lines = (self.rank / "steps.csv").read_text().splitlines()[1:]
        return [int(line.split(",")[0]) for line in lines]


CHOSEN = {"kind": "ranks", "ranks": [3]}
