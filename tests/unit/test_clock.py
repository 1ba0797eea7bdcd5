"""One clock: the bound holds whatever the clocks do, and the estimate is good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.clock import UNBOUNDED_NS, Clock, align
from clusterprof.ingest import gather
from clusterprof.merge import match
from clusterprof.simulate import Cause, Job, middle, simulate, wall, with_clock
from clusterprof.tables import RankTables

MS = 1_000_000


def errors(
    clock: Clock, true: Sequence[RankTables], offset: Sequence[int], drift: Sequence[float], at: int
) -> dict[int, np.ndarray]:
    """Each rank's error at nine times over the window (ns), the reference's own left out."""
    first = min(int(pc.min(t.activity["start_ns"]).as_py()) for t in true)
    last = max(int(pc.max(t.activity["end_ns"]).as_py()) for t in true)
    times = np.linspace(first, last, 9).astype(np.int64)
    numbers = [t.rank for t in true]
    k = numbers.index(clock.reference_rank)
    reference = wall(times, offset[k], drift[k], at)
    return {
        rank: np.abs(clock.align(rank, wall(times, offset[j], drift[j], at)) - reference)
        for j, rank in enumerate(numbers)
        if j != k
    }


def aligned(ranks: Sequence[RankTables]) -> Clock:
    return align(ranks, match(ranks))


def unnamed(ranks: Sequence[RankTables]) -> list[RankTables]:
    """Reports that do not say on which host they were taken."""
    return [replace(r, info=replace(r.info, host="")) for r in ranks]


jobs = st.sampled_from(
    [
        Job(steps=3),
        Job(steps=3, small_calls=False, phase_ns=60_000),
        Job(steps=3, causes=(Cause("gpu_more", 1, 8 * MS),)),
        Job(steps=3, dp=2, tp=2),
        Job(steps=3, dp=2, pp=2),
        Job(steps=3, dp=1, pp=4, layers=8),
    ]
)
offsets = st.lists(st.integers(-50 * MS, 50 * MS), min_size=4, max_size=4)
drifts = st.lists(st.floats(-50, 50), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(jobs, offsets, drifts, st.integers(0, 9), st.booleans())
def test_the_bound_holds_over_the_whole_window_for_any_offsets_and_drifts(
    job: Job, offset: list[int], drift: list[float], seed: int, hosts_named: bool
) -> None:
    true, _ = simulate(replace(job, seed=seed))
    at = middle(true)
    wrong = [with_clock(r, o, d, at) for r, o, d in zip(true, offset, drift, strict=True)]
    clock = aligned(wrong if hosts_named else unnamed(wrong))
    for rank, error in errors(clock, true, offset, drift, at).items():
        assert error.max() <= clock.uncertainty(rank)
        assert clock.uncertainty(rank) < UNBOUNDED_NS


def test_latency_bound_calls_give_the_offset_to_a_microsecond() -> None:
    true, _ = simulate(Job())
    at, offset = middle(true), (0, 31 * MS, -47 * MS, 123_456)
    wrong = [with_clock(r, o, 0.0, at) for r, o in zip(true, offset, strict=True)]
    clock = aligned(wrong)
    for error in errors(clock, true, offset, (0.0,) * 4, at).values():
        assert error.max() <= 1_000


def test_a_drift_that_shows_is_fitted_and_one_that_does_not_is_zero() -> None:
    true, _ = simulate(Job(steps=30))
    at, drift = middle(true), (0.0, 40.0, -50.0, 0.0)
    wrong = [
        with_clock(r, 5 * MS * k, d, at) for k, (r, d) in enumerate(zip(true, drift, strict=True))
    ]
    clock = aligned(wrong)
    assert clock.drift_ppm[1] == pytest.approx(40, abs=1)
    assert clock.drift_ppm[2] == pytest.approx(-50, abs=1)
    assert clock.drift_ppm[3] == 0.0


def test_ranks_that_share_no_communicator_are_bounded_through_a_chain() -> None:
    ranks, _ = simulate(Job(dp=2, tp=2))
    clock = aligned(unnamed(ranks))
    # 0 and 3 have no common collective
    assert 0 < clock.uncertainty(3) < MS
    assert clock.uncertainty(3) >= clock.uncertainty(2)


def test_one_rank_is_its_own_reference() -> None:
    ranks, _ = simulate(Job())
    clock = aligned(ranks[1:2])
    assert (clock.reference_rank, clock.uncertainty(1)) == (1, 0)
    times = np.array([1_790_000_000_000_000_123], dtype=np.int64)
    assert clock.align(1, times).tolist() == times.tolist()


def test_ranks_without_a_common_collective_are_unbounded_and_it_is_said() -> None:
    ranks, _ = simulate(Job(dp=2, tp=2))
    clock = aligned([ranks[0], ranks[3]])
    assert clock.uncertainty(3) == UNBOUNDED_NS
    assert any("rank 3" in w and "nothing bounds" in w for w in clock.warnings)
    assert clock.offset_ns.tolist() == [0, 0]


def test_a_clock_that_jumps_within_the_window_is_noticed() -> None:
    ranks, _ = simulate(Job())
    late = ranks[1].collective_calls.to_pandas()
    half = len(late) // 2
    for name in ("start_ns", "end_ns"):
        late.loc[half:, name] += 3 * MS
    calls = ranks[1].collective_calls
    table = type(calls).from_pandas(late, schema=calls.schema, preserve_index=False)
    jumped = [ranks[0], replace(ranks[1], collective_calls=table)]
    clock = aligned(jumped)
    assert clock.uncertainty(1) == UNBOUNDED_NS or "order and times" in str(
        match(jumped)["reason"].to_pylist()
    )


def test_no_rank_at_all_gives_an_empty_clock() -> None:
    assert aligned([]).ranks == ()


def test_the_clock_of_the_results_is_the_clock_that_aligns() -> None:
    true, _ = simulate(Job(steps=20))
    at = middle(true)
    wrong = [with_clock(r, 7 * MS * k, 11.0 * k, at) for k, r in enumerate(true)]
    clock = aligned(wrong)
    entry = clock.entry()
    for row in entry["ranks"]:
        times = np.array([at, at + 100 * MS], dtype=np.int64)
        said = (
            times
            - row["offset_ns"]
            - np.rint(row["drift_ppm"] * 1e-6 * (times - entry["middle_ns"])).astype(np.int64)
        )
        assert clock.align(row["rank"], times).tolist() == said.tolist()


@pytest.mark.parametrize(
    "folder", ["nsys-2025.3/ddp", "nsys-2025.3/ddp-host-straggler", "nsys-2024.2/pipeline"]
)
def test_on_recordings_with_planted_clocks_the_bound_holds_and_the_error_is_small(
    folder: str, recordings: Path
) -> None:
    true = gather([recordings / folder]).ranks
    at, rng = middle(true), np.random.default_rng(7)
    for trial in range(4):
        offset = rng.integers(-50 * MS, 50 * MS, len(true)).tolist()
        drift = rng.uniform(-50, 50, len(true)).tolist() if trial else [0.0] * len(true)
        wrong = [with_clock(r, o, d, at) for r, o, d in zip(true, offset, drift, strict=True)]
        clock = aligned(wrong)
        for rank, error in errors(clock, true, offset, drift, at).items():
            assert error.max() <= clock.uncertainty(rank) < 500_000
            assert error[4] <= (10_000 if trial else 2_000)
