"""How much slower the job is than with even work, and which operations and ranks make it so.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI
2025), on this graph: S = T / T_ideal, where in T_ideal everything takes what it takes in the middle
of all ranks and steps. The same thing is what stands at the same place of the step; where ranks
do unlike numbers of things, it is all of one kind in a step. The middle is the mean of hosts,
kernels and copies, and the median of transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import call_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Replay
from clusterprof.analysis.model.what_if import WhatIfs, what_ifs
from clusterprof.columns import (
    Bools,
    Floats,
    Ints,
    Stretches,
    count_by,
    inverse,
    order_by,
    places,
    sum_by,
)
from clusterprof.results import Slowdown

#: so many lengths are replayed in all (15 s), and side by side (about 100 MB)
_MOST = 200_000_000
_AT_ONCE = _MOST // 100

#: what activities are that are no known call, by the codes of `timeline.KINDS`
_PLAIN = ("compute", "other communication", "copy", "copy")

_Middle = Callable[..., Floats]


def slowdown(dataset: Dataset) -> Slowdown:
    """S, S_t, S_w, M_W and M_S over the profiled ranks, as far as they can be computed."""
    model = what_ifs(dataset)
    if model is None or not len(model.job.rank):
        return _none("there are no steady-state steps to replay")
    if len(np.unique(model.ties[model.job.ranks])) > 1:
        return _none("no matched calls tie all of these ranks to each other")
    columns = 2 + len(np.unique(model.job.kind))
    if _size(model.job) * columns > _MOST:
        return _none(f"{len(dataset.ranks)} ranks with {len(model.job.rank):,} activities are many")
    return _entry(_Even(model))


def _none(why: str) -> Slowdown:
    return {
        "S": None, "ideal_step_ns": None, "S_t": [], "S_w": [], "M_W": None, "M_S": None,
        "left_out": why,
    }  # fmt: skip


def _size(job: Replay) -> int:
    return len(job.pick) + 4 * len(job.rank) + len(job.host_rank)


def _entry(even: _Even) -> Slowdown:
    job, dataset, kinds, size = even.job, even.model.dataset, even.names, len(even.model.stage)
    few = _size(job) * (len(kinds) + 3 + len(job.ranks)) <= _MOST
    ranks = job.ranks.tolist() if few else []
    (hosts, activities), (no_host, no_activity) = even.kept(True), even.kept(False)
    actual, ideal, host, *rest = even.pace(
        [
            (hosts, activities),
            (no_host, no_activity),
            (hosts, no_activity),
            *((no_host, even.kinds == k) for k in range(len(kinds))),
            *(even.kept(np.arange(size) == k) for k in ranks),
        ]
    ).tolist()
    if actual < (1 - limits.VARIES_FRAC) * ideal:
        return _none("with the same work on all ranks steps would take longer than they do")
    by_kind = dict(zip(["host", *kinds], [host, *rest], strict=False))
    by_rank = dict(zip(ranks, rest[len(kinds) :], strict=True))

    def share(slow: Bools) -> float | None:
        """How much of the slowdown goes where these ranks are ideal; None: there is none."""
        # of less than what steps vary by shares would be noise
        if actual <= (1 + limits.VARIES_FRAC) * ideal or not slow.any():
            return None
        (left,) = even.pace([even.kept(~slow)]).tolist()
        # quick ranks that are not ideal may leave less than all of it
        return float(round(min((actual - left) / (actual - ideal), 1.0), 4) + 0.0)  # no -0.0

    # M_W is of the slowest 3% of the ranks, as published
    slowest = sorted(ranks, key=lambda k: -by_rank[k])[: math.ceil(0.03 * len(ranks))]
    stage = even.model.stage
    return {
        "S": round(actual / ideal, 4),
        "ideal_step_ns": round(ideal),
        "S_t": [{"what": k, "slowdown": round(t / ideal, 4)} for k, t in by_kind.items()],
        "S_w": [
            {"rank": dataset.ranks[k], "slowdown": round(t / ideal, 4)} for k, t in by_rank.items()
        ],
        "M_W": share(np.isin(np.arange(size), slowest)),
        "M_S": share((stage == stage.max()) & stage.any()),
        "left_out": "" if few else f"S_w and M_W: {len(job.ranks)} ranks are many",
    }


class _Even:
    """A job, its ideal lengths, and replays of what lies between them."""

    def __init__(self, model: WhatIfs) -> None:
        self.model, self.job = model, model.job
        job, base, dataset = model.job, model.base, model.dataset
        operations, call = dataset.collectives.label, call_of(dataset)[job.activity]
        labels = np.concatenate((operations, _PLAIN)).astype(str)
        names, code = np.unique(labels, return_inverse=True)
        plain = len(operations) + job.kind.astype(np.int64)
        used, kinds = places(code[np.where(call >= 0, call, plain)])
        #: each activity's kind, as in `names`: compute, copy, or its collective's operation
        self.names, self.kinds = names[used].tolist(), kinds
        key = job.host_rank * len(job.steps) + model.step_of_host
        # what a host does before a launch, however many waits it has in between
        launches = Stretches.of(key, job.launched_before(key))
        first, last, took = launches.first, launches.last, launches.sum(base.own)
        even = _even(took, job.host_rank[first], model.step_of_host[first], np.mean)
        own = base.own * (even / np.maximum(took, 1))[launches.of_row]
        own[last] = np.where(took > 0, own[last], even)
        run = base.run.copy()
        launched = order_by(job.rank, job.launch_moment)
        for k, kind in enumerate(self.names):
            rows = launched[self.kinds[launched] == k]
            middle: _Middle = np.mean if kind in ("compute", "copy") else np.median
            run[rows] = _even(run[rows], job.rank[rows], job.step[rows], middle)
        self.ideal = replace(base, own=np.round(own).astype(np.int64), run=run)

    def kept(self, ranks: Bools | bool) -> tuple[Bools, Bools]:
        """Which host moments and activities keep their own lengths: those of some ranks, or all."""
        keeps = np.broadcast_to(ranks, len(self.model.dataset.ranks))
        return keeps[self.job.host_rank], keeps[self.job.rank]

    def pace(self, kept: Iterable[tuple[Bools, Bools]]) -> Floats:
        """The step (ns) where what is kept takes what it takes, and all else the ideal."""
        kept, base, ideal = list(kept), self.model.base, self.ideal
        width, paces = max(_AT_ONCE // _size(self.job), 1), []
        for k in range(0, len(kept), width):
            hosts, runs = (np.stack(parts) for parts in zip(*kept[k : k + width], strict=True))
            own, run = np.where(hosts, base.own, ideal.own), np.where(runs, base.run, ideal.run)
            paces.append(self.job.pace(replace(base, own=own, run=run)))
        return np.concatenate(paces)


def _even(values: Ints, rank: Ints, step: Ints, middle: _Middle) -> Ints:
    """What each takes in the middle of all ranks and steps; elements by rank and in order."""
    order = order_by(rank, step)
    values, rank, step = values[order].astype(float), rank[order], step[order]
    steps = Stretches.of(rank, step)
    group, count, rank = steps.of_row, steps.size, rank[steps.first]
    usual, sums = count_by(count).argmax(), sum_by(group, values)
    alike, total = count == usual, values.sum() / len(count)
    # most steps of each rank have one and the same number of activities
    alike &= bool((sum_by(rank, ~alike) <= limits.HALF * count_by(rank)).all())
    if alike.any():
        ideal = middle(values[alike[group]].reshape(-1, usual), axis=0)
        # steps unlike most count as well: the ideal one takes what the mean one does
        ideal *= 1 if middle is np.median else total / max(sums[alike].mean(), 1)
        total = ideal.sum()
    elif middle is np.median:
        return np.full(len(values), np.median(values)).astype(np.int64)
    even = values * (total / np.maximum(sums, 1))[group]
    if alike.any():
        even[alike[group]] = np.tile(ideal, alike.sum())
    return np.asarray(np.round(even[inverse(order)]), dtype=np.int64)
