"""The first line: who is late, unless something else costs many times as much."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from clusterprof.analysis.scene import Scene
from clusterprof.analysis.verdict import verdict
from clusterprof.report import html, text
from clusterprof.results import Finding
from clusterprof.simulate import simulate
from clusterprof.simulate.cases import KINDS, cases
from clusterprof.study import study
from clusterprof.tables import RankTables


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


def test_of_a_job_without_gpus_no_sentence_speaks_of_them() -> None:
    """Every class of job that is simulated, as torch.profiler has it on processors with gloo."""
    speaking = []
    for case in cases(list(KINDS), range(1)):
        made, _ = simulate(case.job)
        kept = [_on_processors(t) for t in made if not case.profiled or t.rank in case.profiled]
        done = study(kept)
        results = {name: done.results[name] for name in ("findings", "verdict", "warnings")}
        page = html.render(done.results, done.collectives, title="a job")
        for said in (json.dumps(results), page, text.render(done.results)):
            speaking += re.findall(r".{0,60}(?:GPU|nvidia|straggler\.gpu).{0,40}", said)
    assert speaking == []


def _on_processors(tables: RankTables) -> RankTables:
    """A rank's report without anything that only a GPU has."""
    activity = tables.activity
    for name in ("correlation", "launch_start_ns", "launch_end_ns", "launch_thread"):
        at = activity.schema.get_field_index(name)
        field = activity.schema.field(at)
        activity = activity.set_column(at, field, pa.nulls(activity.num_rows, field.type))
    kind = tables.host_calls["kind"].cast(pa.string())
    host = tables.host_calls.filter(pc.not_equal(kind, "cuda"))
    info = replace(tables.info, backend="gloo", device="")
    return replace(tables, info=info, activity=activity, host_calls=host)
