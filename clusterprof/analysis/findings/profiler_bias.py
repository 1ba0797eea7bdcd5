"""What holds inside the window only is the capture's doing and nobody's fault."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.analysis.findings.finding import ms
from clusterprof.analysis.model import host_gaps
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.results import CaptureCost, Finding

#: a host that is away this part of its cost at one stretch is late by its own doing
_AWAY_FRAC = 0.5


def weigh(dataset: Dataset, found: Sequence[Finding], cost: CaptureCost | None) -> list[Finding]:
    """Return the findings; late hosts that the capture itself explains are information, and last.

    Tracing takes time of the hosts, of one more than of another. By the step logs, which go on
    outside the window, the settled steps are so much longer than the others: a host whose
    lateness costs no more than that may be in time without a capture; but tracing never keeps a
    host away at a stretch (`away`): one that is late by that is blamed. Medians are compared, so
    that a step that is slow now and then, inside or outside, explains nothing; nor does anything
    here where a run has no step logs outside its window. Assumes that the job does the same
    inside the window and around it.
    """
    slower = _slower(dataset, cost)
    may_be = [_may_be(dataset, f, slower) for f in found]
    explained = [_explained(f, slower) for f, may in zip(found, may_be, strict=True) if may]
    return [*(f for f, may in zip(found, may_be, strict=True) if not may), *explained]


def _slower(dataset: Dataset, cost: CaptureCost | None) -> float:
    """How much longer the median settled step is than one outside the window (ns), 0 if not."""
    if cost is None or not len(dataset.durations):
        return 0.0
    times = [cost["profiled"]["before_ns"], cost["profiled"]["after_ns"]]
    known = [ns for ns in times if ns is not None]
    return max(0.0, float(np.median(dataset.durations)) - max(known)) if known else 0.0


def _may_be(dataset: Dataset, found: Finding, slower: float) -> bool:
    cost, rank = found["cost_ns_per_step"], found["rank"]
    if found["code"] != "straggler.host" or found["severity"] == "info" or rank is None:
        return False
    return 0 < cost <= slower and host_gaps.excess(dataset, rank) < _AWAY_FRAC * cost


def _explained(found: Finding, slower: float) -> Finding:
    """The finding as information, with the reason."""
    what = (
        f"outside the window steps are {ms(slower)} shorter: the capture itself may be what makes "
        f"this host late"
    )
    return {
        **found,
        "severity": "info",
        "confidence": round(0.5 * found["confidence"], 2),
        "summary": f"{found['summary']}; but {what}",
        "evidence": [*found["evidence"], {"slower_ns": round(slower), "what": what}],
        "advice": "nothing yet: capture again with fewer ranks or less tracing "
        "(--trace cuda) and see whether it is late again",
    }
