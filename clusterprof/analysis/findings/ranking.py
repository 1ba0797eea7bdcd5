"""All findings of a study, costliest first."""

from __future__ import annotations

from clusterprof.analysis.findings import (
    communication,
    host_bound,
    pageable_copies,
    pipeline,
    profiler_overhead,
    straggler,
    straggler_cost,
    unprofiled,
)
from clusterprof.analysis.model.dataset import LEAST_SETTLED, Scene
from clusterprof.results import Finding


def findings(scene: Scene) -> tuple[list[Finding], list[str]]:
    """Return the findings, sorted by cost per step, and warnings.

    With too few settled steps there are none but what the capture itself caused, and a warning
    says by how much to lengthen the window: a guess would blame whom its start has made late.
    """
    if not scene.ranks:
        return [], []
    if len(scene.settled) < LEAST_SETTLED:
        more = profiler_overhead.missing(scene)
        said = (
            f"not enough settled steps ({len(scene.settled)}; the first step of a window shows the "
            f"capture's own start): lengthen the window by {more} steps or more (--steps)"
        )
        return profiler_overhead.find(scene), [said]
    weighed = straggler_cost.weigh(scene)
    found = straggler.find(scene, weighed)
    late = sum(f["cost_ns_per_step"] for f in found if f["severity"] != "info")
    paced = host_bound.find(scene, late)
    most = max((f["cost_ns_per_step"] for f in paced), default=0)
    found = straggler.find(scene, weighed, float(most))
    found += [*pipeline.find(scene, late), *pageable_copies.find(scene), *paced]
    waits = unprofiled.find(scene)
    # where members wait for a rank without a report nobody can tell transfer from waiting
    unclear = frozenset(str(e["communicator"]) for f in waits for e in f["evidence"])
    found += [*waits, *communication.find(scene, unclear)]
    found.sort(key=lambda f: -f["cost_ns_per_step"])
    return [*found, *profiler_overhead.find(scene)], []
