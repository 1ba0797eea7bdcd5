"""Who holds up the others: a finding for each rank that is to blame (`blame`), with its cause.

A rank is named where its cost is more than chance, by its host or its GPU; ranks that are late
together are named together; a host that queued work still hides, or that is only behind, is told
apart from one that costs the others time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clusterprof.analysis.findings import causes, host_bound, joint_stragglers, savings
from clusterprof.analysis.findings.finding import Code, capture, finding, ms, operators, percent
from clusterprof.analysis.findings.straggler_cost import Blame, launches, mean, steady, weigh
from clusterprof.analysis.groups.peers import median_of_others
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, Floats
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

#: what to do where a late host is no slower than the others
_ALL_HOSTS = "the hosts of all ranks set the pace: see what they have in common first"


def _behind(dataset: Dataset, seen: Blame, paced_ns: float) -> Blame:
    """Have a host that the others wait for in nearly every step cost that wait.

    Hosts that are equally slow keep the order in which they resumed, and hurrying the last one
    alone saves little: that is said beside. It is named all the same where the others wait
    clearly longer for it than what all hosts do alike costs (`paced_ns`).
    """
    if dataset.pipelined:
        return seen
    by_host = seen.idle.sum(axis=1) >= (seen.compute + seen.copy).sum(axis=1)
    stood, saved = seen.stood.mean(axis=1), seen.cost.mean(axis=1)
    least = max(limits.BEHIND_TIMES * paced_ns, limits.BEHIND_FRAC * dataset.step_ns)
    named = by_host & steady(seen.stood) & (seen.slowed == 0) & (stood > least)
    named &= saved < limits.SAVED_FRAC * stood
    return replace(seen, cost=np.where(named[:, None], seen.stood, seen.cost))


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `straggler.host` and `straggler.gpu`, one finding per rank that is to blame."""
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
    weighed = weigh(dataset)
    seen = _behind(dataset, weighed, paced_ns)
    saved = weighed.cost
    behind = (seen.cost != saved).any(axis=1)
    least = limits.PIPELINE_STRAGGLER_FRAC if dataset.pipelined else limits.STRAGGLER_FRAC
    out = []
    for k, rank in enumerate(dataset.ranks):
        cost = seen.cost[k]
        share = float(cost.mean()) / dataset.step_ns
        peak = float(cost.max(initial=0.0)) / dataset.step_ns
        high = peak >= max(limits.PEAK_FRAC, 2 * least) and share >= limits.LEAST_FRAC
        if (share >= least or high) and (behind[k] or not _by_chance(dataset, seen, k)):
            out.append(_finding(dataset, seen, k, rank, float(saved[k].mean())))
    excess = seen.idle + seen.compute + seen.copy
    by_host = seen.idle.sum(axis=1) >= (seen.compute + seen.copy).sum(axis=1)
    joint = joint_stragglers.late(dataset, excess, saved, seen.pace, by_host, least)
    if joint is not None:
        named = {dataset.ranks[k] for k in joint.places}
        return [_joint(dataset, replace(seen, cost=excess), joint)] + [
            f for f in out if f["rank"] not in named
        ]
    quiet = _hidden(dataset, seen) or _only_behind(dataset, seen, least)
    return out or [*quiet, *_overlapped(dataset, seen, {f["rank"] for f in quiet})]


def _joint(dataset: Dataset, seen: Blame, joint: joint_stragglers.Together) -> Finding:
    """Ranks that are late together; `seen` has each one's own excess for its cost."""
    ranks = [dataset.ranks[k] for k in joint.places]
    reasons: dict[str, list[int]] = {}
    advice: dict[str, None] = {}
    evidence: list[dict[str, Any]] = []
    for k, by_host in zip(joint.places.tolist(), joint.by_host, strict=True):
        rank = dataset.ranks[k]
        why, what, details = (
            causes.late_host(dataset, seen, k, rank)
            if by_host
            else causes.busy_gpu(dataset, seen, k)
        )
        reasons.setdefault(why, []).append(rank)
        advice.setdefault(what)
        own = float(seen.cost[k].mean())
        told = f"rank {rank} takes {ms(own)} a step more than its peers: {why}"
        evidence += [{"rank": rank, "excess_ns_per_step": round(own), "what": told}, *details[:2]]
    each = [
        (f"of rank{'s' if len(of) > 1 else ''} {_some(of)} " if len(reasons) > 1 else "of each ")
        + why
        for why, of in reasons.items()
    ]
    node = joint_stragglers.node(dataset, joint.places.tolist())
    where = f", all that were captured on {node}," if node else ""
    per_step = float(joint.cost.mean())
    share = percent(per_step / dataset.step_ns)
    return finding(
        dataset,
        "straggler.host" if dataset.on_host or joint.by_host.mean() >= 0.5 else "straggler.gpu",
        rank=None,
        ranks=ranks,
        cost=joint.cost,
        floor_ns=0.1 * float(joint.cost.max()),
        confidence=0.8,
        summary=f"ranks {_some(ranks)}{where} hold up the others together: {ms(per_step)} of each "
        f"{ms(dataset.step_ns)} step ({share}); {'; '.join(each)}",
        evidence=evidence[:32],
        advice="; ".join(list(advice)[:2]),
        follow_up=_closer(dataset, int(joint.places[0])),
    )


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def _only_behind(dataset: Dataset, seen: Blame, least: float) -> list[Finding]:
    """The rank that the others stand behind longest, where they would hardly be faster without."""
    stood = seen.stood.mean(axis=1)
    k = int(np.argmax(stood))
    if stood[k] < least * dataset.step_ns or seen.slowed[k]:
        return []
    rank, own = dataset.ranks[k], mean(seen.pace)
    others = np.delete(own, k)
    others = others[~np.isnan(others)]
    if np.isnan(own[k]) or not len(others) or _by_chance(dataset, seen, k):
        return []
    return [
        finding(
            dataset,
            "straggler.host",
            rank=rank,
            ranks=[rank],
            cost=seen.cost[k],
            at_most="info",
            confidence=0.6,
            summary=f"the others stand {ms(float(stood[k]))} of each step behind rank {rank}, but "
            f"would hardly be faster without: its host needs {ms(float(own[k]))} a step, the "
            f"slowest of theirs {ms(float(others.max()))}",
            evidence=[*_compared(dataset, seen, k), *_latest(dataset, rank)],
            advice=_ALL_HOSTS,
        )
    ]


def _overlapped(dataset: Dataset, seen: Blame, said: set[int | None]) -> list[Finding]:
    """The rank whose slower host comes last to collectives, by much, while the others compute."""
    late, much = seen.lateness.mean(axis=1), limits.WARNING_FRAC * dataset.step_ns
    k = int(np.argmax(late))
    idles = dataset.account("idle_ns")
    slower, idle = _beyond_others(seen.pace, k), mean(idles)[k] - _beyond_others(idles, k)
    if dataset.pipelined or dataset.ranks[k] in said or seen.slowed[k] or late[k] < much:
        return []
    if not (slower >= much and steady(seen.lateness)[k]) or idle > 2 * much:
        return []
    rank, own = dataset.ranks[k], float(seen.cost[k].mean())
    why, advice, details = causes.slow_host(dataset, k, rank)
    return [
        finding(
            dataset,
            "straggler.host",
            rank=rank,
            ranks=[rank],
            cost=seen.cost[k],
            at_most="info",
            confidence=0.6,
            summary=f"rank {rank} comes last to collectives, by {ms(float(late[k]))} of each step "
            f"in all{why}; the others' compute hides all but {ms(own)} of it",
            evidence=[*_latest(dataset, rank), *details],
            advice=advice,
        )
    ]


def _beyond_others(values: Floats, k: int) -> float:
    """By how much a rank's mean is above the others' median; NaN where either is unknown."""
    own, others = mean(values), np.delete(mean(values), k)
    others = others[~np.isnan(others)]
    return float(own[k] - np.median(others)) if len(others) else float("nan")


def _by_chance(dataset: Dataset, seen: Blame, k: int) -> bool:
    """Whether a host is late now and then only, and no slower than the others.

    One that is merely behind the others stays behind; where all hosts set the pace, now this one
    and now that one comes last.
    """
    if seen.idle[k].sum() < (seen.compute[k] + seen.copy[k]).sum():
        return False
    compared = _compared(dataset, seen, k)
    slower = not compared or not _no_slower(dataset, compared[0])
    if slower and compared and _paused_now_and_then(dataset, seen, k):
        return True
    return not slower and not steady(seen.stood)[k]


def _paused_now_and_then(dataset: Dataset, seen: Blame, k: int) -> bool:
    """Whether a host among hosts that set the pace is slower in few steps only, by no great pause.

    Any of them is held up now and then; which one it hits more often in so few steps is chance.
    """
    least = limits.PACING_FRAC * dataset.step_ns
    hosts, gpus = np.delete(mean(seen.pace), k), savings.busy(dataset)
    if dataset.pipelined or not np.nanmax(hosts, initial=0.0) >= least > np.nanmax(gpus):
        return False
    more = seen.pace[k] - median_of_others(seen.pace)[k]
    more = more[~np.isnan(more)]
    if not len(more) or more.max() >= limits.PAUSE_PEAK_FRAC * dataset.step_ns:
        return False
    return float((more >= 0.5 * more.mean()).mean()) < limits.STEADY_FRAC


def _no_slower(dataset: Dataset, compared: dict[str, Any]) -> bool:
    """Whether the host's own pace is that of the others."""
    return bool(compared["slower_ns"] < limits.LEAST_FRAC * dataset.step_ns)


def _hidden(dataset: Dataset, seen: Blame) -> list[Finding]:
    """A host slower than its GPU that work queued before the window still hides."""
    # what the capture adds to a host's pace ends with it
    own, count = mean(seen.pace) - seen.slowed, launches(dataset)
    out = []
    for k, rank in enumerate(dataset.ranks):
        # a stage of more layers has more to launch
        scale = np.maximum(count[k] / np.maximum(count, 1.0), 1.0) if dataset.pipelined else 1.0
        others = np.delete(own * scale, k)
        others = others[~np.isnan(others)]
        if np.isnan(own[k]) or not len(others):
            continue
        usual = float(np.median(others))
        if own[k] < max(limits.HIDDEN_STEP * dataset.step_ns, limits.HIDDEN_PEERS * usual):
            slower = own[k] - usual >= limits.SLACK_FRAC * dataset.step_ns
            late = float(seen.idle[k].mean()) >= limits.STRAGGLER_FRAC * dataset.step_ns
            if slower and not late and own[k] >= limits.SLACK_PEERS * usual:
                out.append(_slack(dataset, k, float(own[k]), usual))
            continue
        cost = np.full(len(dataset.steady_steps), own[k] - dataset.step_ns)
        why, advice, details = causes.slow_host(dataset, k, rank)
        out.append(
            finding(
                dataset,
                "straggler.host",
                rank=rank,
                ranks=[rank],
                cost=cost,
                confidence=0.75,
                summary=f"rank {rank}'s host needs {ms(float(own[k]))} a step, the others' "
                f"{ms(usual)}, the GPUs {ms(dataset.step_ns)}{why}: work queued before the window "
                f"hides it so far, then it costs {ms(float(cost[0]))} of each step",
                evidence=details,
                advice=advice,
                follow_up=_closer(dataset, k),
            )
        )
    return out


def _slack(dataset: Dataset, k: int, own: float, usual: float) -> Finding:
    """A host that is slower than the others, but not than its GPU: it costs nothing as yet."""
    rank = dataset.ranks[k]
    why, advice, details = causes.slow_host(dataset, k, rank)
    return finding(
        dataset,
        "straggler.host",
        rank=rank,
        ranks=[rank],
        cost=np.zeros(len(dataset.steady_steps)),
        at_most="info",
        confidence=0.6,
        summary=f"rank {rank}'s host needs {ms(own)} a step, the others' {ms(usual)}{why}; that "
        f"still fits into the {ms(dataset.step_ns)} step and holds up nobody",
        evidence=details,
        advice=advice,
    )


def _finding(dataset: Dataset, seen: Blame, k: int, rank: int, saved: float) -> Finding:
    cost = seen.cost[k]
    idle, work = seen.idle[k].sum(), (seen.compute[k] + seen.copy[k]).sum()
    by_host = bool(idle >= work)
    per_step = float(cost.mean())
    share = per_step / dataset.step_ns
    floor = 0.1 * float(cost.max())
    hit = cost > floor
    steadiness = float(hit.mean())
    doubt = float(seen.uncertainty[k].max(initial=0.0))
    confidence = (0.6 + 0.3 * max(idle, work) / max(idle + work, 1.0)) * (
        1.0 if per_step > 3 * doubt else 0.7
    )
    confidence = min(0.98, confidence + 0.05 * steadiness)
    why, advice, details = (
        causes.late_host(dataset, seen, k, rank) if by_host else causes.busy_gpu(dataset, seen, k)
    )
    behind = False
    if by_host:
        compared = _compared(dataset, seen, k)
        details = [*compared, *details]
        behind = bool(compared) and (
            _no_slower(dataset, compared[0]) or saved < limits.SAVED_FRAC * per_step
        )
    if behind:
        # it resumed last, or a wait long ago left it behind: no fault of its own now
        confidence *= limits.INHERITED
        won = ms(saved) if saved >= 0.01 * dataset.step_ns else "nothing"
        why += (
            "; yet it is hardly slower than theirs, behind since before these steps, and to hurry "
            f"it alone would save {won}"
        )
        advice = _ALL_HOSTS
    often = ""
    if not hit.all():
        often = (
            f"; in {int(hit.sum())} of {len(hit)} settled steps, {ms(float(cost[hit].mean()))} each"
        )
    return finding(
        dataset,
        "straggler.host" if by_host or dataset.on_host else "straggler.gpu",
        rank=rank,
        ranks=[rank],
        cost=cost,
        floor_ns=floor,
        at_most="warning" if behind else None,
        uncertainty_ns=doubt,
        confidence=confidence,
        summary=f"rank {rank} holds up the others: {ms(per_step)} of each {ms(dataset.step_ns)} "
        f"step ({percent(share)}), {why}{often}",
        evidence=[
            *_on_path(dataset, seen, rank),
            *_all_in_all(seen, k, rank),
            *_latest(dataset, rank),
            *details,
        ],
        advice=advice,
        follow_up=_closer(dataset, k) if by_host else "",
    )


def _on_path(dataset: Dataset, seen: Blame, rank: int) -> list[dict[str, Any]]:
    """How much of the critical path is this rank's, and what it does there."""
    parts = {"host": 0, "gpu": 0, "copy": 0, "transfer": 0}
    for piece in seen.path:
        if piece.rank == rank:
            parts[piece.what] += piece.end - piece.begin
    whole = sum(p.end - p.begin for p in seen.path)
    if not whole or not any(parts.values()):
        return []
    steps = len(dataset.steady_steps)
    said = {"host": "its host", "gpu": "its kernels", "copy": "its copies"}
    most = ", ".join(
        f"{said[k]} {ms(v / steps)}" for k, v in sorted(parts.items(), key=lambda p: -p[1])
        if k in said and v > 0.01 * whole
    )  # fmt: skip
    return [
        {
            "rank": rank,
            "steps": list(dataset.steady_steps),
            **{f"{k}_ns_per_step": round(v / steps) for k, v in parts.items()},
            "what": f"{percent(sum(parts.values()) / whole)} of the critical path is this rank's "
            f"({most} a step)",
        }
    ]


def _closer(dataset: Dataset, k: int) -> str:
    """The capture that tells what this rank's host does, beside one that is in time."""
    beside = 0 if k else 1
    options = (*operators(dataset), "--cpu-sampling")
    return capture(dataset, [dataset.ranks[k], dataset.ranks[beside]], *options)


def _compared(dataset: Dataset, seen: Blame, k: int) -> list[dict[str, Any]]:
    """The late host's own pace beside the others'."""
    own = mean(seen.pace)
    others = np.delete(own, k)
    others = others[~np.isnan(others)]
    if np.isnan(own[k]) or not len(others):
        return []
    usual = float(np.median(others))
    what = f"its host needs {ms(float(own[k]))} a step of its own, the others' {ms(usual)}"
    slower = float(own[k]) - usual
    if slower < limits.LEAST_FRAC * dataset.step_ns:
        what += ": it is not slower now, but behind since before the settled steps"
    return [
        {
            "rank": dataset.ranks[k],
            "host_ns_per_step": round(float(own[k])),
            "slower_ns": round(slower),
            "what": what,
        }
    ]


def _all_in_all(seen: Blame, k: int, rank: int) -> list[dict[str, Any]]:
    """By how much the rank comes last, whether or not the others had something to compute."""
    late = float(seen.lateness[k].mean())
    what = f"last at collectives by {ms(late)} a step in all, also while the others computed"
    return [{"rank": rank, "late_ns_per_step": round(late), "what": what}] if late else []


def _latest(dataset: Dataset, rank: int) -> list[dict[str, Any]]:
    """The collective of each settled step at which the rank was latest."""
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
                    "next to last",
                }
            )
    return out
