"""A pipeline's schedule follows from the order of its messages, or is unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulate import Job
from studies import found_in, simulated_job

from clusterprof.results import Finding
from clusterprof.study import Study, dataset_of

PIPE = Job(dp=1, pp=4, layers=16, kernels_per_layer=2, launch_ns=30_000, microbatches=8, steps=4)


def bubble(job: Job, *kept: int) -> Finding:
    ranks = simulated_job(job)
    findings = found_in([r for r in ranks if not kept or r.rank in kept])
    (found,) = [f for f in findings if f["code"] == "pipeline.bubble"]
    return found


@pytest.mark.parametrize(
    ("job", "name", "ideal"),
    [
        (PIPE, "GPipe", 3 / 11),
        (replace(PIPE, one_f_one_b=True), "1F1B", 3 / 11),
        pytest.param(
            replace(PIPE, one_f_one_b=True, microbatches=4), "1F1B", 3 / 7, marks=pytest.mark.long
        ),
        pytest.param(replace(PIPE, pp=2, one_f_one_b=True), "1F1B", 1 / 9, marks=pytest.mark.long),
        pytest.param(replace(PIPE, chunks=2), "interleaved 1F1B", 3 / 19, marks=pytest.mark.long),
        pytest.param(
            replace(PIPE, chunks=4, layer_ns=4 * PIPE.layer_ns),
            "interleaved 1F1B",
            3 / 35,
            marks=pytest.mark.long,
        ),
        (replace(PIPE, pp=3, layers=12, microbatches=6, chunks=2), "interleaved 1F1B", 2 / 14),
    ],
)
def test_the_schedule_is_named_and_a_balanced_pipeline_comes_near_its_ideal(
    job: Job, name: str, ideal: float
) -> None:
    found, step_ns = bubble(job), dataset_of(simulated_job(job)).step_ns
    shown = found["evidence"][-1]
    assert (shown["schedule"], shown["chunks"]) == (name, job.chunks)
    assert shown["microbatches"] == job.microbatches
    assert shown["ideal_share"] == pytest.approx(ideal, abs=1e-4)
    # the waiting is near the ideal, which twice the microbatches would halve
    waits = [row["wait_ns_per_step"] for row in found["evidence"][:-1]]
    assert sum(waits) / len(waits) / step_ns == pytest.approx(ideal, rel=0.25)
    # there is nothing to repair but hosts, stages and transfers, which are others'
    assert found["saving"] is None
    assert found["severity"] == "info"


def test_of_a_subset_of_the_stages_the_schedule_is_that_of_the_whole_pipeline() -> None:
    shown = bubble(replace(PIPE, one_f_one_b=True), 0, 2)["evidence"][-1]
    assert (shown["schedule"], shown["stages"], shown["microbatches"]) == ("1F1B", 4, 8)


@pytest.mark.parametrize(
    ("chunks", "microbatches"), [(3, 4), pytest.param(2, 8, marks=pytest.mark.long)]
)
def test_two_stages_that_interleave_are_not_taken_for_1f1b(chunks: int, microbatches: int) -> None:
    # between two stages the messages come in the same order
    job = replace(PIPE, pp=2, layers=4 * chunks, chunks=chunks, microbatches=microbatches)
    shown = bubble(job)["evidence"][-1]
    assert (shown["schedule"], shown["chunks"]) == ("interleaved 1F1B", chunks)
    assert shown["microbatches"] == microbatches


def test_where_the_messages_fit_two_numbers_of_chunks_the_schedule_is_unknown() -> None:
    # 30 messages: ten microbatches in two chunks, or six in three
    found = bubble(replace(PIPE, pp=2, layers=8, chunks=2, microbatches=10))
    assert [row["schedule"] for row in found["evidence"] if "schedule" in row] == [None]
    assert found["evidence"][-1]["schedule"] is None


@pytest.mark.parametrize(
    ("recording", "name", "stages", "microbatches"),
    [
        ("nsys-2025.3/pipeline-1f1b", "1F1B", 4, 8),
        ("nsys-2025.3/pipeline-imbalance", "1F1B", 4, 8),
        ("nsys-2024.2/pipeline", "GPipe", 2, 4),
    ],
)
def test_the_schedule_of_a_recording_is_the_one_that_its_program_ran(
    studied: Callable[[str], Study], recording: str, name: str, stages: int, microbatches: int
) -> None:
    results = studied(recording).results
    (found,) = [f for f in results["findings"] if f["code"] == "pipeline.bubble"]
    shown = found["evidence"][-1]
    assert (shown["schedule"], shown["stages"], shown["microbatches"]) == (
        name,
        stages,
        microbatches,
    )
