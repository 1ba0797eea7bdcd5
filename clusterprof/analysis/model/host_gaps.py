"""The longest gap between a host's CUDA calls: where a program's own code delays launching.

Tracing, a slow core and a busy machine make every call of a host a little longer; input, a
sleep, a checkpoint, the garbage collector or a computation make one long gap. On recordings with
such a cause planted the longest gap is that cause to within 1 ms, and 0.5 to 1.5 ms on the
hosts that have none.
"""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from clusterprof.analysis.model.dataset import Dataset, Floats
from clusterprof.analysis.model.intervals import union


def longest(dataset: Dataset) -> Floats:
    """The longest time that each host is in no CUDA call and no operator, [ranks, steps] (ns).

    Of all threads that launch work together, since PyTorch's backward has its own. A gap
    belongs to the step in which it ends. NaN where a report has no such calls in the step.
    """
    out = np.full((len(dataset.ranks), len(dataset.steady_steps)), np.nan)
    wanted = np.asarray(dataset.steady_steps)
    for k, (tables, line) in enumerate(zip(dataset.tables, dataset.timelines, strict=True)):
        calls = tables.host_calls
        threads = pc.unique(tables.activity["launch_thread"].drop_null())
        mine = calls.filter(
            pc.and_(
                pc.is_in(calls["thread"], value_set=threads),
                pc.or_(pc.equal(calls["kind"], "cuda"), pc.equal(calls["kind"], "op")),
            )
        )
        in_calls = union(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy())
        if len(in_calls.start) < 2 or not line.has_steps:
            continue
        gap, back = in_calls.start[1:] - in_calls.end[:-1], in_calls.start[1:]
        place = np.searchsorted(line.host_begin, back, side="right") - 1
        inside = (place >= 0) & (back <= line.host_end[-1])
        most = np.full(len(line.step), -1, dtype=np.int64)
        np.maximum.at(most, place[inside], gap[inside])
        known = np.isin(line.step, wanted) & (most >= 0)
        out[k, np.searchsorted(wanted, line.step[known])] = most[known]
    return out


def excess(dataset: Dataset, rank: int) -> float:
    """By how much a rank's longest gap exceeds the others' median, mean over steps (ns)."""
    gaps = longest(dataset)
    k = dataset.ranks.index(rank)
    others = np.delete(gaps, k, axis=0)
    if not np.isfinite(gaps[k]).any() or not np.isfinite(others).any():
        return 0.0
    return max(0.0, float(np.nanmean(gaps[k])) - float(np.nanmedian(others)))
