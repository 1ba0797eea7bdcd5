"""Ranks whose times cannot be: a clock that jumped, or calls matched wrongly.

Two members of one communicator contradict each other if no offset, with any drift within the
limit, obeys both sides of what their calls say (see `bounds`). One rank that contradicts many is
the culprit; without it the others' clocks can be told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.align.clock.blocks import Block, Bools, Floats
from clusterprof.align.clock.bounds import DRIFT_LIMIT_PPM, STAMP_ERROR_NS

#: in a larger communicator each member is compared with so many only
_MOST_COMPARED = 32


def contradicting(blocks: Sequence[Block], ranks: int) -> list[int]:
    """Return the fewest ranks (greedily) without which no two ranks contradict each other."""
    against = np.zeros((ranks, ranks), dtype=bool)
    for block in blocks:
        members = np.asarray(block.members)
        if len(members) <= _MOST_COMPARED:
            some = np.arange(len(members))
        else:
            some = np.linspace(0, len(members) - 1, _MOST_COMPARED).astype(np.intp)
        for one in some:
            bad = members[_contradicts(block, int(one))]
            against[members[one], bad] = against[bad, members[one]] = True
    out = []
    while against.any():
        worst = int(against.sum(axis=0).argmax())
        against[worst] = against[:, worst] = False
        out.append(worst)
    return sorted(out)


def _contradicts(block: Block, one: int) -> Bools:
    """Which members contradict `one`: the two bounds of their offset cross."""
    at = np.nanmax(block.start, axis=1)
    middle = (np.nanmin(at) + np.nanmax(at)) / 2
    slack = (DRIFT_LIMIT_PPM * 1e-6 * np.abs(at - middle) + STAMP_ERROR_NS)[:, None]
    end = _or(block.end, block.held, np.inf) + slack
    start = _or(block.start, block.holds, -np.inf)
    above = (end - start[:, [one]]).min(axis=0)
    below = (end[:, [one]] - start).min(axis=0)
    crossed = above + below < 0
    crossed[one] = False
    return np.asarray(crossed, dtype=np.bool_)


def _or(values: Floats, counts: Bools, otherwise: float) -> Floats:
    return np.where(counts & ~np.isnan(values), values, otherwise)
