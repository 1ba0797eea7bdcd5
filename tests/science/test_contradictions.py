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


def _louder(results: Any) -> None:
    results["findings"][0]["saved_least_ns"] = results["pace"]["step_ns"] // 100


def _partly(results: Any) -> None:
    for group in results["topology"]["groups"]:
        group["size"] = len(group["ranks"]) + 1
    results["findings"][0]["evidence"] = [
        {"communicator": results["topology"]["groups"][0]["communicator"]}
    ]
    results["findings"][0]["summary"] = "Exposed transfers take 9 ms, waiting excluded."


def _matched(results: Any) -> None:
    results["verdict"] = "Stragglers cannot be determined."
    results["findings"] = []


def _denied(results: Any) -> None:
    results["headline"] = [{"code": "none", "ranks": [], "text": "No stragglers."}]


def _of_no_finding(results: Any) -> None:
    results["headline"][0]["ranks"] = [0]


def _more_alone(results: Any) -> None:
    results["findings"][0]["saved_alone_ns"] = 2 * results["pace"]["step_ns"]


def _drawn(results: Any) -> None:
    results["combined"]["remaining_ns"][1] = results["combined"]["remaining_ns"][0]


def _share_of_a_slowdown(results: Any) -> None:
    results["what_if"]["M_W"] = 1.2


def _idle(results: Any) -> None:
    results["findings"][0]["summary"] = "GPUs idle up to 900 ms per step in it (rank 0)."


def _may(results: Any) -> None:
    results["verdict"] = "Rank 0 may delay the other ranks."


@pytest.mark.parametrize(
    ("say", "found"),
    [
        (_as_unsure_as_large, "and saves 0 to"),
        (_louder, "saves at least 1.0%"),
        (_unmatched, "without a matched collective"),
        (_partly, "members of"),
        (_unknown, "beside a straggler"),
        (_matched, "all collectives match"),
        (_denied, "No stragglers"),
        (_of_no_finding, "not among the findings"),
        (_beyond, "166%"),
        (_more_alone, "alone saves"),
        (_drawn, "where it is chosen"),
        (_share_of_a_slowdown, "above all of the slowdown"),
        (_idle, "ms in all"),
        (_may, "may delay"),
    ],
)
def test_a_contradiction_is_found(
    studied: Callable[[str], Study], say: Callable[[Results], None], found: str
) -> None:
    results = studied(LATE).results
    say(results)
    assert any(found in each for each in contradictions(results)), contradictions(results)
