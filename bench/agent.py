"""An armed agent, as a rank meets it, without a launcher around it."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import clusterprof

INJECT = Path(clusterprof.__file__).resolve().parent / "agent" / "inject"


def armed(
    folder: Path, identity: str, window: tuple[int, int] = (10, 15), watch_s: int = 0
) -> dict[str, str]:
    """The environment of a rank that counts its steps and is not chosen for capture.

    `identity` says whose variables name the rank, as in a plan: `torchrun`, `environment`;
    `watch_s`: how often its flight recorder is saved, 0 for never.
    """
    run = folder / "run"
    run.mkdir(parents=True)
    plan = {
        "schema_version": 1,
        "run": str(run),
        "selection": {"kind": "ranks", "ranks": [100_000]},
        "identity": identity,
        "window": window,
        "step_on": None,
        "profiler": "torch",
        "watch_s": watch_s,
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    before = os.environ.get("PYTHONPATH")
    return {
        "CLUSTERPROF_PLAN": str(path),
        "PYTHONPATH": f"{INJECT}:{before}" if before else str(INJECT),
    }


def counted(folder: Path) -> dict[int, int]:
    """How many steps each rank logged: proof that the agent ran and did its work."""
    steps = {}
    for log in sorted((folder / "run" / "ranks").glob("*/steps.csv")):
        with log.open(newline="") as file:
            steps[int(log.parent.name)] = sum(1 for _ in csv.DictReader(file))
        pace = log.with_name("pace.csv")
        if pace.exists():
            with pace.open(newline="") as file:
                steps[int(log.parent.name)] += sum(
                    int(row["count"]) for row in csv.DictReader(file)
                )
    return steps
