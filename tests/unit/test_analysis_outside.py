"""A host that is late inside the window only: the step logs of the rest of the job tell."""

from __future__ import annotations

import numpy as np
import pytest
from simulate import Cause, Job, simulate

from clusterprof.analysis.model import host_gaps
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.timeline import timeline
from clusterprof.results import CaptureCost, Finding
from clusterprof.study import study

MS = 1_000_000


def capture(before_ms: float | None, after_ms: float | None) -> CaptureCost:
    def ns(ms: float | None) -> int | None:
        return None if ms is None else round(ms * MS)

    return {
        "stall_start_ns": 500 * MS,
        "stall_stop_ns": 50 * MS,
        "profiled": {"before_ns": ns(before_ms), "inside_ns": None, "after_ns": ns(after_ms)},
        "unprofiled": None,
    }


def late_host(
    cost: CaptureCost | None, ms: int = 40, steps: tuple[int, ...] | None = None
) -> Finding:
    """The finding about rank 1, whose host is `ms` late in `steps` (None: all)."""
    job = Job(steps=10, causes=(Cause("host", rank=1, extra_ns=ms * MS, steps=steps),))
    found = study(simulate(job)[0], capture=cost).results["findings"]
    return next(f for f in found if f["code"] == "straggler.host")


def usual_ms() -> float:
    job = Job(steps=10, causes=(Cause("host", rank=1, extra_ns=40 * MS),))
    steps = [s for s in study(simulate(job)[0]).results["steps"] if s["settled"]]
    return sorted(s["duration_ns"] for s in steps)[len(steps) // 2] / MS


def test_steps_that_are_as_long_outside_leave_the_verdict() -> None:
    assert late_host(capture(usual_ms(), usual_ms())) == late_host(None)


def no_gap(dataset: Dataset) -> np.ndarray:
    """As if what a host loses were lost in all of its calls, and not at one stretch."""
    return np.full((len(dataset.ranks), len(dataset.steady_steps)), 0.5 * MS)


def test_a_host_that_is_late_inside_only_is_information(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_gaps, "longest", no_gap)
    found = late_host(capture(usual_ms() - 44, usual_ms() - 45))
    assert found["severity"] == "info"
    assert found["evidence"][-1]["slower_ns"] == pytest.approx(44 * MS, rel=0.01)
    assert "44.0 ms" in found["summary"]


def test_a_host_that_is_away_at_one_stretch_is_late_by_its_own_doing() -> None:
    assert late_host(capture(usual_ms() - 44, usual_ms() - 45))["severity"] != "info"


def test_the_longest_stretch_is_the_planted_sleep() -> None:
    job = Job(steps=10, causes=(Cause("host", rank=1, extra_ns=40 * MS),))
    made = study(simulate(job)[0])
    lines = [timeline(tables) for tables in made.ranks]
    steps = tuple(s["step"] for s in made.results["steps"] if s["settled"])
    dataset = Dataset(made.ranks, lines, made.accounts, made.collectives, made.clock, steps, "")
    assert 38 * MS < host_gaps.excess(dataset, 1) < 42 * MS
    assert host_gaps.excess(dataset, 0) < 2 * MS


@pytest.mark.parametrize(
    "cost",
    [
        None,
        capture(None, None),
        capture(usual_ms() - 44, usual_ms()),
        capture(usual_ms() - 5, None),
    ],
    ids=["no logs", "no steps outside", "after the window it is as slow", "less than it costs"],
)
def test_what_the_capture_does_not_explain_is_named(
    cost: CaptureCost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_gaps, "longest", no_gap)
    assert late_host(cost)["severity"] != "info"


def test_a_host_that_is_late_now_and_then_is_not_explained_by_usual_steps() -> None:
    healthy = [s["duration_ns"] for s in study(simulate(Job(steps=10))[0]).results["steps"][1:]]
    usual = min(healthy) / MS - 1
    assert late_host(capture(usual, usual), ms=150, steps=(9, 12))["severity"] != "info"
