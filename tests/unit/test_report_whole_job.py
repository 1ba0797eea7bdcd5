"""The pictures of all ranks and steps: each measure and bar is what results and records say."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import report_sample as sample

from clusterprof.align.lateness import SHALLOW
from clusterprof.exchanges import counted_once, within_steps
from clusterprof.report import html, whole_job
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job
from clusterprof.tables import STEPS

MS = sample.MS


def _values(data: dict[str, Any], name: str) -> dict[tuple[int, int], float]:
    """Rank and step -> ns, as the page's script reads them."""
    measure = next(each for each in data["measures"] if each["name"] == name)
    codes = np.frombuffer(base64.b64decode(measure["values"]), "<u2")
    cells = codes.reshape(len(data["ranks"]), len(measure["steps"]))
    return {
        (rank, step): float(cells[row, column]) * measure["unit_ns"]
        for row, rank in enumerate(data["ranks"])
        for column, step in enumerate(measure["steps"])
        if cells[row, column] != 65_535
    }


def _shallow(late: dict[int, int], ranks: int, steps: int = 3) -> pa.Table:
    rows = [
        dict.fromkeys(SHALLOW.names)
        | {"rank": rank, "group": "0", "sequence": step, "operation": "AllReduce", "call": step}
        | {"lateness_ns": late.get(rank, 0), "bound_ns": 0, "step": 20 + step}
        for step in range(steps)
        for rank in range(ranks)
    ]
    return pa.Table.from_pylist(rows, SHALLOW)


def _log(ns: int, steps: int = 6) -> pa.Table:
    begin = np.arange(steps) * ns
    columns = [np.arange(steps) + 4, begin, begin + ns, ["steplog"] * steps]
    return pa.table([pa.array(each) for each in columns], names=STEPS.names).cast(STEPS)


def test_what_a_rank_makes_the_others_wait_is_the_mean_wait_of_the_other_members() -> None:
    data = whole_job.heatmap(Summary(sample.results()), sample.collectives(), Job())
    assert data is not None
    caused = _values(data, "wait caused")
    assert {rank for rank, _ in caused} == {0, 1, 2, 3}
    table = sample.collectives().to_pylist()
    waits = [
        row["wait_ns"]
        for row in table
        if row["step"] == 8 and row["last_rank"] == 2 and row["wait_ns"] > 17_000
    ]
    assert caused[2, 8] == pytest.approx(sum(waits) / 3, rel=1e-3)
    assert caused[2, 8] > 20 * caused[0, 8]
    assert data["named"] == [2]


@pytest.mark.parametrize("seed", range(20))
def test_of_waits_at_the_same_time_no_moment_counts_twice(seed: int) -> None:
    any_of, count = np.random.default_rng(seed), seed * 2
    start, wait = any_of.integers(0, 100, count), any_of.integers(0, 30, count)
    keys = any_of.integers(0, 3, count), any_of.integers(0, 2, count)
    added = counted_once(start, wait, *keys)
    for pair in {*zip(*keys, strict=True)}:
        rows = (keys[0] == pair[0]) & (keys[1] == pair[1])
        spans = zip(start[rows], wait[rows], strict=True)
        moments = {moment for begin, length in spans for moment in range(begin, begin + length)}
        assert added[rows].sum() == len(moments)


def test_of_a_wait_only_what_its_step_has_counts() -> None:
    start, wait, step = np.array([[5, 12, 0, 7], [10, 3, 4, 9], [1, 1, 1, 2]])
    begins = {1: 10, 3: 30}
    begin, within = within_steps(start, wait, step, begins)
    # of a step whose begin is unknown all of it; of one before its step nothing
    assert within.tolist() == [5, 3, 0, 9]
    assert begin.tolist() == [10, 12, 4, 7]
    assert within_steps(start, wait, step, {})[1] is wait


def test_the_page_says_why_no_finding_names_a_rank_that_stands_out() -> None:
    results = sample.results()
    data = whole_job.heatmap(Summary(results), sample.collectives(), Job())
    assert data is not None
    assert data["darkest"] == ""
    results["findings"], results["headline"] = [], []
    data = whole_job.heatmap(Summary(results), sample.collectives(), Job())
    assert data is not None
    assert data["darkest"].startswith("Rank 2 stands out: wait caused ")
    page = html.render(results, sample.collectives(), title="x")
    assert '<p class="soft">Rank 2 stands out: wait caused ' in page


def test_waits_within_the_clocks_error_are_no_rank_s_doing() -> None:
    results = sample.results()
    for clock in results["clock"]["ranks"]:
        clock["uncertainty_ns"] = 100 * MS
    data = whole_job.heatmap(Summary(results), sample.collectives(), Job())
    assert data is not None
    assert set(_values(data, "wait caused").values()) == {0}


def test_measures_of_the_accounts_are_those_of_the_results() -> None:
    results = sample.results()
    data = whole_job.heatmap(Summary(results), sample.collectives(), Job())
    assert data is not None
    for name, key in (("idle", "idle_ns"), ("step time", "duration_ns")):
        values = _values(data, name)
        for step in results["steps"]:
            for account in step["ranks"]:
                truth = account[key]  # type: ignore[literal-required]
                assert values[account["rank"], step["step"]] == pytest.approx(truth, rel=1e-3)
    times = next(each for each in data["measures"] if each["name"] == "step time")
    # the step with the profiler's start in it does not set the scale
    assert times["unsteady"] == [0]
    assert results["pace"] is not None
    # what differs by less than a twentieth of a step has no strong shade
    least = times["low_ns"] + results["pace"]["window_step_ns"] / 20
    assert times["high_ns"] == least > 62_830_000
    caused = data["measures"][0]
    assert caused["high_ns"] == pytest.approx(max(_values(data, "wait caused").values()), rel=1e-3)


def test_the_measure_that_is_shown_first_is_that_of_the_finding_in_the_verdict() -> None:
    results = sample.results()
    data = whole_job.heatmap(Summary(results), sample.collectives(), Job())
    assert data is not None
    assert data["measures"][data["first"]]["name"] == "wait caused"
    results["findings"] = [sample.pageable() | {"code": "host.launch_bound"}]
    data = whole_job.heatmap(Summary(results), sample.collectives(), Job())
    assert data is not None
    assert data["measures"][data["first"]]["name"] == "idle"


def test_ranks_without_a_report_have_their_lateness_and_their_logged_steps() -> None:
    job = Job(
        shallow=_shallow({5: 7 * MS}, ranks=8),
        steps={rank: _log(60 * MS + rank) for rank in range(8)},
        hosts={rank: f"node{rank // 4}" for rank in range(8)},
    )
    results = sample.results(host="")
    assert results["shallow"] is not None
    other = {"name": "2", "description": "mesh_dp", "ranks": [1, 3, 5]}
    results["shallow"]["groups"].append(other)  # type: ignore[arg-type]
    data = whole_job.heatmap(Summary(results), sample.collectives(), job)
    assert data is not None
    assert data["ranks"] == [*range(8)]
    assert data["profiled"] == [0, 1, 2, 3]
    late = _values(data, "lateness, all ranks")
    assert late[5, 21] == pytest.approx(7 * MS, rel=1e-3)
    assert late[7, 21] == 0
    assert _values(data, "step time, all ranks")[7, 4] == pytest.approx(60 * MS, rel=1e-3)
    assert (7, 8) not in _values(data, "idle")
    hosts = next(each for each in data["groupings"] if each["name"] == "host")
    assert hosts["labels"] == ["node0", "node1"]
    assert hosts["of"] == [0, 0, 0, 0, 1, 1, 1, 1]
    (groups,) = (each for each in data["groupings"] if each["name"] == "mesh_dp")
    assert groups["of"] == [0, 1, 0, 1, 0, 1, 0, -1]


def test_of_thousands_of_ranks_the_page_carries_the_steps_nearest_to_the_window() -> None:
    ranks = 4096
    job = Job(steps={rank: _log(60 * MS, steps=200) for rank in range(ranks)})
    data = whole_job.heatmap(Summary(sample.results()), sample.collectives(), job)
    assert data is not None
    logged = data["measures"][-1]
    assert len(logged["values"]) <= 4 * (whole_job.MOST_CELLS * 2 // 3 + 1)
    assert {6, 7, 8, 9} <= set(logged["steps"])
    assert len(data["ranks"]) == ranks


def test_without_anything_known_there_is_no_picture() -> None:
    results = sample.healthy()
    results["steps"] = []
    assert whole_job.heatmap(Summary(results), sample.collectives().slice(0, 0), Job()) is None


# --- the chart of steps


def _logged(first: int, took: list[int]) -> pa.Table:
    begin = np.cumsum([0, *took[:-1]])
    columns = [np.arange(len(took)) + first, begin, begin + took, ["steplog"] * len(took)]
    return pa.table([pa.array(each) for each in columns], names=STEPS.names).cast(STEPS)


def _pace(*rows: tuple[int, ...]) -> dict[str, np.ndarray]:
    names = ("first_step", "count", "begin_ns", "end_ns", "median_ns", "q1_ns", "q3_ns")
    return dict(zip(names, np.asarray(rows, np.int64).T, strict=True))


def test_a_bar_is_the_median_over_ranks_with_the_fastest_and_the_slowest() -> None:
    job = Job(
        steps={
            0: _logged(6, [30 * MS, 20 * MS, 21 * MS]),
            1: _logged(6, [32 * MS, 24 * MS, 21 * MS]),
            2: _logged(6, [90 * MS, 21 * MS, 21 * MS]),
        },
        paces={rank: _pace((0, 6, 0, 9, 40 * MS + rank, 30 * MS, 50 * MS)) for rank in range(3)},
    )
    bars = whole_job.bars(sample.results(), job)
    assert [(bar.first, bar.count) for bar in bars] == [(0, 6), (6, 1), (7, 1), (8, 1)]
    assert bars[0].median_ns == 40 * MS + 1
    assert (bars[1].median_ns, bars[1].low_ns, bars[1].high_ns) == (32 * MS, 30 * MS, 90 * MS)
    chart = whole_job.step_chart(sample.results(), job)
    assert chart is not None
    assert [bar["inside"] for bar in chart["bars"]] == [False, True, True, True]
    # step 6 is the one with the profiler's start in it
    assert [bool(bar["stripes"]) for bar in chart["bars"]] == [False, True, False, False]
    assert (
        chart["bars"][1]["label"]
        == "step 6: 32.0 ms, ranks 30.0 ms to 90.0 ms, not in steady state"
    )
    assert chart["window"] is not None
    assert chart["of"] == "3 ranks' step logs"
    # another bar may be higher: those of ranks that were not profiled, or of disturbed steps
    assert chart["timeline"] == (
        "The timeline shows step 8, a typical one, and step 9, the longest in steady state of the "
        "profiled ranks."
    )


def test_without_logs_the_window_alone_is_shown_and_none_is_shaded() -> None:
    chart = whole_job.step_chart(sample.results(), Job())
    assert chart is not None
    assert len(chart["bars"]) == 4
    assert chart["window"] is None
    heights = [bar["height"] for bar in chart["bars"]]
    # a step that lasts three times as long is cut off, and says so
    assert [bar["cut"] for bar in chart["bars"]] == [True, False, False, False]
    assert heights[1] < heights[2] < heights[3] < heights[0]


def test_a_rank_that_takes_longer_than_drawn_is_marked() -> None:
    results = sample.results()
    slow = results["steps"][2]["ranks"][0]
    slow["duration_ns"] *= 9
    chart = whole_job.step_chart(results, Job())
    assert chart is not None
    assert [bar["cut"] for bar in chart["bars"]] == [True, False, True, False]


def test_two_steps_make_no_chart_and_thousands_keep_those_near_the_window() -> None:
    results = sample.results()
    assert whole_job.step_chart({**results, "steps": results["steps"][:2]}, Job()) is None
    job = Job(steps={0: _logged(0, [20 * MS] * 3000)})
    chart = whole_job.step_chart(results, job)
    assert chart is not None
    assert len(chart["bars"]) + chart["left_out"] == 3000
    assert sum(bar["inside"] for bar in chart["bars"]) == 4
    assert min(bar["width"] for bar in chart["bars"]) > 3


def test_a_pause_is_marked_in_its_step_or_block() -> None:
    job = Job(
        steps={0: _logged(490, [20 * MS] * 20)},
        paces={0: _pace((0, 490, 0, 9, 20 * MS, 19 * MS, 21 * MS),
                        (510, 1000, 0, 9, 20 * MS, 19 * MS, 21 * MS))},
    )  # fmt: skip
    results = sample.paused()
    chart = whole_job.step_chart(results, job)
    assert chart is not None
    labels = {bar["label"].partition(":")[0]: bar for bar in chart["bars"]}
    assert labels["step 500"]["label"].endswith(
        "; pause: every 500 steps (a checkpoint or an evaluation)"
    )
    assert labels["steps 510–1509"]["label"].endswith("; 2 pauses")
    assert labels["steps 0–489"]["label"].endswith("; 3 pauses")  # the first three steps
    assert sum(bool(bar["paused"]) for bar in chart["bars"]) == 3
    # another attempt of the job has other steps of these numbers
    chart = whole_job.step_chart(results, replace(job, attempt=2))
    assert chart is not None
    assert not chart["paused"]
