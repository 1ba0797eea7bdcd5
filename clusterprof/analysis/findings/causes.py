"""Why a straggler is late: what its host does meanwhile, or what its GPU has more of."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from clusterprof.analysis.findings.beyond_lengths import COPIES, by_name
from clusterprof.analysis.findings.finding import Evidence, job_of, named
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.host_activity import COLLECTOR
from clusterprof.analysis.model.host_time import (
    BETWEEN,
    LOCKED,
    Named,
    host_time,
    own_clock,
    spent,
    step_spans,
)
from clusterprof.columns import Floats, Ints, parts
from clusterprof.words import ms

#: what to do about the garbage collector, and about the interpreter lock, on one rank or on all
COLLECT_TOGETHER = (
    "Switch automatic collection off (gc.disable()) and collect at the same step on all ranks; "
    "gc.freeze() after the set-up excludes long-lived objects."
)
LEAVE_THE_LOCK = (
    "Move the other threads' work into processes, or into native code that releases the GIL."
)
#: why a host is late that is in these for longest, and what to do about it
_SPECIAL = {
    COLLECTOR: ("the garbage collector runs", COLLECT_TOGETHER),
    LOCKED: (f"its host waits for {LOCKED}", LEAVE_THE_LOCK),
}
#: why a GPU takes longer (its copies, more work, or the same work), and what to do about it
_BUSY = (
    ("its copies take longer", "Look at what it copies, and from which memory."),
    (
        "its GPU has more work than its peers'",
        "Balance the work between the ranks: samples of equal length, the same layers.",
    ),
    (
        "its GPU is slower than its peers'",
        ("Look at that GPU's clocks, temperature and throttling (nvidia-smi -q -d "
         "PERFORMANCE,CLOCK) and at other processes on it."),
    ),
)  # fmt: skip


class Reason(NamedTuple):
    """Why a rank is late (a clause without a full stop), and what shows it."""

    why: str
    evidence: Evidence
    #: what to do, where it is not what the finding's code recommends
    advice: str = ""
    #: it may be work that other ranks could do
    movable: bool = False


def pause(dataset: Dataset, k: int, paused: Ints) -> tuple[float, str]:
    """The k-th rank's longest times on its own, one a step: their mean (ns), and what they are in.

    `paused` is each host moment's own time that counts (ns): what it waits for its GPU is none of
    it. Those of less than half of the longest are others. The name is empty where no call or range
    in the report covers most of it.
    """
    job, time = job_of(dataset), host_time(dataset, k)
    pauses = np.flatnonzero((job.job.host_rank == k) & (paused > 0))
    steps = parts(pauses, job.step_of_host[pauses])
    longest = np.asarray([rows[np.argmax(paused[rows])] for rows in steps], dtype=np.int64)
    longest = longest[paused[longest] >= limits.HALF * paused[longest].max(initial=0)]
    lengths = job.job.lengths.own[longest]
    end = own_clock(dataset, k, job.job.host_at[longest])
    mean = float(lengths.mean()) if len(longest) else 0.0
    cause = time.cause(time.within(end - lengths, end).sum(axis=1) / max(len(longest), 1), mean)
    return mean, "" if cause is None else _where(time.names[cause])[1]


def late_host(dataset: Dataset, k: int, late_ns: Floats) -> Reason:
    """Why a host was late: in what it spends most more than its middle peer, and how much.

    `late_ns` is by how much it was late in each steady-state step. Those in which it was tell.
    """
    late = np.flatnonzero(late_ns > limits.WARNING_FRAC * late_ns.max(initial=0.0))
    job, spans, time = job_of(dataset), step_spans(dataset, k), host_time(dataset, k)
    if len(spans[0]) != len(late_ns):
        return Reason("cannot be determined: its report has not all of the steps", [])
    others = job.peers.others(k)[: limits.MOST].tolist()
    own, *theirs = (
        _spent(dataset, place, time.names, k)[:, late] for place in (k, *others)
        if len(step_spans(dataset, place)[0]) == len(late_ns)
    )  # fmt: skip
    usual = np.median(theirs, axis=0)
    cause = time.cause((own - usual).mean(axis=1), float(late_ns[late].mean()))
    if cause is None and job.unlike and len(dataset.profilers([k, *others])) > 1:
        # of its peers another profiler records other calls: a pause of its own may still tell
        own_ns = job.base.own
        length, where = pause(dataset, k, own_ns - job.unlike.in_time(own_ns, np.array([k])))
        if not where:
            return Reason("cannot be determined: another profiler records its peers", [])
        return Reason(f"its host pauses {where} ({ms(length)})", [])
    if cause is None:
        return Reason("cannot be determined: no call, range or operator explains half of it", [])
    began = [time.when(cause, *span) for span in np.stack(spans, axis=1)[late].tolist()]
    aligned = dataset.clock.align(dataset.ranks[k], np.asarray(began, dtype=np.int64))
    call, took, peers_took = time.names[cause], own[cause], usual[cause]
    rows: Evidence = [
        {
            "rank": dataset.ranks[k], "step": dataset.steady_steps[step],
            "time_ns": int(aligned[n]),
            "host": {**call._asdict(), "duration_ns": took[n].item()},
            "peers_ns": round(peers_took[n]),
        }
        for n, step in enumerate(late[: limits.MOST])
    ]  # fmt: skip
    why, advice = _SPECIAL.get(call.name, (f"its host {' '.join(_where(call))}", ""))
    numbers = f"{ms(took.mean())}, its peers {ms(peers_took.mean())}"
    return Reason(f"{why} ({numbers})", rows, advice)


def _spent(dataset: Dataset, k: int, names: list[Named], like: int) -> Floats:
    """How long the k-th rank's host is in each of `names` in each steady-state step (ns).

    Infinitely long in what may be any part of its time: a gap between ranges that it has not, or
    any call where another profiler than that of the rank `like` is at work, which may not record
    it, and lengthens it in another way.
    """
    unlike = len(dataset.profilers([k, like])) > 1
    rows = {} if unlike else dict(zip(host_time(dataset, k).names, spent(dataset, k), strict=True))
    for name in set(names) - rows.keys():
        unknown = unlike or name.kind == BETWEEN
        rows[name] = np.full(len(dataset.steady_steps), np.inf if unknown else 0)
    return np.stack([rows[name] for name in names])


def _where(call: Named) -> tuple[str, str]:
    """What a host does, and in what, as a sentence says it."""
    if call.kind == BETWEEN:
        # it has two names (`between 'a' and 'b'`): the first 23 of one that is longer than 24
        return "pauses", re.sub(r"(?<=')([^']{23})[^']{2,}(?=')", r"\1…", call.name)
    name = named(call.name)
    return ("blocks", f"in {name}") if call.kind in ("os", "cuda") else ("is", f"in '{name}'")


@once
def busy_gpu(dataset: Dataset, k: int) -> Reason:
    """Which kernels the rank has more of, or longer, than its middle peer."""
    job = job_of(dataset)
    names, *by_step = by_name(job, job.work, job.job.lengths.run)
    took, calls = (values.mean(axis=2) for values in by_step)
    more, more_calls = job.peers.differences(took)[k], job.peers.differences(calls)[k].round(1)
    copies = np.asarray([bool(COPIES.match(name)) for name in names])
    work = ~copies & (np.round(more_calls) >= 1)
    ways, half = (copies, work, ~copies), limits.HALF * more.clip(0).sum()
    which = next((k for k in (0, 1) if more[ways[k]].sum() >= half), 2)
    chosen, (why, advice) = ways[which], _BUSY[which]
    worst = int(np.argmax(np.where(chosen, more, -np.inf)))
    row = {
        "rank": dataset.ranks[k], "kernel": names[worst],
        "more_ns_per_step": round(float(more[worst])),
        "more_calls_per_step": float(more_calls[worst]) + 0.0,  # none, and not minus none
    }  # fmt: skip
    own_ns, peers_ns = took[k, chosen].sum(), (took[k] - more)[chosen].sum()
    numbers = f"{ms(own_ns)}, its peers {ms(peers_ns)}"
    return Reason(f"{why} ({numbers})", [row], advice, movable=chosen is work)
