"""Who is late, by the flight recorders of all ranks: by durations without a clock, else by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from simulate import Job, simulate
from simulate.flight import recorded

from clusterprof import merge_run, run_directory
from clusterprof.agent.contracts import states
from clusterprof.align.clock.alignment import Clock
from clusterprof.align.clock.measured import RankReadings
from clusterprof.align.lateness import SHALLOW, host_clock, joined, shallow
from clusterprof.align.match.flight_calls import FlightCalls, match
from clusterprof.analysis.model.shallow import (
    all_ranks,
    half_width,
    persistence,
    persists,
    regime,
    stages,
    students_t,
    suspects,
    waits,
    within_steps,
)
from clusterprof.arguments import parse_ranks
from clusterprof.columns import integers, texts
from clusterprof.ingest.flight.all_dumps import Flight, find_dumps, read_dumps
from clusterprof.ingest.flight.dump import ENTRIES, Group
from clusterprof.launch.watch import CHANCE
from clusterprof.study import dataset_of
from clusterprof.tables import STEPS

LATE = Path(__file__).resolve().parents[1] / "data/flight/nccl/late"
MS = 1_000_000


def made(enqueue: list[list[int]], durations: list[list[int]] | None = None) -> FlightCalls:
    """Calls of one group: of each rank the times (ms) at which it calls, and its durations."""
    rows = [
        {
            "rank": rank, "group": 0, "restarts": 0, "sequence": number + 1, "part": 0,
            "p2p": False,
            "record": number, "operation": "AllReduce", "peer": None,
            "input_sizes": "[[8]]", "output_sizes": "[[8]]", "input_types": "[]",
            "output_types": "[]", "bytes": 32, "enqueue_ns": 10**18 + time * MS,
            "finished": True, "timeout_ns": None,
            "duration_ns": durations[rank][number] * MS if durations else None, "frame": None,
        }
        for rank, times in enumerate(enqueue)
        for number, time in enumerate(times)
    ]  # fmt: skip
    ranks = tuple(range(len(enqueue)))
    group = Group("0", "default_pg", ranks, len(ranks), complete=True)
    entries = pa.Table.from_pylist(rows, ENTRIES)
    return match(Flight(entries, (group,), ranks, len(ranks), [], []))


def clock(offsets: list[int], bounds: list[int]) -> Clock:
    zeros = np.zeros(len(offsets))
    values = np.array(offsets, np.int64) * MS, zeros, np.array(bounds, np.int64) * MS
    return Clock(0, 0, "made", tuple(range(len(offsets))), *values)


def test_of_real_dumps_the_late_rank_is_named_without_a_clock() -> None:
    table = shallow(match(read_dumps(find_dumps(LATE))))
    assert table.schema == SHALLOW
    assert table["enqueue_ns"].null_count == table.num_rows
    # it sleeps 30 ms from step 10 on, in which AllReduce 31 of the group of all comes first
    steps = [
        row["lateness_ns"]
        for row in table.to_pylist()
        if row["rank"] == 1 and row["operation"] == "AllReduce" and row["lateness_ns"] is not None
    ]
    assert np.median(steps[-9:]) > 20 * MS


def test_the_shortest_duration_is_the_last_arrival() -> None:
    calls = made([[0, 10], [0, 10], [0, 10]], [[9, 5], [4, 5], [9, 1]])
    rows = shallow(calls).to_pylist()
    assert [row["lateness_ns"] // MS for row in rows] == [0, 5, 0, 0, 0, 4]
    assert {row["bound_ns"] for row in rows} == {0}


def test_without_durations_the_clock_says_it_with_its_bound() -> None:
    calls = made([[0, 10], [103, 110], [2, 12]])
    assert shallow(calls)["lateness_ns"].null_count == 6
    rows = shallow(calls, clock([0, 100, 0], [0, 1, 3])).to_pylist()
    assert [row["lateness_ns"] // MS for row in rows] == [0, 3, 2, 0, 0, 2]
    assert [row["bound_ns"] // MS for row in rows] == [0, 1, 3, 0, 0, 4]
    assert rows[1]["enqueue_ns"] == 10**18 + 3 * MS


def test_a_rank_without_a_clock_leaves_its_calls_open() -> None:
    known = clock([0, 0], [0, 0])
    assert shallow(made([[0], [1], [2]]), known)["lateness_ns"].null_count == 3


def logs(ranks: int, steps: int, length: int) -> dict[int, pa.Table]:
    """Each rank's step log: steps of so many ms."""
    rows = [
        {"step": n, "begin_ns": 10**18 + n * length * MS, "end_ns": 10**18 + (n + 1) * length * MS,
         "source": "steplog"}
        for n in range(steps)
    ]  # fmt: skip
    return dict.fromkeys(range(ranks), pa.Table.from_pylist(rows, STEPS))


def found(durations: list[list[int]], step_ms: int = 10) -> list[tuple[int, int, int | None]]:
    """Rank, lateness (ms) and since when, of one call a step."""
    times = [[10 * n for n in range(len(durations[0]))]] * len(durations)
    table = shallow(made(times, durations), steps=logs(len(times), len(times[0]), 10))
    named = suspects(waits(table), float(step_ms * MS))
    return [(each["rank"], each["lateness_ns"] // MS, each["since_step"]) for each in named]


def test_calls_that_wait_beside_each_other_wait_no_longer_than_their_step() -> None:
    """Two streams, whose calls each wait for eight of a step's ten milliseconds."""
    enqueue = [[10 * (n // 2) for n in range(24)]] * 3
    table = shallow(made(enqueue, [[9] * 24, [1] * 24, [9] * 24]), steps=logs(3, 12, 10))
    job = waits(table)
    (late,) = suspects(within_steps(job, logs(3, 12, 10)), 10.0 * MS)
    assert (late["rank"], late["lateness_ns"]) == (1, 10 * MS)
    assert suspects(job, 10.0 * MS)[0]["lateness_ns"] == 16 * MS
    # hosts that run ahead queue some steps in no time
    ahead = dict.fromkeys(range(3), logs(1, 12, 10)[0].set_column(
        2, "end_ns", pa.array([10**18 + (10 * n + (10 if n % 3 else 1)) * MS for n in range(12)])
    ))  # fmt: skip
    assert suspects(within_steps(job, ahead), 10.0 * MS)[0]["lateness_ns"] == 10 * MS


def test_a_rank_that_comes_last_in_each_step_is_a_suspect() -> None:
    assert found([[9] * 12, [2] * 12, [8] * 12, [9] * 12]) == [(1, 6, None)]
    assert found([[9] * 12, [2] * 12, [3] * 12, [9] * 12, [9] * 12]) == [(1, 7, None), (2, 6, None)]
    # by turns, once, or hardly
    assert found([[9, 2] * 6, [2, 9] * 6, [9] * 12, [9] * 12]) == []
    assert found([[9] * 12, [9] * 11 + [1], [9] * 12]) == []
    assert found([[9] * 12, [8] * 12]) == [(1, 1, None)]
    assert found([[9] * 12, [8] * 12], step_ms=60) == []
    # too few steps
    assert found([[9] * 6, [2] * 6]) == []


def test_student_s_t_is_that_of_its_tables() -> None:
    """Abramowitz and Stegun, table 26.10, and for one and two degrees in closed form."""
    known = {(0.005, 4): 4.604, (0.0005, 3): 12.924, (0.01, 30): 2.457, (0.0005, 120): 3.373}
    known |= {(0.025, 2): 4.303, (0.025, 4): 2.776, (0.025, 20): 2.086}
    for (chance, free), t in known.items():
        assert students_t(chance, free) == pytest.approx(t, abs=6e-4)
    assert students_t(1e-6, 1) == pytest.approx(1 / np.tan(np.pi * 1e-6))
    assert students_t(1e-6, 2) == pytest.approx((1 - 2e-6) / np.sqrt(2e-6 * (1 - 1e-6)))


def test_since_when_a_rank_is_late() -> None:
    assert found([[9] * 40, [9] * 25 + [2] * 15, [8] * 40]) == [(1, 6, 25)]
    assert regime(np.array([0.0] * 9 + [5.0] * 3)) == slice(None), "three steps are no habit"
    assert regime(np.array([4.0, 5.0] * 20)) == slice(None)


@pytest.mark.parametrize("seed", [4, 79, 100])
def test_lengths_that_hold_for_some_steps_make_no_rank_late(seed: int) -> None:
    """Sequences of one length for seven steps: a replica with long ones is last in all of them."""
    job = Job(dp=8, layers=2, kernels_per_layer=1, layer_ns=3 * MS, launch_ns=300_000, steps=50,
              first_step=700, varied_frac=0.2, varied_steps=7, ahead_steps=3,
              seed=seed)  # fmt: skip
    left = recorded(job)
    by = host_clock(left.flight, left.readings, left.probe)
    results = all_ranks(left.flight, by, left.steps, {}, (), CHANCE).results
    assert not [suspect for suspect in results["suspects"] if suspect["delays"]]


def test_values_that_go_together_tell_as_much_as_fewer() -> None:
    rng = np.random.default_rng(3)
    anew, held = rng.normal(10, 1, 56), np.repeat(rng.normal(10, 1, 8), 7)
    paused = np.where(np.arange(56) % 9, anew, 400)
    assert persistence(anew) == 0.0
    assert persistence(paused) == 0.0, "they do not make the others go together"
    assert persistence(np.append(anew, anew + 50), slice(56, None)) == 0.0, "it is another level"
    assert persistence(np.ones(56)) == persistence(held[:19]) == 0.0
    assert 0.4 < persistence(held) < 0.9
    assert half_width(held, 0.01, persistence(held)) > 1.5 * half_width(held, 0.01)
    assert half_width(held[:8], 0.01, 0.7) == float("inf"), "they are less than two"


def test_a_level_that_hardly_changes_was_not_carried_on_to_where_it_is() -> None:
    """Of two runs on two H100s (ms): a host that sleeps 8 ms, and launch-bound ones alike."""
    slept = np.array([8.34, 8.38, 8.4, 8.53, 8.3, 8.22, 8.47, 8.25, 8.25, 8.1, 8.11, 8.2])
    alike = np.array(
        [5.81, 9.1, 13.73, 14.54, 14.58, 14.57, 13.29, 13.71, 13.48, 13.54, 9.36, 11.65, 13.3]
    )
    assert not persists(slept, 22)
    assert persists(slept - slept.mean() + 1, 22), "so high it may have come"
    assert persists(alike, 23)
    assert not persists(np.random.default_rng(1).permutation(alike), 23), "they are no level"


def test_whoever_waits_itself_is_no_suspect() -> None:
    """In two groups of tensor parallel ranks, 0 and 1, 2 and 3, rank 1 is late."""
    step = range(12)
    rows = []
    for number, (members, durations) in enumerate(
        [((0, 1), (9, 1)), ((2, 3), (2, 2)), ((0, 2), (1, 9)), ((1, 3), (1, 9))]
    ):
        for rank, duration in zip(members, durations, strict=True):
            one = made([[10 * n for n in step]], [[duration] * 12]).entries
            columns = {"rank": pa.array([rank] * 12, pa.int32()),
                       "group": pa.array([number] * 12, pa.int32())}  # fmt: skip
            for name, values in columns.items():
                one = one.set_column(one.schema.get_field_index(name), ENTRIES.field(name), values)
            rows.append(one)
    groups = tuple(
        Group(str(n), "", ranks, 2, complete=True)
        for n, ranks in enumerate([(0, 1), (2, 3), (0, 2), (1, 3)])
    )
    entries = pa.concat_tables(rows).unify_dictionaries()
    calls = match(Flight(entries, groups, (0, 1, 2, 3), 4, [], []))
    table = shallow(calls, steps=logs(4, 12, 10))
    assert [each["rank"] for each in suspects(waits(table), 10.0 * MS)] == [1]


def test_ranks_of_one_machine_have_one_clock_and_machines_that_were_not_measured_none() -> None:
    flight = made([[0, 10], [0, 10], [0, 10]]).flight
    readings = {0: RankReadings("a"), 1: RankReadings("a"), 2: RankReadings("b")}
    here = host_clock(flight, readings)
    assert (here.ranks, here.uncertainty(1)) == ((0, 1), 0)
    at = 10**18
    bound = {"rank": 0, "other": 2, "machine": "a", "other_machine": "b", "at_ns": at,
             "low_ns": -120 * MS, "high_ns": -118 * MS}  # fmt: skip
    both = host_clock(flight, readings, {"bounds": [bound]})
    assert both.ranks == (0, 1, 2)
    assert 118 <= both.offset_ns[2] / MS <= 120
    assert MS <= both.uncertainty(2) < 1.1 * MS


def test_no_calls_are_no_lateness() -> None:
    assert shallow(made([[], []])).num_rows == 0
    assert suspects(waits(shallow(made([[], []]))), 0.0) == []


def test_sends_tell_the_stages_of_pipelines() -> None:
    rows = []
    for rank, peer, name in ((0, 2, "Send"), (2, 0, "Recv"), (1, 3, "Send"), (3, 1, "Recv")):
        row = made([[1]]).entries.to_pylist()[0]
        rows.append({**row, "rank": rank, "peer": peer, "p2p": True, "operation": name})
    world = Group("0", "default_pg", (0, 1, 2, 3), 4, complete=True)
    entries = pa.Table.from_pylist(rows, ENTRIES)
    calls = match(Flight(entries, (world,), (0, 1, 2, 3), 4, [], []))
    assert stages(calls) == [(0, 1), (2, 3)]
    assert stages(made([[1], [1]])) == []


def test_a_run_without_flight_recorders_says_why(tmp_path: Path) -> None:
    run = run_directory.create(tmp_path / "run")
    run.directory.write_manifest({"schema_version": 1, "selection": parse_ranks("0")._asdict()})
    states.advance(str(run.rank(0)), "counted", flight="torch 2.3 has its flight recorder off")
    assert merge_run.look(run)[:4] == ((), [], [], [])
    (warning,) = merge_run.look(run).warnings
    assert "torch 2.3" in warning


@pytest.mark.parametrize("job", [Job(dp=4, tp=2), Job(dp=2, pp=2, layers=4), Job(sharded=True)])
def test_calls_are_those_of_the_profiled_ranks_reports(job: Job) -> None:
    """Ranks 0 and 2 have a report of the window; the recorders began three steps before it."""
    job = replace(
        job, steps=6, first_step=9, tear_ns=0, noise_frac=0, synchronous=True, warm_steps=5
    )
    placed = dataset_of([each for each in simulate(job)[0] if each.rank in (0, 2)]).placed
    made = recorded(replace(job, warm_steps=2), past=3)
    calls = match(made.flight)
    called = integers(calls.entries, "enqueue_ns")
    table = joined(shallow(calls, None, made.steps), called, placed)
    assert table.schema == SHALLOW
    direct = np.isin(texts(table, "operation"), ("Send", "Recv"))
    rank, step = integers(table, "rank"), integers(table, "step")
    profiled = np.isin(rank, (0, 2)) & (step >= 9) & ~direct
    found = integers(table, "collective", -1)
    assert np.array_equal(found >= 0, profiled)
    for one in (0, 2):
        mine = profiled & (rank == one)
        order = np.argsort(called[mine], kind="stable")
        deep = placed.filter(pa.array(integers(placed, "rank") == one))
        deep = deep.filter(~np.isin(texts(deep, "operation"), ("Send", "Recv", "SendRecv")))
        deep = deep.sort_by("issue_start_ns")
        assert found[mine][order].tolist() == deep["collective"].to_pylist()
    # what the ranks share is one call in both
    both = {
        (call, one) for call, one in zip(table["call"].to_pylist(), found, strict=True) if one >= 0
    }
    assert len({call for call, _ in both}) == len(both) == len({one for _, one in both})


def test_reports_of_other_calls_or_another_time_are_not_joined() -> None:
    job = Job(dp=2, steps=6, first_step=9, tear_ns=0, noise_frac=0)
    placed = dataset_of(simulate(job)[0]).placed
    made = recorded(job)
    calls = match(made.flight)
    table, called = shallow(calls, None, made.steps), integers(calls.entries, "enqueue_ns")
    assert joined(table, called, placed)["collective"].null_count < table.num_rows
    for other in (joined(table, called + 3600_000 * MS, placed),
                  joined(table, called, placed.slice(0, 0))):  # fmt: skip
        assert other["collective"].null_count == table.num_rows
    named = pa.array(["Reduce"] * table.num_rows).dictionary_encode()
    at = SHALLOW.get_field_index("operation")
    other = table.set_column(at, SHALLOW.field(at), named)
    assert joined(other, called, placed)["collective"].null_count == table.num_rows
