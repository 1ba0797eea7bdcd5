"""Which groups the communicators form, and what each is for, without the user saying it.

Told by what each communicator does in a step, and where in the step's compute it does it:

- Sends and Recvs along a chain of ranks are a *pipeline*, in the order of its stages;
- AllReduce, or AllGather and ReduceScatter, again and again from the first layers of the forward
  on are a *tensor* group (ReduceScatter there is its sequence parallel form);
- AllReduce only once the backward runs, ReduceScatter only there with AllGather anywhere, are
  *data* parallel, with gradients or parameters sharded or whole;
- AllToAll again and again is *expert* parallel (or sequence parallel by heads: it looks alike).

What none of these fits is `unknown`, or `world` where it spans the job; each entry says why and how
sure it is. Assumes that a forward is at least a fifth of a step's compute (a third, or a quarter
where it is done twice). Members are of the ranks with a report only; `size` is the true one, where
the reports say it or every rank of the job has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from clusterprof.agent.contracts.words import percent
from clusterprof.analysis.groups.stages import Stages, stages, traffic
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints, parts
from clusterprof.results import GroupEntry, GroupKind, TopologyEntry

#: calls before this part of a step's compute are of the forward
_FORWARD = 0.2
#: a tensor group's calls come so often at least, and mostly cover this part of the compute
_SPREAD = 0.5
_OFTEN = 4
#: twins make calls a step that differ by less than this (the window cuts some), and are less sure
_SAME_CALLS = 1.1
_TWIN_SURE = 0.9
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
    c, seen = dataset.collectives, traffic(dataset)
    if not len(seen.row):
        return []
    steps = _steps(dataset)
    counted = np.isin(seen.step, steps)
    if found is None:
        return [
            _entry(
                dataset, name, rows, "unknown", 0.5,
                "Sends and Recvs whose order has no beginning: a ring, or too few of their ranks "
                "have a report", size=None,
            )
            for name, rows in _by_communicator(dataset, seen.row)
        ]  # fmt: skip
    out = []
    for chain in found.pipelines:
        mine = np.isin(seen.rank, chain)
        names = list(dict.fromkeys(c.communicator[seen.row[mine]]))
        rows = seen.row[mine & counted]
        sure = (0.95 if found.count else 0.8) * _matched(dataset, seen.row[mine])
        order = ", ".join(str(found.of[r]) for r in chain)
        where = f"stage{'s' if len(chain) > 1 else ''} {order}"
        why = f"Sends and Recvs along a chain: {where}" + (
            f" of {found.count}, {_apart(found)} from each to the next"
            if found.count
            else " of those with a report"
        )
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        size = found.count or (len(chain) if _everyone(dataset) else None)
        out.append(_entry(dataset, name, rows, "pipeline", sure, why, size=size, ranks=chain))
    return out


def _apart(found: Stages) -> str:
    ranks = (found.world or 0) // (found.count or 1)
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _collective_groups(dataset: Dataset, found: Stages | None) -> list[GroupEntry]:
    c = dataset.collectives
    uses = (np.flatnonzero(~c.point_to_point), np.flatnonzero(c.exchange))
    sizes = _sizes(dataset)
    out = []
    for name, mine in (each for rows in uses for each in _by_communicator(dataset, rows)):
        ranks = np.unique(c.rank[mine])
        size = len(ranks) if _everyone(dataset) else sizes.get(name)
        kind, sure, why = _told(dataset, mine, ranks)
        stage = {found.of.get(int(r)) for r in ranks} if found else set()
        if kind in ("data", "tensor") and len(stage) > 1:
            kind, sure = "unknown", 0.5
            why = f"its members are of several pipeline stages (as shared embeddings have): {why}"
        if kind == "unknown" and size is not None and size == dataset.world_size:
            kind, sure = "world", 0.9
        sure *= _matched(dataset, mine)
        out.append(_entry(dataset, name, mine, kind, sure, why, size=size))
    return _as_twins(out)


def _as_twins(entries: list[GroupEntry]) -> list[GroupEntry]:
    """Give a group that tells no kind by itself that of one that does the same elsewhere.

    The groups of one kind are as many as the job has replicas, each over other ranks; a rank
    that computes more than its peers moves its group's calls to another part of the step.
    """
    told = [e for e in entries if e["kind"] in ("tensor", "data", "expert")]
    return [next((_like(e, t) for t in told if _twins(e, t)), e) for e in entries]


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
    sure = round(_TWIN_SURE * other["confidence"], 2)
    why = f"the same calls as of ranks {', '.join(map(str, other['ranks'][:8]))}: {other['why']}"
    return {**one, "kind": other["kind"], "confidence": sure, "why": why}


def _told(dataset: Dataset, rows: Ints, ranks: Ints) -> Answer:
    """What a communicator's calls (`rows`) look like."""
    c = dataset.collectives
    largest = int(c.size[rows].max(initial=-1))
    if 0 <= largest < _LEAST_BYTES:
        return "unknown", 0.5, f"its messages are of {largest} bytes at most"
    some = ranks[:: max(len(ranks) // _LOOKED_AT, 1)][:_LOOKED_AT]
    rows = c.once(rows)
    counted = np.isin(c.step[rows], _steps(dataset)) & np.isin(c.rank[rows], some) & c.has[rows]
    # an AllToAll's sizes differ between members, and reports of some kinds have none
    large = (c.size[rows] < 0) | (c.size[rows] >= _SMALL * largest) | c.exchange[rows]
    used = rows[counted & large & (c.operation[rows] != "Barrier")]
    if not len(used):
        return "unknown", 0.5, "it is not used in the steps that count"
    place = _places(dataset, used)
    runs = _Runs(dataset, used, place)
    if runs.calls("AllToAll") >= 2:
        often = f"AllToAll {runs.often('AllToAll')} times a step"
        return "expert", 0.7, f"{often} (sequence parallel by heads looks alike)"
    if runs.calls("ReduceScatter") and runs.calls("AllGather"):
        return _sharded(runs)
    if runs.calls("AllReduce"):
        return _reduced(runs, largest)
    names = ", ".join(sorted(set(c.label[used])))
    return "unknown", 0.5, f"only {names}, which tells no kind"


def _sharded(runs: _Runs) -> Answer:
    """AllGather and ReduceScatter: of parameters (data), or of activations (tensor)."""
    both = f"AllGather {runs.often('AllGather')} and ReduceScatter {runs.often('ReduceScatter')}"
    if runs.early("ReduceScatter") >= _MOST and runs.early("AllGather") >= _MOST:
        return "tensor", 0.85, f"{both} times a step, both in the forward too: sequence parallel"
    if runs.early("ReduceScatter") <= 1 - _MOST:
        parts = "parameters" if runs.early("AllGather") >= _MOST else "the optimizer"
        said = f"{both} times a step, ReduceScatter only in the backward: {parts} sharded"
        return "data", 0.9, said
    return "unknown", 0.5, f"{both} times a step, now early and now late in it"


def _reduced(runs: _Runs, largest: int) -> Answer:
    often = f"AllReduce {runs.often('AllReduce')} times a step"
    if runs.early("AllReduce") <= 1 - _MOST:
        where = f"from {percent(runs.begin('AllReduce'))} of its compute on"
        sure = 0.9 if runs.calls("AllReduce") >= 2 else 0.8
        return "data", sure, f"{often}, {where}: in the backward or behind it"
    if runs.early("AllReduce") >= _MOST and runs.calls("AllReduce") >= _OFTEN:
        if 0 <= largest < _ACTIVATIONS_BYTES:
            return "unknown", 0.5, f"{often} in the forward, of {largest} bytes at most"
        spread = runs.spread("AllReduce")
        said = f"{often}, from the first layers on over {percent(spread)} of its compute"
        return "tensor", 0.85 if spread >= _SPREAD else 0.7, said
    return "unknown", 0.5, f"{often}, neither again and again nor only at its end"


class _Runs:
    """A communicator's calls in each step of each rank that is looked at."""

    def __init__(self, dataset: Dataset, rows: Ints, place: Floats) -> None:
        c = dataset.collectives
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
        """`calls` as a word."""
        return f"{self.calls(operation):.3g}"

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


def _steps(dataset: Dataset) -> Sequence[int]:
    """Steps to look at: the settled ones, else all but the window's first."""
    return dataset.steady_steps or dataset.steps[1:] or dataset.steps


def _everyone(dataset: Dataset) -> bool:
    return dataset.world_size == len(dataset.ranks)


def _by_communicator(dataset: Dataset, rows: Ints) -> list[tuple[str, Ints]]:
    """`rows` of the placed table by communicator, in one pass."""
    codes, names = dataset.collectives.communicators
    return [(names[int(codes[part[0]])], part) for part in parts(rows, codes[rows])]


def _sizes(dataset: Dataset) -> dict[str, int]:
    """The true size of each communicator, where its calls say one and the same."""
    said: dict[str, set[int]] = {}
    codes, names = dataset.collectives.communicators
    c = dataset.collectives
    for k, rank in enumerate(dataset.ranks):
        table = dataset.tables[k].collective_calls
        size = np.asarray(pc.fill_null(table["communicator_size"], 0).to_numpy())
        if not size.any():
            continue
        call = table["call"].to_numpy()
        mine = c.of(rank)
        order = np.argsort(call, kind="stable")
        of = size[order[np.searchsorted(call[order], c.call[mine])]]
        for code, one in np.unique(np.stack([codes[mine], of]), axis=1).T.tolist():
            if one:
                said.setdefault(names[code], set()).add(int(one))
    return {name: sizes.pop() for name, sizes in said.items() if len(sizes) == 1}


def _matched(dataset: Dataset, rows: Ints) -> float:
    """How sure it is that these calls are one communicator's: 1 for ids, less for order alone."""
    c = dataset.collectives
    if not str(c.communicator[rows[0]]).startswith("inferred") or len(np.unique(c.rank[rows])) < 2:
        return 1.0
    sure = np.asarray(pc.fill_null(dataset.placed["confidence"], 0.0).to_numpy())[rows]
    return max(float(np.median(sure)), 0.3)


def _entry(
    dataset: Dataset, name: str, rows: Ints, kind: GroupKind, sure: float, why: str, *,
    size: int | None, ranks: Sequence[int] = (),
) -> GroupEntry:  # fmt: skip
    c = dataset.collectives
    members = list(ranks) or [int(r) for r in np.unique(c.rank[rows])]
    inside = c.once(rows[np.isin(c.step[rows], _steps(dataset))])
    each = max(len(members) * len(_steps(dataset)), 1)
    return {
        "kind": kind,
        "communicator": name,
        "ranks": [int(r) for r in members],
        "size": size,
        "operations": sorted(set(c.label[rows])),
        "calls_per_step": round(len(inside) / each, 1),
        "confidence": round(sure, 2),
        "why": why,
    }
