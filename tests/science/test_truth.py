"""What is true is found: every recording, and a few held-out simulated jobs of every class."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from simulate.cases import KINDS, Case, cases, right, saved_ns, straggler_named
from studies import FOLDER, NAMES, TRUTH, Simulated, found_in, gathered

from clusterprof import words
from clusterprof.analysis.findings.registry import all_findings
from clusterprof.report.panels import tiles
from clusterprof.report.summary import Summary
from clusterprof.study import Study, dataset_of, study
from clusterprof.tables import RankTables

MS = 1_000_000


def profiled(case: Case, job: Job) -> list[RankTables]:
    return [t for t in simulate(job)[0] if case.profiled is None or t.rank in case.profiled]


def test_every_recording_has_its_truth_written_beside_it() -> None:
    folders = {
        str(f.parent.relative_to(FOLDER))
        for pattern in ("*.sqlite.xz", "*.json.gz", "*.json.xz")
        for f in FOLDER.rglob(pattern)
    }
    runs = {str(f.parent.relative_to(FOLDER)) for f in FOLDER.rglob("run.json")}
    reports = {f"{run}/ranks/{rank:05}" for run in runs for rank in (0, 1)}
    assert reports < folders
    assert set(TRUTH) == folders - reports
    pairs = json.loads((FOLDER / "pairs.json").read_text())["recordings"]
    assert set(pairs) == runs
    for what in pairs.values():
        assert what["codes"]
        assert 0 < what["saved_ms"] < what["step_ms"]
        assert what["saved_spread_ms"] > 0


@pytest.mark.parametrize("recording", NAMES)
def test_the_top_finding_of_a_recording_is_what_is_true_of_it(
    studied: Callable[[str], Study], recording: str
) -> None:
    what = TRUTH[recording]
    findings = studied(recording).results["findings"]
    case = Case(
        recording, 0, Job(), tuple(what["codes"]), tuple(what.get("ranks", ())),
        healthy=what.get("healthy", False),
    )  # fmt: skip
    assert right(case, findings), [(f["code"], f["rank"]) for f in findings]
    if "cost_ms" in what:
        low, high = what["cost_ms"]
        assert low * MS <= findings[0]["cost_ns_per_step"] <= high * MS
    if case.healthy:
        assert not straggler_named(findings)


@pytest.mark.parametrize("job_kind", KINDS)
def test_of_each_class_a_held_out_job_is_judged_right(
    simulated: Callable[..., Simulated], job_kind: str
) -> None:
    made = simulated(job_kind, 7001)
    findings = made.study.results["findings"]
    assert right(made.case, findings), (made.case.truth, [(f["code"], f["rank"]) for f in findings])


@pytest.mark.parametrize("recording", NAMES)
def test_no_finding_costs_more_than_the_step(
    studied: Callable[[str], Study], recording: str
) -> None:
    for f in studied(recording).results["findings"]:
        assert 0 <= f["share_of_step"] <= 1, f["code"]


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-intermittent"])
def test_an_intermittent_straggler_has_its_steps_and_what_it_costs_in_each(
    studied: Callable[[str], Study], recording: str
) -> None:
    (top, *_) = studied(recording).results["findings"]
    assert (top["recurrence"], top["steps"]) == ("intermittent", [22, 25])
    assert "2 of 7 " in top["summary"]
    # 90 ms of sleep, of which the queue hides some 40
    each = top["cost_ns_per_step"] * 7 / 2
    assert 40 * MS <= each <= 60 * MS


@pytest.mark.parametrize("recording", ["nsys-2025.3/pipeline-imbalance"])
def test_the_stage_with_more_layers_is_a_finding_and_its_host_is_no_straggler(
    studied: Callable[[str], Study], recording: str
) -> None:
    results = studied(recording).results
    top = results["findings"][0]
    assert (top["code"], top["rank"], top["ranks"]) == ("pipeline.imbalance", 3, [3])
    assert "stage 3 " in results["verdict"].lower()
    assert not straggler_named(results["findings"])
    # a transfer of less than no time, by the clocks, is not scaled by itself: ±591% of the step
    for found in results["findings"]:
        assert found["saved_uncertainty_ns"] <= found["saved_ns_per_step"]


@pytest.mark.parametrize("seed", long_but([95000], [95001]))
def test_a_late_host_that_queued_work_covers_until_the_last_step_delays_the_others(
    seed: int,
) -> None:
    """Its queue is empty within the window's last step: the window's mean tells next to nothing."""
    (case,) = cases(["late host, asynchronous"], range(seed, seed + 1))
    results = study(simulate(case.job)[0]).results
    top = results["findings"][0]
    assert (top["code"], top["rank"], top["severity"]) == (
        "straggler.host", case.ranks[0], "critical",
    )  # fmt: skip
    assert f"Rank {case.ranks[0]} will delay the other ranks by " in results["verdict"]
    true, _ = saved_ns(case.job)
    assert top["saved_ns_per_step"] == pytest.approx(true, rel=0.05)
    # what it saves in the window says nothing of the time behind it
    assert top["saved_uncertainty_ns"] < 0.2 * top["saved_ns_per_step"]
    # the window's step is as long as one without the cause: it says nothing of those to come
    assert top["saving"] is not None
    before = top["saving"]["long_run"]["step_ns"]
    assert top["share_of_step"] == pytest.approx(top["saved_ns_per_step"] / before, abs=1e-3)
    (tile,) = [one for one in tiles(Summary(results)) if one.name == "What its repair saves"]
    assert tile.more.startswith(f"per step: {words.ms(before)} → ")


def test_who_saves_most_alone_is_named_alone() -> None:
    """Rank 2's GPU saves 5.9 ms; with two hosts that are 0.7 ms slower than others 6.5 ms."""
    (case,) = cases(["GPU with more work, tracing"], range(96001, 96002))
    top = found_in(simulate(case.job)[0])[0]
    assert (top["code"], top["ranks"]) == ("straggler.gpu", [2])


@pytest.mark.long
def test_a_launch_takes_no_longer_where_all_idle_kernels_of_a_rank_waited_for_another() -> None:
    """Rank 1's device idles before eight kernels only, that wait for rank 2 for 18 ms."""
    (case,) = cases(["late host, slowed by tracing"], range(97019, 97020))
    assert case.without is not None
    dataset, without = (dataset_of(simulate(job)[0]) for job in (case.job, case.without))
    assert dataset.usual_step_ns is not None
    assert without.usual_step_ns is not None
    top = all_findings(dataset)[0][0]
    assert (top["code"], top["rank"]) == ("straggler.host", 2)
    true = dataset.usual_step_ns - without.usual_step_ns
    assert top["saved_ns_per_step"] == pytest.approx(true, abs=0.05 * dataset.usual_step_ns)


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-hidden"])
def test_a_hidden_host_that_may_save_nothing_without_step_logs_is_an_information(
    studied: Callable[[str], Study], recording: str
) -> None:
    """The steps outside its window were no longer for it; tracing may have made all of it."""
    results = studied(recording).results
    top = results["findings"][0]
    assert (top["rank"], top["severity"]) == (2, "info")
    assert top["saved_ns_per_step"] <= top["saved_uncertainty_ns"]
    assert "It may be nothing: profile it by clusterprof" in top["summary"]
    assert "Rank 2" not in results["verdict"]


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-hidden"])
def test_the_profilers_stop_is_no_part_of_the_last_step(
    studied: Callable[[str], Study], recording: str
) -> None:
    # the device was drained and the capture stopped, 10 ms, inside the last step's own range
    results = studied(recording).results
    last = [s for s in results["steps"] if s["settled"]][-1]
    assert max(a["idle_ns"] for a in last["ranks"]) < 1 * MS


def test_a_cause_that_all_hosts_have_makes_no_straggler() -> None:
    # desynchronised by 150 ms, all fetch slowly alike: only the last one's GPU idles
    every = tuple(Cause("input", rank, 60 * MS) for rank in range(4))
    findings = found_in(simulate(Job(tear_ns=150 * MS, steps=6, seed=4, causes=every))[0])
    assert findings[0]["code"] == "input.stall"
    assert not straggler_named(findings)


def test_an_unprofiled_straggler_is_looked_for_in_its_own_communicator() -> None:
    job = Job(dp=4, tp=2, steps=8, synchronous=True, causes=(Cause("host", 6, 25 * MS),))
    ranks, _ = simulate(job)
    # ranks 0, 2, 4, 6 are one data group; 6 and its tensor partner 7 have no report
    findings = found_in([r for r in ranks if r.rank in (0, 2, 4)])
    top = findings[0]
    assert (top["code"], top["ranks"]) == ("straggler.unprofiled", [0, 2, 4])
    assert (top["evidence"][0]["communicator_size"], top["evidence"][0]["not_captured"]) == (4, [6])
    assert "--ranks 6" in top["advice"]


def test_calls_that_wait_for_a_rank_without_a_report_at_once_wait_once() -> None:
    """As gloo's, which run on several threads: no more than the late host takes."""
    late = 25 * MS
    job = Job(dp=4, tp=2, steps=8, synchronous=True, causes=(Cause("host", 6, late),))
    ranks = [r for r in simulate(job)[0] if r.rank in (0, 2, 4)]
    costs = []
    for times in (1, 2):
        top = found_in([_calling(r, times) for r in ranks])[0]
        assert top["code"] == "straggler.unprofiled"
        costs.append(top["cost_ns_per_step"])
    assert costs[1] == pytest.approx(costs[0], rel=0.05)
    # the simulated hosts vary by 1% from step to step
    assert 0.6 * late < costs[0] <= 1.01 * late


def _calling(tables: RankTables, times: int) -> RankTables:
    """A rank that makes each of its calls so many times, at once."""
    calls = tables.collective_calls
    calls = calls.take(np.repeat(np.arange(calls.num_rows), times))
    number = pa.array(np.arange(calls.num_rows, dtype=np.int32))
    at = calls.schema.get_field_index("call")
    return replace(tables, collective_calls=calls.set_column(at, calls.schema.field(at), number))


@pytest.mark.parametrize("ranks", long_but([64], [256]))
def test_of_many_ranks_the_straggler_is_named(ranks: int) -> None:
    causes = (Cause("host", 57, 20 * MS),)
    job = Job(dp=ranks, layers=4, steps=4, synchronous=True, causes=causes)
    findings = found_in(simulate(job)[0])
    assert (findings[0]["code"], findings[0]["rank"]) == ("straggler.host", 57)


@pytest.mark.parametrize(
    "recording",
    long_but(
        ["nsys-2025.3/ddp"],
        ["nsys-2025.3/compile", "nsys-2025.3/graph-node", "nsys-2025.3/loader-stall"],
    ),
)
@pytest.mark.parametrize(
    "kept", long_but([(0, 1), (1, 3)], itertools.combinations(range(4), 2)), ids=str
)
def test_of_any_ranks_of_a_healthy_recording_none_is_a_straggler(
    recording: str, kept: tuple[int, int]
) -> None:
    ranks = gathered(recording).ranks
    assert not straggler_named(found_in([ranks[place] for place in kept]))


@pytest.mark.parametrize("seed", long_but([98001], [98003, 98004]))
def test_a_stall_that_the_window_happens_to_hold_is_not_what_its_job_loses(seed: int) -> None:
    """Steps before the window were as long as the others in it: the late host is found."""
    (case,) = cases(["late host, and one stall"], range(seed, seed + 1))
    assert case.without is not None
    job, stalled = study(profiled(case, case.job)), case.job.causes[1]
    top = job.results["findings"][0]
    assert (top["code"], top["rank"]) == ("straggler.host", case.ranks[0])
    before, after = (dataset_of(profiled(case, one)) for one in (case.job, case.without))
    assert before.usual_step_ns is not None
    assert after.usual_step_ns is not None
    true = before.usual_step_ns - after.usual_step_ns
    assert top["saved_ns_per_step"] == pytest.approx(true, abs=0.02 * before.usual_step_ns)
    (warning,) = [one for one in job.results["warnings"] if "outside the window" in one]
    assert stalled.steps is not None
    assert f"({stalled.steps[0]})" in warning
    # who stalled is said, and that it was once
    if stalled.rank in (case.profiled or ()):
        (once,) = [one for one in job.results["findings"] if one["steps"] == [*stalled.steps]]
        assert (once["code"], once["ranks"]) == ("host.busy", [stalled.rank])
        assert once["severity"] == "info"
        assert f"paused once, in step {stalled.steps[0]}" in once["summary"]


@pytest.mark.parametrize("seed", long_but([98000], [98001]))
def test_of_a_pattern_whose_long_steps_the_window_has_too_many_of_the_pace_tells_how_many(
    seed: int,
) -> None:
    """Two of its four or five steps wait for input, before it one of three or four did."""
    (case,) = cases(["input, every few steps"], range(seed, seed + 1))
    assert case.without is not None
    dataset, without = (dataset_of(simulate(job)[0]) for job in (case.job, case.without))
    assert dataset.usual_step_ns is not None
    assert without.usual_step_ns is not None
    top = all_findings(dataset)[0][0]
    true = dataset.usual_step_ns - without.usual_step_ns
    assert top["code"] == "input.stall"
    assert top["saved_ns_per_step"] == pytest.approx(true, abs=0.02 * dataset.usual_step_ns)
    assert abs(top["saved_ns_per_step"] - true) <= top["saved_uncertainty_ns"]
