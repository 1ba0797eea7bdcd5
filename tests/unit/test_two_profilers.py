from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.model.profiler_bias import Hosts
from clusterprof.analysis.model.topology import Peers

#: of each of two ranks: its own time at three places of step 0 and one of step 1, and of that what
#: a profiler may lengthen
OWN = np.array([4, 2, 2, 5, 12, 1, 1, 5])
TRACED = np.array([0, 2, 2, 5, 0, 1, 1, 5])


def hosts(own: np.ndarray = OWN, traced: np.ndarray = TRACED) -> Hosts:
    ranks = len(own) // 4
    circle = np.arange(ranks)
    return Hosts(
        Peers((circle,), np.zeros(ranks, dtype=int)),
        rank=np.repeat(circle, 4),
        place=np.tile(np.arange(4), ranks),
        step=np.array([0, 0, 0, 1]),
        traced=traced,
    )


def test_what_profilers_lengthen_elsewhere_is_not_set_against_a_pause() -> None:
    assert hosts().later(OWN).tolist() == [[-8, 0], [8, 0]]


def test_a_host_in_time_keeps_what_its_profiler_may_have_lengthened() -> None:
    in_time = hosts().in_time(OWN, np.array([1]))
    assert in_time.tolist() == [4, 2, 2, 5, 4, 1, 1, 5]


def test_a_host_that_is_early_elsewhere_in_the_step_is_later_by_so_much_less() -> None:
    own = np.array([4, 6, 2, 5, 12, 1, 1, 5])
    traced = np.array([0, 0, 2, 5, 0, 1, 1, 5])
    assert hosts(own, traced).later(own)[1, 0] == 8 - 5
    in_time = hosts(own, traced).in_time(own, np.array([1]))
    assert in_time[4] == pytest.approx(12 - 3, abs=1)


def test_two_that_are_late_together_are_compared_with_the_others() -> None:
    own, traced = np.r_[OWN, OWN[4:]], np.r_[TRACED, TRACED[4:]]
    in_time = hosts(own, traced).in_time(own, np.array([1, 2]))
    assert in_time.tolist() == [*OWN[:4], 4, 1, 1, 5, 4, 1, 1, 5]
