"""What each rank's host and device did in a step, moment by moment: the rows of the timeline.

A row never overlaps itself. The device's is the account of `analysis.model.accounts`, drawn:
compute, else a collective's wait and transfer, else copies, else idle, so that its lengths add up
to the account and to the step.
A row of the host is one thread's innermost call; the phases are the program's own ranges. Where the
main thread makes no call for long its row has the innermost of these that lies within a phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.host_activity import STEP_RANGES, WAITS
from clusterprof.analysis.model.timeline import Intervals, union
from clusterprof.columns import (
    BlockRows,
    Bools,
    Ints,
    RankPlaces,
    SpanPlaces,
    StepNumbers,
    Stretches,
    begins,
    coded,
    count_by,
    first_after,
    first_at_or_after,
    first_of,
    greatest_by,
    group_of_rows,
    last_at_or_before,
    least_by,
    matched,
    order_by,
    places,
    preceding,
    row_of,
    rows_between,
    running_sum,
    sum_by,
    where_known,
)
from clusterprof.mapped import release
from clusterprof.results import Results, steps_to_look_at
from clusterprof.tables import SPAN_ROWS, SPANS

#: the number of each name
Names = dict[str, int]
#: spans of one row of many ranks: the row, and each one's kind, name, start and end
_Row = tuple[int, Ints, Ints, Ints, Ints]

_PHASE, _HOST, _SECOND_HOST, _DEVICE = range(len(SPAN_ROWS))

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
#: by what the timelines call them (`timeline.KINDS`)
_OF_DEVICE = np.array([_COMPUTE, _TRANSFER, _COPY, _COPY])
_OF_HOST = {"cuda": _CUDA, "os": _BLOCKED, "python": _PYTHON, "range": _RANGE, "op": _OP}
#: calls of the system by which a thread waits until another has work for it
_OF_THREADS = r"(?i)pthread_cond|pthread_join|futex|sem_wait|sem_timedwait|poll|epoll|select"

_BESIDE = -(2**62)

#: ranks that begin within so many activities are looked at at once: they have ten times as many
#: calls of the host
AT_ONCE = 50_000

#: spans that are kept of the typical and the worst step: 12 bytes each in the page, which has at
#: most 6 MB up to 64 ranks and 12 MB beyond
_MOST = {64: 250_000, 2**31: 500_000}
#: and of all steps together, where more steps fit
_MOST_OF_ALL = 120_000


#: what is known of spans, [7, spans]: `lane` is the rank's place times the rows, plus the row
_LANE, _STEP, _OF_KIND, _NAME, _START, _LENGTH, _COUNT = range(7)
_NONE = np.zeros((7, 0), dtype=np.int64)


def spans(
    dataset: Dataset, results: Results, *, most: int | None = None, at_once: int = AT_ONCE
) -> pa.Table:
    """The spans (schema SPANS) of the typical and the worst step, and of others where few are.

    They come in the order of rank, row and time. Steps that are not in it did not fit. Of the first
    two steps `most` spans are kept (None: as many as the page can hold), the short ones merged.
    """
    first = steps_to_look_at(results)
    if not first:
        return SPANS.empty_table()
    names: Names = {}
    if most is None:
        most = next(count for ranks, count in _MOST.items() if len(dataset.ranks) <= ranks)
    durations = {step["step"]: step["duration_ns"] for step in results["steps"]}
    # a sixth of a pixel where the step is 1,400 pixels wide
    finest = max(durations[first[0]] // 8_192, 1)
    drawn, bound = _that_fit(_of_steps(dataset, first, names, at_once), finest, most)
    fit = (_MOST_OF_ALL - drawn.shape[1]) * len(first) // max(drawn.shape[1], 1)
    others = [step for step in durations if step not in first]
    others = others[: max(min(fit, 12 - len(first)), 0)]
    if others:
        blocks = _of_steps(dataset, [*first, *others], names, at_once)
        merged_blocks = [merged(block, bound) if bound else block for block in blocks]
        drawn = np.concatenate([_NONE, *merged_blocks], axis=1)
    drawn = drawn[:, order_by(drawn[_LANE], drawn[_START])]
    return _table(dataset, drawn, list(names), bound)


def _that_fit(blocks: Iterator[Ints], finest: int, most: int) -> tuple[Ints, int]:
    """All spans, where there are more than `most` the short ones merged, and up to which length.

    That is `finest`, or twice as long again and again. Ranks are merged for themselves, so that
    never many more are there than fit.
    """
    kept, bound, begin, end = list[Ints](), 0, 2**62, -(2**62)
    for block in blocks:
        length = finest
        while length <= bound:
            block, length = merged(block, length), length * 2
        kept.append(block)
        begin = min(begin, int(block[_START].min(initial=2**62)))
        end = max(end, int(block[_START].max(initial=-(2**62))))
        # beyond all of the time there is nothing left to merge, however many ranks there are
        while sum(block.shape[1] for block in kept) > most and bound <= end - begin:
            bound = max(finest, bound * 2)
            kept = [merged(block, bound) for block in kept]
    return np.concatenate([_NONE, *kept], axis=1), bound


def _of_steps(dataset: Dataset, steps: Sequence[int], names: Names, at_once: int) -> Iterator[Ints]:
    """The spans of all ranks, block by block; fills `names`. Of other steps: `_BESIDE`."""
    d, aligned = dataset.timelines, dataset.accounts["aligned_begin_ns"].to_numpy()
    stop = aligned + d.end - d.begin
    drawn = [(aligned[d.step == step].min(), stop[d.step == step].max()) for step in steps]
    ahead, begin, end, step = _windows(d.step, d.begin, d.end, aligned - d.begin, steps, drawn)
    rank, _ = d.axis.back(begin)
    # from when collectives begin to when their last member has arrived, on the axis
    c = dataset.collectives
    called = d.axis.of(row_of(dataset.ranks, c.rank), c.start)
    waits = union(called, called + c.wait)
    for k, until in d.blocks(at_once):
        windows = rows_between(rank, k, until)
        if windows.start == windows.stop:
            continue
        block = _of_block(_Block(dataset, k, until, begin[windows], end[windows]), waits, names)
        # which step a span is in, and from there the reference rank's clock
        last = last_at_or_before(rank, block[_LANE] // len(SPAN_ROWS))
        window = np.minimum(first_after(end, block[_START]), last)
        block[_STEP], block[_START] = step[window], block[_START] + ahead[window]
        yield block
        release()


def _windows(
    step: StepNumbers,
    begin: Ints,
    end: Ints,
    ahead: Ints,
    steps: Sequence[int],
    drawn: Sequence[Any],
) -> Ints:
    """What is drawn of all ranks, in order: how far their clocks are behind, begin, end, and step.

    That is each of `steps`, and of the other steps what lies in the stretches `drawn`, which are on
    the reference rank's clock: an axis to which `ahead` leads from that of all ranks.
    """
    whole = np.isin(step, steps)
    stretches = [np.stack([ahead, begin, end, step])[:, whole]]
    for first, last in drawn:
        low, high = np.maximum(begin, first - ahead), np.minimum(end, last - ahead)
        beside = np.stack([ahead, low, high, np.full(len(step), _BESIDE)])
        stretches.append(beside[:, ~whole & (low < high)])
    windows = np.concatenate(stretches, axis=1)
    windows = windows[:, order_by(windows[1])]
    reached = preceding(np.maximum.accumulate(windows[2]), -(2**62))
    windows[1] = np.maximum(windows[1], reached)
    return windows[:, windows[2] > windows[1]]


class _Block(NamedTuple):
    """The ranks from the place `k` to before `until`, and what is drawn of them, on the axis."""

    dataset: Dataset
    k: int
    until: int
    begin: Ints
    end: Ints

    def table(self, name: str) -> tuple[pa.Table, RankPlaces]:
        """A table of all of them, and the rank of each row."""
        tables = [getattr(rank, name) for rank in self.dataset.tables[self.k : self.until]]
        rank = self.k + group_of_rows([table.num_rows for table in tables])
        return pa.concat_tables(tables), rank

    def near(self, table: pa.Table, rank: RankPlaces) -> tuple[BlockRows, Ints, Ints]:
        """The rows that lie in a window, even in part, and when they start and stop."""
        axis = self.dataset.timelines.axis
        start, stop = (axis.of(rank, table[name].to_numpy()) for name in ("start_ns", "end_ns"))
        begin = where_known(self.begin, first_after(self.end, start), 2**62)
        rows = np.flatnonzero((stop > begin) & (stop > start))
        return rows, start[rows], stop[rows]


def _of_block(block: _Block, waits: Intervals, names: Names) -> Ints:
    """The spans of the ranks of a block, by lane and in order; fills `names`.

    Their step is not set yet, and their times are still on the axis: `_of_steps` sets both.
    """
    activity, rank = block.table("activity")
    texts, name = coded(activity, "name")
    rows_of_host, texts_of_host = _host(block, len(texts))
    device, axis = _device(block, activity, rank, name, waits), block.dataset.timelines.axis
    rows = []
    for row, kind, text, start, stop in [device, *rows_of_host]:
        unset, one = np.zeros_like(start), np.ones_like(start)
        lane = axis.back(start)[0] * len(SPAN_ROWS) + row
        rows.append(np.stack([lane, unset, kind, text, start, stop - start, one]))
    drawn = np.concatenate(rows, axis=1)
    drawn = drawn[:, order_by(drawn[_LANE])]
    # the last name is that of idle times, -1
    drawn[_NAME] = _numbered(drawn, [*texts, *texts_of_host, ""], names)
    return drawn


def _device(
    block: _Block, activity: pa.Table, rank: RankPlaces, names: Ints, waits: Intervals
) -> _Row:
    """What the devices did: spans that fill the windows. The name of those that idle is -1."""
    d, begin, end = block.dataset.timelines, block.begin, block.end
    rows, start, stop = block.near(activity, rank)
    kind, name = _OF_DEVICE[d.kind[rows + d.first[block.k]]], names[rows]
    near = slice(first_at_or_after(waits.end, begin[0]), first_at_or_after(waits.start, end[-1]))
    waits = Intervals(waits.start[near], waits.end[near])
    low, high = _between(begin, end, start, stop, waits.end)
    window = first_after(end, low)
    inside = low >= where_known(begin, window, 2**62)
    low, high, window = low[inside], high[inside], window[inside]
    # of each moment the activity that covers the others
    winner = np.full(len(low), -1)
    for covering in (_COPY, _TRANSFER, _COMPUTE):
        rows = np.flatnonzero(kind == covering)
        inner = innermost(start[rows], stop[rows], low)
        covered = inner >= 0
        winner[covered] = rows[inner[covered]]
    waiting = innermost(waits.start, waits.end, low) >= 0
    low, high, first = _runs(low, high, winner, waiting, window)
    winner, waiting = winner[first], waiting[first]
    kind = where_known(kind, winner, _IDLE)
    kind[waiting & (kind == _TRANSFER)] = _WAIT
    return _DEVICE, kind, where_known(name, winner, -1), low, high


def _host(block: _Block, before: int) -> tuple[list[_Row], Sequence[str]]:
    """What the hosts did, and the names of their calls, numbered behind `before` others."""
    table, rank = block.table("host_calls")
    rows, start, stop = block.near(table, rank)
    (kinds, kind), (texts, name) = coded(table, "kind"), coded(table, "name")
    kind = np.asarray([_OF_HOST[text] for text in kinds], dtype=np.int64)[kind[rows]]
    name = name[rows].astype(np.int64)
    kind[(kind == _CUDA) & matched(texts, WAITS)[name]] = _CUDA_WAIT
    kind[(kind == _BLOCKED) & matched(texts, _OF_THREADS)[name]] = _THREAD_WAIT
    is_range = kind == _RANGE
    telling = is_range & ~matched(texts, STEP_RANGES)[name]
    row = _threads(block, rank[rows], table["thread"].to_numpy()[rows], telling)
    name += before
    # the main thread's ranges; the outermost of them are the phases
    ranges = np.flatnonzero(telling & (row == _HOST))
    phases = ranges[order_by(start[ranges], -stop[ranges])]
    reach = preceding(np.maximum.accumulate(stop[phases]), -(2**62))
    phases = phases[start[phases] >= reach]
    drawn: list[_Row] = [(_PHASE, kind[phases], name[phases], start[phases], stop[phases])]
    # what the main thread is in where it makes no call for long: else nothing would stand there
    inner = np.setdiff1d(ranges, phases)
    axis, no_window = block.dataset.timelines.axis, np.zeros(block.until, dtype=np.int64)
    window_ns = greatest_by(axis.back(block.begin)[0], block.end - block.begin, no_window)
    for thread, beside in ((_HOST, inner), (_SECOND_HOST, inner[:0])):
        of_thread = np.concatenate((np.flatnonzero((row == thread) & ~is_range), beside))
        low, high = _between(start[of_thread], stop[of_thread])
        winner = where_known(of_thread, innermost(start[of_thread], stop[of_thread], low), -1)
        low, high, winner = (values[winner >= 0] for values in (low, high, winner))
        low, high, first = _runs(low, high, winner)
        winner = winner[first]
        # the page shows what takes this part of a step, at least (`telling` in timeline_data.js)
        long = high - low >= window_ns[axis.back(low)[0]] // 50
        keep = (kind[winner] != _RANGE) | long
        winner = winner[keep]
        drawn.append((thread, kind[winner], name[winner], low[keep], high[keep]))
    return drawn, texts.tolist()


def _threads(block: _Block, rank: RankPlaces, thread: Ints, telling: Bools) -> Ints:
    """The row of each call of a host by its thread: the two that launch most, the main one first.

    The main thread is that which marks most of the program's ranges, else launches most. Where
    nothing is launched (gloo), those with most calls count.
    """
    table, of_device = block.table("activity")
    launching = table["launch_thread"]
    of_device = of_device[launching.is_valid().to_numpy()]
    threads, number = places(np.concatenate((thread, launching.drop_null().to_numpy())))
    pairs, pair = places(np.concatenate((rank, of_device)) * len(threads) + number)
    of_pair, calls, launches = pairs // len(threads), pair[: len(thread)], pair[len(thread) :]
    count = count_by(launches, len(pairs))
    none = sum_by(of_pair, count)[of_pair] == 0
    count = np.where(none, count_by(calls, len(pairs)), count)
    marks = count_by(calls[telling], len(pairs)) * (count > 0)
    order = order_by(of_pair, -marks, np.where(marks > 0, 0, -count))
    # pairs are by rank: the first of each in this order too is where its stretch begins
    fresh = begins(of_pair)
    is_main = np.zeros(len(pairs), dtype=bool)
    is_main[order[fresh]] = True
    order = order_by(of_pair, ~is_main, -count)
    row = np.full(len(pairs), -1)
    row[order] = _HOST + np.arange(len(pairs)) - first_of(fresh)
    return np.where((count > 0) & (row <= _SECOND_HOST), row, -1)[calls]


def _between(*times: Ints) -> tuple[Ints, Ints]:
    """Begin and end of the spans between all these times (of the axis), in order."""
    edges = np.sort(np.concatenate(times))
    edges = edges[begins(edges)]
    return edges[:-1], edges[1:]


def innermost(start: Ints, stop: Ints, moment: Ints) -> SpanPlaces:
    """Of the spans that are open at each moment the one that began last, or -1."""
    if not len(start):
        return np.full(len(moment), -1)
    order = order_by(start, -stop)
    start, stop = start[order], stop[order]
    # the span before each that ends later, if any: all between the two end earlier
    before = preceding(np.maximum.accumulate(stop), -(2**62))
    outer = np.where(before > stop, np.arange(len(start)) - 1, -1)
    while (short := (outer >= 0) & (stop[outer] <= stop)).any():
        outer[short] = outer[outer[short]]
    inner = last_at_or_before(start, moment)
    while (over := (inner >= 0) & (stop[inner] <= moment)).any():
        inner[over] = outer[inner[over]]
    return where_known(order, inner, -1)


def _runs(low: Ints, high: Ints, *keys: Ints | Bools) -> tuple[Ints, Ints, SpanPlaces]:
    """Neighbours of equal keys as one: its begin and end, and where its first stands."""
    fresh = begins(*keys) | (low != preceding(high, -1))
    runs = Stretches.from_begins(fresh)
    return low[runs.first], high[runs.last], runs.first


def _numbered(drawn: Ints, texts: Sequence[str], names: Names) -> Ints:
    """Each span's name (of `texts`) as its number in `names`: by rank, device first, and kind."""
    rank, row = np.divmod(drawn[_LANE], len(SPAN_ROWS))
    key = (rank * len(SPAN_ROWS) + (row + 1) % len(SPAN_ROWS)) * len(KINDS) + drawn[_OF_KIND]
    first = least_by(drawn[_NAME], key, np.full(len(texts), 2**62))
    number = np.zeros(len(texts), dtype=np.int64)
    for text in order_by(first)[: np.count_nonzero(first < 2**62)].tolist():
        number[text] = names.setdefault(texts[text], len(names))
    return np.asarray(number[drawn[_NAME]])


def merged(drawn: Ints, bound: int) -> Ints:
    """Spans, by lane and in order, with those shorter than `bound` merged.

    The short ones of a lane and step that begin in one stretch of that length become one of each
    kind, one behind the other from where the first began: nothing moves by more than two such
    lengths.
    """
    if not drawn.size:
        return drawn
    short = drawn[_LENGTH] < bound
    number: Ints = np.cumsum(~short)
    stretch = np.where(short, drawn[_START] // bound, -number)
    order = _sorted(drawn[_LANE], number, drawn[_STEP], stretch, drawn[_OF_KIND])
    s, short = drawn[:, order], short[order]
    # of each stretch; a long span is one of its own, as no other long one has its number
    head = begins(s[_LANE], s[_STEP], number[order], stretch[order], short)
    first = head | begins(s[_OF_KIND])  # of each kind in it
    stretches = Stretches.from_begins(head)
    joined, several = s[:, first], (stretches.size > 1)[stretches.of_row]
    if not several.any():
        return joined
    s, stretches = s[:, several], Stretches.from_begins(head[several])
    kinds = Stretches.from_begins(first[several])
    several_joined, of_kind = s[:, kinds.first], stretches.of_row[kinds.first]
    several_joined[_LENGTH], several_joined[_COUNT] = kinds.sum(s[_LENGTH:])
    ends = running_sum(several_joined[_LENGTH], first_of(begins(of_kind)))
    several_joined[_START] = stretches.least(s[_START])[of_kind] + ends - several_joined[_LENGTH]
    longest = order_by(kinds.of_row, -s[_LENGTH])[kinds.first]
    several_joined[_NAME] = s[_NAME, longest]
    joined[:, several[first]] = several_joined
    return joined


def _sorted(lane: Ints, number: Ints, *keys: Ints) -> Ints:
    """The order by all of these: only lanes and numbers whose spans are not in it are sorted."""
    group = Stretches.of(lane, number).of_row
    equal = group[1:] == group[:-1]
    below = np.zeros(len(equal), dtype=bool)
    for key in keys:
        below |= equal & (key[1:] < key[:-1])
        equal &= key[1:] == key[:-1]
    wrong = np.zeros(len(lane), dtype=bool)
    wrong[group[1:][below]] = True
    rows, order = np.flatnonzero(wrong[group]), np.arange(len(lane))
    order[rows] = rows[order_by(group[rows], *(key[rows] for key in keys))]
    return order


def _table(dataset: Dataset, drawn: Ints, names: Sequence[str], bound: int) -> pa.Table:
    rank, row = np.divmod(drawn[_LANE], len(SPAN_ROWS))

    def named(numbers: Ints, texts: Sequence[str]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(numbers.astype(np.int32), pa.array(texts))

    columns = {
        "rank": np.asarray(dataset.ranks, dtype=np.int32)[rank],
        "step": pa.array(drawn[_STEP], mask=drawn[_STEP] == _BESIDE),
        "row": named(row, SPAN_ROWS),
        "kind": named(drawn[_OF_KIND], KINDS),
        "name": named(drawn[_NAME], names or [""]),
        "start_ns": drawn[_START],
        "end_ns": drawn[_START] + drawn[_LENGTH],
        "count": drawn[_COUNT].astype(np.int32),
        "merged_below_ns": np.full(drawn.shape[1], bound),
    }
    return pa.table(columns, schema=SPANS)
