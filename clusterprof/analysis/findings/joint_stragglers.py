"""Ranks that are late together: the ranks of one slow node, or two with one cause each.

Of two ranks that are equally late neither would save anything alone, and each one's lateness
beyond the second-to-last is nothing. So ranks whose own excess stands out in most steps are weighed
as one: by how much the last of them comes after the last of all others. Members of a collective
end together, so that this is the difference of the shortest calls of both, whatever the clocks
say. At most half of the ranks can be late; beyond that it is the others that are early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.findings import savings
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints

#: ends of one collective differ by so much
_END_SPREAD_NS = 50_000
#: late together: so many times what the latest of them costs alone
_MORE_THAN_ALONE = 1.5


@dataclass(frozen=True)
class Joint:
    """Places of the late ranks, and what they cost the others in each steady-state step (ns)."""

    places: Ints
    cost: Floats
    by_host: Bools


def late(
    dataset: Dataset, excess: Floats, alone: Floats, pace: Floats, by_host: Bools, least: float
) -> Joint | None:
    """Return the ranks that are late together, or None.

    `excess` and `alone` [ranks, steps] are what each rank takes beyond its peers, and what it
    costs by itself; `least` the share of the step from which on a straggler is one.
    """
    if dataset.pipelined or not excess.size:
        return None
    mean = excess.mean(axis=1)
    steady = (excess > 0.5 * mean[:, None]).mean(axis=1) >= limits.STEADY_FRAC
    places = np.flatnonzero((mean >= least * dataset.step_ns) & steady)
    if len(places) < 2 or 2 * len(places) > len(mean):
        return None
    cost = np.minimum(_lateness(dataset, places), excess[places].max(axis=0))
    others = np.delete(np.arange(len(mean)), places)
    need = np.fmax(savings.mean(pace), savings.busy(dataset))[others]
    if np.isnan(need).all():
        return None
    bound = max(dataset.step_ns - float(np.nanmax(need)), 0.0)
    total = float(cost.mean())
    cost = cost * min(1.0, bound / total) if total else cost
    enough = max(
        least * dataset.step_ns, _MORE_THAN_ALONE * float(alone[places].mean(axis=1).max())
    )
    return Joint(places, cost, by_host[places]) if cost.mean() >= enough else None


def _lateness(dataset: Dataset, places: Ints) -> Floats:
    """By how much the last of `places` comes after the last other rank in each step (ns)."""
    c = dataset.collectives
    out = np.zeros(len(dataset.steady_steps))
    rows = np.flatnonzero(
        c.synchronising & c.matched & c.has & np.isin(c.step, dataset.steady_steps)
    )
    ids, of = np.unique(c.collective[rows], return_inverse=True)
    mine = np.isin(c.rank[rows], np.asarray(dataset.ranks)[places])
    length = (c.end - c.start)[rows].astype(float)
    shortest = {}
    for whose, chosen in (("late", mine), ("others", ~mine)):
        shortest[whose] = np.full(len(ids), np.inf)
        np.minimum.at(shortest[whose], of[chosen], length[chosen])
    both = np.isfinite(shortest["late"]) & np.isfinite(shortest["others"])
    later = np.where(both, shortest["others"], 0.0) - np.where(both, shortest["late"], 0.0)
    later = np.where(later > _END_SPREAD_NS, later, 0.0)
    step = np.zeros(len(ids), dtype=np.int64)
    step[of] = c.step[rows]
    np.add.at(out, np.searchsorted(dataset.steady_steps, step), later)
    return out


def node(dataset: Dataset, places: Sequence[int]) -> str:
    """The host whose ranks with a report are just these, where there are others; else empty."""
    hosts = [t.info.host for t in dataset.tables]
    of = {hosts[k] for k in places}
    if len(of) != 1 or len(set(hosts)) < 2:
        return ""
    (name,) = of
    return name if hosts.count(name) == len(places) else ""
