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
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.results import Finding


def findings(dataset: Dataset) -> tuple[list[Finding], list[str]]:
    """Return the findings, sorted by cost per step, and warnings.

    With too few settled steps there are none but what the capture itself caused, and a warning
    says by how much to lengthen the window: a guess would blame whom its start has made late.
    """
    if not dataset.ranks:
        return [], []
    if len(dataset.steady_steps) < LEAST_STEADY:
        more = profiler_overhead.missing(dataset)
        said = (
            f"not enough steady-state steps ({len(dataset.steady_steps)}; the first step of a "
            f"window shows the capture's own start): lengthen the window by {more} steps "
            "or more (--steps)"
        )
        return profiler_overhead.find(dataset), [said]
    weighed = straggler_cost.weigh(dataset)
    found = straggler.find(dataset, weighed)
    late = sum(f["cost_ns_per_step"] for f in found if f["severity"] != "info")
    paced = host_bound.find(dataset, late)
    most = max((f["cost_ns_per_step"] for f in paced), default=0)
    found = straggler.find(dataset, weighed, float(most))
    found += [*pipeline.find(dataset, late), *pageable_copies.find(dataset), *paced]
    waits = unprofiled.find(dataset)
    # where members wait for a rank without a report nobody can tell transfer from waiting
    unclear = frozenset(str(e["communicator"]) for f in waits for e in f["evidence"])
    found += [*waits, *communication.find(dataset, unclear)]
    found.sort(key=lambda f: -f["cost_ns_per_step"])
    return [*found, *profiler_overhead.find(dataset)], []
