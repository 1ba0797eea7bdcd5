"""Bounds by causality: they hold for any arrivals, delays, offsets and drifts, and never guess."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from clusterprof.align.clock.blocks import ON_HOST, Block
from clusterprof.align.clock.bounds import bound, contradicting, delivered
from clusterprof.align.time_stamps import DRIFT_LIMIT_PPM, STAMP_ERROR_NS

MS = 1_000_000.0


def calls(
    rng: np.random.Generator,
    members: tuple[int, ...],
    offset: np.ndarray,
    drift: np.ndarray,
    *,
    count: int = 20,
    delay_ns: float = 200_000.0,
    spread_ns: float = 5 * MS,
    root: int | None = None,
) -> Block:
    """A communicator's calls over 200 ms: any arrivals, any delay of each member after the last.

    With `root` (a position in `members`) a Broadcast: the others wait for it alone.
    """
    n = len(members)
    begin = np.sort(rng.uniform(0, 200 * MS, count))[:, None]
    start = begin + rng.uniform(0, spread_ns, (count, n)) * rng.integers(0, 2, (count, n))
    lag = rng.exponential(delay_ns, (count, n)) * rng.uniform(0.1, 3.0, n)
    holds, held = np.ones((count, n), dtype=bool), np.ones((count, n), dtype=bool)
    if root is None:
        end = start.max(axis=1, keepdims=True) + lag
    else:
        holds[:] = False
        holds[:, root], held[:, root] = True, False
        end = np.maximum(start, start[:, [root]]) + lag
        end[:, root] = start[:, root] + lag[:, root]

    def read(true: np.ndarray) -> np.ndarray:
        mine, slope = offset[list(members)], drift[list(members)] * 1e-6
        return np.asarray(true + mine + slope * (true - 100 * MS))

    return Block.plain(members, read(start), read(end), holds, held)


offsets = st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4)
drifts = st.lists(st.floats(-50, 50), min_size=4, max_size=4)
groupings = st.sampled_from([((0, 1, 2, 3),), ((0, 1), (2, 3), (1, 2)), ((0, 2), (1, 3), (0, 1))])


@settings(max_examples=150)
@given(groupings, offsets, drifts, st.integers(0, 10**6), st.floats(0, 3e6))
def test_the_truth_lies_within_the_bounds_at_every_time(
    groups: tuple[tuple[int, ...], ...],
    offset: list[float],
    drift: list[float],
    seed: int,
    delay_ns: float,
) -> None:
    rng = np.random.default_rng(seed)
    at, slope = np.asarray(offset), np.asarray(drift)
    blocks = [calls(rng, g, at, slope, delay_ns=delay_ns) for g in groups]
    found = bound(blocks, 4, 0, 0.0, 200 * MS)
    assert found.consistent
    true = (at - at[0]) + (slope - slope[0]) * 1e-6 * (found.times[:, None] - 100 * MS)
    assert (found.low <= true).all()
    assert (true <= found.high).all()
    assert np.isfinite(found.high).all()
    assert (found.drift_low <= (slope - slope[0]) * 1e-6).all()
    assert ((slope - slope[0]) * 1e-6 <= found.drift_high).all()
    assert contradicting(blocks, 4) == []


@settings(max_examples=50)
@given(offsets, st.integers(0, 10**6))
def test_a_broadcast_bounds_the_others_on_one_side_only(offset: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    at = np.asarray(offset)
    block = calls(rng, (0, 1, 2, 3), at, np.zeros(4), root=0)
    found = bound([block], 4, 0, 0.0, 200 * MS)
    assert np.isneginf(found.low[:, 1:]).all()
    assert np.isfinite(found.high).all()
    assert (at - at[0] <= found.high).all()


@given(
    offset=st.floats(-40 * MS, 40 * MS),
    late=st.lists(st.floats(-9 * MS, 9 * MS), min_size=1, max_size=8),
    within=st.floats(0.0, 10.0),
)
def test_receives_of_one_direction_bound_both_sides_and_those_that_did_not_wait_nothing(
    offset: float, late: list[float], within: float
) -> None:
    sent = np.arange(len(late)) * 20 * MS
    over, start = sent + 36_000.0, sent + np.asarray(late)
    end = np.maximum(start, over) + within * 36_000.0
    waited = bool((end - start > 10 * 36_000.0 + 1.0).any())
    holds = np.tile([True, False], (len(late), 1))
    true = np.array([0.0, offset])
    block = Block.plain(
        (0, 1), np.stack([sent, start], axis=1) + true, np.stack([over, end], axis=1) + true,
        holds, ~holds,
    )  # fmt: skip
    arrivals = delivered([block])
    assert bool(arrivals) >= waited
    limits = bound([block, *arrivals], 2, 0, 0.0, 20 * MS * len(late))
    assert limits.consistent
    assert (limits.low[:, 1] <= offset).all()
    assert (offset <= limits.high[:, 1]).all()
    if waited:
        drift = 4 * DRIFT_LIMIT_PPM * 1e-6 * 20 * MS * len(late)
        width = (limits.high - limits.low)[:, 1].min()
        assert width <= 11 * 36_000.0 + 2 * STAMP_ERROR_NS + drift


def test_a_kernel_of_several_messages_or_a_processor_says_nothing_of_when_a_message_came() -> None:
    holds = np.array([[True, False]])
    block = Block.plain(
        (0, 1), np.array([[MS, 0.0]]), np.array([[1.1 * MS, 9 * MS]]), holds, ~holds
    )
    assert delivered([block])
    assert not delivered([replace(block, carried=np.array([2]))])
    assert not delivered([replace(block, kind=np.array([ON_HOST]))])


def test_more_calls_never_widen_a_bound() -> None:
    rng = np.random.default_rng(1)
    at = np.array([0.0, 4e5, -3e5, 1e4])
    block = calls(rng, (0, 1, 2, 3), at, np.zeros(4), count=40)
    few = bound([block.take(np.arange(10))], 4, 0, 0.0, 200 * MS)
    many = bound([block], 4, 0, 0.0, 200 * MS)
    assert (many.high <= few.high).all()
    assert (many.low >= few.low).all()


def test_a_chain_of_communicators_adds_up_what_each_leaves_open() -> None:
    rng = np.random.default_rng(2)
    at = np.zeros(6)
    blocks = [calls(rng, (k, k + 1), at, np.zeros(6)) for k in range(5)]
    found = bound(blocks, 6, 0, 0.0, 200 * MS)
    width = (found.high - found.low)[4]
    assert (np.diff(width) > 0).all()
    assert np.isfinite(width).all()


def test_a_rank_that_no_chain_reaches_is_not_bounded() -> None:
    rng = np.random.default_rng(3)
    blocks = [calls(rng, pair, np.zeros(4), np.zeros(4)) for pair in ((0, 1), (2, 3))]
    found = bound(blocks, 4, 0, 0.0, 200 * MS)
    assert np.isfinite(found.high[:, 1]).all()
    assert np.isinf(found.high[:, 2:]).all()
    assert np.isinf(found.low[:, 2:]).all()


def test_calls_that_a_member_lacks_bound_the_others() -> None:
    rng = np.random.default_rng(4)
    block = calls(rng, (0, 1, 2), np.zeros(3), np.zeros(3))
    start, end = block.start.copy(), block.end.copy()
    start[3:, 2] = end[3:, 2] = np.nan
    less = bound([replace(block, start=start, end=end)], 3, 0, 0.0, 200 * MS)
    whole = bound([block], 3, 0, 0.0, 200 * MS)
    assert np.isfinite(less.high).all()
    assert (less.high >= whole.high - 1e-6).all()


def test_without_any_call_nothing_is_bounded() -> None:
    found = bound([], 3, 1, 0.0, 200 * MS)
    assert np.isinf(found.high[:, [0, 2]]).all()
    assert (found.high[:, 1] == 0).all()


@pytest.mark.parametrize("ranks", [4, 48])
def test_the_one_clock_that_jumped_is_named_and_no_other(ranks: int) -> None:
    rng = np.random.default_rng(5)
    block = calls(rng, tuple(range(ranks)), np.zeros(ranks), np.zeros(ranks))
    start, end = block.start.copy(), block.end.copy()
    start[10:, 2] += 40 * MS
    end[10:, 2] += 40 * MS
    jumped = replace(block, start=start, end=end)
    assert contradicting([jumped], ranks) == [2]
    assert not bound([jumped], ranks, 0, 0.0, 200 * MS).consistent


def test_a_drift_beyond_reason_is_a_contradiction_and_not_a_clock() -> None:
    rng = np.random.default_rng(6)
    drift = np.array([0.0, 0.0, 5_000.0, 0.0])
    block = calls(rng, (0, 1, 2, 3), np.zeros(4), drift, delay_ns=20_000.0, spread_ns=50_000.0)
    assert contradicting([block], 4) == [2]
