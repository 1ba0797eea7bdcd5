"""A graph of moments: each is as late as the latest that it waits for, plus that edge's length.

The model behind every saving: `Graph.one_pass` computes all moments, and another pass with other
lengths answers what would have been (a what-if). One takes any number of them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from clusterprof.columns import (
    Ints,
    Stretches,
    count_by,
    first_at_or_after,
    first_places,
    inverse,
    order_by,
    places,
    ranges,
    where_known,
)

#: a moment that no edge leads to, or an edge that is cut: earlier than anything
NEVER = np.iinfo(np.int64).min >> 2


class Graph:
    """Moments in the order in which they are computed: all that it waits for before each.

    `order` is by level, and has the moments of edges and `others` alone, which are few where most
    activities only queue; moments on a circle, and those behind one, are in no level. `edge` is the
    place of each edge among those given; `source` and `target` are places in `order`. Each of
    `levels` is its edges, its targets, and the stretches of its edges that each target has.
    """

    def __init__(
        self, moments: int, source: Ints, target: Ints, others: Sequence[int] | Ints = ()
    ) -> None:
        self.moments = moments
        others = np.asarray(others, dtype=np.int64)
        used, where = places(np.concatenate((source, target, others)))
        self._used = used
        #: how many places there are: one for each in `order`, and one for all other moments
        self.size = len(used) + 1
        source, target, _ = np.split(where, [len(source), 2 * len(source)])
        depth = depths(len(used), source, target)
        order = order_by(np.maximum(depth, 0))
        place = inverse(order)
        self.order, self._place = used[order], place
        edge = np.flatnonzero(depth[target] > 0)
        edge = edge[order_by(place[target[edge]])]
        to = place[target[edge]]
        self.levels = list[tuple[slice, slice, Stretches]]()
        ends = np.cumsum(count_by(depth[target[edge]])[1:]).tolist()
        for low, high in pairwise([0, *ends]):
            of_targets = Stretches.of(to[low:high])
            self.levels.append((slice(low, high), slice(to[low], to[high - 1] + 1), of_targets))
        self.edge, self.source, self.target = edge, place[source[edge]], to
        #: moments on or behind a circle: they have no time
        self.circular = used[depth < 0]

    def place(self, moments: Ints) -> Ints:
        """Return where these moments, of any shape, are in `order`; of others the last place."""
        return where_known(self._place, first_places(self._used, moments), self.size - 1)

    def one_pass(self, length: Ints, times: Ints) -> Ints:
        """Return when each moment is, in `times`: which may have more, and is written to.

        `length` is [edges] or [what-ifs, edges] (ns), in the order of `edge`; `times` is [moments]
        or [what-ifs, moments], in `order`, with the times of moments that wait for nothing, and
        NEVER for all others, or the least time of a moment that also waits.
        """
        for edges, targets, of_targets in self.levels:
            reached: Ints = times.take(self.source[edges], axis=-1)
            reached += length[..., edges]
            latest = times[..., targets]
            np.maximum(latest, of_targets.greatest(reached), out=latest)
        return times


def depths(moments: int, source: Ints, target: Ints) -> Ints:
    """How many edges lie on the longest way to each moment; -1 where it is on or behind a circle.

    Kahn's method (Topological sorting of large networks, CACM 1962), a whole level at a time.
    """
    depth = np.full(moments, -1, dtype=np.int64)
    waiting = count_by(target, moments)
    order = order_by(source)
    out_of, leads = first_at_or_after(source[order], np.arange(moments + 1)), target[order]
    now, level = np.flatnonzero(waiting == 0), 0
    while len(now):
        depth[now] = level
        low, count = out_of[now], out_of[now + 1] - out_of[now]
        reached = leads[ranges(low, count)]
        if not len(reached):
            break
        nodes, arrived = np.unique(reached, return_counts=True)
        waiting[nodes] -= arrived
        now, level = nodes[waiting[nodes] == 0], level + 1
    return depth
