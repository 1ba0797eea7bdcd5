"""No finished result says two things of which one must be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contradictions import contradictions
from faces import disagreements
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
    made = studied(recording)
    assert contradictions(made.results) + disagreements(made.results, made.collectives) == []


@pytest.mark.parametrize("seed", long_but([SEED], [0, 1]))
@pytest.mark.parametrize("job_kind", KINDS)
def test_the_results_of_a_simulated_job_do_not_contradict_themselves(
    simulated: Callable[..., Simulated], job_kind: str, seed: int
) -> None:
    made = simulated(job_kind, seed).study
    assert contradictions(made.results) + disagreements(made.results, made.collectives) == []


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


def _sentence(text: str) -> Callable[[Any], None]:
    def say(results: Any) -> None:
        results["findings"][1]["summary"] = text

    return say


def _more_idle(results: Any) -> None:
    for step in results["steps"]:
        step["ranks"][0]["idle_ns"] += 1_000_000


def _another_share(results: Any) -> None:
    results["findings"][0]["share_of_step"] /= 2


def _two_parts_of_one(results: Any) -> None:
    results["critical_path"]["parts"] *= 2


def _another_rank(results: Any) -> None:
    first, second, *_ = results["findings"]
    second["ranks"], first["ranks"] = first["ranks"], [0]
    results["headline"] = [{"code": first["code"], "ranks": [0], "text": "Rank 0 is late."}]


@pytest.mark.parametrize(
    ("say", "found"),
    [
        (_sentence("It takes 50 ms of each 40 ms step (125%)."), "50 ms of a step of 40 ms"),
        (_sentence("It takes 10 ms of each 40 ms step (35%)."), "is not 35%"),
        (_sentence("It waits 99.1 ms per step."), "99.1 ms per step of"),
        (_sentence("There are 5 steps of 63.1 ms."), "a step of 63.1 ms"),
        (_sentence("The repair saves 5 (0.00 to 9) ms, confidence 90%."), "may be nothing"),
        (_sentence("The repair saves 5 ±5 ms, confidence 90%."), "may be nothing"),
        (_sentence("The repair saves 5 ms once host.gil is repaired."), "only after others"),
        (_another_share, "is not 18%"),
        (_two_parts_of_one, "more than all of it"),
        (_more_idle, "parts of"),
        (_another_rank, "is the finding's"),
    ],
)
def test_a_disagreement_on_a_face_is_found(
    studied: Callable[[str], Study], say: Callable[[Results], None], found: str
) -> None:
    made = studied(LATE)
    say(made.results)
    disagreeing = disagreements(made.results, made.collectives)
    assert any(found in each for each in disagreeing), disagreeing
