"""The CUDA calls of a Kineto trace, found by correlation id."""

from __future__ import annotations

import numpy as np

from clusterprof.ingest.columns import Bools, Ints
from clusterprof.ingest.kineto.trace_events import Trace


def launches(trace: Trace, correlation: Ints, base: int) -> tuple[Ints, Ints, Ints, Bools]:
    """Return begin, end (wall-clock ns) and thread of the calls with these ids, and which exist."""
    calls = [trace.spans[category] for category in ("cuda_runtime", "cuda_driver")]
    starts, ends = zip(*(spans.times(base) for spans in calls), strict=True)
    start, end = np.concatenate(starts), np.concatenate(ends)
    thread = np.concatenate([spans.column("thread") for spans in calls])
    ids = np.concatenate([spans.column("correlation") for spans in calls])
    if not ids.size:
        nothing = np.zeros(correlation.size, np.int64)
        return nothing, nothing, nothing, np.zeros(correlation.size, bool)
    order = np.lexsort((start, ids))
    place = order[np.minimum(np.searchsorted(ids[order], correlation), ids.size - 1)]
    known = (ids[place] == correlation) & (correlation > 0)
    return start[place], end[place], thread[place], known
