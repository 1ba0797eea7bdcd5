"""Which schedule a pipeline runs, by the order of each stage's Sends and Recvs, and its bubble.

GPipe (Huang et al. 2019) sends all forwards before the first gradient comes back; 1F1B
(Narayanan et al. 2019) has stage s of p send p - s of them before; the interleaved schedule
(Narayanan et al. 2021, Megatron-LM) gives each rank v chunks, so that the last stage sends to the
first one too. With m microbatches the ideal bubble is (p - 1) / (m + p - 1) of the step for the
first two and (p - 1) / (v m + p - 1) for the third. Assumes one message for each microbatch and
direction. Schedules that split the backward (zero bubble) send in the order of 1F1B and are taken
for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.analysis.groups.stages import Stages, traffic
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.timeline import COMPUTE
from clusterprof.columns import (
    Ints,
    Stretches,
    begins,
    count_by,
    first_of,
    order_by,
    parts,
    row_of,
    running_sum,
)


class Schedule(NamedTuple):
    """A recognised schedule; `ideal` is the share of the step that its bubble takes at best."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int = 1

    @property
    def ideal(self) -> float:
        """(p - 1) / (v m + p - 1)."""
        idle = self.stages - 1
        return idle / (self.chunks * self.microbatches + idle)


def schedule(dataset: Dataset, pipeline: Stages) -> Schedule | None:
    """The schedule that all profiled ranks agree on, or None: not recognised."""
    sent, depth = traffic(dataset), pipeline.count or len(pipeline.numbers)
    # only where every call's other side is profiled is the last profiled stage the last one
    others = sent.other[np.isin(sent.step, dataset.steady_steps)]
    if pipeline.count is None and not np.isin(others, dataset.ranks).all():
        return None
    counts = _usual(dataset, pipeline, depth)
    if counts is None:
        return None
    stage, forward, backward, around, ahead = counts
    count, around = int(forward[0]), np.unique(around[(stage == 0) | (stage == depth - 1)])
    if not count or (forward != count).any() or (backward != count).any():
        return None
    # only the first and last stage send around
    if around.any():
        # of v chunks each microbatch passes v times from stage to stage, and v - 1 times around
        microbatches = count - int(around[0])
        if len(around) > 1 or microbatches < 1 or count % microbatches:
            return None
        return Schedule("interleaved 1F1B", depth, microbatches, count // microbatches)
    all_first = bool((ahead == count).all())
    # receives may be posted one microbatch ahead
    by_turns = bool((np.abs(ahead - np.minimum(count, depth - stage)) <= 1).all())
    if by_turns and not all_first and depth == 2 and not _whole_turns(dataset, pipeline):
        # between two stages each microbatch passes 2 v - 1 times each way, onward or around
        passes = [n for n in range(3, count // 2 + 1, 2) if count % n == 0]
        if len(passes) != 1:
            return None
        return Schedule("interleaved 1F1B", 2, count // passes[0], (passes[0] + 1) // 2)
    if all_first:
        return Schedule("GPipe or 1F1B" if by_turns else "GPipe", depth, count)
    return Schedule("1F1B", depth, count) if by_turns else None


def _usual(dataset: Dataset, pipeline: Stages, depth: int) -> Ints | None:
    """What most steady-state steps of each rank count; None where they differ or go elsewhere.

    A column for each rank; rows are its stage, its messages to and from its neighbours (forwards
    and gradients), those round from the last stage to the first, and how many forwards it has
    passed on (of the last stage: taken) before the first gradient came back (left).
    """
    sent, ranks = traffic(dataset), np.sort(pipeline.ranks)
    rows = np.flatnonzero(np.isin(sent.step, dataset.steady_steps) & np.isin(sent.rank, ranks))
    rows = rows[order_by(sent.rank[rows], sent.step[rows])]
    rank, step, sends = sent.rank[rows], sent.step[rows], sent.sends[rows]
    stage, other = pipeline.stages_of(rank), pipeline.stages_of(sent.other[rows])
    last = stage == depth - 1
    to_next, to_before = other == stage + 1, other == stage - 1
    around = ((stage == 0) | last) & (other == np.where(last, 0, depth - 1)) & (depth > 2)
    # each of these twice a microbatch: activations one way, gradients the other
    neighbour, forward = np.where(last, to_before, to_next), sends != last
    onward, back, turned = neighbour & forward, neighbour & ~forward, around & ~forward
    came_back = running_sum(back, first_of(begins(rank, step)))
    ahead = onward & (came_back == 0)
    elsewhere = ~(to_next | to_before | around)
    sent_as = np.stack([onward, back, turned, ahead, elsewhere]).astype(np.int64)
    steps = Stretches.of(rank, step)
    counts = np.stack([rank[steps.first], stage[steps.first], *steps.sum(sent_as)])
    kinds, number = np.unique(counts, axis=1, return_counts=True)
    steps_of = count_by(row_of(ranks, counts[0]), len(ranks))
    most = kinds[:, 2 * number > steps_of[row_of(ranks, kinds[0])]]
    return None if most.shape[1] < len(ranks) or most[-1].any() else most[1:-1]


def _whole_turns(dataset: Dataset, pipeline: Stages) -> bool:
    """Whether the last of two stages does a forward and a backward in its first turn too.

    Between two stages the interleaved schedule's messages may come in 1F1B's order; but its first
    turn is a forward only: a third of both, or a quarter where it is done twice.
    """
    sent, c, d = traffic(dataset), dataset.collectives, dataset.timelines
    if pipeline.numbers[-1] != 1:
        return False
    for rank in pipeline.groups[-1]:
        rows = sent.row[(sent.rank == rank) & np.isin(sent.step, dataset.steady_steps)]
        rows = rows[c.has[rows]]
        place = dataset.place[rank]
        (compute,) = d.ran(place, place + 1, (COMPUTE,))
        for calls in parts(rows, c.step[rows]):
            sends = c.operation[calls] == "Send"
            turns = np.flatnonzero(sends[1:] & ~sends[:-1])
            if len(turns) < 2:
                return False
            came, went = c.end[calls[turns]], c.start[calls[turns + 1]]
            times = np.stack([came, np.maximum(went, came)])
            work = compute.within(*d.axis.of(place, times))
            if work[0] < limits.HALF * float(np.median(work)):
                return False
    return True
