"""The likeliest offset and drift within the bounds.

The members of a latency-bound collective end within half a microsecond of each other. Those of
a large one do not, and not by chance: who ends when depends on who came last (see `rings`).
So each call's ends are an observation of the clocks with an error that grows with its
transfer: what is expected of a ring and of a copy beside it (see `copies`) is taken off, the
rest is a random effect common to alike calls (same operation, size and last rank) and scatter
of each call; calls that took longer than alike ones were disturbed. Offset and drift follow by
generalised least squares, made robust against odd calls, first within each communicator, then
over all of them. Small calls decide where there are some; where there are only large ones each
has its say.

A call's transfer is the last member's duration, the shortest of all: no clock is needed to see
it. Sends and receives: a waiting Recv ends a constant latency after its Send, and in both
directions alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clusterprof.align.clock.blocks import Block, Bools, Floats
from clusterprof.align.clock.rings import ON_HOST, lasting, pattern

#: scatter of one call's ends: the time stamps' own, a part of the transfer (where it is clear who
#: came last, and where it is not), and a part of what it took more than the shortest call alike
_STAMP_NS = 700.0
_SCATTER_FRAC = 0.02
_UNCLEAR_SCATTER_FRAC = 0.05
_DISTURBED_FRAC = 0.05
#: what alike calls have in common, after the ring's pattern: part of their transfer, where it is
#: clear who came last and where it is not
_CLEAR_FRAC = 0.03
_UNCLEAR_FRAC = 0.05
#: who comes last is clear if by this part of the transfer
_CLEARLY = 0.25
#: calls between processors, not devices, end when a core has time for them: most within this of
#: each other, some milliseconds apart, whatever was sent. Where the most agree is looked for
_LOOSE_NS = 100_000.0
#: where one kernel carries many sends and receives the last to come ends last, by such a part (18
#: of 137 µs among four): not a constant latency
_CROWD_FRAC = 0.15
#: by about this the delays of messages of two sizes differ
_SORT_NS = 1_500.0
#: of more calls than this, the most telling
_MOST_CALLS = 400
_ROUNDS = 4
#: clocks that drift apart do so by about this, and one in five does; a drift less likely than
#: that is none
_DRIFT_PPM = 30.0
_DRIFTING = 0.2
_CUT = 0.2
_MS = 1e6
_EVEN_PPM = 1e4


@dataclass(frozen=True)
class Estimate:
    """One block's relative offsets of its members at a given time, and their drift.

    `offset` (ns) and `drift` (ppm) [members] have means of zero; `covariance` [2, 2] is of the
    two, alike for every member.
    """

    members: tuple[int, ...]
    offset: Floats
    drift: Floats
    covariance: Floats


@dataclass(frozen=True)
class Combined:
    """All ranks against the reference: offset (ns), drift (ns per ns), standard error (ns).

    NaN (error: infinite) where no chain of blocks leads to a rank. A drift counts by how likely
    it is one, and is zero where the data do not show any.
    """

    offset: Floats
    drift: Floats
    error: Floats
    #: standard error of the drift (ns per ns)
    drift_error: Floats
    #: the drift as the data alone have it, believed or not
    raw_drift: Floats


def estimate(block: Block, middle: float) -> Estimate | None:
    """Estimate one block's relative offsets at time `middle`; None if nothing can be said."""
    if block.directed and len(block.members) == 2:
        return _from_pairs(block, middle)
    whole = _complete(block)
    if whole is None:
        return None
    transfer, last, clear = _arrivals(whole)
    floor = _least(_sorted(whole, transfer), transfer)
    telling = lasting(whole.rings, len(whole.members), transfer)
    scatter = np.where(clear, _SCATTER_FRAC, _UNCLEAR_SCATTER_FRAC)
    noise = _STAMP_NS + scatter * telling + _DISTURBED_FRAC * (transfer - floor)
    bias = np.where(clear, _CLEAR_FRAC, _UNCLEAR_FRAC) * np.minimum(floor, telling)
    on_host = bool((whole.rings == ON_HOST).any())
    if on_host:
        noise, bias = np.full(len(noise), _LOOSE_NS), np.ones(len(bias))
    if len(noise) > _MOST_CALLS:
        some = np.sort(np.argsort(np.hypot(noise, bias), kind="stable")[:_MOST_CALLS])
        whole, telling, last, clear = whole.take(some), telling[some], last[some], clear[some]
        floor, noise, bias = floor[some], noise[some], bias[some]
    end = whole.end - whole.delays
    apart = end - end.mean(axis=1, keepdims=True)
    apart -= _ring(whole, telling, last, clear)
    time = (whole.end.mean(axis=1) - middle) / _MS
    who = np.where(clear, last, -1)
    likes = np.stack([np.round(np.log2(np.maximum(floor, 1.0))).astype(np.int64), who])
    _, group = np.unique(likes * (not on_host), axis=1, return_inverse=True)
    value, covariance = _fitted(time, apart, noise, np.ravel(group), bias, on_host)
    return Estimate(whole.members, value[0], value[1], covariance)


def _complete(block: Block) -> Block | None:
    """The calls that all members have; where there are none, of as many members as have some."""
    there = ~np.isnan(block.end) & block.holds & block.held
    left = np.arange(len(block.members))
    while len(left) >= 2:
        calls = np.flatnonzero(there[:, left].all(axis=1))
        if len(calls):
            return block.of(left, calls)
        left = np.delete(left, there[:, left].sum(axis=0).argmin())
    return None


def _arrivals(block: Block) -> tuple[Floats, npt.NDArray[np.intp], Bools]:
    """Per call: its transfer, who came last, and whether that is clear."""
    length = block.end - block.start
    last = length.argmin(axis=1)
    two = np.partition(length, 1, axis=1)[:, :2]
    telling = lasting(block.rings, len(block.members), two[:, 0])
    return two[:, 0], last, two[:, 1] - two[:, 0] > _CLEARLY * telling


def _sorted(block: Block, transfer: Floats) -> npt.NDArray[np.int64]:
    """Alike calls; those of unknown size are alike if they take about as long."""
    classes = np.floor(np.log(np.maximum(transfer, 1.0)) / np.log(1.5)).astype(np.int64)
    return np.where(block.sorts < 0, -1 - classes, block.sorts)


def _least(sort: npt.NDArray[np.int64], transfer: Floats) -> Floats:
    """The shortest transfer of each call's like."""
    _, kind = np.unique(sort, return_inverse=True)
    floor = np.full(kind.max() + 1, np.inf)
    np.minimum.at(floor, np.ravel(kind), transfer)
    return np.asarray(floor[np.ravel(kind)])


def _ring(block: Block, transfer: Floats, last: npt.NDArray[np.intp], clear: Bools) -> Floats:
    """What a ring adds to each member's end, where it is clear who came last."""
    count = len(block.members)
    away = (np.arange(count)[None, :] - last[:, None]) % count
    out = np.zeros(away.shape)
    for operation in np.unique(block.rings):
        here = (block.rings == operation) & clear
        out[here] = pattern(int(operation), count)[away[here]] * transfer[here, None]
    return np.asarray(out * block.shown[:, None])


def _fitted(
    time: Floats,
    apart: Floats,
    noise: Floats,
    group: npt.NDArray[np.intp],
    bias: Floats,
    loose: bool,
) -> tuple[Floats, Floats]:
    """Offset and drift [2, members] from `apart` [calls, members], and their covariance.

    A random effect for each group of calls with standard deviation `bias`, calls with odd
    residuals counted less. Of `loose` calls most are odd: then from the medians on, for long.
    """
    known = np.stack([np.ones(len(time)), time], axis=1)
    effects = (group[:, None] == np.arange(group.max() + 1)[None, :]).astype(np.float64)
    design = np.concatenate([known, effects], axis=1)
    spread = np.zeros(effects.shape[1])
    spread[group] = np.maximum(bias, 1.0)
    # a drift without any evidence has to stay finite: very wide, not a belief
    prior = np.diag(np.concatenate([[0.0, 1 / _EVEN_PPM**2], 1 / spread**2]))
    weight = 1 / noise**2
    if loose:
        odd = ((apart - np.median(apart, axis=0)) ** 2).mean(axis=1) / noise**2
        weight = weight / (1 + odd / 4)
    for _ in range(5 * _ROUNDS if loose else _ROUNDS):
        normal = design.T @ (weight[:, None] * design) + prior
        value = np.linalg.solve(normal, design.T @ (weight[:, None] * apart))
        odd = ((apart - design @ value) ** 2).mean(axis=1) / noise**2
        weight = 1 / noise**2 / (1 + odd / 4)
    worse = max(1.0, float(np.average(odd, weights=weight)))
    return value[:2], np.linalg.inv(normal)[:2, :2] * worse


def _from_pairs(block: Block, middle: float) -> Estimate | None:
    """From Sends and Recvs of two ranks: the delay is the same in both directions.

    Only Recvs that waited count, where there are some each way: they are at least as long as
    their Sends, which needs no clock.
    """
    out = block.holds[:, 0] & block.held[:, 1]
    back = block.holds[:, 1] & block.held[:, 0]
    length = block.end - block.start
    longer = np.where(out, length[:, 1] - length[:, 0], length[:, 0] - length[:, 1])
    there = np.asarray(~np.isnan(block.end + block.start).any(axis=1), dtype=np.bool_)
    waited = there & (longer >= 0)
    if not ((out & waited).any() and (back & waited).any()):
        waited = there
    if not ((out & waited).any() and (back & waited).any()):
        return None
    later = block.end[:, 1] - block.end[:, 0]
    # the least delay is the truest: what was held up on its way says little
    delay = np.where(out, later, -later)
    usual = np.where(out, _lowest(delay, out & waited), _lowest(delay, back & waited))
    time = (block.end.mean(axis=1) - middle) / _MS
    crowd = _CROWD_FRAC * np.nanmin(np.where(there[:, None], length, 0.0), axis=1) * block.crowds
    noise = _STAMP_NS + _DISTURBED_FRAC * np.maximum(delay - usual, 0.0) + crowd
    kind = np.unique(block.sorts, return_inverse=True)[1]
    some = np.flatnonzero(waited)
    value, covariance = _directed(
        time[some], later[some], noise[some], np.where(out, 1.0, -1.0)[some], np.ravel(kind)[some]
    )
    offsets = np.outer(value, [-0.5, 0.5])
    # the delays of the two directions need not be equal to the last microsecond
    covariance = covariance + np.diag([(1_000.0 + float(np.median(crowd[some]))) ** 2, 0.0])
    return Estimate(block.members, offsets[0], offsets[1], covariance / 2)


def _lowest(delay: Floats, some: Bools) -> float:
    return float(np.min(delay[some]))


def _directed(
    time: Floats, later: Floats, noise: Floats, way: Floats, kind: npt.NDArray[np.intp]
) -> tuple[Floats, Floats]:
    """Offset and drift of a pair, with an unknown delay that sorts of messages differ in a little.

    Each sort may go one way only (activations there, gradients back): alone it would tell nothing.
    """
    sorts = way[:, None] * (kind[:, None] == np.arange(kind.max() + 1)[None, :])
    design = np.concatenate([np.stack([np.ones(len(time)), time, way], axis=1), sorts], axis=1)
    of_sorts = np.full(sorts.shape[1], 1 / _SORT_NS**2)
    prior = np.diag(np.concatenate([[1e-18, 1 / _EVEN_PPM**2, 1e-18], of_sorts]))
    weight = 1 / noise**2
    for _ in range(_ROUNDS):
        normal = design.T @ (weight[:, None] * design) + prior
        value = np.linalg.solve(normal, design.T @ (weight * later))
        odd = (later - design @ value) ** 2 / noise**2
        weight = 1 / noise**2 / (1 + odd / 4)
    worse = max(1.0, float(np.average(odd, weights=weight)))
    return value[:2], np.linalg.inv(normal)[:2, :2] * worse


def combine(estimates: Sequence[Estimate], ranks: int, reference: int) -> Combined:
    """Put all blocks' estimates together: drifts first, then offsets given the drifts."""
    offset, drift = np.full(ranks, np.nan), np.full(ranks, np.nan)
    error = np.full(ranks, np.inf)
    reached = _reached([e.members for e in estimates], ranks, reference)
    offset[reached] = drift[reached] = error[reached] = 0.0
    solve = np.flatnonzero(reached & (np.arange(ranks) != reference))
    used = [e for e in estimates if reached[list(e.members)].all()]
    drift_error, raw = error.copy(), drift.copy()
    if not len(solve):
        return Combined(offset, drift, error, drift_error, raw)
    of_drift = [(e.members, e.drift, float(e.covariance[1, 1])) for e in used]
    slope, doubt = _joined(of_drift, ranks, solve, 0.0)
    drift_error[solve], raw[solve] = doubt * 1e-6, slope * 1e-6
    believed = _believed(slope, doubt)
    slope, _ = _joined(of_drift, ranks, solve, 1 / _DRIFT_PPM**2)
    drift[solve] = believed * slope
    of_offset = []
    for e in used:
        gain = e.covariance[0, 1] / e.covariance[1, 1]
        mine = drift[list(e.members)]
        at = e.offset + gain * (mine - mine.mean() - e.drift)
        rest = e.covariance[0, 0] - gain * e.covariance[0, 1]
        of_offset.append((e.members, at, max(float(rest), 1.0)))
    offset[solve], error[solve] = _joined(of_offset, ranks, solve, 0.0)
    return Combined(offset, drift * 1e-6, error, drift_error, raw)


def _believed(slope: Floats, doubt: Floats) -> Floats:
    """How likely each drift is one at all, given its value and error; 0 below `_CUT`.

    A clock either has none to speak of, as a daemon keeps it, or one of some `_DRIFT_PPM`: the
    odds are those of the two normal distributions that the value then comes from.
    """
    wide = 1 + (_DRIFT_PPM / doubt) ** 2
    odds = np.exp(np.minimum((slope / doubt) ** 2 * (1 - 1 / wide) / 2, 300.0)) / np.sqrt(wide)
    likely = odds * _DRIFTING / (odds * _DRIFTING + 1 - _DRIFTING)
    return np.asarray(np.where(likely < _CUT, 0.0, likely))


def _reached(groups: Sequence[tuple[int, ...]], ranks: int, reference: int) -> Bools:
    """Which ranks some chain of groups ties to the reference."""
    known = np.zeros(ranks, dtype=bool)
    known[reference] = True
    left = [np.asarray(g) for g in groups]
    while True:
        touching = [g for g in left if known[g].any()]
        if not touching:
            return known
        known[np.concatenate(touching)] = True
        left = [g for g in left if not known[g].all()]


def _joined(
    values: Sequence[tuple[tuple[int, ...], Floats, float]],
    ranks: int,
    solve: npt.NDArray[np.intp],
    prior: float,
) -> tuple[Floats, Floats]:
    """Least squares over blocks of relative values; value and error of the ranks `solve`.

    All others stand at zero. `prior` is the weight of a belief that the values are zero.
    """
    normal = np.zeros((ranks, ranks))
    right = np.zeros(ranks)
    for members, value, variance in values:
        at = np.asarray(members)
        normal[at, at] += 1 / variance
        normal[np.ix_(at, at)] -= 1 / (variance * len(at))
        right[at] += (value - value.mean()) / variance
    inverse = np.linalg.inv(normal[np.ix_(solve, solve)] + prior * np.eye(len(solve)))
    return inverse @ right[solve], np.sqrt(np.maximum(np.diag(inverse), 0.0))
