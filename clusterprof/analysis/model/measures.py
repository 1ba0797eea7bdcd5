"""Two published measures of the job as a whole: its slowdown by uneven work, and its critical path.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI
2025), on this graph: S = T / T_ideal, where in T_ideal everything takes what it takes in the middle
of all ranks and steps. The same thing is what stands at the same place of the step; where ranks
do unlike numbers of things, it is all of one kind in a step. The middle is the mean of hosts,
kernels and copies, and the median of transfers.

The critical path is what the end of the last step waited for, moment by moment, walked backwards
over the replay's graph, with the lengths of the what-ifs' base: from each moment to the one that it
waited for longest. All else is slack. Imbalance as in Scalasca (Böhme et al., Scalable
critical-path based performance analysis, IPDPS 2012): what an activity takes on the path beyond its
mean over ranks is lost on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clusterprof.analysis.model import limits, replay
from clusterprof.analysis.model.accounts import call_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths, Replay
from clusterprof.analysis.model.what_if import WhatIfs, what_ifs
from clusterprof.columns import (
    Bools,
    EdgeRows,
    Floats,
    Ints,
    Moments,
    RankPlaces,
    ReplayRows,
    StepPlaces,
    Stretches,
    begins,
    count_by,
    first_at_or_after,
    first_of,
    group_of_rows,
    inverse,
    order_by,
    places,
    ranges,
    running_maximum,
    sum_by,
    sums,
)
from clusterprof.results import CriticalPath, PathPart, Slowdown, What

# --- the slowdown

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


def _even(values: Ints, rank: RankPlaces, step: StepPlaces, middle: _Middle) -> Ints:
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


# --- the critical path

#: what binds a piece of the path: codes of `Pieces.what`
WHAT: tuple[What, ...] = ("host", "compute", "communication", "copy", "idle")
HOST, COMPUTE, COMMUNICATION, COPY, IDLE = range(5)
#: by the codes of `timeline.KINDS`
OF_KIND = np.asarray([COMPUTE, COMMUNICATION, COPY, COPY, COPY], dtype=np.int64)


@dataclass(frozen=True)
class Pieces:
    """The path from the first step's begin to the last one's end, in order and without a gap.

    The rank, what binds each piece, in which step it ends, and how long it is (ns); `unexplained`
    is how much of that no recorded length explains. On the device's steps: what was queued before
    is not part of it.
    """

    rank: RankPlaces
    what: Ints
    step: StepPlaces
    length: Ints
    unexplained: Ints


def path(job: Replay, lengths: Lengths) -> Pieces:
    """Walk the path through the job's steps with these lengths ([n] each)."""
    run = job.contention.eased(lengths.run, job.one_pass(job.edges(lengths)))
    lengths = replace(lengths, run=run)
    edges, graph = job.edges(lengths), job.graph
    times, marks = job.one_pass(edges), graph.place(job.marks)
    # what each moment waited for longest, and by which edge; of equals it is the first
    bound = np.flatnonzero(times[graph.source] + edges == times[graph.target])[::-1]
    source, edge = np.full((2, graph.size), -1)
    end = graph.target[bound]
    source[end], edge[end] = graph.source[bound], bound
    moment = int(marks[np.argmax(times[marks[:, -1]]), -1])
    moments = []
    while edge[moment] >= 0:
        moments.append(moment)
        moment = int(source[moment])
    way = np.asarray(moments[::-1], dtype=np.int64)
    rank, what, length, unexplained = _pieces(job, lengths, graph.order[way], edge[way])
    end, begin = times[moment] + np.cumsum(length), times[marks[:, 0]].max()
    inside = end > begin
    length = np.minimum(length, end - begin)[inside]
    unexplained = np.clip(unexplained[inside], 0, np.maximum(length, 0))
    ends = times[marks[:, 1:]].max(axis=0)
    step = np.minimum(first_at_or_after(ends, end[inside]), len(ends) - 1)
    return Pieces(rank[inside], what[inside], step, length, unexplained)


def _pieces(job: Replay, lengths: Lengths, reached: Moments, edge: EdgeRows) -> Ints:
    """Each edge's parts in order: the host's time, a gap, an activity, and those queued behind it.

    `reached` are the moments that the edges lead to. Returns places of ranks, what binds,
    lengths, and how much of each is unexplained, [4, parts].
    """
    n, hosts = len(job.rank), len(job.host_rank)
    kind, pick, plus = job.kind_of_edge[edge], job.pick[edge], job.plus[edge]
    queued, launched = kind == replay.QUEUED, kind == replay.LAUNCHED
    runs = queued | launched | (kind == replay.RUNNING)
    # the activity whose start or end an edge leads to, and the first one of those in a queue
    last = (reached - hosts) % n
    since, begin, latest = _first_of_queues(job, lengths)
    first = np.where(queued, begin[last], np.where(launched, latest[last], last))
    moment = np.where(launched, job.launch_moment[first], np.where(kind == replay.SINCE, pick, 0))
    host = np.where(launched | (kind == replay.SINCE), since[moment], 0)
    gap = plus + np.where(queued, job.before[first], np.where(launched, job.latency[first], 0))
    woken = kind == replay.WAKING
    gap[woken] += lengths.woken[pick[woken]]
    rank = np.where(reached < hosts, job.host_rank[np.minimum(reached, hosts - 1)], job.rank[last])
    edges, count = np.arange(len(edge)), np.where(runs, last - first + 1, 0)
    edge_of, m = group_of_rows(count), ranges(first, count)
    inner = m > first[edge_of]
    starts = (reached >= hosts) & (reached < hosts + 2 * n)
    # a host goes on at once after what it waited for, or else for a reason of its own
    slow = np.where((reached < hosts) & (gap > limits.REACTS_NS), gap, 0)
    gap_unexplained = np.where(starts, job.unexplained[first], slow)

    queue = m[inner]
    # of each kind of part: edge, place in it, rank, what binds, length, unexplained
    kinds: list[tuple[Ints | int, ...]] = [
        (edges, -2, rank, HOST, host, 0),
        (edges, -1, rank, IDLE, gap, gap_unexplained),
        (edge_of[inner], 2 * queue, job.rank[queue], IDLE, job.before[queue],
         job.unexplained[queue]),
        (edge_of, 2 * m + 1, job.rank[m], OF_KIND[job.kind[m]], lengths.run[m], 0),
    ]  # fmt: skip
    parts = np.concatenate([np.stack(np.broadcast_arrays(*kind)) for kind in kinds], axis=1)
    parts = parts[:, parts[4] != 0]
    return parts[2:, order_by(parts[0], parts[1])]


def _first_of_queues(job: Replay, lengths: Lengths) -> tuple[Ints, ReplayRows, ReplayRows]:
    """Each host moment's own time since its host was woken (ns), and two activities of each one.

    The first one of its run, and the one up to it whose launch makes it end when it does: what
    launches are beyond their queue (`Block.launched`) rises where one comes too late.
    """
    of_blocks = []
    for block in job.blocks:
        since = block.since(lengths)
        greatest = running_maximum(block.launched(lengths, since)[1], block.run)
        latest = first_of(begins(block.run, greatest))
        of_blocks.append((since, block.rows.start + block.begin, block.rows.start + latest))
    since, begin, latest = map(np.concatenate, zip(*of_blocks, strict=True))
    return since, begin, latest


def critical_path(dataset: Dataset) -> CriticalPath | None:
    """The path of the steady-state steps by what binds it, per step; None without such steps, or
    where nothing ties several ranks' times together.
    """
    model = what_ifs(dataset)
    tied = len(dataset.ranks) == 1 or dataset.collectives.matched.any()
    if model is None or not len(model.job.rank) or not tied:
        return None
    job, base, steps = model.job, model.base, len(model.job.steps)
    pieces = path(job, base)
    if not len(pieces.rank):
        return None
    shape = len(dataset.ranks), len(WHAT)
    # long steps may come less often than in the window; the path's is then the job's usual step
    often = np.ones(steps) if job.shares is None else job.shares * steps
    if job.shares is not None:
        path_ns = float(pieces.length @ often[pieces.step]) / steps
        often *= model.step_ns / max(path_ns, 1.0)
    on_path = sums(shape, (pieces.rank, pieces.what), pieces.length * often[pieces.step])
    spent = sums(shape, (job.rank, OF_KIND[job.kind]), base.run * often[job.step])
    hosts_ns = base.own * often[model.step_of_host]
    spent[:, HOST] = sum_by(job.host_rank, hosts_ns, len(on_path))
    mean, whole = spent[job.ranks].mean(axis=0), on_path.sum(axis=0)
    imbalance = np.maximum(whole - mean, 0)
    imbalance[IDLE] = 0
    parts: list[PathPart] = [
        {
            "what": name,
            "path_ns": round(whole[k] / steps),
            "mean_ns": round(mean[k] / steps),
            "imbalance_gpu_ns": round(imbalance[k] * len(job.ranks) / steps),
        }
        for k, name in enumerate(WHAT)
    ]
    of_ranks: Any = [
        {"rank": dataset.ranks[k]}
        | {f"{name}_ns": round(on_path[k, w] / steps) for w, name in enumerate(WHAT)}
        for k in job.ranks.tolist()
    ]
    return {
        "steps": job.steps.tolist(),
        "step_ns": round(whole.sum() / steps),
        "without_profiler": model.paced,
        "parts": parts,
        "ranks": of_ranks,
        "unexplained_ns": round((pieces.unexplained * often[pieces.step]).sum() / steps),
    }
