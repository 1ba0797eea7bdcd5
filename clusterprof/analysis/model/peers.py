"""Which ranks do the same work: the stages of a pipeline in their order, and each rank's peers.

Stages are read off the first point-to-point call of each rank in each step: a rank of the first
stage begins with a Send, every other one with a Recv from the stage before it. Assumes that ranks
which only exchange with their neighbours in a ring (ring attention) all begin alike, so that no
order of theirs has a beginning: then there are no stages.

Peers are the ranks of one stage. Groups of thousands of ranks have millions of pairs: ranks with
the same peers share one array of them, and what is usual among all but one is read off one sorted
column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.graph import depths
from clusterprof.columns import (
    Bools,
    Floats,
    Ints,
    connected,
    first_places,
    order_by,
    parts,
    row_of,
    where_known,
)

# --- stages


class Traffic:
    """All Sends and Recvs, one element each, by rank and in order of issue.

    `row` is the row of the placed table; `other` the global rank of the other side, -1 where
    neither a match nor the report says it.
    """

    def __init__(self, dataset: Dataset) -> None:
        c = dataset.collectives
        rows = np.flatnonzero(c.between_stages)
        rows = rows[order_by(c.rank[rows], c.issue[rows])]
        other = np.full(len(c.rank), -1, dtype=np.int64)
        pairs = np.flatnonzero(c.point_to_point & c.matched)
        pairs = pairs[order_by(c.collective[pairs])]
        a, b = pairs[0::2], pairs[1::2]
        if len(a) == len(b) and bool((c.collective[a] == c.collective[b]).all()):
            other[a], other[b] = c.rank[b], c.rank[a]
        # else by the reports' own peers: of a communicator of the whole world they are global
        # ranks; of another one its own numbers, which only calls that were matched can tell
        peer, world = dataset.issued("peer"), dataset.world_size or 0
        whole = (dataset.issued("communicator_size") == world) | (dataset.issued("members") > 0)
        for calls in parts(rows, c.communicators[0][rows]):
            both = calls[(peer[calls] >= 0) & (other[calls] >= 0)]
            if bool((peer[both] == other[both]).all() if len(both) else whole[calls].all()):
                other[calls] = np.where(other[calls] < 0, peer[calls], other[calls])
        self.row, self.rank, self.step, self.other = rows, c.rank[rows], c.step[rows], other[rows]
        self.sends: Bools = c.operation[rows] == "Send"


@dataclass(frozen=True)
class Stages:
    """The profiled `ranks` of a pipeline, in the order of its stages, and the `stage` of each.

    Ranks that hand each other activations have one number in `pipeline`. Where unprofiled ranks
    leave open how deep the pipeline is, `count` is None, and stages are numbered from the first
    profiled one.
    """

    ranks: Ints
    stage: Ints
    pipeline: Ints
    count: int | None = None
    #: how many ranks a stage has, where they are laid out one stage after the other
    stride: int | None = None

    @cached_property
    def numbers(self) -> list[int]:
        """The profiled stages, ascending."""
        return sorted({*self.stage.tolist()})

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """The ranks of each of `numbers`."""
        return [tuple(ranks.tolist()) for ranks in parts(self.ranks, self.stage)]

    def stages_of(self, ranks: Ints) -> Ints:
        """The stage of each rank, also of unprofiled ones where the lay-out gives it; else -1."""
        if self.stride:
            return np.where(ranks >= 0, ranks // self.stride, -1)
        return where_known(self.stage, first_places(self.ranks, ranks), -1)


traffic = once(Traffic)


@once
def stages(dataset: Dataset) -> Stages | None:
    """The pipeline's stages; None where there is no pipeline."""
    sent = traffic(dataset)
    inside = np.flatnonzero(sent.step >= 0)
    # each rank's first call in each step
    rank_and_step = np.stack([sent.rank[inside], sent.step[inside]])
    first = inside[np.unique(rank_and_step, axis=1, return_index=True)[1]]
    first = first[sent.other[first] >= 0]
    if not len(first):
        return None
    rank, sends, other = sent.rank[first], sent.sends[first], sent.other[first]
    # Frameworks lay a stage out so many ranks behind the one before it. Believed only if one
    # distance fits all ranks, divides the world, and puts exactly those ranks into the first stage
    # that begin with a Send.
    apart, world = np.unique(np.where(sends, other - rank, rank - other)), dataset.world_size or 0
    size, ranks = int(apart[0]), np.unique(rank)
    fits = len(apart) == 1 and size > 0 and world >= 2 * size and world % size == 0
    if fits and np.array_equal(rank < size, sends):
        return Stages(ranks, ranks // size, ranks % size, world // size, size)
    # else by the chain of matched calls: a stage is one more than that which it receives from;
    # where a rank's own first calls are unknown, so is its stage, and those behind it: a circle
    ranks = np.unique(sent.rank)
    receives, unknown = ~sends & np.isin(other, ranks), np.setdiff1d(ranks, rank)
    senders = np.concatenate((other[receives], unknown))
    receivers = np.concatenate((rank[receives], unknown))
    edges = row_of(ranks, np.stack((senders, receivers)))
    depth = depths(len(ranks), *edges)
    if depth.max() < 1:
        return None
    chain = connected(edges.ravel(), np.tile(np.arange(edges.shape[1]), 2), len(ranks))
    order = order_by(depth)
    order = order[depth[order] >= 0]
    return Stages(ranks[order], depth[order], chain[order])


# --- peers


@dataclass(frozen=True)
class Peers:
    """For each profiled rank the places of those that do the same work, itself included.

    `circles[circle_of[k]]` are those of the k-th rank; it alone has no rank to be compared with.
    """

    circles: tuple[Ints, ...]
    circle_of: Ints

    def others(self, k: int) -> Ints:
        """The places of the k-th rank's peers."""
        circle = self.circles[self.circle_of[k]]
        return np.asarray(circle[circle != k])

    @cached_property
    def apart(self) -> float:
        """How many circles there are, of those that overlap as many as do not."""
        sizes = np.asarray([len(circle) for circle in self.circles])[self.circle_of]
        return float((1 / sizes[sizes > 1]).sum())

    def usual(self, values: Floats, without: Sequence[int] | Ints = ()) -> Floats:
        """What a rank's middle peer has of `values` [ranks, ...]; NaN where no peer has any.

        Ranks in `without` are no peers.
        """
        usual, counted = np.full_like(values, np.nan), values.copy()
        counted[[*without]] = np.nan
        for number, circle in enumerate(self.circles):
            members = np.flatnonzero(self.circle_of == number)
            usual[members] = median_of_others(counted[circle])[row_of(circle, members)]
        return usual

    def differences(self, values: Floats) -> Floats:
        """How much more of `values` [ranks, ...] than its middle peer a rank has; 0 for NaN."""
        return np.asarray(np.nan_to_num(values - self.usual(values)))


def median_of_others(values: Floats) -> Floats:
    """The median of each column over all rows but each, without NaN; NaN where none has a value."""
    # `order_by` and `inverse` know one order of all columns: here each has its own
    place_in_column = np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0)
    ordered = np.sort(values, axis=0)  # NaN last
    has_value = ~np.isnan(values)
    count = has_value.sum(axis=0) - has_value
    middle = []
    for rank in ((count - 1) // 2, count // 2):
        # of the others: a row's own value, if it has one, is skipped
        row = rank + (has_value & (rank >= place_in_column))
        middle.append(np.take_along_axis(ordered, np.minimum(row, len(values) - 1), axis=0))
    return np.where(count > 0, (middle[0] + middle[1]) / 2, np.nan)


@once
def tied(dataset: Dataset) -> Ints:
    """For each profiled rank the place of the first that chains of matched calls tie it to.

    In those calls members wait for each other: what one saves, all that are tied to it save.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.matched & (c.synchronising | c.point_to_point))
    member = row_of(dataset.ranks, c.rank[rows])
    return connected(member, c.communicators[0][rows], len(dataset.ranks))


def peers(dataset: Dataset, stage: Ints) -> Peers:
    """Ranks of one pipeline stage that are tied.

    They do the same work, whether or not they share a communicator. One that is its stage's only
    one is compared with all stages, in what can be compared.
    """
    job = tied(dataset)
    alike = (job[:, None] == job) & (stage[:, None] == stage)
    if dataset.pipelined:
        alone = alike.sum(axis=1) < 2
        alike[alone] = job[alone, None] == job
    bits = np.packbits(alike, axis=1)
    _, first, circle_of = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    return Peers(tuple(np.flatnonzero(circle) for circle in alike[first]), circle_of.reshape(-1))
