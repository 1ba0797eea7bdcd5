"""Steps of a job that left no step logs: the cycle in which all ranks repeat their collectives.

Of a group that all ranks are in, the calls of a training step come again in the next one: the same
operations of the same sizes, with the same pauses between them. Both tell how many calls a step
has, where there is one such period. A cycle begins with the call after the longest pause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.columns import Floats, Ints, coded, count_by, integers, order_by, rows_by, sum_by
from clusterprof.ingest.flight.all_dumps import Flight
from clusterprof.tables import STEPS

#: so many cycles are to be there at least
_LEAST_CYCLES = 8
#: a cycle has at most so many calls
_MOST_CALLS = 512
#: periods explain this part of how the pauses between calls differ; a longer one explains more
_EXPLAINED, _AS_GOOD = 0.5, 0.95


def cycles(flight: Flight) -> Mapping[int, pa.Table]:
    """Return a step log (`STEPS`) of each rank, a step for each cycle; {} where there is none.

    Steps are numbered by the group's own sequence numbers: alike on all ranks. Times are those of
    the calls, on the rank's own wall clock.
    """
    calls = _calls_of_all(flight)
    if calls is None:
        return {}
    ranks, sequence, kinds, enqueue_ns = calls
    period, first = _period(kinds, np.diff(np.median(enqueue_ns, axis=0)))
    begins = np.arange(first, sequence.size, period or sequence.size)
    if begins.size <= _LEAST_CYCLES:
        return {}
    number = sequence[begins[:-1]] // period
    return {
        rank: pa.table(
            {
                "step": number,
                "begin_ns": enqueue_ns[row, begins[:-1]],
                "end_ns": enqueue_ns[row, begins[1:]],
                "source": ["calls"] * number.size,
            }
        ).cast(STEPS)
        for row, rank in enumerate(ranks)
    }


def within(steps: Mapping[int, pa.Table], spans_ns: Sequence[tuple[int, int]]) -> set[int]:
    """Return the steps that overlap one of these times on any rank (wall clock, ns)."""
    inside = set[int]()
    for log in steps.values():
        step, begin, end = (integers(log, name) for name in ("step", "begin_ns", "end_ns"))
        for span in spans_ns:
            inside.update(step[(begin < span[1]) & (end > span[0])].tolist())
    return inside


def _calls_of_all(flight: Flight) -> tuple[tuple[int, ...], Ints, Ints, Ints] | None:
    """The collectives of one group that all ranks have: the ranks, the calls' numbers, kinds, and
    times [ranks, calls] (ns). Of several groups the one with the most calls. None where there is no
    such group, it has too few calls for `_LEAST_CYCLES`, or a rank lacks a call between them.

    A kind is the operation and the bytes of a call in one number, by the first rank's entries.
    """
    # of coalesced calls, which share one number, the first stands for all
    left_out = pc.or_(flight.entries["p2p"], pc.not_equal(flight.entries["part"], 0))
    entries = flight.entries.filter(pc.invert(left_out))
    rank, group, sequence = (integers(entries, name) for name in ("rank", "group", "sequence"))
    best: Ints = np.array([], np.int64)
    for rows in rows_by(group).values():
        if rows.size > best.size and {*rank[rows].tolist()} == {*flight.ranks}:
            best = rows
    numbers, counts = np.unique(sequence[best], return_counts=True)
    joint = numbers[counts == len(flight.ranks)]
    if joint.size < 2 * _LEAST_CYCLES or np.any(np.diff(joint) != 1):
        return None
    best = best[np.isin(sequence[best], joint)]
    best = best[order_by(rank[best], sequence[best])]
    enqueue_ns = integers(entries, "enqueue_ns")[best].reshape(len(flight.ranks), joint.size)
    operation = coded(entries, "operation")[1][best][: joint.size]
    kinds = (
        operation * (1 << 40)
        + np.minimum(integers(entries, "bytes", 0)[best], 1 << 39)[: joint.size]
    )
    return flight.ranks, joint, kinds, enqueue_ns


def _period(kinds: Ints, pauses: Floats) -> tuple[int, int]:
    """How many calls a cycle has, and the place of the first call that begins one; (0, 0) for no
    such number.
    """
    most = min(_MOST_CALLS, kinds.size // _LEAST_CYCLES)
    repeats = [n for n in range(1, most + 1) if np.array_equal(kinds[n:], kinds[:-n])]
    if not repeats:
        return 0, 0
    logs = np.log(np.maximum(pauses, 1.0))
    explained = np.array([_explained(logs, period) for period in repeats])
    best = float(explained.max())
    period = repeats[0]
    if best >= _EXPLAINED:
        period = repeats[int(np.argmax(explained >= _AS_GOOD * best))]
    by_place = [float(np.median(pauses[place::period])) for place in range(period)]
    return period, (int(np.argmax(by_place)) + 1) % period


def _explained(logs: Floats, period: int) -> float:
    """Which part of their variance the place within a period explains, beyond chance."""
    place = np.arange(logs.size) % period
    means = sum_by(place, logs) / count_by(place)
    rest, free = float(((logs - means[place]) ** 2).sum()), logs.size - period
    whole = float(((logs - logs.mean()) ** 2).sum())
    return 1 - (rest / free) / (whole / (logs.size - 1)) if whole and free > 0 else 0.0
