"""Ranks that are late together are named together: alone none of them would save anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from simulate.cases import cases, straggler_named
from studies import found_in

from clusterprof.results import Finding

MS = 1_000_000
JOB = Job(synchronous=True, steps=7, host_noise_frac=0.1, hiccup_steps=30, hiccup_ns=MS // 2)


def stragglers(job: Job) -> list[Finding]:
    findings = found_in(simulate(job)[0])
    return [f for f in findings if f["code"].startswith("straggler.")]


def hosts_in(found: Finding, rank: int) -> set[str]:
    """What a rank's host was in, by the evidence."""
    rows = [row for row in found["evidence"] if row["rank"] == rank and row.get("host")]
    return {row["host"]["name"] for row in rows}


def test_two_ranks_that_are_equally_late_are_named_with_what_both_cost() -> None:
    (found,) = stragglers(
        replace(JOB, causes=(Cause("host", 1, 15 * MS), Cause("host", 3, 15 * MS)))
    )
    assert (found["code"], found["rank"], found["ranks"]) == ("straggler.host", None, [1, 3])
    assert found["cost_ns_per_step"] == pytest.approx(15 * MS, rel=0.1)
    assert hosts_in(found, 1) == hosts_in(found, 3) == {"clock_nanosleep"}


def test_a_slow_host_and_a_slow_gpu_have_their_own_causes_in_one_finding() -> None:
    causes = (Cause("host", 1, 10 * MS), Cause("gpu_slow", 3, 10 * MS))
    (found,) = stragglers(replace(JOB, causes=causes))
    assert found["ranks"] == [1, 3]
    assert hosts_in(found, 1) == {"clock_nanosleep"}
    assert hosts_in(found, 3) == set()
    assert [row["rank"] for row in found["evidence"] if "kernel" in row] == [3]


def test_all_ranks_of_one_slow_node_are_named_with_the_node() -> None:
    slow = tuple(Cause("host", rank, 12 * MS) for rank in (4, 5, 6, 7))
    (found,) = stragglers(replace(JOB, dp=12, ranks_per_host=4, causes=slow))
    assert found["ranks"] == [4, 5, 6, 7]
    assert "node1" in found["summary"]
    assert found["cost_ns_per_step"] == pytest.approx(12 * MS, rel=0.1)


def test_one_that_is_much_later_is_named_first_and_the_other_with_what_is_left() -> None:
    found = stragglers(replace(JOB, causes=(Cause("host", 1, 20 * MS), Cause("host", 3, 3 * MS))))
    assert [f["rank"] for f in found] == [1, 3]
    costs = [f["cost_ns_per_step"] for f in found]
    assert costs == pytest.approx([17 * MS, 3 * MS], abs=MS / 2)


def test_a_rank_late_in_the_first_half_and_another_in_the_second_are_both_named() -> None:
    early, late = tuple(range(7, 12)), tuple(range(12, 16))
    causes = (Cause("host", 1, 8 * MS, early), Cause("host", 2, 8 * MS, late))
    found = stragglers(replace(JOB, steps=10, causes=causes))
    assert {f["rank"]: f["steps"] for f in found} == {1: list(early), 2: list(late)}
    assert all(f"({f['steps'][0]} to {f['steps'][-1]})" in f["summary"] for f in found)


@pytest.mark.parametrize("late", long_but([(0, 1, 2)], [(), (0, 1, 2, 3)]))
def test_more_than_half_of_the_ranks_are_not_late_together(late: tuple[int, ...]) -> None:
    causes = tuple(Cause("host", rank, 15 * MS) for rank in late)
    assert not [f for f in stragglers(replace(JOB, causes=causes)) if len(f["ranks"]) > 1]


@pytest.mark.parametrize("window", long_but([(79097, 5)], [(90014, 32), (90011, 32), (90012, 32)]))
def test_sequences_of_varying_length_make_no_straggler_in_long_or_short_windows(
    window: tuple[int, int],
) -> None:
    seed, steps = window
    (case,) = cases(["healthy, varying lengths"], range(seed, seed + 1))
    assert not straggler_named(found_in(simulate(replace(case.job, steps=steps))[0]))


def test_a_rank_that_is_slower_in_each_step_is_named_among_sequences_of_varying_length() -> None:
    job = Job(dp=4, steps=16, varied_frac=0.1, causes=(Cause("gpu_more", 2, 12 * MS),))
    first = found_in(simulate(job)[0])[0]
    assert (first["code"], first["ranks"]) == ("straggler.gpu", [2])
