"""The critical path over all ranks: what the end of the last step waited for, moment by moment.

Walked backwards over the replay's graph, with the lengths of the what-ifs' base: from each moment
to the one that it waited for longest. All else is slack.

Imbalance as in Scalasca (Böhme et al., Scalable critical-path based performance analysis, IPDPS
2012): what an activity takes on the path beyond its mean over ranks is lost on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clusterprof.analysis.model import limits, replay
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths, Replay
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.columns import (
    Ints,
    Small,
    begins,
    first_of,
    group_of_rows,
    order_by,
    ranges,
    running_maximum,
    sum_by,
    sums,
)
from clusterprof.results import CriticalPath, PathPart, What

#: what binds a piece of the path: codes of `Pieces.what`
WHAT: tuple[What, ...] = ("host", "compute", "communication", "copy", "idle")
HOST, COMPUTE, COMMUNICATION, COPY, IDLE = range(5)
#: by the codes of `timeline.KINDS`
OF_KIND = np.asarray([COMPUTE, COMMUNICATION, COPY, COPY, COPY], dtype=np.int64)


@dataclass(frozen=True)
class Pieces:
    """The path from the first step's begin to the last one's end, in order and without a gap.

    Places of ranks, what binds each piece, and how long (ns); `unexplained` is how much of that
    no recorded length explains. On the device's steps: what was queued before is not part of it.
    """

    rank: Ints
    what: Ints
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
    places = []
    while edge[moment] >= 0:
        places.append(moment)
        moment = int(source[moment])
    way = np.asarray(places[::-1], dtype=np.int64)
    rank, what, length, unexplained = _pieces(job, lengths, graph.order[way], edge[way])
    end, begin = times[moment] + np.cumsum(length), times[marks[:, 0]].max()
    inside = end > begin
    length = np.minimum(length, end - begin)[inside]
    unexplained = np.clip(unexplained[inside], 0, np.maximum(length, 0))
    return Pieces(rank[inside], what[inside], length, unexplained)


def _pieces(job: Replay, lengths: Lengths, reached: Ints, edge: Ints) -> Ints:
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

    def rows(*columns: Ints | int) -> Ints:
        """Of a kind of part: edge, place in it, rank, what binds, length, unexplained."""
        return np.stack(np.broadcast_arrays(*columns))

    queue = m[inner]
    parts = np.concatenate(
        [
            rows(edges, -2, rank, HOST, host, 0),
            rows(edges, -1, rank, IDLE, gap, gap_unexplained),
            rows(edge_of[inner], 2 * queue, job.rank[queue], IDLE, job.before[queue],
                 job.unexplained[queue]),
            rows(edge_of, 2 * m + 1, job.rank[m], OF_KIND[job.kind[m]], lengths.run[m], 0),
        ],
        axis=1,
    )  # fmt: skip
    parts = parts[:, parts[4] != 0]
    return parts[2:, order_by(parts[0], parts[1])]


def _first_of_queues(job: Replay, lengths: Lengths) -> tuple[Ints, Small, Small]:
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
    since, begin, latest = (np.concatenate(parts) for parts in zip(*of_blocks, strict=True))
    return since, begin, latest


def critical_path(dataset: Dataset) -> CriticalPath | None:
    """The path of the steady-state steps by what binds it, per step; None without such steps, or
    where nothing ties several ranks' times together.
    """
    model = what_ifs(dataset)
    tied = len(dataset.ranks) == 1 or dataset.collectives.matched.any()
    if model is None or not len(model.job.rank) or not tied:
        return None
    job, base = model.job, model.base
    pieces, steps = path(job, base), len(job.steps)
    if not len(pieces.rank):
        return None
    shape = len(dataset.ranks), len(WHAT)
    on_path = sums(shape, (pieces.rank, pieces.what), pieces.length)
    spent = sums(shape, (job.rank, OF_KIND[job.kind]), base.run)
    spent[:, HOST] = sum_by(job.host_rank, base.own, len(on_path))
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
        "unexplained_ns": round(pieces.unexplained.sum() / steps),
    }
