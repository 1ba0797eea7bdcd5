"""The timeline of collectives: what is drawn where, and who is marked as late."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import report_sample as sample

from clusterprof.report import lanes, whole_job
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job


def _built(table: pa.Table | None = None) -> lanes.Timeline:
    built = lanes.build(Summary(sample.results()), sample.collectives() if table is None else table)
    assert built is not None
    return built


def _named(built: lanes.Timeline) -> list[int]:
    return [lane["rank"] for lane in built.data["lanes"] if lane["named"]]


def test_embedded_times_come_back_to_within_their_unit() -> None:
    data, table = _built().data, sample.collectives()
    last = np.cumsum(data["last"])
    of = np.repeat(np.arange(len(last)), data["members"])
    begin = (last[of] - np.array(data["wait"])) * data["unit_ns"] + sample.BEGIN
    assert len(begin) == table.num_rows
    truth = np.sort(table["aligned_start_ns"].to_numpy())
    assert np.abs(np.sort(begin) - truth).max() <= 2 * data["unit_ns"]
    spent = np.array(data["length"]).sum() * data["unit_ns"]
    true = pc.sum(pc.subtract(table["aligned_end_ns"], table["aligned_start_ns"])).as_py()
    assert spent == pytest.approx(true, rel=1e-3)


def test_the_first_view_is_a_steady_state_step() -> None:
    built = _built()
    assert built.steps[built.typical].steady
    assert built.steps[built.typical].number in {7, 8, 9}


def test_the_straggler_is_the_late_rank_of_the_collective_it_delays() -> None:
    built = _built()
    late, order = (np.array(built.data[name]) for name in ("late", "order"))
    assert set(late[order % sample.CALLS_PER_STEP == 0].tolist()) == {2}
    assert _named(built) == [2]


def test_ranks_that_are_stragglers_together_are_marked() -> None:
    results = sample.results()
    results["findings"][0]["rank"], results["findings"][0]["ranks"] = None, [1, 2]
    built = lanes.build(Summary(results), sample.collectives())
    assert built is not None
    assert _named(built) == [1, 2]


def test_no_rank_is_late_by_less_than_the_two_clocks_may_err() -> None:
    results, table = sample.results(), sample.collectives()
    for entry in results["clock"]["ranks"]:
        entry["uncertainty_ns"] = 30 * sample.MS
    built = lanes.build(Summary(results), table)
    assert built is not None
    assert set(built.data["late"]) == {-1}
    assert Summary(results).pair_bound_ns == 60 * sample.MS


def test_a_collective_without_a_last_arrival_is_drawn_and_marks_no_rank() -> None:
    built = _built(sample.without_match(sample.collectives(), 12))
    (alone,) = np.flatnonzero(built.data["alone"])
    assert built.data["order"][alone] == 12
    assert built.data["late"][alone] == -1
    assert "incomplete" in built.data["states"]
    assert "alone" in built.kinds


def test_calls_without_a_kernel_are_counted_not_drawn() -> None:
    table = sample.collectives()
    here = pc.equal(table["collective"], 3)
    for name in ("aligned_start_ns", "aligned_end_ns"):
        column = table.column_names.index(name)
        table = table.set_column(column, table.field(name), pc.if_else(here, None, table[name]))
    built = _built(table)
    assert len(built.data["lane"]) == table.num_rows - 4
    (note,) = built.notes
    assert note.startswith("4 calls ")


def test_no_collectives_give_no_timeline() -> None:
    assert lanes.build(Summary(sample.results()), sample.collectives().slice(0, 0)) is None


def test_each_communicator_of_a_rank_has_a_row_of_its_own() -> None:
    table = sample.collectives()
    names = pa.array([f"0x{value % 3}" for value in table["collective"].to_pylist()])
    column = table.column_names.index("communicator")
    built = _built(table.set_column(column, table.field(column), names))
    data = built.data
    assert [lane["rows"] for lane in data["lanes"]] == [3, 3, 3, 3]
    communicator = np.repeat(data["communicator"], data["members"]).tolist()
    pairs = set(zip(data["row"], communicator, strict=True))
    assert len(pairs) == 3


def test_too_many_calls_are_left_out_by_whole_steps_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MOST_CALLS", {2**31: 8_000})
    built = _built(sample.collectives(calls_per_step=1000))
    assert len(built.data["lane"]) <= 8_000
    assert [step.number for step in built.steps] == [8, 9]  # the typical one and the worst
    (note,) = built.notes
    assert "2 steps of 4: 8–9" in note
    begins, ends = ([getattr(step, edge) for step in built.steps] for edge in ("begin", "end"))
    last = np.cumsum(built.data["last"]) * lanes.UNIT_NS + begins[0]
    assert begins[0] <= last.min()
    assert last.max() <= ends[1]
    assert (last >= begins[1]).any()


def test_a_step_too_large_by_itself_keeps_its_longest_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "MOST_CALLS", {2**31: 8_000})
    built = _built(sample.collectives(calls_per_step=4000))
    assert len(built.data["lane"]) <= 8_000
    left_out = 4000 - len(built.data["last"])
    assert 0 < left_out < 4000
    assert f"{left_out:,} shortest" in built.notes[-1]
    assert 2 in built.data["late"]


def test_of_many_ranks_the_straggler_is_among_those_shown_first() -> None:
    results = sample.results()
    results["findings"][0]["rank"], results["findings"][0]["ranks"] = 111, [111]
    built = lanes.build(Summary(results), sample.collectives(ranks=200, calls_per_step=2, late=111))
    assert built is not None
    assert built.ranks == list(range(200))
    opened, *_, every = built.data["presets"]  # a rank's lane has its number
    assert opened["name"] == "stragglers and peers"
    assert len(opened["lanes"]) <= lanes.MOST_LANES
    assert 111 in opened["lanes"]
    assert every == {"name": "all ranks", "lanes": built.ranks}


def test_results_without_steps_show_the_whole_window() -> None:
    results = sample.results()
    results["steps"] = []
    built = lanes.build(Summary(results), sample.collectives())
    assert built is not None
    assert [step.number for step in built.steps] == [None]


@pytest.mark.parametrize("number", [7, 8, 9])
def test_the_longest_step_is_that_of_the_longest_median_as_in_the_chart(number: int) -> None:
    results = sample.results()
    for step in results["steps"]:
        # one is longer by a trifle, and need not be drawn longer
        step["duration_ns"] = 61_000_000 + 100 * (step["step"] == number)
    built = lanes.build(Summary(results), sample.collectives())
    assert built is not None
    assert built.steps[built.data["worst"]].number == number
    chart = whole_job.step_chart(results, Job())
    assert chart is not None
    assert f"step {number}, the longest in steady state" in chart["timeline"]
    shown = {step["step"]: step["median"] for step in built.data["steps"]}
    assert max(shown[each] for each in (7, 8, 9)) == shown[number] == 61_000_100 // lanes.UNIT_NS
