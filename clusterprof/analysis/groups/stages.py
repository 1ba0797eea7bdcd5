"""Which rank sends to which: the stages of a pipeline in their order, and its pipelines.

Read off the first point-to-point call of each rank in each step: a rank of the first stage begins
with a Send, every other one with a Recv from the stage before it. Assumes that ranks which only
exchange with their neighbours in a ring (ring attention) all begin alike, so that no order of
theirs has a beginning: then there are no stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow.compute as pc

from clusterprof.analysis.model.dataset import Bools, Dataset, Ints, connected, parts

#: no pipeline is deeper; an order that is longer goes round in a circle
_DEEPEST = 1024
_UNKNOWN = -1


@dataclass(frozen=True)
class Traffic:
    """All Sends and Recvs, one element each, by rank and in order of issue.

    `row` is the row of the placed table; `other` the global rank of the other side, -1 where
    neither a match nor the report says it.
    """

    row: Ints
    rank: Ints
    step: Ints
    sends: Bools
    other: Ints

    def first(self) -> Ints:
        """Places of the first call of each rank in each step."""
        inside = np.flatnonzero(self.step >= 0)
        fresh = np.ones(len(inside), dtype=bool)
        rank, step = self.rank[inside], self.step[inside]
        fresh[1:] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
        return np.asarray(inside[fresh])


@dataclass(frozen=True)
class Stages:
    """The profiled stages in order: `groups[k]` are ranks of stage `numbers[k]` of `count`.

    `count` is None, and `numbers` only count on, where unprofiled ranks leave open how
    deep the pipeline is. `pipelines` are the ranks that hand each other activations, each
    pipeline in the order of its stages.
    """

    groups: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]
    count: int | None
    pipelines: tuple[tuple[int, ...], ...]
    #: the world's size where stages are equal shares of it, one after the other
    world: int | None = None

    @cached_property
    def of(self) -> dict[int, int]:
        """The stage number of each profiled rank that takes part."""
        pairs = zip(self.numbers, self.groups, strict=True)
        return {rank: number for number, group in pairs for rank in group}


def traffic(dataset: Dataset) -> Traffic:
    """All Sends and Recvs, computed once."""
    return dataset.cached("traffic", lambda: _traffic(dataset))


def stages(dataset: Dataset) -> Stages | None:
    """The pipeline's stages, computed once; None where there is no pipeline."""
    return dataset.cached("stages", lambda: _stages(dataset))


def _traffic(dataset: Dataset) -> Traffic:
    c = dataset.collectives
    # beside all-to-alls what has no kernel is part of one
    rows = np.flatnonzero(c.point_to_point & ~c.exchange & (c.has | ~c.exchange.any()))
    rows = rows[np.lexsort((rows, c.issue[rows], c.rank[rows]))]
    other = np.full(len(c.rank), _UNKNOWN, dtype=np.int64)
    pairs = np.flatnonzero(c.point_to_point & c.matched)
    pairs = pairs[np.argsort(c.collective[pairs], kind="stable")]
    one, two = pairs[0::2], pairs[1::2]
    if len(one) == len(two) and bool((c.collective[one] == c.collective[two]).all()):
        other[one], other[two] = c.rank[two], c.rank[one]
    _from_peers(dataset, rows, other)
    return Traffic(rows, c.rank[rows], c.step[rows], c.operation[rows] == "Send", other[rows])


def _from_peers(dataset: Dataset, rows: Ints, other: Ints) -> None:
    """Fill in `other` by the reports' own peers, where these are global ranks.

    Of a communicator of the whole world they are; of another one they are its own numbers,
    which only calls that were matched can tell.
    """
    c = dataset.collectives
    peer = np.full(len(c.rank), _UNKNOWN, dtype=np.int64)
    whole = np.zeros(len(c.rank), dtype=bool)
    for rank, mine in c.each_rank(rows):
        calls = dataset.issued(rank, mine, "peer", "communicator_size", "members")
        peer[mine] = pc.fill_null(calls["peer"], _UNKNOWN).to_numpy()
        size = pc.fill_null(calls["communicator_size"], 0).to_numpy()
        listed = pc.is_valid(calls["members"]).to_numpy()
        whole[mine] = listed | (size == (dataset.world_size or -1))
    for these in parts(rows, c.communicators[0][rows]):
        known = these[(peer[these] >= 0) & (other[these] >= 0)]
        agree = len(known) > 0 and bool((peer[known] == other[known]).all())
        if agree or (len(known) == 0 and bool(whole[these].all())):
            open_ = these[other[these] < 0]
            other[open_] = peer[open_]


def _stages(dataset: Dataset) -> Stages | None:
    sent = traffic(dataset)
    first = sent.first()
    first = first[sent.other[first] >= 0]
    if not len(first):
        return None
    return _laid_out(dataset, sent, first) or _chained(sent, first)


def _laid_out(dataset: Dataset, sent: Traffic, first: Ints) -> Stages | None:
    """Stages where each is so many ranks behind the one before it, as frameworks lay them out.

    Believed only if one distance fits all ranks, divides the world, and puts exactly those ranks
    into the first stage that begin with a Send.
    """
    rank, sends, other = sent.rank[first], sent.sends[first], sent.other[first]
    apart = np.unique(np.where(sends, other - rank, rank - other))
    world = dataset.world_size
    if len(apart) != 1 or world is None or apart[0] <= 0 or world % int(apart[0]):
        return None
    size = int(apart[0])
    if world // size < 2 or bool(((rank // size == 0) != sends).any()):
        return None
    ranks = np.unique(rank)
    stage = ranks // size
    groups = {int(s): tuple(ranks[stage == s].tolist()) for s in np.unique(stage)}
    chains = [tuple(ranks[ranks % size == k].tolist()) for k in np.unique(ranks % size)]
    return Stages(tuple(groups.values()), tuple(groups), world // size, tuple(chains), world)


def _chained(sent: Traffic, first: Ints) -> Stages | None:
    """Stages by the chain of matched calls: one more than the stage that is received from."""
    known = np.unique(sent.rank)
    into = first[~sent.sends[first] & np.isin(sent.other[first], known)]
    edges = np.unique(np.stack([sent.other[into], sent.rank[into]], axis=1), axis=0)
    taking_part = np.unique(sent.rank[first])
    depth = np.where(np.isin(known, edges[:, 1]), _UNKNOWN, 0)
    depth[~np.isin(known, taking_part)] = _UNKNOWN
    before, after = np.searchsorted(known, edges[:, 0]), np.searchsorted(known, edges[:, 1])
    for _ in range(min(_DEEPEST, len(known)) + 1):
        reached = np.where(depth[before] >= 0, depth[before] + 1, _UNKNOWN)
        deeper = depth.copy()
        np.maximum.at(deeper, after, reached)
        if bool((deeper == depth).all()):
            break
        depth = deeper
    else:
        return None
    numbers = [int(d) for d in np.unique(depth[depth >= 0])]
    if len(numbers) < 2:
        return None
    groups = tuple(tuple(known[depth == d].tolist()) for d in numbers)
    return Stages(groups, tuple(range(len(groups))), None, _components(known, depth, edges))


def _components(known: Ints, depth: Ints, edges: Ints) -> tuple[tuple[int, ...], ...]:
    """Ranks that are connected by `edges`, each set in the order of `depth`."""
    label = connected(known, edges[:, 0], edges[:, 1])
    taking_part = depth >= 0
    out = []
    for one in np.unique(label[taking_part]):
        at = np.flatnonzero((label == one) & taking_part)
        out.append(tuple(known[at[np.argsort(depth[at], kind="stable")]].tolist()))
    return tuple(out)


def stage_of(dataset: Dataset) -> Ints:
    """Each rank's pipeline stage; all 0 where there is no pipeline."""
    out = np.zeros(len(dataset.ranks), dtype=np.int64)
    known = stages(dataset) if dataset.pipelined else None
    for number, group in enumerate(known.groups if known else ()):
        out[np.searchsorted(dataset.ranks, group)] = number
    return out
