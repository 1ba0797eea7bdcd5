"""What all hosts lose time with: the interpreter lock, input, waits, launches; and idle GPUs.

Calls in the reports name what a host does; the replay says what a step would save without it. What
stops a host comes before what it waits for, as queued work only hides the stop where nothing waits;
and that before launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from clusterprof.analysis.findings import causes
from clusterprof.analysis.findings.finding import (
    Code,
    Repair,
    Tier,
    Words,
    another_pace,
    capture,
    job_of,
    of_saving,
    operators,
)
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.by_report import NEVER, STAMP_NS
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.timeline import COMPUTE, union
from clusterprof.analysis.model.what_if import Saved, WhatIfs
from clusterprof.columns import (
    Bools,
    Floats,
    HostMoments,
    Ints,
    first_at_or_after,
    rows_between,
    rows_by,
    sum_by,
    sums,
    where_known,
)
from clusterprof.words import counted, duration, ms, ranks as rank_list

TIER = Tier.EVERYONE

CODES = (
    Code(
        "host.gil",
        "Hosts wait for Python's interpreter lock",
        "The thread that launches kernels waits for the GIL, which other Python threads hold.",
        "Only reports that trace the GIL show it (--trace python-gil); tracing it makes waits a "
        "little longer.",
        causes.LEAVE_THE_LOCK,
    ),
    Code(
        "host.gc",
        "Python's garbage collector stops the ranks in turn",
        "The garbage collector runs on one rank in this step and on another in the next: all ranks "
        "wait for each of these runs.",
        "On one rank alone it is the cause of a straggler.host instead.",
        causes.COLLECT_TOGETHER,
    ),
    Code(
        "input.stall",
        "GPUs idle while the hosts fetch the batch",
        "The hosts spend time in ranges or operators that fetch input, and no queued work covers "
        "it.",
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
        "The saving assumes that the host goes on at once: a value that decides what is launched "
        "next cannot be read later.",
        "Read losses and metrics every N steps, or copy them with non_blocking=True and read them "
        "one step later.",
    ),
    Code(
        "host.launch_bound",
        "Launch-bound: GPUs wait for kernel launches",
        "Many short kernels, or slow hosts on all ranks: launching takes the hosts longer than the "
        "GPUs need to run the kernels.",
        "Tracing makes each launch some microseconds slower: without step logs from before the "
        "window that is part of the saving.",
        "Launch fewer, longer kernels: torch.compile, CUDA Graphs, fused optimizers (fused=True), "
        "larger batches.",
    ),
    Code(
        "host.busy",
        "GPUs idle while all hosts do something else",
        "Hosts pause for a millisecond or more between launches, and nothing else explains the "
        "pauses.",
        "Reports show CUDA calls, system calls, operators and NVTX ranges only: what the hosts do "
        "may remain unknown.",
        "Find the pause (logging, checks, checkpoints, sleeping) and move it off the training "
        "thread, or let it run ahead of the GPU.",
    ),
    Code(
        "gpu.idle",
        "GPUs idle although their next kernel was launched",
        "Kernels that were already in the queue start late: what they wait for is not in the "
        "reports, so its cause cannot be determined.",
        "Events that the profiler dropped look the same.",
        "Look for other processes on these GPUs (nvidia-smi), dropped events, host callbacks in "
        "streams, and events of another process.",
    ),
)

#: the share of a step from which on a cause is a finding, and its turn
_WEIGHED = {
    "host.busy": (limits.LAUNCH_FRAC, 0),
    # it saves more where hosts are slower: at 2% the `.item()` of pairs/both and
    # pairs/item-late-host (1.1 and 0.7%) is not named
    "host.sync": (0.005, 1),
    "host.launch_bound": (limits.LAUNCH_FRAC, 2),
    "gpu.idle": (limits.LAUNCH_FRAC, 3),
}


@dataclass(frozen=True)
class _Cause:
    """What is taken out of the job's lengths. `without` makes the what-if of any lengths."""

    job: WhatIfs
    code: str
    #: the hosts' own time that is its, [host moments] (ns)
    own: Ints
    #: host moments whose wait is cut, or none
    waits: HostMoments

    def without(self, lengths: Lengths) -> Lengths:
        woken = lengths.woken.copy()
        woken[self.waits] = NEVER
        explained = self.code == "gpu.idle" or lengths.explained
        return replace(lengths, own=lengths.own - self.own, woken=woken, explained=explained)

    @cached_property
    def spent(self) -> Floats:
        """What each rank's host spends on it per step of the long run (ns)."""
        job, waits = self.job.job, self.waits
        waited = job.host_at[waits] - job.host_at[waits - 1]
        shape, step = self._often_spent.shape, self.job.step_of_host[waits]
        waited_in = sums(shape, (job.host_rank[waits], step), waited)
        return np.asarray(self._often_spent.mean(axis=1) + waited_in.mean(axis=1))

    @cached_property
    def _often_spent(self) -> Floats:
        """What each host spends on it itself, [ranks, steps] (ns): as often as such steps come.

        What the job hardly has outside the window is told as the window has it.
        """
        job, dataset = self.job.job, self.job.dataset
        shape = len(dataset.ranks), len(job.steps)
        spent = sums(shape, (job.host_rank, self.job.step_of_host), self.own)
        if job.shares is None:
            return spent
        often = spent * job.shares * len(job.shares)
        hardly = often.mean(axis=1).max() < limits.LEAST_FRAC * dataset.step_ns
        return spent if hardly else often

    @cached_property
    def long(self) -> Bools:
        """Whose host is in it for long in which step: what makes up most of it, [ranks, steps]."""
        spent = self._often_spent
        longest = np.sort(spent, axis=None)[::-1]
        most = first_at_or_after(np.cumsum(longest), limits.HALF * spent.sum())
        return np.asarray(spent >= limits.HALF * np.maximum(longest[most], 1.0))

    @property
    def once(self) -> int | None:
        """The step in which one rank of several is in it for long; None where more do so often."""
        if self.code != "host.busy" or self.long.sum() != 1 or len(self.long) < 2:
            return None
        return int(self.job.job.steps[self.long.any(axis=0).argmax()])

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks whose hosts spend most in it: the same in each step, or another one."""
        chosen = (self.spent >= limits.HALF * self.spent.max()) | self.long.any(axis=1)
        return [self.job.dataset.ranks[k] for k in np.flatnonzero(chosen)]

    def idle(self) -> Floats:
        """What each rank's GPU idles per step (ns) while its host is in it."""
        job, dataset = self.job.job, self.job.dataset
        a, axis, n = dataset.activities, dataset.axis, len(dataset.ranks)
        begin, end = job.host_spans
        # a pause of the job without the profiler may be longer than what was recorded of it
        taken = np.minimum(self.own / np.maximum(job.lengths.own, 1), 1)
        idle = sum_by(job.rank, job.unexplained * (self.code == "gpu.idle"), n)
        for k, until in a.lines.blocks():
            block, rows = rows_between(job.host_rank, k, until), a.lines.rows(k, until)
            moments = block.start + np.flatnonzero(self.own[block] > 0)
            if not len(moments):
                continue
            ran = union(*(axis.of(a.rank[rows], times[rows]) for times in (a.start, a.stop)))
            rank, spans = job.host_rank[moments], (begin[moments], end[moments])
            free = spans[1] - spans[0] - ran.within(*(axis.of(rank, times) for times in spans))
            idle += sum_by(rank, free * taken[moments], n)
        return np.asarray(idle / len(job.steps))


def repairs(dataset: Dataset, lengths: Lengths, *_: object) -> list[Repair]:
    """Propose `host.gil`, `host.gc`, `input.stall`, `host.sync`, `host.launch_bound`, `host.busy`,
    `gpu.idle`."""
    codes = {code.code: code for code in CODES}
    return [
        Repair(
            codes[cause.code], tuple(cause.ranks), cause.without, partial(_words, cause),
            *_WEIGHED.get(cause.code, (limits.LEAST_FRAC, 0)),
        )
        for cause in _causes(job_of(dataset), lengths)
    ]  # fmt: skip


def _causes(job: WhatIfs, lengths: Lengths) -> Iterator[_Cause]:
    """All that may cost time, in order. Each part of a host's own time belongs to one cause."""
    replay, none = job.job, np.zeros(0, dtype=np.int64)
    nothing = np.zeros_like(replay.lengths.own)
    share = np.divide(lengths.own, np.maximum(replay.lengths.own, 1))
    for code, named_ns in job.named.items():
        yield _Cause(job, code, (named_ns * share).astype(np.int64), none)
    # hosts wait for small copies to the host: the moments at which such a wait ends
    a, axis = job.dataset.activities, job.dataset.axis
    values = a.to_host & (a.size < limits.LARGE_BYTES)
    stop = np.sort(axis.of(a.rank[values], a.stop[values]))
    ends = np.setdiff1d(np.flatnonzero(replay.host_root), replay.first_of_host)
    end = axis.of(replay.host_rank[ends], replay.host_at[ends])
    last = where_known(stop, first_at_or_after(stop, end + STAMP_NS) - 1, NEVER)
    yield _Cause(job, "host.sync", nothing, ends[last >= end - limits.REACTS_NS])
    if job.dataset.on_host:
        return
    rest = replay.lengths.own - sum(job.named.values())
    some, usual = np.flatnonzero(rest > 0), np.zeros(len(job.dataset.ranks))
    for rank, rows in rows_by(replay.host_rank[some]).items():
        usual[rank] = np.median(rest[some[rows]])
    # the rank's middle launch is a small part of a pause: without it simulated hosts that are slow
    # in each launch, of up to two milliseconds, are said to pause
    long = rest > np.maximum(limits.PAUSE_NS, usual[replay.host_rank] / limits.LAUNCH_FRAC)
    more = (rest * share).astype(np.int64)
    yield _Cause(job, "host.busy", np.where(long, more, 0), none)
    yield _Cause(job, "host.launch_bound", np.where(long, 0, more), none)
    yield _Cause(job, "gpu.idle", nothing, none)


def _words(cause: _Cause, saved: Saved) -> Words:
    dataset, ranks, idle = cause.job.dataset, cause.ranks, cause.idle()
    worst = int(np.argmax(cause.spent if cause.spent.any() else idle))
    describe = _paused if cause.code == "host.busy" else _summary
    text, most = describe(cause, worst, of_saving(dataset, saved)), int(np.argmax(idle))
    if cause.own.any() and abs(idle[most] - saved.ns) > limits.LAUNCH_FRAC * saved.ns:
        rank = dataset.ranks[most]
        window = ", in the window" if another_pace(dataset) else ""
        text += f" GPUs idle up to {ms(float(idle[most]))} per step in it (rank {rank}{window})."
    # work that is queued may be late in the step after the only one in which a rank pauses
    once = np.asarray(dataset.steady_steps) == cause.once
    # what shows more when ranks are profiled again
    options = {
        "host.gil": ("--trace", "cuda,nvtx,python-gil", "--cpu-sampling"),
        "host.sync": operators(dataset),
        "host.busy": (*operators(dataset), "--cpu-sampling"),
    }.get(cause.code)
    return Words(
        summary=text,
        rank=dataset.ranks[worst] if cause.code == "host.gil" else None,
        evidence=[
            {
                "rank": rank,
                "steps": cause.job.job.steps.tolist(),
                "idle_ns_per_step": round(idle[k]),
                "host_ns_per_step": round(cause.spent[k]),
            }
            for k, rank in enumerate(dataset.ranks[: limits.MOST])
        ],
        follow_up=capture(dataset, ranks[:2], *options) if options else "",
        costs=np.where(once, saved.by_step_ns.sum(), 0.0) if once.any() else None,
    )


def _summary(cause: _Cause, worst: int, saved: str) -> str:
    """A cause other than pauses in words; `worst` is the place of who spends most in it."""
    dataset, replay, ranks = cause.job.dataset, cause.job.job, cause.ranks
    few = len(ranks) <= limits.HALF * len(dataset.ranks)
    who = f"The hosts of {rank_list(ranks, limits.FEW)}" if few else "Hosts"
    collecting = rank_list(ranks) if len(ranks) == 1 else "one rank after another"
    theirs = np.isin(replay.host_rank[cause.waits], [dataset.place[r] for r in ranks])
    times = int(theirs.sum()) / len(ranks)
    per_step = round(times / len(replay.steps))
    count = per_step or max(round(times), 1)
    often = "once" if count == 1 else counted(count, "time")
    often += " per step" if per_step else f" in {counted(len(replay.steps), 'step')}"
    kernels = replay.lengths.run[replay.kind == COMPUTE]
    launched = len(kernels) // (len(replay.steps) * max(len(replay.ranks), 1))
    typical = duration(float(np.median(kernels)) if len(kernels) else 0.0)
    idle = ms(float(np.nanmean(dataset.account("idle_ns"))))
    return {
        "host.gil": f"Hosts wait for Python's GIL: {saved} (worst: rank {dataset.ranks[worst]}).",
        "host.gc": f"Python's garbage collector, on {collecting}, costs {saved}.",
        "input.stall": f"{who} fetch the batch while their GPUs idle: {saved}.",
        "host.sync": f"Hosts wait for their GPU {often}, for a value that they read: {saved}.",
        "host.launch_bound": f"Launch-bound: hosts launch kernels too slowly, {saved}. Each "
        f"launches {launched} kernels per step, {typical} in the median.",
        "gpu.idle": f"GPUs idle although their next kernel was launched: {saved}. The cause "
        "cannot be determined: what they wait for is not in the reports. They idle "
        f"{idle} per step in all.",
    }[cause.code]


def _paused(cause: _Cause, worst: int, saved: str) -> str:
    """Pauses in words: one of one rank, those of one rank after another, or those of all."""
    dataset, long = cause.job.dataset, cause.long
    length, name = causes.pause(dataset, worst, cause.own)
    where, rank = f" ({name})" if name else "", f"rank {dataset.ranks[worst]}"
    if cause.once is not None:
        return f"{rank.capitalize()} paused once, in step {cause.once}, for {ms(length)}{where}."
    at_once = long.sum(axis=0)
    first = f"Host-bound: pauses{where} cost {saved}."
    if long.any(axis=1).sum() >= 2 * np.median(at_once[at_once > 0]):
        first = f"Hosts pause one after the other{where}, which costs {saved}."
    return f"{first} The longest: {rank}, {ms(length)}{where}."
