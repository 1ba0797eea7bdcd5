"""Exposed communication: the transfer itself, not the waiting for a late rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.agent.contracts.words import ms, percent
from clusterprof.analysis.findings.finding import Code, finding, of_step
from clusterprof.analysis.findings.pipeline import evened
from clusterprof.analysis.findings.unprofiled import hidden_wait
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import COMMUNICATION, EXPOSED, WAITING, by_call, call_of
from clusterprof.analysis.model.dataset import Bools, Dataset, Ints, calls_per_step, parts
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved, WhatIfs, what_ifs
from clusterprof.results import Finding, OperationEntry

#: place among the modules of findings (`registry`)
ORDER = 60

CODES = (
    Code(
        "communication.exposed",
        "Communication is not overlapped with compute",
        "Part of the step is pure transfer: a collective runs while its GPU computes nothing. "
        "Waiting for a late rank is not counted. Saved: these transfers take nothing, which "
        "overlapping them fully would come to: an upper bound.",
        "Some exposure is unavoidable at the end of the backward pass and in tensor-parallel "
        "layers. Where a member of the communicator has no report, transfer and waiting cannot be "
        "separated, and nothing is reported.",
        "Start transfers earlier (gradient buckets, prefetching, async_op=True), send fewer and "
        "larger messages, or shard over fewer ranks.",
    ),
)

#: one finding each for so many operations at most
_MOST = 3
_SMALL_BYTES = 1 << 20
#: what a pipeline's stages hand each other: a transfer is both
_BOTH = "Send and Recv"


def by_operation(dataset: Dataset) -> list[OperationEntry]:
    """All communication by operation and communicator, the most exposed first.

    Per evidence step, the mean over the profiled ranks: the entries add up to the accounts.
    """
    return dataset.cached("by operation", lambda: _by_operation(dataset))


def _by_operation(dataset: Dataset) -> list[OperationEntry]:
    c, spent = dataset.collectives, by_call(dataset)
    used = c.has & np.isin(c.step, dataset.evidence_steps) | spent[:-1].any(axis=1)
    rows = np.flatnonzero(used)
    keys = np.asarray([f"{c.label[r]}\0{c.communicator[r]}" for r in rows], dtype=str)
    out = [_entry(dataset, part) for part in parts(rows, keys)]
    if spent[-1].any():
        out.append(_entry(dataset, np.array([-1])))
    return sorted(out, key=lambda e: -e["exposed_ns_per_step"])


def _entry(dataset: Dataset, rows: Ints) -> OperationEntry:
    """Of rows of the placed table, or of the row -1: of kernels without a call."""
    c, steps = dataset.collectives, dataset.evidence_steps
    spent = by_call(dataset)[rows].sum(axis=0) / max(len(dataset.ranks) * len(steps), 1)
    rows = rows[rows >= 0]
    ranks = np.unique(c.rank[rows]).tolist()
    sent = rows[~c.exchange[rows] | (c.operation[rows] == "Send")]
    sent = sent[np.isin(c.step[sent], steps)]
    size = np.maximum(c.size[sent], 0).sum() / max(len(ranks) * len(steps), 1)
    return {
        "operation": str(c.label[rows[0]]) if len(rows) else "unknown",
        "communicator": str(c.communicator[rows[0]]) if len(rows) else "unknown",
        "ranks": ranks,
        "calls_per_step": calls_per_step(dataset, rows),
        "bytes_per_step": round(float(size)),
        "communication_ns_per_step": round(spent[COMMUNICATION]),
        "exposed_ns_per_step": round(spent[EXPOSED]),
        "exposed_wait_ns_per_step": round(spent[WAITING]),
    }


def find(dataset: Dataset, found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `communication.exposed`, one per operation whose transfers cost enough.

    Not where members wait for an unprofiled rank: there transfer and waiting cannot be separated.
    """
    job, base = what_ifs(dataset), evened(dataset)
    if job is None or base is None:
        return []
    c, spent = dataset.collectives, by_call(dataset)[:-1]
    unprofiled = [f for f in found if f["code"] == "straggler.unprofiled"]
    unclear = [str(e["communicator"]) for f in unprofiled for e in f["evidence"]]
    known = c.has & c.matched & ~np.isin(c.communicator.astype(str), unclear)
    if any(f["code"] == "pipeline.bubble" and f["severity"] != "info" for f in found):
        # it is weighed by the same transfers
        known &= ~c.point_to_point | c.exchange
    # tensor groups are many communicators of one kind: they are one finding
    label = np.where(c.point_to_point & ~c.exchange, _BOTH, c.label)
    least = limits.LEAST_FRAC * dataset.step_ns * len(dataset.steady_steps)
    weighed = []
    for operation in dict.fromkeys(label[known]):
        mine = known & (label == operation)
        transfer = (spent[:, EXPOSED] - spent[:, WAITING]) * mine
        if np.bincount(c.rank, transfer).max() >= least:
            saved = job.saved(_without(dataset, job, base, mine), base)
            weighed.append((saved, str(operation), mine))
    weighed.sort(key=lambda one: -one[0].most_ns)
    return [
        _finding(dataset, *one)
        for one in weighed[:_MOST]
        if one[0].most_ns >= limits.LEAST_FRAC * dataset.step_ns
    ]


def _without(dataset: Dataset, job: WhatIfs, base: Lengths, mine: Bools) -> Lengths:
    """The lengths where the transfers of these rows of the placed table take nothing.

    What they wait, for whichever rank, stays.
    """
    replayed, run = job.job, base.run.copy()
    call = call_of(dataset, replayed)
    chosen = np.flatnonzero((call >= 0) & mine[call])
    waits = hidden_wait(dataset)[call[chosen]].astype(np.int64)
    waits += np.where(replayed.joined[chosen], 0, dataset.collectives.wait[call[chosen]])
    run[chosen] = np.minimum(run[chosen], waits)
    return replace(base, run=run)


def _finding(dataset: Dataset, saved: Saved, operation: str, mine: Bools) -> Finding:
    """The figures are those of `by_operation`."""
    c = dataset.collectives
    names = {(str(c.label[r]), str(c.communicator[r])) for r in np.flatnonzero(mine)}
    used = [e for e in by_operation(dataset) if (e["operation"], e["communicator"]) in names]
    exposed = sum(e["exposed_ns_per_step"] for e in used)
    whole = sum(e["communication_ns_per_step"] for e in used)
    transfer = exposed - sum(e["exposed_wait_ns_per_step"] for e in used)
    overlapped = 1.0 - exposed / max(whole, 1)
    inside = np.flatnonzero(mine & np.isin(c.step, dataset.steady_steps))
    often = calls_per_step(dataset, inside)
    sizes = c.size[inside][c.size[inside] >= 0]
    small = float((sizes < _SMALL_BYTES).mean()) if len(sizes) else 0.0
    cost = np.maximum(saved.each, 0.0)
    return finding(
        dataset,
        "communication.exposed",
        ranks=np.unique(c.rank[inside]).tolist(),
        cost=cost,
        saved=saved,
        uncertainty_ns=saved.uncertainty_ns,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.9,
        summary=f"Exposed {operation} takes {of_step(dataset, transfer)}, waiting excluded: no "
        f"compute overlaps it. Overlapping it would save at most {ms(float(cost.mean()))}. "
        f"{often:.3g} call{'' if often == 1 else 's'} per step, {percent(overlapped)} of their "
        "time overlapped.",
        evidence=[
            {
                **entry,
                "steps": list(dataset.steady_steps),
                "what": f"{entry['operation']} on {entry['communicator']}",
            }
            for entry in used[:4]
        ],
        advice=_advice(operation, often, small, overlapped),
    )


def _advice(operation: str, calls: float, small: float, overlapped: float) -> str:
    if operation == _BOTH:
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
