"""The likeliest offset and drift within the bounds.

The members of a latency-bound collective end within half a microsecond of each other. Those of a
large one do not: its data go around a ring as a wave, so the rank that came last ends last, and
how early another ends depends on its distance behind that rank (`_wave`). Each call's ends are an
observation of the clocks whose error grows with the transfer: the wave is taken off, the rest is a
random effect common to alike calls (same operation, size and last rank) and scatter of each call;
calls that took longer than alike ones were disturbed. Offset and drift follow by generalised least
squares, made robust against odd calls, first within each communicator, then over all of them. Where
there are small calls, they decide.

A call's transfer is the last member's duration, the shortest of all: that needs no clock. Sends and
receives: a waiting Recv ends a constant latency after its Send, in both directions alike, and where
all that wait go one way the latency is the usual one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterprof.align.clock.blocks import ALL_REDUCE, AT_ONCE, ON_HOST, SHARDED, Block
from clusterprof.align.time_stamps import STAMP_ERROR_NS
from clusterprof.columns import (
    Bools,
    Floats,
    Index,
    Ints,
    MemberPlaces,
    RankPlaces,
    Stretches,
    connected,
    count_by,
    least_by,
    order_by,
    row_of,
    rows_by,
    sum_by,
)

#: scatter of one call's ends: the time stamps' own, a part of the transfer (where it is clear who
#: came last, and where it is not), and a part of what it took more than the shortest call alike
_STAMP_NS = 700.0
_SCATTER_FRAC = 0.02
_UNCLEAR_SCATTER_FRAC = 0.05
_DISTURBED_FRAC = 0.05
#: what alike calls have in common, after the wave: part of their transfer, where it is clear who
#: came last and where it is not
_CLEAR_FRAC = 0.03
_UNCLEAR_FRAC = 0.05
#: who comes last is clear if by this part of the transfer
_CLEARLY = 0.25
#: the part of the transfer by which the last to come ends after the mean. `bench/programs/ends.py`
#: on 2, 4 and 8 H200s of one host (NCCL 2.28.9), and training on 2 and 4: AllGather 8.5%,
#: ReduceScatter 9.5% (protocol Simple); AllReduce 4.5%
_WAVE = {ALL_REDUCE: 0.045, SHARDED: 0.09, ON_HOST: 0.0, AT_ONCE: 0.0}
#: ... but an AllReduce of so many members at one host is a ramp (LL128), first to last
_RAMP_MEMBERS, _RAMP = range(5, 9), 0.17
#: the wave's crest comes by this later than the last rank's own (radians), up to eight members;
#: between hosts the ring may go the other way round
_LAG = 0.25
#: ... and up to four members' wave grows no more beyond this transfer: 28 to 32 µs in 1610 µs
_LONGEST_NS = 400_000.0
#: calls between processors, not devices, end when a core has time for them: most within this of
#: each other, some milliseconds apart, whatever was sent. The fit looks for where the most agree
_LOOSE_NS = 100_000.0
#: where one kernel carries many sends and receives the last to come ends last, by such a part (18
#: of 137 µs among four): not a constant latency
_CROWD_FRAC = 0.15
#: a waiting Recv ends so long after its Send, give or take as much: 6 to 15 µs in the recordings of
#: the tests (3 to 12 MB within a host). It counts only where all that waited went one way
_DELAY_NS = 10_000.0
#: by about this the delays of messages of two sizes differ
_SORT_NS = 1_500.0
#: of more calls than this, the most telling
_MOST_CALLS = 400
#: clocks that drift do so by about this, and one in five does; a drift less likely than `_CUT` is
#: taken to be none
_DRIFT_PPM = 30.0
_DRIFTING = 0.2
_CUT = 0.2
_MS = 1e6
#: a drift without any evidence has to stay finite: very wide, not a belief
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

    NaN (error: infinite) where no chain of blocks leads to a rank. `drift` is weighed by its
    likelihood and zero where the data show none; `raw_drift` is as the data alone have it.
    """

    offset: Floats
    drift: Floats
    error: Floats
    #: standard error of the drift (ns per ns)
    drift_error: Floats
    raw_drift: Floats


def estimate(block: Block, middle: float) -> Estimate | None:
    """Estimate one block's relative offsets at time `middle`; None if the block shows nothing."""
    if block.one_way and len(block.members) == 2:
        return _from_pairs(block, middle)
    whole = _complete(block)
    if whole is None:
        return None
    on_host = bool((whole.kind == ON_HOST).any())
    transfer, last, clear = _arrivals(whole)
    shortest = _shortest(whole, transfer)
    growing = _growing(whole, transfer)
    if on_host:
        noise, bias = np.full(len(transfer), _LOOSE_NS), np.ones(len(transfer))
    else:
        scatter = np.where(clear, _SCATTER_FRAC, _UNCLEAR_SCATTER_FRAC)
        noise = _STAMP_NS + scatter * growing + _DISTURBED_FRAC * (transfer - shortest)
        bias = np.where(clear, _CLEAR_FRAC, _UNCLEAR_FRAC) * np.minimum(shortest, growing)
    if len(noise) > _MOST_CALLS:
        some = np.sort(order_by(np.hypot(noise, bias))[:_MOST_CALLS])
        whole, growing, last, clear = whole.take(some), growing[some], last[some], clear[some]
        shortest, noise, bias = shortest[some], noise[some], bias[some]
    apart = whole.end - whole.end.mean(axis=1, keepdims=True)
    apart -= _wave(whole, last) * np.where(clear, growing, 0.0)[:, None]
    time = (whole.end.mean(axis=1) - middle) / _MS
    size = np.round(np.log2(np.maximum(shortest, 1.0))).astype(np.int64)
    alike = np.stack([size, np.where(clear, last, -1)]) * (not on_host)
    _, group = np.unique(alike, axis=1, return_inverse=True)
    value, covariance = _fitted(time, apart, noise, np.ravel(group), bias, loose=on_host)
    return Estimate(whole.members, value[0], value[1], covariance)


def _complete(block: Block) -> Block | None:
    """The calls that all members have; where there are none, of as many members as have some."""
    has_call = ~np.isnan(block.end) & block.holds & block.held
    members = np.arange(len(block.members))
    while len(members) >= 2:
        calls = np.flatnonzero(has_call[:, members].all(axis=1))
        if len(calls):
            return block.of(members).take(calls)
        members = np.delete(members, has_call[:, members].sum(axis=0).argmin())
    return None


def _arrivals(block: Block) -> tuple[Floats, MemberPlaces, Bools]:
    """Per call: its transfer, who came last, and whether that is clear."""
    length = block.end - block.start
    two = np.partition(length, 1, axis=1)[:, :2]
    clear = two[:, 1] - two[:, 0] > _CLEARLY * _growing(block, two[:, 0])
    return two[:, 0], length.argmin(axis=1), clear


def _shortest(block: Block, transfer: Floats) -> Floats:
    """The shortest transfer of each call's like; calls of unknown size are by their length."""
    classes = np.floor(np.log(np.maximum(transfer, 1.0)) / np.log(1.5)).astype(np.int64)
    _, alike = np.unique(np.where(block.sort < 0, -1 - classes, block.sort), return_inverse=True)
    return least_by(alike, transfer, np.full(alike.max() + 1, np.inf))[alike]


def _growing(block: Block, transfer: Floats) -> Floats:
    """The part of each call's transfer (ns) that the differences of its ends grow with."""
    few = (block.kind == ALL_REDUCE) & (len(block.members) < _RAMP_MEMBERS.start)
    return np.asarray(np.where(few, np.minimum(transfer, _LONGEST_NS), transfer))


def _wave(block: Block, last: MemberPlaces) -> Floats:
    """When members end against their mean [calls, members], part of the transfer.

    By the distance in the ring (ranks in order) behind the rank that came last. No bound rests on
    it. What it gains (`make truth`, errors where only large calls connect the ranks, 95th
    percentile): 8 instead of 42 and 4 instead of 24 µs on the FSDP recordings, 11 instead of 29 on
    a tensor-parallel one, 21 instead of 29 over all. Beyond eight members it is not measured.
    """
    count = len(block.members)
    distance = (np.arange(count)[None, :] - last[:, None]) % count / count
    lag = _LAG if count < _RAMP_MEMBERS.stop else 0.0
    height = np.array([_WAVE[int(kind)] for kind in block.kind])[:, None]
    wave = height * np.cos(2 * np.pi * distance - lag)
    if count in _RAMP_MEMBERS:
        ramp = _RAMP * (1 - 2 * distance)
        wave = np.where((block.kind == ALL_REDUCE)[:, None], ramp, wave)
    return np.asarray(wave - wave.mean(axis=1, keepdims=True))


def _fitted(
    time: Floats, apart: Floats, noise: Floats, group: Index, bias: Floats, *, loose: bool
) -> tuple[Floats, Floats]:
    """Offset and drift [2, members] from `apart` [calls, members], and their covariance.

    A random effect for each group of calls with standard deviation `bias`, calls with odd
    residuals counted less. Of `loose` calls most are odd: then from the medians on, for long.
    """
    effects = (group[:, None] == np.arange(group.max() + 1)[None, :]).astype(np.float64)
    design = np.concatenate([np.stack([np.ones(len(time)), time], axis=1), effects], axis=1)
    spread = np.zeros(effects.shape[1])
    spread[group] = np.maximum(bias, 1.0)
    prior = np.diag(np.concatenate([[0.0, 1 / _EVEN_PPM**2], 1 / spread**2]))
    if not loose:
        return _robust(design, apart, noise, prior)
    odd = ((apart - np.median(apart, axis=0)) ** 2).mean(axis=1) / noise**2
    return _robust(design, apart, noise, prior, odd, rounds=20)


def _robust(
    design: Floats, values: Floats, noise: Floats, prior: Floats, odd: Any = 0.0, rounds: int = 4
) -> tuple[Floats, Floats]:
    """Ridge regression by reweighting, odd rows less: the first two coefficients, covariance.

    `odd` (squared residuals in units of `noise`) is where it begins: nowhere odd by default. The
    first two columns are ones and times, which may be far from zero: solved about their middle.
    """
    middle = design[:, 1].mean()
    design = design - middle * (np.arange(design.shape[1]) == 1)
    for _ in range(rounds):
        weight = 1 / noise**2 / (1 + odd / 4)
        normal = design.T @ (weight[:, None] * design) + prior
        value = np.linalg.solve(normal, design.T @ (weight[:, None] * values))
        odd = ((values - design @ value) ** 2).mean(axis=1) / noise**2
    worse = max(1.0, float(np.average(odd, weights=1 / noise**2 / (1 + odd / 4))))
    back = np.array([[1.0, -middle], [0.0, 1.0]])
    return back @ value[:2], back @ np.linalg.inv(normal)[:2, :2] @ back.T * worse


def _from_pairs(block: Block, middle: float) -> Estimate | None:
    """From Sends and Recvs of two ranks: the delay is the same in both directions.

    Only Recvs that waited count: they are longer than their Sends, which needs no clock.
    """
    forth = block.holds[:, 0] & block.held[:, 1]
    length = block.end - block.start
    longer = np.where(forth, length[:, 1] - length[:, 0], length[:, 0] - length[:, 1])
    waited = longer > STAMP_ERROR_NS  # false where a member lacks the call
    if not waited.any():
        return None
    block, forth, length = block.take(waited), forth[waited], length[waited]
    way = np.where(forth, 1.0, -1.0)[:, None]
    later = block.end[:, 1] - block.end[:, 0]
    # the least delay is the truest: a message that was delayed on its way shows little
    delay = way[:, 0] * later
    usual = np.where(forth, *(delay.min(where=w, initial=np.inf) for w in (forth, ~forth)))
    time = (block.end.mean(axis=1) - middle) / _MS
    crowd = _CROWD_FRAC * length.min(axis=1) * (block.carried > 2)
    noise = _STAMP_NS + _DISTURBED_FRAC * (delay - usual) + crowd
    # sorts of messages differ a little in delay; each may go one way only (activations there,
    # gradients back), and shows nothing alone
    sort = np.ravel(np.unique(block.sort, return_inverse=True)[1])
    sorts = way * (sort[:, None] == np.arange(sort.max() + 1)[None, :])
    ones = np.ones((len(time), 1))
    design = np.concatenate([ones, time[:, None], way, sorts], axis=1)
    of_sorts = np.full(sorts.shape[1], 1 / _SORT_NS**2)
    prior = np.diag(np.concatenate([[1e-18, 1 / _EVEN_PPM**2, 1 / _DELAY_NS**2], of_sorts]))
    value, covariance = _robust(design, later[:, None] - _DELAY_NS * way, noise, prior)
    offsets = value * np.array([-0.5, 0.5])
    # the delays of the two directions need not be equal to the last microsecond
    covariance = covariance + np.diag([(1_000.0 + float(np.median(crowd))) ** 2, 0.0])
    return Estimate(block.members, offsets[0], offsets[1], covariance / 2)


def combine(estimates: Sequence[Estimate], ranks: int, reference: int) -> Combined:
    """Put all blocks' estimates together: drifts first, then offsets given the drifts."""
    row = np.array([k for e in estimates for k in e.members], dtype=np.intp)
    block = Stretches.sized([len(e.members) for e in estimates]).of_row
    chained = connected(row, block, ranks)
    reached = chained == chained[reference]
    offset, drift, raw = np.tile(np.where(reached, 0.0, np.nan), (3, 1))
    error, drift_error = np.tile(np.where(reached, 0.0, np.inf), (2, 1))
    solve = np.flatnonzero(reached & (np.arange(ranks) != reference))
    used = [e for e in estimates if reached[list(e.members)].all()]
    of_drift = [(e.members, e.drift, float(e.covariance[1, 1])) for e in used]
    slope, slope_error = _joined(of_drift, ranks, solve, 0.0)
    drift_error[solve], raw[solve] = slope_error * 1e-6, slope * 1e-6
    # A clock either has no drift to speak of, as a daemon keeps it, or one of some `_DRIFT_PPM`:
    # the odds are those of the two normal distributions that the value then comes from.
    wide = 1 + (_DRIFT_PPM / slope_error) ** 2
    exponent = np.minimum((slope / slope_error) ** 2 * (1 - 1 / wide) / 2, 300.0)
    odds = np.exp(exponent) / np.sqrt(wide) * _DRIFTING
    likely = odds / (odds + 1 - _DRIFTING)
    likely = np.where(likely < _CUT, 0.0, likely)
    slope, _ = _joined(of_drift, ranks, solve, 1 / _DRIFT_PPM**2)
    drift[solve] = likely * slope
    of_offset = []
    for e in used:
        gain = e.covariance[0, 1] / e.covariance[1, 1]
        drifts = drift[list(e.members)]
        relative = e.offset + gain * (drifts - drifts.mean() - e.drift)
        rest = e.covariance[0, 0] - gain * e.covariance[0, 1]
        of_offset.append((e.members, relative, max(float(rest), 1.0)))
    offset[solve], error[solve] = _joined(of_offset, ranks, solve, 0.0)
    return Combined(offset, drift * 1e-6, error, drift_error, raw)


def _joined(
    values: Sequence[tuple[tuple[int, ...], Floats, float]],
    ranks: int,
    solve: RankPlaces,
    prior: float,
) -> tuple[Floats, Floats]:
    """Least squares over blocks of relative values; value and error of the ranks `solve`.

    All others are zero. `prior` is the weight of a belief that the values are zero.
    """
    size = np.array([len(members) for members, _, _ in values], dtype=np.int64)
    row = np.array([k for members, _, _ in values for k in members], dtype=np.intp)
    block = Stretches.sized(size).of_row
    weight = np.array([1 / variance for _, _, variance in values])[block]
    apart = np.concatenate([v - v.mean() for _, v, _ in values] or [np.empty(0)])
    right = sum_by(row, weight * apart, ranks)[solve]
    diagonal = sum_by(row, weight, ranks)[solve] + prior
    # a member's weight in its block's mean, so that the normal matrix is diagonal - share share'
    share, place = np.sqrt(weight / size[block]), np.full(ranks, -1)
    place[solve] = np.arange(len(solve))
    inside = place[row] >= 0
    row, block, share = place[row[inside]], block[inside], share[inside]
    small, component = _cheapest(row, block, size, len(solve))
    # without the large blocks the ranks fall into parts, each inverted by itself
    _, of_large = np.unique(block[~small], return_inverse=True)
    large = np.zeros((len(solve), of_large.max(initial=-1) + 1))
    large[row[~small], of_large] = share[~small]
    answer = np.concatenate([right[:, None], large], axis=1)
    error = np.zeros(len(solve))
    row, block, share = row[small], block[small], share[small]
    entries = rows_by(component[row])
    for number, members in rows_by(component).items():
        k = entries.get(number, np.empty(0, dtype=np.int64))
        blocks, column = np.unique(block[k], return_inverse=True)
        means = np.zeros((len(members), len(blocks)))
        means[row_of(members, row[k]), column] = share[k]
        inverse = np.linalg.inv(np.diag(diagonal[members]) - means @ means.T)
        answer[members], error[members] = inverse @ answer[members], np.diag(inverse)
    value, spread = answer[:, 0], answer[:, 1:]
    # and the large ones are put back as Woodbury has it
    between = spread @ np.linalg.inv(np.eye(large.shape[1]) - large.T @ spread)
    error = np.sqrt(np.maximum(error + (between * spread).sum(axis=1), 0.0))
    return value + between @ (large.T @ value), error


def _cheapest(row: RankPlaces, block: Index, size: Ints, ranks: int) -> tuple[Bools, Index]:
    """Which entries are of blocks small enough to be solved first, and the parts they make."""
    best = (np.inf, np.zeros(len(row), dtype=np.bool_), np.arange(ranks))
    for largest in [0, *np.unique(size).tolist()]:
        small = size[block] <= largest
        component = connected(row[small], block[small], ranks)
        count = (size > largest).sum()
        cost = (count_by(component) ** 3.0).sum() + ranks * count**2.0
        best = min(best, (cost, small, component), key=lambda choice: choice[0])
    return best[1], best[2]
