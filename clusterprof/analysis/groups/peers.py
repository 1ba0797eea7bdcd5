"""Which ranks are compared with each other, and what is usual among the others.

Groups of thousands of ranks have millions of pairs: ranks with the same peers share one array of
them, and what is usual among all but one is read off one sorted column.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from clusterprof.analysis.model.dataset import Dataset, Floats, Ints


@dataclass(frozen=True)
class Peers:
    """For each profiled rank the places of those that do the same work, itself included.

    `circles[of[k]]` are those of the k-th rank; it alone has no rank to be compared with.
    """

    circles: tuple[Ints, ...]
    of: Ints

    def others(self, k: int) -> Ints:
        """The places of the k-th rank's peers."""
        circle = self.circles[self.of[k]]
        return np.asarray(circle[circle != k])

    def excess(self, values: Floats) -> tuple[Floats, Floats]:
        """How much more than the median of its peers each rank has, and that median.

        `values` are [ranks, steps], NaN where a rank lacks the step; so is the result, with 0
        where there is nothing to compare with.
        """
        usual = np.full_like(values, np.nan)
        for number, circle in enumerate(self.circles):
            mine = np.flatnonzero(self.of == number)
            if len(circle) > 1:
                each = median_of_others(values[circle])
                usual[mine] = each[np.searchsorted(circle, mine)]
        return np.maximum(np.nan_to_num(values - usual), 0.0), np.nan_to_num(usual)


def median_of_others(values: Floats) -> Floats:
    """For each row of `values` the median of each column over all other rows; NaN counts not.

    NaN where no other row has a value.
    """
    rows, columns = values.shape
    place = np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0)
    ordered = np.sort(values, axis=0)  # NaN last
    known = ~np.isnan(values)
    count = known.sum(axis=0)[None, :] - known
    column = np.broadcast_to(np.arange(columns), (rows, columns))
    middle = []
    for at in ((count - 1) // 2, count // 2):
        # of the others: a row's own value, if it has one, is skipped
        at = np.maximum(at, 0)
        at = at + (known & (at >= place))
        middle.append(ordered[np.minimum(at, rows - 1), column])
    return np.where(count > 0, (middle[0] + middle[1]) / 2, np.nan)


def peers(dataset: Dataset, stage: Ints) -> Peers:
    """Ranks that share a synchronising collective and the pipeline stage.

    In a pipeline, where that leaves a rank alone, all ranks, in what can be compared; all with
    all where no two ranks share one.
    """
    c, count = dataset.collectives, len(dataset.ranks)
    rows = np.flatnonzero(c.synchronising & c.matched)
    codes, _ = c.communicators
    place = np.searchsorted(dataset.ranks, c.rank[rows])
    pairs = np.unique(np.stack([place, codes[rows]], axis=1), axis=0)
    groups = _groups(pairs, count)
    circles: list[Ints] = []
    of = np.zeros(count, dtype=np.int64)
    known: dict[tuple[tuple[int, ...], int], int] = {}
    for k, mine in enumerate(groups):
        key = (mine, int(stage[k]))
        if key not in known:
            known[key] = len(circles)
            member = np.zeros(count, dtype=bool)
            member[k] = True
            for group in mine:
                member[pairs[pairs[:, 1] == group, 0]] = True
            circles.append(np.flatnonzero(member & (stage == stage[k])))
        of[k] = known[key]
    alone = np.asarray([len(circle) < 2 for circle in circles], dtype=bool)[of]
    if dataset.pipelined or alone.all():
        circles.append(np.arange(count))
        of[alone] = len(circles) - 1
    return Peers(tuple(circles), of)


def _groups(pairs: Ints, count: int) -> list[tuple[int, ...]]:
    """The communicators of each place."""
    edges = np.searchsorted(pairs[:, 0], np.arange(count + 1))
    return [tuple(pairs[a:b, 1].tolist()) for a, b in pairwise(edges)]
