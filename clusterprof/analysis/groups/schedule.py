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

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.groups.stages import Stages, Traffic, traffic
from clusterprof.analysis.model.dataset import Dataset, Ints, commonest

#: in this part of the steps a rank must have the same order
_MOST_STEPS = 0.8
#: a forward alone is a third of a microbatch's work, or a quarter where it is done twice
_WHOLE = 0.6
#: chunks that a rank may have
_MOST_CHUNKS = 8


@dataclass(frozen=True)
class Schedule:
    """A recognised schedule; `ideal` is the share of the step that its bubble takes at best."""

    name: str
    stages: int
    microbatches: int
    chunks: int = 1

    @property
    def ideal(self) -> float:
        """(p - 1) / (v m + p - 1)."""
        idle = self.stages - 1
        return idle / (self.chunks * self.microbatches + idle)


@dataclass(frozen=True)
class _Counts:
    """One rank's step: messages to and from its neighbours, and round from the last to the first.

    `ahead` is how many forwards it has passed on (of the last stage: taken) before the first
    gradient came back (left).
    """

    forward: int
    backward: int
    around: int
    ahead: int


def schedule(dataset: Dataset, found: Stages) -> Schedule | None:
    """The schedule that all profiled ranks agree on, or None: not recognised."""
    sent = traffic(dataset)
    depth = found.count
    if depth is None:
        # only where every call's other side is profiled is the last profiled stage the last one
        others = sent.other[np.isin(sent.step, dataset.steady_steps)]
        if not len(others) or not bool(np.isin(others, dataset.ranks).all()):
            return None
        depth = len(found.groups)
    if depth < 2:
        return None
    counted = [
        (stage, counts)
        for stage, group in zip(found.numbers, found.groups, strict=True)
        for rank in group
        for counts in [_usual(dataset, found, sent, rank, stage, depth)]
    ]
    known = [(stage, counts) for stage, counts in counted if counts is not None]
    if not known or len(known) < len(counted):
        return None
    if any(counts.around for _, counts in known):
        return _interleaved(known, depth)
    return _plain(dataset, found, known, depth)


def _usual(
    dataset: Dataset, found: Stages, sent: Traffic, rank: int, stage: int, depth: int
) -> _Counts | None:
    """What most steady-state steps of a rank count; None where they differ or go elsewhere."""
    low, high = np.searchsorted(sent.rank, [rank, rank + 1])
    step, sends, other = (a[low:high] for a in (sent.step, sent.sends, sent.other))
    where = np.asarray([_stage(found, int(o)) for o in np.unique(other)], dtype=np.int64)
    at = where[np.searchsorted(np.unique(other), other)]
    each = [
        _count(sends[step == s], at[step == s], stage, depth)
        for s in dataset.steady_steps
        if bool((step == s).any())
    ]
    whole = [counts for counts in each if counts is not None]
    if not whole:
        return None
    most = commonest(whole)
    return most if whole.count(most) >= _MOST_STEPS * len(each) else None


def _stage(found: Stages, rank: int) -> int:
    """The stage of a rank, also of an unprofiled one where the lay-out gives it; else -1."""
    known = found.of.get(rank)
    if known is None and found.count is not None and found.world and rank >= 0:
        known = rank // (found.world // found.count)
    return -1 if known is None else known


def _count(sends: np.ndarray, at: Ints, stage: int, depth: int) -> _Counts | None:
    last = stage == depth - 1
    to_next, to_before = at == stage + 1, at == stage - 1
    around = np.zeros(len(at), dtype=bool)
    if depth > 2 and stage in (0, depth - 1):
        around = at == (0 if last else depth - 1)
    if not bool((to_next | to_before | around).all()):
        return None
    # each of these twice a microbatch: activations one way, gradients the other
    out = to_before if last else to_next
    onward, back = out & (sends != last), out & (sends == last)
    first = np.flatnonzero(back)
    ahead = int(onward[: first[0]].sum()) if len(first) else int(onward.sum())
    turned = around & (sends == last)
    return _Counts(int(onward.sum()), int(back.sum()), int(turned.sum()), ahead)


def _interleaved(known: list[tuple[int, _Counts]], depth: int) -> Schedule | None:
    """Of v chunks each microbatch passes v times from stage to stage, and v - 1 times around."""
    # only the first and last stage send around
    ends = {(c.forward, c.around) for stage, c in known if stage in (0, depth - 1)}
    if len(ends) != 1:
        return None
    forward, around = ends.pop()
    count = forward - around
    even = all(c.forward == forward and c.backward == forward for _, c in known)
    if count < 1 or forward % count or not even:
        return None
    return Schedule("interleaved 1F1B", depth, count, forward // count)


def _plain(
    dataset: Dataset, found: Stages, known: list[tuple[int, _Counts]], depth: int
) -> Schedule | None:
    counts = {c.forward for _, c in known} | {c.backward for _, c in known}
    if len(counts) != 1:
        return None
    (count,) = counts
    if count < 1:
        return None
    all_first = all(c.ahead == count for _, c in known)
    # receives may be posted one microbatch ahead
    by_turns = all(abs(c.ahead - min(count, depth - stage)) <= 1 for stage, c in known)
    if by_turns and not all_first and depth == 2 and not _whole_turns(dataset, found):
        return _between_two(count)
    if all_first:
        return Schedule("GPipe or 1F1B" if by_turns else "GPipe", depth, count)
    return Schedule("1F1B", depth, count) if by_turns else None


def _between_two(messages: int) -> Schedule | None:
    """Between two stages each microbatch passes 2 v - 1 times each way, onward or around."""
    fits = [
        (messages // (2 * v - 1), v)
        for v in range(2, _MOST_CHUNKS + 1)
        if messages % (2 * v - 1) == 0 and messages // (2 * v - 1) >= 2
    ]
    if len(fits) != 1:
        return None
    return Schedule("interleaved 1F1B", 2, *fits[0])


def _whole_turns(dataset: Dataset, found: Stages) -> bool:
    """Whether the last of two stages does a forward and a backward in its first turn too.

    Between two stages the interleaved schedule's messages may come in 1F1B's order; but its first
    turn is a forward only.
    """
    sent, c = traffic(dataset), dataset.collectives
    if found.numbers[-1] != 1 or found.count not in (None, 2):
        return False
    for rank in found.groups[-1]:
        line = dataset.line(rank)
        for step in dataset.steady_steps:
            mine = sent.row[(sent.rank == rank) & (sent.step == step)]
            mine = mine[c.has[mine]]
            sends = c.operation[mine] == "Send"
            turns = np.flatnonzero(sends[1:] & ~sends[:-1])
            if len(turns) < 2:
                return False
            came, went = c.end[mine[turns]], c.start[mine[turns + 1]]
            work = line.compute.within(came, np.maximum(went, came))
            if work[0] < _WHOLE * float(np.median(work)):
                return False
    return True
