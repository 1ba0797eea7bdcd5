"""The steps of the run: each bar is what logs, blocks or results say of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import report_sample as sample

from clusterprof.report import step_chart
from clusterprof.report.whole_job import Job
from clusterprof.tables import STEPS

MS = sample.MS


def _log(first: int, took: list[int]) -> pa.Table:
    begin = np.cumsum([0, *took[:-1]])
    columns = [np.arange(len(took)) + first, begin, begin + took, ["steplog"] * len(took)]
    return pa.table([pa.array(each) for each in columns], names=STEPS.names).cast(STEPS)


def _pace(*rows: tuple[int, ...]) -> dict[str, np.ndarray]:
    names = ("first_step", "count", "begin_ns", "end_ns", "median_ns", "q1_ns", "q3_ns")
    return dict(zip(names, np.asarray(rows, np.int64).T, strict=True))


def test_a_bar_is_the_median_over_ranks_with_the_fastest_and_the_slowest() -> None:
    job = Job(
        steps={
            0: _log(6, [30 * MS, 20 * MS, 21 * MS]),
            1: _log(6, [32 * MS, 24 * MS, 21 * MS]),
            2: _log(6, [90 * MS, 21 * MS, 21 * MS]),
        },
        paces={rank: _pace((0, 6, 0, 9, 40 * MS + rank, 30 * MS, 50 * MS)) for rank in range(3)},
    )
    bars = step_chart.bars(sample.results(), job)
    assert [(bar.first, bar.count) for bar in bars] == [(0, 6), (6, 1), (7, 1), (8, 1)]
    assert bars[0].median_ns == 40 * MS + 1
    assert (bars[1].median_ns, bars[1].low_ns, bars[1].high_ns) == (32 * MS, 30 * MS, 90 * MS)
    chart = step_chart.chart(sample.results(), job)
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
    chart = step_chart.chart(sample.results(), Job())
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
    chart = step_chart.chart(results, Job())
    assert chart is not None
    assert [bar["cut"] for bar in chart["bars"]] == [True, False, True, False]


def test_two_steps_make_no_chart_and_thousands_keep_those_near_the_window() -> None:
    results = sample.results()
    assert step_chart.chart({**results, "steps": results["steps"][:2]}, Job()) is None
    job = Job(steps={0: _log(0, [20 * MS] * 3000)})
    chart = step_chart.chart(results, job)
    assert chart is not None
    assert len(chart["bars"]) + chart["left_out"] == 3000
    assert sum(bar["inside"] for bar in chart["bars"]) == 4
    assert min(bar["width"] for bar in chart["bars"]) > 3


def test_a_pause_is_marked_in_its_step_or_block() -> None:
    job = Job(
        steps={0: _log(490, [20 * MS] * 20)},
        paces={0: _pace((0, 490, 0, 9, 20 * MS, 19 * MS, 21 * MS),
                        (510, 1000, 0, 9, 20 * MS, 19 * MS, 21 * MS))},
    )  # fmt: skip
    results = sample.paused()
    chart = step_chart.chart(results, job)
    assert chart is not None
    labels = {bar["label"].partition(":")[0]: bar for bar in chart["bars"]}
    assert labels["step 500"]["label"].endswith(
        "; pause: every 500 steps (a checkpoint or an evaluation)"
    )
    assert labels["steps 510–1509"]["label"].endswith("; 2 pauses")
    assert labels["steps 0–489"]["label"].endswith("; 3 pauses")  # the first three steps
    assert sum(bar["paused"] for bar in chart["bars"]) == 3
    # another attempt of the job has other steps of these numbers
    chart = step_chart.chart(results, replace(job, attempt=2))
    assert chart is not None
    assert not chart["paused"]
