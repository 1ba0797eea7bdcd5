"""Which ranks are compared with each other, and what is usual among the others.

Groups of thousands of ranks have millions of pairs: ranks with the same peers share one array of
them, and what is usual among all but one is read off one sorted column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clusterprof.analysis.model.dataset import Dataset, Floats, Ints, parts


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

    @cached_property
    def apart(self) -> float:
        """How many circles there are, of those that overlap as many as do not."""
        sizes = np.asarray([len(circle) for circle in self.circles])[self.of]
        return float((1 / sizes[sizes > 1]).sum())

    def excess(self, values: Floats) -> Floats:
        """How much more than the median of its peers each rank has, 0 where nothing compares.

        `values` are [ranks, steps], NaN where a rank lacks the step.
        """
        usual = np.full_like(values, np.nan)
        for number, circle in enumerate(self.circles):
            mine = np.flatnonzero(self.of == number)
            if len(circle) > 1:
                each = median_of_others(values[circle])
                usual[mine] = each[np.searchsorted(circle, mine)]
        return np.maximum(np.nan_to_num(values - usual), 0.0)


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
    place, codes = np.searchsorted(dataset.ranks, c.rank[rows]), c.communicators[0][rows]
    # a rank without any is in one of its own
    single = np.setdiff1d(np.arange(count), place)
    place, codes = np.r_[place, single], np.r_[codes, -1 - single]
    pairs = np.unique(np.c_[place, codes], axis=0)
    members = {int(pairs[m[0], 1]): pairs[m, 0] for m in parts(np.arange(len(pairs)), pairs[:, 1])}
    mine = [tuple(each.tolist()) for each in parts(pairs[:, 1], pairs[:, 0])]
    keys = list(zip(mine, stage.tolist(), strict=True))
    found = {}
    for key in dict.fromkeys(keys):
        groups, its_stage = key
        joint = np.zeros(count, dtype=bool)
        joint[np.concatenate([members[one] for one in groups])] = True
        found[key] = np.flatnonzero(joint & (stage == its_stage))
    # many groups may lead to the same peers
    different = {circle.tobytes(): circle for circle in found.values()}
    number = {name: n for n, name in enumerate(different)}
    of = np.asarray([number[found[key].tobytes()] for key in keys], dtype=np.int64)
    circles = list(different.values())
    alone = np.asarray([len(circle) < 2 for circle in circles], dtype=bool)[of]
    if dataset.pipelined or alone.all():
        circles.append(np.arange(count))
        of[alone] = len(circles) - 1
    return Peers(tuple(circles), of)
