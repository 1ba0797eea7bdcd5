"""What a finding says it would save is what simulating the job without its cause saves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lab.tiers import long_but
from simulate import simulate
from simulate.cases import MS, cases, straggler_named
from simulate.job import Cause, Job
from studies import found_in, simulated_job, studied_job

from clusterprof import study as module
from clusterprof.align.clock import Clock, align
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.results import Finding, Results
from clusterprof.study import dataset_of
from clusterprof.tables import RankTables


def studied_ranks(ranks: list[RankTables]) -> Results:
    return module.study(ranks).results


def studied(job: Job) -> Results:
    return studied_job(job).results


def found(results: Results, code: str) -> list[Finding]:
    return [f for f in results["findings"] if f["code"] == code]


def step_ns(results: Results) -> float:
    return float(np.mean([s["duration_ns"] for s in results["steps"] if s["settled"]]))


def window_step_ns(job: Job) -> float:
    """The same of a job of which nothing else is asked."""
    return dataset_of(simulated_job(job)).step_ns


def test_pageable_copies_save_what_pinned_ones_would() -> None:
    slow = studied(Job(pageable=True, copy_ns=5 * MS))
    # 33.6 MB at the 25 GB/s that are assumed
    fast = studied(Job(pageable=False, copy_ns=int(33_554_432 / 25)))
    (one,) = found(slow, "input.pageable_copy")
    saved = step_ns(slow) - step_ns(fast)
    assert one["saved_ns_per_step"] == pytest.approx(saved, abs=0.01 * step_ns(slow))
    assert not found(fast, "input.pageable_copy")


@pytest.mark.parametrize("job", [Job(layers=2, transfer_ns=6 * MS), Job(serial=True)])
def test_exposed_communication_saves_what_overlapping_it_would(job: Job) -> None:
    exposed, free = studied(job), studied(replace(job, transfer_ns=0))
    saved = step_ns(exposed) - step_ns(free)
    stated = sum(one["saved_ns_per_step"] for one in found(exposed, "communication.exposed"))
    # compute beside them takes a quarter of their time longer, as far as nothing else covers it
    assert 0.75 * saved - 0.01 * step_ns(exposed) <= stated <= 0.95 * saved
    assert not found(free, "communication.exposed")


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        # each call lasts until the late rank has computed: the longest only twice the quickest
        ("culprit not profiled", 8000),
        # what it receives is there before its late host needs it, and would not be without
        pytest.param("late in a pipeline", 8001, marks=pytest.mark.long),
        # tracing makes hosts slower than their GPUs: how much slower is not known
        pytest.param("GPU with more work, tracing", 8000, marks=pytest.mark.long),
        # kernels that waited for their launches would follow each other as fast as others do
        pytest.param("launch bound", 73000, marks=pytest.mark.long),
        # the host waits for the copy, and no longer would
        pytest.param("pageable copies", 52000, marks=pytest.mark.long),
    ],
)
def test_a_cause_saves_what_the_same_job_without_it_does(kind: str, seed: int) -> None:
    (case,) = cases([kind], range(seed, seed + 1))
    assert case.without is not None

    def pace_ns(job: Job) -> float:
        dataset = dataset_of(simulate(job)[0])
        return dataset.usual_step_ns or dataset.step_ns

    chosen = [r for r in simulate(case.job)[0] if r.rank in (case.profiled or range(99))]
    stated = sum(f["saved_ns_per_step"] for f in found_in(chosen) if f["code"] in case.codes)
    step = pace_ns(case.job)
    assert stated == pytest.approx(step - pace_ns(case.without), abs=0.01 * step)


@pytest.mark.parametrize("part", long_but([1.0], [0.8, 1.2]))
def test_transfers_that_last_as_long_as_compute_wait_for_no_straggler(part: float) -> None:
    job = Job(steps=8, synchronous=True)
    transfer = int(part * 2 * job.layer_ns)
    chosen = simulate(replace(job, transfer_ns=transfer, network_noise_frac=0.1))[0][:2]
    assert not straggler_named(found_in(chosen))


def test_stages_are_evened_with_what_layers_take_on_the_stage_that_gets_them() -> None:
    job = Job(
        pp=2,
        dp=2,
        layers=8,
        stage_layers=(2, 6),
        microbatches=8,
        transfer_ns=40_000,
        launch_ns=8_000,
    )
    # the busier stage's GPUs are slower by a twelfth, by the clock that they can hold
    extra = 3 * 6 * job.layer_ns // 12
    slow = replace(job, causes=tuple(Cause("gpu_slow", rank, extra) for rank in (2, 3)))
    left = []
    for one in (job, slow):
        (uneven,) = found(studied(one), "pipeline.imbalance")
        assert uneven["saving"] is not None
        left.append(uneven["saving"]["window"]["without_ns"])
    assert left[1] / left[0] == pytest.approx(2 / (1 + 12 / 13), abs=0.007)


@pytest.mark.parametrize("left", [0.4, 0.6])
def test_an_uncertainty_holds_both_explanations_of_the_pace_before_the_window(left: float) -> None:
    job = Job(steps=8, layers=8, layer_ns=600_000, kernels_per_layer=12, launch_ns=88_000)
    fast = window_step_ns(replace(job, launch_ns=3_000))
    usual = int(left * window_step_ns(job) + (1 - left) * fast)
    ranks = [replace(r, info=replace(r.info, usual_step_ns=usual)) for r in simulated_job(job)]
    model = what_ifs(dataset_of(ranks))
    assert model is not None
    saved = model.saved(replace(model.base, own=np.zeros_like(model.base.own)))
    least, most, _ = model.interval(saved, [])
    # launches delay GPUs outside, too; or these are slower there, and launches delay nothing
    for true in (0, usual - fast):
        assert least - 0.01 * usual <= true <= most + 0.01 * usual
    assert (saved.ns > 0.02 * usual) == (left > 0.5)


@pytest.mark.parametrize(
    "pace",
    long_but([(18_000, 1.02)], itertools.product((5_000, 12_000, 18_000), (1.0, 1.02))),
)
def test_a_gpu_that_sets_both_paces_leaves_open_what_tracing_costs(
    pace: tuple[int, float],
) -> None:
    traced_ns, longer = pace
    extra = 8 * MS
    job = Job(steps=8, layers=4, kernels_per_layer=60, launch_ns=28_000, warm_steps=14)
    job = replace(job, traced_ns=traced_ns, causes=(Cause("gpu_more", 1, extra),))
    ranks = simulate(job)[0]
    usual = ranks[0].info.usual_step_ns
    assert usual is not None
    usual = int(longer * usual)
    ranks = [replace(r, info=replace(r.info, usual_step_ns=usual)) for r in ranks]
    model = what_ifs(dataset_of(ranks))
    assert model is not None
    assert {one.overhead_ns // 1_000 for one in model.untraced} >= {19, 24}
    saved = model.saved(model.like_peers(model.base, [1], "gpu"))
    # without the profiler the others' GPUs have nothing to wait for from their hosts
    assert saved.ns == pytest.approx(extra, abs=0.05 * usual)
    least, most, _ = model.interval(saved, [1])
    assert all(least <= one <= most for one in (extra, *saved.others_ns()))


def test_without_step_logs_launch_bound_may_be_the_profilers_doing() -> None:
    def job(launch_ns: int) -> Job:
        return Job(steps=8, layers=8, layer_ns=600_000, kernels_per_layer=12, launch_ns=launch_ns)

    # tracing has made hosts slower than their GPUs, which nothing tells
    traced = studied(job(99_000))
    true = window_step_ns(job(80_000)) - window_step_ns(job(3_000))
    (one,) = found(traced, "host.launch_bound")
    assert one["saved_ns_per_step"] > 2 * true
    assert one["saved_least_ns"] <= 1.1 * true
    # tracing can only have made it more than it is
    of_model_ns = one["saved_ns_per_step"] / 8
    assert one["saved_most_ns"] - one["saved_ns_per_step"] < 2 * of_model_ns
    assert one["saved_ns_per_step"] - one["saved_least_ns"] > 2 * of_model_ns


def test_kernels_of_ranks_that_wait_are_compared_as_if_no_collective_ran_beside_them() -> None:
    job = Job(steps=8, launch_ns=50_000, contention_frac=0.3)
    extra = int(0.4 * 3 * job.layer_ns * job.layers)
    late = replace(job, causes=(Cause("gpu_slow", 1, extra),))
    (one,) = found(studied(late), "straggler.gpu")
    saved = window_step_ns(late) - window_step_ns(job)
    # the late rank's own are longer, and beside no collective: they tell nothing of the others'
    assert one["saved_ns_per_step"] == pytest.approx(saved, rel=0.05)


def test_steps_that_no_repair_of_the_window_explains_are_not_told_as_those_without_profiler() -> (
    None
):
    job = Job(steps=8)
    ranks = simulated_job(job)
    window_ns = dataset_of(ranks).step_ns

    def without_profiler(usual_ns: float) -> bool:
        logged = [replace(r, info=replace(r.info, usual_step_ns=int(usual_ns))) for r in ranks]
        pace = studied_ranks(logged)["pace"]
        assert pace is not None
        return pace["without_profiler"]

    assert without_profiler(window_ns)
    # kernels alone take longer than that: the window's batches are not those before it
    assert not without_profiler(0.7 * window_ns)


def test_an_uncertainty_has_what_the_clocks_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    job = next(cases(["late in a pipeline"], [9104])).job
    ranks, _ = simulate(job)
    late = found_in(ranks)[0]
    assert late["saving"] is not None
    clocks = late["saving"]["clocks_ns"]
    assert clocks > 0
    assert late["saved_uncertainty_ns"] >= clocks

    def moved(tables: Any, matched: pa.Table, measured: Any) -> Clock:
        clock = align(tables, matched, measured)
        ahead = np.where(np.isin(clock.ranks, late["ranks"]), 1, -1) * clock.uncertainty_ns
        return replace(clock, offset_ns=clock.offset_ns + ahead)

    monkeypatch.setattr(module, "align", moved)
    other = found_in(ranks)[0]
    assert (other["code"], other["ranks"]) == (late["code"], late["ranks"])
    change = abs(other["saved_ns_per_step"] - late["saved_ns_per_step"])
    assert change == pytest.approx(clocks, abs=2_000)

    def exact(tables: Any, matched: pa.Table, measured: Any) -> Clock:
        clock = align(tables, matched, measured)
        return replace(clock, uncertainty_ns=0 * clock.uncertainty_ns)

    monkeypatch.setattr(module, "align", exact)
    saving = found_in(ranks)[0]["saving"]
    assert saving is not None
    assert saving["clocks_ns"] == 0
