"""Profiler overhead: what the profiler itself caused, kept apart from the job's own costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from clusterprof.align.clock import UNBOUNDED_NS
from clusterprof.analysis.findings.finding import (
    Code,
    Evidence,
    Tier,
    Words,
    asks_for_nsys,
    capture,
    finding,
)
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.replay import SETTLE_STEPS
from clusterprof.analysis.model.shallow import half_width
from clusterprof.analysis.model.timeline import TYPICAL_STEPS
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.columns import Floats, Ints, begins, first_after, order_by, rows_by, sum_by
from clusterprof.ingest.rank_steps import WARM_UP, patterns, period, stretches
from clusterprof.results import CaptureCost, Finding, StepTimes
from clusterprof.watched import ENOUGH_STEPS
from clusterprof.words import counted, duration, ms, percent

TIER = Tier.REST

CODES = (
    Code(
        "profiler.perturbation",
        "Profiler overhead",
        "What profiling did to the training: stalls at its start and stop, ranks desynchronised "
        "by the start, and steps that take longer inside the window.",
        "It compares the window with the steps around it and assumes that the job does the same "
        "in both.",
        "No action, where steps are as long after the window as before. Where they stay longer "
        "(launch-bound ranks under nsys, until they end), profile them in a short job of their "
        "own, or with --profiler torch. If too few steady-state steps are left, use a longer "
        "window (--steps).",
    ),
)

#: what to do, by whether steps stay longer after the window; None: not known
_ADVICE = {
    None: "No action: the job does not cause this; a longer window has a larger steady-state part.",
    False: "No action: the job does not cause this, and it ends with the window; a longer window "
    "has a larger steady-state part.",
    True: "No action inside the window; where nsys was the profiler, steps stay longer until the "
    "job ends: profile a short job instead, or take --profiler torch, whose tracing ends with it.",
}
_STAYS_BY_TORCH = (
    "No action inside the window; torch.profiler lets go of the GPU's tracing with CUDA 12.6 or "
    "later, unless TEARDOWN_CUPTI=0 is set: without it profile a short job."
)

#: clauses (empty where there is only evidence), and the evidence for each
Parts = Iterator[tuple[str, Evidence]]


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return `profiler.perturbation`: what the profiler did to the training, as far as measured.

    It costs the steady-state steps nothing: they exclude the desynchronised ones, and what tracing
    adds to hosts is left out of all savings (`WhatIfs`).
    """
    measures = (_stalls, _longer_steps, _desynchronised, _slower_hosts) if dataset.ranks else ()
    clauses = [clause for measure in measures for clause in measure(dataset)]
    texts = [text for text, _ in clauses if text]
    if not texts:
        return []
    too_few = len(dataset.steady_steps) < LEAST_STEADY
    advice, follow_up = _advice(dataset)
    if too_few:
        advice = "Too few steady-state steps are left: lengthen the window by "
        advice += f"{missing(dataset)} steps (--steps)."
    say = Words(
        summary="Profiler overhead: " + "; ".join(texts) + ".",
        evidence=[row for _, rows in clauses for row in rows],
        advice=advice,
        follow_up=follow_up,
        at_least="warning" if too_few else "info",
        recurrence="once",
    )
    return [finding(dataset, CODES[0], dataset.ranks, say)]


def _advice(dataset: Dataset) -> tuple[str, str]:
    """What to do by whether steps stay longer after the window, and the command that does it."""
    stays = stay(dataset.capture["profiled"]) if dataset.capture else None
    profilers = dataset.profilers(range(len(dataset.ranks)))
    if not stays or "nsys" not in profilers:
        by_torch = stays and profilers == {"torch.profiler"}
        return _STAYS_BY_TORCH if by_torch else _ADVICE[stays], ""
    again = "" if asks_for_nsys(dataset) else capture(dataset, dataset.ranks, profiler="torch")
    return _ADVICE[stays], again


def missing(dataset: Dataset) -> int:
    """By how many steps a window must be longer to hold enough steady-state ones, and one more."""
    return LEAST_STEADY + 1 - len(dataset.steady_steps)


def stay(times: StepTimes) -> bool | None:
    """Whether steps are longer after the window than before, beyond chance; None: not known."""
    before, after, chance = times["before_ns"], times["after_ns"], times["after_uncertainty_ns"]
    if before is None or after is None:
        return None
    if after < (1 + limits.LEAST_FRAC) * before:
        return False
    return True if chance is not None and after - before > chance else None


def _stalls(dataset: Dataset) -> Parts:
    """How long the profiler's start and stop stalled a rank, by the step logs of a run."""
    if not (cost := dataset.capture):
        return
    stalls = {"start": cost["stall_start_ns"], "stop": cost["stall_stop_ns"] or 0}
    if long := {when: ns for when, ns in stalls.items() if ns >= limits.PAUSE_NS}:
        text = " and ".join(f"{ns / 1e6:.0f} ms at its {when}" for when, ns in long.items())
        rows: Evidence = [{f"stall_{when}_ns": ns for when, ns in long.items()}]
        yield f"a profiled rank stalled once for {text}", rows


def _longer_steps(dataset: Dataset) -> Parts:
    """By the step logs of a run; else only what the reports know of the steps before."""
    groups: dict[str, StepTimes | None] = {}
    if cost := dataset.capture:
        groups = {"profiled ranks": cost["profiled"], "unprofiled ranks": cost["unprofiled"]}
    elif len(dataset.durations):
        groups["profiled ranks"] = {
            "before_ns": dataset.usual_step_ns,
            "inside_ns": round(float(np.median(dataset.durations))),
            "after_ns": None,
            "after_uncertainty_ns": None,
        }
    for whose, times in groups.items():
        if times is None:
            continue
        before, inside, after = times["before_ns"], times["inside_ns"], times["after_ns"]
        around = [ns for ns in (before, after) if ns is not None]
        if inside is None or not around:
            continue
        more, texts = inside - (usual := min(around)), []
        row = {"whose": whose, **{name: ns for name, ns in times.items() if ns is not None}}
        row["more_ns_per_step"] = more
        if more >= limits.LEAST_FRAC * usual:
            longer = f"{ms(more)} ({percent(more / usual)}) longer in the window"
            texts.append(f"each step of {whose} takes {longer}")
        if before and after and stay(times):
            row["more_ns_per_step_after"] = after - before
            longer = f"{ms(after - before)} ({percent(after / before - 1)}) longer"
            texts.append(f"steps of {whose} stay {longer} after the window")
        yield "; ".join(texts), [row]


def _desynchronised(dataset: Dataset) -> Parts:
    """How far the start desynchronised the ranks, and the steps that show start or stop."""
    d, bounds = dataset.timelines, [dataset.clock.uncertainty(rank) for rank in dataset.ranks]
    bounded = (d.has_steps & (np.asarray(bounds) < UNBOUNDED_NS))[d.rank]
    step = int(d.step[bounded & (begins(d.rank))].max(initial=0))
    rows = np.flatnonzero(bounded & (d.step == step))
    times = dataset.aligned(d.rank[rows], d.host_begin[rows])
    if len(rows) < 2 or (spread := int(np.ptp(times))) < limits.HALF * dataset.step_ns:
        return
    latest = d.rank[rows[times == times.max()]][-1]
    excluded = [s for s in dataset.steps if s not in dataset.steady_steps]
    text = (
        f"its start desynchronised the ranks by {ms(spread)}; "
        f"{counted(len(excluded), 'step')} of {len(dataset.steps)} excluded from findings"
    )
    row = {"step": step, "rank": dataset.ranks[latest], "time_ns": int(times.max())}
    yield text, [{**row, "spread_ns": spread, "excluded_steps": excluded}]


def _slower_hosts(dataset: Dataset) -> Parts:
    """What tracing adds to hosts, and how much slower GPUs are outside, which explain its steps."""
    job = what_ifs(dataset)
    if job is None or not job.untraced[0].overhead_ns:
        return
    pace = job.untraced[0]
    more = sum_by(job.job.host_rank, job.job.lengths.own - pace.own, len(dataset.ranks))
    launch = duration(pace.overhead_ns)
    text = f"tracing is taken to add {launch} to each launch, which is left out of savings"
    if pace.slower > 1 + limits.LEAST_FRAC:
        text += f"; outside, where GPUs wait less, kernels are {percent(pace.slower - 1)} slower"
    rows = [
        {"rank": rank, "slower_ns_per_step": round(ns / len(job.job.steps))}
        for rank, ns in zip(dataset.ranks[: limits.MOST], more.tolist(), strict=False)
    ]
    yield text, rows


# --- what profiling cost the training, from the step logs that every rank of the job writes


def capture_cost(
    logs: Mapping[int, pa.Table],
    profiled: Collection[int],
    first: int,
    end: int,
    paces: Mapping[int, Mapping[str, Ints]],
    until: float = np.inf,
) -> CaptureCost | None:
    """Compare the ranks' steps before, inside and after the window [first, end).

    Those after it end before step `until`, from which on something else makes steps longer.

    `logs` are STEPS tables by rank, of the steps near the window; `paces` are of the others
    (`read_pace`), where there are any; `profiled` are the ranks with a profiler. None where no
    profiled rank logged the window's first step. The stalls are the longest of any profiled rank,
    taken between two steps of its log, where the agent puts the profiler's start and stop.
    Assumption: a step is what the host sees, so single steps of a host that runs ahead of its GPU
    vary; the median over ranks and steps does not. Where steps repeat a pattern, whole patterns
    count.
    """
    stalls_ns: dict[int, list[int]] = {first: [], end: []}
    for log in (logs[rank] for rank in logs if rank in profiled):
        number, begin_ns, end_ns = (log[k].to_numpy() for k in ("step", "begin_ns", "end_ns"))
        for step in stalls_ns:
            gap_ns = begin_ns[number == step][:1] - end_ns[number == step - 1][:1]
            stalls_ns[step] += np.maximum(gap_ns, 0).tolist()
    if not stalls_ns[first]:
        return None
    steps = {rank: stretches(log, paces.get(rank, {})) for rank, log in logs.items()}
    others = [steps[rank] for rank in steps if rank not in profiled]
    return {
        "stall_start_ns": max(stalls_ns[first]),
        "stall_stop_ns": max(stalls_ns[end], default=None),
        "profiled": _times([steps[rank] for rank in steps if rank in profiled], first, end, until),
        "unprofiled": _times(others, first, end, until) if others else None,
    }


def unprofiled_steps(
    logs: Mapping[int, pa.Table], profiled: Collection[int], window: tuple[int, int] | None
) -> list[float]:
    """Return the lengths (ns) of the steps outside the window [first, end), by the step logs.

    Of each step the median over the profiled ranks. Empty where they are too few to tell how often
    a step of the window comes, or where there is no window.
    """
    of_ranks = [stretches(logs[rank], {}) for rank in profiled if rank in logs]
    if not of_ranks or window is None:
        return []
    number, _, _, length = np.concatenate(of_ranks, axis=1)
    apart = (number < window[0]) | (number >= window[1] + SETTLE_STEPS)
    apart &= number >= WARM_UP
    every = [float(np.median(length[apart][rows])) for rows in rows_by(number[apart]).values()]
    return every if len(every) >= ENOUGH_STEPS else []


def _times(ranks: list[Ints], first: int, end: int, until: float) -> StepTimes:
    # queues fill up again behind the window, and nsys is still writing; the profiler's start shows
    # in its first step, which is never evidence
    spans = (max(1, first - TYPICAL_STEPS), first), (first + 1, end), (end + SETTLE_STEPS, until)
    parts = [_between(ranks, *span) for span in spans]
    repeats = max((period(_single(log)) for log in _between(ranks, WARM_UP, first)), default=1)
    if repeats > 1:
        means = [np.concatenate([patterns(_single(log), repeats) for log in p]) for p in parts]
        middles = [int(np.median(steps)) if len(steps) else None for steps in means]
        uncertainty = _by_chance(len(means[0]), means[2])
    else:
        every = [np.concatenate(logs, axis=1) for logs in parts]
        middles = [_median(steps) for steps in every]
        # neighbouring steps are alike, so that stretches, each of as many steps as are before the
        # window, vary by more than single steps tell
        single, blocks = (every[2][:, chosen] for chosen in (every[2][1] == 1, every[2][1] > 1))
        steps, place = np.unique(single[0], return_inverse=True)
        length = min(len(np.unique(every[0][0])), len(steps) // limits.FEW)
        place = place // max(length, 1)
        after = [
            *(single[3, place == k] for k in range(len(steps) // max(length, 1))),
            *(blocks[3, blocks[0] == begin] for begin in np.unique(blocks[0])),
        ]
        medians_ns = np.asarray([np.median(lengths_ns) for lengths_ns in after])
        uncertainty = _by_chance(min(length, 1), medians_ns)
    return {
        "before_ns": middles[0],
        "inside_ns": middles[1],
        "after_ns": middles[2],
        "after_uncertainty_ns": uncertainty,
    }


def _between(ranks: list[Ints], low: int, high: float) -> list[Ints]:
    """The steps [low, high) of each rank, and blocks that are whole in it."""
    return [log[:, (log[0] >= low) & (log[0] + log[1] <= high)] for log in ranks]


def _single(steps: Ints) -> Ints:
    """How long those take that are no blocks (ns)."""
    return np.asarray(steps[3, steps[1] == 1])


def _median(steps: Ints) -> int | None:
    """The median of these steps, a block being so many of its own (ns); None: they are too few."""
    _, weight, _, values = steps
    count = int(weight.sum())
    if count <= 2:  # of two none is in the middle
        return None
    order = order_by(values)
    middle = first_after(np.cumsum(weight[order]), np.array([count - 1, count]) // 2)
    return int(values[order][middle].mean())


def _by_chance(before: int, after: Floats) -> int | None:
    """How far the mean of so many such values may lie below that of these (ns); None: too few."""
    if not before or len(after) < limits.FEW:
        return None
    return round(half_width(after, limits.CHANCE) * float(np.sqrt(1 + len(after) / before)))
