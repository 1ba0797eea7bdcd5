"""Stragglers: who delays the others, by the what-if that saves most, and why.

For each rank whose host or GPU takes longer than its middle peer's: how much shorter would a step
be if it took as long? The what-if that saves most is the first finding; the others are
weighed on what it leaves, so that two causes add up. Several ranks that are late together save
only together (the ranks of one node among them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
#: late together: worth so many times what the best of them saves alone
_JOINT = 1.5
#: one that is late in some steps only stands out if it takes so many times what any other takes
_OUTSTANDING = 2.0


@dataclass(frozen=True)
class Straggler:
    """Ranks (places) that delay the others by one part, and what their repair saves."""

    places: tuple[int, ...]
    part: Part
    saved: Saved
    #: how much longer than its peers each rank of the job takes, [ranks, steps] (ns)
    excess: Floats
    #: the job's lengths once they, and those found before them, are as fast as their peers
    repaired: Lengths


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
    excess: dict[Part, Floats] = {"host": job.excess("host"), "gpu": job.excess("gpu")}
    least, lengths = limits.STRAGGLER_FRAC * dataset.step_ns, job.base
    left = {
        ((k,), part) for part, more in excess.items() for k in _longest(dataset, more)
        if _stands_out(more, k)
    }  # fmt: skip
    while left:
        tried = [_tried(job, lengths, places, part, excess[part]) for places, part in left]
        best = max(tried, key=lambda one: one.saved.most_ns)
        for places, part in _joint(dataset, excess):
            joint = _tried(job, lengths, places, part, excess[part])
            if joint.saved.most_ns > _JOINT * max(best.saved.most_ns, least / _JOINT):
                best = joint
        if best.saved.most_ns < least:
            return
        yield best
        lengths = best.repaired
        left = {(p, part) for p, part in left if not set(p) & set(best.places) or part != best.part}


def _longest(dataset: Dataset, excess: Floats) -> list[int]:
    """The places that take longest beyond their peers, where that could matter."""
    mean = excess.mean(axis=1)
    enough = np.flatnonzero(mean >= limits.LEAST_FRAC * dataset.step_ns)
    return [int(k) for k in enough[np.argsort(-mean[enough], kind="stable")][:_WEIGHED]]


def _stands_out(excess: Floats, k: int) -> bool:
    """Whether a rank takes longer in nearly every step, or by far more than any other.

    Every host pauses now and then; which one does so most often in a few steps is chance.
    """
    mean = excess.mean(axis=1)
    return bool(_steady(excess[k]) or mean[k] >= _OUTSTANDING * np.delete(mean, k).max())


def _steady(excess: Floats) -> bool:
    return bool((excess > 0.5 * excess.mean()).mean() >= limits.STEADY_FRAC)


def _joint(dataset: Dataset, excess: dict[Part, Floats]) -> list[tuple[tuple[int, ...], Part]]:
    """Ranks that may be late together: those that take about as long as the longest, by part."""
    out: list[tuple[tuple[int, ...], Part]] = []
    for part, more in excess.items():
        mean = more.mean(axis=1)
        floor = max(0.5 * mean.max(), limits.STRAGGLER_FRAC * dataset.step_ns)
        places = [k for k in np.flatnonzero(mean >= floor).tolist() if _steady(more[k])]
        # beyond half of the ranks it is the others that are early
        if 2 <= len(places) <= len(mean) // 2:
            out.append((tuple(places), part))
    return out


def _tried(
    job: WhatIfs, lengths: Lengths, places: Sequence[int], part: Part, excess: Floats
) -> Straggler:
    repaired = job.like_peers(lengths, places, part)
    return Straggler(tuple(places), part, job.saved(repaired, lengths), excess, repaired)


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `straggler.host` and `straggler.gpu`, and late ranks whose repair saves nothing."""
    found = stragglers(dataset)
    out = [_finding(dataset, one) for one in found[:_NAMED]]
    return out or _harmless(dataset)


def _finding(dataset: Dataset, one: Straggler) -> Finding:
    """A rank that delays the others, or several that do so together."""
    ranks, several = [dataset.ranks[k] for k in one.places], len(one.places) > 1
    by_host = one.part == "host" or dataset.on_host
    each = np.maximum(one.saved.each, 0.0)
    reasons = {
        k: (causes.late_host if by_host else causes.busy_gpu)(dataset, k, one.excess[k])
        for k in one.places[:8]
    }
    why: dict[str, list[int]] = {}
    for k, reason in reasons.items():
        why.setdefault(reason.why, []).append(dataset.ranks[k])
    clauses = [f"Cause{_on(on, several and len(why) > 1)}: {text}." for text, on in why.items()]
    node = _node(dataset, one.places) if several else ""
    who = f"All profiled ranks of {named(node)}" if node else f"{rank_list(ranks, 4).capitalize()}"
    who += " together" if several and not node else ""
    verb = "delay" if several else "delays"
    parts = [f"{who} {verb} the other ranks by {_of_each_step(dataset, one.saved.window_ns)}."]
    # work that was queued before the window covers it so far
    hidden = one.saved.window_ns < limits.LEAST_FRAC * dataset.step_ns
    if hidden:
        later = ms(one.saved.most_ns)
        parts = [
            f"{who} will delay the other ranks by {later} per step; queued work covers it so far."
        ]
    parts += clauses
    hit = each > 0.1 * each.max(initial=0.0)
    if hit.any() and not hit.all():
        some = ms(float(each[hit].mean()))
        parts.append(f"It happens in {hit.sum()} of {len(hit)} steady-state steps, {some} each.")
    if node:
        parts.append(f"They are {rank_list(ranks, 4)}.")
    first = reasons[one.places[0]]
    own = [row for k in one.places[:8] for row in _excess_row(dataset, one, k)]
    persistent = _steady(one.excess[one.places[0]])
    return finding(
        dataset,
        "straggler.host" if by_host else "straggler.gpu",
        rank=None if several else ranks[0],
        ranks=ranks,
        cost=each if not hidden else np.full(len(each), one.saved.most_ns),
        saved=one.saved,
        floor_ns=0.1 * float(each.max(initial=0.0)),
        uncertainty_ns=one.saved.uncertainty_ns,
        confidence=0.9 if persistent else 0.75,
        summary=" ".join(parts),
        evidence=[
            *own,
            *_latest(dataset, ranks[0]),
            *(r for k in one.places[:8] for r in reasons[k].evidence),
        ][:32],
        advice="; ".join(dict.fromkeys(reason.advice for reason in reasons.values()))
        if several
        else first.advice,
        follow_up=_closer(dataset, one.places[0]) if by_host else "",
    )


def _on(ranks: Sequence[int], apart: bool) -> str:
    return f" on {rank_list(ranks, 4)}" if apart else ""


def _excess_row(dataset: Dataset, one: Straggler, k: int) -> Evidence:
    """How much longer than its peers a rank takes."""
    more, rank = float(one.excess[k].mean()), dataset.ranks[k]
    what = "host" if one.part == "host" else "GPU"
    row = {
        "rank": rank,
        "steps": list(dataset.steady_steps),
        "excess_ns_per_step": round(more),
        "what": f"its {what} takes {ms(more)} per step more than its peers'",
    }
    return [row]


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
    """The rank that is last by most, or whose host is slowest, though its repair saves nothing."""
    job = what_ifs(dataset)
    if job is None or len(dataset.ranks) < 2:
        return []
    more = job.excess("host")
    k = int(np.argmax(more.mean(axis=1)))
    slower = float(more[k].mean())
    if slower < limits.WARNING_FRAC * dataset.step_ns or not _steady(more[k]):
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
