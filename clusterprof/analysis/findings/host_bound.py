"""GPUs that idle on all ranks because hosts are slow: launches, synchronising calls, the GIL,
input. A single rank's slow host is a straggler and not found here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc

from clusterprof.agent.contracts.words import duration, ms, percent
from clusterprof.analysis.findings import causes, common_causes, savings
from clusterprof.analysis.findings.common_causes import Cause
from clusterprof.analysis.findings.finding import (
    Code,
    Evidence,
    by_steady_step,
    capture,
    finding,
    named,
    of_step,
    operators,
    straggler_ns,
)
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.dataset import Dataset, Floats
from clusterprof.analysis.model.intervals import Intervals, union
from clusterprof.analysis.model.timeline import COMPUTE
from clusterprof.results import Finding

#: place among the modules of findings (`registry`)
ORDER = 20

CODES = (
    Code(
        "host.gil",
        "Hosts wait for Python's interpreter lock",
        "GPUs idle while the thread that launches kernels waits for the GIL, which other Python "
        "threads hold.",
        "Only reports that trace the GIL show it (--trace python-gil); tracing it makes waits a "
        "little longer.",
        "Move the other threads' work into processes, or into native code that releases the GIL.",
    ),
    Code(
        "host.gc",
        "Python's garbage collector stops the ranks in turn",
        "GPUs idle while the garbage collector runs, on one rank in this step and on another in "
        "the next: all ranks wait for each of these runs.",
        "On one rank alone it is the cause of a straggler.host instead.",
        "Switch automatic collection off (gc.disable()) and collect at the same step on all ranks; "
        "gc.freeze() after the set-up excludes long-lived objects.",
    ),
    Code(
        "input.stall",
        "GPUs idle while the hosts fetch the batch",
        "The hosts of all ranks spend time in ranges or operators that fetch input while their "
        "GPUs idle.",
        "It goes by names (DataLoader, next_batch, data, fetch ...): input code without such a "
        "range is reported as host.busy. One slow rank alone is a straggler.host.",
        "Fetch ahead: more DataLoader workers, prefetch_factor, persistent_workers, or cheaper "
        "preprocessing.",
    ),
    Code(
        "host.sync",
        "The host waits for the GPU inside the step",
        "A small copy to the host with a synchronising call around it (.item(), .cpu(), printing a "
        "loss) stops the host until the GPU has caught up; the GPU then idles until the next "
        "launch.",
        "The cost counts the GPU's idle time only: a wait that queued work covers costs nothing.",
        "Read losses and metrics every N steps, or copy them with non_blocking=True and read them "
        "one step later.",
    ),
    Code(
        "host.launch_bound",
        "Launch-bound: GPUs wait for kernel launches",
        "Many short kernels, or slow hosts on all ranks: launching takes the hosts longer than the "
        "GPUs need to run the kernels.",
        "Tracing makes each launch some microseconds slower, so the cost is smaller without the "
        "profiler. Where it follows from the hosts' own time it is an upper bound.",
        "Launch fewer, longer kernels: torch.compile, CUDA Graphs, fused optimizers (fused=True), "
        "larger batches.",
    ),
    Code(
        "host.busy",
        "GPUs idle while all hosts do something else",
        "All GPUs idle at the same time in long gaps before kernels that were launched late, and "
        "no other finding explains them.",
        "Reports show CUDA calls, system calls, operators and NVTX ranges only: what the hosts do "
        "may remain unknown.",
        "Find the pause (logging, checks, checkpoints, sleeping) and move it off the training "
        "thread, or let it run ahead of the GPU.",
    ),
    Code(
        "gpu.idle",
        "GPUs idle although their next kernel was launched",
        "GPUs idle on all ranks before kernels that were already in the queue: what they wait for "
        "is not in the reports.",
        "Events that the profiler dropped look the same.",
        "Look for other processes on these GPUs (nvidia-smi), dropped events, host callbacks in "
        "streams, and events of another process.",
    ),
)


_FEWER_LAUNCHES = "torch.compile, CUDA Graphs, fused optimizers (fused=True), larger batches"
_GIL_OPTIONS = ("--trace", "cuda,nvtx,python-gil", "--cpu-sampling")
#: a copy of at most so many bytes to the host is a value that the program reads
_VALUE_BYTES = 4096


@dataclass(frozen=True)
class _Measured:
    """Idle time of one cause: `cost` [steady-state steps] (ns), and what is particular to it."""

    cause: Cause
    cost: Floats
    ranks: Sequence[int]
    rank: int | None = None
    #: what the summary says beside the cost
    details: dict[str, str] = field(default_factory=dict)
    #: in place of each rank's idle time
    evidence: Evidence | None = None


@dataclass(frozen=True)
class _Rule:
    """A cause of idle GPUs: how it is measured, from which cost on it is a finding, its words."""

    code: str
    measure: Callable[[Dataset, list[Intervals]], _Measured | None]
    #: shares of the step: the least cost, and what a step must cost to be one of the finding's
    least_frac: float
    floor_frac: float
    confidence: float
    #: `cost` and `idle` are filled in, and the measure's own details
    summary: str
    advice: str
    #: what the GPUs idle for, in the evidence
    what: str = ""
    #: whether the idle time is given to this cause, so that no later one counts it
    takes: bool = True
    #: the command that shows more
    recapture: Callable[[Dataset, Sequence[int]], str] = lambda _dataset, _ranks: ""


def find(dataset: Dataset, found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `host.gil`, `host.gc`, `input.stall`, `host.sync`, `host.launch_bound`, `host.busy`,
    `gpu.idle`.

    Idle time is given to one cause only, in the order of the rules.
    """
    if not dataset.step_ns:
        return []
    gaps = [common_causes.idle_gaps(line) for line in dataset.timelines]
    made: list[Finding] = []
    for rule in _RULES:
        measured = rule.measure(dataset, gaps)
        cost = float(measured.cost.mean()) if measured else 0.0
        if measured is None or cost / dataset.step_ns < rule.least_frac:
            continue
        made.append(_finding(dataset, rule, measured))
        if rule.takes:
            gaps = common_causes.left(gaps, measured.cause.where)
    if any(f["code"] == "host.launch_bound" for f in made):
        return made
    others = [f for f in made if f["code"] != "host.busy"]
    known = sum(f["cost_ns_per_step"] for f in others)
    paced = _host_bound(dataset, known, straggler_ns(found))
    busy = max((f["cost_ns_per_step"] for f in made if f["code"] == "host.busy"), default=0)
    # two views of one thing: the larger one explains more
    return [*others, paced] if paced and paced["cost_ns_per_step"] > busy else made


def _finding(dataset: Dataset, rule: _Rule, measured: _Measured) -> Finding:
    cost = float(measured.cost.mean())
    return finding(
        dataset,
        rule.code,
        rank=measured.rank,
        ranks=measured.ranks,
        cost=measured.cost,
        floor_ns=rule.floor_frac * dataset.step_ns,
        confidence=rule.confidence,
        summary=rule.summary.format(
            cost=of_step(dataset, cost),
            idle=f"{ms(cost)} ({percent(cost / dataset.step_ns)})",
            **measured.details,
        ),
        evidence=measured.evidence or _idle_evidence(dataset, measured.cause, rule.what),
        advice=rule.advice,
        follow_up=rule.recapture(dataset, measured.ranks),
    )


def _idle_evidence(dataset: Dataset, cause: Cause, what: str) -> Evidence:
    idle, spent = cause.idle.mean(axis=1), cause.spent.mean(axis=1)
    return [
        {
            "rank": int(rank),
            "steps": list(dataset.steady_steps),
            "idle_ns_per_step": round(float(idle[k])),
            "host_ns_per_step": round(float(spent[k])),
            "what": f"{ms(float(idle[k]))} idle per step {what} ({ms(float(spent[k]))} of host "
            "time)",
        }
        for k, rank in enumerate(dataset.ranks[:16])
    ]


def _spending(dataset: Dataset, cause: Cause, part: float) -> list[int]:
    """Ranks whose host spends this part of the worst one's time there, or more."""
    spent = cause.spent.mean(axis=1)
    return [r for r, ns in zip(dataset.ranks, spent, strict=True) if ns >= part * spent.max()]


def _gil(dataset: Dataset, gaps: list[Intervals]) -> _Measured | None:
    cause = common_causes.locked(dataset, gaps)
    if cause is None:
        return None
    cost = np.minimum(cause.idle.max(axis=0), dataset.durations)
    worst = dataset.ranks[int(np.argmax(cause.idle.mean(axis=1)))]
    ranks = _spending(dataset, cause, 0.3)
    return _Measured(cause, cost, ranks, worst, {"worst": f"rank {worst}"})


def _in_turn(dataset: Dataset, cause: Cause | None) -> _Measured | None:
    """A cause that hosts have alike; what the worst alone has more of is a straggler's cost."""
    if cause is None or not cause.is_common():
        return None
    cost = np.minimum((cause.idle - cause.own()).max(axis=0), dataset.durations)
    hit = cost > 0.01 * dataset.step_ns
    often = "" if hit.all() else f" (in {int(hit.sum())} of {len(hit)} steady-state steps)"
    return _Measured(cause, cost, _spending(dataset, cause, 0.5), None, {"often": often})


def _gc(dataset: Dataset, gaps: list[Intervals]) -> _Measured | None:
    return _in_turn(dataset, common_causes.collecting(dataset, gaps))


def _input(dataset: Dataset, gaps: list[Intervals]) -> _Measured | None:
    """All hosts fetch slowly; the last to have its batch delays the others."""
    return _in_turn(dataset, common_causes.fetching(dataset, gaps))


def _sync(dataset: Dataset, gaps: list[Intervals]) -> _Measured | None:
    """A small copy to the host, waited for, and a GPU that idles until the next launch."""
    shape = (len(dataset.ranks), len(dataset.steady_steps))
    idle, waited, calls = np.zeros(shape), np.zeros(shape), 0
    after = []
    for k, (line, gap) in enumerate(zip(dataset.timelines, gaps, strict=True)):
        rows, wait_ns = _waited_copies(dataset, k)
        step = line.step[line.step_of[rows]]
        np.add.at(waited[k], np.searchsorted(dataset.steady_steps, step), wait_ns)
        calls += len(rows)
        follows = np.isin(gap.start, line.stop[rows])
        after.append(union(gap.start[follows], gap.end[follows]))
        idle[k] = by_steady_step(dataset, line, after[k].within(line.begin, line.end))
    waits = float(waited.mean())
    if not calls or waits < limits.LEAST_FRAC * dataset.step_ns:
        return None
    each = calls / waited.size
    often = f"{each:.0f} time{'s' if round(each) != 1 else ''}"
    row = {
        "ranks": list(dataset.ranks),
        "steps": list(dataset.steady_steps),
        "host_wait_ns_per_step": round(waits),
        "what": "a copy of a few bytes to the host inside a synchronising call (.item() and "
        "similar)",
    }
    details = {"often": often, "waits": ms(waits)}
    cause = Cause(after, idle, waited)
    return _Measured(cause, idle.mean(axis=0), dataset.ranks, None, details, [row])


def _waited_copies(dataset: Dataset, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of small copies to the host in steady-state steps, and how long its host waited (ns)."""
    tables, line = dataset.tables[k], dataset.timelines[k]
    table = tables.activity
    back = pc.fill_null(pc.equal(table["direction"], "device_to_host"), fill_value=False)
    size = np.asarray(pc.fill_null(table["size_bytes"], 0).to_numpy())
    step = np.r_[line.step, -1][line.step_of]
    small = np.asarray(back.to_numpy(zero_copy_only=False), dtype=bool) & (size <= _VALUE_BYTES)
    rows = np.flatnonzero(small & np.isin(step, dataset.steady_steps))
    syncs = host_activity.spans(tables, "cuda", r"(?i)(stream|device|event)synchronize|memcpy")
    if not len(syncs.start):
        return rows[:0], np.zeros(0)
    # the host waits from before the copy until its end, or longer
    at = np.searchsorted(syncs.start, line.stop[rows], side="right") - 1
    inside = (at >= 0) & (syncs.end[np.maximum(at, 0)] >= line.stop[rows])
    return rows[inside], (syncs.end - syncs.start)[at[inside]]


def _launch(dataset: Dataset, gaps: list[Intervals]) -> _Measured | None:
    """Gaps on all ranks before kernels that were launched only after the GPU had run dry."""
    if dataset.on_host:
        return None
    cause = common_causes.launching(dataset, gaps, host_activity.pace(dataset))
    typical = common_causes.typical_kernel(dataset)
    # idle on most ranks; or on the one whose queue is empty, of short kernels on all
    short = 0 < typical <= limits.SHORT_KERNEL_NS and cause.is_common() and not dataset.pipelined
    idle = cause.idle.max(axis=0) if short else np.median(cause.idle, axis=0)
    details = {
        "count": str(_kernels_per_step(dataset)),
        "typical": duration(typical),
        "host": ms(float(np.median(cause.spent.mean(axis=1)))),
    }
    cost = np.minimum(idle, dataset.durations)
    return _Measured(cause, cost, dataset.ranks, None, details)


def _most_ranks(dataset: Dataset, cause: Cause) -> Floats:
    """How long three in four ranks idle: what fewer do is a matter of the stragglers."""
    idle = np.sort(cause.idle, axis=0)[len(dataset.ranks) // 4]
    return np.asarray(np.minimum(idle, dataset.durations))


def _busy(dataset: Dataset, gaps: list[Intervals]) -> _Measured | None:
    """All GPUs idle together in long gaps that no other cause explains: their hosts are busy."""
    if dataset.pipelined or any(line.on_host for line in dataset.timelines):
        return None
    cause = common_causes.launching(dataset, gaps, host_activity.pace(dataset), long=True)
    pause, name = causes.pause(dataset, int(np.argmax(cause.idle.mean(axis=1))))
    details = {
        "hosts": "all hosts launch" if len(dataset.ranks) > 1 else "the host launches",
        "pause": ms(pause),
        "where": f" (in {named(name)})" if name else "",
    }
    return _Measured(cause, _most_ranks(dataset, cause), dataset.ranks, None, details)


def _queued(dataset: Dataset, gaps: list[Intervals]) -> _Measured | None:
    """Gaps on all ranks before kernels that had been launched when the GPU ran dry."""
    if any(line.on_host for line in dataset.timelines):
        return None
    cause = common_causes.queued(dataset, gaps)
    idle = of_step(dataset, float(np.nanmean(dataset.account("idle_ns"))))
    return _Measured(cause, _most_ranks(dataset, cause), dataset.ranks, None, {"all": idle})


_RULES = (
    _Rule(
        "host.gil", _gil, limits.LEAST_FRAC, 0.01, 0.9,
        "GPUs idle {cost} while their hosts wait for Python's GIL (worst: {worst}).",
        "other Python threads hold the lock: move their work into processes, or into native code "
        "that releases it",
        "while waiting for the interpreter lock",
        recapture=lambda d, r: capture(d, r[:2], *_GIL_OPTIONS),
    ),
    _Rule(
        "host.gc", _gc, limits.LEAST_FRAC, 0.01, 0.85,
        "GPUs idle {cost} while Python's garbage collector runs on one rank after another.",
        causes.COLLECT_TOGETHER,
        "while the collector runs",
    ),
    _Rule(
        "input.stall", _input, limits.LEAST_FRAC, 0.01, 0.85,
        "GPUs idle {cost} while their hosts fetch the batch{often}.",
        "fetch ahead: more DataLoader workers, prefetch_factor, persistent_workers, or cheaper "
        "preprocessing",
        "while the host fetches",
    ),
    _Rule(
        "host.sync", _sync, 0.0, 0.0, 0.85,
        "The host waits for the GPU {often} per step ({waits}); the GPU then idles {idle}.",
        "read losses and metrics every N steps, or copy them with non_blocking=True and read them "
        "one step later",
        recapture=lambda d, r: capture(d, r[:1], *operators(d)),
    ),
    _Rule(
        "host.launch_bound", _launch, limits.LAUNCH_FRAC, 0.0, 0.9,
        "Launch-bound: GPUs idle {cost} waiting for kernel launches ({count} kernels per step, "
        "median {typical}; launching them takes the host {host}).",
        f"launch fewer, longer kernels: {_FEWER_LAUNCHES}",
        "in gaps below 1 ms",
        takes=False,
    ),
    _Rule(
        "host.busy", _busy, limits.LAUNCH_FRAC, 0.01, 0.8,
        "GPUs idle {cost}: {hosts} nothing for {pause}{where}.",
        "find what the hosts do in that pause (logging, checks, checkpoints, sleeping) and move it "
        "off the training thread, or let it run ahead: a launch need not wait for the GPU",
        "until the host launches again",
        recapture=lambda d, r: capture(d, r[:1], *operators(d), "--cpu-sampling"),
    ),
    _Rule(
        "gpu.idle", _queued, limits.LAUNCH_FRAC, 0.01, 0.8,
        "GPUs idle {all}, {idle} of it after their next kernel was launched. What they wait for is "
        "not in the reports.",
        "look for what the reports lack: other processes on these GPUs (nvidia-smi), events that "
        "the profiler dropped, host callbacks in streams, events of another process",
        "with the next kernel launched already",
    ),
)  # fmt: skip


def _kernels_per_step(dataset: Dataset) -> int:
    kernels = [
        int(((line.kind == COMPUTE) & (line.step_of >= 0)).sum()) // max(len(line.step), 1)
        for line in dataset.timelines
    ]
    return int(np.mean(kernels))


def _host_bound(dataset: Dataset, already: float, late: float) -> Finding | None:
    """All hosts need nearly the whole step and no GPU does: GPUs wait for each other's hosts.

    Behind a collective that waits for the last host a GPU does not count as idle. Saved by faster
    hosts: the part of the step that the middle host needs beyond what the busiest GPU does
    (compute, exposed copies and transfers). `already`: what other findings of this file cost a
    step, `late` what stragglers do (ns).
    """
    if dataset.pipelined or any(line.on_host for line in dataset.timelines):
        return None
    pace = host_activity.pace(dataset)
    known = ~np.isnan(pace)
    if len(dataset.ranks) < 2 or not known.all(axis=1).any() or not known.any(axis=0).all():
        return None
    hosts = np.asarray(
        [p[k].mean() if k.any() else np.nan for p, k in zip(pace, known, strict=True)]
    )
    own = hosts[~np.isnan(hosts)]
    usual = float(np.median(own))
    if usual < limits.PACING_FRAC * dataset.step_ns or own.min() < limits.SHARED_FRAC * usual:
        return None
    work = savings.busy(dataset, transfers=True)
    if np.isnan(work).all():
        return None
    busy = float(np.nanmax(work))
    # what the profiler adds to the step is not the hosts' own
    step = min(dataset.step_ns, dataset.usual_step_ns or dataset.step_ns)
    saved = min(usual, step, dataset.step_ns - late) - busy - already
    if saved / dataset.step_ns < limits.LAUNCH_FRAC:
        return None
    middle = np.argsort(own)[len(own) // 2]
    idle, name = causes.pause(dataset, int(np.flatnonzero(~np.isnan(hosts))[middle]))
    paused = idle >= limits.PAUSE_FRAC * usual
    where = f" (in {named(name)})" if name else ""
    advice = f"launch fewer, longer kernels with less Python between them: {_FEWER_LAUNCHES}"
    return finding(
        dataset,
        "host.busy" if paused else "host.launch_bound",
        ranks=dataset.ranks,
        cost=np.full(len(dataset.steady_steps), saved),
        # an upper bound, from what hosts and GPUs need rather than from measured idle time
        at_most="warning",
        confidence=0.75,
        summary=f"Host-bound: all hosts need {ms(usual)} of each {ms(dataset.step_ns)} step, the "
        f"busiest GPU {ms(busy)}. Faster hosts would save up to {of_step(dataset, saved)}. Each "
        f"host launches {_kernels_per_step(dataset)} kernels per step"
        + (f" and pauses for {ms(idle)}{where}." if paused else "."),
        evidence=_pace_evidence(dataset, hosts, work),
        advice=f"look at what the hosts do in that pause first; else {advice}"
        if paused
        else advice,
    )


def _pace_evidence(dataset: Dataset, hosts: Floats, work: Floats) -> Evidence:
    """What each rank's host and GPU need per step."""
    return [
        {
            "rank": int(rank),
            "steps": list(dataset.steady_steps),
            "host_ns_per_step": round(float(hosts[k])),
            "gpu_ns_per_step": round(float(work[k])),
            "what": f"its host needs {ms(float(hosts[k]))} per step, its GPU {ms(float(work[k]))}",
        }
        for k, rank in enumerate(dataset.ranks[:16])
        if not np.isnan(hosts[k] + work[k])
    ]
