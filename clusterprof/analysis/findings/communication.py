"""Communication that no compute hides: the transfer itself, not the waiting for a late rank."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.findings.finding import finding, ms, percent
from clusterprof.analysis.findings.unprofiled import hidden_wait
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Floats, Ints, Scene, parts
from clusterprof.analysis.model.intervals import union
from clusterprof.results import Finding, OperationEntry

#: one finding each for so many operations and communicators at most
_MOST = 3
_SMALL_BYTES = 1 << 20


def exposed_transfer(scene: Scene) -> Floats:
    """Per row of the placed table: the part of its transfer that its rank's compute hides not."""
    c = scene.collectives
    out = np.zeros(len(c.rank))
    waits = hidden_wait(scene).astype(np.int64)
    for line in scene.timelines:
        mine = c.of(line.rank)
        mine = mine[c.has[mine]]
        begin = np.minimum(c.start[mine] + c.wait[mine] + waits[mine], c.end[mine])
        out[mine] = c.end[mine] - begin - line.compute.within(begin, c.end[mine])
    return out


def _keys(scene: Scene) -> np.ndarray:
    c = scene.collectives
    return np.asarray(
        [f"{o}\0{n}" for o, n in zip(c.label, c.communicator, strict=True)], dtype=object
    )


def by_operation(scene: Scene) -> list[OperationEntry]:
    """The matched collectives summed by operation and communicator, costliest first.

    `transfer_ns`, `wait_ns` and `exposed_ns` are sums per rank: over all calls, the mean over
    the ranks; `message_bytes` the sum of one rank's messages.
    """
    c = scene.collectives
    exposed = _exposed_all(scene)
    keys = _keys(scene)
    out: list[OperationEntry] = []
    matched = np.flatnonzero(c.matched)
    for every in parts(matched, keys[matched].astype(str)):
        key = str(keys[every[0]])
        rows = c.once(every)
        ranks = sorted({int(r) for r in c.rank[rows]})
        operation, communicator = key.split("\0")
        out.append(
            {
                "operation": operation,
                "communicator": communicator,
                "ranks": ranks,
                "calls": _calls(scene, rows, len(ranks)),
                "message_bytes": _bytes(scene, every, len(ranks)),
                "transfer_ns": int(c.transfer[rows].sum() // len(ranks)),
                "wait_ns": int(c.wait[rows].sum() // len(ranks)),
                "exposed_ns": int(exposed[rows].sum() // len(ranks)),
            }
        )
    return sorted(out, key=lambda e: -e["exposed_ns"])


def _calls(scene: Scene, rows: Ints, ranks: int) -> int:
    """How many collectives `rows` are; of an all-to-all each rank's kernel is its part of one."""
    c = scene.collectives
    grouped = c.exchange[rows]
    return len(np.unique(c.collective[rows[~grouped]])) + round(int(grouped.sum()) / ranks)


def _bytes(scene: Scene, rows: Ints, ranks: int) -> int:
    """One rank's messages; of an all-to-all those that it sends."""
    c = scene.collectives
    sent = rows[~c.exchange[rows] | (c.operation[rows] == "Send")]
    return int(np.maximum(c.size[sent], 0).sum() // ranks)


def _exposed_all(scene: Scene) -> Floats:
    c = scene.collectives
    out = np.zeros(len(c.rank))
    for line in scene.timelines:
        mine = c.of(line.rank)
        mine = mine[c.has[mine]]
        out[mine] = c.end[mine] - c.start[mine] - line.compute.within(c.start[mine], c.end[mine])
    return out


def _per_step(scene: Scene, rows: Ints, line_of: dict[int, int]) -> Floats:
    """Exposed transfer of `rows` as [ranks, settled steps], overlaps counted once (ns)."""
    c = scene.collectives
    out = np.full((len(scene.ranks), len(scene.settled)), np.nan)
    waits = hidden_wait(scene).astype(np.int64)
    for rank, mine in c.each_rank(rows):
        line = scene.timelines[line_of[rank]]
        begin = np.minimum(c.start[mine] + c.wait[mine] + waits[mine], c.end[mine])
        covered = union(
            np.r_[line.compute.start, begin].astype(np.int64),
            np.r_[line.compute.end, c.end[mine]].astype(np.int64),
        )
        each = covered.within(line.begin, line.end) - line.compute.within(line.begin, line.end)
        known = np.isin(line.step, scene.settled)
        at = np.searchsorted(scene.settled, line.step[known])
        out[line_of[rank], at] = each[known]
    return out


def find(scene: Scene, unclear: frozenset[str] = frozenset()) -> list[Finding]:
    """Return `communication.exposed`, one per operation that costs enough.

    `unclear` names communicators whose transfer cannot be told from waiting.
    """
    c = scene.collectives
    if not scene.settled:
        return []
    keys = _keys(scene)
    line_of = {rank: k for k, rank in enumerate(scene.ranks)}
    found = []
    for operation in dict.fromkeys(c.label[c.has & c.matched]):
        # tensor groups are many communicators of one kind: they are one finding
        known = c.has & c.matched & ~np.isin(c.communicator.astype(str), list(unclear))
        rows = c.once(np.flatnonzero((c.label == operation) & known))
        if not len(rows):
            continue
        each = _per_step(scene, rows, line_of)
        steps = (~np.isnan(each)).sum(axis=0)
        cost = np.where(steps > 0, np.nansum(each, axis=0) / np.maximum(steps, 1), np.nan)
        share = float(np.nan_to_num(cost).mean()) / scene.step_ns
        if share >= limits.LEAST_FRAC:
            found.append((share, operation, rows, cost, each))
    found.sort(key=lambda f: -f[0])
    return [
        _finding(scene, str(operation), rows, cost, each, keys)
        for _, operation, rows, cost, each in found[:_MOST]
    ]


def _finding(
    scene: Scene, operation: str, rows: Ints, cost: Floats, each: Floats, keys: np.ndarray
) -> Finding:
    c = scene.collectives
    per_step = float(np.nan_to_num(cost).mean())
    inside = rows[np.isin(c.step[rows], scene.settled)]
    ranks = sorted({int(r) for r in c.rank[rows]})
    per_rank = max(len(ranks) * len(scene.settled), 1)
    calls = len(inside) / per_rank
    sizes = c.size[inside]
    small = float((sizes[sizes >= 0] < _SMALL_BYTES).mean()) if (sizes >= 0).any() else 0.0
    length = float((c.end - c.start)[inside].sum())
    hidden = 1.0 - float(_exposed_all(scene)[inside].sum()) / max(length, 1.0)
    each_exposed = _exposed_all(scene)
    by_key = parts(rows, keys[rows].astype(str))
    by_key.sort(key=lambda part: -float(each_exposed[part].sum()))
    top = [str(keys[part[0]]) for part in by_key]
    evidence = [
        {
            "operation": operation,
            "communicator": key.split("\0")[1],
            "ranks": sorted({int(r) for r in c.rank[rows][keys[rows] == key]}),
            "steps": [int(s) for s in scene.settled],
            "exposed_ns_per_step": round(
                float(exposed_transfer(scene)[inside][keys[inside] == key].sum()) / per_rank
            ),
            "what": f"{operation} on {key.split(chr(0))[1]}",
        }
        for key in top[:4]
    ]
    return finding(
        scene,
        "communication.exposed",
        rank=None,
        ranks=ranks,
        cost=cost,
        floor_ns=0.01 * scene.step_ns,
        confidence=0.9 if float(np.nanstd(each)) < per_step else 0.7,
        summary=f"{ms(per_step)} of each step ({percent(per_step / scene.step_ns)}) is {operation} "
        f"that no compute hides ({calls:.0f} calls a step, {percent(hidden)} of their time is "
        "hidden)",
        evidence=evidence,
        advice=_advice(operation, calls, small, hidden),
    )


def _advice(operation: str, calls: float, small: float, hidden: float) -> str:
    if operation in ("Send", "Recv", "SendRecv"):
        return (
            "post receives early and send asynchronously (isend/irecv, batch_isend_irecv), with "
            "more microbatches to overlap them with"
        )
    if small >= 0.3 and calls >= 4:
        return (
            f"{percent(small)} of the calls are below 1 MiB: put gradients into buckets "
            "(DistributedDataParallel does) instead of one call each"
        )
    if operation in ("AllGather", "ReduceScatter"):
        return (
            "prefetch the next layer's parameters (FSDP forward_prefetch, backward_prefetch) or "
            "shard over fewer ranks"
        )
    if hidden < 0.2:
        return (
            "nothing runs beside it: start it while the backward still computes "
            "(DistributedDataParallel buckets, async_op=True), or overlap tensor parallel parts"
        )
    return "smaller buckets start earlier: try bucket_cap_mb, and gradient_as_bucket_view"
