"""What is usual among the others, for thousands of ranks at once."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from simulate import Cause, Job, simulate

from clusterprof.align.match import match
from clusterprof.analysis.model.peers import Peers, median_of_others
from clusterprof.study import study
from clusterprof.tables import RankTables

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


def test_ranks_that_no_call_ties_take_no_part_in_each_others_savings() -> None:
    late = (Cause("host", 2, 6_000_000),)
    job = Job(dp=2, tp=2, steps=6, layers=4, synchronous=True, causes=late)
    ranks = [of_tensor_groups_alone(tables) for tables in simulate(job)[0]]
    every, alone = study(ranks).results, study(ranks[2:]).results
    (found,), (its_own,) = (
        [f for f in results["findings"] if f["code"] == "straggler.host"]
        for results in (every, alone)
    )
    assert found["ranks"] == its_own["ranks"] == [2]
    assert found["saved_ns_per_step"] == its_own["saved_ns_per_step"] > 5_000_000
    assert every["what_if"]["S"] is None
    assert alone["what_if"]["S"] is not None


def of_tensor_groups_alone(tables: RankTables) -> RankTables:
    """A rank without the calls that tie its tensor group to the others."""
    calls = tables.collective_calls
    mine = pc.starts_with(calls["communicator"], "0xtensor")
    return tables.changed("collective_calls", calls.filter(mine))
