"""Who is a straggler: what is compared with what, and what chance alone does not do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from simulate import Cause, Job, simulate
from simulate.cases import right, straggler_named
from studies import Simulated, studied_job

from clusterprof.analysis.findings.finding import job_of
from clusterprof.analysis.findings.registry import all_findings
from clusterprof.analysis.findings.straggler import unlike
from clusterprof.analysis.findings.verdict import verdict
from clusterprof.analysis.model import limits
from clusterprof.study import dataset_of, study
from clusterprof.tables import RankTables

MS = 1_000_000


@pytest.mark.parametrize(
    "job_kind",
    [
        "slow node in tensor groups",
        "late host, every second step",
        "healthy, long pauses",
        "healthy, lengths that hold",
    ],
)
def test_the_top_finding_of_a_job_is_true(
    simulated: Callable[..., Simulated], job_kind: str
) -> None:
    made = simulated(job_kind)
    assert right(made.case, list(made.study.results["findings"]))


@pytest.mark.parametrize("job_kind", ["late host, every second step"])
def test_a_host_that_pauses_in_most_steps_by_less_than_half_of_these_is_named(
    simulated: Callable[..., Simulated], job_kind: str
) -> None:
    made = simulated(job_kind, 7002)
    assert right(made.case, list(made.study.results["findings"]))


@pytest.mark.parametrize(
    ("layout", "pause_ns"), [({"dp": 8}, 8 * MS), ({"dp": 2, "pp": 4, "launch_ns": 50_000}, 3 * MS)]
)
def test_a_host_that_pauses_in_every_third_step_by_a_third_of_it_is_named(
    layout: dict[str, int], pause_ns: int
) -> None:
    late = tuple(Cause("host", 1, pause_ns + k * pause_ns // 10, (8 + 3 * k,)) for k in range(3))
    job = Job(**layout, steps=10, synchronous=True, causes=late)
    top = studied_job(job).results["findings"][0]
    assert (top["code"], top["ranks"]) == ("straggler.host", [1])
    assert top["severity"] != "info"


@pytest.mark.parametrize("hold", [6, 20])
def test_two_ranks_whose_batches_have_one_length_for_many_steps_have_no_slow_gpu(hold: int) -> None:
    for seed in range(4):
        job = Job(dp=2, steps=7, first_step=hold, synchronous=True, varied_frac=0.15, seed=seed)
        job = replace(job, varied_steps=hold)
        assert not straggler_named(list(studied_job(job).results["findings"])), seed


@pytest.mark.parametrize(("kind", "varied_frac"), [("gpu_slow", 0.0), ("gpu_more", 0.05)])
def test_of_two_ranks_the_slow_gpu_is_named_for_what_no_length_of_batches_explains(
    kind: Any, varied_frac: float
) -> None:
    planted = (Cause(kind, 1, 4 * MS),)
    job = Job(dp=2, steps=7, first_step=22, synchronous=True, causes=planted)
    job = replace(job, varied_frac=varied_frac)
    top = studied_job(replace(job, varied_steps=20)).results["findings"][0]
    assert (top["code"], top["ranks"]) == ("straggler.gpu", [1])
    assert top["severity"] != "info"


def test_kernels_of_two_profilers_are_compared_by_the_names_that_both_have() -> None:
    """Of what nsys calls `gemm_0` torch.profiler writes where it is declared and its types."""
    ranks, _ = simulate(
        Job(dp=2, steps=6, synchronous=True, causes=(Cause("gpu_more", 1, 4 * MS),))
    )
    slow = ranks[1]
    names = pa.array(
        [
            name if name.startswith("Mem") else f"void at::(anonymous namespace)::{name}<int>(int)"
            for name in slow.activity["name"].cast(pa.string()).to_pylist()
        ]
    )
    at = slow.activity.schema.get_field_index("name")
    field = slow.activity.schema.field(at)
    written = slow.activity.set_column(at, field, names.cast(field.type))
    ranks[1] = replace(
        slow, activity=written, info=replace(slow.info, profiler="torch.profiler")
    )  # fmt: skip
    (found,) = [each for each in study(ranks).results["findings"] if each["severity"] != "info"]
    assert (found["code"], found["ranks"]) == ("straggler.gpu", [1])
    assert [row["kernel"] for row in found["evidence"] if "kernel" in row] == ["gemm_planted"]


@pytest.mark.parametrize("circle", [3, 4, 8, 16])
def test_chance_names_a_gpu_or_several_together_in_one_healthy_job_of_a_hundred(
    circle: int,
) -> None:
    rng, named, jobs = np.random.default_rng(circle), 0, 1500
    for _ in range(jobs):
        times = np.sort(rng.normal(0.0, 0.12, circle))[::-1]
        # any number of the latest is asked about, up to half of all
        named += any(
            all(unlike(one, times[late:], circle) for one in times[:late].tolist())
            for late in range(1, circle // 2 + 1)
        )
    assert named <= 2 * limits.CHANCE * jobs


@pytest.mark.parametrize("rank", [0, 1])
def test_one_pause_is_an_information_about_its_rank(rank: int) -> None:
    pause = Cause("host", rank, 40 * MS, (9,))
    found = studied_job(Job(steps=8, synchronous=True, causes=(pause,))).results["findings"]
    assert not straggler_named(list(found))
    (once,) = [each for each in found if each["code"] == "host.busy"]
    assert (once["severity"], once["ranks"], once["steps"]) == ("info", [rank], [9])
    assert f"Rank {rank} paused once, in step 9" in once["summary"]


@pytest.mark.parametrize(("steps", "few"), [(4, True), (5, False)])
def test_one_pause_in_very_few_steps_may_be_one_of_many(steps: int, *, few: bool) -> None:
    job = Job(dp=2, steps=steps, synchronous=True, causes=(Cause("host", 1, 40 * MS, (8,)),))
    line = studied_job(job).results["verdict"]
    start = "Stragglers cannot be determined from 3 steady-state steps" if few else "No stragglers."
    assert line.startswith(start)
    assert "Rank 1 paused once, in step 8, for 40" in line


def test_a_pause_is_no_profiler_s_and_is_compared_under_two_of_them() -> None:
    ranks = _two_profilers(Job(steps=8, synchronous=True, causes=(Cause("host", 2, 8 * MS),)))
    found = study(ranks).results["findings"]
    (late,) = [each for each in found if each["code"] == "straggler.host"]
    assert (late["ranks"], late["severity"]) == ([2], "critical")
    assert late["saved_ns_per_step"] == pytest.approx(8 * MS, rel=0.05)


def test_what_one_of_two_profilers_alone_records_is_no_cause() -> None:
    ranks = _two_profilers(Job(steps=8, synchronous=True, causes=(Cause("host", 2, 8 * MS),)))
    late = ranks[2]
    calls = late.host_calls.filter(
        pc.invert(pc.is_in(late.host_calls["kind"].cast(pa.string()), pa.array(["os", "range"])))
    )
    thread = late.activity["launch_thread"].drop_null()[0].as_py()
    blank = dict.fromkeys(calls.schema.names)
    own = [
        {**blank, "start_ns": begin + 9 * MS, "end_ns": begin + 15 * MS, "thread": thread,
         "kind": "op", "name": "aten::own"}
        for begin in late.steps["begin_ns"].to_pylist()
    ]  # fmt: skip
    more = pa.table({name: [row[name] for row in own] for name in calls.schema.names})
    calls = pa.concat_tables([calls, more.cast(calls.schema)]).unify_dictionaries()
    ranks[2] = replace(late, host_calls=calls.sort_by("start_ns"))
    found = study(ranks).results["findings"][0]
    assert (found["code"], found["ranks"]) == ("straggler.host", [2])
    assert "another profiler records its peers" in found["summary"]


def test_a_pause_in_which_calls_are_recorded_may_be_the_profiler_s() -> None:
    job = Job(steps=8, synchronous=True, causes=(Cause("host", 2, 8 * MS),))
    results = study(_two_profilers(job, call_each_ns=MS // 5)).results
    assert not straggler_named(list(results["findings"]))
    assert results["verdict"].startswith("Stragglers cannot be determined: two profilers")


def test_a_pause_in_which_few_calls_are_recorded_is_the_host_s_but_for_these() -> None:
    job = Job(steps=8, synchronous=True, causes=(Cause("host", 2, 8 * MS),))
    whole, broken = (
        study(_two_profilers(job, call_each_ns=each)).results["findings"][0]
        for each in (0, 6 * MS // 5)
    )
    for found in (whole, broken):
        assert (found["code"], found["ranks"]) == ("straggler.host", [2])
    # what lies beside the calls may be the profiler's
    assert 5 * MS < broken["saved_ns_per_step"] < whole["saved_ns_per_step"] <= 8.2 * MS


@pytest.mark.parametrize(("launch_ns", "hidden"), [(650_000, True), (20_000, False)])
def test_launches_under_two_profilers_are_not_compared_and_nothing_is_said_of_them(
    launch_ns: int, hidden: bool
) -> None:
    """Hosts of other paces that launch all the time, and the same with time to spare."""
    job = Job(steps=8, launch_ns=launch_ns, host_pace_frac=0.2)
    assert straggler_named(list(study(simulate(job)[0]).results["findings"])) is hidden
    results = study(_two_profilers(job)).results
    assert not straggler_named(list(results["findings"]))
    assert ("Stragglers cannot be determined: two profilers" in results["verdict"]) is hidden
    assert "wait" not in results["verdict"]


def test_a_fetch_that_one_of_two_profilers_records_is_one_at_the_same_place_of_the_others() -> None:
    every = tuple(Cause("input", rank, 20 * MS) for rank in range(4))
    ranks = _two_profilers(Job(steps=8, synchronous=True, item_every=1, causes=every))
    for place in (0, 1, 3):
        calls = ranks[place].host_calls
        unnamed = pc.not_equal(calls["kind"].cast(pa.string()), "range")
        ranks[place] = replace(ranks[place], host_calls=calls.filter(unnamed))
    found = study(ranks).results["findings"]
    assert [each["code"] for each in found if each["severity"] != "info"] == ["input.stall"]
    assert found[0]["ranks"] == [0, 1, 2, 3]
    assert found[0]["saved_ns_per_step"] == pytest.approx(20 * MS, rel=0.05)


def test_a_late_host_s_pause_is_named_where_another_profiler_records_its_peers() -> None:
    ranks = _two_profilers(Job(steps=8, synchronous=True, causes=(Cause("host", 2, 8 * MS),)))
    found = study(ranks).results["findings"][0]
    assert "Cause: its host pauses in clock_nanosleep (8" in found["summary"]


def _two_profilers(job: Job, *, call_each_ns: int = 0) -> list[RankTables]:
    """The job's ranks, rank 2 by torch.profiler, which records a further call so often."""
    ranks, _ = simulate(job)
    late = ranks[2]
    if call_each_ns:
        calls = late.host_calls
        begin = np.arange(*_span(calls), call_each_ns)
        rows = calls.take(np.zeros(len(begin), dtype=int)).drop_columns(["start_ns", "end_ns"])
        for name, times in (("start_ns", begin), ("end_ns", begin + 1000)):
            rows = rows.append_column(name, pa.array(times))
        more = rows.select(calls.column_names).cast(calls.schema)
        late = replace(late, host_calls=pa.concat_tables([calls, more]))
    ranks[2] = replace(late, info=replace(late.info, profiler="torch.profiler"))
    return ranks


def _span(calls: pa.Table) -> tuple[int, int]:
    """When the first of a host's calls begins and the last ends (ns)."""
    return pc.min(calls["start_ns"]).as_py(), pc.max(calls["end_ns"]).as_py()


def test_work_that_was_queued_before_a_report_begins_is_none_of_its_steps() -> None:
    """Hosts are steps ahead: the reports of ranks 0 and 1 lack the launches before their window."""
    ranks = [
        _from_step_8(tables, launches=tables.rank > 1)
        for tables in simulate(Job(steps=9, launch_ns=20_000, tear_ns=2 * MS))[0]
    ]
    dataset = dataset_of(ranks)
    job = job_of(dataset)
    excess = job.excess(job.base)["gpu"]
    assert excess.max() < 1 * MS
    assert not straggler_named(all_findings(dataset)[0])


def _from_step_8(tables: RankTables, *, launches: bool) -> RankTables:
    """The rank with a window from step 8 on; what was launched before it may still run in it."""
    begin = tables.steps["begin_ns"][2].as_py()
    activity = tables.activity.filter(pc.greater(tables.activity["end_ns"], begin))
    if not launches:
        early = pc.less(activity["launch_start_ns"], begin)
        for name in ("launch_start_ns", "launch_end_ns"):
            at = activity.schema.get_field_index(name)
            known = pc.if_else(early, None, activity[name])
            activity = activity.set_column(at, activity.schema.field(name), known)
    return replace(tables, steps=tables.steps.slice(2), activity=activity)


def test_of_a_rank_that_starts_its_profiler_twice_the_steps_between_are_no_evidence() -> None:
    job = Job(steps=12, synchronous=True, causes=(Cause("host", 2, 9 * MS),))
    ranks, _ = simulate(job)
    ranks[1] = _without_steps(ranks[1], 10, 13)
    dataset = dataset_of(ranks)
    assert dataset.steady_steps == (7, 8, 9, 14, 15, 16, 17)
    top = all_findings(dataset)[0][0]
    assert (top["code"], top["ranks"]) == ("straggler.host", [2])
    # rank 1 is compared and replayed with the others: without it two thirds of the saving are lost
    assert top["saved_ns_per_step"] == pytest.approx(8.85 * MS, rel=0.05)


def _without_steps(tables: RankTables, first: int, until: int) -> RankTables:
    """The rank without what was recorded from one step to before another."""
    rows = {row["step"]: row["begin_ns"] for row in tables.steps.to_pylist()}

    def kept(table: pa.Table, time: str) -> pa.Table:
        before, after = pc.less(table[time], rows[first]), pc.less(table[time], rows[until])
        return table.filter(pc.or_(before, pc.invert(after)))

    return replace(
        tables, steps=kept(tables.steps, "begin_ns"), activity=kept(tables.activity, "start_ns"),
        host_calls=kept(tables.host_calls, "start_ns"),
        collective_calls=kept(tables.collective_calls, "issue_start_ns"),
    )  # fmt: skip


def test_the_only_profiled_member_of_a_group_waits_for_the_unprofiled_one() -> None:
    """One rank of each tensor group is profiled; the other member of rank 4's is late."""
    job = Job(dp=4, tp=2, steps=8, synchronous=True, causes=(Cause("host", 5, 10 * MS),))
    found = all_findings(dataset_of(simulate(job)[0][::2]))[0]
    assert (found[0]["code"], found[0]["ranks"]) == ("straggler.unprofiled", [4])
    assert found[0]["saved_ns_per_step"] == pytest.approx(10 * MS, rel=0.05)


def test_hosts_that_pause_in_turn_are_one_finding_of_all() -> None:
    turns = tuple(Cause("host", step % 4, 20 * MS, (step,)) for step in range(6, 14))
    found = studied_job(Job(steps=8, synchronous=True, causes=turns)).results["findings"]
    assert not straggler_named(list(found))
    assert (found[0]["code"], found[0]["severity"]) == ("host.busy", "critical")
    assert "one after the other" in found[0]["summary"]
    assert found[0]["ranks"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "stop_ms", "code"), [("input", 12, "input.stall"), ("host", 16, "host.busy")]
)
def test_what_stops_all_hosts_comes_before_the_read_that_lets_it_show(
    kind: str, stop_ms: int, code: str
) -> None:
    # without the read of a value queued work would hide most of the stop, and not end it
    job = Job(layers=4, steps=8, item_every=1, launch_ns=10_000)
    stops = tuple(Cause(kind, rank, stop_ms * MS) for rank in range(job.world))
    top = studied_job(replace(job, causes=stops)).results["findings"][0]
    assert top["code"] == code


def test_of_ranks_of_which_nothing_matches_none_is_a_straggler() -> None:
    job = Job(steps=6, synchronous=True, causes=(Cause("host", 2, 12 * MS),))
    ranks = simulate(job)[0]
    assert straggler_named(list(study(ranks).results["findings"]))
    results = study([_alone(tables) for tables in ranks]).results
    assert results["collectives"]["matched"] == 0
    assert not straggler_named(list(results["findings"]))


def _alone(tables: RankTables) -> RankTables:
    """The rank with a communicator of a name that no other rank has, and of no known size."""
    calls = tables.collective_calls
    at = calls.schema.get_field_index("communicator")
    field = calls.schema.field(at)
    names = pa.array([f"own {tables.rank}"] * calls.num_rows, field.type)
    calls = calls.set_column(at, field, names)
    at = calls.schema.get_field_index("communicator_size")
    field = calls.schema.field(at)
    return replace(
        tables,
        collective_calls=calls.set_column(at, field, pa.nulls(calls.num_rows, field.type)),
    )


def test_what_the_look_has_shown_is_named_where_three_steps_show_it_again() -> None:
    """Two ranks and three steps, whose lateness varies: by themselves these prove too little."""
    causes = tuple(
        Cause("host", 1, length * MS, (step,)) for step, length in ((7, 3), (8, 8), (9, 13))
    )
    job = Job(dp=2, steps=4, synchronous=True, causes=causes, tear_ns=2 * MS)
    dataset = dataset_of(simulate(job)[0])
    assert not straggler_named(all_findings(dataset)[0])
    found = all_findings(replace(dataset, shallow=_shown(1, 8 * MS)))[0]
    assert [each["rank"] for each in found if each["code"] == "straggler.host"] == [1]


def test_one_pause_of_a_window_is_the_straggler_that_the_look_has_shown_now_and_then() -> None:
    pause = Cause("host", 1, 25 * MS, (8,))
    dataset = dataset_of(simulate(Job(dp=2, steps=4, synchronous=True, causes=(pause,)))[0])
    once = all_findings(dataset)[0]
    assert not straggler_named(once)
    assert "paused once" in once[0]["summary"]
    shown = _shown(1, 8 * MS)
    shown["suspects"][0]["late_steps"] = [3, 6]
    found = all_findings(replace(dataset, shallow=shown))[0]
    assert (found[0]["code"], found[0]["ranks"]) == ("straggler.host", [1])
    assert found[0]["recurrence"] == "intermittent"
    assert "The look at all ranks has shown it in 2 of 4 steps." in found[0]["summary"]
    assert all("paused once" not in each["summary"] for each in found)


def test_what_ranks_wait_for_in_a_look_is_no_headline() -> None:
    shown = _shown(0, 32 * MS)
    shown["suspects"][0]["delays"] = False
    dataset = replace(dataset_of([]), shallow=shown)
    found = all_findings(dataset)[0]
    assert [each["severity"] for each in found] == ["info"]
    assert "32.0 ms" in found[0]["summary"]
    line = " ".join(sentence["text"] for sentence in verdict(dataset, found))
    assert line.startswith("Stragglers cannot be determined from flight recorders alone")
    assert "32.0 ms" not in line


def _shown(rank: int, lateness_ns: int) -> Any:
    """What a look shows that has one suspect."""
    suspect = {
        "rank": rank, "lateness_ns": lateness_ns, "bound_ns": MS, "group": "default_pg 0",
        "host": "h", "since_step": None, "until_step": None, "late_steps": None,
        "delays": True, "line": None,
    }  # fmt: skip
    return {
        "ranks": [0, 1], "missing": [], "steps": [3, 4, 5, 6], "step_ns": 40 * MS,
        "by": "durations", "suspects": [suspect], "nodes": [], "groups": [], "stages": [],
    }  # fmt: skip


def test_a_wait_that_is_stamped_a_little_after_the_last_step_is_no_pause() -> None:
    ranks, _ = simulate(Job(steps=8, synchronous=True, causes=(Cause("host", 2, 8 * MS, (8,)),)))
    for place, tables in enumerate(ranks):
        steps = tables.steps
        last = pc.max(tables.host_calls["end_ns"]).as_py() - 1000
        at = steps.schema.get_field_index("end_ns")
        ends = pa.array([*steps["end_ns"].to_pylist()[:-1], last], steps.schema.field(at).type)
        ranks[place] = replace(tables, steps=steps.set_column(at, steps.schema.field(at), ends))
    job = job_of(dataset_of(ranks))
    long = job.job.lengths.own > 4 * MS
    assert job.job.host_rank[long].tolist() == [2]


@pytest.mark.parametrize("seed", [0, 1])
def test_of_two_ranks_lengths_that_hold_leave_open_whether_one_is_slow(seed: int) -> None:
    job = Job(
        dp=2, steps=8, first_step=21, synchronous=True, varied_frac=0.3, varied_steps=20, seed=seed
    )
    results = studied_job(job).results
    assert not straggler_named(list(results["findings"]))
    assert re.match(
        r"No straggler is certain: rank [01]'s GPU takes [\d.]+ ms longer, as longer batches",
        results["verdict"],
    )
