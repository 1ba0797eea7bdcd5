"""What a finding says it would save is what simulating the job without its cause saves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulate import simulate
from simulate.cases import MS
from simulate.job import Job

from clusterprof.results import Finding, Results
from clusterprof.study import study


def studied(job: Job) -> Results:
    return study(simulate(job)[0]).results


def found(results: Results, code: str) -> list[Finding]:
    return [f for f in results["findings"] if f["code"] == code]


def step_ns(results: Results) -> float:
    return float(np.mean([s["duration_ns"] for s in results["steps"] if s["settled"]]))


def test_pageable_copies_save_what_pinned_ones_would() -> None:
    slow = studied(Job(pageable=True, copy_ns=5 * MS))
    # 33.6 MB at the 25 GB/s that are assumed
    fast = studied(Job(pageable=False, copy_ns=int(33_554_432 / 25)))
    (one,) = found(slow, "input.pageable_copy")
    saved = step_ns(slow) - step_ns(fast)
    assert one["saved_ns_per_step"] == pytest.approx(saved, abs=0.01 * step_ns(slow))
    assert not found(fast, "input.pageable_copy")


@pytest.mark.parametrize("job", [Job(layers=2, transfer_ns=6 * MS), Job(serial=True)])
def test_exposed_communication_saves_what_transfers_of_no_time_would(job: Job) -> None:
    exposed, free = studied(job), studied(replace(job, transfer_ns=0))
    saved = step_ns(exposed) - step_ns(free)
    each = found(exposed, "communication.exposed")
    stated = sum(one["saved_ns_per_step"] for one in each)
    assert stated == pytest.approx(saved, abs=0.01 * step_ns(exposed))
    assert not found(free, "communication.exposed")
