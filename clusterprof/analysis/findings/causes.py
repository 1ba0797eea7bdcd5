"""Why a straggler is late: what its host does meanwhile, or what its GPU has more of."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.findings.finding import Evidence, job_of, named
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.dataset import Dataset, Floats, Ints, commonest, parts
from clusterprof.analysis.model.intervals import Intervals
from clusterprof.analysis.model.timeline import COLLECTIVE
from clusterprof.mapped import release
from clusterprof.words import ms

#: where a sentence has two names (`between 'a' and 'b'`), all of one that is longer than 24
_LONG_NAME = re.compile(r"(?<=')([^']{23})[^']{2,}(?=')")

#: what to do about the garbage collector, and about the interpreter lock, on one rank or on all
COLLECT_TOGETHER = (
    "Switch automatic collection off (gc.disable()) and collect at the same step on all ranks; "
    "gc.freeze() after the set-up excludes long-lived objects."
)
LEAVE_THE_LOCK = (
    "Move the other threads' work into processes, or into native code that releases the GIL."
)


@dataclass(frozen=True)
class Reason:
    """Why a rank is late (a clause without a full stop), and what shows it."""

    why: str
    evidence: Evidence
    #: what to do, where it is not what the finding's code recommends
    advice: str = ""
    #: it may be work that other ranks could do
    movable: bool = False


def pause(dataset: Dataset, k: int, paused: Ints) -> tuple[float, str]:
    """The k-th rank's longest time on its own in a step: its mean (ns), and what it is in.

    `paused` is each host moment's own time that counts (ns): what it waits for its GPU is none of
    it. The name is empty where no call or range in the report covers most of it.
    """
    job = job_of(dataset)
    mine = np.flatnonzero((job.job.host_rank == k) & (paused > 0))
    longest = [rows[np.argmax(paused[rows])] for rows in parts(mine, job.step_of_host[mine])]
    gaps = [_own_span(dataset, k, int(moment)) for moment in longest]
    inside = [host_activity.doing(dataset.tables[k], *gap) for gap in gaps]
    release()
    names = [str(activity["name"]) for activity in inside if activity]
    often = names and len(names) >= limits.HALF * len(gaps)
    mean = float(np.mean([end - begin for begin, end in gaps] or [0]))
    return mean, commonest(names) if often else ""


def _own_span(dataset: Dataset, k: int, moment: int) -> tuple[int, int]:
    """The time on its own that a host moment of the k-th rank ends, on that rank's own clock."""
    job = job_of(dataset).job
    aligned = end = job.host_at[moment : moment + 1]
    for _ in range(3):  # clocks differ in pace by millionths
        end = end + aligned - dataset.clock.align(dataset.ranks[k], end)
    return int(end[0] - job.lengths.own[moment]), int(end[0])


def late_host(dataset: Dataset, k: int, each: Floats) -> Reason:
    """Why the host was late: what it did in the longest time that its peers did not take.

    `each` is by how much it was late in each steady-state step (ns).
    """
    tables, d, rank = dataset.tables[k], dataset.timelines, dataset.ranks[k]
    busy = d.busy(k)
    rows: Evidence = []
    apart = _beyond_peers(dataset, k)
    # time by what the host was in, and by where between ranges it was: what a step without a
    # pause spends its time in is no cause
    spent: Counter[tuple[str, str]] = Counter()
    for late, step in zip(each, dataset.steady_steps, strict=True):
        at = d.steps_of(k, [step])
        if late <= 0 or not len(at):
            continue
        gap = apart.get(step)
        if not gap:
            idle = longest_gap(busy, int(d.begin[at[0]]), int(d.end[at[0]]))
            begin, end = d.axis.back(np.asarray(idle))[1].tolist()
            gap = begin, end
        host = host_activity.doing(tables, *gap) or host_activity.between(tables, *gap)
        if host:
            spent[str(host["kind"]), str(host["name"])] += gap[1] - gap[0]
        aligned = dataset.clock.align(rank, np.asarray(gap[:1], dtype=np.int64))
        row = {"rank": rank, "step": step, "time_ns": int(aligned[0]), "gap_ns": gap[1] - gap[0]}
        rows.append({**row, "host": host})
    release()
    if not rows:
        return Reason("its kernels are launched late", rows)
    why, advice = "its host is in no CUDA call or NVTX range before launching kernels", ""
    if spent:
        most = max(spent, key=lambda key: (spent[key], key[0] != "between"))
        why, advice = _why(*most, rows)
    return Reason(why, rows[: limits.MOST], advice)


def _why(kind: str, name: str, rows: Evidence) -> tuple[str, str]:
    """Why a host was late that was in this for longest, and what to do where that is special."""
    if name == host_activity.COLLECTOR:
        runs = [row for row in rows if row["host"] and row["host"]["name"] == name]
        worst = max(runs, key=lambda row: int(row["host"]["duration_ns"]))
        spent = ms(worst["host"]["duration_ns"])
        return f"the garbage collector ran {spent} in step {worst['step']}", COLLECT_TOGETHER
    if kind == "between":
        return "its host runs its own code " + _LONG_NAME.sub(r"\1…", name), ""
    if "GIL" in name:
        return "its host waits for the GIL before launching kernels", LEAVE_THE_LOCK
    call = kind in ("os", "cuda")
    where = f"blocks in {named(name)}" if call else f"is in '{named(name)}'"
    return f"its host {where} before launching kernels", ""


def _beyond_peers(dataset: Dataset, k: int) -> dict[int, tuple[int, int]]:
    """By step: the host's longest own time between the two collectives where it exceeds most.

    What most of its peers take between the same two is no reason to be late. Times of the rank's
    own clock; a step in which it takes no longer than they do is left out.
    """
    job = job_of(dataset)
    replayed, others = job.job, job.peers.others(k)
    if dataset.on_host or not len(others):
        return {}
    shape = len(dataset.ranks), len(replayed.steps), int(job.host_phase.max(initial=0)) + 1
    spent, own = np.zeros(shape), replayed.lengths.own
    np.add.at(spent, (replayed.host_rank, job.step_of_host, job.host_phase), own)
    more = spent[k] - np.median(spent[others], axis=0)
    out = {}
    for s, step in enumerate(replayed.steps.tolist()):
        worst = int(more[s].argmax())
        here = (replayed.host_rank == k) & (job.step_of_host == s) & (job.host_phase == worst)
        if more[s, worst] > 0 and here.any():
            last = np.flatnonzero(here)[np.argmax(own[here])]
            out[step] = _own_span(dataset, k, int(last))
    return out


def longest_gap(busy: Intervals, begin: int, end: int) -> tuple[int, int]:
    """The longest time within `begin`..`end` in which nothing ran."""
    inside = (busy.end > begin) & (busy.start < end)
    starts, ends = np.r_[busy.start[inside], end], np.r_[begin, busy.end[inside]]
    worst = int(np.argmax(starts - ends))
    return int(ends[worst]), int(max(starts[worst], ends[worst]))


def busy_gpu(dataset: Dataset, k: int) -> Reason:
    """Which kernels the rank has more of, or longer, than its peers."""
    every, d = dataset.activities, dataset.activities.lines
    took = d.took
    steady = np.r_[np.isin(d.step, dataset.steady_steps), False]
    use = (every.kind != COLLECTIVE) & steady[d.launched_in]
    # its own, less the mean of the others'
    weight = np.where(every.rank == k, 1.0, -1.0 / max(len(dataset.ranks) - 1, 1))[use]
    weight /= len(dataset.steady_steps)
    name, size = every.name[use], len(every.names)
    more, calls = (np.bincount(name, each, size) for each in (weight * took[use], weight))
    at = int(np.argmax(more))
    worst, more_ns, more_calls = every.names[at], float(more[at]), float(calls[at])
    copies = any(word in worst.lower() for word in ("memcpy", "memset"))
    movable = not copies and round(more_calls) >= 1
    if copies:
        why, advice = "its copies take longer", "Look at what it copies, and from which memory."
    elif movable:
        why = "its GPU has more work than its peers'"
        advice = "Balance the work between the ranks: samples of equal length, the same layers."
    else:
        why = "its GPU is slower than its peers'"
        advice = (
            "Look at what else runs on that host, its clocks, and the cores it is bound to."
            if dataset.on_host
            else "Look at that GPU's clocks, temperature and throttling (nvidia-smi -q -d "
            "PERFORMANCE,CLOCK) and at other processes on it."
        )
    row = {
        "rank": dataset.ranks[k], "kernel": worst, "more_ns_per_step": round(more_ns),
        "more_calls_per_step": round(more_calls, 1) + 0.0,  # none, and not minus none
    }  # fmt: skip
    return Reason(why, [row], advice, movable)
