"""Why a straggler is late: what its host does meanwhile, or what its GPU has more of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clusterprof.analysis.findings.finding import ms
from clusterprof.analysis.model import host_activity
from clusterprof.analysis.model.dataset import Dataset, commonest
from clusterprof.analysis.model.intervals import union
from clusterprof.analysis.model.timeline import COMPUTE

if TYPE_CHECKING:
    from clusterprof.analysis.findings.straggler_cost import Blame


#: what to do about collections that come at another step on each rank
COLLECT_TOGETHER = (
    "switch the automatic collector off (gc.disable()) and collect at the same step on all ranks "
    "(gc.collect() every so many steps); gc.freeze() after the set-up leaves long-lived objects out"
)


def slow_host(dataset: Dataset, k: int, rank: int) -> tuple[str, str, list[dict[str, Any]]]:
    """What a hidden slow host does in the longest time in which it launches nothing."""
    line, tables = dataset.timelines[k], dataset.tables[k]
    details: list[dict[str, Any]] = []
    names: list[str] = []
    launched = union(line.launch, line.launch_end)
    for at, step in enumerate(line.step):
        if int(step) not in dataset.steady_steps:
            continue
        gap = longest_gap(launched, int(line.host_begin[at]), int(line.host_end[at]))
        did = host_activity.doing(tables, *gap)
        names += [str(did["name"])] if did else []
        begin = int(dataset.clock.align(rank, np.asarray([gap[0]], dtype=np.int64))[0])
        what = f"its host launches nothing for {ms(gap[1] - gap[0])}"
        details.append(
            {"rank": rank, "step": int(step), "time_ns": begin, "host": did, "what": what}
        )
    why = f" (in {commonest(names)})" if names else ""
    advice = (
        f"look at what rank {rank}'s host does between its launches, and move it off the "
        "training thread"
    )
    return why, advice, details[:8]


def late_host(
    dataset: Dataset, seen: Blame, k: int, rank: int
) -> tuple[str, str, list[dict[str, Any]]]:
    """Why the host was late: what it did in the longest time its GPU had nothing to do."""
    tables, line = dataset.tables[k], dataset.timelines[k]
    details: list[dict[str, Any]] = []
    # weighed by how long: what a step without a pause spends its time in is no cause
    names: dict[str, int] = {}
    places: dict[str, int] = {}
    for column, step in enumerate(dataset.steady_steps):
        at = int(np.searchsorted(line.step, step))
        if seen.cost[k, column] <= 0 or at >= len(line.step) or line.step[at] != step:
            continue
        gap = longest_gap(line.busy, int(line.begin[at]), int(line.end[at]))
        did = host_activity.doing(tables, *gap)
        begin = int(dataset.clock.align(rank, np.asarray([gap[0]], dtype=np.int64))[0])
        what = f"its GPU has nothing to do for {ms(gap[1] - gap[0])}"
        if did is not None:
            names[str(did["name"])] = names.get(str(did["name"]), 0) + gap[1] - gap[0]
            what += f" while its host is in {did['name']}"
        else:
            did = host_activity.between(tables, *gap)
            if did is not None:
                places[str(did["name"])] = places.get(str(did["name"]), 0) + gap[1] - gap[0]
                what += f" while its host is in no call or range, {did['name']}"
            else:
                what += " while its host is in no call or range that the report knows"
        details.append(
            {
                "rank": rank,
                "step": int(step),
                "time_ns": begin,
                "idle_ns": gap[1] - gap[0],
                "host": did,
                "what": what,
            }
        )
    why = "its host launches late"
    advice = (
        f"look at what rank {rank}'s host does before it launches (data loading, logging, a "
        "busy core, checkpointing) and move it off the training thread"
    )
    if max(names.values(), default=0) >= max(places.values(), default=1):
        most = max(names, key=lambda n: names[n])
        why += " (waiting for the GIL)" if "GIL" in most else f" (in {most})"
        if most == host_activity.COLLECTOR:
            ran = [d for d in details if d["host"] and d["host"]["name"] == most]
            worst = max(ran, key=lambda d: int(d["host"]["duration_ns"]))
            spent = ms(worst["host"]["duration_ns"])
            why = f"the garbage collector ran {spent} in step {worst['step']}"
            advice = COLLECT_TOGETHER
        if "GIL" in most:
            advice = (
                f"other Python threads keep rank {rank}'s main thread from launching: move "
                "their work to processes"
            )
    elif places:
        why += f" (in code of its own, {max(places, key=lambda n: places[n])})"
    elif any(detail["host"] is None for detail in details):
        why += " (in no CUDA call and no NVTX range)"
    return why, advice, details[:8]


def pause(dataset: Dataset, k: int) -> tuple[float, str]:
    """The k-th rank's longest time without a launch in a step: its median (ns), and what it is in.

    The name is empty where no call or range of the report covers it.
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
    return float(np.median(lengths)), commonest(names) if often else ""


def longest_gap(busy: Any, begin: int, end: int) -> tuple[int, int]:
    """The longest time within `begin`..`end` in which nothing ran."""
    inside = (busy.end > begin) & (busy.start < end)
    starts = np.r_[busy.start[inside], end]
    ends = np.r_[begin, busy.end[inside]]
    gaps = starts - ends
    worst = int(np.argmax(gaps))
    return int(ends[worst]), int(max(starts[worst], ends[worst]))


def busy_gpu(dataset: Dataset, seen: Blame, k: int) -> tuple[str, str, list[dict[str, Any]]]:
    """Which kernels the rank has more of, or longer, than its peers."""
    line = dataset.timelines[k]
    per_name: dict[str, tuple[float, float]] = {}
    for other, each in enumerate(dataset.timelines):
        step = np.r_[each.step, -1][each.step_of]
        use = (each.kind == COMPUTE) & np.isin(step, dataset.steady_steps)
        size = len(each.names)
        time = np.bincount(each.name[use], each.stop[use] - each.start[use], size)
        count = np.bincount(each.name[use], minlength=size)
        for n, name in enumerate(each.names):
            sign = 1.0 if other == k else -1.0 / max(len(dataset.ranks) - 1, 1)
            t, c = per_name.get(name, (0.0, 0.0))
            per_name[name] = (t + sign * float(time[n]), c + sign * float(count[n]))
    steps = max(len(dataset.steady_steps), 1)
    worst = max(per_name, key=lambda n: per_name[n][0]) if per_name else ""
    more_time, more_calls = per_name.get(worst, (0.0, 0.0))
    copying = seen.copy[k].sum() > seen.compute[k].sum()
    if copying:
        why, advice = "its copies take longer", "look at what it copies, and from which memory"
    elif more_calls / steps >= 0.5:
        why = "its GPU has more work than its peers'"
        advice = "balance the work between the ranks: samples of equal length, the same layers"
    elif dataset.on_host:
        why = "its GPU is slower than its peers'"
        advice = "look at what else runs on that host, its clocks, and the cores it is bound to"
    else:
        why = "its GPU is slower than its peers'"
        advice = (
            "look at that GPU's clocks, temperature and throttling (nvidia-smi -q -d "
            "PERFORMANCE,CLOCK) and at who else uses it"
        )
    detail = {
        "rank": line.rank,
        "kernel": worst,
        "more_ns_per_step": round(more_time / steps),
        "more_calls_per_step": round(more_calls / steps, 1),
        "what": f"{ms(more_time / steps)} a step more in {worst[:80]}"
        + (f", {more_calls / steps:+.0f} calls" if more_calls / steps >= 0.5 else ""),
    }
    return why, advice, [detail]
