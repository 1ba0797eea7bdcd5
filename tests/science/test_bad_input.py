"""Input that no job should give: a result that names what is missing, and no false certainty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from simulate import Cause, Job, simulate

from clusterprof.ingest import read_report
from clusterprof.results import Results
from clusterprof.study import study
from clusterprof.tables import RankTables

MS = 1_000_000
LATE = Job(synchronous=True, causes=(Cause("host", 2, 20 * MS),))


def stragglers(results: Results) -> list[int | None]:
    return [
        f["rank"]
        for f in results["findings"]
        if f["code"].startswith("straggler.") and f["severity"] != "info"
    ]


def with_column(rank: RankTables, name: str, values: pa.Array) -> RankTables:
    calls = rank.collective_calls
    at = calls.schema.get_field_index(name)
    return replace(rank, collective_calls=calls.set_column(at, calls.schema.field(at), values))


def test_a_clock_an_hour_off_is_measured_and_the_verdict_stays() -> None:
    job = replace(LATE, offset_ns=(0, 3_600_000 * MS, -3_600_000 * MS, 0), ranks_per_host=1)
    results = study(simulate(job)[0]).results
    assert stragglers(results) == [2]
    clock = {r["rank"]: r for r in results["clock"]["ranks"]}
    assert clock[1]["offset_ns"] == pytest.approx(3_600_000 * MS, abs=clock[1]["uncertainty_ns"])


def test_a_clock_that_drifts_beyond_reason_gives_a_wide_bound_or_is_measured() -> None:
    job = replace(LATE, drift_ppm=(0.0, 4000.0, 0.0, 0.0), ranks_per_host=1)
    ranks, _ = simulate(job)
    results = study(ranks).results
    assert set(stragglers(results)) <= {2}
    for entry in results["clock"]["ranks"]:
        measured = abs(entry["drift_ppm"] - job.drift_ppm[entry["rank"]]) < 200
        assert measured or entry["uncertainty_ns"] > 100_000


def test_communicators_of_size_one_synchronise_no_ranks() -> None:
    ranks, _ = simulate(Job())
    alone = [
        with_column(
            r, "communicator", pa.array([f"0xown{r.rank}"] * r.collective_calls.num_rows)
        )
        for r in ranks
    ]  # fmt: skip
    results = study(alone).results
    assert stragglers(results) == []
    assert results["collectives"]["matched"] == 0
    assert any("unbounded" in w for w in results["warnings"])


def test_windows_that_share_no_step_name_no_straggler() -> None:
    early, _ = simulate(Job())
    late, _ = simulate(Job(first_step=40, seed=2))
    results = study([*early[:2], *late[2:]]).results
    assert stragglers(results) == []


def test_one_steady_step_is_not_enough_whatever_it_shows() -> None:
    results = study(simulate(replace(LATE, steps=2))[0]).results
    assert [f["code"] for f in results["findings"]] == ["profiler.perturbation"]
    assert "(1 of 2)" in results["verdict"]


def test_ranks_without_any_event_are_no_evidence() -> None:
    ranks, _ = simulate(Job())
    empty = [
        replace(
            r, activity=r.activity.slice(0, 0), collective_calls=r.collective_calls.slice(0, 0),
            steps=r.steps.slice(0, 0), host_calls=r.host_calls.slice(0, 0),
        )
        for r in ranks
    ]  # fmt: skip
    results = study(empty).results
    assert results["findings"] == []
    assert results["verdict"].startswith("No report has steps")


def test_steps_that_go_backwards_do_not_break_the_account() -> None:
    ranks, _ = simulate(Job())
    steps = ranks[1].steps
    order = pa.array(np.arange(steps.num_rows)[::-1])
    turned = steps.set_column(0, steps.schema.field(0), steps["step"].take(order))
    results = study([ranks[0], replace(ranks[1], steps=turned), *ranks[2:]]).results
    assert stragglers(results) == []


def test_a_kernel_of_no_length_and_one_that_ends_before_it_starts_do_no_harm() -> None:
    ranks, _ = simulate(LATE)
    ends = ranks[0].activity["end_ns"].to_numpy().copy()
    starts = ranks[0].activity["start_ns"].to_numpy()
    ends[10], ends[11] = starts[10], starts[11] - 5_000
    at = ranks[0].activity.schema.get_field_index("end_ns")
    field = ranks[0].activity.schema.field(at)
    odd = ranks[0].activity.set_column(at, field, pa.array(ends))
    results = study([replace(ranks[0], activity=odd), *ranks[1:]]).results
    assert stragglers(results) == [2]


@pytest.mark.filterwarnings("error")
def test_a_step_that_no_member_of_a_communicator_has_brings_no_words_of_numpy_s(
    recordings: Path,
) -> None:
    folders = {0: "nsys-2025.3/ddp", 1: "nsys-2025.3/ddp", 2: "nsys-2024.2/pipeline"}
    ranks = [read_report(recordings / at / f"rank{n}.sqlite.xz") for n, at in folders.items()]
    assert stragglers(study(ranks).results) == []
