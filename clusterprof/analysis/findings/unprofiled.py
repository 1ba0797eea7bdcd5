"""A straggler that was not profiled: all profiled members of a communicator wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from clusterprof.agent.contracts.words import ranks as rank_list
from clusterprof.analysis.findings.finding import Code, capture, finding, of_step
from clusterprof.analysis.findings.straggler import repaired
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints, parts
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.replay import Lengths, Replay
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.results import Finding

#: place among the modules of findings (`registry`)
ORDER = 50

CODES = (
    Code(
        "straggler.unprofiled",
        "Profiled ranks wait for a rank without a report",
        "Some calls of a communicator last many times longer than the quickest of their kind, on "
        "all profiled members at once: the rank they wait for was not profiled.",
        "It assumes that equal transfers take equally long: a congested network looks the same.",
        "Profile the ranks that the finding names (--ranks), then look for straggler.host or "
        "straggler.gpu.",
    ),
)

_LARGE_BYTES = 1 << 20
_WAITED_FOR = ["AllReduce", "AllGather", "ReduceScatter", "AllToAll"]


def hidden_wait(dataset: Dataset) -> Floats:
    """How much longer than the quickest of its kind each row lasts after its last arrival (ns).

    Per row of the placed table; the last arrival is that of the *profiled* members. Zero where
    every rank of the world has a report. Kinds are communicator, operation, and large or small;
    the time of a large message goes with its size, that of a small one does not.
    """
    c, world = dataset.collectives, dataset.world_size
    extra = np.zeros(len(c.rank))
    if world is None or world <= len(dataset.ranks):
        return extra
    usable = c.has & ~c.point_to_point & (c.matched | (c.wait == 0))
    usable &= np.isin(c.operation.astype(str), _WAITED_FOR)
    large = c.size >= _LARGE_BYTES
    keys = np.asarray(
        [f"{n}\0{o}\0{s}" for n, o, s in zip(c.communicator, c.operation, large, strict=True)],
        dtype=object,
    )
    transfer = (c.end - c.start - c.wait).astype(float)
    scale = np.where(large, c.size, 1.0)
    chosen = np.flatnonzero(usable)
    for rows in parts(chosen, keys[chosen].astype(str)):
        if len(np.unique(c.collective[rows])) < limits.LEAST_CALLS:
            continue
        rate = np.sort(transfer[rows] / scale[rows])
        # without sizes small and large messages cannot be separated: only what exceeds the upper
        # quartile is more than a large message
        quick = 1 if (c.size[rows] >= 0).all() else 3 * len(rate) // 4
        usual = rate[quick] * scale[rows]
        if not large[rows[0]]:
            # where one small call a step waits each time, the quickest has waited too; but a
            # small message takes no longer than a large one
            same = usable & large & (c.communicator == c.communicator[rows[0]])
            same &= c.operation == c.operation[rows[0]]
            usual = np.minimum(usual, transfer[same].min(initial=np.inf))
        long = transfer[rows] > limits.LONGER * usual + 50_000
        extra[rows] = np.where(long, transfer[rows] - usual, 0.0)
    return extra


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `straggler.unprofiled` where profiled members wait for an unprofiled rank.

    Evidence: of calls of one communicator, operation and size, some take many times longer after
    the last *profiled* arrival than the quickest ones, on every profiled member at once. Assumes
    that equal transfers take equally long; a congested network looks alike, hence the modest
    confidence. It saves what the replay saves where these calls transfer as quickly. Only where the
    world has ranks without a report.
    """
    extra = hidden_wait(dataset)
    # in a pipeline all ranks wait for the other stages, profiled or not
    if not dataset.steady_steps or not extra.any() or dataset.pipelined:
        return []
    late = (extra > 0) & np.isin(dataset.collectives.step, dataset.steady_steps)
    names = dict.fromkeys(dataset.collectives.communicator[late])
    waits = [_finding(dataset, str(name), extra) for name in names]
    return [f for f in waits if f is not None][:3]


def _proof(dataset: Dataset, mine: Bools, ranks: list[int], extra: Floats) -> Floats:
    """How long each rank waits in the calls `mine`: [ranks, steps] (ns)."""
    c = dataset.collectives
    proof = np.zeros((len(ranks), len(dataset.steady_steps)))
    for k, rank in enumerate(ranks):
        rows = np.flatnonzero(mine & (c.rank == rank) & c.has)
        begin = np.minimum(c.start[rows] + c.wait[rows], c.end[rows])
        waited = np.minimum(begin + extra[rows].astype(np.int64), c.end[rows])
        for at, step in enumerate(dataset.steady_steps):
            # calls of several threads or of one group wait at once, and count once
            here = c.step[rows] == step
            waits = union(begin[here], waited[here])
            proof[k, at] = float((waits.end - waits.start).sum())
    return proof


def _without(dataset: Dataset, job: Replay, base: Lengths, rows: Ints, extra: Floats) -> Lengths:
    """The job's lengths where the calls in `rows` transfer at once."""
    c, run = dataset.collectives, base.run.copy()
    for k in np.unique(np.searchsorted(dataset.ranks, c.rank[rows])).tolist():
        calls = rows[c.rank[rows] == dataset.ranks[k]]
        calls = calls[np.argsort(c.start[calls], kind="stable")]
        mine = np.flatnonzero(job.joined & (job.rank == k))
        starts = dataset.timelines[k].start[job.row[mine]]
        at = np.minimum(np.searchsorted(c.start[calls], starts), len(calls) - 1)
        found = c.start[calls[at]] == starts
        cut = extra[calls[at[found]]].astype(np.int64)
        run[mine[found]] = np.maximum(run[mine[found]] - cut, 0)
    return replace(base, run=run)


def _finding(dataset: Dataset, communicator: str, extra: Floats) -> Finding | None:
    c, world = dataset.collectives, dataset.world_size or 0
    job, base = what_ifs(dataset), repaired(dataset)
    if job is None or base is None:
        return None
    mine = (c.communicator == communicator) & np.isin(c.step, dataset.steady_steps)
    ranks = sorted({int(r) for r in c.rank[mine]})
    # all members wait at once, or no other rank is late
    hit = _proof(dataset, mine, ranks, extra).min(axis=0) > limits.WARNING_FRAC * dataset.step_ns
    late = mine & (extra > 0) & np.isin(c.step, np.asarray(dataset.steady_steps)[hit])
    saved = job.saved(_without(dataset, job.job, base, np.flatnonzero(late), extra), base)
    each = np.maximum(saved.each, 0.0)
    per_step = float(each.mean())
    steady = float(hit.mean()) >= limits.STEADY_FRAC
    if saved.most_ns < (limits.LEAST_FRAC if steady else limits.MUCH_FRAC) * dataset.step_ns:
        return None
    size = _size(dataset, mine)
    missing = _not_captured(dataset, ranks, size, world)
    some = ",".join(map(str, missing[:16])) + (",…" if len(missing) > 16 else "")
    who = rank_list(ranks, 4).capitalize() + (" waits" if len(ranks) == 1 else " wait together")
    of = f"It is one of {size} in its communicator" if size else "It is not known which one it is"
    return finding(
        dataset,
        "straggler.unprofiled",
        ranks=ranks,
        cost=each,
        saved=saved,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.6,
        summary=f"{who} up to {of_step(dataset, per_step)} for an unprofiled rank. {of}; "
        f"the job has {world} ranks, {len(dataset.ranks)} of them profiled.",
        evidence=[
            {
                "communicator": communicator,
                "communicator_size": size,
                "not_captured": missing[:64],
                "ranks": ranks,
                "steps": list(dataset.steady_steps),
                "what": f"{int((mine & (extra > 0)).sum()) // max(len(ranks), 1)} calls last far "
                "longer after the last profiled arrival than the quickest of their kind",
            }
        ],
        advice=f"profile the other ranks: --ranks {some}",
        follow_up=capture(dataset, missing[:16]),
    )


def _size(dataset: Dataset, mine: Bools) -> int | None:
    """The communicator's size, where the reports have it."""
    calls = np.stack([dataset.collectives.rank[mine], dataset.collectives.call[mine]])
    sizes: set[int] = set()
    for rank in np.unique(calls[0]):
        table = dataset.tables[dataset.place[int(rank)]].collective_calls
        of = np.asarray(pc.fill_null(table["communicator_size"], 0).to_numpy())
        here = np.isin(np.asarray(table["call"].to_numpy()), calls[1][calls[0] == rank])
        sizes |= set(of[here].tolist()) - {0}
    return int(sizes.pop()) if len(sizes) == 1 else None


def _not_captured(dataset: Dataset, ranks: list[int], size: int | None, world: int) -> list[int]:
    """Unprofiled members of the communicator, as far as known; else all unprofiled ranks.

    Frameworks lay groups out evenly: a stride that fits the members with a report, and a first
    rank that is a multiple of the group's extent, give the others. Tried are the strides that
    divide the world into groups of this size, the smallest first.
    """
    without = [r for r in range(world) if r not in dataset.ranks]
    if size is None or size >= world or world % size:
        return without
    for stride in range(1, world // size + 1):
        extent = stride * size
        if world % extent:
            continue
        groups = {(r // extent, r % stride) for r in ranks}
        if len(groups) == 1:
            block, offset = groups.pop()
            members = range(block * extent + offset, (block + 1) * extent, stride)
            return [r for r in members if r not in dataset.ranks] or without
    return without
