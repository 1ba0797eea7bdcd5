"""The graph and the arithmetic behind every replay, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from clusterprof.analysis.model.by_report import NEVER
from clusterprof.analysis.model.replay import Graph
from clusterprof.analysis.model.what_if import cut
from clusterprof.columns import Ints, connected, first_of, running_maximum, running_sum


def longest(
    moments: int, edges: list[tuple[int, int, int]], known: dict[int, int]
) -> dict[int, int]:
    """Each moment's time by relaxing every edge until nothing changes; without NEVER ones."""
    out = dict(known)
    for _ in range(moments + 1):
        for source, target, length in edges:
            if source in out:
                out[target] = max(out.get(target, NEVER), out[source] + length)
    return out


def times(moments: int, edges: list[tuple[int, int, int]], known: dict[int, int]) -> Ints:
    source, target, length = (np.asarray([e[k] for e in edges], dtype=np.int64) for k in range(3))
    begin = np.full(moments, NEVER)
    for moment, at in known.items():
        begin[moment] = at
    return times_of(Graph(moments, source, target), length, begin)


def times_of(made: Graph, length: Ints, known: Ints) -> Ints:
    """When each moment is, with these lengths of the edges as they were given."""
    out = known.copy()
    out[..., made.order] = made.one_pass(length[..., made.edge], known[..., made.order])
    return out


def test_a_moment_is_as_late_as_the_latest_that_it_waits_for() -> None:
    edges = [(0, 2, 5), (1, 2, 1), (2, 3, 4), (0, 3, 7), (2, 4, -3)]
    assert times(5, edges, {0: 10, 1: 100}).tolist() == [10, 100, 101, 105, 98]


def test_a_known_time_of_a_moment_that_also_waits_is_its_least() -> None:
    assert times(3, [(0, 1, 5), (0, 2, 5)], {0: 0, 1: 3, 2: 9}).tolist() == [0, 5, 9]


def test_a_moment_that_waits_for_an_unknown_one_has_no_time() -> None:
    assert times(3, [(0, 1, 5), (1, 2, 5)], {}).max() < NEVER // 2


def test_without_edges_only_the_known_moments_have_times() -> None:
    assert times(2, [], {1: 4}).tolist() == [NEVER, 4]
    assert times(0, [], {}).tolist() == []


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_have_the_times_of_their_longest_ways(seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = int(rng.integers(2, 60))
    # moments in no order that their numbers tell, with edges that come twice
    order = rng.permutation(moments)
    pairs = rng.integers(0, moments, (int(rng.integers(1, 200)), 2))
    pairs = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)
    source, target = order[pairs[:, 0]], order[pairs[:, 1]]
    length = rng.integers(-50, 1000, (3, len(pairs)))
    known = np.full((3, moments), NEVER)
    known[:, np.setdiff1d(np.arange(moments), target)] = rng.integers(0, 9999, (3, 1))
    known[:, rng.integers(0, moments)] = 5_000

    made = Graph(moments, source, target)
    assert not len(made.circular)
    found = times_of(made, length, known)
    for what in range(3):
        edges = list(zip(source.tolist(), target.tolist(), length[what].tolist(), strict=True))
        begin = {m: int(at) for m, at in enumerate(known[what]) if at != NEVER}
        assert longest(moments, edges, begin) == dict(enumerate(found[what].tolist()))
        assert (times_of(made, length[what], known[what]) == found[what]).all()


def test_moments_on_a_circle_and_behind_it_are_listed_and_all_others_have_times() -> None:
    # 1 -> 2 -> 3 -> 1 is a circle, 4 behind it, 5 not
    edges = [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 1, 1), (3, 4, 1), (0, 5, 7), (6, 6, 2)]
    source, target, length = (np.asarray([e[k] for e in edges]) for k in range(3))
    made = Graph(7, source, target)
    assert made.circular.tolist() == [1, 2, 3, 4, 6]
    known = np.full(7, NEVER)
    known[0] = 0
    assert times_of(made, length, known)[[0, 5]].tolist() == [0, 7]


@pytest.mark.parametrize("shape", [(40,), (3, 40)])
def test_running_maximum_and_sum_are_those_of_a_loop_over_each_part(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    values = rng.integers(-1000, 1000, shape)
    part = np.sort(rng.integers(0, 9, shape[-1]))
    fresh = np.r_[True, part[1:] != part[:-1]]
    highest, total = running_maximum(values, part), running_sum(values, first_of(fresh))
    for begin, end in zip(*_parts(fresh), strict=True):
        for k in range(begin, end):
            assert (highest[..., k] == values[..., begin : k + 1].max(axis=-1)).all()
            assert (total[..., k] == values[..., begin : k + 1].sum(axis=-1)).all()


def _parts(fresh: np.ndarray) -> tuple[list[int], list[int]]:
    begins = np.flatnonzero(fresh).tolist()
    return begins, [*begins[1:], len(fresh)]


def test_running_maximum_and_sum_of_nothing_are_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert not len(running_maximum(none, none))
    assert not len(running_sum(none, first_of(none > 0)))


@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_cut_to_a_sum_the_greatest_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1000, int(rng.integers(1, 30)))
    for total in (0, int(values.sum()) // 3, int(values.sum())):
        less = cut(values, total)
        assert (less <= values).all()
        assert total - len(values) < less.sum() <= total
        lower = less < values
        # what was cut is as long as the rest at least
        assert not lower.any() or less[lower].min() >= less[~lower].max(initial=0) - 1


def test_running_maxima_of_times_that_are_too_large_to_be_raised() -> None:
    values = np.asarray([2**61, -(2**61), 5, 2**60, 7])
    part = np.asarray([0, 0, 1, 1, 1])
    assert running_maximum(values, part).tolist() == [2**61, 2**61, 5, 2**60, 2**60]


@settings(max_examples=200)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=14))
def test_nodes_are_connected_with_the_least_that_any_edges_lead_to(
    count: int, pairs: list[tuple[int, int]]
) -> None:
    edges = [(a, b) for a, b in pairs if max(a, b) < count]
    least = list(range(count))
    for _ in range(count):
        for a, b in edges:
            least[a] = least[b] = min(least[a], least[b])
    members = np.asarray(edges, dtype=np.int64).ravel()
    assert connected(members, np.repeat(np.arange(len(edges)), 2), count).tolist() == least


def test_a_chain_of_ten_thousand_nodes_is_one() -> None:
    pairs = np.arange(9_999)[:, None] + [0, 1]
    assert not connected(pairs.ravel(), np.repeat(pairs[:, 0], 2), 10_000).any()
