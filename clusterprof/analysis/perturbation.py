"""What the profiler itself has caused."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.finding import finding, ms
from clusterprof.analysis.scene import Scene
from clusterprof.clock import UNBOUNDED_NS
from clusterprof.results import Finding

#: the ranks' spread after the start is worth a word from this many usual steps on
_LEAST_STEPS = 0.5


def find(scene: Scene) -> list[Finding]:
    """Return `profiler.perturbation`: how far starting the capture tore the ranks apart.

    Measured as the spread of the aligned begins of the first step that all ranks have. It costs
    the settled steps nothing (they leave that step out), so its cost is 0.
    """
    lines = [line for line in scene.timelines if line.has_steps]
    known = [line for line in lines if scene.clock.uncertainty(line.rank) < UNBOUNDED_NS]
    if len(known) < 2:
        return []
    step = max(int(line.step[0]) for line in known)
    begins = []
    for line in known:
        at = int(np.searchsorted(line.step, step))
        if at < len(line.step):
            own = line.host_begin[at : at + 1]
            begins.append((int(scene.clock.align(line.rank, own)[0]), line.rank))
    if len(begins) < 2:
        return []
    (first, early), (last, late) = min(begins), max(begins)
    if last - first < _LEAST_STEPS * scene.step_ns:
        return []
    return [
        finding(
            scene,
            "profiler.perturbation",
            rank=None,
            ranks=[r for _, r in begins],
            cost=np.zeros(len(scene.settled)),
            confidence=0.9,
            at_most="info",
            summary=f"starting the capture tore the ranks {ms(last - first)} apart; step {step} is "
            "left out of the evidence",
            evidence=[
                {
                    "step": step,
                    "rank": late,
                    "time_ns": last,
                    "spread_ns": last - first,
                    "what": f"rank {early} begins step {step} first, rank {late} last",
                }
            ],
            advice="nothing to do: this is not the job's own doing; a longer window makes the "
            "settled part larger",
        )
    ]
