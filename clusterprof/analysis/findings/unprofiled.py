"""A straggler that was not profiled: all profiled members of a communicator wait for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from clusterprof.analysis.findings.finding import (
    Code,
    Repair,
    Tier,
    Words,
    capture,
    job_of,
    lighter,
    of_step,
)
from clusterprof.analysis.findings.straggler import beyond
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import call_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.timeline import union
from clusterprof.analysis.model.topology import communicator_size, whole
from clusterprof.analysis.model.what_if import Saved
from clusterprof.columns import Bools, Floats, PlacedRows, order_by, parts, sum_by
from clusterprof.words import numbers, ranks as rank_list

TIER = Tier.UNPROFILED

CODES = (
    Code(
        "straggler.unprofiled",
        "Profiled ranks wait for an unprofiled rank",
        "Some calls of a communicator last many times longer than the quickest of their kind, on "
        "all profiled members at once: the rank they wait for was not profiled.",
        "It assumes that equal transfers take equally long: a congested network looks the same.",
        "Profile the ranks that the finding names (--ranks), then look for straggler.host or "
        "straggler.gpu.",
    ),
)


def _beyond_quickest(dataset: Dataset) -> Floats:
    """How much longer than the quickest of its kind each row lasts after its last arrival (ns).

    Per row of the placed table; 0 where it may be a transfer, or every member is profiled. Kinds
    are communicator, operation, and large or small: the time of a large message goes with its size.
    """
    c = dataset.collectives
    extra = np.zeros(len(c.rank))
    usable = c.has & ~c.point_to_point & (c.matched | (c.wait == 0)) & ~whole(dataset)
    waited_for = ["AllReduce", "AllGather", "ReduceScatter", "AllToAll"]
    usable &= np.isin(c.operation.astype(str), waited_for)
    large, transfer = c.size >= limits.LARGE_BYTES, (c.end - c.start - c.wait).astype(float)
    scale = np.where(large, c.size, 1.0)
    kinds = (c.communicator + "\0" + c.operation)[usable].astype(str)
    for same in parts(np.flatnonzero(usable), kinds):
        for rows in parts(same, large[same]):
            if len(np.unique(c.collective[rows])) < limits.FEW:
                continue
            rate = np.sort(transfer[rows] / scale[rows])
            # without sizes small and large messages cannot be separated: only what exceeds the
            # upper quartile is more than a large message
            quick = 1 if (c.size[rows] >= 0).all() else int(limits.STEADY_FRAC * len(rate))
            usual = rate[quick] * scale[rows]
            others = transfer[same[large[same] != large[rows[0]]]]
            if not large[rows[0]]:
                # where one small call a step waits each time, the quickest has waited too; but a
                # small message takes no longer than a large one
                usual = np.minimum(usual, others.min(initial=np.inf))
            elif _all_wait(dataset, rows, transfer):
                usual = np.minimum(usual, others.min() if len(others) else 0.0)
            long = transfer[rows] > limits.LONGER * usual + limits.WAITING_CALL_NS
            extra[rows] = np.where(long, transfer[rows] - usual, 0.0)
    return extra


def _all_wait(dataset: Dataset, rows: PlacedRows, transfer: Floats) -> bool:
    """Whether the calls `rows`, of one kind, last as long as a late rank computes between them.

    A rank that comes late to a step's first call comes late to all others: the first lasts longer
    than all others, beyond chance, these fill the time until the last one's end, and the replay in
    which they transfer at once takes as long from the first to the last.
    """
    job, c = job_of(dataset).job, dataset.collectives
    call = call_of(dataset)[job.activity]
    members = np.flatnonzero(job.joined & np.isin(call, rows))
    members = members[order_by(job.step[members], job.rank[members], c.start[call[members]])]
    by_step_and_rank = job.step[members] * len(dataset.ranks) + job.rank[members]
    groups = [group for group in parts(members, by_step_and_rank) if len(group) > 1]
    if not groups:
        return False
    first, last = (np.asarray([group[place] for group in groups]) for place in (0, -1))
    others = [transfer[call[group[1:]]] for group in groups]
    longer = transfer[call[first]] - [took.max() for took in others]
    steps = parts(np.arange(len(groups)), job.step[first])
    longer_by_step = np.asarray([longer[step].min() for step in steps])
    if not beyond(longer_by_step, longer_by_step[None]):
        return False
    lasted = (c.end[call[last]] - c.end[call[first]]).mean()
    filled = np.mean([took.sum() for took in others])
    times = job.times(replace(job.lengths, run=np.where(np.isin(call, rows), 0, job.lengths.run)))
    ends = times[len(job.host_rank) + len(job.rank) :]
    at_once = (ends[last] - ends[first]).mean()
    apart = max(abs(filled - lasted), abs(at_once - lasted))
    return bool(apart <= limits.LEAST_FRAC * dataset.step_ns)


def repairs(dataset: Dataset, *_: object) -> list[Repair]:
    """Propose `straggler.unprofiled`: of a communicator all calls transfer as the quickest do."""
    c, extra = dataset.collectives, _beyond_quickest(dataset)
    # in a pipeline all ranks wait for the other stages, profiled or not
    if not extra.any() or dataset.pipelined:
        return []
    codes = c.communicators[0]
    waited = sum_by(codes, extra * np.isin(c.step, dataset.steady_steps))
    most = order_by(-waited)[: limits.MOST]
    return [_repair(dataset, codes == code, extra) for code in most if waited[code] > 0]


def _repair(dataset: Dataset, calls: Bools, extra: Floats) -> Repair:
    """The calls of one communicator last `extra` less (ns, per row)."""
    c, job, steps = dataset.collectives, job_of(dataset).job, np.asarray(dataset.steady_steps)
    steady, waited = calls & np.isin(c.step, steps), []
    timed = np.flatnonzero(steady & c.has)
    for rows in parts(timed, c.rank[timed]):
        begin = np.minimum(c.start[rows] + c.wait[rows], c.end[rows])
        end = np.minimum(begin + extra[rows].astype(np.int64), c.end[rows])
        # calls of several threads or of one group wait at once, and count once
        spans = [union(begin[inside], end[inside]) for inside in c.step[rows] == steps[:, None]]
        waited.append([(span.end - span.start).sum() for span in spans])
    # all members wait at once, or no other rank is late
    hit = np.min(waited, axis=0) > limits.WARNING_FRAC * dataset.step_ns
    late = steady & (extra > 0) & np.isin(c.step, steps[hit])
    call = call_of(dataset)[job.activity]
    # the only profiled member waits as well, and matches no other
    waits = np.where((call >= 0) & late[call], extra[call], 0).astype(np.int64)
    # what is in three of four steps is no congestion; else it must cost a lot
    often = float(hit.mean()) >= limits.STEADY_FRAC
    return Repair(
        CODES[0],
        tuple(np.unique(c.rank[steady]).tolist()),
        lambda lengths: replace(lengths, run=np.maximum(lengths.run - waits, 0)),
        partial(_words, dataset, np.flatnonzero(steady), extra),
        limits.LEAST_FRAC if often else limits.CRITICAL_FRAC,
        calls=calls,
    )


def _words(dataset: Dataset, calls: PlacedRows, extra: Floats, saved: Saved) -> Words:
    """The rows `calls` of one communicator in words."""
    c, size = dataset.collectives, communicator_size(dataset, calls)
    ranks, (missing, advice) = np.unique(c.rank[calls]).tolist(), not_captured(dataset, calls)
    who = rank_list(ranks, limits.FEW).capitalize()
    who += " waits" if len(ranks) == 1 else " wait together"
    rare = " in the window, and hardly in the steps before it"
    when = rare if saved.rare else f": {of_step(dataset, saved)}"
    world = dataset.world_size or "more"
    which = f"one of {size} in its communicator" if size else "not known which one it is"
    return Words(
        confidence=limits.ASSUMED,
        summary=f"{who} for an unprofiled rank{when}. It is {which}; "
        f"the job has {world} ranks, {len(dataset.ranks)} of them profiled.",
        evidence=[
            {
                "communicator": str(c.communicator[calls[0]]), "communicator_size": size,
                "ranks": ranks, "not_captured": missing,
                "long_calls": int((extra[calls] > 0).sum()) // len(ranks),
            }
        ],
        advice=advice,
        follow_up=capture(dataset, missing[: limits.MOST], profiler=lighter(dataset)),
    )  # fmt: skip


def not_captured(dataset: Dataset, rows: PlacedRows) -> tuple[list[int], str]:
    """The unprofiled members of the communicator of `rows`, and the advice to profile them.

    Frameworks lay groups out evenly: the smallest stride that divides the world into groups of this
    size, one of which has the members with a report, gives the others; else it is all unprofiled.
    """
    ranks, world = np.unique(dataset.collectives.rank[rows]).tolist(), dataset.world_size or 0
    missing = [rank for rank in range(world) if rank not in dataset.place]
    size = communicator_size(dataset, rows) or world
    for stride in range(1, world // size + 1):
        extent = stride * size
        first = ranks[0] // extent * extent + ranks[0] % stride
        members = range(first, first + extent, stride)
        if world % extent == 0 and {*ranks} <= {*members}:
            missing = [rank for rank in missing if rank in members] or missing
            break
    which = f": --ranks {numbers(missing[: limits.MOST])}" if missing else ""
    return missing, f"Profile the other ranks{which}."
