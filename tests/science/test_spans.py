"""What hosts and devices did, moment by moment: the account of each step, drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from simulate import Cause, Job, simulate
from simulate.reports import sleeps_as_ranges
from studies import studied_job

from clusterprof import spans
from clusterprof.results import steps_to_look_at
from clusterprof.study import Study, study
from clusterprof.tables import HOST_CALLS, SPAN_ROWS, RankTables

MS = 1_000_000
ACCOUNT = {
    "compute": "compute_ns",
    "wait": "exposed_wait_ns",
    "copy": "exposed_copy_ns",
    "idle": "idle_ns",
}


def _job(ranks: int = 4) -> Job:
    drift = tuple(7.0 * (-1) ** rank for rank in range(ranks))
    offset = tuple(1_000_000 * rank for rank in range(ranks))
    late = Cause("host", 2, 12 * MS)
    return Job(dp=ranks, causes=(late,), offset_ns=offset, drift_ppm=drift)


def _sums(table: pa.Table) -> dict[tuple[int, int, str], int]:
    device = table.filter(pc.equal(table["row"], "device"))
    device = device.append_column("length", pc.subtract(device["end_ns"], device["start_ns"]))
    grouped = device.group_by(["rank", "step", "kind"]).aggregate([("length", "sum")])
    return {(r["rank"], r["step"], r["kind"]): r["length_sum"] for r in grouped.to_pylist()}


def _assert_accounts(made: Study) -> None:
    sums, steps = _sums(made.lanes), set(made.lanes["step"].to_pylist()) - {None}
    rows = [row for row in made.accounts.to_pylist() if row["step"] in steps]
    assert rows
    for row in rows:
        drawn = {kind: sums.get((row["rank"], row["step"], kind), 0) for kind in ACCOUNT}
        assert drawn == {kind: row[name] for kind, name in ACCOUNT.items()}
        drawn["transfer"] = sums.get((row["rank"], row["step"], "transfer"), 0)
        communication = row["exposed_communication_ns"]
        assert drawn["wait"] + drawn["transfer"] == communication
        assert sum(drawn.values()) == row["duration_ns"]


@pytest.mark.parametrize("most", [500_000, 300])
def test_the_devices_row_adds_up_to_the_account_merged_or_not(most: int) -> None:
    made = drawn_with(most)
    _assert_accounts(made)
    bound = made.lanes["merged_below_ns"][0].as_py()
    assert (bound > 0) == (most == 300)
    if bound:
        assert made.lanes.num_rows <= 300 * 6
        assert pc.max(made.lanes["count"]).as_py() > 1


def test_spans_that_cannot_be_merged_any_further_are_kept() -> None:
    made = drawn_with(5)
    _assert_accounts(made)
    # no row has more than each kind once in each step and beside them, or twice over an edge
    assert 5 < made.lanes.num_rows <= 4 * len(SPAN_ROWS) * 3 * 6 * 2


def drawn_with(most: int, at_once: int = spans.AT_ONCE) -> Study:
    """A job's study with so many spans."""
    made = studied_job(_job())
    lanes = spans.spans(made.dataset, made.results, most=most, at_once=at_once)
    return replace(made, lanes=lanes)


@pytest.mark.parametrize(
    "recording", ["nsys-2025.3/ddp-host-straggler", "kineto/pipeline", "kineto/gloo"]
)
def test_the_devices_rows_of_recordings_add_up_and_no_row_overlaps_itself(
    studied: Callable[[str], Study], recording: str
) -> None:
    made = studied(recording)
    _assert_accounts(made)
    row = made.lanes["row"].cast(pa.string()).combine_chunks().dictionary_encode()
    of = np.asarray(made.lanes["rank"]) * 4 + np.asarray(row.indices)
    start, end = (np.asarray(made.lanes[f"{edge}_ns"]) for edge in ("start", "end"))
    order = np.lexsort((start, of))
    of, start, end = of[order], start[order], end[order]
    # a step begins where the clocks put it, and a clock drifts meanwhile
    assert (((start[1:] - end[:-1]) > -1_000) | (of[1:] != of[:-1])).all()


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-straggler"])
def test_the_stragglers_sleep_is_a_span_of_its_host(
    studied: Callable[[str], Study], recording: str
) -> None:
    made = studied(recording)
    long = pc.greater(pc.subtract(made.lanes["end_ns"], made.lanes["start_ns"]), 15 * MS)
    blocked = made.lanes.filter(pc.and_(long, pc.equal(made.lanes["kind"], "blocked")))
    assert set(blocked["name"].to_pylist()) == {"clock_nanosleep"}
    assert set(blocked["rank"].to_pylist()) == {2}
    assert set(blocked["row"].to_pylist()) == {"host"}
    phases = made.lanes.filter(pc.equal(made.lanes["row"], "phase"))
    assert {"data", "forward", "backward", "optimizer"} <= set(phases["name"].to_pylist())


def test_a_range_in_which_the_host_makes_no_call_is_a_span_of_its_host() -> None:
    ranks, _ = simulate(Job(causes=(Cause("host", 2, 12 * MS),)))
    ranks[2] = sleeps_as_ranges(ranks[2], {"forward": -20_000, "sparse": 0, "tiny": 5_990_000})
    lanes = study(ranks).lanes
    mine = lanes.filter(pc.equal(lanes["rank"], 2)).to_pylist()
    named = {(row["row"], row["name"]) for row in mine if row["kind"] == "range"}
    # the last takes too little to be looked at
    assert named == {("phase", "forward"), ("host", "sparse")}


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-straggler"])
def test_the_typical_and_the_worst_step_come_first(
    studied: Callable[[str], Study], recording: str
) -> None:
    made = studied(recording)
    typical, worst = steps_to_look_at(made.results)
    steady = {s["step"]: s["duration_ns"] for s in made.results["steps"] if s["settled"]}
    assert steady[worst] == max(steady.values())
    assert steady[typical] < steady[worst]
    assert {typical, worst} <= set(made.lanes["step"].to_pylist())


@pytest.mark.parametrize("recording", ["nsys-2024.2/pipeline"])
def test_every_row_of_a_device_is_filled_while_any_rank_is_in_the_step(
    studied: Callable[[str], Study], recording: str
) -> None:
    made = studied(recording)
    typical = steps_to_look_at(made.results)[0]
    rows = [row for row in made.accounts.to_pylist() if row["step"] == typical]
    low = min(row["aligned_begin_ns"] for row in rows)
    high = max(row["aligned_begin_ns"] + row["duration_ns"] for row in rows)
    assert len({row["aligned_begin_ns"] for row in rows}) > 1
    lanes = made.lanes.filter(pc.equal(made.lanes["row"], "device"))
    for row in rows:
        mine = lanes.filter(pc.equal(lanes["rank"], row["rank"]))
        start, end = (np.asarray(mine[f"{edge}_ns"]) for edge in ("start", "end"))
        covered = np.minimum(end, high) - np.maximum(start, low)
        assert abs(covered[covered > 0].sum() - (high - low)) <= 2_000


def _busy(tables: RankTables, rng: np.random.Generator) -> RankTables:
    """A rank with calls of any kind on five threads, named after these, of which three launch.

    The odd ranks' reports do not say which thread launched.
    """
    number = tables.activity.num_rows
    launching = pa.array(rng.integers(1, 4, number), mask=np.full(number, tables.rank % 2 == 1))
    at = tables.activity.schema.get_field_index("launch_thread")
    first, last = tables.steps["begin_ns"][0].as_py(), tables.steps["end_ns"][-1].as_py()
    start = np.sort(rng.integers(first, last - 9 * MS, 2_000))
    thread = rng.integers(1, 6, 2_000)
    columns = {
        "start_ns": start,
        "end_ns": start + rng.integers(1, 9 * MS, 2_000) // rng.integers(1, 1_000, 2_000),
        "kind": rng.choice(["cuda", "os", "python", "range", "op"], 2_000),
        "name": [f"on {each}" for each in thread],
        "thread": thread,
        "correlation": pa.nulls(2_000, pa.int64()),
    }
    return replace(
        tables,
        activity=tables.activity.set_column(at, tables.activity.schema.field(at), launching),
        host_calls=pa.table(columns).cast(HOST_CALLS),
    )


@pytest.fixture(scope="module")
def busy() -> Study:
    """A study of six ranks with calls of any kind on several threads."""
    rng = np.random.default_rng(5)
    return study([_busy(tables, rng) for tables in simulate(_job(6))[0]])


def test_the_host_rows_are_the_two_threads_that_launch_most_the_one_with_most_ranges_first(
    busy: Study,
) -> None:
    lanes = busy.lanes.to_pylist()
    for tables in busy.ranks:
        calls = tables.host_calls.to_pylist()
        count = Counter(tables.activity["launch_thread"].drop_null().to_pylist())
        count = count or Counter(each["thread"] for each in calls)
        marks = Counter(each["thread"] for each in calls if each["kind"] == "range")
        main = max(count, key=lambda each: (marks[each], -each))
        second = max(count.keys() - {main}, key=lambda each: (count[each], -each))
        mine = [row for row in lanes if row["rank"] == tables.rank]
        for of, thread in (("phase", main), ("host", main), ("second_host", second)):
            assert {row["name"] for row in mine if row["row"] == of} == {f"on {thread}"}


def has_the_spans_of_each_alone(made: Study) -> None:
    assert len(made.dataset.timelines.blocks(1)) == len(made.ranks) > 1
    assert spans.spans(made.dataset, made.results, at_once=1).equals(made.lanes)


def test_ranks_that_are_looked_at_at_once_have_the_spans_of_each_alone(busy: Study) -> None:
    has_the_spans_of_each_alone(busy)


@pytest.mark.parametrize("recording", ["kineto/gloo"])
def test_ranks_of_a_recording_that_are_looked_at_at_once_have_the_spans_of_each_alone(
    studied: Callable[[str], Study], recording: str
) -> None:
    has_the_spans_of_each_alone(studied(recording))


def test_ranks_whose_spans_are_merged_one_after_the_other_have_those_of_all_at_once() -> None:
    at_once, apart = drawn_with(300), drawn_with(300, at_once=1)
    assert at_once.lanes["merged_below_ns"][0].as_py() > 0
    assert apart.lanes.equals(at_once.lanes)


def test_the_innermost_span_is_the_open_one_that_began_last() -> None:
    start = np.array([0, 10, 20, 22, 50, 90])
    stop = np.array([100, 40, 30, 24, 120, 95])
    at = np.array([-1, 5, 10, 23, 25, 35, 45, 60, 92, 99, 110, 120])
    found = spans.innermost(start, stop, at).tolist()
    assert found == [-1, 0, 1, 3, 2, 1, 0, 4, 5, 4, 4, -1]


def test_the_innermost_of_many_random_spans_is_what_looking_at_each_says() -> None:
    rng = np.random.default_rng(3)
    start = rng.integers(0, 1_000, 200)
    stop = start + rng.integers(1, 300, 200)
    at = np.arange(1_300)
    found = spans.innermost(start, stop, at)
    for moment in at.tolist():
        is_open = np.flatnonzero((start <= moment) & (stop > moment))
        if len(is_open):
            assert start[found[moment]] == start[is_open].max()
            assert stop[found[moment]] > moment
        else:
            assert found[moment] == -1
