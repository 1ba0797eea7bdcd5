"""Exposed communication: the transfer itself, not the waiting for a late rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from clusterprof.analysis.findings.finding import (
    Code,
    Repair,
    Tier,
    Words,
    capture,
    job_of,
    of_step,
    of_window,
)
from clusterprof.analysis.findings.unprofiled import not_captured
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import COMMUNICATION, EXPOSED, WAITING, by_call, call_of
from clusterprof.analysis.model.dataset import Dataset, calls_per_step, once
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.topology import whole
from clusterprof.analysis.model.what_if import Saved
from clusterprof.columns import Bools, PlacedRows, parts, sum_by
from clusterprof.results import OperationEntry
from clusterprof.words import percent

TIER = Tier.EVERYONE

CODES = (
    Code(
        "communication.exposed",
        "Communication is not overlapped with compute",
        "Part of the step is pure transfer: a collective runs while its GPU computes nothing. "
        "Waiting for a late rank is not counted. Saved: compute overlaps these transfers "
        "fully, slowed by a quarter of their time: an upper bound.",
        "Some exposure is unavoidable at the end of the backward pass and in tensor-parallel "
        "layers. Where a member of the communicator is not profiled, transfer and waiting for it "
        "cannot be separated: that is an information, and no more than an upper bound.",
        "Start transfers earlier (gradient buckets, prefetching, async_op=True), send fewer and "
        "larger messages, or shard over fewer ranks.",
    ),
)

#: kernels that run beside a collective take longer by this part of that time: 0.19 to 0.34, in the
#: middle 0.25, in the 18 of the tests' recordings on GPUs that have 0.1 ms a step of the same
#: kernels with and without one
_SLOWS = 0.25
#: what a pipeline's stages hand each other: a transfer is both
_BOTH = "Send and Recv"
_SHARDED = (
    "Prefetch the next layer's parameters (FSDP forward_prefetch, backward_prefetch) or shard over "
    "fewer ranks."
)
#: what to do, where the operation tells more than the code's recommendation
_ADVICE = {
    _BOTH: "Post receives early and send asynchronously (isend/irecv, batch_isend_irecv), with "
    "more microbatches to overlap them with.",
    "AllGather": _SHARDED,
    "ReduceScatter": _SHARDED,
}


@once
def by_operation(dataset: Dataset) -> list[OperationEntry]:
    """All communication by operation and communicator, the most exposed first.

    Per evidence step, the mean over the profiled ranks: the entries add up to the accounts.
    """
    if not dataset.ranks:  # a job that was looked at without a profiler
        return []
    c, steps, spent = dataset.collectives, dataset.evidence_steps, by_call(dataset)
    rows = np.flatnonzero(c.has & np.isin(c.step, steps) | spent[:-1].any(axis=1))
    keys = np.asarray([f"{c.label[r]}\0{c.communicator[r]}" for r in rows], dtype=str)
    # the last row is of kernels without a call
    entries, uncalled = list[OperationEntry](), [np.array([-1])] if spent[-1].any() else []
    for group in (*parts(rows, keys), *uncalled):
        means = spent[group].sum(axis=0) / max(len(dataset.ranks) * len(steps), 1)
        calls = group[group >= 0]
        ranks = np.unique(c.rank[calls]).tolist()
        sent = calls[~c.exchange[calls] | (c.operation[calls] == "Send")]
        sent = sent[np.isin(c.step[sent], steps)]
        size = np.maximum(c.size[sent], 0).sum() / max(len(ranks) * len(steps), 1)
        entries.append(
            {
                "operation": str(c.label[calls[0]]) if len(calls) else "unknown",
                "communicator": str(c.communicator[calls[0]]) if len(calls) else "unknown",
                "ranks": ranks,
                "calls_per_step": calls_per_step(dataset, calls),
                "bytes_per_step": round(float(size)),
                "communication_ns_per_step": round(means[COMMUNICATION]),
                "exposed_ns_per_step": round(means[EXPOSED]),
                "exposed_wait_ns_per_step": round(means[WAITING]),
            }
        )
    return sorted(entries, key=lambda e: -e["exposed_ns_per_step"])


def repairs(dataset: Dataset, _: Lengths, before: Sequence[Repair] = ()) -> list[Repair]:
    """Propose `communication.exposed`, one per operation whose transfers cost enough.

    Not where members wait for an unprofiled rank. Where one may wait for such a rank, transfer and
    waiting cannot be separated: an information.
    """
    c, spent = dataset.collectives, by_call(dataset)[:-1]
    least, separable = limits.LEAST_FRAC * dataset.step_ns, whole(dataset)
    # the only profiled member of a communicator matches no other
    counted = c.has & (c.matched | ~separable)
    for repair in before:
        if repair.calls is not None:
            counted &= ~repair.calls
    # tensor groups are many communicators of one kind: they are one finding
    label = np.where(c.between_stages, _BOTH, c.label)
    transfer, steady = spent[:, EXPOSED] - spent[:, WAITING], np.isin(c.step, dataset.steady_steps)
    proposals = []
    for operation, separate in dict.fromkeys(zip(label[counted], separable[counted], strict=True)):
        calls = counted & (label == operation) & (separable == separate)
        if sum_by(c.rank, transfer * calls).max() >= least * len(dataset.steady_steps):
            ranks = np.unique(c.rank[calls & steady])
            words = partial(_words, dataset, str(operation), np.flatnonzero(calls))
            apply = partial(_without, dataset, calls)
            proposals.append(Repair(CODES[0], tuple(ranks.tolist()), apply, words))
    return proposals


def _without(dataset: Dataset, calls: Bools, base: Lengths) -> Lengths:
    """The lengths where compute overlaps the transfers of these rows of the placed table.

    They take what they slow it by. What they wait for a profiled rank stays.
    """
    replayed = job_of(dataset).job
    call, run = call_of(dataset)[replayed.activity], base.run.copy()
    rows = np.flatnonzero((call >= 0) & calls[call])
    waits = np.where(replayed.joined[rows], 0, dataset.collectives.wait[call[rows]])
    run[rows] -= ((1 - _SLOWS) * np.maximum(run[rows] - waits, 0)).astype(np.int64)
    return replace(base, run=run)


def _words(dataset: Dataset, operation: str, rows: PlacedRows, saved: Saved) -> Words:
    """The figures are those of `by_operation`."""
    c = dataset.collectives
    inside = rows[np.isin(c.step[rows], dataset.steady_steps)]
    names = {(c.label[r], c.communicator[r]) for r in rows}
    used = [e for e in by_operation(dataset) if (e["operation"], e["communicator"]) in names]
    exposed = sum(e["exposed_ns_per_step"] for e in used)
    every = sum(e["communication_ns_per_step"] for e in used)
    waits = sum(e["exposed_wait_ns_per_step"] for e in used)
    often = calls_per_step(dataset, inside)
    overlapped = percent(1.0 - exposed / max(every, 1))
    alone = overlapped in (percent(0.0), percent(1e-9))
    how = f"No compute overlaps {operation}" if alone else f"{operation} is {overlapped} overlapped"
    spent, saves = of_window(dataset, exposed - waits), of_step(dataset, saved)
    calls = f"{often:.3g} call{'' if often == 1 else 's'} per step"
    evidence = [dict(entry) for entry in used[: limits.MOST]]
    if whole(dataset)[rows].all():
        summary = (
            f"{how}: full overlap would save at most {saves}. Exposed transfers take {spent}, "
            f"waiting excluded, in the mean of the ranks. {calls}, {overlapped} of their time "
            "overlapped."
        )
        return Words(summary, evidence, advice=_ADVICE.get(operation, ""))
    missing, advice = not_captured(dataset, inside)
    return Words(
        f"{operation} takes {spent}: transfer, or waiting for unprofiled ranks. {how}, in "
        f"{calls}: full overlap would save at most {saves}, less what is waiting.",
        evidence,
        confidence=limits.ASSUMED,
        advice=advice,
        follow_up=capture(dataset, missing[: limits.MOST]),
        at_most="info",
    )
