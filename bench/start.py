"""How long one waits: for help, and for the agent in a rank's start."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from agent import armed
from figure import Figure, median
from process import Failed, run

_RANK = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def help_time(rounds: int) -> Figure:
    """`clusterprof --help` as a user types it, next to an interpreter that does nothing."""
    program = Path(sys.executable).parent / "clusterprof"
    bare, helped = [], []
    run([program, "--help"])
    for _ in range(rounds):
        bare.append(run([sys.executable, "-c", "pass"]).seconds * 1e3)
        helped.append(run([program, "--help"]).seconds * 1e3)
    return Figure(
        "clusterprof --help",
        "ms",
        100.0,
        median(helped),
        f"a bare interpreter: {median(bare):.1f} ms",
        runs=helped,
    )


def agent_start(rounds: int) -> Figure:
    """What the agent adds to the start of a rank's interpreter, pair by pair."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**armed(Path(folder), "environment"), **_RANK}
        bare, added = [], []
        first = run([sys.executable, "-c", "import sys; print(*sys.modules)"], environ)
        if "_clusterprof_agent.rank.start" not in first.stdout.split() or first.stderr:
            raise Failed(f"the agent did not start: {first.stderr}")
        for _ in range(rounds):
            without = run([sys.executable, "-c", "pass"], _RANK).seconds
            with_agent = run([sys.executable, "-c", "pass"], environ).seconds
            bare.append(without * 1e3)
            added.append((with_agent - without) * 1e3)
    return Figure(
        "agent, added to a rank's start",
        "ms",
        50.0,
        median(added),
        f"a bare interpreter: {median(bare):.1f} ms",
        runs=added,
    )
