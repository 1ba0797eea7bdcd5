"""Which steps are evidence: those in which the capture's own start or stop no longer shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from clusterprof.analysis.model.timeline import Timeline

#: steps; captures of one window begin in one step, or in the next
_APART = 2


def steady_steps(timelines: Sequence[Timeline], placed: pa.Table) -> tuple[int, ...]:
    """Return the settled steps, ascending.

    Starting a capture stalls each rank for another time: the ranks resume 50 to 190 ms apart,
    in the midst of the first step of the window, which is therefore never evidence on any
    rank. The first synchronising collectives after it bring the GPUs together again; until each
    rank has been through one (and from communicator to communicator all ranks through each
    other's), later steps are not evidence either. A report without steps has no settled step.
    Windows that begin some steps apart have only the steps in common to compare the ranks by.
    Stopping shows too: the step after a rank's last one is torn, as all wait for that rank, and
    so is the last step of all where a rank's report ends before its collectives do. A step in
    which no time passes on some rank (of a report whose times are wrong) shows nothing.
    """
    lines = [line for line in timelines if line.has_steps]
    if not lines:
        return ()
    steps, counts = np.unique(np.concatenate([line.step for line in lines]), return_counts=True)
    # a rank whose window has none of the steps that most have is compared with nobody
    most = counts == counts.max()
    lines = [line for line in lines if np.isin(line.step, steps[most]).any()]
    first = {line.rank: int(line.step[0]) for line in lines}
    together = _together(placed, max(first.values()))
    torn = _torn_at_the_end(lines, placed)
    torn.update(int(s) for line in lines for s in line.step[line.end <= line.begin])
    apart = max(first.values()) - min(first.values()) >= _APART
    return tuple(
        int(s)
        for s in steps
        if s > together
        and (not apart or all(s in line.step for line in lines))
        and s not in torn
        and all(first[line.rank] < s for line in lines if s in line.step)
    )


def _torn_at_the_end(lines: Sequence[Timeline], placed: pa.Table) -> set[int]:
    """Steps that show the stop of a capture."""
    last = {int(line.step[-1]) for line in lines}
    end = max(last)
    # those that others went on with
    torn = {step + 1 for step in last if step < end}
    step = np.asarray(placed["step"].fill_null(-1).to_numpy())
    state = np.asarray(placed["state"].cast(pa.string()).to_pylist(), dtype=object)
    if bool(((step == end) & (state == "incomplete")).any()):
        torn.add(end)
    return torn


def _together(placed: pa.Table, start: int) -> int:
    """The first step, from `start` on, by whose end the ranks that can have synchronised."""
    role = np.asarray(placed["role"].cast(pa.string()).to_pylist(), dtype=object)
    step = np.asarray(placed["step"].fill_null(-1).to_numpy())
    rank, collective = placed["rank"].to_numpy(), placed["collective"].to_numpy()
    usable = (role != "none") & (step >= 0)
    if not usable.any():
        return start
    whole = len(_groups(rank[usable], collective[usable]))
    for last in np.unique(step[usable]):
        if last < start:
            continue
        upto = usable & (step <= last)
        if len(_groups(rank[upto], collective[upto])) <= whole and set(rank[upto].tolist()) >= set(
            rank[usable].tolist()
        ):
            return int(last)
    return start


def _groups(rank: np.ndarray, collective: np.ndarray) -> list[set[int]]:
    """Ranks connected by common collectives."""
    order = np.lexsort((rank, collective))
    _, first = np.unique(collective[order], return_index=True)
    members = {tuple(part.tolist()) for part in np.split(rank[order], first[1:])}
    groups: list[set[int]] = []
    for part in members:
        mine = set(part)
        apart = [g for g in groups if not g & mine]
        groups = [*apart, mine.union(*(g for g in groups if g & mine))]
    return groups
