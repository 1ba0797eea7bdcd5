"""Accounts that close, stragglers that are stragglers, and no rank named for another's delay."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings, strategies as st
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from studies import studied_job as studied

from clusterprof.analysis.findings.registry import CODES
from clusterprof.analysis.model.timeline import Timelines, union
from clusterprof.results import CaptureCost, Finding, Results
from clusterprof.study import study
from clusterprof.tables import RankTables
from clusterprof.words import ms

MS = 1_000_000
spans = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=40)


def stragglers(results: Results) -> list[tuple[str, int | None]]:
    return [
        (f["code"], f["rank"])
        for f in results["findings"]
        if f["code"].startswith("straggler") and f["severity"] != "info"
    ]


STRAGGLERS = {code for code in CODES if code.startswith("straggler.")}


def leading(results: Results) -> str | None:
    """The code of the finding with whose headline the verdict begins; None: with no finding's."""
    code = results["headline"][0]["code"]
    return code if code in CODES else None


def hosts_in(found: Finding) -> set[str]:
    """What the late host was in, by the evidence."""
    return {row["host"]["name"] for row in found["evidence"] if row.get("host")}


def only(results: Results, code: str) -> Finding:
    (found,) = [f for f in results["findings"] if f["code"] == code]
    return found


@given(spans, st.integers(0, 600), st.integers(0, 600))
def test_a_union_covers_what_counting_every_nanosecond_says(
    intervals: list[tuple[int, int]], a: int, b: int
) -> None:
    begin, end = min(a, b), max(a, b)
    start = np.array([s for s, _ in intervals], dtype=np.int64)
    stop = np.array([s + n for s, n in intervals], dtype=np.int64)
    axis = np.zeros(700, dtype=bool)
    for s, e in zip(start, stop, strict=True):
        axis[s:e] = True
    covered = union(start, stop).within(np.array([begin]), np.array([end]))
    assert covered.tolist() == [int(axis[begin:end].sum())]


job = st.builds(
    Job,
    dp=st.sampled_from([2, 3]),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    layers=st.just(4),
    steps=st.integers(1, 4),
    pageable=st.booleans(),
    synchronous=st.booleans(),
    launch_ns=st.integers(5_000, 400_000),
    seed=st.integers(0, 50),
)


@pytest.mark.parametrize("examples", long_but([3], [40]))
def test_each_account_closes_to_the_nanosecond_and_steps_leave_no_gap(examples: int) -> None:
    # a job whose compute hides some communication, then any
    settings(max_examples=examples)(example(Job())(given(job)(accounts_close)))()


def accounts_close(job: Job) -> None:
    made = studied(job)
    for step in made.results["steps"]:
        for a in step["ranks"]:
            parts = (
                a["compute_ns"], a["exposed_communication_ns"], a["exposed_copy_ns"], a["idle_ns"]
            )  # fmt: skip
            assert sum(parts) == a["duration_ns"]
            assert min(parts) >= 0
            assert 0 <= a["exposed_wait_ns"] <= a["exposed_communication_ns"]
            assert a["exposed_communication_ns"] <= a["communication_ns"]
    lines = Timelines(made.ranks)
    same = lines.rank[1:] == lines.rank[:-1]
    assert (lines.begin[1:] == lines.end[:-1])[same].all()


def test_what_waits_on_any_stream_is_launched() -> None:
    ranks, _ = simulate(Job(dp=2, steps=4, launch_ns=400_000, layer_ns=400_000))
    rows = ranks[0].activity.to_pylist()
    begin = ranks[0].steps["begin_ns"].to_pylist()[-1]
    mine = [r for r in rows if r["kind"] == "compute" and r["launch_start_ns"] > begin]
    launched = {name: mine[0][name] for name in ("launch_start_ns", "launch_end_ns")}
    last = mine[-1]["end_ns"]
    late = mine[-1] | launched | {"stream": 99, "start_ns": last, "end_ns": last + 1000}
    rows = sorted([*rows, late], key=lambda row: int(row["start_ns"]))
    table = pa.Table.from_pylist(rows, ranks[0].activity.schema)

    def unlaunched_ns(tables: RankTables) -> int:
        (account,) = study([tables, ranks[1]]).dataset.accounts.to_pylist()[3:4]
        assert account["compute_ns"] > 0
        return int(account["unlaunched_ns"])

    assert unlaunched_ns(ranks[0]) > 5 * MS
    assert unlaunched_ns(ranks[0].changed("activity", table)) < MS


def test_queued_work_belongs_to_the_step_that_launched_it() -> None:
    ranks, _ = simulate(Job(launch_ns=10_000, pageable=False))
    line = Timelines(ranks[:1])
    host_begin = line.axis.of(line.rank, line.host_begin)
    for k in range(1, len(line.step)):
        mine = line.launched_in == k
        # the host is far ahead: its step began while the GPU was still in the one before
        assert host_begin[k] < line.begin[k]
        start, stop = line.on_axis((0, 1), 0, 1)[:, mine]
        assert start.min() >= line.begin[k]
        assert stop.max() <= line.end[k]


@pytest.mark.parametrize("shape", long_but([(4, 1, 1), (2, 1, 2)], [(2, 2, 1), (1, 1, 4)]))
@pytest.mark.parametrize("seed", long_but([0], range(5)))
def test_a_healthy_job_has_no_straggler(shape: tuple[int, int, int], seed: int) -> None:
    dp, tp, pp = shape
    made = studied(Job(dp=dp, tp=tp, pp=pp, layers=8, seed=seed))
    assert stragglers(made.results) == []
    assert leading(made.results) not in STRAGGLERS


@pytest.mark.parametrize("rank", long_but([2], [0, 3]))
def test_a_rank_whose_host_sleeps_is_named_and_costs_what_it_sleeps(rank: int) -> None:
    made = studied(Job(synchronous=True, causes=(Cause("host", rank, 20 * MS),)))
    healthy = studied(Job(synchronous=True))
    assert stragglers(made.results) == [("straggler.host", rank)]
    found = made.results["findings"][0]
    step = made.results["steps"][-1]["duration_ns"]
    slower = step - healthy.results["steps"][-1]["duration_ns"]
    assert found["cost_ns_per_step"] == pytest.approx(slower, rel=0.1)
    assert found["recurrence"] == "persistent"
    assert leading(made.results) == "straggler.host"
    assert hosts_in(found) == {"clock_nanosleep"}
    assert f"rank {rank} " in made.results["verdict"].lower()
    assert "clock_nanosleep" in made.results["verdict"]


@pytest.mark.parametrize(("kind", "more_calls"), [("gpu_more", True), ("gpu_slow", False)])
def test_a_rank_whose_gpu_does_more_or_is_slow_is_named_for_its_gpu(
    kind: str, more_calls: bool
) -> None:
    made = studied(Job(causes=(Cause(kind, 1, 7 * MS),)))  # type: ignore[arg-type]
    assert stragglers(made.results) == [("straggler.gpu", 1)]
    found = made.results["findings"][0]
    assert found["cost_ns_per_step"] == pytest.approx(7 * MS, rel=0.3)
    (row,) = [row for row in found["evidence"] if "more_calls_per_step" in row]
    assert (row["more_calls_per_step"] >= 1) is more_calls
    assert row["more_ns_per_step"] > 1 * MS


def test_more_work_saves_what_spreading_it_does_which_is_less_than_leaving_it_out() -> None:
    def step_ns(*causes: Cause) -> int:
        return int(studied(Job(causes=causes)).results["steps"][-1]["duration_ns"])

    more = Cause("gpu_more", 1, 8 * MS)
    results = studied(Job(causes=(more,))).results
    (found,) = [each for each in results["findings"] if each["code"] == "straggler.gpu"]
    (left_out,) = [
        row["left_out_saves_ns_per_step"]
        for row in found["evidence"] if "left_out_saves_ns_per_step" in row
    ]  # fmt: skip
    spread = step_ns(*(Cause("gpu_more", rank, 2 * MS) for rank in range(4)))
    assert found["saved_ns_per_step"] == pytest.approx(step_ns(more) - spread, rel=0.1)
    assert left_out == pytest.approx(step_ns(more) - step_ns(), rel=0.1)
    assert found["saved_ns_per_step"] < 0.9 * left_out
    assert f"by {ms(left_out)} of each" in results["verdict"]
    assert f"spread, it saves {ms(found['saved_ns_per_step'])})" in results["verdict"]


def test_a_host_that_queued_work_still_hides_is_slow_all_the_same() -> None:
    # ranks resume together after long queues: 64 ranks, the last one far behind the slow one
    ranks, _ = simulate(Job(dp=16, steps=4, seed=1, causes=(Cause("host", 5, 20 * MS),)))
    made = study(ranks)
    assert stragglers(made.results) == [("straggler.host", 5)]


def test_a_slow_host_with_slack_left_is_information_and_costs_nothing() -> None:
    # 20 ms of sleep and some 5 ms of launching fit into the GPU's 30 ms
    made = studied(Job(layers=8, launch_ns=80_000, causes=(Cause("host", 1, 20 * MS),)))
    assert stragglers(made.results) == []
    found = only(made.results, "straggler.host")
    assert (found["rank"], found["severity"]) == (1, "info")
    assert found["saved_ns_per_step"] < 0.01 * MS
    assert leading(made.results) not in STRAGGLERS


def test_where_all_hosts_are_slow_the_one_that_stays_behind_is_no_straggler() -> None:
    # all hosts are slow alike; the one that resumed last stays behind the others
    every = tuple(Cause("host", r, 28 * MS) for r in range(4))
    results = studied(Job(layers=8, launch_ns=206_000, causes=every)).results
    paced = only(results, "host.busy")
    assert results["findings"][0] is paced
    assert len([row for row in paced["evidence"] if row["host_ns_per_step"] > 1 * MS]) == 4
    assert "28.2 ms (in clock_nanosleep)" in paced["summary"]
    assert stragglers(results) == []
    assert leading(results) not in STRAGGLERS


def test_gpus_that_idle_together_are_reported_with_what_all_hosts_do_meanwhile() -> None:
    every = tuple(Cause("host", r, 20 * MS) for r in range(4))
    job = Job(synchronous=True, causes=every)
    for kept in (4, 1):
        results = study(simulate(job)[0][:kept]).results
        found = results["findings"][0]
        assert (found["code"], found["rank"]) == ("host.busy", None)
        assert found["cost_ns_per_step"] == pytest.approx(20 * MS, rel=0.1)
        assert "clock_nanosleep" in results["verdict"]
        assert found["ranks"] == list(range(kept))


def test_where_all_hosts_only_launch_the_job_is_launch_bound() -> None:
    results = studied(Job(layers=8, launch_ns=850_000)).results
    assert only(results, "host.launch_bound")["rank"] is None
    assert not [f for f in results["findings"] if f["code"] == "host.busy"]


def test_a_late_host_costs_no_more_than_the_next_host_leaves_to_be_won() -> None:
    # hosts of 30 ms a step and one of 40: without it the step would be the others' 30
    slow = tuple(Cause("host", r, (24 if r == 2 else 14) * MS) for r in range(4))
    results = studied(Job(layers=4, launch_ns=200_000, causes=slow, steps=8)).results
    found = only(results, "straggler.host")
    assert found["rank"] == 2
    assert found["cost_ns_per_step"] == pytest.approx(10 * MS, rel=0.15)


def test_a_second_late_host_is_weighed_as_if_the_first_were_repaired() -> None:
    # beside the first, which takes 25 ms longer still, it costs nothing
    late = (Cause("host", 1, 40 * MS), Cause("host", 2, 15 * MS))
    results = studied(Job(layers=4, launch_ns=90_000, synchronous=True, causes=late)).results
    first, second = (f for f in results["findings"] if f["code"] == "straggler.host")
    assert (first["rank"], second["rank"]) == (1, 2)
    assert first["cost_ns_per_step"] == pytest.approx(25 * MS, rel=0.1)
    assert second["cost_ns_per_step"] == pytest.approx(15 * MS, rel=0.1)


@pytest.mark.parametrize(
    ("pause_ms", "others", "named"),
    [(1, (), False), (11, (), True), (40, (), True), (40, (11,), False)],
)
def test_among_slow_hosts_pauses_of_one_rank_alone_in_few_steps_are_a_finding(
    pause_ms: int, others: tuple[int, ...], named: bool
) -> None:
    # 53 launches of 0.55 ms, the GPU needs 24 ms; rank 0 is delayed in three steps of eleven
    job = Job(dp=2, layers=6, launch_ns=660_000, steps=12, tear_ns=20 * MS)
    rare = (Cause("host", 0, pause_ms * MS, (8, 9, 13)), Cause("host", 1, pause_ms * MS, others))
    assert bool(stragglers(studied(replace(job, causes=rare)).results)) is named


def before(ranks: list[RankTables], usual: int) -> list[RankTables]:
    """The reports as they are where steps took `usual` ns before the capture."""
    return [replace(r, info=replace(r.info, usual_step_ns=usual)) for r in ranks]


def test_a_host_that_pauses_at_one_stretch_is_late_whatever_the_capture_costs() -> None:
    ranks, _ = simulate(Job(layers=4, launch_ns=90_000, causes=(Cause("host", 2, 20 * MS),)))
    assert stragglers(study(before(ranks, 16 * MS)).results) == [("straggler.host", 2)]


@pytest.mark.parametrize(
    ("steps", "recurrence"), [((8, 9, 11, 12), "intermittent"), (None, "persistent")]
)
def test_recurrence_says_in_how_many_steps(steps: tuple[int, ...] | None, recurrence: str) -> None:
    job = Job(steps=8, synchronous=True, causes=(Cause("host", 1, 40 * MS, steps),))
    made = studied(job)
    assert stragglers(made.results) == [("straggler.host", 1)]
    found = made.results["findings"][0]
    assert found["recurrence"] == recurrence
    if steps is not None:
        assert found["steps"] == list(steps)


@pytest.mark.parametrize("rank", long_but([3], range(4)))
def test_ranks_that_wait_downstream_are_no_stragglers_in_tensor_groups(rank: int) -> None:
    # its tensor partner is late at the data group, and that one's members at their own
    made = studied(Job(dp=2, tp=2, synchronous=True, causes=(Cause("host", rank, 15 * MS),)))
    assert stragglers(made.results) == [("straggler.host", rank)]


@pytest.mark.parametrize("rank", long_but([1], range(4)))
def test_ranks_that_wait_downstream_are_no_stragglers_in_a_pipeline(rank: int) -> None:
    made = studied(Job(dp=2, pp=2, causes=(Cause("host", rank, 20 * MS),)))
    assert stragglers(made.results) == [("straggler.host", rank)]


def test_a_pipeline_has_its_bubble_and_unequal_stages_their_imbalance() -> None:
    even = studied(Job(dp=2, pp=2, launch_ns=40_000))
    bubble = only(even.results, "pipeline.bubble")
    assert bubble["severity"] == "info"
    assert bubble["evidence"][-1]["ideal_share"] == pytest.approx(0.2)
    assert [f for f in even.results["findings"] if f["code"] == "pipeline.imbalance"] == []
    uneven_job = Job(dp=2, pp=2, launch_ns=40_000, stage_layers=(4, 2))
    uneven = studied(uneven_job)
    found = only(uneven.results, "pipeline.imbalance")
    assert found["ranks"] == [0, 1]
    step, equal = (
        np.mean([s["duration_ns"] for s in studied(job).results["steps"][1:]])
        for job in (uneven_job, replace(uneven_job, stage_layers=(3, 3)))
    )
    assert found["cost_ns_per_step"] == pytest.approx(step - equal, abs=0.03 * step)
    assert uneven.results["findings"][0] == found
    assert stragglers(uneven.results) == []


def test_all_ranks_late_alike_is_input_that_stalls_and_no_rank_is_a_straggler() -> None:
    every = tuple(Cause("input", rank, 25 * MS) for rank in range(4))
    made = studied(Job(synchronous=True, causes=every))
    assert stragglers(made.results) == []
    found = made.results["findings"][0]
    assert (found["code"], found["ranks"]) == ("input.stall", [0, 1, 2, 3])
    assert found["cost_ns_per_step"] == pytest.approx(25 * MS, rel=0.1)


def test_kernels_shorter_than_their_launch_are_launch_bound() -> None:
    job = Job(layer_ns=30_000, kernels_per_layer=6, launch_ns=60_000, layers=20)
    # ranks that resume together: one that resumes last stays last, its host being as busy as all
    made = studied(replace(job, tear_ns=1 * MS))
    found = made.results["findings"][0]
    assert found["code"] == "host.launch_bound"
    assert found["share_of_step"] > 0.3
    assert stragglers(made.results) == []


def test_exposed_communication_is_named_and_waiting_is_not_counted_as_transfer() -> None:
    made = studied(Job(layers=2, transfer_ns=6 * MS))
    found = only(made.results, "communication.exposed")
    assert found["cost_ns_per_step"] >= 6 * MS
    late = studied(Job(synchronous=True, causes=(Cause("host", 2, 20 * MS),)))
    costs = [
        f["cost_ns_per_step"]
        for f in late.results["findings"]
        if f["code"] == "communication.exposed"
    ]
    assert all(c < 3 * MS for c in costs)


@pytest.mark.parametrize(
    ("job", "alone"),
    [
        (Job(layers=2, transfer_ns=6 * MS), False),
        (Job(layers=2, transfer_ns=6 * MS, serial=True), True),
    ],
)
def test_no_compute_overlaps_is_said_only_where_none_does(job: Job, alone: bool) -> None:
    summary = only(studied(job).results, "communication.exposed")["summary"]
    assert summary.startswith("No compute overlaps AllReduce: ") == alone, summary
    found = re.search(r"(\S+)% of their time overlapped", summary)
    assert found, summary
    assert (found[1] in ("0", "<0.1")) == alone, summary
    assert alone or summary.startswith(f"AllReduce is {found[1]}% overlapped: "), summary


def test_the_first_step_of_a_window_is_never_evidence() -> None:
    made = studied(Job(tear_ns=400 * MS))
    assert [s["settled"] for s in made.results["steps"]] == [False, True, True, True, True]
    found = only(made.results, "profiler.perturbation")
    assert (found["cost_ns_per_step"], found["severity"]) == (0, "info")
    assert stragglers(made.results) == []


def test_profiler_overhead_is_reported_and_is_no_cost_of_the_job() -> None:
    ranks, _ = simulate(Job())
    cost: CaptureCost = {
        "stall_start_ns": 1500 * MS,
        "stall_stop_ns": 90 * MS,
        "profiled": {
            "before_ns": 24 * MS,
            "inside_ns": 27 * MS,
            "after_ns": 25 * MS,
            "after_uncertainty_ns": 10 * MS,
        },
        "unprofiled": {
            "before_ns": 24 * MS,
            "inside_ns": 24 * MS,
            "after_ns": None,
            "after_uncertainty_ns": None,
        },
    }
    results = study(ranks, capture=cost).results
    assert results["capture"] == cost
    found = only(results, "profiler.perturbation")
    assert found is results["findings"][-1]
    assert (found["severity"], found["cost_ns_per_step"]) == ("info", 0)
    rows = found["evidence"]
    (stalls,) = [row for row in rows if "stall_start_ns" in row]
    assert (stalls["stall_start_ns"], stalls["stall_stop_ns"]) == (1500 * MS, 90 * MS)
    # the unprofiled ranks' steps are as they were, and the summary has nothing of them
    longer = {row["whose"]: row["more_ns_per_step"] for row in rows if "whose" in row}
    assert longer == {"profiled ranks": 3 * MS, "unprofiled ranks": 0}
    assert "unprofiled ranks" not in found["summary"]
    assert [row["excluded_steps"] for row in rows if "spread_ns" in row] == [[6]]


def test_a_step_in_which_a_rank_stopped_is_no_evidence() -> None:
    ranks, _ = simulate(Job(steps=6))
    # rank 1's report ends inside the last step; rank 3's capture was closed two steps early
    cut = [_until(r, {1: 10, 3: 8}.get(r.rank, 99)) for r in ranks]
    steady = [s["step"] for s in study(cut).results["steps"] if s["settled"]]
    assert steady == [7, 8, 10]


def test_of_many_steps_the_most_typical_ones_on_end_are_evidence() -> None:
    ranks, _ = simulate(Job(dp=2, steps=48, layers=2))
    steady = [s["step"] for s in study(ranks).results["steps"] if s["settled"]]
    assert len(steady) == 20
    assert steady == list(range(steady[0], steady[0] + 20))


def _until(tables: RankTables, last: int) -> RankTables:
    """The report of a capture that stopped with step `last`."""
    steps = tables.steps.filter(pc.less_equal(tables.steps["step"], last))
    end = pc.max(steps["end_ns"])
    times = {"activity": "launch_start_ns", "collective_calls": "issue_start_ns"}
    kept = {
        name: table.filter(pc.less_equal(table[times.get(name, "start_ns")], end))
        for name in ("activity", "collective_calls", "host_calls")
        for table in [getattr(tables, name)]
    }
    return replace(tables, steps=steps, **kept)


@pytest.mark.parametrize("steps", [1, 2])
def test_too_few_steady_steps_give_no_finding_and_ask_for_so_many_more(steps: int) -> None:
    made = studied(Job(steps=steps, causes=(Cause("host", 2, 50 * MS),)))
    (capture,) = made.results["findings"]
    assert (capture["code"], capture["severity"]) == ("profiler.perturbation", "warning")
    # by how much to lengthen the window, and where
    assert f" {4 - steps} steps" in capture["advice"]
    assert "--steps" in capture["advice"]
    assert f"({steps - 1} of 2)" in made.results["verdict"]
    (warning,) = [w for w in made.results["warnings"] if "steady-state" in w]
    assert f" {4 - steps} steps" in warning
    assert "--steps" in warning


def test_a_report_without_steps_counts_as_one_and_says_so() -> None:
    made = studied(Job(with_steps=False))
    assert len(made.results["steps"]) == 1
    (warning,) = (w for w in made.results["warnings"] if "steps" in w)
    # and how to mark them: a longer window has none either
    assert all(how in warning for how in ("no steps", "step()", "NVTX", "--step-on"))
    assert made.results["findings"] == []
    assert made.results["verdict"].startswith("No report has steps")


def test_all_profiled_ranks_waiting_together_point_to_one_without_a_report() -> None:
    ranks, _ = simulate(Job(synchronous=True, steps=6, causes=(Cause("host", 3, 20 * MS),)))
    made = study(ranks[:3])
    found = made.results["findings"][0]
    assert (found["code"], found["rank"], found["ranks"]) == (
        "straggler.unprofiled",
        None,
        [0, 1, 2],
    )
    assert "--ranks 3" in found["advice"]
    assert found["evidence"][0]["communicator_size"] == 4
    assert found["next"] == "clusterprof torchrun --ranks 3 --profiler nsys ... -- PROGRAM..."
    assert found["cost_ns_per_step"] == pytest.approx(20 * MS, rel=0.4)


def test_verdicts_do_not_change_with_the_clocks() -> None:
    true = Job(synchronous=True, causes=(Cause("host", 2, 20 * MS),))
    wrong = replace(
        true, offset_ns=(0, 3_600_000 * MS, -41 * MS, 17 * MS), drift_ppm=(0.0, 50.0, -50.0, 33.0)
    )
    a, b = studied(true).results, studied(wrong).results
    assert [(f["code"], f["rank"], f["severity"]) for f in a["findings"]] == [
        (f["code"], f["rank"], f["severity"]) for f in b["findings"]
    ]


def test_more_work_on_one_rank_of_a_stage_is_an_imbalance_of_stages_only_once_it_is_spread() -> (
    None
):
    more = Cause("gpu_more", rank=0, extra_ns=8 * MS)
    results = studied(Job(dp=2, pp=2, launch_ns=40_000, causes=(more,))).results
    assert leading(results) == "straggler.gpu"
    uneven = only(results, "pipeline.imbalance")
    assert uneven["severity"] == "info"
    assert uneven["saving"] is not None
    assert uneven["saving"]["net_of"] == [{"code": "straggler.gpu", "ranks": [0]}]
    assert uneven["saved_alone_ns"] <= 0


def test_hosts_whose_time_is_all_in_named_calls_have_no_middle_launch() -> None:
    def named(rank: RankTables) -> RankTables:
        calls = rank.host_calls.to_pylist()
        own = next(row for row in calls if row["kind"] == "range")
        begin, end = (rank.info.begin_ns or 0) - 10**9, rank.info.end_ns + 10**9
        calls.insert(0, {**own, "name": "dataloader", "start_ns": begin, "end_ns": end})
        return replace(rank, host_calls=pa.Table.from_pylist(calls, rank.host_calls.schema))

    ranks = [named(rank) for rank in simulate(Job())[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert study(ranks, source="reports").results["findings"]


@pytest.mark.parametrize("late", [False, True])
def test_what_may_wait_for_an_unprofiled_rank_is_no_exposed_transfer(*, late: bool) -> None:
    """Both buckets wait for it, one behind the other: neither is three times as long as usual."""
    causes = (Cause("host", 2, 5 * MS),) if late else ()
    job = Job(layers=2, steps=7, transfer_ns=4 * MS, serial=True, synchronous=True, causes=causes)
    whole = studied(job).results
    if not late:
        assert only(whole, "communication.exposed")["severity"] == "critical"
    ranks = [tables for tables in simulate(job)[0] if tables.rank != 2]
    results = study(ranks).results
    found = only(results, "communication.exposed")
    assert found["severity"] == "info"
    assert "waiting excluded" not in found["summary"]
    assert "transfer, or waiting for unprofiled ranks" in results["verdict"]
    assert "--ranks 2 " in found["next"]
