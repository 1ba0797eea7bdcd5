"""Columns of tables as arrays, and the verbs that order, join and group them.

What the rest of the product asks of rows is asked here, so that a line says what is wanted and not
how numpy finds it: which row is the last before a time, what adds up by rank, where a stretch of
equal values begins. A *row* is a place in a table, -1 where there is none; a *group* is a number
from 0 on that several rows have in common.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
Objects = npt.NDArray[np.object_]
#: whole numbers of any width: 32 bits where there is one for each activity of a job
Small = npt.NDArray[Any]
Number = TypeVar("Number", bound=np.generic)

# --- what whole numbers stand for: names for the reader (`docs/design.md`); -1 stands for nothing

#: ranks as the job numbers them, steps as the program does, and matched calls
RankNumbers = Ints
StepNumbers = Ints
CollectiveNumbers = Ints
#: ranks by their places, ascending: among those with a report (`Dataset.ranks`) where nothing else
#: is said, and among those that are replayed (`Replay.ranks`)
RankPlaces = Small
ReplayRanks = Ints
#: steps by their places, ascending: among those in steady state, or those that are replayed
StepPlaces = Small
#: one rank's part of a step (`Timelines.step`)
StepRows = Small
#: activities of one report, or of all, one after the other (`Dataset.activities`)
ActivityRows = Small
#: activities that the replayed steps launch (`Part.activity`)
ReplayRows = Small
#: activities, host moments or host calls of some ranks, from the first of these on
BlockRows = Small
#: streams that a replay's activities are on (`Part.stream_rank`)
StreamPlaces = Small
#: moments of hosts (`Part.host_at`), and all moments of a replay, of which those come first
HostMoments = Small
Moments = Small
#: moments by their places in `Graph.order`, edges by theirs in `Graph.edge`
MomentPlaces = Ints
EdgeRows = Ints
#: places in a step at which all hosts do the same (`profiler_bias.host_places`)
HostPlaces = Ints
#: calls of hosts that are looked for (`HostCalls`)
HostCallRows = Ints
#: members' calls in the matched and the placed table, and a report's `collective_calls`
PlacedRows = Small
CallRows = Ints
#: calls of one rank (`Calls`), one communicator (`Block`), or flight recorders (`FlightCalls`)
CallPlaces = Small
#: a communicator's calls in the order that its members have in common
CommonPlaces = Ints
#: members of a communicator or of a process group
MemberPlaces = Small
#: entries of flight recorders, and their process groups (`Flight.groups`)
EntryRows = Ints
GroupPlaces = Ints
#: spans of the timeline by their places among those that are looked at (`spans.py`)
SpanPlaces = Ints

# --- from tables


def integers(table: pa.Table, name: str, missing: int = 0) -> Ints:
    """Return a column of integers, with `missing` for null."""
    column = table[name]
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(missing, column.type))
    return np.asarray(column.to_numpy(), dtype=np.int64)


def texts(table: pa.Table, name: str) -> Objects:
    """Return a column of strings, with None for null."""
    column = table[name]
    if pa.types.is_dictionary(column.type) and not column.null_count:
        names, place = coded(table, name)
        return np.asarray(names[place])
    return np.asarray(column.cast(pa.string()).to_numpy(zero_copy_only=False), dtype=np.object_)


def coded(table: pa.Table, name: str) -> tuple[Objects, Index]:
    """Return the different values of a column of strings, and of each row the place of its own.

    No value may be null.
    """
    column = table[name].unify_dictionaries() if table.num_rows else table[name]
    chunks = column.chunks if pa.types.is_dictionary(column.type) else []
    if not chunks:
        chunks = [column.combine_chunks().dictionary_encode()]
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks]).astype(np.intp)
    return np.asarray(chunks[0].dictionary.to_numpy(zero_copy_only=False), np.object_), codes


def matched(names: Objects, pattern: str) -> Bools:
    """Return in which of `names` a regular expression finds something."""
    matches = pc.match_substring_regex(pa.array(names, pa.string()), pattern)
    return np.asarray(matches.to_numpy(zero_copy_only=False), dtype=np.bool_)


def called(table: pa.Table, pattern: str) -> Bools:
    """Return the rows with a name that a regular expression finds something in."""
    names, name = coded(table, "name")
    return np.asarray(matched(names, pattern)[name], dtype=np.bool_)


def narrow(values: Ints) -> npt.NDArray[Any]:
    """Return values in 32 bits where all of them fit."""
    least, most = values.min(initial=0), values.max(initial=0)
    fits = least >= -(2**31) and most < 2**31
    return values.astype(np.int32) if fits else values


# --- order


def order_by(*keys: npt.NDArray[Any]) -> Ints:
    """Return the rows in ascending order of the first key, then of the next; equal ones stay.

    >>> order_by(np.array([2, 1, 2]), np.array([5, 9, 4])).tolist()
    [1, 2, 0]
    """
    if len(keys) == 1:
        return np.argsort(keys[0], kind="stable")
    return np.lexsort(keys[::-1])


def inverse(order: Ints) -> Ints:
    """Return at which place of an order each row stands.

    >>> inverse(np.array([1, 2, 0])).tolist()
    [2, 0, 1]
    """
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


# --- join: rows of an ascending column


def last_at_or_before(column: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Ints:
    """Return the last row of an ascending column that is not above each value wanted, or -1.

    >>> last_at_or_before(np.array([10, 20, 20]), np.array([9, 10, 25])).tolist()
    [-1, 0, 2]
    """
    return np.searchsorted(column, wanted, side="right") - 1


def first_at_or_after(column: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Ints:
    """Return the first row of an ascending column that is not below each value, or its length.

    >>> first_at_or_after(np.array([10, 20, 20]), np.array([9, 20, 25])).tolist()
    [0, 1, 3]
    """
    return np.searchsorted(column, wanted)


def first_after(column: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Ints:
    """Return the first row of an ascending column that is above each value, or its length.

    >>> first_after(np.array([10, 20, 20]), np.array([9, 20])).tolist()
    [0, 3]
    """
    return np.searchsorted(column, wanted, side="right")


def rows_between(column: npt.NDArray[Any], low: int, high: int) -> slice:
    """Return the rows of an ascending column from `low` on and below `high`.

    >>> rows_between(np.array([3, 4, 4, 6]), 4, 6)
    slice(1, 3, None)
    """
    first, until = np.searchsorted(column, (low, high)).tolist()
    return slice(first, until)


def row_of(members: Any, wanted: npt.NDArray[Any]) -> Ints:
    """Return the row of each value among ascending `members`, which hold all that are wanted.

    >>> row_of((0, 8, 16), np.array([16, 0])).tolist()
    [2, 0]
    """
    return np.searchsorted(members, wanted)


def row_among(members: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Ints:
    """Return the first row of each value in the ascending column `members`, -1 where there is none.

    >>> row_among(np.array([3, 5, 5]), np.array([5, 4])).tolist()
    [1, -1]
    """
    if not members.size:
        return np.full(wanted.size, -1, np.int64)
    row = np.minimum(first_at_or_after(members, wanted), members.size - 1)
    return np.where(members[row] == wanted, row, -1)


def where_known(
    values: npt.NDArray[Number], rows: npt.NDArray[Any], otherwise: float
) -> npt.NDArray[Number]:
    """Return the value of each row, and `otherwise` for a row that is -1 or behind the last.

    >>> where_known(np.array([7, 8]), np.array([1, -1, 2]), 0).tolist()
    [8, 0, 0]
    """
    padded: npt.NDArray[Number] = np.append(values, values.dtype.type(otherwise))
    return np.asarray(padded[rows])


def first_places(values: Ints, wanted: Ints) -> Ints:
    """Return the row in `values` of each one wanted, of several the first; -1 where none is."""
    order = order_by(values)
    return where_known(order, row_among(values[order], wanted), -1)


# --- group


def count_by(group: npt.NDArray[Any], groups: int = 0) -> Ints:
    """Return how many rows each of `groups` groups has, at least as many as there are.

    >>> count_by(np.array([0, 2, 2]), 4).tolist()
    [1, 0, 2, 0]
    """
    return np.bincount(group, minlength=groups)


def sum_by(group: npt.NDArray[Any], values: npt.NDArray[Any], groups: int = 0) -> Floats:
    """Return the sum of each group's values; of true and false how many are true.

    >>> sum_by(np.array([0, 2, 2]), np.array([5, 1, 2])).tolist()
    [5.0, 0.0, 3.0]
    """
    return np.asarray(np.bincount(group, values, groups), dtype=np.float64)


def least_by(
    group: npt.NDArray[Any], values: npt.NDArray[Any], start: npt.NDArray[Number]
) -> npt.NDArray[Number]:
    """Return the least of each group's values and its `start` [groups].

    >>> least_by(np.array([0, 0, 1]), np.array([5, 3, 9]), np.array([8, 8])).tolist()
    [3, 8]
    """
    least: npt.NDArray[Number] = start.copy()
    np.minimum.at(least, group, values)
    return least


def greatest_by(
    group: npt.NDArray[Any], values: npt.NDArray[Any], start: npt.NDArray[Number]
) -> npt.NDArray[Number]:
    """Return the greatest of each group's values and its `start` [groups].

    >>> greatest_by(np.array([0, 0, 1]), np.array([5, 3, 9]), np.array([0, 10])).tolist()
    [5, 10]
    """
    greatest: npt.NDArray[Number] = start.copy()
    np.maximum.at(greatest, group, values)
    return greatest


def first_by(group: npt.NDArray[Any], *keys: npt.NDArray[Any]) -> Ints:
    """Return of each group, in ascending order, the row that comes first by the keys.

    >>> first_by(np.array([4, 2, 4]), np.array([7, 8, 6])).tolist()
    [1, 2]
    """
    order = order_by(group, *keys)
    return order[begins(group[order])]


def preceding(values: npt.NDArray[Number], first: float) -> npt.NDArray[Number]:
    """Return the value before each one, and `first` before the first.

    >>> preceding(np.array([3, 4, 5]), 0).tolist()
    [0, 3, 4]
    """
    before = np.empty_like(values)
    before[:1], before[1:] = first, values[:-1]
    return before


def begins(*keys: npt.NDArray[Any]) -> Bools:
    """Return where a stretch of rows begins in which all keys stay the same.

    >>> begins(np.array([3, 3, 5]), np.array([1, 2, 2])).tolist()
    [True, True, True]
    """
    fresh = np.ones(len(keys[0]), dtype=np.bool_)
    fresh[1:] = False
    for key in keys:
        fresh[1:] |= key[1:] != key[:-1]
    return fresh


def group_of_rows(sizes: Any, dtype: type[np.signedinteger[Any]] = np.int64) -> Small:
    """Return the group of each row where the groups' rows lie one after the other.

    >>> group_of_rows([2, 0, 1]).tolist()
    [0, 0, 2]
    """
    return np.repeat(np.arange(len(sizes), dtype=dtype), sizes)


@dataclass(frozen=True)
class Stretches:
    """Rows in stretches, each from one of `first` up to the next; there are `rows` of them.

    >>> stretches = Stretches.of(np.array([7, 7, 4]))
    >>> stretches.first.tolist(), stretches.size.tolist()
    ([0, 2], [2, 1])
    >>> stretches.sum(np.array([1, 2, 3])).tolist()
    [3, 3]
    >>> Stretches.sized([2, 1]).of_row.tolist()
    [0, 0, 1]
    """

    first: Ints
    rows: int

    @classmethod
    def of(cls, *keys: npt.NDArray[Any]) -> Stretches:
        """Return the stretches of rows in which all keys stay the same."""
        return cls.from_begins(begins(*keys))

    @classmethod
    def from_begins(cls, fresh: Bools) -> Stretches:
        """Return the stretches that begin where `fresh` [rows] is true.

        >>> Stretches.from_begins(np.array([True, False, True])).size.tolist()
        [2, 1]
        """
        return cls(np.flatnonzero(fresh), len(fresh))

    @classmethod
    def sized(cls, sizes: Any) -> Stretches:
        """Return stretches of so many rows each."""
        until = np.cumsum(sizes, dtype=np.int64)
        return cls(preceding(until, 0), int(until[-1]) if until.size else 0)

    @cached_property
    def size(self) -> Ints:
        """How many rows each stretch has."""
        return np.diff(self.first, append=self.rows)

    @property
    def last(self) -> Ints:
        """The last row of each stretch."""
        return self.first + self.size - 1

    @property
    def of_row(self) -> Ints:
        """The stretch of each row."""
        return group_of_rows(self.size)

    def sum(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The sum of each stretch, along the last axis of `values` [(m, )rows]."""
        return self._by(np.add, values)

    def least(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The least of each stretch, along the last axis of `values` [(m, )rows]."""
        return self._by(np.minimum, values)

    def greatest(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The greatest of each stretch, along the last axis of `values` [(m, )rows]."""
        return self._by(np.maximum, values)

    def _by(self, ufunc: np.ufunc, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        if not len(self.first):
            return values[..., :0]
        return np.asarray(ufunc.reduceat(values, self.first, axis=-1))


def places(values: Ints) -> tuple[Ints, Ints]:
    """Return the different values in ascending order, and of each value its place among them."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if high - low > 2 * values.size:
        distinct, place = np.unique(values, return_inverse=True)
        return distinct, place.astype(np.int64)
    # they lie close: without sorting
    occurs = count_by(values - low, 1) > 0
    return np.flatnonzero(occurs) + low, (np.cumsum(occurs) - 1)[values - low]


def combined(*keys: Ints) -> Ints:
    """A number of each row's combination of keys, from 0 on (one key after the other is quick)."""
    number = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        _, place = np.unique(key, return_inverse=True)
        number = np.unique(number * (place.max(initial=0) + 1) + place, return_inverse=True)[1]
    return number


def rows_by(values: Ints) -> dict[int, Ints]:
    """Return the rows of each value, both in ascending order."""
    distinct, place = places(values)
    # numbers of 16 bits are sorted by their digits, in a tenth of the time
    order = order_by(place.astype(np.uint16) if distinct.size < 1 << 16 else place)
    counts = count_by(place, distinct.size)
    return dict(zip(distinct.tolist(), np.split(order, np.cumsum(counts))[:-1], strict=True))


def parts(rows: Ints, keys: npt.NDArray[Any]) -> list[Ints]:
    """`rows` in parts of equal `keys`, the parts in the order of their first rows."""
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    same = rows_by(of.reshape(-1))
    return [rows[same[k]] for k in np.argsort(first).tolist()]


def ranges(low: Ints, count: Ints) -> Ints:
    """Return all of `low[i]` to `low[i] + count[i]`, one range after the other."""
    total = int(count.sum())
    shift = np.repeat(low - preceding(np.cumsum(count), 0), count)
    return np.asarray(np.arange(total) + shift)


def first_of(fresh: Bools) -> Small:
    """Return where the part of each element begins, as one does where `fresh` [n] is true.

    In 32 bits: there is one for each of a job's moments.
    """
    begin = np.where(fresh, np.arange(len(fresh), dtype=np.int32), np.int32(0))
    return np.maximum.accumulate(begin, out=begin)


def running_maximum(values: Ints, group: Small) -> Ints:
    """Return the greatest of `values` [(m, )n] so far in each group: `group` [n] ascends."""
    if not values.size:
        return values
    low = values.min()
    step = int(values.max()) - int(low) + 1
    if step * (int(group[-1]) + 1) >= 1 << 61:
        # too large to be raised: their places in order are not
        levels, place = np.unique(values, return_inverse=True)
        return levels[running_maximum(place.reshape(values.shape), group)]
    by = step * group.astype(np.int64)
    raised = values - low + by
    np.maximum.accumulate(raised, axis=-1, out=raised)
    return np.asarray(raised - by + low)


def running_sum(values: Small, begin: Small) -> Ints:
    """Return the sum so far within each part; `begin` [n] is where it begins."""
    total: Ints = np.cumsum(values, axis=-1)
    total -= (total - values).take(begin, axis=-1)
    return total


def sums(shape: tuple[int, ...], places: tuple[Small, ...], values: Small | None = None) -> Floats:
    """Return the sums of `values`, or else how many there are, at their places along each axis."""
    total = np.bincount(np.ravel_multi_index(places, shape), values, math.prod(shape))
    return np.asarray(total.reshape(shape), dtype=float)


def connected(member: Ints, group: Ints, count: int) -> Ints:
    """For each of `count` things the first of those that groups connect it with, itself at least.

    `member` and `group` [entries]: which thing is in which group.
    """
    first = np.arange(count)
    while True:
        least = least_by(group, first[member], np.full(int(group.max(initial=-1)) + 1, count))
        before, first = first, least_by(member, least[group], first)
        # pointer doubling: a thing is connected with what its first one is connected with
        first = first[first]
        if np.array_equal(first, before):
            return first
