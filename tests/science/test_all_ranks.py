"""Results of all ranks: findings and verdicts by flight recorders, with profiled ranks or none."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from simulate.flight import Recorded, leave, recorded
from studies import found_in

from clusterprof import merge_run, run_directory
from clusterprof.agent.contracts import paths, states
from clusterprof.align.lateness import SHALLOW, host_clock
from clusterprof.analysis.findings import all_ranks as findings_all_ranks
from clusterprof.analysis.model.joint_suspects import joint_suspects
from clusterprof.analysis.model.shallow import Shallow, all_ranks
from clusterprof.arguments import parse_ranks
from clusterprof.cli import merge
from clusterprof.report import summary
from clusterprof.study import study

MS = 1_000_000
LATE = (Cause("host", 3, 8 * MS),)
JOB = Job(dp=8, steps=12, first_step=10, synchronous=True, tear_ns=0, causes=LATE)


def compared(made: Recorded) -> Shallow:
    clock = host_clock(made.flight, made.readings, made.probe)
    hosts = {rank: each.machine for rank, each in made.readings.items()}
    return all_ranks(made.flight, clock, made.steps, hosts)


def findings(job: Job, **more: Any) -> list[Any]:
    return [
        (each["code"], each["severity"], each["ranks"], each["saved_ns_per_step"])
        for each in study([], shallow=compared(recorded(job, **more))).results["findings"]
    ]


@pytest.mark.parametrize("gloo", [False, True])
def test_a_late_host_is_named_by_flight_recorders_alone(gloo: bool) -> None:
    job = replace(JOB, on_host=gloo, ranks_per_host=2, offset_ns=(0, 0, *[120 * MS] * 6))
    if gloo:
        job = replace(job, launch_ns=10_000)
    ((code, severity, ranks, saved),) = findings(job, durations=not gloo)
    assert (code, severity, ranks) == ("straggler.shallow", "critical", [3])
    assert saved == pytest.approx(8 * MS, rel=0.1)
    assert findings(replace(job, causes=()), durations=not gloo) == []


@pytest.mark.parametrize("step", long_but([10, 12], range(10, 15)))
def test_a_stall_in_one_of_five_steps_hides_no_late_rank_and_is_none(step: int) -> None:
    late = (Cause("host", 1, 300 * MS),)
    job = replace(JOB, dp=4, steps=5, causes=())
    for stalled in [(0,), (1,), (2,), (0, 2), (0, 1, 2, 3)]:
        stall = tuple(Cause("host", rank, 1500 * MS, (step,)) for rank in stalled)
        for causes, named in ((late, [1]), ((), [])):
            made = compared(recorded(replace(job, causes=causes + stall)))
            found = made.results["suspects"]
            assert [each["rank"] for each in found] == named, stalled
            assert all(each["lateness_ns"] == pytest.approx(300 * MS, rel=0.1) for each in found)


def test_a_rank_that_is_late_in_every_third_step_delays_the_others_in_these() -> None:
    every_third = (Cause("host", 1, 25 * MS, tuple(range(10, 22, 3))),)
    job = replace(JOB, dp=2, causes=every_third)
    made = compared(recorded(job))
    (late,) = made.results["suspects"]
    assert (late["rank"], late["delays"], late["late_steps"]) == (1, True, [10, 13, 16, 19])
    assert late["lateness_ns"] == pytest.approx(25 * MS * 4 / 12, rel=0.1)
    results = study([], shallow=made).results
    (found,) = results["findings"]
    assert (found["recurrence"], found["steps"]) == ("intermittent", late["late_steps"])
    assert "in 4 of 12 steps" in found["summary"]
    assert summary.Summary(results).suspects[0][4] == "in 4 of 12 steps"


@pytest.mark.parametrize("steps", [{0: (12,)}, {0: (12, 18), 1: (10, 15)}, {0: (11,), 1: (14, 20)}])
def test_of_hosts_that_pause_by_chance_no_rank_is_a_suspect(steps: dict[int, Any]) -> None:
    causes = tuple(Cause("host", rank, 25 * MS, some) for rank, some in steps.items())
    assert compared(recorded(replace(JOB, dp=2, causes=causes))).results["suspects"] == []


def test_without_anybody_late_the_verdict_claims_no_more_than_is_known() -> None:
    made = compared(recorded(replace(JOB, causes=())))
    results = study([], shallow=made).results
    assert (results["shallow"] or {}).get("by") == "durations"
    assert "cannot be determined" in results["verdict"]


def test_calls_that_are_launched_ahead_are_waited_for_without_a_finding() -> None:
    """A host that is slower than the others but not than its GPU, and gathers parameters ahead."""
    slack = (Cause("host", 3, 10 * MS),)
    job = Job(dp=4, steps=12, first_step=10, sharded=True, tear_ns=0, launch_ns=50_000)
    (found,) = findings(replace(job, causes=slack))
    assert found == ("straggler.shallow", "info", [3], 0)


def test_since_when_and_the_rank_of_a_pipeline_that_the_others_wait_for() -> None:
    late = (Cause("host", 5, 20 * MS, tuple(range(16, 40))),)
    job = Job(dp=4, pp=2, layers=8, steps=20, first_step=6, synchronous=True, tear_ns=0)
    (suspect, *_) = compared(recorded(replace(job, causes=late))).results["suspects"]
    assert (suspect["rank"], suspect["since_step"], suspect["delays"]) == (5, 16, True)


def test_one_rank_that_is_late_first_and_another_one_later_are_two_findings() -> None:
    halves = [*range(10, 17)], [*range(17, 22)]
    causes = [Cause("host", k, 10 * MS, tuple(s)) for k, s in enumerate(halves, start=1)]
    job = replace(JOB, dp=4, causes=tuple(causes))
    looked = study([], shallow=compared(recorded(job))).results["findings"]
    deep = found_in(simulate(job)[0])
    for found, steps in ((looked, halves), (deep, (halves[0][1:], halves[1]))):
        late = sorted(each["ranks"] + each["steps"] for each in found if each["severity"] != "info")
        assert late == [[1, *steps[0]], [2, *steps[1]]]
    assert ["until step 16." in each["summary"] for each in looked] in (
        [True, False],
        [False, True],
    )
    assert "(11 to 16)" in deep[0]["summary"]


def test_the_step_is_that_of_the_steps_compared_however_long_others_of_the_log_take() -> None:
    made = recorded(JOB)
    of_it = compared(made)

    def longer(log: pa.Table) -> pa.Table:
        """The log, and three times as many short steps after it."""
        count, end = 3 * log.num_rows, log["end_ns"][-1].as_py()
        more = log.take(np.arange(count) % log.num_rows)
        for name, values in (
            ("step", log["step"][-1].as_py() + 1 + np.arange(count)),
            ("begin_ns", end + np.arange(count) * MS),
            ("end_ns", end + np.arange(1, count + 1) * MS),
        ):
            at = log.schema.get_field_index(name)
            column = pa.array(values).cast(log.schema.field(at).type)
            more = more.set_column(at, log.schema.field(at), column)
        return pa.concat_tables([log, more])

    logs = {rank: longer(log) for rank, log in made.steps.items()}
    later = compared(replace(made, steps=logs))
    assert later.results["steps"] == of_it.results["steps"]
    assert later.results["step_ns"] == of_it.results["step_ns"] > 8 * MS


def test_ranks_of_a_slow_node_are_late_together() -> None:
    causes = tuple(Cause("host", rank, 8 * MS) for rank in (2, 3))
    made = compared(recorded(replace(JOB, causes=causes, ranks_per_host=2)))
    assert made.results["nodes"] == [{"host": "node1", "ranks": [2, 3], "suspects": [2, 3]}]
    (finding,) = study([], shallow=made).results["findings"]
    assert (finding["rank"], finding["ranks"]) == (None, [2, 3])


def test_the_command_names_a_peer_of_the_group_whatever_the_groups_are_called() -> None:
    made = recorded(JOB)
    groups = tuple(replace(each, name="data parallel") for each in made.flight.groups)
    flight = replace(made.flight, groups=groups)
    (finding,) = study([], shallow=compared(replace(made, flight=flight))).results["findings"]
    # No report says which profiler there was.
    assert "--ranks 3,0 --profiler nsys " in finding["next"]


@pytest.fixture
def run(tmp_path: Path) -> run_directory.Window:
    """A run of eight ranks over gloo that profiled none."""
    made = run_directory.create(tmp_path / "run")
    made.directory.write_manifest(
        {"schema_version": 1, "launcher": "torchrun", "world_size": 8, "window": [10, 22],
         "selection": parse_ranks("0")._replace(ranks=())._asdict()}
    )  # fmt: skip
    leave(made, recorded(replace(JOB, on_host=True, launch_ns=10_000), durations=False))
    return made


def test_a_run_without_profiled_ranks_is_merged(
    run: run_directory.Window, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge.main("merge", [str(run.path), "--fail-on", "critical"], None) == 1
    assert capsys.readouterr().out.startswith("Rank 3 delays")
    results = json.loads((run.merged / "results.json").read_text())
    assert [each["rank"] for each in results["shallow"]["suspects"]] == [3]
    assert parquet.read_schema(run.merged / "shallow.parquet").equals(SHALLOW)
    assert "straggler.shallow" in run.html.read_text()


@pytest.mark.parametrize(("source", "profiler"), [("process group", "torch"), ("torchrun", "nsys")])
def test_the_next_command_names_a_profiler_that_can_capture_these_ranks(
    run: run_directory.Window, source: str, profiler: str
) -> None:
    states.advance(str(run.rank(0)), "counted", identity=source)
    (finding,) = merge_run.merge_run(run, []).results["findings"]
    assert re.findall(r"--profiler (\w+)", finding["next"]) == [profiler]


def changed(content: bytes, **by: int) -> bytes:
    """A packed dump with something added to its entries' numbers."""
    found = json.loads(gzip.decompress(content))
    for each in found["entries"]:
        each |= {name: each[name] + more for name, more in by.items()}
    return gzip.compress(json.dumps(found).encode())


class Hostile:
    """Would end the program if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exit, (9,))


BAD: dict[str, Callable[[bytes], tuple[str, bytes]]] = {
    "cut short": lambda content: (paths.FLIGHT, content[:200]),
    "empty": lambda content: (paths.FLIGHT, b""),
    "another version's": lambda content: (
        paths.FLIGHT,
        gzip.compress(gzip.decompress(content).replace(b'"2.10"', b'"3.0"')),
    ),
    "another job's": lambda content: (
        paths.FLIGHT,
        changed(content, time_created_ns=3600_000 * MS, collective_seq_id=10_000),
    ),
    "hostile": lambda content: (paths.FLIGHT_PICKLE, gzip.compress(pickle.dumps([Hostile()], 2))),
}


@pytest.mark.parametrize("what", BAD)
def test_dumps_that_cannot_be_used_are_named_and_the_rest_is_merged(
    run: run_directory.Window, what: str
) -> None:
    good = run.rank(6) / paths.FLIGHT
    name, content = BAD[what](good.read_bytes())
    good.unlink()
    bad = run.rank(6) / name
    bad.write_bytes(content)
    (run.rank(7) / paths.FLIGHT).unlink()
    assert merge.main("merge", [str(run.path)], None) == 0
    results = json.loads((run.merged / "results.json").read_text())
    assert results["shallow"]["ranks"] == [0, 1, 2, 3, 4, 5]
    assert [(each["rank"], each["source"]) for each in results["shallow"]["missing"]] == [
        (6, str(bad))
    ]
    assert any(bad.name in warning for warning in results["warnings"])
    assert [each["rank"] for each in results["shallow"]["suspects"]] == [3]


#: 64 ranks, each tensor group on a node of its own
MANY = replace(JOB, tp=8, ranks_per_host=8, causes=())
NODE = (16, 17, 18, 19, 20, 21, 22, 23)


def findings_of_many(job: Job) -> list[Any]:
    return study([], shallow=compared(recorded(job))).results["findings"]


@pytest.mark.parametrize("kind", ["host", "gpu_slow"])
@pytest.mark.parametrize("per_host", [8, 4])
def test_a_slow_rank_and_the_tensor_group_that_follows_it_are_one_finding(
    kind: Any, per_host: int
) -> None:
    job = replace(MANY, causes=(Cause(kind, 21, 8 * MS),), ranks_per_host=per_host)
    (finding,) = findings_of_many(job)
    assert (finding["rank"], finding["ranks"]) == (21, [21])
    assert finding["severity"] == "critical"
    late = finding["evidence"]
    assert late[0]["rank"] == 21
    assert sorted(each["rank"] for each in late) == [*NODE]
    follow = f"Rank 21 of node{21 // per_host} comes latest; ranks 16–20, 22–23 follow"
    assert f"{follow} in group tensor 2." in finding["summary"]
    assert "--ranks 21,16 " in finding["next"]


@pytest.mark.parametrize("tensor", [True, False])
def test_a_slow_node_is_one_finding_with_the_latest_rank_first(tensor: bool) -> None:
    causes = tuple(Cause("host", rank, (8 + (rank == 19)) * MS) for rank in NODE)
    job = replace(MANY, causes=causes)
    (finding,) = findings_of_many(job if tensor else replace(job, dp=64, tp=1))
    assert (finding["rank"], finding["ranks"]) == (None, [*NODE])
    assert finding["evidence"][0]["rank"] == 19
    assert finding["saved_ns_per_step"] == pytest.approx(9 * MS, rel=0.1)
    latest = "Rank 19 of node2 comes latest; ranks 16–18, 20–23 of node2 are late as well."
    assert latest in finding["summary"]
    assert "--ranks 19,16," in finding["next"]


def test_ranks_of_a_node_that_are_equally_late_have_no_first_one() -> None:
    (finding,) = findings_of_many(
        replace(MANY, causes=tuple(Cause("host", rank, 8 * MS) for rank in NODE))
    )
    assert "Ranks 16–23 of node2 are late together." in finding["summary"]


@pytest.mark.parametrize("other", [42, 45])
def test_slow_ranks_of_two_nodes_are_two_findings(other: int) -> None:
    """45 is in one data group with 21, 42 in that of a rank that follows 21."""
    causes = Cause("host", 21, 8 * MS), Cause("host", other, 6 * MS)
    first, second = findings_of_many(replace(MANY, causes=causes))
    assert (first["ranks"], second["ranks"]) == ([21], [other])
    assert [{each["host"] for each in f["evidence"]} for f in (first, second)] == [
        {"node2"},
        {"node5"},
    ]


def test_equally_slow_ranks_that_one_group_waits_for_are_one_finding_with_both_nodes() -> None:
    """Neither repaired alone would save anything."""
    causes = Cause("host", 21, 8 * MS), Cause("host", 42, 8 * MS)
    (finding,) = findings_of_many(replace(MANY, dp=64, tp=1, causes=causes))
    assert finding["ranks"] == [21, 42]
    assert "Rank 21 of node2 and rank 42 of node5 are late together." in finding["summary"]


def test_a_node_s_ranks_that_are_late_at_other_times_are_two_findings() -> None:
    halves = tuple(range(10, 20)), tuple(range(20, 30))
    causes = tuple(Cause("host", 18 + k, 10 * MS, steps) for k, steps in enumerate(halves))
    found = findings_of_many(replace(MANY, dp=32, tp=1, steps=20, causes=causes))
    assert sorted(each["ranks"] for each in found) == [[18], [19]]


def test_a_suspect_that_is_late_in_no_step_that_was_compared_is_one_alone() -> None:
    """Looks and the window may be of other steps."""
    shallow = compared(recorded(replace(MANY, causes=(Cause("host", 21, 8 * MS),)))).results
    shallow["suspects"][1] |= {"since_step": 99, "until_step": 20}
    shallow["suspects"][2]["late_steps"] = []
    joint = [[s["rank"] for s in late] for late in joint_suspects(shallow)]
    assert [*map(len, joint)] == [6, 1, 1]
    assert joint[0][0] == 21


def test_what_follows_a_rank_that_reports_have_named_is_no_finding_of_its_own() -> None:
    shallow = compared(recorded(replace(MANY, causes=(Cause("host", 21, 8 * MS),)))).results
    dataset: Any = SimpleNamespace(ranks=(21, 5), steps=(10, 11), shallow=shallow)
    named: Any = {"code": "straggler.host", "ranks": [21]}
    assert findings_all_ranks.find(dataset, [named]) == []


def test_a_rank_that_became_late_after_its_own_window_is_named_all_the_same() -> None:
    made = compared(recorded(replace(JOB, dp=4)))
    (suspect,) = made.results["suspects"]
    later: Any = {**made.results, "suspects": [{**suspect, "since_step": 900}]}
    reports = simulate(replace(JOB, dp=4, causes=()))[0]
    results = study(reports, shallow=replace(made, results=later)).results
    assert results["headline"][0]["text"].startswith("Rank 3 delays the other ranks by ")
    (finding,) = [f for f in results["findings"] if f["code"] == "straggler.shallow"]
    assert (finding["ranks"], finding["severity"]) == ([3], "critical")
    # of one that is late in the window's steps its report tells
    captured = study(reports, shallow=made).results["findings"]
    assert "straggler.shallow" not in [f["code"] for f in captured]
