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
from clusterprof.analysis.findings.finding import Code, Repair, Tier, Words
from clusterprof.analysis.findings.follow_up import capture, operators
from clusterprof.analysis.findings.pace import another_pace, job_of, of_saving
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.by_report import STAMP_NS
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints
from clusterprof.analysis.model.graph import NEVER
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.timeline import COMPUTE
from clusterprof.analysis.model.what_if import Saved, WhatIfs
from clusterprof.words import counted, duration, ms
from clusterprof.words import ranks as rank_list

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

#: a wait inside the step is worth an information from here on (it saves more where hosts are
#: slower): at 2% the `.item()` of pairs/both and pairs/item-late-host (1.1 and 0.7%) is not named
_SYNC_FRAC = 0.005


@dataclass(frozen=True)
class _Cause:
    """What is taken out of the job's lengths. `without` makes the what-if of any lengths."""

    job: WhatIfs
    code: str
    #: the share of the step from which on it is a finding
    least: float
    #: the hosts' own time that is its, [host moments] (ns)
    own: Ints
    #: host moments whose wait is cut, or none
    waits: Ints
    #: whether GPUs' unexplained delays are left out
    explained: bool = False
    #: what stops a host comes before what it waits for, and that before launches
    turn: int = 0

    def without(self, lengths: Lengths) -> Lengths:
        woken = lengths.woken.copy()
        woken[self.waits] = NEVER
        explained = self.explained or lengths.explained
        return replace(lengths, own=lengths.own - self.own, woken=woken, explained=explained)

    @property
    def large(self) -> bool:
        """Whether it is long enough to save anything: no step saves more than all lose in it."""
        job = self.job.job
        lost = int(self.own.sum()) + (int(job.unexplained.sum()) if self.explained else 0)
        least = self.least * self.job.dataset.step_ns * len(job.steps)
        return bool(len(self.waits)) or lost >= least

    @cached_property
    def spent(self) -> Floats:
        """What each rank's host spends on it per step (ns)."""
        job, n, at = self.job.job, len(self.job.dataset.ranks), self.waits
        waited = job.host_at[at] - job.host_at[at - 1]
        spent = np.bincount(job.host_rank, self.own, n)
        return (spent + np.bincount(job.host_rank[at], waited, n)) / len(job.steps)

    @cached_property
    def long(self) -> Bools:
        """Whose host is in it for long in which step: what makes up most of it, [ranks, steps]."""
        job, (n, steps) = self.job.job, (len(self.job.dataset.ranks), len(self.job.job.steps))
        key = job.host_rank * np.int64(steps) + self.job.step_of_host
        spent = np.bincount(key, self.own, n * steps).reshape(n, steps)
        longest = np.sort(spent, axis=None)[::-1]
        most = np.searchsorted(np.cumsum(longest), limits.HALF * spent.sum())
        return np.asarray(spent >= limits.HALF * max(longest[most], 1.0))

    @property
    def once(self) -> int | None:
        """The step in which one rank of several is in it for long; None where more do so often."""
        if self.code != "host.busy" or self.long.sum() != 1 or len(self.long) < 2:
            return None
        return int(self.job.job.steps[self.long.any(axis=0).argmax()])

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks whose hosts spend most in it: the same in each step, or another one."""
        chosen = self.spent >= limits.HALF * self.spent.max()
        if self.own.any():
            chosen |= self.long.any(axis=1)
        return [self.job.dataset.ranks[k] for k in np.flatnonzero(chosen)]

    def idle(self) -> Floats:
        """What each rank's GPU idles per step (ns) while its host is in it."""
        job, n = self.job.job, len(self.job.dataset.ranks)
        begin, end = job.host_spans
        # a pause of the job without the profiler may be longer than what was recorded of it
        taken = np.minimum(self.own / np.maximum(job.lengths.own, 1), 1)
        mine = np.flatnonzero(self.own > 0)
        of, begin, end = job.host_rank[mine], begin[mine], end[mine]
        free = end - begin - _busy(self.job.dataset, of, begin, end)
        idle = np.bincount(of, free * taken[mine], n)
        if self.explained:
            idle = idle + np.bincount(job.rank, job.unexplained, n)
        return np.asarray(idle / len(job.steps))


def repairs(dataset: Dataset, lengths: Lengths, *_: object) -> list[Repair]:
    """Propose `host.gil`, `host.gc`, `input.stall`, `host.sync`, `host.launch_bound`, `host.busy`,
    `gpu.idle`."""
    codes = {code.code: code for code in CODES}
    return [
        Repair(
            codes[cause.code],
            tuple(cause.ranks),
            cause.without,
            partial(_words, cause),
            cause.least,
            turn=cause.turn,
        )
        for cause in _causes(dataset, job_of(dataset), lengths)
        if cause.large
    ]


def _causes(dataset: Dataset, job: WhatIfs, lengths: Lengths) -> Iterator[_Cause]:
    """All that may cost time, in order. Each part of a host's own time belongs to one cause."""
    replay, none = job.job, np.zeros(0, dtype=np.int64)
    nothing = np.zeros_like(replay.lengths.own)
    share = np.divide(lengths.own, np.maximum(replay.lengths.own, 1))
    parts = job.named
    rest = replay.lengths.own - sum(parts.values())
    for code, part in parts.items():
        if part.any():
            yield _Cause(job, code, limits.LEAST_FRAC, (part * share).astype(np.int64), none)
    sync = _Cause(job, "host.sync", _SYNC_FRAC, nothing, _value_waits(dataset, job), turn=1)
    if dataset.on_host:
        yield sync
        return
    usual = np.zeros(len(dataset.ranks))
    hosts = np.split(rest, replay.first_of_host[1:])
    for k, here in zip(replay.ranks.tolist(), hosts, strict=True):
        # nothing is left of a host that is always in named calls
        if (here > 0).any():
            usual[k] = np.median(here[here > 0])
    # the rank's middle launch is a small part of a pause: without it simulated hosts that are slow
    # in each launch, of up to two milliseconds, are said to pause
    long = rest > np.maximum(limits.PAUSE_NS, usual[replay.host_rank] / limits.LAUNCH_FRAC)
    more = (rest * share).astype(np.int64)
    yield _Cause(job, "host.busy", limits.LAUNCH_FRAC, np.where(long, more, 0), none)
    yield sync
    yield _Cause(
        job, "host.launch_bound", limits.LAUNCH_FRAC, np.where(long, 0, more), none, turn=2
    )
    yield _Cause(job, "gpu.idle", limits.LAUNCH_FRAC, nothing, none, explained=True, turn=3)


def _value_waits(dataset: Dataset, job: WhatIfs) -> Ints:
    """The host moments at which a wait for a small copy to the host ends."""
    replay, a, axis = job.job, dataset.activities, dataset.axis
    values = a.to_host & (a.size < limits.LARGE_BYTES)
    stop = np.sort(axis.of(a.rank[values], a.stop[values]))
    ends = np.setdiff1d(np.flatnonzero(replay.host_root), replay.first)
    end = axis.of(replay.host_rank[ends], replay.host_at[ends])
    last = np.r_[stop, NEVER][np.searchsorted(stop, end + STAMP_NS) - 1]
    return np.asarray(ends[last >= end - limits.REACTS_NS])


def _words(cause: _Cause, saved: Saved) -> Words:
    dataset, ranks, idle = cause.job.dataset, cause.ranks, cause.idle()
    worst = int(np.argmax(cause.spent if cause.spent.any() else idle))
    describe = _paused if cause.code == "host.busy" else _summary
    text, most = describe(cause, worst, of_saving(dataset, saved)), int(np.argmax(idle))
    if cause.own.any() and abs(idle[most] - saved.ns) > limits.LAUNCH_FRAC * saved.ns:
        rank = dataset.ranks[most]
        window = ", in the window" if another_pace(dataset) else ""
        text += f" GPUs idle up to {ms(float(idle[most]))} per step in it (rank {rank}{window})."
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
        only=cause.once,
    )


def _busy(dataset: Dataset, of: Ints, begin: Ints, end: Ints) -> Ints:
    """How much of each span (`of` a rank's place, in order) anything runs on its device (ns)."""
    a, axis, out = dataset.activities, dataset.axis, np.zeros_like(begin)
    for k, until in a.lines.blocks():
        here, rows = slice(*np.searchsorted(of, (k, until))), a.lines.rows(k, until)
        if here.start < here.stop:
            ran = union(*(axis.of(a.rank[rows], each[rows]) for each in (a.start, a.stop)))
            out[here] = ran.within(*(axis.of(of[here], each[here]) for each in (begin, end)))
    return out


def _summary(cause: _Cause, worst: int, saved: str) -> str:
    """A cause other than pauses in words; `worst` is the place of who spends most in it."""
    dataset, replay, ranks = cause.job.dataset, cause.job.job, cause.ranks
    each = len(replay.steps) * max(len(replay.ranks), 1)
    few = len(ranks) <= limits.HALF * len(dataset.ranks)
    who = f"The hosts of {rank_list(ranks, limits.FEW)}" if few else "Hosts"
    theirs = np.isin(replay.host_rank[cause.waits], [dataset.place[r] for r in ranks])
    often = _often(int(theirs.sum()) / len(ranks), len(replay.steps))
    kernels = replay.lengths.run[replay.kind == COMPUTE]
    typical = duration(float(np.median(kernels)) if len(kernels) else 0.0)
    idle = ms(float(np.nanmean(dataset.account("idle_ns"))))
    return {
        "host.gil": f"Hosts wait for Python's GIL: {saved} (worst: rank {dataset.ranks[worst]}).",
        "host.gc": f"Python's garbage collector, on one rank after another, costs {saved}.",
        "input.stall": f"{who} fetch the batch while their GPUs idle: {saved}.",
        "host.sync": f"Hosts wait for their GPU {often}, for a value that they read: {saved}.",
        "host.launch_bound": f"Launch-bound: hosts launch kernels too slowly, {saved}. Each "
        f"launches {len(kernels) // each} kernels per step, {typical} in the median.",
        "gpu.idle": f"GPUs idle although their next kernel was launched: {saved}. The cause "
        "cannot be determined: what they wait for is not in the reports. They idle "
        f"{idle} per step in all.",
    }[cause.code]


def _often(times: float, steps: int) -> str:
    """How often something is done, `times` in so many steps: `once per step`, `once in 4 steps`."""
    per_step = round(times / steps)
    count = per_step or max(round(times), 1)
    often = "once" if count == 1 else counted(count, "time")
    return f"{often} per step" if per_step else f"{often} in {counted(steps, 'step')}"


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
