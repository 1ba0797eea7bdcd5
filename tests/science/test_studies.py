"""Studies that tests share: made once, and nothing in them can be changed by a test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from studies import Simulated

from clusterprof.study import Study


def test_a_recording_is_studied_once_and_its_results_are_each_reader_s_own(
    studied: Callable[[str], Study],
) -> None:
    one, other = studied("kineto/gloo"), studied("kineto/gloo")
    assert one.dataset is other.dataset
    one.results["findings"].clear()
    assert other.results["findings"] == studied("kineto/gloo").results["findings"] != []


def test_a_job_is_simulated_once_for_each_kind_and_seed(
    simulated: Callable[..., Simulated],
) -> None:
    one = simulated("healthy, sharded", 1)
    assert one.study.dataset is simulated("healthy, sharded", 1).study.dataset
    assert one.study.dataset is not simulated("healthy, sharded", 2).study.dataset


def test_no_array_of_a_shared_study_can_be_written_to(
    studied: Callable[[str], Study], simulated: Callable[..., Simulated]
) -> None:
    for made in (studied("kineto/gloo"), simulated("healthy, sharded").study):
        dataset = made.dataset
        arrays = [made.clock.offset_ns, dataset.collectives.start, dataset.timelines.begin]
        for array in [*arrays, dataset.activities.start]:
            assert isinstance(array, np.ndarray)
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
