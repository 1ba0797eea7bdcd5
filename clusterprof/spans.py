"""What each rank's host and device did in a step, moment by moment: the rows of the timeline.

A row never overlaps itself. The device's is the account of `analysis.model.accounts`, drawn:
compute, else a collective's wait and transfer, else copies, else idle, so that its lengths add up
to the account and to the step.
A row of the host is one thread's innermost call; the phases are the program's own ranges. Where the
main thread makes no call for long its row has the innermost of these that lies within a phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.columns import called, coded
from clusterprof.analysis.model.dataset import Bools, Dataset, Ints
from clusterprof.analysis.model.host_activity import STEP_RANGES, WAITS
from clusterprof.mapped import release
from clusterprof.results import Results, steps_to_look_at
from clusterprof.tables import NAME, RankTables, required

#: number by kind and name
Names = dict[tuple[int, str], int]

#: rows of a rank: the program's ranges, the two threads that launch most, and the device
ROWS = ("phase", "host", "second_host", "device")
_PHASE, _HOST, _, _DEVICE = range(len(ROWS))

#: what a span is, by row: of the device in the order in which one covers the next
KINDS = (
    "compute", "wait", "transfer", "copy", "idle",
    "range",
    #: a CUDA call; one that waits for the device by its nature; a call of the system that blocks;
    #: one that waits for another thread; waits for the GIL and other Python; torch's operators
    "cuda", "cuda_wait", "blocked", "thread_wait", "python", "op",
)  # fmt: skip
_COMPUTE, _WAIT, _TRANSFER, _COPY, _IDLE, _RANGE, _CUDA = range(7)
_CUDA_WAIT, _BLOCKED, _THREAD_WAIT, _PYTHON, _OP = range(7, len(KINDS))
_OF_DEVICE = {
    "compute": _COMPUTE, "collective": _TRANSFER, "copy": _COPY, "memset": _COPY,
}  # fmt: skip
#: calls of the system by which a thread waits until another has work for it
_OF_THREADS = r"(?i)pthread_cond|pthread_join|futex|sem_wait|sem_timedwait|poll|epoll|select"

#: One row per span. Spans of a rank and row do not overlap. A span shorter than `merged_below_ns`
#: may stand for `count` of them of one kind that lie within two such lengths, one behind the other;
#: the name is that of the longest. Times are on the reference rank's clock at the step's begin and
#: pass as on the rank's own, so that lengths are those of the account.
SPANS = pa.schema(
    [
        required("rank", pa.int32()),
        #: null beside the steps that are drawn: while other ranks are in one, this one is before or
        #: behind it
        pa.field("step", pa.int64()),
        required("row", NAME),
        required("kind", NAME),
        required("name", NAME),
        required("start_ns", pa.int64()),
        required("end_ns", pa.int64()),
        required("count", pa.int32()),
        required("merged_below_ns", pa.int64()),
    ]
)

_BESIDE = -(2**62)

#: spans that are kept of the typical and the worst step: 12 bytes each in the page, which has at
#: most 6 MB up to 64 ranks and 12 MB beyond
_MOST = {64: 250_000, 2**31: 500_000}
#: and of all steps together, where more steps fit
_MOST_OF_ALL = 120_000
_MOST_STEPS = 12
#: the first length below which spans are merged is this part of a step: a sixth of a pixel where
#: the step is 1,400 pixels wide
_FINEST = 8_192
#: the page shows of a rank what takes this part of a step, at least (`telling` in timeline.js)
_PART_OF_STEP = 50


#: what is known of spans, [7, spans]: `lane` is the rank's place times the rows, plus the row
_LANE, _STEP, _OF_KIND, _NAME, _START, _LENGTH, _COUNT = range(7)
_NONE = np.zeros((7, 0), dtype=np.int64)


def spans(dataset: Dataset, results: Results) -> pa.Table:
    """The spans (schema SPANS) of the typical and the worst step, and of others where few are.

    They come in the order of rank, row and time. Steps that are not in it did not fit.
    """
    first = steps_to_look_at(results)
    if not first:
        return SPANS.empty_table()
    names: Names = {}
    most = next(count for ranks, count in _MOST.items() if len(dataset.ranks) <= ranks)
    durations = {step["step"]: step["duration_ns"] for step in results["steps"]}
    finest = max(durations[first[0]] // _FINEST, 1)
    found, bound = _of_steps(dataset, first, names, 0), 0
    while found.shape[1] > most:
        bound = max(finest, bound * 2)
        found = merged(found, bound)
    fit = (_MOST_OF_ALL - found.shape[1]) * len(first) // max(found.shape[1], 1)
    others = [step["step"] for step in results["steps"] if step["step"] not in first]
    others = others[: max(min(fit, _MOST_STEPS - len(first)), 0)]
    if others:
        found = _of_steps(dataset, [*first, *others], names, bound)
    found = found[:, np.lexsort((found[_START], found[_LANE]))]
    return _table(dataset, found, list(names), bound)


def _of_steps(dataset: Dataset, steps: Sequence[int], names: Names, bound: int) -> Ints:
    """The spans of all ranks from the first begin of each step to its last end; fills `names`.

    Those shorter than `bound` are merged. What is not of these steps has the number `_BESIDE`.
    """
    table = dataset.accounts
    columns = ("rank", "step", "begin_ns", "end_ns", "aligned_begin_ns")
    rank, step, begin, end, aligned = (table[name].to_numpy() for name in columns)
    stop = aligned + end - begin
    drawn = [(aligned[step == each].min(), stop[step == each].max()) for each in steps]
    parts, c = [], dataset.collectives
    for place, tables in enumerate(dataset.tables):
        mine = np.flatnonzero(rank == tables.rank)
        mine = mine[np.argsort(begin[mine], kind="stable")]
        ahead, low, high, number = _windows(
            step[mine], begin[mine], end[mine], aligned[mine] - begin[mine], steps, drawn
        )
        if not len(low):
            continue
        calls = np.flatnonzero((c.rank == tables.rank) & c.has & (c.wait > 0))
        waiting = c.start[calls], c.start[calls] + c.wait[calls]
        of_rank = _of_rank(tables, place, waiting, low, high, names)
        # which step a span is in, and from there the reference rank's clock
        at = np.clip(np.searchsorted(high, of_rank[_START], side="right"), 0, len(low) - 1)
        of_rank[_STEP], of_rank[_START] = number[at], of_rank[_START] + ahead[at]
        parts.append(merged(of_rank, bound) if bound else of_rank)
        release()
    return np.concatenate([_NONE, *parts], axis=1)


def _windows(
    step: Ints, begin: Ints, end: Ints, ahead: Ints, steps: Sequence[int], drawn: Sequence[Any]
) -> tuple[Ints, Ints, Ints, Ints]:
    """What is drawn of one rank, in order: how far its clock is behind, begin, end, and the step.

    That is each of `steps`, and of its other steps what lies in the stretches `drawn`, which are on
    the reference rank's clock.
    """
    whole = np.isin(step, steps)
    windows = [(ahead[whole], begin[whole], end[whole], step[whole])]
    for first, last in drawn:
        low, high = np.maximum(begin, first - ahead), np.minimum(end, last - ahead)
        beside = ~whole & (low < high)
        windows.append((ahead[beside], low[beside], high[beside], np.full(beside.sum(), _BESIDE)))
    ahead, low, high, number = (np.concatenate(each) for each in zip(*windows, strict=True))
    order = np.argsort(low, kind="stable")
    ahead, low, high, number = (each[order] for each in (ahead, low, high, number))
    low = np.maximum(low, np.maximum.accumulate(np.r_[-(2**62), high])[:-1])
    keep = high > low
    return ahead[keep], low[keep], high[keep], number[keep]


def _of_rank(
    tables: RankTables,
    place: int,
    waiting: tuple[Ints, Ints],
    begin: Ints,
    end: Ints,
    names: Names,
) -> Ints:
    """One rank's spans in the windows `begin`..`end`, on its own wall clock."""
    device = _device(tables, waiting, begin, end, names)
    made = [(_DEVICE, *device), *_host(tables, begin, end, names)]
    parts = []
    for row, kind, name, start, stop in made:
        one = np.ones_like(start)
        lane = one * (place * len(ROWS) + row)
        parts.append(np.stack([lane, one, kind, name, start, stop - start, one]))
    return np.concatenate(parts, axis=1)


def _near(table: pa.Table, begin: Ints, end: Ints) -> pa.Table:
    """The rows that lie in a window, even in part."""
    start, stop = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    at = np.searchsorted(end, start, side="right")
    fits = (at < len(begin)) & (stop > np.r_[begin, 0][at]) & (stop > start)
    return table.filter(pa.array(fits))


def _device(
    tables: RankTables, waiting: tuple[Ints, Ints], begin: Ints, end: Ints, names: Names
) -> tuple[Ints, Ints, Ints, Ints]:
    """What the device did: kind, name, start and end of spans that fill the windows.

    `waiting` is when its collectives begin, and when their last member has arrived.
    """
    table = _near(tables.activity, begin, end)
    start, stop = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    kinds, of = coded(table, "kind")
    kind = np.asarray([_OF_DEVICE[each] for each in kinds], dtype=np.int64)[of]
    edges = np.unique(np.r_[begin, end, start, stop, waiting[1]])
    low, high = edges[:-1], edges[1:]
    at = np.searchsorted(end, low, side="right")
    inside = low >= np.r_[begin, 2**62][at]
    low, high, at = low[inside], high[inside], at[inside]
    winner = np.full(len(low), -1)
    for each in (_COPY, _TRANSFER, _COMPUTE):
        rows = np.flatnonzero(kind == each)
        found = innermost(start[rows], stop[rows], low)
        winner = np.where(found >= 0, np.r_[rows, -1][found], winner)
    waits = innermost(*waiting, low) >= 0
    low, high, first = _runs(low, high, winner, waits, at)
    winner, waits = winner[first], waits[first]
    kind = np.r_[kind, _IDLE][winner]
    kind[waits & (kind == _TRANSFER)] = _WAIT
    return kind, _numbered(table["name"], winner, kind, names), low, high


def _host(
    tables: RankTables, begin: Ints, end: Ints, names: Names
) -> list[tuple[int, Ints, Ints, Ints, Ints]]:
    """What the host did in and across the windows: row, kind, name, start and end of spans."""
    table = _near(tables.host_calls, begin, end)
    start, stop = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    thread = table["thread"].to_numpy()
    kind = _kinds(table)
    ranges = kind == _RANGE
    telling = ranges & ~called(table, STEP_RANGES)
    threads, main = _threads(tables, thread, telling)
    phases = np.flatnonzero(telling & (thread == main))
    phases = phases[np.lexsort((-stop[phases], start[phases]))]
    reach = np.maximum.accumulate(np.r_[-(2**62), stop[phases]])[:-1]
    phases = phases[start[phases] >= reach]
    # what the main thread is in where it makes no call for long: else nothing would stand there
    inner = np.setdiff1d(np.flatnonzero(telling & (thread == main)), phases)
    least = (end - begin).max() // _PART_OF_STEP
    column = table["name"]
    out = [(_PHASE, kind[phases], _numbered(column, phases, kind[phases], names),
            start[phases], stop[phases])]  # fmt: skip
    for row, each in enumerate(threads, _HOST):
        rows = np.flatnonzero((thread == each) & ~ranges)
        rows = np.r_[rows, inner] if each == main else rows
        edges = np.unique(np.r_[start[rows], stop[rows]])
        low, high = edges[:-1], edges[1:]
        winner = np.r_[rows, -1][innermost(start[rows], stop[rows], low)]
        low, high, winner = (each[winner >= 0] for each in (low, high, winner))
        low, high, first = _runs(low, high, winner)
        keep = ~ranges[winner[first]] | (high - low >= least)
        low, high, winner = low[keep], high[keep], winner[first][keep]
        of = kind[winner]
        out.append((row, of, _numbered(column, winner, of, names), low, high))
    return out


def _kinds(calls: pa.Table) -> Ints:
    """The kind (in KINDS) of each call of the host."""
    kinds, of = coded(calls, "kind")
    simple = {"cuda": _CUDA, "os": _BLOCKED, "python": _PYTHON, "range": _RANGE, "op": _OP}
    kind = np.asarray([simple[each] for each in kinds], dtype=np.int64)[of]
    kind[(kind == _CUDA) & called(calls, WAITS)] = _CUDA_WAIT
    kind[(kind == _BLOCKED) & called(calls, _OF_THREADS)] = _THREAD_WAIT
    return kind


def _threads(tables: RankTables, thread: Ints, telling: Bools) -> tuple[list[int], int]:
    """The two threads that launch most, the main one first, and the main one.

    The main thread is that which marks most of the program's ranges, else launches most. Where
    nothing is launched (gloo), those with most calls count.
    """
    launching = pc.drop_null(tables.activity["launch_thread"]).to_numpy()
    numbers, count = np.unique(launching if len(launching) else thread, return_counts=True)
    most = numbers[np.argsort(-count, kind="stable")].tolist()
    marking, count = np.unique(thread[telling & np.isin(thread, numbers)], return_counts=True)
    if not most:
        return [], -1
    main = int(marking[np.argmax(count)]) if len(marking) else most[0]
    return [main, *(each for each in most if each != main)][:2], main


def innermost(start: Ints, stop: Ints, at: Ints) -> Ints:
    """Of the spans that are open at each moment `at` the one that began last, or -1."""
    if not len(start):
        return np.full(len(at), -1)
    order = np.lexsort((-stop, start))
    start, stop = start[order], stop[order]
    # the span before each that ends later: all between the two end earlier
    outer = np.arange(len(start)) - 1
    while True:
        short = (outer >= 0) & (stop[outer] <= stop)
        if not short.any():
            break
        outer[short] = outer[outer[short]]
    found = np.searchsorted(start, at, side="right") - 1
    while True:
        over = (found >= 0) & (stop[found] <= at)
        if not over.any():
            break
        found[over] = outer[found[over]]
    return np.where(found >= 0, order[found], -1)


def _runs(low: Ints, high: Ints, *keys: Ints | Bools) -> tuple[Ints, Ints, Ints]:
    """Neighbours of equal keys as one: its begin and end, and where its first stands."""
    fresh = np.ones(len(low), dtype=bool)
    fresh[1:] = low[1:] != high[:-1]
    for key in keys:
        fresh[1:] |= key[1:] != key[:-1]
    first = np.flatnonzero(fresh)
    last = np.r_[first[1:], len(low)][: len(first)] - 1
    return low[first], high[last], first


def _numbered(column: pa.ChunkedArray, rows: Ints, kind: Ints, names: Names) -> Ints:
    """The number in `names` of each span's kind and name; `rows` are those of `column`, or -1."""
    texts, of = coded(pa.table({"name": column}), "name")
    key = kind * (len(texts) + 1) + np.r_[of, len(texts)][rows]
    unique, inverse = np.unique(key, return_inverse=True)
    known = []
    for each in unique.tolist():
        which, text = divmod(each, len(texts) + 1)
        known.append(names.setdefault((which, (*texts, "")[text]), len(names)))
    return np.asarray(known, dtype=np.int64)[inverse.reshape(-1)]


def merged(found: Ints, bound: int) -> Ints:
    """Spans, in order, with those shorter than `bound` merged.

    The short ones of a lane and step that begin in one stretch of that length become one of each
    kind, one behind the other from where the first began: nothing moves by more than two such
    lengths.
    """
    if not found.size:
        return found
    short = found[_LENGTH] < bound
    number: Ints = np.cumsum(~short)
    stretch = np.where(short, found[_START] // bound, -number)
    order = np.lexsort((found[_OF_KIND], stretch, found[_STEP], number, found[_LANE]))
    s = found[:, order]
    keys = np.stack([s[_LANE], s[_STEP], number[order], stretch[order]])
    same = short[order][1:] & short[order][:-1] & (keys[:, 1:] == keys[:, :-1]).all(axis=0)
    head = np.flatnonzero(np.r_[True, ~same])  # of each stretch
    of_kind = same & (s[_OF_KIND, 1:] == s[_OF_KIND, :-1])
    part = np.flatnonzero(np.r_[True, ~of_kind])  # of each kind in it
    out = s[:, part]
    out[_LENGTH], out[_COUNT] = np.add.reduceat(s[_LENGTH:], part, axis=1)
    before = np.cumsum(out[_LENGTH]) - out[_LENGTH]
    of = np.searchsorted(head, part, side="right") - 1
    begin = np.minimum.reduceat(s[_START], head)
    out[_START] = begin[of] + before - before[np.searchsorted(part, head)][of]
    parts = np.repeat(np.arange(len(part)), np.diff(part, append=len(order)))
    out[_NAME] = s[_NAME, np.lexsort((-s[_LENGTH], parts))[part]]
    return out


def _table(dataset: Dataset, found: Ints, names: list[tuple[int, str]], bound: int) -> pa.Table:
    place, row = np.divmod(found[_LANE], len(ROWS))
    texts = list(dict.fromkeys(name for _, name in names)) or [""]
    place_of = {text: k for k, text in enumerate(texts)}
    name = np.asarray([place_of[text] for _, text in names], dtype=np.int64)

    def named(numbers: Ints, texts: Sequence[str]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(numbers.astype(np.int32), pa.array(texts))

    columns = {
        "rank": np.asarray(dataset.ranks, dtype=np.int32)[place],
        "step": pa.array(found[_STEP], mask=found[_STEP] == _BESIDE),
        "row": named(row, ROWS),
        "kind": named(found[_OF_KIND], KINDS),
        "name": named(name[found[_NAME]], texts),
        "start_ns": found[_START],
        "end_ns": found[_START] + found[_LENGTH],
        "count": found[_COUNT].astype(np.int32),
        "merged_below_ns": np.full(found.shape[1], bound),
    }
    return pa.table(columns, schema=SPANS)
