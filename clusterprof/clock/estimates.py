"""The likeliest offset within the bounds.

The members of a latency-bound collective (a small one, or one that everybody reached together)
end within half a microsecond of each other; those of a large one do not, because the phases of
a ring end at different times on different ranks. So only the calls with the shortest transfer
count. A call's transfer is the last member's duration, the shortest of all: no clock is needed
to see it. Sends and receives: a waiting Recv ends a constant latency after its Send, and in
both directions alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.clock.blocks import Block, Floats

#: the part of a communicator's calls that counts as latency-bound, and at least so many
_SHORTEST = 0.1
_AT_LEAST = 3
#: a call this much longer than the shortest is not taken for latency-bound
_LONGER = 1.5
#: a drift is believed from so many latency-bound calls, if so many times its own error
_CALLS_FOR_DRIFT = 3
_TIMES_ERROR = 4.0
_MOST_CALLS = 200
#: ends of latency-bound calls scatter by half a microsecond, of larger ones by a part of them
_END_SCATTER_NS = 500.0
_END_SCATTER_FRAC = 0.05


@dataclass(frozen=True)
class Estimate:
    """One block's relative offsets of its members at time `middle`, and their drift.

    `offset` [members] has an arbitrary origin; `drift` is ns per ns, 0 where the data do not
    show one; `scale_ns` (the shortest transfer) ranks blocks: shorter is better.
    """

    members: tuple[int, ...]
    offset: Floats
    drift: Floats
    scale_ns: float


def estimate(block: Block, middle: float) -> Estimate | None:
    """Estimate the relative offsets of one block's members; None if no call has all of them."""
    if not block.both_ways and len(block.members) == 2:
        return _from_pairs(block)
    complete = ~np.isnan(block.end).any(axis=1) & block.holds.all(axis=1) & block.held.all(axis=1)
    whole = block.take(np.flatnonzero(complete))
    if not len(whole.end):
        return None
    transfer = (whole.end - whole.start).min(axis=1)
    count = max(_AT_LEAST, int(np.ceil(_SHORTEST * len(transfer))))
    order = np.argsort(transfer, kind="stable")[:count]
    short = order[transfer[order] <= _LONGER * transfer[order[0]] + 5_000.0]
    scale = float(np.median(transfer[short]))
    # what biases the ends of alike calls is alike: it shifts the offset, but not the drift
    alike = transfer <= _LONGER * transfer[order[0]] + 5_000.0
    time, apart = whole.end.mean(axis=1), whole.end - whole.end[:, :1]
    members = range(apart.shape[1])
    drift = np.array([_slope(time[alike], apart[alike, m], scale) for m in members])
    at_middle = apart[short] - drift * (time[short, None] - middle)
    return Estimate(block.members, np.median(at_middle, axis=0), drift, scale)


def _slope(time: Floats, apart: Floats, scale_ns: float) -> float:
    """Slope of `apart` over `time` (Theil and Sen), or 0.0 where it does not stand out."""
    if len(time) < _CALLS_FOR_DRIFT:
        return 0.0
    if len(time) > _MOST_CALLS:
        chosen = np.linspace(0, len(time) - 1, _MOST_CALLS).astype(int)
        time, apart = time[chosen], apart[chosen]
    i, j = np.triu_indices(len(time), 1)
    gap = time[j] - time[i]
    far = np.abs(gap) > 0.1 * np.ptp(time)
    if not far.any():
        return 0.0
    slope = float(np.median((apart[j] - apart[i])[far] / gap[far]))
    rest = apart - slope * time
    scatter = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    # few calls may agree by chance: never trust them beyond what ends are known to scatter
    scatter = max(scatter, _END_SCATTER_NS, _END_SCATTER_FRAC * scale_ns)
    error = scatter / (float(np.std(time)) * np.sqrt(len(time)))
    return slope if abs(slope) > _TIMES_ERROR * error else 0.0


def _from_pairs(block: Block) -> Estimate | None:
    """From Sends and Recvs of two ranks: half the difference of the two least delays."""
    later = block.end[:, 1] - block.end[:, 0]
    out = block.holds[:, 0] & block.held[:, 1]
    back = block.holds[:, 1] & block.held[:, 0]
    there, here = later[out & ~np.isnan(later)], -later[back & ~np.isnan(later)]
    if not len(there) or not len(here):
        return None
    offset = (there.min() - here.min()) / 2
    delay = (there.min() + here.min()) / 2
    # twice, since unlike a collective's ends this rests on an assumption: equal delays
    scale = 2 * max(delay, 0.0) + 20_000.0
    return Estimate(block.members, np.array([0.0, offset]), np.zeros(2), float(scale))


def combine(
    estimates: Sequence[Estimate], ranks: int, reference: int
) -> tuple[Floats, Floats, Floats]:
    """Walk from the reference over the best blocks; offset, drift and scale of each rank.

    NaN where no chain of blocks leads to a rank.
    """
    offset, drift = np.full(ranks, np.nan), np.full(ranks, np.nan)
    scale = np.full(ranks, np.inf)
    offset[reference] = drift[reference] = scale[reference] = 0.0
    known = {reference}
    # Prim: always the best block that touches what is known and leads beyond it
    left = sorted(estimates, key=lambda e: e.scale_ns)
    while True:
        usable = (
            e
            for e in left
            if any(m in known for m in e.members) and any(m not in known for m in e.members)
        )
        best = next(usable, None)
        if best is None:
            return offset, drift, scale
        anchor = min((m for m in best.members if m in known), key=lambda m: scale[m])
        at = best.members.index(anchor)
        for k, member in enumerate(best.members):
            if member not in known:
                offset[member] = offset[anchor] + best.offset[k] - best.offset[at]
                drift[member] = drift[anchor] + best.drift[k] - best.drift[at]
                scale[member] = scale[anchor] + best.scale_ns
                known.add(member)
