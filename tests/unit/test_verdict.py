"""The first line: who is late, unless something else costs many times as much."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterprof.analysis.scene import Scene
from clusterprof.analysis.verdict import verdict
from clusterprof.results import Finding


def scene(ranks: tuple[int, ...] = (0, 1)) -> Scene:
    return cast("Scene", SimpleNamespace(ranks=ranks, settled=(3, 4, 5), step_ns=40e6))


def finding(code: str, cost_ms: float, severity: str = "critical") -> Finding:
    made: dict[str, Any] = {"code": code, "severity": severity, "summary": f"{code} is said"}
    return cast("Finding", {**made, "cost_ns_per_step": cost_ms * 1e6})


HOST, STALL = "straggler.host", "input.stall"


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ([finding(HOST, 10), finding(STALL, 3)], f"{HOST} is said"),
        ([finding(STALL, 15), finding(HOST, 10)], f"{HOST} is said"),
        ([finding(STALL, 30), finding(HOST, 3)], f"{STALL} is said; beside that {HOST} is said"),
        ([finding(STALL, 30), finding(HOST, 3, "info")], f"no stragglers; {STALL} is said"),
        (
            [finding(HOST, 3, "info")],
            "no stragglers, and nothing else stands out in 3 settled steps of 40.0 ms",
        ),
    ],
)
def test_the_verdict_is_who_is_late_or_what_costs_far_more(
    findings: list[Finding], said: str
) -> None:
    assert verdict(scene(), findings) == said


def test_of_one_rank_nobody_can_be_late() -> None:
    assert verdict(scene((7,)), [finding(STALL, 30)]).startswith("only rank 7 has a report")
