"""Exposed communication: the transfer itself, not the waiting for a late rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.agent.contracts.words import counted, percent
from clusterprof.analysis.findings.finding import Code, Evidence, exposed_by_step, finding, of_step
from clusterprof.analysis.findings.unprofiled import hidden_wait
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, Floats, Ints, parts
from clusterprof.results import Finding, OperationEntry

#: place among the modules of findings (`registry`)
ORDER = 60

CODES = (
    Code(
        "communication.exposed",
        "Communication is not overlapped with compute",
        "Part of the step is pure transfer: a collective runs while its GPU computes nothing. "
        "Waiting for a late rank is not counted.",
        "Some exposure is unavoidable at the end of the backward pass and in tensor-parallel "
        "layers. Where a member of the communicator has no report, transfer and waiting cannot be "
        "separated, and nothing is reported.",
        "Start transfers earlier (gradient buckets, prefetching, async_op=True), send fewer and "
        "larger messages, or shard over fewer ranks.",
    ),
)

#: one finding each for so many operations and communicators at most
_MOST = 3
_SMALL_BYTES = 1 << 20


def exposed_transfer(dataset: Dataset) -> Floats:
    """Per row of the placed table: the exposed part of its transfer (ns)."""
    c = dataset.collectives
    waits = c.wait + hidden_wait(dataset).astype(np.int64)
    return _exposed(dataset, np.minimum(c.start + waits, c.end))


def _exposed(dataset: Dataset, begin: Ints) -> Floats:
    """Per row of the placed table: how much from `begin` to its end is without compute (ns)."""
    c = dataset.collectives
    out = np.zeros(len(c.rank))
    for line in dataset.timelines:
        mine = c.of(line.rank)
        mine = mine[c.has[mine]]
        covered = line.compute.within(begin[mine], c.end[mine])
        out[mine] = c.end[mine] - begin[mine] - covered
    return out


def _keys(dataset: Dataset) -> np.ndarray:
    c = dataset.collectives
    return np.asarray(
        [f"{o}\0{n}" for o, n in zip(c.label, c.communicator, strict=True)], dtype=object
    )


def by_operation(dataset: Dataset) -> list[OperationEntry]:
    """The matched collectives summed by operation and communicator, costliest first.

    `transfer_ns`, `wait_ns` and `exposed_ns` are sums per rank: over all calls, the mean over
    the ranks; `message_bytes` the sum of one rank's messages.
    """
    c = dataset.collectives
    exposed = _exposed(dataset, c.start)
    keys = _keys(dataset)
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
                "calls": _calls(dataset, rows, len(ranks)),
                "message_bytes": _bytes(dataset, every, len(ranks)),
                "transfer_ns": int(c.transfer[rows].sum() // len(ranks)),
                "wait_ns": int(c.wait[rows].sum() // len(ranks)),
                "exposed_ns": int(exposed[rows].sum() // len(ranks)),
            }
        )
    return sorted(out, key=lambda e: -e["exposed_ns"])


def _calls(dataset: Dataset, rows: Ints, ranks: int) -> int:
    """How many collectives `rows` are; of an all-to-all each rank's kernel is its part of one."""
    c = dataset.collectives
    grouped = c.exchange[rows]
    return len(np.unique(c.collective[rows[~grouped]])) + round(int(grouped.sum()) / ranks)


def _bytes(dataset: Dataset, rows: Ints, ranks: int) -> int:
    """One rank's messages; of an all-to-all those that it sends."""
    c = dataset.collectives
    sent = rows[~c.exchange[rows] | (c.operation[rows] == "Send")]
    return int(np.maximum(c.size[sent], 0).sum() // ranks)


def _per_step(dataset: Dataset, rows: Ints) -> Floats:
    """Exposed transfer of `rows` as [ranks, steady-state steps], overlaps counted once (ns)."""
    c = dataset.collectives
    out = np.full((len(dataset.ranks), len(dataset.steady_steps)), np.nan)
    waits = hidden_wait(dataset).astype(np.int64)
    for rank, mine in c.each_rank(rows):
        line = dataset.line(rank)
        begin = np.minimum(c.start[mine] + c.wait[mine] + waits[mine], c.end[mine])
        out[dataset.place[rank]] = exposed_by_step(
            dataset, line, line.compute, begin, c.end[mine], np.nan
        )
    return out


def find(dataset: Dataset, found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `communication.exposed`, one per operation that costs enough.

    Not where members wait for an unprofiled rank: there transfer and waiting cannot be separated.
    """
    c = dataset.collectives
    unprofiled = [f for f in found if f["code"] == "straggler.unprofiled"]
    unclear = [str(e["communicator"]) for f in unprofiled for e in f["evidence"]]
    if not dataset.steady_steps:
        return []
    keys = _keys(dataset)
    costly = []
    for operation in dict.fromkeys(c.label[c.has & c.matched]):
        # tensor groups are many communicators of one kind: they are one finding
        known = c.has & c.matched & ~np.isin(c.communicator.astype(str), unclear)
        rows = c.once(np.flatnonzero((c.label == operation) & known))
        if not len(rows):
            continue
        each = _per_step(dataset, rows)
        steps = (~np.isnan(each)).sum(axis=0)
        cost = np.where(steps > 0, np.nansum(each, axis=0) / np.maximum(steps, 1), np.nan)
        share = float(np.nan_to_num(cost).mean()) / dataset.step_ns
        if share >= limits.LEAST_FRAC:
            costly.append((share, operation, rows, cost, each))
    costly.sort(key=lambda c: -c[0])
    return [
        _finding(dataset, str(operation), rows, cost, each, keys)
        for _, operation, rows, cost, each in costly[:_MOST]
    ]


def _finding(
    dataset: Dataset, operation: str, rows: Ints, cost: Floats, each: Floats, keys: np.ndarray
) -> Finding:
    c = dataset.collectives
    per_step = float(np.nan_to_num(cost).mean())
    inside = rows[np.isin(c.step[rows], dataset.steady_steps)]
    ranks = sorted({int(r) for r in c.rank[rows]})
    per_rank = max(len(ranks) * len(dataset.steady_steps), 1)
    calls = len(inside) / per_rank
    sizes = c.size[inside][c.size[inside] >= 0]
    small = float((sizes < _SMALL_BYTES).mean()) if len(sizes) else 0.0
    exposed = _exposed(dataset, c.start)
    length = float((c.end - c.start)[inside].sum())
    overlapped = 1.0 - float(exposed[inside].sum()) / max(length, 1.0)
    by_key = parts(rows, keys[rows].astype(str))
    by_key.sort(key=lambda part: -float(exposed[part].sum()))
    transfer = exposed_transfer(dataset)
    evidence: Evidence = []
    for part in by_key[:4]:
        here = part[np.isin(c.step[part], dataset.steady_steps)]
        name = str(c.communicator[part[0]])
        evidence.append(
            {
                "operation": operation,
                "communicator": name,
                "ranks": sorted({int(r) for r in c.rank[part]}),
                "steps": list(dataset.steady_steps),
                "exposed_ns_per_step": round(float(transfer[here].sum()) / per_rank),
                "what": f"{operation} on {name}",
            }
        )
    return finding(
        dataset,
        "communication.exposed",
        ranks=ranks,
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.9 if float(np.nanstd(each)) < per_step else 0.7,
        summary=f"Exposed {operation} takes {of_step(dataset, per_step)}: no compute overlaps it. "
        f"{counted(round(calls), 'call')} per step, {percent(overlapped)} of their time "
        "overlapped.",
        evidence=evidence,
        advice=_advice(operation, calls, small, overlapped),
    )


def _advice(operation: str, calls: float, small: float, overlapped: float) -> str:
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
    if overlapped < 0.2:
        return (
            "no compute runs during it: start it while the backward pass still computes "
            "(DistributedDataParallel buckets, async_op=True), or overlap tensor parallel parts"
        )
    return "smaller buckets start earlier: try bucket_cap_mb, and gradient_as_bucket_view"
