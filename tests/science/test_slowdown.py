"""How uneven a job is: S, S_t, S_w, M_W and M_S."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulate import Cause, Job, simulate

from clusterprof.analysis.model import measures
from clusterprof.results import Slowdown
from clusterprof.study import Study, dataset_of

MS = 1_000_000


@pytest.fixture
def of(studied: Callable[[str], Study]) -> Callable[[str], Slowdown]:
    """How uneven a recording is."""
    return lambda name: measures.slowdown(studied(name).dataset)


def most(found: Slowdown) -> tuple[str, int]:
    """The kind and the rank that alone make the job slowest."""
    kind = max(found["S_t"], key=lambda entry: entry["slowdown"])
    return kind["what"], max(found["S_w"], key=lambda entry: entry["slowdown"])["rank"]


@pytest.mark.parametrize(
    ("recording", "kind", "rank"),
    [
        pytest.param("nsys-2025.3/ddp-gpu-straggler", "compute", 1, marks=pytest.mark.long),
        ("nsys-2025.3/ddp-host-straggler", "host", 2),
        pytest.param("nsys-2025.3/ddp-host-hidden", "host", 2, marks=pytest.mark.long),
        ("nsys-2025.3/moe-tokens", "compute", 0),
    ],
)
def test_the_straggler_alone_makes_the_job_as_slow_as_it_is(
    of: Callable[[str], Slowdown], recording: str, kind: str, rank: int
) -> None:
    found = of(recording)
    assert most(found) == (kind, rank)
    worst = max(entry["slowdown"] for entry in found["S_w"])
    assert found["S"] == pytest.approx(worst, rel=0.01)
    assert found["M_W"] == pytest.approx(1, abs=0.12)
    assert found["left_out"] == ""


@pytest.mark.parametrize("recording", ["nsys-2025.3/compile"])
def test_an_even_job_has_no_slowdown_and_no_share_of_one(
    of: Callable[[str], Slowdown], recording: str
) -> None:
    found = of(recording)
    assert found["S"] == pytest.approx(1, abs=0.005)
    assert (found["M_W"], found["M_S"]) == (None, None)


@pytest.mark.parametrize("recording", ["nsys-2025.3/pipeline-imbalance"])
def test_the_last_stage_with_more_layers_is_the_whole_slowdown(
    of: Callable[[str], Slowdown], recording: str
) -> None:
    assert of(recording)["M_S"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-gpu-straggler"])
def test_a_job_without_stages_has_no_slowdown_by_one(
    of: Callable[[str], Slowdown], recording: str
) -> None:
    assert of(recording)["M_S"] is None


def test_the_ideal_step_is_the_simulated_job_s_without_its_cause_but_for_the_mean() -> None:
    def step(causes: tuple[Cause, ...]) -> Slowdown:
        job = Job(dp=4, tp=1, synchronous=True, causes=causes)
        return measures.slowdown(dataset_of(simulate(job)[0]))

    even, late = step(()), step((Cause("host", 2, 16 * MS),))
    assert even["ideal_step_ns"] is not None
    assert late["ideal_step_ns"] is not None
    # a quarter of the delay is what each of four ranks would have of it
    assert late["ideal_step_ns"] - even["ideal_step_ns"] == pytest.approx(4 * MS, rel=0.1)


def test_what_is_too_large_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of(simulate(Job(dp=8, layers=2, steps=4, synchronous=True))[0])
    whole = measures.slowdown(dataset)
    assert len(whole["S_w"]) == 8
    monkeypatch.setattr(measures, "_MOST", 8 * measures._size(measures.what_ifs(dataset).job))  # type: ignore[union-attr]
    some = measures.slowdown(dataset)
    assert (some["S"], some["S_t"], some["S_w"]) == (whole["S"], whole["S_t"], [])
    assert "8 ranks" in some["left_out"]
    monkeypatch.setattr(measures, "_MOST", 1)
    none = measures.slowdown(dataset)
    assert (none["S"], none["S_t"], none["S_w"]) == (None, [], [])
    assert "8 ranks" in none["left_out"]


def test_nothing_is_said_where_even_work_would_make_steps_longer() -> None:
    ranks, _ = simulate(Job(steps=8, launch_ns=900_000, host_noise_frac=0.5))
    found = measures.slowdown(dataset_of(ranks))
    assert found["S"] is None
    assert "would take longer" in found["left_out"]
