"""The verdict's first line."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.analysis.finding import ms
from clusterprof.analysis.scene import LEAST_SETTLED, Scene
from clusterprof.results import Finding


def verdict(scene: Scene, findings: Sequence[Finding]) -> str:
    """One sentence: who holds up the others; else that nobody does, and what costs most."""
    if not scene.ranks:
        return "nothing to say: no report could be read"
    if len(scene.settled) < LEAST_SETTLED:
        return f"not enough settled steps for a verdict ({len(scene.settled)} of {LEAST_SETTLED})"
    blamed = [f for f in findings if f["code"].startswith("straggler.") and f["severity"] != "info"]
    if blamed:
        return blamed[0]["summary"]
    costly = [f for f in findings if f["severity"] != "info"]
    if len(scene.ranks) < 2:
        start = f"only rank {scene.ranks[0]} has a report, so nobody can be called late"
    else:
        start = "no stragglers"
    if costly:
        return f"{start}; {costly[0]['summary']}"
    steps = f"{len(scene.settled)} settled steps"
    return f"{start}, and nothing else stands out in {steps} of {ms(scene.step_ns)}"
