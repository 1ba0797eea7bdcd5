"""Pipelines: bubbles, and stages of unequal work."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis import limits
from clusterprof.analysis.finding import finding, ms, percent
from clusterprof.analysis.intervals import union
from clusterprof.analysis.scene import Floats, Scene
from clusterprof.results import Finding


def stages(scene: Scene) -> list[list[int]]:
    """Ranks by pipeline stage, first stage first; empty where no pipeline is seen.

    A rank's stage is one more than that of the rank whose Send it receives first in each step;
    a rank that first sends is of the first stage.
    """
    c = scene.collectives
    forward: set[tuple[int, int]] = set()
    for rank in scene.ranks:
        rows = np.flatnonzero(c.point_to_point & (c.rank == rank) & c.has & c.matched)
        if not len(rows):
            continue
        for step in np.unique(c.step[rows]):
            mine = rows[c.step[rows] == step]
            first = mine[np.argmin(c.issue[mine])]
            if c.operation[first] == "Recv":
                other = np.flatnonzero((c.collective == c.collective[first]) & (c.rank != rank))
                forward.update((int(c.rank[o]), rank) for o in other)
    taking_part = {int(r) for r in c.rank[c.point_to_point & c.matched]}
    depth = {rank: 0 for rank in taking_part if rank not in {b for _, b in forward}}
    for _ in scene.ranks:
        for a, b in forward:
            if a in depth and depth.get(b, 0) < depth[a] + 1 <= len(scene.ranks):
                depth[b] = depth[a] + 1
    if len(set(depth.values())) < 2:
        return []
    return [sorted(r for r in depth if depth[r] == d) for d in sorted(set(depth.values()))]


def waiting(scene: Scene) -> Floats:
    """Exposed time inside Sends and Recvs beyond the quickest of its size, [ranks, steps] (ns).

    A Recv that has been posted early waits inside its kernel: that is the bubble. A GPU that
    idles because its host has not posted anything is not counted here.
    """
    c = scene.collectives
    out = np.zeros((len(scene.ranks), len(scene.settled)))
    rows = np.flatnonzero(c.point_to_point & c.has)
    if not len(rows):
        return out
    quick = float(np.quantile((c.end - c.start)[rows], 0.1))
    for k, line in enumerate(scene.timelines):
        mine = rows[c.rank[rows] == line.rank]
        until = np.maximum(c.end[mine] - int(quick), c.start[mine])
        covered = union(
            np.r_[line.compute.start, c.start[mine]].astype(np.int64),
            np.r_[line.compute.end, until].astype(np.int64),
        )
        each = covered.within(line.begin, line.end) - line.compute.within(line.begin, line.end)
        known = np.isin(line.step, scene.settled)
        out[k, np.searchsorted(scene.settled, line.step[known])] = each[known]
    return out


def microbatches(scene: Scene, stage: list[list[int]]) -> int:
    """Microbatches per step: Sends of a first-stage rank per step."""
    c = scene.collectives
    rank = stage[0][0]
    sends = (c.operation == "Send") & (c.rank == rank) & np.isin(c.step, scene.settled)
    return max(1, round(int(sends.sum()) / max(len(scene.settled), 1)))


def find(scene: Scene, late_ns: float = 0.0) -> list[Finding]:
    """Return `pipeline.bubble` and `pipeline.imbalance`.

    `late_ns`: what the stragglers found already cost a step. Who waits for them, in whatever
    receive, waits for no bubble.
    """
    if not scene.pipelined or not scene.settled:
        return []
    stage = stages(scene)
    if not stage:
        return []
    uneven = _imbalance(scene, stage)
    # what waits only for a stage with more work is that one's matter
    already = float(uneven["cost_ns_per_step"]) if uneven else 0.0
    found = [_bubble(scene, stage, already + late_ns), uneven]
    return [f for f in found if f is not None]


def _bubble(scene: Scene, stage: list[list[int]], already: float) -> Finding | None:
    waits = waiting(scene)
    rows = [scene.ranks.index(r) for group in stage for r in group]
    cost = np.maximum(waits[rows].mean(axis=0) - already, 0.0)
    per_step = float(cost.mean())
    share = per_step / scene.step_ns
    if share < limits.LEAST_FRAC:
        return None
    count = microbatches(scene, stage)
    ideal = (len(stage) - 1) / (count + len(stage) - 1)
    evidence = [
        {
            "stage": k,
            "ranks": group,
            "steps": list(scene.settled),
            "wait_ns_per_step": round(
                float(np.mean([waits[scene.ranks.index(r)].mean() for r in group]))
            ),
            "what": f"stage {k} waits "
            f"{ms(float(np.mean([waits[scene.ranks.index(r)].mean() for r in group])))} a step",
        }
        for k, group in enumerate(stage)
    ]
    return finding(
        scene,
        "pipeline.bubble",
        rank=None,
        ranks=sorted(r for group in stage for r in group),
        cost=cost,
        floor_ns=0.01 * scene.step_ns,
        confidence=0.85,
        summary=f"pipeline bubble: each rank waits {ms(per_step)} of each step ({percent(share)}) "
        f"in receives; the ideal of {count} microbatches over {len(stage)} stages is "
        f"{percent(ideal)}" + (", beyond what is named already" if already else ""),
        evidence=evidence,
        advice="more microbatches per step, or an interleaved schedule, shrink the bubble"
        + (
            ""
            if share < 1.3 * ideal
            else "; beyond the ideal, stages wait for each other's hosts "
            "or transfers: larger microbatches, fewer launches"
        ),
    )


def _imbalance(scene: Scene, stage: list[list[int]]) -> Finding | None:
    """A stage with more to compute than the others: all wait for it, each microbatch anew.

    Saved by even stages: the part of its own time (computing, and idle until its host has
    launched, which takes longer with more layers too) that it has beyond the stages' mean.
    """
    rows = [[scene.ranks.index(r) for r in group] for group in stage]
    compute, idle = scene.account("compute_ns"), scene.account("idle_ns")
    per_stage = np.stack([np.nanmedian(compute[at], axis=0) for at in rows])
    own = np.stack([np.nanmedian((compute + idle)[at], axis=0) for at in rows])
    usual = np.nanmean(per_stage, axis=1)
    most, least = int(np.argmax(usual)), int(np.argmin(usual))
    if usual[most] - usual[least] < limits.UNEQUAL_FRAC * usual[most]:
        return None
    surplus = 1 - float(usual.mean()) / float(usual[most])
    cost = np.minimum(np.nan_to_num(own[most]) * surplus, scene.durations)
    per_step = float(cost.mean())
    if per_step < limits.LEAST_FRAC * scene.step_ns:
        return None
    named = f"rank{'s' if len(stage[most]) > 1 else ''} {', '.join(map(str, stage[most][:8]))}"
    return finding(
        scene,
        "pipeline.imbalance",
        rank=stage[most][0],
        ranks=stage[most],
        cost=cost,
        floor_ns=0.01 * scene.step_ns,
        confidence=0.9,
        summary=f"pipeline stage {most} ({named}) computes {ms(float(usual[most]))} a step, stage "
        f"{least} {ms(float(usual[least]))}: relieve stage {most}; even stages would save up to "
        f"{ms(per_step)} of each step ({percent(per_step / scene.step_ns)})",
        evidence=[
            {
                "stage": k,
                "ranks": group,
                "steps": list(scene.settled),
                "compute_ns_per_step": round(float(usual[k])),
                "idle_ns_per_step": round(float(np.nanmean(own[k])) - float(usual[k])),
                "what": f"stage {k} computes {ms(float(usual[k]))} a step",
            }
            for k, group in enumerate(stage)
        ],
        advice=f"move layers from stage {most} to stage {least}, or give stage {most} more ranks",
    )
