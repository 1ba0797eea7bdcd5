"""How the ends of a large collective differ over its members, as measured.

In a ring the member that came last ends last, and how early the others end depends on how far
behind it they stand in the ring: `bench/programs/ends.py` on 2, 4 and 8 H200s of one host (NCCL
2.28.9; rings in the order of the ranks), and real training on 2 and 4. Protocol Simple, which the
library takes for all AllGathers and ReduceScatters of a megabyte and more, makes a wave over the
ring; LL128, which it takes for an AllReduce of eight up to some 30 MB, and of four for a few MB, a
ramp; LL, for what is smaller, nothing. Beyond eight
members nobody has measured it, and between hosts the ring may go the other way round: there the
wave is taken without what differs between the two directions.

An expectation, with an error that `estimates` allows for. No bound rests on it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: how a call's members end: between processors (gloo) as they like, else by operation
ON_HOST, UNKNOWN = -1, 0
OPERATIONS = {"AllReduce": 1, "AllGather": 2, "ReduceScatter": 3}
#: an AllReduce of three or four members and a few megabytes
RAMP_OF_FEW = 4
#: by which part of the transfer the last to come ends after the mean, 2 to 4 members and beyond
_WAVE = {1: 0.045, 2: 0.085, 3: 0.095}
_RAMP = {1: 0.13, RAMP_OF_FEW: 0.1}
#: the shapes, by distance behind the last to come in a ring of eight
_WAVE_OF_EIGHT = (1.0, 0.72, 0.19, -0.4, -1.0, -0.78, -0.15, 0.42)
_RAMP_OF_EIGHT = (1.0, 0.78, 0.5, 0.18, -0.13, -0.46, -0.78, -1.09)
_ONE_HOST = 8
#: up to four members a small AllReduce passes the ring at one go and its members end together;
#: the wave grows between these sizes (bytes): none at 12.6 MB, a third at 19, all at 33.6
_TOGETHER, _ALL = 12_582_912, 33_554_432
#: ... and no longer with the transfer beyond this: the last member of four was 28 to 32 µs after
#: the mean in 1610 µs, that of two 11 in 620 µs (AllReduces; of other operations, and of eight
#: members, none so long has been seen)
_LONGEST_NS = 400_000.0
_FEW = 4
#: of eight members the ramp grows from nothing at 0.5 MB; of four it was seen at 2.3 MB and not at
#: 0.5 and 8.4 MB
_RAMP_FROM, _RAMP_OF_FEW_TO = 524_288, 8_388_608

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def pattern(operation: int, members: int) -> Floats:
    """Return when members end, by distance behind the last to come, as part of the transfer.

    `operation` is one of the values of `OPERATIONS`, or `RAMP_OF_FEW` (anything else: zeros). The
    mean is zero.
    """
    if operation not in _WAVE and operation not in _RAMP:
        return np.zeros(members)
    away = np.arange(members) / members
    if operation in _RAMP and (_FEW < members <= _ONE_HOST or operation == RAMP_OF_FEW):
        shape = _RAMP[operation] * np.interp(away, np.arange(8) / 8, _RAMP_OF_EIGHT)
    else:
        around = np.array([*_WAVE_OF_EIGHT, _WAVE_OF_EIGHT[0]])
        if members > _ONE_HOST:
            around = (around + around[::-1]) / 2
        shape = _WAVE[operation] * np.interp(away, np.arange(9) / 8, around)
    return np.asarray(shape - shape.mean())


def shown(operations: Ints, members: int, sizes: Ints) -> Floats:
    """Return how much of its pattern each call shows, 0 to 1, by its size (bytes, -1 unknown)."""
    first, last = (_TOGETHER, _ALL) if members <= _FEW else (_RAMP_FROM, _TOGETHER)
    part = np.clip((sizes - first) / (last - first), 0.0, 1.0)
    grows = (operations == OPERATIONS["AllReduce"]) & (sizes >= 0)
    return np.asarray(np.where(grows, part, 1.0), dtype=np.float64)


def shapes(operations: Ints, members: int, sizes: Ints) -> Ints:
    """Return `operations` with those AllReduces as `RAMP_OF_FEW` that are such, by their size."""
    ramp = (sizes > _RAMP_FROM) & (sizes < _RAMP_OF_FEW_TO) & (2 < members <= _FEW)
    few = (operations == OPERATIONS["AllReduce"]) & ramp
    return np.asarray(np.where(few, RAMP_OF_FEW, operations))


def lasting(operations: Ints, members: int, transfers: Floats) -> Floats:
    """Return the part of each transfer (ns) that a call's pattern grows with."""
    ends = (operations == OPERATIONS["AllReduce"]) & (members <= _FEW)
    return np.asarray(np.where(ends, np.minimum(transfers, _LONGEST_NS), transfers))
