"""What fixing a straggler would save at most.

Lateness ignores two limits. Without the straggler the others' own hosts and GPUs remain: where
these need nearly the whole step, fixing one rank saves little. And a host that needs longer inside
the window than whole steps took before it is slowed by the profiler, not by the job.
"""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.model import host_gaps, limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats


def at_most(dataset: Dataset, pace: Floats, by_host: Bools) -> Floats:
    """Upper bound of what each rank costs a step, over the steady-state steps' mean (ns), [ranks].

    `pace` [ranks, steps] is what each host needs itself (`host_activity.pace`), `by_host` whether
    the rank is late by its host: then the next host or GPU in line takes its place. A GPU's
    lateness is bounded by what the others' hosts need on average, since queues even that out, and
    their GPUs. Infinite where nothing is known, and in pipelines, whose stages wait for each other
    by construction.
    """
    out = np.full(len(pace), np.inf)
    if dataset.pipelined or not pace.size:
        return out
    hosts, gpus = mean(pace), busy(dataset)
    known = ~np.isnan(hosts)
    if known.sum() < 2:
        return out
    longest = _largest_of_others(np.fmax(hosts, gpus))
    average = np.fmax(_mean_of_others(hosts), _mean_of_others(gpus))
    return np.maximum(dataset.step_ns - np.where(by_host, longest, average), 0.0)


def busy(dataset: Dataset, *, transfers: bool = False) -> Floats:
    """What each GPU does a step without waiting (ns), median over the steady-state steps, [ranks].

    Compute and exposed copies. Transfers count only with `transfers`: those of a rank that waits
    for a straggler might have been overlapped otherwise. NaN where a rank lacks all steps.
    """
    work = dataset.account("compute_ns") + dataset.account("exposed_copy_ns")
    if transfers:
        work += dataset.account("exposed_communication_ns") - dataset.account("exposed_wait_ns")
    out = np.full(len(work), np.nan)
    known = ~np.isnan(work).all(axis=1) if work.size else np.zeros(len(work), dtype=bool)
    if known.any():
        out[known] = np.nanmedian(work[known], axis=1)
    return out


def _largest_of_others(values: Floats) -> Floats:
    """For each value the largest of all others; NaN counts not."""
    least = np.where(np.isnan(values), -np.inf, values)
    first, second = np.sort(least)[::-1][:2]
    only = (least == first) & ((least == first).sum() == 1)
    return np.asarray(np.where(only, second, first))


def _mean_of_others(values: Floats) -> Floats:
    """For each value the mean of all others; NaN counts not."""
    known = ~np.isnan(values)
    count = known.sum() - known
    total = np.nansum(values) - np.where(known, values, 0.0)
    mean: Floats = np.divide(total, count, out=np.zeros(len(values)), where=count > 0)
    return mean


def profiler_overhead(dataset: Dataset, pace: Floats) -> Floats:
    """How much longer each host needs inside the window than whole steps took before it (ns).

    [ranks]; 0 where it may be chance, or where no step log has it. Of mean and median the smaller
    is taken inside and the larger before: pauses in some steps are no overhead. Nor is a single
    stretch in which a host is in no call for longer than the others (`host_gaps`).
    """
    out = np.zeros(len(pace))
    for k, tables in enumerate(dataset.tables):
        usual = tables.info.usual_step_ns
        inside = pace[k][~np.isnan(pace[k])]
        if usual and len(inside):
            more = min(float(inside.mean()), float(np.median(inside))) - usual
            out[k] = max(more, 0.0)
    if out.any():
        out = np.maximum(out - _own_stretches(dataset), 0.0)
    return np.where(out >= limits.LEAST_FRAC * dataset.step_ns, out, 0.0)


def _own_stretches(dataset: Dataset) -> Floats:
    """By how much each host's longest stretch in no call exceeds the usual one (ns), [ranks]."""
    stretches = host_gaps.longest(dataset)
    known = np.isfinite(stretches)
    if not known.any():
        return np.zeros(len(stretches))
    return np.nan_to_num(np.maximum(mean(stretches) - float(np.median(stretches[known])), 0.0))


def of_the_job(
    dataset: Dataset, cost: Floats, pace: Floats, by_host: Bools, overhead: Floats
) -> Floats:
    """`cost` [ranks, steps] without what the others' pace or the profiler would have cost.

    Each rank's steps are scaled alike. The profiler's overhead is taken off a host's lateness,
    but not below what the steps before the window allow.
    """
    bound = at_most(dataset, pace, by_host)
    own = cost.mean(axis=1) if cost.size else np.zeros(len(cost))
    for k in np.flatnonzero((overhead > 0) & by_host).tolist():
        usual = float(dataset.tables[k].info.usual_step_ns or 0)
        limit = bound[k] - dataset.step_ns + usual
        bound[k] = min(bound[k], max(own[k] - overhead[k], limit, 0.0))
    part = np.divide(bound, own, out=np.ones(len(own)), where=(own > 0) & (bound < own))
    return np.asarray(cost * part[:, None])


def mean(values: Floats) -> Floats:
    """Mean over steps, NaN where a rank has none."""
    known = ~np.isnan(values)
    mean = np.nansum(values, axis=1) / np.maximum(known.sum(axis=1), 1)
    return np.asarray(np.where(known.any(axis=1), mean, np.nan))
