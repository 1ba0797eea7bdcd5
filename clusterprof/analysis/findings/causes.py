"""Why a straggler is late: what its host does meanwhile, or what its GPU has more of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterprof.agent.contracts.words import ms
from clusterprof.analysis.findings.finding import Evidence, named
from clusterprof.analysis.model import host_activity
from clusterprof.analysis.model.dataset import Dataset, Floats, commonest
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.timeline import COLLECTIVE

#: what to do about collections that come at another step on each rank
COLLECT_TOGETHER = (
    "switch automatic collection off (gc.disable()) and collect at the same step on all ranks "
    "(gc.collect() every N steps); gc.freeze() after the set-up excludes long-lived objects"
)
#: a cause has so many rows of evidence at most
_MOST_ROWS = 8
_SLOW_GPU = (
    "look at that GPU's clocks, temperature and throttling (nvidia-smi -q -d PERFORMANCE,CLOCK) "
    "and at other processes on it"
)
_SLOW_HOST = "look at what else runs on that host, its clocks, and the cores it is bound to"


@dataclass(frozen=True)
class Reason:
    """Why a rank is late (a clause without a full stop, or empty), what to do, what shows it."""

    why: str
    advice: str
    evidence: Evidence


def _blocked(activity: dict[str, Any]) -> str:
    """What a host is in, as a clause."""
    name = named(activity["name"])
    call = activity["kind"] in ("os", "cuda")
    return f"its host blocks in {name}" if call else f"its host is in '{name}'"


def slow_host(dataset: Dataset, k: int) -> Reason:
    """What a slow host does in the longest time in which it launches nothing."""
    line, tables, rank = dataset.timelines[k], dataset.tables[k], dataset.ranks[k]
    rows: Evidence = []
    clauses: list[str] = []
    launched = union(line.launch, line.launch_end)
    for at in np.flatnonzero(np.isin(line.step, dataset.steady_steps)):
        gap = longest_gap(launched, int(line.host_begin[at]), int(line.host_end[at]))
        activity = host_activity.doing(tables, *gap)
        clauses += [_blocked(activity)] if activity else []
        what = f"its host launches nothing for {ms(gap[1] - gap[0])}"
        time = _aligned(dataset, rank, gap[0])
        step = int(line.step[at])
        rows.append({"rank": rank, "step": step, "time_ns": time, "host": activity, "what": what})
    advice = (
        f"look at what rank {rank}'s host does between its launches, and move it off the "
        "training thread"
    )
    return Reason(commonest(clauses) if clauses else "", advice, rows[:_MOST_ROWS])


def _aligned(dataset: Dataset, rank: int, time_ns: int) -> int:
    return int(dataset.clock.align(rank, np.asarray([time_ns], dtype=np.int64))[0])


def late_host(dataset: Dataset, k: int, each: Floats) -> Reason:
    """Why the host was late: what it did in the longest time its GPU idled in each step.

    `each` is by how much it was late in each steady-state step (ns).
    """
    tables, line, rank = dataset.tables[k], dataset.timelines[k], dataset.ranks[k]
    rows: Evidence = []
    # idle time by what the host was in, and by where between ranges it was: what a step without a
    # pause spends its time in is no cause
    inside: dict[str, int] = {}
    between: dict[str, int] = {}
    verbs: dict[str, str] = {}
    for column, step in enumerate(dataset.steady_steps):
        at = int(np.searchsorted(line.step, step))
        if each[column] <= 0 or at >= len(line.step) or line.step[at] != step:
            continue
        gap = longest_gap(line.busy, int(line.begin[at]), int(line.end[at]))
        idle = gap[1] - gap[0]
        activity = host_activity.doing(tables, *gap)
        if activity is not None:
            where, place = inside, _blocked(activity)
        else:
            activity = host_activity.between(tables, *gap)
            where, place = between, "its host is in no call or range"
        if activity is not None:
            name = str(activity["name"])
            where[name] = where.get(name, 0) + idle
            verbs[name] = place
            place += "" if where is inside else f", {name}"
        rows.append(
            {
                "rank": rank,
                "step": int(step),
                "time_ns": _aligned(dataset, rank, gap[0]),
                "idle_ns": idle,
                "host": activity,
                "what": f"its GPU idles for {ms(idle)} while {place}",
            }
        )
    advice = (
        f"look at what rank {rank}'s host does before it launches kernels (data loading, logging, "
        "a busy core, checkpointing) and move it off the training thread"
    )
    if max(inside.values(), default=0) >= max(between.values(), default=1):
        most = max(inside, key=lambda name: inside[name])
        return _inside(most, verbs[most], rank, rows, advice)
    why = "its kernels are launched late"
    if between:
        place = max(between, key=lambda name: between[name])
        why = f"its host runs its own code {_named_between(place)}"
    elif any(row["host"] is None for row in rows):
        why = "its host is in no CUDA call or NVTX range before launching kernels"
    return Reason(why, advice, rows[:_MOST_ROWS])


def _named_between(place: str) -> str:
    """`between 'a' and 'b'`, both names short enough that a sentence holds them."""
    first, _, second = place.removeprefix("between '").removesuffix("'").partition("' and '")
    return "between " + " and ".join(
        f"'{name if len(name) <= 24 else name[:23] + '…'}'" for name in (first, second)
    )


def _inside(most: str, clause: str, rank: int, rows: Evidence, advice: str) -> Reason:
    """The reason where the host was in `most` for longest."""
    why = f"{clause} before launching kernels"
    if most == host_activity.COLLECTOR:
        runs = [row for row in rows if row["host"] and row["host"]["name"] == most]
        worst = max(runs, key=lambda row: int(row["host"]["duration_ns"]))
        spent = ms(worst["host"]["duration_ns"])
        why, advice = f"the garbage collector ran {spent} in step {worst['step']}", COLLECT_TOGETHER
    elif "GIL" in most:
        why = "its host waits for the GIL before launching kernels"
        advice = (
            f"other Python threads keep rank {rank}'s main thread from launching: move their work "
            "into processes"
        )
    return Reason(why, advice, rows[:_MOST_ROWS])


def pause(dataset: Dataset, k: int) -> tuple[float, str]:
    """The k-th rank's longest time without a launch in a step: its mean (ns), and what it is in.

    The name is empty where no call or range in the report covers it.
    """
    line, tables = dataset.timelines[k], dataset.tables[k]
    launched = union(line.launch, line.launch_end)
    lengths, names = [], []
    for at in np.flatnonzero(np.isin(line.step, dataset.steady_steps)):
        gap = longest_gap(launched, int(line.host_begin[at]), int(line.host_end[at]))
        did = host_activity.doing(tables, *gap)
        lengths.append(gap[1] - gap[0])
        names += [str(did["name"])] if did else []
    if not lengths:
        return 0.0, ""
    often = 2 * len(names) >= len(lengths)
    return float(np.mean(lengths)), commonest(names) if often else ""


def longest_gap(busy: Any, begin: int, end: int) -> tuple[int, int]:
    """The longest time within `begin`..`end` in which nothing ran."""
    inside = (busy.end > begin) & (busy.start < end)
    starts = np.r_[busy.start[inside], end]
    ends = np.r_[begin, busy.end[inside]]
    gaps = starts - ends
    worst = int(np.argmax(gaps))
    return int(ends[worst]), int(max(starts[worst], ends[worst]))


def busy_gpu(dataset: Dataset, k: int, _each: Floats) -> Reason:
    """Which kernels the rank has more of, or longer, than its peers."""
    per_name: dict[str, tuple[float, float]] = {}
    for other, line in enumerate(dataset.timelines):
        step = np.r_[line.step, -1][line.step_of]
        use = (line.kind != COLLECTIVE) & np.isin(step, dataset.steady_steps)
        size = len(line.names)
        time = np.bincount(line.name[use], line.stop[use] - line.start[use], size)
        count = np.bincount(line.name[use], minlength=size)
        sign = 1.0 if other == k else -1.0 / max(len(dataset.ranks) - 1, 1)
        for n, name in enumerate(line.names):
            t, c = per_name.get(name, (0.0, 0.0))
            per_name[name] = (t + sign * float(time[n]), c + sign * float(count[n]))
    steps = max(len(dataset.steady_steps), 1)
    worst = max(per_name, key=lambda n: per_name[n][0]) if per_name else ""
    more_ns, more_calls = (total / steps for total in per_name.get(worst, (0.0, 0.0)))
    why, advice = "its GPU is slower than its peers'", _SLOW_GPU
    if any(word in worst.lower() for word in ("memcpy", "memset")):
        why, advice = "its copies take longer", "look at what it copies, and from which memory"
    elif more_calls >= 0.5:
        why = "its GPU has more work than its peers'"
        advice = "balance the work between the ranks: samples of equal length, the same layers"
    elif dataset.on_host:
        advice = _SLOW_HOST
    row = {
        "rank": dataset.ranks[k],
        "kernel": worst,
        "more_ns_per_step": round(more_ns),
        "more_calls_per_step": round(more_calls, 1),
        "what": f"{ms(more_ns)} per step more in {worst[:80]}"
        + (f", {more_calls:+.0f} calls" if more_calls >= 0.5 else ""),
    }
    return Reason(why, advice, [row])
