"""GPUs that idle on all ranks because hosts are slow: launches, synchronising calls, the GIL,
input. A single rank's late host is a straggler and no matter of this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from clusterprof.analysis.findings import causes, common_causes, savings
from clusterprof.analysis.findings.finding import (
    Code,
    capture,
    finding,
    ms,
    operators,
    percent,
    straggler_ns,
)
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.dataset import Dataset, Floats
from clusterprof.analysis.model.intervals import Union, union
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
        "A report shows only CUDA calls, NVTX ranges and sampled frames: the finding may not be "
        "able to say what the hosts do.",
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


def find(dataset: Dataset, found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `host.gil`, `host.gc`, `input.stall`, `host.sync`, `host.launch_bound`, `host.busy`,
    `gpu.idle`.

    Idle time is given to one cause only, in this order: waiting for the GIL, the garbage
    collector, fetching input, a synchronising call, the pace of launching, anything else that
    hosts do, and what no host is the cause of.
    """
    if not dataset.steady_steps:
        return []
    late_ns = straggler_ns(found)
    gaps = [common_causes.idle_gaps(line) for line in dataset.timelines]
    made: list[Finding] = []
    for cause in (_gil, _gc, _input, _sync, _launch, _busy, _queued):
        one, gaps = cause(dataset, gaps)
        if one is not None:
            made.append(one)
    if any(f["code"] == "host.launch_bound" for f in made):
        return made
    others = [f for f in made if f["code"] != "host.busy"]
    paced = _paced(dataset, sum(f["cost_ns_per_step"] for f in others), late_ns)
    seen = max((f["cost_ns_per_step"] for f in made if f["code"] == "host.busy"), default=0)
    # two views of one thing: the larger one tells more
    return [*others, paced] if paced and paced["cost_ns_per_step"] > seen else made


Answer = tuple["Finding | None", "list[Union]"]


def _gil(dataset: Dataset, gaps: list[Union]) -> Answer:
    cause = common_causes.locked(dataset, gaps)
    if cause is None:
        return None, gaps
    cost = np.minimum(cause.idle.max(axis=0), dataset.durations)
    per_step = float(cost.mean())
    if per_step < limits.LEAST_FRAC * dataset.step_ns:
        return None, gaps
    of_rank = cause.idle.mean(axis=1)
    worst = int(np.argmax(of_rank))
    rank = dataset.ranks[worst]
    spent = cause.spent.mean(axis=1)
    hit = [r for r, w in zip(dataset.ranks, spent, strict=True) if w >= 0.3 * spent.max()]
    made = finding(
        dataset,
        "host.gil",
        rank=rank,
        ranks=hit,
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.9,
        summary=f"GPUs idle {ms(per_step)} of each step ({percent(per_step / dataset.step_ns)}) "
        f"while their host waits for Python's interpreter lock, rank {rank} worst",
        evidence=_idle_evidence(dataset, cause, "while waiting for the interpreter lock"),
        advice="other Python threads hold the lock: move their work into processes, or into "
        "native code that releases it",
        follow_up=capture(dataset, hit[:2], "--trace", "cuda,nvtx,python-gil", "--cpu-sampling"),
    )
    return made, common_causes.left(gaps, cause.where)


def _gc(dataset: Dataset, gaps: list[Union]) -> Answer:
    """Collectors that run on all ranks, each when it likes: the others wait for each of them."""
    cause = common_causes.collecting(dataset, gaps)
    # one rank alone that collects is a straggler
    if cause is None or not cause.is_shared():
        return None, gaps
    cost = np.minimum((cause.idle - cause.own()).max(axis=0), dataset.durations)
    per_step = float(cost.mean())
    if per_step < limits.LEAST_FRAC * dataset.step_ns:
        return None, gaps
    spent = cause.spent.mean(axis=1)
    made = finding(
        dataset,
        "host.gc",
        rank=None,
        ranks=[r for r, w in zip(dataset.ranks, spent, strict=True) if w >= 0.5 * spent.max()],
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.85,
        summary=f"GPUs idle {ms(per_step)} of each step ({percent(per_step / dataset.step_ns)}) "
        "while Python's garbage collector runs, now on one rank and now on another",
        evidence=_idle_evidence(dataset, cause, "while the collector runs"),
        advice=causes.COLLECT_TOGETHER,
    )
    return made, common_causes.left(gaps, cause.where)


def _input(dataset: Dataset, gaps: list[Union]) -> Answer:
    """All hosts fetch slowly; the last to have its batch sets the pace, the others wait for it."""
    cause = common_causes.fetching(dataset, gaps)
    # one rank alone that fetches long is a straggler
    if cause is None or not cause.is_shared():
        return None, gaps
    # what the worst rank alone is late by is a straggler's cost
    cost = np.minimum((cause.idle - cause.own()).max(axis=0), dataset.durations)
    per_step = float(cost.mean())
    if per_step < limits.LEAST_FRAC * dataset.step_ns:
        return None, gaps
    spent = cause.spent.mean(axis=1)
    hit = cost > 0.01 * dataset.step_ns
    often = f" (in {int(hit.sum())} of {len(hit)} settled steps)" if not hit.all() else ""
    made = finding(
        dataset,
        "input.stall",
        rank=None,
        ranks=[r for r, w in zip(dataset.ranks, spent, strict=True) if w >= 0.5 * spent.max()],
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.85,
        summary=f"GPUs starve {ms(per_step)} of each step ({percent(per_step / dataset.step_ns)}) "
        f"while their hosts fetch the batch{often}",
        evidence=_idle_evidence(dataset, cause, "while the host fetches"),
        advice="fetch ahead: more DataLoader workers, prefetch_factor, persistent_workers, or "
        "cheaper preprocessing",
    )
    return made, common_causes.left(gaps, cause.where)


def _idle_evidence(dataset: Dataset, cause: common_causes.Cause, what: str) -> list[dict[str, Any]]:
    idle, spent = cause.idle.mean(axis=1), cause.spent.mean(axis=1)
    return [
        {
            "rank": int(rank),
            "steps": list(dataset.steady_steps),
            "idle_ns_per_step": round(float(idle[k])),
            "host_ns_per_step": round(float(spent[k])),
            "what": f"{ms(float(idle[k]))} a step idle {what} ({ms(float(spent[k]))} of host time)",
        }
        for k, rank in enumerate(dataset.ranks[:16])
    ]


def _sync(dataset: Dataset, gaps: list[Union]) -> Answer:
    """A small copy to the host, waited for, and a GPU that starves until the next launch."""
    after = []
    count = 0
    blocked: list[Floats] = []
    for tables, line, gap in zip(dataset.tables, dataset.timelines, gaps, strict=True):
        table = tables.activity
        back = pc.fill_null(pc.equal(table["direction"], "device_to_host"), fill_value=False)
        rows = np.flatnonzero(np.asarray(back.to_numpy(zero_copy_only=False), dtype=bool))
        size = np.asarray(pc.fill_null(table["size_bytes"], 0).to_numpy())[rows]
        rows = rows[size <= 4096]
        syncs = host_activity.spans(tables, "cuda", r"(?i)(stream|device|event)synchronize|memcpy")
        # the host waits from before the copy until its end, or longer
        at = np.searchsorted(syncs.start, line.stop[rows], side="right") - 1
        inside = np.zeros(len(rows), dtype=bool)
        if len(syncs.start):
            inside = (at >= 0) & (syncs.end[np.maximum(at, 0)] >= line.stop[rows])
        rows, at = rows[inside], at[inside]
        step = np.r_[line.step, -1][line.step_of[rows]]
        within = np.isin(step, dataset.steady_steps)
        rows, at = rows[within], at[within]
        count += len(rows)
        waited = np.bincount(
            np.searchsorted(dataset.steady_steps, step[within]),
            (syncs.end - syncs.start)[at] if len(at) else None,
            len(dataset.steady_steps),
        )
        blocked.append(waited.astype(float))
        follows = np.isin(gap.start, line.stop[rows])
        after.append(union(gap.start[follows], gap.end[follows]))
    if not count:
        return None, gaps
    each = [
        common_causes.per_step(dataset, line, a.within(line.begin, line.end))
        for line, a in zip(dataset.timelines, after, strict=True)
    ]
    cost = np.mean(each, axis=0)
    waits = float(np.mean(blocked))
    per_step = float(cost.mean())
    calls = count / max(len(dataset.ranks) * len(dataset.steady_steps), 1)
    if waits < limits.LEAST_FRAC * dataset.step_ns:
        return None, gaps
    made = finding(
        dataset,
        "host.sync",
        rank=None,
        ranks=dataset.ranks,
        cost=cost,
        confidence=0.85,
        summary=f"the host waits for the GPU inside the step, {calls:.0f} time"
        f"{'s' if round(calls) != 1 else ''} and {ms(waits)} a step; the GPU then starves "
        f"{ms(per_step)} ({percent(per_step / dataset.step_ns)})",
        evidence=[
            {
                "ranks": list(dataset.ranks),
                "steps": list(dataset.steady_steps),
                "host_wait_ns_per_step": round(waits),
                "what": "a copy of a few bytes to the host, and a synchronising call around it "
                "(.item() and its like)",
            }
        ],
        advice="read losses and metrics every so many steps, or copy them with non_blocking=True "
        "and look a step later",
        follow_up=capture(dataset, dataset.ranks[:1], *operators(dataset)),
    )
    return made, common_causes.left(gaps, after)


def _launch(dataset: Dataset, gaps: list[Union]) -> Answer:
    """Gaps on all ranks before kernels that were launched only after the GPU had run dry."""
    if dataset.on_host:
        return None, gaps
    cause = common_causes.launching(dataset, gaps, host_activity.pace(dataset))
    # starving on most ranks; or on the one whose queue is empty, of short kernels on all
    short = (
        0 < common_causes.typical_kernel(dataset) <= limits.SHORT_KERNEL_NS and cause.is_shared()
    )
    short = short and not dataset.pipelined
    cost = cause.idle.max(axis=0) if short else np.median(cause.idle, axis=0)
    cost = np.minimum(cost, dataset.durations)
    per_step = float(cost.mean())
    share = per_step / dataset.step_ns
    if share < limits.LAUNCH_FRAC:
        return None, gaps
    count, typical = _kernels_per_step(dataset), common_causes.typical_kernel(dataset)
    pace = float(np.median(cause.spent.mean(axis=1)))
    made = finding(
        dataset,
        "host.launch_bound",
        rank=None,
        ranks=dataset.ranks,
        cost=cost,
        confidence=0.9,
        summary=f"GPUs idle {ms(per_step)} of each step ({percent(share)}) until their next kernel "
        f"is launched: {count} a step, {typical / 1e3:.1f} µs in the median, and {ms(pace)} for "
        "the host",
        evidence=_idle_evidence(dataset, cause, "in gaps below 1 ms"),
        advice="fewer, longer kernels: torch.compile, CUDA Graphs, fused optimizers "
        "(fused=True), larger batches",
    )
    return made, gaps


def _busy(dataset: Dataset, gaps: list[Union]) -> Answer:
    """All GPUs idle together in long gaps that no other cause explains: their hosts are busy."""
    if dataset.pipelined or any(line.on_host for line in dataset.timelines):
        return None, gaps
    cause = common_causes.launching(dataset, gaps, host_activity.pace(dataset), long=True)
    # three in four ranks idle so long: what fewer do is a matter of those that are late
    common = np.sort(cause.idle, axis=0)[len(dataset.ranks) // 4]
    cost = np.minimum(common, dataset.durations)
    per_step = float(cost.mean())
    if per_step < limits.LAUNCH_FRAC * dataset.step_ns:
        return None, gaps
    whose = "the hosts of all ranks launch" if len(dataset.ranks) > 1 else "the host launches"
    spent, name = causes.pause(dataset, int(np.argmax(cause.idle.mean(axis=1))))
    where = f" (in {name})" if name else ""
    made = finding(
        dataset,
        "host.busy",
        rank=None,
        ranks=dataset.ranks,
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.8,
        summary=f"GPUs idle {ms(per_step)} of each step ({percent(per_step / dataset.step_ns)}) "
        f"because {whose} nothing for {ms(spent)}{where}",
        evidence=_idle_evidence(dataset, cause, "until the host launches again"),
        advice="look at what the hosts do in that pause (logging, checks, checkpoints, sleeping) "
        "and move it off the training thread, or let it run ahead: a launch need not wait for the "
        "GPU",
        follow_up=capture(dataset, dataset.ranks[:1], *operators(dataset), "--cpu-sampling"),
    )
    return made, common_causes.left(gaps, cause.where)


def _queued(dataset: Dataset, gaps: list[Union]) -> Answer:
    """Gaps on all ranks before kernels that had been launched when the GPU ran dry."""
    if any(line.on_host for line in dataset.timelines):
        return None, gaps
    cause = common_causes.queued(dataset, gaps)
    cost = np.minimum(np.sort(cause.idle, axis=0)[len(dataset.ranks) // 4], dataset.durations)
    per_step = float(cost.mean())
    if per_step < limits.LAUNCH_FRAC * dataset.step_ns:
        return None, gaps
    idle = float(np.nanmean(dataset.account("idle_ns")))
    made = finding(
        dataset,
        "gpu.idle",
        rank=None,
        ranks=dataset.ranks,
        cost=cost,
        floor_ns=0.01 * dataset.step_ns,
        confidence=0.8,
        summary=f"GPUs idle {ms(idle)} of each {ms(dataset.step_ns)} step "
        f"({percent(idle / dataset.step_ns)}), {ms(per_step)} of it although their next kernel had "
        "been launched: it waits for something that the reports do not show",
        evidence=_idle_evidence(dataset, cause, "with the next kernel launched already"),
        advice="look for what the reports lack: other processes on these GPUs (nvidia-smi), events "
        "that the profiler dropped, host callbacks in streams, events of another process",
    )
    return made, common_causes.left(gaps, cause.where)


def _kernels_per_step(dataset: Dataset) -> int:
    kernels = [
        int(((line.kind == COMPUTE) & (line.step_of >= 0)).sum()) // max(len(line.step), 1)
        for line in dataset.timelines
    ]
    return int(np.mean(kernels))


def _paced(dataset: Dataset, already: float, late: float) -> Finding | None:
    """All hosts need nearly the whole step, and no GPU does: those wait for each other's hosts.

    Behind a collective that waits for the last host a GPU is not idle, and yet it has nothing to
    do. Saved by faster hosts: the part of the step that the middle host needs beyond what the
    busiest GPU does (computing, and copies and transfers that nothing hides). `already`: what
    other findings of this file cost a step, `late` what stragglers do: the step without them.
    """
    if dataset.pipelined or any(line.on_host for line in dataset.timelines):
        return None
    pace = host_activity.pace(dataset)
    known = ~np.isnan(pace)
    if len(dataset.ranks) < 2 or not known.all(axis=1).any() or not known.any(axis=0).all():
        return None
    own = np.asarray([p[k].mean() for p, k in zip(pace, known, strict=True) if k.any()])
    usual = float(np.median(own))
    if usual < limits.PACING_FRAC * dataset.step_ns or own.min() < limits.SHARED_FRAC * usual:
        return None
    work = savings.busy(dataset, transfers=True)
    if np.isnan(work).all():
        return None
    busy = float(np.nanmax(work))
    # what the capture itself adds to the step is no host's own
    step = min(dataset.step_ns, dataset.usual_step_ns or dataset.step_ns)
    saved = min(usual, step, dataset.step_ns - late) - busy - already
    share = saved / dataset.step_ns
    if share < limits.LAUNCH_FRAC:
        return None
    count = _kernels_per_step(dataset)
    middle = int(np.argsort(own)[len(own) // 2])
    idle, name = causes.pause(dataset, int(np.flatnonzero(known.any(axis=1))[middle]))
    paused = idle >= limits.PAUSE_FRAC * usual
    advice = (
        "fewer, longer kernels and less Python between them: torch.compile, CUDA Graphs, "
        "fused optimizers (fused=True), larger batches"
    )
    return finding(
        dataset,
        "host.busy" if paused else "host.launch_bound",
        rank=None,
        ranks=dataset.ranks,
        cost=np.full(len(dataset.steady_steps), saved),
        # an upper bound, from what hosts and GPUs need rather than from what was seen to idle
        at_most="warning",
        confidence=0.75,
        summary=f"the hosts of all ranks set the pace: they need {ms(usual)} of each "
        f"{ms(dataset.step_ns)} step to launch {count} kernels"
        + (f", {ms(idle)} of it without a launch" if paused else "")
        + (f" (in {name})" if paused and name else "")
        + f", the busiest GPU {ms(busy)}; faster hosts would save up to {ms(saved)} "
        f"({percent(share)})",
        evidence=[
            {
                "rank": int(rank),
                "steps": list(dataset.steady_steps),
                "host_ns_per_step": round(float(pace[k][known[k]].mean())),
                "gpu_ns_per_step": round(float(work[k])),
                "what": f"its host needs {ms(float(pace[k][known[k]].mean()))} a step, its GPU "
                f"{ms(float(work[k]))}",
            }
            for k, rank in enumerate(dataset.ranks[:16])
            if known[k].any() and not np.isnan(work[k])
        ],
        advice=f"look at what the hosts do in that pause first; else {advice}"
        if paused
        else advice,
    )
