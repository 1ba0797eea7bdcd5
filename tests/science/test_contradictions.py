"""No finished result says two things of which one must be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contradictions import contradictions
from lab.tiers import long_but
from simulate.cases import KINDS
from studies import NAMES, SEED, Simulated

from clusterprof.results import Results
from clusterprof.study import Study

LATE = "nsys-2025.3/ddp-host-straggler"


@pytest.mark.parametrize("recording", NAMES)
def test_the_results_of_a_recording_do_not_contradict_themselves(
    studied: Callable[[str], Study], recording: str
) -> None:
    assert contradictions(studied(recording).results) == []


@pytest.mark.parametrize("seed", long_but([SEED], [0, 1]))
@pytest.mark.parametrize("job_kind", KINDS)
def test_the_results_of_a_simulated_job_do_not_contradict_themselves(
    simulated: Callable[..., Simulated], job_kind: str, seed: int
) -> None:
    assert contradictions(simulated(job_kind, seed).study.results) == []


def _as_unsure_as_large(results: Any) -> None:
    results["findings"][0]["saved_least_ns"] = 0


def _unmatched(results: Any) -> None:
    results["collectives"]["matched"] = 0


def _unknown(results: Any) -> None:
    results["warnings"].append("ranks 1–3: who was late cannot be determined")


def _beyond(results: Any) -> None:
    results["findings"][0]["summary"] = results["verdict"] = "It takes 166% of the step."


def _may(results: Any) -> None:
    results["verdict"] = "Rank 0 may delay the other ranks."


@pytest.mark.parametrize("say", [_as_unsure_as_large, _unmatched, _unknown, _beyond, _may])
def test_a_contradiction_is_found(
    studied: Callable[[str], Study], say: Callable[[Results], None]
) -> None:
    results = studied(LATE).results
    say(results)
    assert contradictions(results)
