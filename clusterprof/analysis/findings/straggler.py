"""Stragglers: a finding for each rank that delays the others (`straggler_cost`), with its cause.

A rank is named where its cost is more than chance, by its host or its GPU; ranks that are late
together are one finding. A slow host that queued work still covers, or one that only carries an
old lag, is distinguished from one that costs the others time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clusterprof.agent.contracts.words import ms, percent
from clusterprof.agent.contracts.words import ranks as rank_list
from clusterprof.analysis.findings import causes, host_bound, joint_stragglers, savings
from clusterprof.analysis.findings.causes import Reason
from clusterprof.analysis.findings.finding import Code, Evidence, capture, finding, named, operators
from clusterprof.analysis.findings.straggler_cost import (
    StragglerCost,
    launches,
    steady,
    straggler_cost,
)
from clusterprof.analysis.groups.peers import median_of_others
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, Floats
from clusterprof.results import Finding, Severity

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

#: what to do where a late host is no slower than the others
_ALL_HOSTS = "the hosts of all ranks are slow: look at what they have in common first"


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `straggler.host` and `straggler.gpu`, one finding per rank that delays the others."""
    return _stragglers(dataset, np.inf)


def with_carried_lag(dataset: Dataset, found: Sequence[Finding]) -> list[Finding]:
    """`found` with the stragglers looked at again, now that the cost of all hosts is known."""
    own = {code.code for code in CODES}
    hosts = {code.code for code in host_bound.CODES}
    paced = max((f["cost_ns_per_step"] for f in found if f["code"] in hosts), default=0)
    return [*_stragglers(dataset, float(paced)), *(f for f in found if f["code"] not in own)]


def _stragglers(dataset: Dataset, paced_ns: float) -> list[Finding]:
    """The findings; `paced_ns` is what the hosts of all ranks cost a step by what they do alike."""
    if len(dataset.ranks) < 2 or not dataset.step_ns:
        return []
    alone = straggler_cost(dataset)
    of = _carried_lag(dataset, alone, paced_ns)
    carried = (of.cost != alone.cost).any(axis=1)
    least = limits.PIPELINE_STRAGGLER_FRAC if dataset.pipelined else limits.STRAGGLER_FRAC
    out = []
    for k in range(len(dataset.ranks)):
        share = float(of.cost[k].mean()) / dataset.step_ns
        peak = float(of.cost[k].max(initial=0.0)) / dataset.step_ns
        high = peak >= max(limits.PEAK_FRAC, 2 * least) and share >= limits.LEAST_FRAC
        if (share >= least or high) and (carried[k] or not _by_chance(dataset, of, k)):
            out.append(_straggler(dataset, of, k, float(alone.cost[k].mean())))
    excess = of.idle + of.work
    joint = joint_stragglers.late(dataset, excess, alone.cost, of.pace, of.by_host, least)
    if joint is not None:
        named_together = {dataset.ranks[k] for k in joint.places}
        return [
            _joint(dataset, replace(of, cost=excess), joint),
            *(f for f in out if f["rank"] not in named_together),
        ]
    quiet = _covered(dataset, of) or _waited_for(dataset, of, least)
    return out or [*quiet, *_overlapped(dataset, of, {f["rank"] for f in quiet})]


def _carried_lag(dataset: Dataset, of: StragglerCost, paced_ns: float) -> StragglerCost:
    """Have a host that the others wait for in nearly every step cost that wait.

    Equally slow hosts keep the order in which they resumed, and fixing the last one alone saves
    little, which the finding states. It is named all the same where the others wait clearly longer
    for it than what all hosts do alike costs (`paced_ns`).
    """
    if dataset.pipelined:
        return of
    wait, saved = of.wait_caused.mean(axis=1), of.cost.mean(axis=1)
    least = max(limits.BEHIND_TIMES * paced_ns, limits.BEHIND_FRAC * dataset.step_ns)
    carried = of.by_host & steady(of.wait_caused) & (of.profiler_overhead == 0) & (wait > least)
    carried &= saved < limits.SAVED_FRAC * wait
    return replace(of, cost=np.where(carried[:, None], of.wait_caused, of.cost))


def _straggler(dataset: Dataset, of: StragglerCost, k: int, saved: float) -> Finding:
    """A rank that delays the others; `saved` is what fixing it alone would save a step (ns)."""
    cost, rank, by_host = of.cost[k], dataset.ranks[k], bool(of.by_host[k])
    idle, work = of.idle[k].sum(), of.work[k].sum()
    per_step, floor = float(cost.mean()), 0.1 * float(cost.max())
    hit = cost > floor
    error = float(of.uncertainty[k].max(initial=0.0))
    confidence = 0.6 + 0.3 * max(idle, work) / max(idle + work, 1.0)
    confidence *= 1.0 if per_step > 3 * error else 0.7
    confidence = min(0.98, confidence + 0.05 * float(hit.mean()))
    reason = (causes.late_host if by_host else causes.busy_gpu)(dataset, of, k)
    compared = _compared(dataset, of, k) if by_host else []
    not_slower = bool(compared) and _not_slower(dataset, compared)
    carried = bool(compared) and (not_slower or saved < limits.SAVED_FRAC * per_step)
    parts = [f"Rank {rank} delays the other ranks by {_of_each_step(dataset, per_step)}."]
    if carried:
        # it resumed last, or an old wait left it behind: not its own work now
        confidence *= limits.INHERITED
        won = ms(saved) if saved >= 0.01 * dataset.step_ns else "nothing"
        parts.append(
            "Its own work is not slower: it was already behind when the window began. "
            f"Fixing rank {rank} alone saves {won}."
            if not_slower
            else f"Its own work is hardly slower: fixing rank {rank} alone saves {won}."
        )
        reason = replace(reason, advice=_ALL_HOSTS)
    parts.append(f"Cause: {reason.why}.")
    if not hit.all():
        each = ms(float(cost[hit].mean()))
        parts.append(f"It happens in {hit.sum()} of {len(hit)} steady-state steps, {each} each.")
    return finding(
        dataset,
        "straggler.host" if by_host or dataset.on_host else "straggler.gpu",
        rank=rank,
        ranks=[rank],
        cost=cost,
        floor_ns=floor,
        at_most="warning" if carried else "critical",
        uncertainty_ns=error,
        confidence=confidence,
        summary=" ".join(parts),
        evidence=[
            *_on_path(dataset, of, rank),
            *_late_in_all(of, k, rank),
            *_latest(dataset, rank),
            *compared,
            *reason.evidence,
        ],
        advice=reason.advice,
        follow_up=_closer(dataset, k) if by_host else "",
    )


def _joint(dataset: Dataset, of: StragglerCost, joint: joint_stragglers.Joint) -> Finding:
    """Ranks that are late together; `of` has each one's own excess for its cost."""
    ranks = [dataset.ranks[k] for k in joint.places]
    reasons: dict[str, list[int]] = {}
    advice: dict[str, None] = {}
    evidence: Evidence = []
    for k, by_host in zip(joint.places.tolist(), joint.by_host, strict=True):
        rank, own = dataset.ranks[k], float(of.cost[k].mean())
        reason = (causes.late_host if by_host else causes.busy_gpu)(dataset, of, k)
        reasons.setdefault(reason.why, []).append(rank)
        advice.setdefault(reason.advice)
        what = f"rank {rank} takes {ms(own)} per step more than its peers: {reason.why}"
        evidence += [{"rank": rank, "excess_ns_per_step": round(own), "what": what}]
        evidence += reason.evidence[:2]
    per_step = float(joint.cost.mean())
    node = joint_stragglers.node(dataset, joint.places.tolist())
    who = f"All profiled ranks of {named(node)}" if node else f"{_some(ranks)} together"
    which = f" They are {_some(ranks).lower()}." if node else ""
    each = [
        f"Cause on {_some(on).lower() if len(reasons) > 1 else 'each'}: {why}."
        for why, on in reasons.items()
    ]
    return finding(
        dataset,
        "straggler.host" if dataset.on_host or joint.by_host.mean() >= 0.5 else "straggler.gpu",
        ranks=ranks,
        cost=joint.cost,
        floor_ns=0.1 * float(joint.cost.max()),
        confidence=0.8,
        summary=f"{who} delay the other ranks by {_of_each_step(dataset, per_step)}. "
        f"{' '.join(each)}{which}",
        evidence=evidence[:32],
        advice="; ".join(list(advice)[:2]),
        follow_up=_closer(dataset, int(joint.places[0])),
    )


def _some(ranks: Sequence[int]) -> str:
    return rank_list(ranks, 4).capitalize()


def _of_each_step(dataset: Dataset, ns: float) -> str:
    return f"{ms(ns)} of each {ms(dataset.step_ns)} step ({percent(ns / dataset.step_ns)})"


def _quiet(
    dataset: Dataset,
    k: int,
    cost: Floats,
    summary: str,
    reason: Reason,
    confidence: float = 0.6,
    at_most: Severity = "info",
    follow_up: str = "",
) -> Finding:
    """A slow or late host that delays no other rank, as far as it was profiled."""
    rank = dataset.ranks[k]
    return finding(
        dataset, "straggler.host", rank=rank, ranks=[rank], cost=cost, at_most=at_most,
        confidence=confidence, summary=summary, evidence=reason.evidence, advice=reason.advice,
        follow_up=follow_up,
    )  # fmt: skip


def _waited_for(dataset: Dataset, of: StragglerCost, least: float) -> list[Finding]:
    """The rank that the others wait for longest, where fixing it would save hardly anything."""
    wait = of.wait_caused.mean(axis=1)
    k = int(np.argmax(wait))
    if wait[k] < least * dataset.step_ns or of.profiler_overhead[k]:
        return []
    own = savings.mean(of.pace)
    others = np.delete(own, k)
    others = others[~np.isnan(others)]
    if np.isnan(own[k]) or not len(others) or _by_chance(dataset, of, k):
        return []
    rank = dataset.ranks[k]
    summary = (
        f"The other ranks wait {ms(float(wait[k]))} of each step for rank {rank}, but fixing it "
        f"alone saves little. Its host needs {ms(float(own[k]))} per step, the slowest other host "
        f"{ms(float(others.max()))}."
    )
    evidence = [*_compared(dataset, of, k), *_latest(dataset, rank)]
    return [_quiet(dataset, k, of.cost[k], summary, Reason("", _ALL_HOSTS, evidence))]


def _overlapped(dataset: Dataset, of: StragglerCost, known: set[int | None]) -> list[Finding]:
    """The rank whose slower host comes last to collectives, by much, while the others compute."""
    late, much = of.lateness.mean(axis=1), limits.WARNING_FRAC * dataset.step_ns
    k = int(np.argmax(late))
    idles = dataset.account("idle_ns")
    slower, idle = _beyond_others(of.pace, k), savings.mean(idles)[k] - _beyond_others(idles, k)
    if dataset.pipelined or dataset.ranks[k] in known or of.profiler_overhead[k] or late[k] < much:
        return []
    if not (slower >= much and steady(of.lateness)[k]) or idle > 2 * much:
        return []
    rank, own = dataset.ranks[k], float(of.cost[k].mean())
    reason = causes.slow_host(dataset, k)
    summary = (
        f"Rank {rank} arrives last by {ms(float(late[k]))} per step; all but {ms(own)} is "
        f"overlapped with compute.{_cause(reason)}"
    )
    row = {
        "rank": rank,
        "overlapped_ns_per_step": round(float(late[k]) - own),
        "what": f"{ms(float(late[k]) - own)} of its lateness per step overlap with compute",
    }
    evidence = [row, *_latest(dataset, rank), *reason.evidence]
    return [_quiet(dataset, k, of.cost[k], summary, replace(reason, evidence=evidence))]


def overlapped(found: Finding) -> bool:
    """Whether a finding is a straggler whose lateness the other ranks' compute covers."""
    return any("overlapped_ns_per_step" in row for row in found["evidence"])


def _covered(dataset: Dataset, of: StragglerCost) -> list[Finding]:
    """Hosts slower than their GPUs that work queued before the window still covers."""
    # what the profiler adds to a host's pace ends with it
    own, count = savings.mean(of.pace) - of.profiler_overhead, launches(dataset)
    out = []
    for k, rank in enumerate(dataset.ranks):
        # a stage of more layers has more to launch
        scale = np.maximum(count[k] / np.maximum(count, 1.0), 1.0) if dataset.pipelined else 1.0
        others = np.delete(own * scale, k)
        others = others[~np.isnan(others)]
        if np.isnan(own[k]) or not len(others):
            continue
        usual = float(np.median(others))
        needs = (
            f"Rank {rank}'s host needs {ms(float(own[k]))} per step, the other hosts {ms(usual)}"
        )
        if own[k] >= max(limits.HIDDEN_STEP * dataset.step_ns, limits.HIDDEN_PEERS * usual):
            cost = np.full(len(dataset.steady_steps), own[k] - dataset.step_ns)
            reason = causes.slow_host(dataset, k)
            summary = (
                f"{needs}, the GPUs {ms(dataset.step_ns)}. Queued work covers it so far; later "
                f"it costs {ms(float(cost[0]))} of each step.{_cause(reason)}"
            )
            closer = _closer(dataset, k)
            out.append(_quiet(dataset, k, cost, summary, reason, 0.75, "critical", closer))
            continue
        slower = own[k] - usual >= limits.SLACK_FRAC * dataset.step_ns
        late = float(of.idle[k].mean()) >= limits.STRAGGLER_FRAC * dataset.step_ns
        if slower and not late and own[k] >= limits.SLACK_PEERS * usual:
            reason = causes.slow_host(dataset, k)
            summary = (
                f"{needs}. It delays no other rank: the step takes {ms(dataset.step_ns)}."
                f"{_cause(reason)}"
            )
            cost = np.zeros(len(dataset.steady_steps))
            out.append(_quiet(dataset, k, cost, summary, reason))
    return out


def _cause(reason: Reason) -> str:
    return f" Cause: {reason.why}." if reason.why else ""


def _beyond_others(values: Floats, k: int) -> float:
    """By how much a rank's mean is above the others' median; NaN where either is unknown."""
    own = savings.mean(values)
    others = np.delete(own, k)
    others = others[~np.isnan(others)]
    return float(own[k] - np.median(others)) if len(others) else float("nan")


def _by_chance(dataset: Dataset, of: StragglerCost, k: int) -> bool:
    """Whether a host is late in some steps only, and no slower than the others.

    One that carries a lag stays behind; where all hosts are slow, a different one comes last each
    time.
    """
    if not of.by_host[k]:
        return False
    compared = _compared(dataset, of, k)
    slower = not compared or not _not_slower(dataset, compared)
    if slower and compared and _paused_by_chance(dataset, of, k):
        return True
    return not slower and not steady(of.wait_caused)[k]


def _paused_by_chance(dataset: Dataset, of: StragglerCost, k: int) -> bool:
    """Whether a host among slow hosts is slower in few steps only, by no great pause.

    Each of them pauses in some steps; which one does so more often in so few steps is chance.
    """
    least = limits.PACING_FRAC * dataset.step_ns
    hosts, gpus = np.delete(savings.mean(of.pace), k), savings.busy(dataset)
    if dataset.pipelined or not np.nanmax(hosts, initial=0.0) >= least > np.nanmax(gpus):
        return False
    more = of.pace[k] - median_of_others(of.pace)[k]
    more = more[~np.isnan(more)]
    if not len(more) or more.max() >= limits.PAUSE_PEAK_FRAC * dataset.step_ns:
        return False
    return float((more >= 0.5 * more.mean()).mean()) < limits.STEADY_FRAC


def _not_slower(dataset: Dataset, compared: Evidence) -> bool:
    """Whether the host's own pace is that of the others."""
    return bool(compared[0]["slower_ns"] < limits.LEAST_FRAC * dataset.step_ns)


def _on_path(dataset: Dataset, of: StragglerCost, rank: int) -> Evidence:
    """How much of the critical path is this rank's, and what it does there."""
    parts = {"host": 0, "gpu": 0, "copy": 0, "transfer": 0}
    for piece in of.path:
        if piece.rank == rank:
            parts[piece.what] += piece.end - piece.begin
    whole = sum(p.end - p.begin for p in of.path)
    if not whole or not any(parts.values()):
        return []
    steps = len(dataset.steady_steps)
    nouns = {"host": "its host", "gpu": "its kernels", "copy": "its copies"}
    most = ", ".join(
        f"{nouns[k]} {ms(v / steps)}" for k, v in sorted(parts.items(), key=lambda p: -p[1])
        if k in nouns and v > 0.01 * whole
    )  # fmt: skip
    return [
        {
            "rank": rank,
            "steps": list(dataset.steady_steps),
            **{f"{k}_ns_per_step": round(v / steps) for k, v in parts.items()},
            "what": f"{percent(sum(parts.values()) / whole)} of the critical path is this rank's "
            f"({most} per step)",
        }
    ]


def _closer(dataset: Dataset, k: int) -> str:
    """The command that profiles this rank's host in detail, with one that is on time."""
    options = (*operators(dataset), "--cpu-sampling")
    return capture(dataset, [dataset.ranks[k], dataset.ranks[0 if k else 1]], *options)


def _compared(dataset: Dataset, of: StragglerCost, k: int) -> Evidence:
    """The late host's own pace and the others'; empty where either is unknown."""
    own = savings.mean(of.pace)
    others = np.delete(own, k)
    others = others[~np.isnan(others)]
    if np.isnan(own[k]) or not len(others):
        return []
    usual = float(np.median(others))
    row: dict[str, Any] = {
        "rank": dataset.ranks[k],
        "host_ns_per_step": round(float(own[k])),
        "slower_ns": round(float(own[k]) - usual),
        "what": f"its host needs {ms(float(own[k]))} per step, the other hosts {ms(usual)}",
    }
    if _not_slower(dataset, [row]):
        row["what"] += ": it is not slower, but was behind before the steady-state steps"
    return [row]


def _late_in_all(of: StragglerCost, k: int, rank: int) -> Evidence:
    """By how much the rank comes last, whether or not the others had something to compute."""
    late = float(of.lateness[k].mean())
    what = (
        f"last at collectives by {ms(late)} per step in total, also while the other ranks computed"
    )
    return [{"rank": rank, "late_ns_per_step": round(late), "what": what}] if late else []


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
