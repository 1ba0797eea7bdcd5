"""Which groups the communicators form, and what each is for, from the reports alone.

Sends and Recvs along a chain of ranks are a *pipeline*, in the order of its stages. Any other
communicator is of the first kind of `SIGNS` whose operations it has, where in the step's compute
that kind has them. What fits none is `unknown`, or `world` where it spans the job; each entry gives
the reason and a confidence. Members are profiled ranks only; `size` is the true one, where the
reports have it or every rank of the job is profiled. What the program calls a group is said beside
it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, calls_per_step, once
from clusterprof.analysis.model.peers import Stages, stages, traffic
from clusterprof.analysis.model.timeline import COMPUTE
from clusterprof.columns import (
    Bools,
    Ints,
    count_by,
    first_at_or_after,
    greatest_by,
    parts,
    places,
    row_of,
    rows_between,
)
from clusterprof.results import GroupEntry, GroupKind, ShallowGroup, TopologyEntry


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
    for entry in (entry for entry in groups if not entry["description"]):
        # flight recorders have no communicators: of their groups the only one with these members
        alike = by_members.get(tuple(sorted(entry["ranks"])), [])
        alike = [group for group in alike if entry["size"] in (None, len(group["ranks"]))]
        entry["description"] = alike[0]["description"] if len(alike) == 1 else ""
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


def _calls(dataset: Dataset, rank: int, rows: Ints, least_bytes: float) -> dict[str, _Calls]:
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


def communicator_size(dataset: Dataset, rows: Ints) -> int | None:
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


def _entry(dataset: Dataset, rows: Ints, answer: Answer, size: int | None = None) -> GroupEntry:
    """A group. Where order alone tells that its calls are one communicator's, it is less sure."""
    c, (kind, confidence, why) = dataset.collectives, answer
    name, *others = dict.fromkeys(c.communicator[rows].tolist())
    name = f"{name} and {len(others)} more" if others else name
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
