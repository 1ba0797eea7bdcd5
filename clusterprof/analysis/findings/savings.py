"""What would have been saved at most, had a late rank not been late.

Two limits that lateness does not know. Without the late rank the others' own hosts and GPUs set the
pace: where these need nearly the whole step, little is won by hurrying one of them. And the job ran
before the capture: a host that needs longer inside the window than whole steps took before it is
slowed by the profiler, which no training pays.
"""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.model import host_gaps, limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats


def at_most(dataset: Dataset, pace: Floats, by_host: Bools) -> Floats:
    """Upper bound of what each rank costs a step, over the settled steps' mean (ns), [ranks].

    `pace` [ranks, steps] is what each host needs itself (`host.pace`), `by_host` whether the rank
    is late for its host: then the next host or GPU in line takes its place. A GPU's lateness is
    bounded by what the others' hosts need on average, since queues even that out, and their GPUs.
    Infinite where nothing is known. Not for pipelines, whose stages wait for each other by
    construction.
    """
    out = np.full(len(pace), np.inf)
    if dataset.pipelined or not pace.size:
        return out
    hosts, gpus = _mean(pace), busy(dataset)
    known = ~np.isnan(hosts)
    if known.sum() < 2:
        return out
    longest = _largest_of_others(np.fmax(hosts, gpus))
    average = np.fmax(_mean_of_others(hosts), _mean_of_others(gpus))
    return np.maximum(dataset.step_ns - np.where(by_host, longest, average), 0.0)


def busy(dataset: Dataset, *, transfers: bool = False) -> Floats:
    """What each GPU does a step without waiting (ns), median over the settled steps, [ranks].

    Computing and the copies that nothing hides: who waits for a late rank may have had its
    transfers hidden otherwise, so that these count only where `transfers` says so. NaN where a
    rank lacks all steps.
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


def slowed(dataset: Dataset, pace: Floats) -> Floats:
    """How much longer each host needs inside the window than whole steps took before it (ns).

    [ranks]; 0 where that is too little to tell from chance, or no step log says it. Of mean and
    median the smaller is taken inside and the larger before: pauses now and then are no slowing.
    Nor is what keeps a host away at one stretch longer than the others (`away`): that is its own.
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
    return np.nan_to_num(np.maximum(_mean(stretches) - float(np.median(stretches[known])), 0.0))


def of_the_job(dataset: Dataset, cost: Floats, pace: Floats, by_host: Bools) -> Floats:
    """`cost` [ranks, steps] without what the others' pace or the capture itself would have cost.

    Each rank's steps are scaled alike. What the capture costs is taken off a host's lateness, but
    for what the steps before the window leave room for.
    """
    bound = at_most(dataset, pace, by_host)
    own, slow = cost.mean(axis=1) if cost.size else np.zeros(len(cost)), slowed(dataset, pace)
    for k in np.flatnonzero((slow > 0) & by_host).tolist():
        usual = float(dataset.tables[k].info.usual_step_ns or 0)
        room = bound[k] - dataset.step_ns + usual
        bound[k] = min(bound[k], max(own[k] - slow[k], room, 0.0))
    part = np.divide(bound, own, out=np.ones(len(own)), where=(own > 0) & (bound < own))
    return np.asarray(cost * part[:, None])


def _mean(values: Floats) -> Floats:
    known = ~np.isnan(values)
    mean = np.nansum(values, axis=1) / np.maximum(known.sum(axis=1), 1)
    return np.asarray(np.where(known.any(axis=1), mean, np.nan))
