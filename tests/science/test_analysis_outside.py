"""Hosts that only the profiler slows, and loaders that it lets run ahead: the step logs tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.tiers import long_but
from simulate import Cause, Job, cases, simulate
from studies import found_in

from clusterprof.results import Finding
from clusterprof.study import study
from clusterprof.tables import RankTables

MS = 1_000_000
#: what tracing adds to a launch (ns)
TRACING = 14_000


def findings(ranks: list[RankTables], usual_ns: float | None) -> list[Finding]:
    """What is found, above information, where a step took `usual_ns` before the window."""
    usual = None if usual_ns is None else round(usual_ns)
    known = [replace(r, info=replace(r.info, usual_step_ns=usual)) for r in ranks]
    found = found_in(known)
    return [f for f in found if f["severity"] != "info" and f["code"] != "profiler.perturbation"]


def step_ns(job: Job) -> float:
    """A steady-state step's length, of a window so long that queues hide nothing."""
    return cases.step_ns(replace(job, steps=24))


def bound(launch_ns: int) -> Job:
    """Sixty-odd launches a layer: hosts that need about as long as their GPUs."""
    return Job(steps=8, layers=8, layer_ns=600_000, kernels_per_layer=12, launch_ns=launch_ns)


@pytest.mark.parametrize("pace_frac", long_but([0.15], [0.0]))
def test_hosts_that_only_the_profiler_slows_are_no_finding(pace_frac: float) -> None:
    quick = bound(60_000)
    # a host that tracing slows by 15% more or less than another
    ranks, _ = simulate(replace(quick, launch_ns=90_000, host_pace_frac=pace_frac))
    # without step logs it is stated as what may be nothing
    assert {f["code"] for f in study(ranks).results["findings"]} & {
        "host.launch_bound",
        "straggler.host",
    }
    assert {f["code"] for f in findings(ranks, step_ns(quick))} <= {"communication.exposed"}


def test_of_a_launch_bound_job_only_what_it_loses_without_the_profiler_is_stated() -> None:
    job = bound(110_000)
    without, fast = step_ns(job), step_ns(replace(job, launch_ns=3_000))
    ranks, _ = simulate(replace(job, launch_ns=110_000 + TRACING))
    (found,) = [f for f in findings(ranks, without) if f["code"] == "host.launch_bound"]
    assert found["saved_ns_per_step"] == pytest.approx(without - fast, abs=0.02 * without)


def test_a_pause_of_one_host_is_late_whatever_tracing_adds() -> None:
    job = replace(bound(60_000), causes=(Cause("host", 1, 20 * MS),))
    without, fast = step_ns(job), step_ns(bound(60_000))
    ranks, _ = simulate(replace(job, launch_ns=60_000 + TRACING))
    (late,) = [f for f in findings(ranks, without) if f["code"] == "straggler.host"]
    assert late["rank"] == 1
    assert late["saved_ns_per_step"] == pytest.approx(without - fast, abs=0.02 * without)


def test_input_that_was_fetched_ahead_is_stated_as_slow_as_it_usually_is() -> None:
    def job(fetch_ms: int) -> Job:
        causes = tuple(Cause("input", r, fetch_ms * MS) for r in range(4))
        return Job(steps=8, synchronous=True, causes=causes)

    usual, none = step_ns(job(30)), step_ns(job(0))
    ranks, _ = simulate(job(15))
    (found,) = [f for f in findings(ranks, usual) if f["code"] == "input.stall"]
    assert found["saved_ns_per_step"] == pytest.approx(usual - none, rel=0.05)


@pytest.mark.parametrize(("left", "codes"), [(0.3, set()), (0.7, {"host.launch_bound"})])
def test_hosts_are_launch_bound_outside_if_most_of_their_delay_is_left(
    left: float, codes: set[str]
) -> None:
    # hosts of the window that need 9 to 15 µs more for each launch than its GPUs
    slow, fast = bound(105_000), bound(3_000)
    ranks, _ = simulate(slow)
    usual = left * step_ns(slow) + (1 - left) * step_ns(fast)
    found = findings(ranks, usual)
    assert {f["code"] for f in found} - {"communication.exposed"} == codes
    assert all(f["saved_ns_per_step"] <= 1.1 * (usual - step_ns(fast)) for f in found)


def test_a_window_that_shows_little_of_a_step_says_so_first() -> None:
    job = bound(110_000)
    usual = 6 * step_ns(job)
    known = [replace(r, info=replace(r.info, usual_step_ns=round(usual))) for r in simulate(job)[0]]
    results = study(known).results
    assert results["pace"]
    assert results["pace"]["step_ns"] == pytest.approx(usual, rel=0.01)
    assert results["verdict"].startswith("The window shows ")
    assert "step: the rest cannot be determined." in results["verdict"]
    assert any("fetched ahead while the profiler started" in text for text in results["warnings"])
    (bound_by,) = [f for f in results["findings"] if f["code"] == "host.launch_bound"]
    assert bound_by["severity"] != "critical"


@pytest.mark.parametrize("steps", [1, 2])
def test_without_a_steady_state_step_there_is_none_to_compare(steps: int) -> None:
    warnings = study(simulate(Job(steps=steps, tear_ns=0))[0]).results["warnings"]
    assert not [text for text in warnings if "outside the window" in text]


@pytest.mark.parametrize(("seldom", "slower"), [(100, 1.06), (100, 1.0), (10, 1.0)])
def test_a_long_step_of_the_window_counts_as_often_as_it_comes_outside(
    seldom: int, slower: float
) -> None:
    """One of eight steps is long in the window; outside one of a hundred, or of ten.

    And not as often as a pace would have it that is slower for another reason.
    """
    plain = Job(steps=8, first_step=500, synchronous=True, tear_ns=0)
    job = replace(plain, causes=(Cause("host", 1, 60 * MS, (504,)),))
    usual, longer = step_ns(plain), step_ns(plain) + 60 * MS
    lengths_ns = [slower * (longer if step % seldom == 0 else usual) for step in range(300)]
    pace = round(sum(lengths_ns) / len(lengths_ns))
    known = [replace(r, info=replace(r.info, usual_step_ns=pace)) for r in simulate(job)[0]]
    results = study(known, outside_ns=lengths_ns).results
    saved = {f["code"]: f["saved_ns_per_step"] for f in results["findings"]}
    stated = max(saved.get(code, 0) for code in ("straggler.host", "host.busy"))
    assert stated == pytest.approx(60 * MS / seldom, rel=0.05, abs=0.3 * MS)
