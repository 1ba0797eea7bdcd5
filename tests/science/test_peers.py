"""What is usual among the others, for thousands of ranks at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from simulate import Job, simulate

from clusterprof.align.match import match
from clusterprof.analysis.groups.peers import Peers, median_of_others

VALUES = st.sampled_from([0.0, 1.0, 2.0, 5.0, 5.5, -3.0, np.nan])


@given(arrays(float, array_shapes(min_dims=2, max_dims=2, max_side=7), elements=VALUES))
def test_the_median_of_the_others_is_the_one_of_all_rows_but_ones_own(values: np.ndarray) -> None:
    found = median_of_others(values)
    for k in range(len(values)):
        for step in range(values.shape[1]):
            others = np.delete(values[:, step], k)
            others = others[~np.isnan(others)]
            expected = np.median(others) if len(others) else np.nan
            np.testing.assert_equal(found[k, step], expected)


def test_a_rank_without_peers_differs_from_none() -> None:
    circle = Peers((np.array([0, 1]), np.array([2])), np.array([0, 0, 1]))
    more = circle.differences(np.array([[3.0], [1.0], [9.0]]))
    assert more.tolist() == [[2.0], [-2.0], [0.0]]


def test_what_matching_gives_grows_with_the_calls_and_not_with_their_members() -> None:
    def bytes_per_call(count: int) -> float:
        table = match(simulate(Job(dp=count, layers=2, kernels_per_layer=1, steps=2))[0])
        return float(table.nbytes) / table.num_rows

    assert bytes_per_call(128) < 1.1 * bytes_per_call(32)
