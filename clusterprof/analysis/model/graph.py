"""A graph of moments: each is as late as the latest that it waits for, plus that edge's length.

The model behind every saving. A moment is a host's launch or the end of its wait, a kernel's start
or end, a collective's last arrival. `Graph.times` computes all moments in one pass forwards;
another pass with other lengths answers what would have been (a what-if). One pass takes any number
of what-ifs side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.model.dataset import Bools, Ints

#: a moment that no edge leads to, or an edge that is cut: earlier than anything
NEVER = -(2**61)


@dataclass(frozen=True)
class Graph:
    """Edges by the level of the moment that they lead to: levels in order, moments together.

    `edge` is the place of each sorted edge among those given to `graph`. Level l has the edges
    `level[l]` to `level[l + 1]`, and leads to the moments `target[first[l]:first[l + 1]]`, of
    which each has the edges from `begin[...]` on.
    """

    moments: int
    edge: Ints
    source: Ints
    level: Ints
    target: Ints
    begin: Ints
    first: Ints
    #: moments on or behind a circle: they have no time
    circular: Ints

    def times(self, length: Ints, known: Ints) -> Ints:
        """Return when each moment is.

        `length` is [edges] or [edges, what-ifs] (ns), in the order given to `graph`; `known`
        [moments] or [moments, what-ifs] has the times of moments that wait for nothing, and
        NEVER for all others, or the least time of a moment that also waits.
        """
        out: Ints = known.copy()
        ordered = length[self.edge]
        for low, high, one, other in zip(
            self.level[:-1], self.level[1:], self.first[:-1], self.first[1:], strict=True
        ):
            reached = out[self.source[low:high]] + ordered[low:high]
            latest = np.maximum.reduceat(reached, self.begin[one:other] - low, axis=0)
            at = self.target[one:other]
            out[at] = np.maximum(out[at], latest)
        return out

    def binding(self, length: Ints, times: Ints) -> tuple[Ints, Ints]:
        """Return what each moment waited for longest: a moment, and the edge from it; -1 for none.

        `length` [edges] and `times` [moments] are those of one pass; of equals it is the first.
        """
        reached = times[self.source] + length[self.edge]
        of = np.repeat(self.target, np.diff(self.begin, append=len(self.edge)))
        bound = np.flatnonzero(reached == times[of])[::-1]
        source, edge = np.full((2, self.moments), -1)
        source[of[bound]], edge[of[bound]] = self.source[bound], self.edge[bound]
        return source, edge


def graph(moments: int, source: Ints, target: Ints) -> Graph:
    """Sort edges `source` -> `target` (arrays of moments) into levels.

    Moments on a circle, and those behind one, are in no level, and `circular` lists them.
    """
    depth = _depths(moments, source, target)
    inside = np.flatnonzero(depth[target] > 0)
    order = inside[np.lexsort((target[inside], depth[target[inside]]))]
    to = target[order]
    fresh = np.flatnonzero(np.r_[True, to[1:] != to[:-1]]) if len(to) else np.zeros(0, np.int64)
    each, deep = to[fresh], depth[to[fresh]]
    levels = int(deep.max(initial=0))
    first = np.searchsorted(deep, np.arange(1, levels + 2))
    return Graph(
        moments=moments,
        edge=order,
        source=source[order],
        level=np.r_[fresh, len(to)][first],
        target=each,
        begin=fresh,
        first=first,
        circular=np.flatnonzero(depth < 0),
    )


def _depths(moments: int, source: Ints, target: Ints) -> Ints:
    """How many edges lie on the longest way to each moment; -1 where it is on or behind a circle.

    Kahn's method (Topological sorting of large networks, CACM 1962), a whole level at a time.
    """
    depth = np.full(moments, -1, dtype=np.int64)
    waiting = np.bincount(target, minlength=moments)
    order = np.argsort(source, kind="stable")
    out_of, leads = np.searchsorted(source[order], np.arange(moments + 1)), target[order]
    now, at = np.flatnonzero(waiting == 0), 0
    while len(now):
        depth[now] = at
        low, count = out_of[now], out_of[now + 1] - out_of[now]
        reached = leads[ranges(low, count)]
        if not len(reached):
            break
        nodes, arrived = np.unique(reached, return_counts=True)
        waiting[nodes] -= arrived
        now, at = nodes[waiting[nodes] == 0], at + 1
    return depth


def ranges(low: Ints, count: Ints) -> Ints:
    """Return all of `low[i]` to `low[i] + count[i]`, one range after the other."""
    total = int(count.sum())
    shift = np.repeat(low - np.r_[0, np.cumsum(count)[:-1]], count)
    return np.asarray(np.arange(total) + shift)


def running_maximum(values: Ints, part: Ints) -> Ints:
    """Return the greatest value so far within each part: `part` [n] ascends, `values` [n(, m)]."""
    if not len(values):
        return values
    low = values.min()
    step = int(values.max()) - int(low) + 1
    if step * (int(part[-1]) + 1) >= -NEVER:
        # too large to be raised: their places in order are not
        levels, place = np.unique(values, return_inverse=True)
        return levels[running_maximum(place.reshape(values.shape), part)]
    raised = (values - low) + step * (part if values.ndim == 1 else part[:, None])
    highest = np.maximum.accumulate(raised, axis=0)
    return np.asarray(highest - step * (part if values.ndim == 1 else part[:, None]) + low)


def running_sum(values: Ints, fresh: Bools) -> Ints:
    """Return the sum so far within each part, which begins where `fresh` [n] is true."""
    total = np.cumsum(values, axis=0)
    first = np.maximum.accumulate(np.where(fresh, np.arange(len(fresh)), 0))
    return np.asarray(total - (total - values)[first])
