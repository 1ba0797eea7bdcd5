"""The verdict's first line."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.analysis.finding import ms
from clusterprof.analysis.scene import LEAST_SETTLED, Scene
from clusterprof.results import Finding

#: a straggler is the verdict where it costs this part of what costs most
_LEADS_FRAC = 0.5


def verdict(scene: Scene, findings: Sequence[Finding]) -> str:
    """One sentence: who holds up the others; else that nobody does, and what costs most."""
    if not scene.ranks:
        return "nothing to say: no report could be read"
    if len(scene.settled) < LEAST_SETTLED:
        return f"not enough settled steps for a verdict ({len(scene.settled)} of {LEAST_SETTLED})"
    blamed = [f for f in findings if f["code"].startswith("straggler.") and f["severity"] != "info"]
    costly = [f for f in findings if f["severity"] != "info"]
    if blamed:
        most = costly[0]
        if blamed[0]["cost_ns_per_step"] >= _LEADS_FRAC * most["cost_ns_per_step"]:
            return blamed[0]["summary"]
        # who is late is asked first, but not where something else costs many times as much
        return f"{most['summary']}; beside that {blamed[0]['summary']}"
    if len(scene.ranks) < 2:
        start = f"only rank {scene.ranks[0]} has a report, so nobody can be called late"
    else:
        start = "no stragglers"
    if costly:
        return f"{start}; {costly[0]['summary']}"
    steps = f"{len(scene.settled)} settled steps"
    return f"{start}, and nothing else stands out in {steps} of {ms(scene.step_ns)}"
