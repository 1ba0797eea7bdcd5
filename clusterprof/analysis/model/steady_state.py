"""Which steps are evidence: those in which the profiler's start or stop does not show."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from clusterprof.analysis.model.timeline import Timelines
from clusterprof.columns import (
    Bools,
    Stretches,
    begins,
    connected,
    count_by,
    integers,
    places,
    preceding,
    row_of,
    sum_by,
    texts,
)

#: so many steps tell a job's pace. A window of more steady-state ones is judged by the most typical
#: of them on end: every step is replayed for each what-if, and 5 to 10 are enough. Before a window
#: 32 would reach back into other paces (`pairs/small-late-host`: 59 ms a step, with 20 of them 54)
TYPICAL_STEPS = 20


def steady_steps(d: Timelines, placed: pa.Table) -> tuple[int, ...]:
    """Return the steady-state steps, ascending.

    A profiler's start stalls each rank for another time, in the midst of the window's first step:
    that is never evidence, nor is a later one until synchronising collectives have brought all
    ranks together again. Windows that begin some steps apart, or that lack steps in their midst,
    have only the steps in common to compare ranks by.
    Stopping shows too: in the step after a rank's last one, as all wait for that rank, and in the
    last step of all where a rank's report ends before its collectives do. A step in which no time
    passes on some rank (of a report whose times are wrong) shows nothing.
    """
    known = d.has_steps[d.rank]
    rank, step, took = (each[known] for each in (d.rank, d.step, d.end - d.begin))
    if not len(step):
        return ()
    steps, counts = np.unique(step, return_counts=True)
    # a rank whose window has none of the steps that most have is compared with no other
    kept = np.isin(rank, rank[np.isin(step, steps[counts == counts.max()])])
    rank, step, took = rank[kept], step[kept], took[kept]
    steps = np.unique(step)
    windows = Stretches.of(rank)
    first, last = step[windows.first], step[windows.last]
    column = row_of(steps, step)
    # a profiler that pauses on a rank starts once more
    starts = step[begins(rank) | (column - preceding(column, 0) > 1)]
    # others go on after a rank's stop; the last one cuts its own collectives off
    cut_off = integers(placed, "step", -1)[texts(placed, "state") == "incomplete"]
    stops = np.concatenate((last[last < last.max()] + 1, cut_off[cut_off == last.max()]))
    disturbed = np.concatenate((starts, stops, step[took <= 0]))
    steady = (steps > _synchronised(placed, int(first.max()))) & ~np.isin(steps, disturbed)
    ranks = count_by(column, len(steps))
    inside = (first[:, None] <= steps) & (steps <= last[:, None])
    steady &= ranks == inside.sum(axis=0)
    # what few ranks have is of another window; profilers begin in one step, or in the next
    steady &= 2 * ranks > len(first)
    if first.max() - first.min() > 1:
        steady &= ranks == len(first)
    chosen = steps[steady].tolist()
    if len(chosen) > TYPICAL_STEPS:
        # those on end whose mean length is nearest to that of all of them
        took = sum_by(column, took, len(steps))[steady] / ranks[steady]
        means = np.convolve(took, np.full(TYPICAL_STEPS, 1 / TYPICAL_STEPS), mode="valid")
        nearest = int(np.argmin(np.abs(means - took.mean())))
        chosen = chosen[nearest : nearest + TYPICAL_STEPS]
    return tuple(chosen)


def _synchronised(placed: pa.Table, start: int) -> int:
    """The first step, from `start` on, by whose end the ranks that can have synchronised."""
    role, step = texts(placed, "role"), integers(placed, "step", -1)
    rank, collective = integers(placed, "rank"), integers(placed, "collective")
    usable = (role != "none") & (step >= 0)
    step = step[usable]
    (ranks, member), (_, group) = (places(each[usable]) for each in (rank, collective))

    def apart(rows: Bools) -> int:
        """How many sets of ranks there are that no collective connects with each other."""
        return len(np.unique(connected(member[rows], group[rows], len(ranks))))

    least = apart(step >= 0)
    whole = (last for last in np.unique(step[step >= start]) if apart(step <= last) == least)
    return int(next(whole, start))
