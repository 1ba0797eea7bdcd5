"""Which ranks are compared with each other, and what is usual among the others.

Groups of thousands of ranks have millions of pairs: ranks with the same peers share one array of
them, and what is usual among all but one is read off one sorted column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.columns import Floats, Ints, connected, row_of


@dataclass(frozen=True)
class Peers:
    """For each profiled rank the places of those that do the same work, itself included.

    `circles[circle_of[k]]` are those of the k-th rank; it alone has no rank to be compared with.
    """

    circles: tuple[Ints, ...]
    circle_of: Ints

    def others(self, k: int) -> Ints:
        """The places of the k-th rank's peers."""
        circle = self.circles[self.circle_of[k]]
        return np.asarray(circle[circle != k])

    @cached_property
    def apart(self) -> float:
        """How many circles there are, of those that overlap as many as do not."""
        sizes = np.asarray([len(circle) for circle in self.circles])[self.circle_of]
        return float((1 / sizes[sizes > 1]).sum())

    def usual(self, values: Floats, without: Sequence[int] | Ints = ()) -> Floats:
        """What a rank's middle peer has of `values` [ranks, ...]; NaN where no peer has any.

        Ranks in `without` are no peers.
        """
        usual, counted = np.full_like(values, np.nan), values.copy()
        counted[[*without]] = np.nan
        for number, circle in enumerate(self.circles):
            members = np.flatnonzero(self.circle_of == number)
            usual[members] = median_of_others(counted[circle])[row_of(circle, members)]
        return usual

    def differences(self, values: Floats) -> Floats:
        """How much more of `values` [ranks, ...] than its middle peer a rank has; 0 for NaN."""
        return np.asarray(np.nan_to_num(values - self.usual(values)))


def median_of_others(values: Floats) -> Floats:
    """The median of each column over all rows but each, without NaN; NaN where none has a value."""
    # `order_by` and `inverse` know one order of all columns: here each has its own
    place_in_column = np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0)
    ordered = np.sort(values, axis=0)  # NaN last
    has_value = ~np.isnan(values)
    count = has_value.sum(axis=0) - has_value
    middle = []
    for rank in ((count - 1) // 2, count // 2):
        # of the others: a row's own value, if it has one, is skipped
        row = rank + (has_value & (rank >= place_in_column))
        middle.append(np.take_along_axis(ordered, np.minimum(row, len(values) - 1), axis=0))
    return np.where(count > 0, (middle[0] + middle[1]) / 2, np.nan)


@once
def tied(dataset: Dataset) -> Ints:
    """For each profiled rank the place of the first that chains of matched calls tie it to.

    In those calls members wait for each other: what one saves, all that are tied to it save.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.matched & (c.synchronising | c.point_to_point))
    member = row_of(dataset.ranks, c.rank[rows])
    return connected(member, c.communicators[0][rows], len(dataset.ranks))


def peers(dataset: Dataset, stage: Ints) -> Peers:
    """Ranks of one pipeline stage that are tied.

    They do the same work, whether or not they share a communicator. One that is its stage's only
    one is compared with all stages, in what can be compared.
    """
    job = tied(dataset)
    alike = (job[:, None] == job) & (stage[:, None] == stage)
    if dataset.pipelined:
        alone = alike.sum(axis=1) < 2
        alike[alone] = job[alone, None] == job
    bits = np.packbits(alike, axis=1)
    _, first, circle_of = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    return Peers(tuple(np.flatnonzero(circle) for circle in alike[first]), circle_of.reshape(-1))
