"""Stragglers: who delays the others, by the what-if that saves most, and why.

For each rank whose host or GPU takes longer than its middle peer's: how much shorter would a step
be if it took as long? The what-if that saves most is the first finding; the others are
weighed on what it leaves, so that two causes add up. Several ranks that are late together save
only together (the ranks of one node among them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from clusterprof.agent.contracts.words import ms, percent
from clusterprof.agent.contracts.words import ranks as rank_list
from clusterprof.analysis.findings import causes
from clusterprof.analysis.findings.finding import Code, Evidence, capture, finding, named, operators
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, Floats
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Part, Saved, WhatIfs, what_ifs
from clusterprof.results import Finding

#: place among the modules of findings (`registry`)
ORDER = 10

CODES = (
    Code(
        "straggler.host",
        "A rank's host delays the other ranks",
        "One rank (or several together) launches its kernels later than its peers, so the others "
        "wait for it in collectives. The cost is what the job would save per step if that rank "
        "were as fast as the others.",
        "Tracing slows every host a little: a rank that is late only inside the window may be on "
        "time without the profiler. Where all hosts are equally slow, the rank that resumed last "
        "after the profiler's start stays last without being slower.",
        "Look at what that host does before it launches kernels (data loading, logging, a "
        "checkpoint, a busy core, swapping) and move it off the training thread.",
    ),
    Code(
        "straggler.gpu",
        "A rank's GPU delays the other ranks",
        "One rank's kernels or copies take longer than those of its peers, or it runs more of "
        "them, so the others wait for it in collectives.",
        "Batches of different length look alike: more work is a matter of balance, the same work "
        "done slower a matter of that GPU. Kernels that ran beside a collective are ignored.",
        "More work: balance samples or layers between the ranks. Slower: check clocks, "
        "temperature, throttling and other processes on that GPU (nvidia-smi -q -d "
        "PERFORMANCE,CLOCK).",
    ),
)


#: so many ranks are weighed, of those that take longest in each part
_WEIGHED = 6
#: and so many stragglers are named at most
_NAMED = 8
#: late together: worth so many times what each of them saves alone
_JOINT = 1.5
#: a rank is named where chance makes one of equals so late in one job of a hundred
_CHANCE = 0.01
#: a rank that is late in a part of the window is late in so many of its steps on end, at least
_REGIME_STEPS = 4

Member = tuple[int, Part]
Excess = dict[Part, Floats]


@dataclass(frozen=True)
class Straggler:
    """Ranks that delay the others, each by its host or its GPU, and what their repair saves."""

    #: place and part, the one first that takes longest
    members: tuple[Member, ...]
    saved: Saved
    #: how much longer than its peers each rank of the job takes, [ranks, steps] (ns), by part
    excess: Excess
    #: the job's lengths once they, and those found before them, are as fast as their peers
    repaired: Lengths

    @property
    def places(self) -> list[int]:
        """The ranks' places."""
        return sorted({k for k, _ in self.members})


def stragglers(dataset: Dataset) -> list[Straggler]:
    """All stragglers, the one first that saves most; each on what those before it leave."""
    return dataset.cached("stragglers", lambda: list(_stragglers(dataset)))


def repaired(dataset: Dataset) -> Lengths | None:
    """The job's lengths without its stragglers: what all other findings are weighed on."""
    job, found = what_ifs(dataset), stragglers(dataset)
    return None if job is None else found[-1].repaired if found else job.base


def _stragglers(dataset: Dataset) -> Iterator[Straggler]:
    job = what_ifs(dataset)
    if job is None or len(dataset.ranks) < 2 or not dataset.step_ns:
        return
    excess: Excess = {"host": job.excess("host"), "gpu": job.excess("gpu")}
    least, lengths, named = limits.STRAGGLER_FRAC * dataset.step_ns, job.base, set[Member]()
    while len(named) < len(dataset.ranks):
        tried = [
            _tried(job, lengths, members, excess)
            for members in _suspects(dataset, excess, named)
            if all(_stands_out(job, excess, one, {*members, *named}) for one in members)
        ]
        alone = {one.members[0]: one for one in tried if len(one.members) == 1}
        tried = [one for one in tried if len(one.members) == 1 or _more(one, alone, least)]
        best = max(tried, key=lambda one: one.saved.most_ns, default=None)
        if best is None or best.saved.most_ns < least:
            return
        yield best
        lengths = best.repaired
        named |= set(best.members)


def _more(group: Straggler, alone: dict[Member, Straggler], least: float) -> bool:
    """Whether ranks save clearly more if all of them are repaired than one by one."""
    each = [alone[one].saved.most_ns for one in group.members if one in alone]
    return group.saved.most_ns > max(_JOINT * sum(max(ns, 0.0) for ns in each), least)


def _suspects(dataset: Dataset, excess: Excess, named: set[Member]) -> Iterator[tuple[Member, ...]]:
    """Who may be a straggler: each of those that take longest, and all of them together.

    Together: those that take about as long as the longest, by host, by GPU, and by either.
    """
    both: list[Member] = []
    for part, more in excess.items():
        mean = more.mean(axis=1)
        order = [(int(k), part) for k in np.argsort(-mean, kind="stable")]
        order = [one for one in order if one not in named]
        enough = [one for one in order if mean[one[0]] >= limits.LEAST_FRAC * dataset.step_ns]
        yield from ((one,) for one in enough[:_WEIGHED])
        floor = max(
            0.5 * mean[order[0][0]] if order else 0, limits.STRAGGLER_FRAC * dataset.step_ns
        )
        group = [one for one in enough if mean[one[0]] >= floor]
        # beyond half of the ranks it is the others that are early
        if len(group) <= len(mean) // 2:
            both += group
            if len(group) > 1:
                yield tuple(group)
    if len({part for _, part in both}) > 1:
        yield tuple(sorted(both, key=lambda one: -excess[one[1]][one[0]].mean()))


def _stands_out(job: WhatIfs, excess: Excess, one: Member, apart: set[Member]) -> bool:
    """Whether one takes longer than all of its peers but those in `apart`, beyond chance.

    Every host pauses now and then, and which one does so most often in a few steps is chance. So
    by how much it exceeds the next slowest peer in each step must be greater than it varies from
    step to step (Student's t), over the window, or over its beginning or end: a rank may be late in
    a part of it. A pause of half a step that made its step so long counts however rare it is.
    """
    k, part = one
    others = np.setdiff1d(job.peers.others(k), [j for j, other in apart if other == part])
    next_slowest = excess[part][others].max(axis=0, initial=0.0)
    margin = np.maximum(excess[part][k] - next_slowest, 0.0)
    usual = float(np.median(job.dataset.durations))
    longer = job.dataset.durations - usual
    if (margin >= np.maximum(limits.PAUSE_PEAK_FRAC * usual, 0.5 * longer)).any():
        return True
    n = len(margin)
    some = range(_REGIME_STEPS, n)
    runs = [run for count in some for run in (margin[:count], margin[-count:])]
    return _beyond(margin, _CHANCE) or any(_beyond(run, _CHANCE / len(runs)) for run in runs)


def _beyond(values: Floats, chance: float) -> bool:
    """Whether a mean so far above zero has less than this chance, by Student's t.

    As a normal deviate (Wallace, Bounds on normal approximations to Student's, 1959).
    """
    n, mean = len(values) - 1, float(values.mean())
    if n < 1 or mean <= 0:
        return False
    spread = max(float(values.std(ddof=1)), 1e-6 * mean) / math.sqrt(len(values))
    deviate = (8 * n + 1) / (8 * n + 3) * math.sqrt(n * math.log1p((mean / spread) ** 2 / n))
    return deviate > NormalDist().inv_cdf(1 - chance)


def _tried(job: WhatIfs, lengths: Lengths, members: Sequence[Member], excess: Excess) -> Straggler:
    fixed = lengths
    for part in excess:
        if places := [k for k, other in members if other == part]:
            fixed = job.like_peers(fixed, places, part)
    ranks = tuple(sorted({job.dataset.ranks[k] for k, _ in members}))
    fixed = replace(fixed, repaired=(*lengths.repaired, (_code(job.dataset, members), ranks)))
    return Straggler(tuple(members), job.saved(fixed, lengths), excess, fixed)


def _code(dataset: Dataset, members: Sequence[Member]) -> str:
    by_host = members[0][1] == "host" or dataset.on_host
    return "straggler.host" if by_host else "straggler.gpu"


def _steady(excess: Floats) -> bool:
    return bool((excess > 0.5 * excess.mean()).mean() >= limits.STEADY_FRAC)


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `straggler.host` and `straggler.gpu`, and late ranks whose repair saves nothing."""
    found = stragglers(dataset)
    out = [_finding(dataset, one) for one in found[:_NAMED]]
    return out or _harmless(dataset)


def _finding(dataset: Dataset, one: Straggler) -> Finding:
    """A rank that delays the others, or several that do so together."""
    ranks, several = [dataset.ranks[k] for k in one.places], len(one.places) > 1
    by_host = one.members[0][1] == "host" or dataset.on_host
    each = np.maximum(one.saved.each, 0.0)
    members = one.members[:_WEIGHED]
    reasons = [
        (causes.late_host if part == "host" or dataset.on_host else causes.busy_gpu)(
            dataset, k, one.excess[part][k]
        )
        for k, part in members
    ]
    why: dict[str, list[int]] = {}
    for (k, _), reason in zip(members, reasons, strict=True):
        why.setdefault(reason.why, []).append(dataset.ranks[k])
    apart = several and len(why) > 1
    node = _node(dataset, one.places) if several else ""
    who = f"All profiled ranks of {named(node)}" if node else f"{rank_list(ranks, 4).capitalize()}"
    who += " together" if several and not node else ""
    # work that was queued before the window covers it so far
    hidden = one.saved.window_ns < limits.LEAST_FRAC * dataset.step_ns
    if hidden:
        by = f"{ms(one.saved.most_ns)} per step; queued work covers it so far"
        verb = "will delay"
    else:
        by, verb = _of_each_step(dataset, one.saved.window_ns), "delay" if several else "delays"
    parts = [
        f"{who} {verb} the other ranks by {by}.",
        *(f"Cause{_on(on, apart)}: {text}." for text, on in why.items()),
        *_when(dataset, each),
    ]
    if node:
        parts.append(f"They are {rank_list(ranks, 4)}.")
    k, part = one.members[0]
    return finding(
        dataset,
        _code(dataset, one.members),
        rank=None if several else ranks[0],
        ranks=ranks,
        cost=each if not hidden else np.full(len(each), one.saved.most_ns),
        saved=one.saved,
        floor_ns=0.1 * float(each.max(initial=0.0)),
        uncertainty_ns=one.saved.uncertainty_ns,
        confidence=0.9 if _steady(one.excess[part][k]) else 0.75,
        summary=" ".join(parts),
        evidence=[
            *(_excess_row(dataset, one, member) for member in members),
            *_latest(dataset, dataset.ranks[k]),
            *(row for reason in reasons for row in reason.evidence),
        ][:32],
        advice="; ".join(dict.fromkeys(reason.advice for reason in reasons)),
        follow_up=_closer(dataset, k) if by_host else "",
    )


def _when(dataset: Dataset, each: Floats) -> list[str]:
    """In which steps it happens, where not in all: at one stretch, or how many."""
    hit = np.flatnonzero(each > 0.1 * each.max(initial=0.0))
    if not 0 < len(hit) < len(each):
        return []
    first, last = dataset.steady_steps[hit[0]], dataset.steady_steps[hit[-1]]
    stretch = len(hit) >= _REGIME_STEPS and hit[-1] - hit[0] + 1 == len(hit)
    where = f" ({first} to {last})" if stretch else ""
    often = f"{len(hit)} of {len(each)} steady-state steps{where}"
    return [f"It happens in {often}, {ms(float(each[hit].mean()))} each."]


def _on(ranks: Sequence[int], apart: bool) -> str:
    return f" on {rank_list(ranks, 4)}" if apart else ""


def _excess_row(dataset: Dataset, one: Straggler, member: Member) -> dict[str, Any]:
    """How much longer than its peers a rank takes."""
    k, part = member
    more = float(one.excess[part][k].mean())
    what = "host" if part == "host" else "GPU"
    return {
        "rank": dataset.ranks[k],
        "steps": list(dataset.steady_steps),
        "excess_ns_per_step": round(more),
        "what": f"its {what} takes {ms(more)} per step more than its peers'",
    }


def _node(dataset: Dataset, places: Sequence[int]) -> str:
    """The host whose ranks with a report are just these, where there are others; else empty."""
    hosts = [t.info.host for t in dataset.tables]
    of = {hosts[k] for k in places}
    if len(of) != 1 or len(set(hosts)) < 2:
        return ""
    (name,) = of
    return name if hosts.count(name) == len(places) else ""


def _of_each_step(dataset: Dataset, ns: float) -> str:
    return f"{ms(ns)} of each {ms(dataset.step_ns)} step ({percent(ns / dataset.step_ns)})"


def _harmless(dataset: Dataset) -> list[Finding]:
    """The rank whose host is much slower than its peers', though its repair saves nothing."""
    job = what_ifs(dataset)
    if job is None or len(dataset.ranks) < 2:
        return []
    more = job.excess("host")
    k = int(np.argmax(more.mean(axis=1)))
    slower = float(more[k].mean())
    clear = slower >= limits.CRITICAL_FRAC * dataset.step_ns
    if not clear or not _stands_out(job, {"host": more}, (k, "host"), {(k, "host")}):
        return []
    reason = causes.slow_host(dataset, k)
    rank = dataset.ranks[k]
    cause = f" Cause: {reason.why}." if reason.why else ""
    saved = job.saved(job.like_peers(job.base, [k], "host"))
    row = {
        "rank": rank,
        "overlapped_ns_per_step": round(slower),
        "what": f"its host takes {ms(slower)} per step more than its peers', all of it overlapped",
    }
    return [
        finding(
            dataset, "straggler.host", rank=rank, ranks=[rank],
            cost=np.maximum(saved.each, 0.0), saved=saved, at_most="info", confidence=0.6,
            summary=f"Rank {rank}'s host takes {ms(slower)} longer per step than its peers', but "
            f"delays no other rank.{cause}",
            evidence=[row, *_latest(dataset, rank), *reason.evidence], advice=reason.advice,
        )
    ]  # fmt: skip


def overlapped(found: Finding) -> bool:
    """Whether a finding is a straggler whose lateness the other ranks' compute covers."""
    return any("overlapped_ns_per_step" in row for row in found["evidence"])


def _closer(dataset: Dataset, k: int) -> str:
    """The command that profiles this rank's host in detail, with one that is on time."""
    options = (*operators(dataset), "--cpu-sampling")
    return capture(dataset, [dataset.ranks[k], dataset.ranks[0 if k else 1]], *options)


def _latest(dataset: Dataset, rank: int) -> Evidence:
    """The collective of each steady-state step at which the rank was latest."""
    c = dataset.collectives
    out = []
    for step in dataset.steady_steps[:8]:
        mine = np.flatnonzero(
            (c.rank == rank) & (c.last_rank == rank) & (c.step == step) & c.synchronising
        )
        if len(mine):
            worst = mine[np.argmax(c.lateness[mine])]
            out.append(
                {
                    "rank": rank,
                    "step": int(step),
                    "time_ns": int(c.aligned_start[worst]),
                    "operation": str(c.operation[worst]),
                    "communicator": str(c.communicator[worst]),
                    "late_ns": int(c.lateness[worst]),
                    "what": f"last at {c.operation[worst]}, {ms(c.lateness[worst])} after the "
                    "second-to-last",
                }
            )
    return out
