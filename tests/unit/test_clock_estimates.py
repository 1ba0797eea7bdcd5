"""The estimate within the bounds: what calls of each size say of offset and drift."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from clusterprof.align.clock.blocks import ALL_REDUCE, AT_ONCE, ON_HOST, SHARDED, Block
from clusterprof.align.clock.estimates import combine, estimate

MS = 1_000_000.0
US = 1_000.0
#: where a ring's members end, as measured on four GPUs, part of the transfer by distance
RING_OF_FOUR = np.array([0.085, 0.02, -0.075, -0.03])


def ring(
    offset: list[float],
    *,
    last: list[int],
    transfer_ns: float = 260 * US,
    sort: int = 0,
    kind: int = SHARDED,
    drift_ppm: float = 0.0,
    apart_ms: float = 5.0,
    pattern: np.ndarray | None = None,
) -> Block:
    """One call every `apart_ms`; of each `last` says who comes 1 ms after all others."""
    n, count = len(offset), len(last)
    rng = np.random.default_rng(count)
    begin = (np.arange(count) * apart_ms * MS)[:, None]
    start = np.broadcast_to(begin, (count, n)) + rng.uniform(0, 20 * US, (count, n))
    start[np.arange(count), last] += MS
    end = start.max(axis=1, keepdims=True) + transfer_ns + rng.uniform(0, 400.0, (count, n))
    if pattern is not None:
        distance = (np.arange(n)[None, :] - np.asarray(last)[:, None]) % n
        end = end + transfer_ns * pattern[distance]
    slope = np.zeros(n)
    slope[-1] = drift_ppm * 1e-6

    def read(true: np.ndarray) -> np.ndarray:
        return np.asarray(true + np.asarray(offset) + slope * true)

    both = np.ones((count, n), dtype=bool)
    return Block(
        tuple(range(n)), read(start), read(end), both, both, np.full(count, sort),
        np.full(count, kind), np.ones(count, dtype=np.int64),
    )  # fmt: skip


def joined(one: Block, other: Block) -> Block:
    """All calls of two blocks of the same members."""
    arrays = [field.name for field in fields(Block)[1:]]
    both = {name: np.concatenate([getattr(one, name), getattr(other, name)]) for name in arrays}
    return Block(one.members, **both)


def offsets(block: Block) -> np.ndarray:
    found = estimate(block, 0.0)
    assert found is not None
    return combine([found], len(block.members), 0).offset


def test_a_ring_whose_last_member_is_always_the_same_does_not_shift_its_clock() -> None:
    block = ring([0.0, 5 * US, -7 * US, 3 * US], last=[3] * 12, pattern=RING_OF_FOUR)
    plain = np.median(block.end - block.end[:, :1], axis=0)
    true = np.array([0.0, 5 * US, -7 * US, 3 * US])
    assert np.abs(plain - true).max() > 20 * US
    assert np.abs(offsets(block) - true).max() < 10 * US


def test_small_calls_decide_where_large_ones_say_something_else() -> None:
    true = [0.0, 5 * US, -7 * US, 3 * US]
    large = ring(true, last=[3] * 40, pattern=2 * RING_OF_FOUR)
    small = ring(true, last=[3] * 4, transfer_ns=12 * US, sort=1)
    assert np.abs(offsets(joined(large, small)) - true).max() < 1.5 * US
    assert np.abs(offsets(large) - true).max() > 5 * US


def test_calls_of_unknown_size_are_told_apart_by_what_they_take() -> None:
    true = [0.0, 5 * US, -7 * US, 3 * US]
    large = ring(true, last=[3] * 40, pattern=2 * RING_OF_FOUR, sort=-1)
    small = ring(true, last=[3] * 4, transfer_ns=12 * US, sort=-1)
    assert np.abs(offsets(joined(large, small)) - true).max() < 1.5 * US


def test_one_odd_call_among_many_changes_nothing() -> None:
    block = ring([0.0, 5 * US], last=[0] * 20, transfer_ns=12 * US)
    end = block.end.copy()
    end[7, 1] += 300 * US
    odd = Block.plain(block.members, block.start, end, block.holds, block.held)
    assert offsets(odd)[1] == pytest.approx(5 * US, abs=US)


@pytest.mark.parametrize("seed", range(5))
def test_of_calls_between_processors_those_count_whose_ends_agree(seed: int) -> None:
    true = np.array([0.0, 500 * US, -700 * US])
    rng = np.random.default_rng(seed)
    block = ring(true.tolist(), last=[0, 1, 2] * 10, transfer_ns=2 * MS)
    end = block.end + rng.normal(0, 60 * US, block.end.shape)
    # in six calls of ten some member's thread waited for a core, one rank's longer than the others'
    waited = np.arange(len(end)) % 10 < 6
    end[waited] += rng.exponential([200 * US, 400 * US, 3 * MS], (waited.sum(), 3))
    host = replace(block, end=end, kind=np.full(len(end), ON_HOST))
    plain = np.median(end - end[:, :1], axis=0)
    assert np.abs(offsets(host) - true).max() < 0.6 * np.abs(plain - true).max()


def test_a_drift_is_found_where_the_window_is_long_enough_to_show_it() -> None:
    block = ring([0.0, 0.0, 0.0], last=[0] * 40, transfer_ns=12 * US, drift_ppm=30.0, apart_ms=20.0)
    found = estimate(block, 0.0)
    assert found is not None
    every = combine([found], 3, 0)
    assert every.drift[2] * 1e6 == pytest.approx(30.0, abs=2.0)
    assert every.drift[1] == 0.0


def test_a_drift_that_a_few_calls_cannot_show_is_not_believed() -> None:
    block = ring([0.0, 0.0, 0.0], last=[0] * 3, transfer_ns=12 * US, drift_ppm=5.0)
    found = estimate(block, 0.0)
    assert found is not None
    assert combine([found], 3, 0).drift.tolist() == [0.0, 0.0, 0.0]


def test_a_member_without_the_others_calls_does_not_take_them_along() -> None:
    block = ring([0.0, 5 * US, 9 * US], last=[0] * 10, transfer_ns=12 * US)
    start, end = block.start.copy(), block.end.copy()
    start[:, 2] = end[:, 2] = np.nan
    found = estimate(Block.plain(block.members, start, end, block.holds, block.held), 0.0)
    assert found is not None
    assert found.members == (0, 1)
    every = combine([found], 3, 0)
    assert every.offset[1] == pytest.approx(5 * US, abs=US)
    assert np.isnan(every.offset[2])


def pair(offset: float, delay: float, *, both_ways: bool) -> Block:
    """Sends of rank 0 and, `both_ways`, of rank 1; a waiting Recv ends `delay` after its Send."""
    way = np.array([0, 1] * 6 if both_ways else [0] * 12)
    begin = np.arange(len(way)) * 5 * MS
    start, end = np.empty((len(way), 2)), np.empty((len(way), 2))
    rows = np.arange(len(way))
    start[rows, way], end[rows, way] = begin, begin + 30 * US
    start[rows, 1 - way], end[rows, 1 - way] = begin - 50 * US, begin + 30 * US + delay
    shift = np.array([0.0, offset])
    holds = np.zeros(start.shape, dtype=bool)
    holds[rows, way] = True
    return Block.plain((0, 1), start + shift, end + shift, holds, ~holds)


def test_sends_both_ways_give_the_offset_whatever_their_delay() -> None:
    for delay in (1 * US, 13 * US, 90 * US):
        found = estimate(pair(40 * US, delay, both_ways=True), 0.0)
        assert found is not None
        assert combine([found], 2, 0).offset[1] == pytest.approx(40 * US, abs=US)


def test_two_members_that_lack_a_call_are_no_pair_of_sends() -> None:
    block = ring([0.0, 40 * US], last=[0, 1] * 10, transfer_ns=100 * US, kind=ALL_REDUCE)
    holds, held = block.holds.copy(), block.held.copy()
    start, end = block.start.copy(), block.end.copy()
    start[3, 1] = end[3, 1] = np.nan
    holds[3, 1] = held[3, 1] = False
    found = estimate(replace(block, start=start, end=end, holds=holds, held=held), 0.0)
    assert found is not None
    assert combine([found], 2, 0).offset[1] == pytest.approx(40 * US, abs=2 * US)
    assert combine([found], 2, 0).error[1] < 5 * US


@pytest.mark.parametrize("sizes", ["one", "one each way", "many"])
def test_sends_know_the_offset_to_a_microsecond_or_two_and_say_so(sizes: str) -> None:
    block = pair(40 * US, 13 * US, both_ways=True)
    count = len(block.start)
    sort = {"one": np.zeros(count), "one each way": block.holds[:, 0], "many": np.arange(count)}
    found = estimate(replace(block, sort=sort[sizes].astype(np.int64)), 0.0)
    assert found is not None
    every = combine([found], 2, 0)
    assert every.offset[1] == pytest.approx(40 * US, abs=US)
    assert 0.5 * US < every.error[1] < 5 * US


def test_an_exchange_of_all_with_all_knows_less_than_a_send() -> None:
    block = pair(40 * US, 13 * US, both_ways=True)
    alone, crowded = (
        estimate(replace(block, carried=np.full(len(block.start), crowd)), 0.0) for crowd in (1, 3)
    )
    assert alone is not None
    assert crowded is not None
    assert crowded.covariance[0, 0] > 4 * alone.covariance[0, 0]


def test_a_very_long_allreduce_of_few_shows_no_more_than_a_long_one() -> None:
    measured = np.array([0.0182, 0.0055, -0.0105, -0.0132])  # four H200s, 368 MB in 1.6 ms
    block = ring([0.0] * 4, last=[0] * 10, transfer_ns=1_600 * US, pattern=measured,
                 kind=ALL_REDUCE)  # fmt: skip
    assert np.abs(offsets(block)).max() < 32 * US


def test_sends_one_way_are_taken_to_have_the_usual_delay_and_say_how_little_that_shows() -> None:
    for delay in (6 * US, 15 * US):
        found = estimate(pair(40 * US, delay, both_ways=False), 0.0)
        assert found is not None
        every = combine([found], 2, 0)
        assert abs(every.offset[1] - 40 * US) < every.error[1] < 15 * US


def test_receives_that_did_not_wait_give_no_estimate() -> None:
    block = pair(40 * US, 13 * US, both_ways=True)
    length = 30 * US
    late = np.where(block.held, 7 * MS, 0.0) + block.start
    assert estimate(replace(block, start=late, end=late + length), 0.0) is None


def test_communicators_are_weighed_by_how_well_they_know() -> None:
    true = [0.0, 5 * US, -7 * US]
    good = ring(true, last=[0] * 8, transfer_ns=12 * US)
    bad = ring([0.0, 60 * US], last=[0] * 8, transfer_ns=5 * MS)
    found = [e for b in (bad, good) if (e := estimate(b, 0.0)) is not None]
    assert np.abs(combine(found, 3, 0).offset - true).max() < 3 * US


@pytest.mark.parametrize("members", [2, 4, 16])
def test_of_calls_that_show_no_wave_the_mean_of_the_ends_counts(members: int) -> None:
    block = ring([0.0] * members, last=[1] * 12, transfer_ns=37 * US, kind=AT_ONCE)
    assert np.abs(offsets(block)).max() < US


def test_eight_members_that_end_as_eight_gpus_did_are_told_to_20_us() -> None:
    measured = np.array([10.2, 7.4, 2.0, -3.8, -9.8, -8.4, -1.9, 4.4]) / 100
    block = ring([0.0] * 8, last=[5] * 12, transfer_ns=710 * US, pattern=measured)
    assert np.abs(offsets(block)).max() < 20 * US
    ramp = np.array([16.3, 12.8, 7.9, 3.0, -2.2, -7.5, -12.6, -17.8]) / 100
    block = ring([0.0] * 8, last=[5] * 12, transfer_ns=206 * US, pattern=ramp, kind=ALL_REDUCE)
    assert np.abs(offsets(block)).max() < 20 * US
