"""How long each rank delays the others, by its host and by its GPU.

Being late at a collective is not enough. A rank that waits for a straggler is late itself
downstream; a rank that had to catch up arrives late a dozen times for one delay. So a rank's
cost in a step is the least of three measures:

- its lateness: over the collectives at which it arrives last, last minus second-to-last arrival;
- its own excess over the others with which it communicates: idle time of its GPU (the host
  had not launched), longer or more kernels, longer copies. Waiting inside a collective or a
  receive is none of these: that passes the delay on to the rank that caused it;
- its own host's and kernels' time on the critical path: what no rank waited for costs nothing.

The least of them is what the others would have saved: on recordings with a planted sleep
of 20 ms it is 18 to 21 ms, where lateness alone adds up to 25 to 35 ms.

Idle time in what all hosts do alike (`common_causes`: fetching input, the interpreter lock,
launching short kernels) is no rank's excess.

Three cases need more. Where the others' GPUs idle as well, their own hosts are slow, and the
rank that is behind stays behind without being any slower: there a host's excess is only what
its pace exceeds theirs. In a pipeline ranks wait for each other by construction: there a late
host counts only beyond the slowest other host's pace (per launch, since stages differ), and
from a larger share of the step on. And work queued before the window can cover a host that is
slower than its GPU for many steps: that one is found by its pace alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clusterprof.align.clock import SHARED_CLOCK_NS
from clusterprof.analysis.findings import common_causes, kernels, savings
from clusterprof.analysis.findings.savings import mean
from clusterprof.analysis.groups.peers import Peers, peers
from clusterprof.analysis.groups.stages import stages
from clusterprof.analysis.model import critical_path, host_activity, limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints


@dataclass(frozen=True)
class StragglerCost:
    """Per rank and steady-state step (arrays [ranks, steps], ns)."""

    lateness: Floats
    uncertainty: Floats
    idle: Floats
    compute: Floats
    copy: Floats
    pace: Floats
    #: what the others would have saved; of a host that only carries a lag, `wait_caused`
    cost: Floats
    #: how long they waited for it, whatever else would have delayed them
    wait_caused: Floats
    #: by how much the profiler slows each host, [ranks]
    profiler_overhead: Floats
    #: the critical path
    path: tuple[critical_path.Segment, ...]

    @property
    def work(self) -> Floats:
        """What each GPU has more of than its peers: kernels and copies."""
        return self.compute + self.copy

    @property
    def by_host(self) -> Bools:
        """Ranks that are late by their host rather than by their GPU, [ranks]."""
        return np.asarray(self.idle.sum(axis=1) >= self.work.sum(axis=1))


def lateness(dataset: Dataset) -> tuple[Floats, Floats]:
    """Sum per rank and steady-state step of last minus second-to-last arrival, and its uncertainty.

    A lateness within the clock's bound counts as nothing. The bound of one call is the lesser
    of the two ranks' clock uncertainty and the call's own transfer time: its members end
    together to within that, so that arrivals can be compared by durations, without a clock.
    """
    c = dataset.collectives
    shape = (len(dataset.ranks), len(dataset.steady_steps))
    total, error = np.zeros(shape), np.zeros(shape)
    rows = np.flatnonzero(c.matched & c.synchronising & (c.rank == c.last_rank) & c.has)
    if not dataset.steady_steps:
        return total, error
    if not len(rows):
        return _late_sends(dataset), error
    # calls of one group share a kernel: they are late together, once
    _, once = np.unique(np.stack([c.rank[rows], c.start[rows]]), axis=1, return_index=True)
    rows = rows[once]
    clock = _clock_error(dataset)[np.searchsorted(dataset.ranks, c.rank[rows])]
    bound = np.minimum(clock, c.end[rows] - c.start[rows])
    late = np.where(c.lateness[rows] > bound, c.lateness[rows], 0)
    column = np.searchsorted(dataset.steady_steps, c.step[rows])
    known = np.isin(c.step[rows], dataset.steady_steps)
    at = (np.searchsorted(dataset.ranks, c.rank[rows])[known], column[known])
    np.add.at(total, at, late[known])
    np.maximum.at(error, at, np.where(late > 0, bound, 0)[known])
    return np.maximum(total, _late_sends(dataset)), error


def _clock_error(dataset: Dataset) -> Floats:
    """By how much each rank's arrivals may be off against any other rank's (ns)."""
    if set(dataset.ranks) <= set(dataset.clock.same_clock):
        return np.full(len(dataset.ranks), float(SHARED_CLOCK_NS))
    own = np.asarray([dataset.clock.uncertainty(r) for r in dataset.ranks], dtype=float)
    return np.asarray(own + own.max())


def _late_sends(dataset: Dataset) -> Floats:
    """Per rank and steady-state step: how long receivers have waited for its Sends (ns)."""
    c = dataset.collectives
    out = np.zeros((len(dataset.ranks), len(dataset.steady_steps)))
    rows = np.flatnonzero(
        c.matched & c.has & (c.operation == "Recv") & np.isin(c.step, dataset.steady_steps)
        & (c.last_rank != c.rank) & (c.last_rank >= 0)
    )  # fmt: skip
    bound = min(float(_clock_error(dataset).max(initial=0.0)), 200_000.0)
    wait = np.where(c.wait[rows] > bound, c.wait[rows], 0)
    sender = np.searchsorted(dataset.ranks, c.last_rank[rows])
    np.add.at(out, (sender, np.searchsorted(dataset.steady_steps, c.step[rows])), wait)
    return out


def straggler_cost(dataset: Dataset) -> StragglerCost:
    """Measure lateness and excess of each rank in each steady-state step, once."""
    if "straggler cost" not in dataset.known:
        dataset.known["straggler cost"] = _measured(dataset)
    cost: StragglerCost = dataset.known["straggler cost"]
    return cost


def _measured(dataset: Dataset) -> StragglerCost:
    late, error = lateness(dataset)
    stage = _stage_of(dataset)
    circle = peers(dataset, stage)
    pace = host_activity.pace(dataset)
    all_idle = dataset.account("idle_ns")
    idle, _ = circle.excess(all_idle - common_causes.common_idle(dataset, pace))
    idle = _no_more_than_pace(dataset, idle, circle.excess(all_idle)[1], pace, circle)
    copy, usual_copy = circle.excess(dataset.account("exposed_copy_ns"))
    # copies from pageable memory vary with the host; only a copy twice as long is the rank's own
    copy = np.where((copy > usual_copy) & (not dataset.pipelined), copy, 0.0)
    compute = kernels.excess(dataset, circle, stage)
    found = critical_path.path(dataset)
    cost = np.minimum(late, idle + compute + copy)
    if found:
        # no rank costs more than its part of the critical path
        cost = np.minimum(cost, critical_path.on_path(dataset, found))
    overhead = savings.profiler_overhead(dataset, pace)
    every = StragglerCost(
        late, error, idle, compute, copy, pace, cost, cost, overhead, tuple(found)
    )
    saved = savings.of_the_job(dataset, cost, pace, every.by_host, overhead)
    return replace(every, cost=saved)


def steady(cost: Floats) -> np.ndarray:
    """Ranks that cost something in nearly every step."""
    if not cost.size:
        return np.zeros(len(cost), dtype=bool)
    part = (cost > 0.1 * cost.max(axis=1, keepdims=True)).mean(axis=1)
    return np.asarray(part >= limits.STEADY_FRAC)


def _no_more_than_pace(
    dataset: Dataset, idle: Floats, usual_idle: Floats, pace: Floats, circle: Peers
) -> Floats:
    """Cap idle time where the others' own hosts would not have gone much faster (ns)."""
    if np.isnan(pace).all():
        return idle
    own = mean(pace)
    count = launches(dataset)
    out: Floats = idle.copy()
    for k in range(len(own)):
        total = float(idle[k].mean()) if idle.shape[1] else 0.0
        idling = (
            usual_idle[k].mean() >= limits.USUAL_IDLE_FRAC * dataset.step_ns if total else False
        )
        if not total or not (idling or dataset.pipelined) or np.isnan(own[k]):
            continue
        # a stage of more layers has more to launch: hosts are compared by their pace per launch
        scale = count[k] / np.maximum(count, 1.0) if dataset.pipelined else np.ones(len(own))
        others = own * np.maximum(scale, 1.0)
        others = np.delete(others, k) if dataset.pipelined else others[circle.others(k)]
        others = others[~np.isnan(others)]
        if not len(others):
            continue
        cap = own[k] - float(np.median(others))
        if dataset.pipelined:
            durations = dataset.account("duration_ns")[k]
            cap = min(cap, float(np.nanmean(durations)) - float(others.max()))
        out[k] *= min(1.0, max(cap, 0.0) / total)
    return np.asarray(out)


def launches(dataset: Dataset) -> Floats:
    """How many kernels each rank launches in a steady-state step."""
    steps = max(len(dataset.steady_steps), 1)
    numbers = [np.r_[line.step, -1][line.step_of] for line in dataset.timelines]
    return np.asarray(
        [np.isin(n, dataset.steady_steps).sum() / steps for n in numbers], dtype=float
    )


def _stage_of(dataset: Dataset) -> Ints:
    """Each rank's pipeline stage; all 0 where there is no pipeline."""
    out = np.zeros(len(dataset.ranks), dtype=np.int64)
    known = stages(dataset) if dataset.pipelined else None
    for number, group in enumerate(known.groups if known else ()):
        out[np.searchsorted(dataset.ranks, group)] = number
    return out
