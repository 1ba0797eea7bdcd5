"""When ranks were captured: windows one after the other, and ranks whose windows lie apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.columns import integers
from clusterprof.ingest.recording import BEGINS
from clusterprof.tables import RankTables


def one_window(profiled: Sequence[RankTables]) -> tuple[list[RankTables], list[str]]:
    """Return the ranks in one window, and a warning that names those left out, if there are any.

    A profiler with a schedule records several windows of a rank, in a report each or in one; or
    they are of runs that nothing tells apart. Where nothing tells what belongs together, and where
    they are of different jobs, all are returned as they are.
    """
    by_rank: dict[int, list[RankTables]] = {}
    for tables in sorted(profiled, key=lambda report: (report.rank, report.info.begin_ns)):
        by_rank.setdefault(tables.rank, []).extend(_windows(tables))
    every = [window for windows in by_rank.values() for window in windows]
    pairs = [pair for windows in by_rank.values() for pair in pairwise(windows)]
    if not pairs or any(_of_other_jobs(*pair) for pair in pairs):
        return list(profiled), []
    kept = _in_turn([*by_rank.values()]) or _at_one_time(every)
    if kept is None:
        return list(profiled), []
    merged = next(tables for tables in kept if len(by_rank[tables.rank]) > 1)
    others = [window for window in by_rank[merged.rank] if window is not merged]
    text = (
        f"rank {merged.rank} has {words.counted(len(others) + 1, 'window')}: merged are "
        f"{_shown(merged)} and the other ranks' at that time, left out "
        f"{words.listed(map(_shown, others), 3)}"
    )
    return kept, [text]


def nccl_ids(tables: RankTables) -> frozenset[str]:
    """Return NCCL's ids of a rank's communicators; process groups have names instead."""
    names = tables.collective_calls["communicator"].unique().to_pylist()
    return frozenset(name for name in names if name and name.startswith("0x"))


def _of_other_jobs(first: RankTables, second: RankTables) -> bool:
    """Whether two reports of one rank are of two jobs: by fingerprints, or by NCCL's ids."""
    ids = nccl_ids(first), nccl_ids(second)
    return first.info.job != second.info.job or (all(ids) and ids[0].isdisjoint(ids[1]))


def _in_turn(of_ranks: Sequence[Sequence[RankTables]]) -> list[RankTables] | None:
    """Return a window of each rank's, where all ranks have as many, one after the other.

    It is that with most steps, of several such the last; clocks need not agree.
    """
    pairs = (pair for windows in of_ranks for pair in pairwise(windows))
    overlap = any(first.info.end_ns > second.info.begin_ns for first, second in pairs)
    if overlap or len({len(windows) for windows in of_ranks}) > 1:
        return None
    turns = [*zip(*of_ranks, strict=True)]
    return [*max(reversed(turns), key=lambda ranks: min(rank.steps.num_rows for rank in ranks))]


def _at_one_time(every: Sequence[RankTables]) -> list[RankTables] | None:
    """Return the windows of the time at which most ranks have one, and those of ranks that have
    one at another time only; None where a rank has two at that time, or two at others.
    """
    times = {k: (window.info.begin_ns, window.info.end_ns) for k, window in enumerate(every)}
    numbers = in_time(times, apart_ns=0)
    ranks: dict[int, set[int]] = {}
    for k, number in numbers.items():
        ranks.setdefault(number, set()).add(every[k].rank)
    most = max(ranks, key=lambda number: (len(ranks[number]), number))
    kept = [
        window
        for k, window in enumerate(every)
        if numbers[k] == most or window.rank not in ranks[most]
    ]
    return kept if len({window.rank for window in kept}) == len(kept) else None


def _shown(tables: RankTables) -> str:
    """Return how a warning names a window, by one rank's."""
    info, steps = tables.info, tables.steps["step"]
    extent = f"steps {steps[0]} to {steps[-1]}" if len(steps) else "the events"
    return f"{extent} in {info.source} ({words.period(info.begin_ns, info.end_ns)})"


def _windows(tables: RankTables) -> list[RankTables]:
    """Return a report's windows: between two of them steps are missing, and no call was recorded.

    Of times at which calls begin the farthest apart, by more than a step, are the ends of windows.
    """
    step, begin, end = (integers(tables.steps, name) for name in ("step", "begin_ns", "end_ns"))
    if len(step) < 2:
        return [tables]
    usual = np.median(end - begin)
    skipped = np.diff(step) > np.median(np.diff(step))
    called = integers(tables.host_calls, "start_ns")
    cuts = []
    for place in np.flatnonzero(skipped & (begin[1:] - end[:-1] > usual)).tolist():
        inside = called[(called > end[place]) & (called < begin[place + 1])]
        edges = np.concatenate(([end[place]], inside, [begin[place + 1]]))
        widest = int(np.argmax(np.diff(edges)))
        if edges[widest + 1] - edges[widest] > usual:
            cuts.append(int(edges[widest] + edges[widest + 1]) // 2)
    return [_between(tables, *ends) for ends in pairwise([None, *cuts, None])] if cuts else [tables]


def _between(tables: RankTables, begin: int | None, end: int | None) -> RankTables:
    """Return what began in a part of a report's time (ns; None: as far as it reaches)."""
    first, last = begin or tables.info.begin_ns, end or tables.info.end_ns
    for name, column in BEGINS.items():
        table = getattr(tables, name)
        began = table[column]
        if name == "collective_calls":
            began = pc.coalesce(table["issue_start_ns"], began)
        inside = pc.and_(pc.greater_equal(began, first), pc.less_equal(began, last))
        tables = tables.changed(name, table.filter(inside))
    events = [table for table in (tables.activity, tables.host_calls) if table.num_rows]
    begin_ns = min((pc.min(table["start_ns"]).as_py() for table in events), default=first)
    end_ns = max((pc.max(table["end_ns"]).as_py() for table in events), default=last)
    return replace(tables, info=replace(tables.info, begin_ns=begin_ns, end_ns=end_ns))


def apart(profiled: Sequence[RankTables]) -> list[str]:
    """Return a warning, with the times, of ranks whose calls no other's overlap in time."""
    times = {}
    for tables in profiled:
        calls = tables.collective_calls
        times[tables.rank] = (pc.min(calls["start_ns"]).as_py(), pc.max(calls["end_ns"]).as_py())
        if None in times[tables.rank]:  # hosts run far ahead: their captures tell less
            times[tables.rank] = (tables.info.begin_ns, tables.info.end_ns)
    windows: dict[int, list[int]] = {}
    for rank, number in in_time(times, apart_ns=0).items():
        windows.setdefault(number, []).append(rank)
    most = max(windows.values(), key=len)

    def when(ranks: Sequence[int]) -> str:
        begins, ends = zip(*(times[rank] for rank in ranks), strict=True)
        return f"{words.ranks(ranks)} ({words.period(min(begins), max(ends))})"

    return [
        f"the window of {when(others)} does not overlap that of {when(most)}: another window, or a"
        " host's clock that is off"
        for others in windows.values()
        if others is not most
    ]


def in_time(times: Mapping[int, tuple[int, int]], apart_ns: int) -> dict[int, int]:
    """Return rank -> number of its window, (begin, end) in ns; closer than `apart_ns` is one."""
    windows: dict[int, int] = {}
    number, until = 0, None
    for rank, (begin, end) in sorted(times.items(), key=lambda item: item[1]):
        if until is not None and begin > until + apart_ns:
            number += 1
        until = max(until or 0, end)
        windows[rank] = number
    return windows
