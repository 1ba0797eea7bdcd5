"""What the ranks are to each other: a pipeline's stages, peers, and what communicators are for.

Stages are read off the first point-to-point call of each rank in each step: a rank of the first
stage begins with a Send, every other one with a Recv from the stage before it. Assumes that ranks
which only exchange with their neighbours in a ring (ring attention) all begin alike, so that no
order of theirs has a beginning: then there are no stages. Peers are the ranks of one stage, which
do the same work. Of thousands there are millions of pairs: ranks with the same peers share one
array of them, and what is usual among all but one is read off one sorted column.

Sends and Recvs along a chain of ranks are a *pipeline*. Any other communicator is of the first kind
of `SIGNS` whose operations it has, where in the step's compute that kind has them. What fits none
is `unknown`, or `world` where it spans the job. Members are profiled ranks only; `size` is the true
one, where the reports have it or every rank is profiled. What the program calls a group is said
beside it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, calls_per_step, once
from clusterprof.analysis.model.replay import depths
from clusterprof.analysis.model.timeline import COMPUTE
from clusterprof.columns import (
    Bools,
    Floats,
    Ints,
    PlacedRows,
    RankNumbers,
    RankPlaces,
    connected,
    count_by,
    first_at_or_after,
    first_places,
    greatest_by,
    order_by,
    parts,
    places,
    row_of,
    rows_between,
    where_known,
)
from clusterprof.results import GroupEntry, GroupKind, ShallowGroup, TopologyEntry

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


@dataclass(eq=False)
class Stages:
    """The profiled `ranks` of a pipeline, in the order of its stages, and the `stage` of each.

    Ranks that hand each other activations have one number in `pipeline`. Where unprofiled ranks
    leave open how deep the pipeline is, `count` is None, and stages are numbered from the first
    profiled one.
    """

    ranks: RankNumbers
    stage: Ints
    pipeline: Ints
    count: int | None = None
    #: how many ranks a stage has, where they are laid out one stage after the other
    stride: int | None = None

    def __post_init__(self) -> None:
        #: the profiled stages, ascending, and the ranks of each
        self.numbers = np.unique(self.stage).tolist()
        self.groups = [tuple(ranks.tolist()) for ranks in parts(self.ranks, self.stage)]

    def stages_of(self, ranks: RankNumbers) -> Ints:
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
    """For each profiled rank those that do the same work, itself included.

    `circles[circle_of[k]]` are those of the k-th rank; it alone has no rank to be compared with.
    """

    circles: tuple[RankPlaces, ...]
    circle_of: Ints

    def others(self, k: int) -> RankPlaces:
        """The k-th rank's peers."""
        circle = self.circles[self.circle_of[k]]
        return np.asarray(circle[circle != k])

    @cached_property
    def apart(self) -> float:
        """How many circles there are, of those that overlap as many as do not."""
        sizes = np.asarray([len(circle) for circle in self.circles])[self.circle_of]
        return float((1 / sizes[sizes > 1]).sum())

    def usual(self, values: Floats, without: Sequence[int] | RankPlaces = ()) -> Floats:
        """What a rank's middle peer, none of `without`, has of `values` [ranks, ...], or NaN."""
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
def tied(dataset: Dataset) -> RankPlaces:
    """For each profiled rank the first that chains of matched calls tie it to.

    In those calls members wait for each other: what one saves, all that are tied to it save.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.matched & (c.synchronising | c.point_to_point))
    member = row_of(dataset.ranks, c.rank[rows])
    return connected(member, c.communicators[0][rows], len(dataset.ranks))


def peers(dataset: Dataset, stage: Ints) -> Peers:
    """Ranks of one pipeline stage that are tied, whether or not they share a communicator.

    One that is its stage's only one is compared with all stages, in what can be compared.
    """
    job = tied(dataset)
    alike = (job[:, None] == job) & (stage[:, None] == stage)
    if dataset.pipelined:
        alone = alike.sum(axis=1) < 2
        alike[alone] = job[alone, None] == job
    bits = np.packbits(alike, axis=1)
    _, first, circle_of = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    return Peers(tuple(np.flatnonzero(circle) for circle in alike[first]), circle_of.reshape(-1))


# --- what the communicators are for


class Sign(NamedTuple):
    """What a group of one kind does in each step."""

    kind: GroupKind
    #: its operations, and whether the step's first such call is in the forward (None: either)
    calls: Mapping[str, bool | None]
    why: str
    #: a step has so many of each at least
    least: int = 1
    confidence: float = limits.MEASURED


#: from the first layers of the forward on: activations; only once the backward runs: gradients
SIGNS = (
    # there and back
    Sign("expert", {"AllToAll": None}, "sequence parallel by heads looks alike", 2, limits.ASSUMED),
    Sign("tensor", {"AllGather": True, "ReduceScatter": True}, "sequence parallel"),
    Sign("data", {"AllGather": True, "ReduceScatter": False}, "sharded parameters"),
    Sign("data", {"AllGather": False, "ReduceScatter": False}, "sharded optimizer state"),
    # a layer's attention and its MLP, in both directions
    Sign("tensor", {"AllReduce": True}, "from the first layers on", 4),
    Sign("data", {"AllReduce": False}, "in the backward or after it"),
)

#: calls before this part of a step's compute are of the forward, which is a third of it, or a
#: quarter where it is done twice
_FORWARD = 0.2
#: messages so much smaller than the job's largest are side calls (a loss, a norm, a barrier,
#: statistics): SyncBatchNorm's 16 KB beside DDP's buckets of 25 MB are 0.0007
_SIDE_FRAC = 0.001
_ORDER: tuple[GroupKind, ...] = ("pipeline", "tensor", "expert", "data", "world", "unknown")

Answer = tuple[GroupKind, float, str]


class _Calls(NamedTuple):
    """One operation of a communicator: how often a step has it, and where its first call stands."""

    #: side calls too
    often: float
    #: of those that are none: 0 to 1 of the step's compute, in the median
    first: float
    #: whether that is in the forward; None where the steps differ
    early: bool | None


@once
def topology(dataset: Dataset) -> TopologyEntry:
    """Return the groups by kind and ranks, and the pipeline's stages in order."""
    pipeline = stages(dataset)
    groups = [*_pipelines(dataset, pipeline), *_collective_groups(dataset, pipeline)]
    by_members: dict[tuple[int, ...], list[ShallowGroup]] = {}
    for group in dataset.shallow["groups"] if dataset.shallow else ():
        profiled = tuple(rank for rank in group["ranks"] if rank in dataset.place)
        by_members.setdefault(profiled, []).append(group)
    for entry in groups:
        # flight recorders have no communicators: of their groups the only one with these members
        alike = by_members.get(tuple(sorted(entry["ranks"])), [])
        alike = [group for group in alike if entry["size"] in (None, len(group["ranks"]))]
        if not entry["description"] and len(alike) == 1:
            entry["description"] = alike[0]["description"]
    groups.sort(key=lambda g: (_ORDER.index(g["kind"]), g["ranks"], g["communicator"]))
    numbered = zip(pipeline.numbers, pipeline.groups, strict=True) if pipeline else ()
    return {
        "groups": groups,
        "stages": [{"stage": number, "ranks": list(group)} for number, group in numbered],
        "stage_count": pipeline.count if pipeline else None,
    }


def _pipelines(dataset: Dataset, pipeline: Stages | None) -> list[GroupEntry]:
    """The chains of Sends and Recvs; where they form none, the communicators that hold them."""
    c, sent = dataset.collectives, traffic(dataset)
    if pipeline is None:
        why = "Sends and Recvs whose order has no beginning: a ring, or too few ranks are profiled"
        return [
            _entry(dataset, rows, ("unknown", limits.ASSUMED, why))
            for rows in parts(sent.row, c.communicators[0][sent.row])
        ]
    count, stride, layout = pipeline.count, pipeline.stride, ""
    if stride:
        layout = f" of {count}, {words.counted(stride, 'rank')} from each to the next"
    entries = []
    for chain in parts(pipeline.ranks, pipeline.pipeline):
        numbers = pipeline.stages_of(chain).tolist()
        why = f"stage{'s' if len(chain) > 1 else ''} {words.listed(numbers)}{layout}"
        confidence = limits.MEASURED if count else limits.ASSUMED
        answer: Answer = ("pipeline", confidence, f"Sends and Recvs along a chain: {why}")
        size = count or (len(chain) if dataset.world_size == len(dataset.ranks) else None)
        entry = _entry(dataset, sent.row[np.isin(sent.rank, chain)], answer, size)
        entries.append(entry | {"ranks": chain.tolist()})
    return entries


def _collective_groups(dataset: Dataset, pipeline: Stages | None) -> list[GroupEntry]:
    c = dataset.collectives
    compute = np.nan_to_num(dataset.account("compute_ns"), nan=np.inf).sum(axis=1)
    least_bytes, groups = _SIDE_FRAC * c.size.max(initial=0), []
    called = np.concatenate((np.flatnonzero(~c.point_to_point), np.flatnonzero(c.exchange)))
    for rows in parts(called, 2 * c.communicators[0][called] + c.exchange[called]):
        ranks, size = np.unique(c.rank[rows]), communicator_size(dataset, rows)
        # extra work moves a rank's calls to another part of its step: the one that computes least
        # shows best what all members do
        shown = ranks[np.argmin(compute[row_of(dataset.ranks, ranks)])]
        kind, confidence, why = _purpose(_calls(dataset, int(shown), rows, least_bytes))
        several = pipeline is not None and len(np.unique(pipeline.stages_of(ranks))) > 1
        if kind in ("data", "tensor") and several:
            kind, confidence = "unknown", limits.ASSUMED
            why = f"its members are of several pipeline stages (as shared embeddings have): {why}"
        if kind == "unknown" and size is not None and size == dataset.world_size:
            kind, confidence = "world", limits.MEASURED
        groups.append(_entry(dataset, rows, (kind, confidence, why), size))
    return groups


def _purpose(calls: Mapping[str, _Calls]) -> Answer:
    """What a communicator with these calls, by operation, is for."""
    often = words.listed(
        f"{name} {round(call.often, 1):.3g} time{'' if call.often == 1 else 's'} per step, from "
        f"{words.percent(call.first)} of its compute on"
        for name, call in calls.items()
    )
    for sign in SIGNS:
        if all(
            name in calls and calls[name].often >= sign.least and early in (None, calls[name].early)
            for name, early in sign.calls.items()
        ):
            return sign.kind, sign.confidence, f"{often}: {sign.why}"
    why = f"{often}: not the calls of one kind of group"
    return "unknown", limits.ASSUMED, why if often else "no large messages in steady-state steps"


def _calls(dataset: Dataset, rank: int, rows: PlacedRows, least_bytes: float) -> dict[str, _Calls]:
    """The calls of one member of a communicator by operation: those that have large messages."""
    c, d, k = dataset.collectives, dataset.timelines, dataset.place[rank]
    rows = c.once(rows[c.rank[rows] == rank])
    rows = rows[c.has[rows] & np.isin(c.step[rows], dataset.evidence_steps)]
    # an AllToAll's sizes differ between members, and reports of some kinds have none
    large = (c.size[rows] < 0) | c.exchange[rows] | (c.size[rows] >= least_bytes)
    large &= c.operation[rows] != "Barrier"
    rank_steps = rows_between(d.rank, k, k + 1)
    step_row = rank_steps.start + first_at_or_after(d.step[rank_steps], c.step[rows])
    step_row = np.minimum(step_row, rank_steps.stop - 1)
    begin, end, start = d.begin[step_row], d.end[step_row], d.axis.of(k, c.start[rows])
    # how much of its step's compute is before each call, or else of its time
    (compute,) = d.ran(k, k + 1, (COMPUTE,))
    whole, done = compute.within(begin, end), compute.within(begin, start)
    done, whole = np.where(whole > 0, (done, whole), (start - begin, end - begin))
    before = np.clip(done / np.maximum(whole, 1), 0, 1)
    steps, calls = max(len(np.unique(c.step[rows])), 1), {}
    for name in sorted(set(c.label[rows[large]])):
        named = c.label[rows] == name
        shown = np.flatnonzero(named & large)
        first_calls = [before[step].min() for step in parts(shown, c.step[rows[shown]])]
        early = {bool(place < _FORWARD) for place in first_calls}
        alike = early.pop() if len(early) == 1 else None
        calls[name] = _Calls(float(named.sum()) / steps, float(np.median(first_calls)), alike)
    return calls


def communicator_size(dataset: Dataset, rows: PlacedRows) -> int | None:
    """The true size of the communicator of `rows`: by all of its members, or said by its calls."""
    if dataset.world_size == len(dataset.ranks):
        return len(np.unique(dataset.collectives.rank[rows]))
    sizes = np.unique(dataset.issued("communicator_size")[rows])
    sizes = sizes[sizes > 0]
    return int(sizes[0]) if len(sizes) == 1 else None


@once
def whole(dataset: Dataset) -> Bools:
    """Which rows of the placed table are of calls all of whose members are profiled.

    A communicator of no known size is taken to span the job. Of a message between stages both sides
    are.
    """
    c = dataset.collectives
    if dataset.world_size == len(dataset.ranks):
        return np.ones(len(c.rank), dtype=bool)
    codes, names = c.communicators
    pairs, _ = places(codes * len(dataset.ranks) + row_of(dataset.ranks, c.rank))
    unknown = np.zeros(len(names), dtype=np.int64)
    size = greatest_by(codes, dataset.issued("communicator_size"), unknown)
    size = np.where(size > 0, size, dataset.world_size or 0)
    members = count_by(pairs // len(dataset.ranks), len(names))
    return (members >= size)[codes] | (c.between_stages & c.matched)


def _entry(
    dataset: Dataset, rows: PlacedRows, answer: Answer, size: int | None = None
) -> GroupEntry:
    """A group. Where order alone tells that its calls are one communicator's, it is less sure."""
    c, (kind, confidence, why) = dataset.collectives, answer
    name, *others = dict.fromkeys(c.communicator[rows].tolist())
    name += f" and {len(others)} more" if others else ""
    ranks = np.unique(c.rank[rows]).tolist()
    if len(ranks) > 1 and name.startswith("inferred"):
        matched = pc.drop_null(dataset.placed["confidence"].take(rows))
        confidence *= float(np.median(matched)) if len(matched) else limits.ASSUMED
    return {
        "kind": kind,
        "communicator": name,
        "description": dataset.tables[dataset.place[ranks[0]]].info.groups.get(name, ""),
        "ranks": ranks,
        "size": size,
        "operations": sorted(set(c.label[rows])),
        "calls_per_step": calls_per_step(dataset, rows),
        "confidence": round(confidence, 2),
        "why": why,
    }
