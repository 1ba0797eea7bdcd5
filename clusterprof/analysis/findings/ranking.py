"""All findings of a study, costliest first."""

from __future__ import annotations

from clusterprof.analysis.findings import profiler_overhead, registry, straggler
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.results import Finding


def findings(dataset: Dataset) -> tuple[list[Finding], list[str]]:
    """Return the findings, sorted by cost per step, and warnings.

    With too few steady-state steps there is only the profiler's overhead, and a warning says by how
    much to lengthen the window: a guess would name whom the profiler's start has made late.
    """
    if not dataset.ranks:
        return [], []
    if len(dataset.steady_steps) < LEAST_STEADY:
        more = profiler_overhead.missing(dataset)
        warning = (
            f"not enough steady-state steps ({len(dataset.steady_steps)}; the first step of a "
            f"window shows the profiler's start): lengthen the window by {more} steps or more "
            "(--steps)"
        )
        return profiler_overhead.find(dataset), [warning]
    found: list[Finding] = []
    for module in registry.MODULES:
        found += module.find(dataset, found)
    found = straggler.with_carried_lag(dataset, found)
    found.sort(key=lambda f: -f["cost_ns_per_step"])
    return profiler_overhead.discounted(dataset, found), []
