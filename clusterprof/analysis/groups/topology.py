"""Which groups the communicators form, and what each is for, from the reports alone.

Decided by what each communicator does in a step, and where in the step's compute it does it:

- Sends and Recvs along a chain of ranks are a *pipeline*, in the order of its stages;
- AllReduce, or AllGather and ReduceScatter, repeatedly from the first layers of the forward
  on are a *tensor* group (ReduceScatter there is its sequence parallel form);
- AllReduce only once the backward runs, ReduceScatter only there with AllGather anywhere, are
  *data* parallel, with gradients or parameters sharded or whole;
- repeated AllToAll is *expert* parallel (or sequence parallel by heads, which looks alike).

What fits none of these is `unknown`, or `world` where it spans the job; each entry gives the reason
and a confidence. Assumes that a forward is at least a fifth of a step's compute (a third, or a
quarter where it is done twice). Members are profiled ranks only; `size` is the true one, where
the reports have it or every rank of the job is profiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from clusterprof.agent.contracts import words
from clusterprof.analysis.groups.stages import Stages, stages, traffic
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints, calls_per_step, parts
from clusterprof.results import GroupEntry, GroupKind, TopologyEntry

#: calls before this part of a step's compute are of the forward
_FORWARD = 0.2
#: a tensor group's calls come so often at least, and mostly cover this part of the compute
_SPREAD = 0.5
_OFTEN = 4
#: twins' calls per step differ by less than this (the window cuts some); their confidence is less
_SAME_CALLS = 1.1
_TWIN_CONFIDENCE = 0.9
#: in so many of a communicator's steps a pattern must hold
_MOST = 0.8
#: messages so much smaller than the largest are side calls: a loss, a norm, a barrier
_SMALL = 0.01
#: a communicator whose largest message is smaller carries no parameters or activations
_LEAST_BYTES = 1024
#: a layer's activations are larger; smaller ones in the forward are statistics (SyncBatchNorm)
_ACTIVATIONS_BYTES = 1 << 16
#: members of one communicator do the same: so many of them are looked at
_LOOKED_AT = 8

Answer = tuple[GroupKind, float, str]


def topology(dataset: Dataset) -> TopologyEntry:
    """Return the groups by kind and ranks, and the pipeline's stages in order."""
    found = stages(dataset)
    groups = [*_pipelines(dataset, found), *_collective_groups(dataset, found)]
    order = ["pipeline", "tensor", "expert", "data", "world", "unknown"]
    groups.sort(key=lambda g: (order.index(g["kind"]), g["ranks"], g["communicator"]))
    return {
        "groups": groups,
        "stages": [
            {"stage": number, "ranks": list(group)}
            for number, group in zip(found.numbers, found.groups, strict=True)
        ]
        if found
        else [],
        "stage_count": found.count if found else None,
    }


def _pipelines(dataset: Dataset, found: Stages | None) -> list[GroupEntry]:
    """The chains of Sends and Recvs; where they form none, the communicators that hold them."""
    c, sent = dataset.collectives, traffic(dataset)
    if not len(sent.row):
        return []
    if found is None:
        why = (
            "Sends and Recvs whose order has no beginning: a ring, or too few of their ranks are "
            "profiled"
        )
        each = _by_communicator(dataset, sent.row)
        return [_entry(dataset, name, rows, ("unknown", 0.5, why)) for name, rows in each]
    out = []
    for chain in found.pipelines:
        mine = np.isin(sent.rank, chain)
        names = list(dict.fromkeys(c.communicator[sent.row[mine]]))
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        stages = f"stage{'s' if len(chain) > 1 else ''} {words.listed(found.of[r] for r in chain)}"
        if found.count:
            stride = words.counted((found.world or 0) // found.count, "rank")
            stages += f" of {found.count}, {stride} from each to the next"
        confidence = (0.95 if found.count else 0.8) * _matched(dataset, sent.row[mine])
        answer: Answer = ("pipeline", confidence, f"Sends and Recvs along a chain: {stages}")
        rows = sent.row[mine & np.isin(sent.step, dataset.evidence_steps)]
        size = found.count or (len(chain) if _everyone(dataset) else None)
        out.append(_entry(dataset, name, rows, answer, size=size, ranks=chain))
    return out


def _collective_groups(dataset: Dataset, found: Stages | None) -> list[GroupEntry]:
    c = dataset.collectives
    uses = (np.flatnonzero(~c.point_to_point), np.flatnonzero(c.exchange))
    sizes = _sizes(dataset)
    out = []
    for name, mine in (each for rows in uses for each in _by_communicator(dataset, rows)):
        ranks = np.unique(c.rank[mine])
        size = len(ranks) if _everyone(dataset) else sizes.get(name)
        kind, confidence, why = _purpose(dataset, mine, ranks)
        stage = {found.of.get(int(r)) for r in ranks} if found else set()
        if kind in ("data", "tensor") and len(stage) > 1:
            kind, confidence = "unknown", 0.5
            why = f"its members are of several pipeline stages (as shared embeddings have): {why}"
        if kind == "unknown" and size is not None and size == dataset.world_size:
            kind, confidence = "world", 0.9
        confidence *= _matched(dataset, mine)
        out.append(_entry(dataset, name, mine, (kind, confidence, why), size=size))
    return _as_twins(out)


def _as_twins(entries: list[GroupEntry]) -> list[GroupEntry]:
    """Give a group of unknown kind the kind of one that does the same on other ranks.

    The groups of one kind are as many as the job has replicas, each over other ranks; a rank
    that computes more than its peers moves its group's calls to another part of the step.
    """
    known = [e for e in entries if e["kind"] in ("tensor", "data", "expert")]
    return [next((_like(e, k) for k in known if _twins(e, k)), e) for e in entries]


def _twins(one: GroupEntry, other: GroupEntry) -> bool:
    calls = one["calls_per_step"], other["calls_per_step"]
    return (
        one["kind"] == "unknown"
        and len(one["ranks"]) == len(other["ranks"]) > 1
        and one["size"] == other["size"]
        and one["operations"] == other["operations"]
        and min(calls) >= _OFTEN
        and max(calls) <= _SAME_CALLS * min(calls)
        and not set(one["ranks"]) & set(other["ranks"])
    )


def _like(one: GroupEntry, other: GroupEntry) -> GroupEntry:
    confidence = round(_TWIN_CONFIDENCE * other["confidence"], 2)
    why = f"the same calls as {words.ranks(other['ranks'])}: {other['why']}"
    return {**one, "kind": other["kind"], "confidence": confidence, "why": why}


def _purpose(dataset: Dataset, rows: Ints, ranks: Ints) -> Answer:
    """What a communicator's calls (`rows`) are for."""
    c = dataset.collectives
    largest = int(c.size[rows].max(initial=-1))
    if 0 <= largest < _LEAST_BYTES:
        return "unknown", 0.5, f"its largest message has {largest} bytes"
    some = ranks[:: max(len(ranks) // _LOOKED_AT, 1)][:_LOOKED_AT]
    rows = c.once(rows)
    counted = (
        np.isin(c.step[rows], dataset.evidence_steps) & np.isin(c.rank[rows], some) & c.has[rows]
    )
    # an AllToAll's sizes differ between members, and reports of some kinds have none
    large = (c.size[rows] < 0) | (c.size[rows] >= _SMALL * largest) | c.exchange[rows]
    used = rows[counted & large & (c.operation[rows] != "Barrier")]
    if not len(used):
        return "unknown", 0.5, "it is not used in steady-state steps"
    place = _places(dataset, used)
    runs = _Runs(dataset, used, place, c.label[rows[counted]])
    if runs.calls("AllToAll") >= 2:
        often = f"AllToAll {runs.often('AllToAll')} times per step"
        return "expert", 0.7, f"{often} (sequence parallel by heads looks alike)"
    if runs.calls("ReduceScatter") and runs.calls("AllGather"):
        return _sharded(runs)
    if runs.calls("AllReduce"):
        return _reduced(runs, largest)
    names = words.listed(sorted(set(c.label[used])))
    return "unknown", 0.5, f"only {names}, which groups of any kind use"


def _sharded(runs: _Runs) -> Answer:
    """AllGather and ReduceScatter: of parameters (data), or of activations (tensor)."""
    both = f"AllGather {runs.often('AllGather')} and ReduceScatter {runs.often('ReduceScatter')}"
    if runs.early("ReduceScatter") >= _MOST and runs.early("AllGather") >= _MOST:
        return "tensor", 0.85, f"{both} times per step, both in the forward too: sequence parallel"
    if runs.early("ReduceScatter") <= 1 - _MOST:
        sharded = "parameters" if runs.early("AllGather") >= _MOST else "optimizer state"
        why = f"{both} times per step, ReduceScatter only in the backward: sharded {sharded}"
        return "data", 0.9, why
    return "unknown", 0.5, f"{both} times per step, in the forward of some steps only"


def _reduced(runs: _Runs, largest: int) -> Answer:
    often = f"AllReduce {runs.often('AllReduce')} times per step"
    if runs.early("AllReduce") <= 1 - _MOST:
        where = f"from {words.percent(runs.begin('AllReduce'))} of its compute on"
        confidence = 0.9 if runs.calls("AllReduce") >= 2 else 0.8
        return "data", confidence, f"{often}, {where}: in the backward or after it"
    if runs.early("AllReduce") >= _MOST and runs.calls("AllReduce") >= _OFTEN:
        if 0 <= largest < _ACTIVATIONS_BYTES:
            return "unknown", 0.5, f"{often} in the forward, of at most {largest} bytes"
        spread = runs.spread("AllReduce")
        why = f"{often}, from the first layers on over {words.percent(spread)} of its compute"
        return "tensor", 0.85 if spread >= _SPREAD else 0.7, why
    return "unknown", 0.5, f"{often}, neither repeatedly nor only at the end of the step"


class _Runs:
    """A communicator's calls in each step of each rank that is looked at."""

    def __init__(self, dataset: Dataset, rows: Ints, place: Floats, every: np.ndarray) -> None:
        c = dataset.collectives
        #: operations of all calls, small ones too
        self.every = every
        self.operation = c.label[rows]
        self.place = place
        both = np.stack([c.rank[rows], c.step[rows]])
        _, self.of = np.unique(both, axis=1, return_inverse=True)
        self.of = self.of.reshape(-1)
        self.count = int(self.of.max()) + 1

    def _edges(self, operation: str) -> tuple[Floats, Floats, Bools]:
        """Place of the first and last such call of each run, and which runs have one."""
        mine = self.operation == operation
        first, last = np.full(self.count, np.inf), np.full(self.count, -np.inf)
        np.minimum.at(first, self.of[mine], self.place[mine])
        np.maximum.at(last, self.of[mine], self.place[mine])
        return first, last, np.isfinite(first)

    def calls(self, operation: str) -> float:
        """How many such calls a step has."""
        return float((self.operation == operation).sum()) / self.count

    def often(self, operation: str) -> str:
        """How many such calls a step has, small ones too, as a word."""
        return f"{round(float((self.every == operation).sum()) / self.count, 1):.3g}"

    def early(self, operation: str) -> float:
        """The share of steps that have such a call in the forward."""
        first, _, known = self._edges(operation)
        return float((first[known] < _FORWARD).mean()) if known.any() else 0.0

    def begin(self, operation: str) -> float:
        """Where in the compute the first such call stands, in the median."""
        first, _, known = self._edges(operation)
        return float(np.median(first[known])) if known.any() else 0.0

    def spread(self, operation: str) -> float:
        """From the first to the last such call, as part of the compute, in the median."""
        first, last, known = self._edges(operation)
        return float(np.median((last - first)[known])) if known.any() else 0.0


def _places(dataset: Dataset, rows: Ints) -> Floats:
    """How much of its step's compute is done when each call begins on the device, 0 to 1.

    Of time, where nothing computes.
    """
    c = dataset.collectives
    out = np.zeros(len(rows))
    for mine in parts(np.arange(len(rows)), c.rank[rows]):
        line = dataset.line(int(c.rank[rows[mine[0]]]))
        at = np.searchsorted(line.step, c.step[rows[mine]])
        at = np.minimum(at, len(line.step) - 1)
        begin, end, start = line.begin[at], line.end[at], c.start[rows[mine]]
        whole, done = line.compute.within(begin, end), line.compute.within(begin, start)
        some = whole > 0
        done, whole = np.where(some, done, start - begin), np.where(some, whole, end - begin)
        out[mine] = np.clip(done / np.maximum(whole, 1), 0, 1)
    return out


def _everyone(dataset: Dataset) -> bool:
    return dataset.world_size == len(dataset.ranks)


def _by_communicator(dataset: Dataset, rows: Ints) -> list[tuple[str, Ints]]:
    """`rows` of the placed table by communicator, in one pass."""
    codes, names = dataset.collectives.communicators
    return [(names[int(codes[part[0]])], part) for part in parts(rows, codes[rows])]


def _sizes(dataset: Dataset) -> dict[str, int]:
    """The true size of each communicator, where its calls have one and the same."""
    found: dict[str, set[int]] = {}
    codes, names = dataset.collectives.communicators
    for rank in dataset.ranks:
        mine = dataset.collectives.of(rank)
        calls = dataset.issued(rank, mine, "communicator_size")
        size = np.asarray(pc.fill_null(calls["communicator_size"], 0).to_numpy())
        known = size > 0
        for code, one in np.unique(np.stack([codes[mine], size])[:, known], axis=1).T.tolist():
            found.setdefault(names[code], set()).add(int(one))
    return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}


def _matched(dataset: Dataset, rows: Ints) -> float:
    """Confidence that these calls are one communicator's: 1 for ids, less for order alone."""
    c = dataset.collectives
    if not str(c.communicator[rows[0]]).startswith("inferred") or len(np.unique(c.rank[rows])) < 2:
        return 1.0
    each = np.asarray(pc.fill_null(dataset.placed["confidence"], 0.0).to_numpy())[rows]
    return max(float(np.median(each)), 0.3)


def _entry(
    dataset: Dataset,
    name: str,
    rows: Ints,
    answer: Answer,
    *,
    size: int | None = None,
    ranks: Sequence[int] = (),
) -> GroupEntry:
    c = dataset.collectives
    kind, confidence, why = answer
    members = [int(r) for r in (ranks or np.unique(c.rank[rows]))]
    return {
        "kind": kind,
        "communicator": name,
        "ranks": members,
        "size": size,
        "operations": sorted(set(c.label[rows])),
        "calls_per_step": calls_per_step(dataset, rows),
        "confidence": round(confidence, 2),
        "why": why,
    }
