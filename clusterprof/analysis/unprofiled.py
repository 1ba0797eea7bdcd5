"""A late rank that nobody profiled: all profiled members wait for it together."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.finding import LEAST_FRAC, finding, ms, percent
from clusterprof.analysis.scene import Scene
from clusterprof.results import Finding

#: a transfer this many times the shortest of its kind is more than a transfer
_LONGER = 3.0
_LEAST_CALLS = 4
#: seen in fewer of the steps, it must cost so much: transfers vary for other reasons too
_STEADY_FRAC = 0.75
_MUCH_FRAC = 0.2


def find(scene: Scene) -> list[Finding]:
    """Return `straggler.unprofiled` where profiled members wait for someone who has no report.

    Evidence: of calls of one communicator, operation and size, some take many times longer after
    the last *profiled* arrival than the quickest ones, on every profiled member at once. Assumes
    that equal transfers take equally long; a congested network looks alike, hence the modest
    confidence. Only where the world has ranks without a report.
    """
    world = scene.world_size
    if world is None or world <= len(scene.ranks) or not scene.settled:
        return []
    c = scene.collectives
    usable = c.has & ~c.point_to_point & (c.matched | (c.wait == 0))
    usable &= np.isin(c.operation.astype(str), ["AllReduce", "AllGather", "ReduceScatter", "AllToAll"])
    found = []
    keys = np.asarray(
        [f"{n}\0{o}\0{s}" for n, o, s in zip(c.communicator, c.operation, c.size, strict=True)],
        dtype=object,
    )
    extra = np.zeros(len(c.rank))
    for key in dict.fromkeys(keys[usable]):
        rows = np.flatnonzero(usable & (keys == key))
        if len(np.unique(c.collective[rows])) < _LEAST_CALLS:
            continue
        transfer = (c.end - c.start - c.wait)[rows]
        usual = float(np.quantile(transfer, 0.1))
        extra[rows] = np.where(transfer > _LONGER * usual + 50_000, transfer - usual, 0.0)
    for communicator in dict.fromkeys(c.communicator[extra > 0]):
        one = _finding(scene, str(communicator), extra, world)
        if one is not None:
            found.append(one)
    return found[:3]


def _finding(scene: Scene, communicator: str, extra: np.ndarray, world: int) -> Finding | None:
    c = scene.collectives
    mine = (c.communicator == communicator) & np.isin(c.step, scene.settled)
    ranks = sorted({int(r) for r in c.rank[mine]})
    # hidden behind compute it costs nothing
    cost = np.zeros((len(ranks), len(scene.settled)))
    for k, rank in enumerate(ranks):
        rows = np.flatnonzero(mine & (c.rank == rank) & (extra > 0))
        line = scene.line(rank)
        begin = (c.end[rows] - extra[rows]).astype(np.int64)
        exposed = c.end[rows] - begin - line.compute.within(begin, c.end[rows])
        np.add.at(cost[k], np.searchsorted(scene.settled, c.step[rows]), exposed)
    together = cost.min(axis=0)
    per_step = float(together.mean())
    steady = float((together > 0.01 * scene.step_ns).mean())
    if per_step < (LEAST_FRAC if steady >= _STEADY_FRAC else _MUCH_FRAC) * scene.step_ns:
        return None
    missing = [r for r in range(world) if r not in scene.ranks]
    some = ",".join(map(str, missing[:16]))
    return finding(
        scene,
        "straggler.unprofiled",
        rank=None,
        ranks=ranks,
        cost=together,
        floor_ns=0.01 * scene.step_ns,
        confidence=0.6,
        summary=f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))} wait together "
        f"{ms(per_step)} of each step ({percent(per_step / scene.step_ns)}) for a rank without a "
        f"report (the job has {world}, {len(scene.ranks)} were captured)",
        evidence=[
            {
                "communicator": communicator,
                "ranks": ranks,
                "steps": list(scene.settled),
                "what": f"{int((mine & (extra > 0)).sum()) // max(len(ranks), 1)} calls last far longer "
                "after the last profiled arrival than their quickest do",
            }
        ],
        advice=f"capture the others: --ranks {some}{',…' if len(missing) > 16 else ''}",
        follow_up=f"clusterprof srun --ranks {some} ... -- PROGRAM",
    )
