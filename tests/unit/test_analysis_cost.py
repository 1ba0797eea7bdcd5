"""What the capture cost, from step logs with known stalls."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import report_sample as sample

from clusterprof.analysis.findings.profiler_overhead import capture_cost
from clusterprof.ingest.rank_steps import steps_table
from clusterprof.report.summary import Summary

MS = 1_000_000


def log(step_ms: list[float], gaps_ms: dict[int, float] | None = None) -> pa.Table:
    """Steps of these durations, one after the other, with a gap before some."""
    begin, rows = 0, []
    for step, duration in enumerate(step_ms):
        begin += round((gaps_ms or {}).get(step, 0) * MS)
        rows.append((step, begin, begin + round(duration * MS)))
        begin = rows[-1][2]
    table = np.array(rows, np.int64)
    return steps_table(table[:, 0], table[:, 1], table[:, 2], "steplog")


def test_stalls_and_steps_of_profiled_and_unprofiled_ranks_are_kept_apart() -> None:
    steps = [40.0] * 20 + [90.0] + [42.0] * 9 + [45.0] * 8 + [41.0] * 22
    logs = {0: log(steps, {20: 1200, 30: 60}), 1: log([40.0] * 60)}
    cost = capture_cost(logs, [0], 20, 30, {})
    assert cost == {
        "stall_start_ns": 1200 * MS,
        "stall_stop_ns": 60 * MS,
        "profiled": {
            "before_ns": 40 * MS,
            "inside_ns": 42 * MS,
            "after_ns": 41 * MS,
            "after_uncertainty_ns": 0,
        },
        "unprofiled": {
            "before_ns": 40 * MS,
            "inside_ns": 40 * MS,
            "after_ns": 40 * MS,
            "after_uncertainty_ns": 0,
        },
    }
    for fact in (
        "1.20 s",
        "60.0 ms at the stop",
        "42.0 ms inside",
        "unprofiled ranks: median steps of",
    ):
        assert fact in Summary(sample.results() | {"capture": cost}).capture


def test_of_steps_that_repeat_a_pattern_whole_patterns_are_compared() -> None:
    noise = np.random.default_rng(3).uniform(0.95, 1.05, 90)
    steps = (np.tile([2.0, 2.0, 2.0, 124.0], 23)[:90] * noise).tolist()
    # what the profiler's start let the loader fetch ahead
    steps[40:46] = [2.0] * 6
    cost = capture_cost({0: log(steps, {40: 270})}, [0], 40, 46, {})
    assert cost is not None
    times = cost["profiled"]
    assert times["before_ns"] == pytest.approx(32.5 * MS, rel=0.05)
    assert times["inside_ns"] == 2 * MS
    assert times["after_ns"] == pytest.approx(32.5 * MS, rel=0.05)
    assert times["after_uncertainty_ns"] is not None
    assert times["after_uncertainty_ns"] < 3 * MS


def test_steps_in_which_a_rank_has_become_late_are_not_the_profilers() -> None:
    logs = {0: log([40.0] * 90 + [60.0] * 90)}
    costs = [capture_cost(logs, [0], 20, 30, {}, until) for until in (90, 200)]
    after = [cost and cost["profiled"]["after_ns"] for cost in costs]
    assert after[0] == 40 * MS
    assert after[1] is not None
    assert after[1] > 45 * MS


def test_the_longest_stall_of_any_profiled_rank_counts() -> None:
    logs = {0: log([40.0] * 40, {20: 500}), 3: log([40.0] * 40, {20: 900})}
    cost = capture_cost(logs, [0, 3], 20, 30, {})
    assert cost is not None
    assert cost["stall_start_ns"] == 900 * MS
    assert cost["unprofiled"] is None


def test_a_job_that_ended_inside_the_window_has_no_stop_and_no_after() -> None:
    cost = capture_cost({0: log([40.0] * 24, {20: 500})}, [0], 20, 30, {})
    assert cost is not None
    assert cost["stall_stop_ns"] is None
    assert cost["profiled"]["inside_ns"] == 40 * MS
    assert cost["profiled"]["after_ns"] is None
    assert cost["profiled"]["after_uncertainty_ns"] is None


def test_without_a_step_in_the_window_there_is_no_cost() -> None:
    assert capture_cost({0: log([40.0] * 10)}, [0], 20, 30, {}) is None
    assert capture_cost({}, [0], 20, 30, {}) is None


def test_steps_far_from_the_window_count_as_their_block_s_median() -> None:
    first, count, median = np.array([(0, 20, 60), (60, 1000, 44), (1060, 10, 90)], np.int64).T
    taken = {"begin_ns": np.zeros_like(count), "end_ns": count * median * MS}
    pace = {"first_step": first, "count": count, "median_ns": median * MS, **taken}
    logs = {0: log([40.0] * 60, {20: 500})}
    cost = capture_cost(logs, [0], 20, 30, {0: pace})
    assert cost is not None
    times = cost["profiled"]
    assert (times["before_ns"], times["inside_ns"], times["after_ns"]) == (
        40 * MS,
        40 * MS,
        44 * MS,
    )
    assert times["after_uncertainty_ns"] is not None


def test_steps_are_longer_after_the_window_by_chance_as_often_as_it_is_said() -> None:
    longer = []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        # steps that follow each other: what makes one longer makes the next ones longer, too
        noise = np.convolve(generator.normal(0, 1, 210), np.ones(10) / 10**0.5, "valid")
        both = [log((40 + noise + generator.normal(0, 1, 201)).tolist()) for _ in range(2)]
        cost = capture_cost(dict(enumerate(both)), [0, 1], 40, 50, {})
        assert cost is not None
        before, after, chance = (
            cost["profiled"][name] for name in ("before_ns", "after_ns", "after_uncertainty_ns")
        )  # fmt: skip
        assert before is not None
        assert after is not None
        assert chance is not None
        longer.append(after - before > chance)
    assert np.mean(longer) <= 0.03
