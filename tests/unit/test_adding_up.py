"""Accounts, operations and findings are of the same moments, each counted once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from simulate import simulate
from simulate.cases import cases

from clusterprof.ingest import gather
from clusterprof.report import summary
from clusterprof.results import Results
from clusterprof.study import study

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"
NAMES = list(json.loads((RECORDINGS / "truth.json").read_text())["recordings"])
KINDS = ["healthy, tensor parallel", "pipeline bubble", "serial AllReduce", "culprit not profiled"]


def jobs() -> Iterator[tuple[str, Results]]:
    for case in cases(KINDS, range(2)):
        ranks, _ = simulate(case.job)
        kept = [r for r in ranks if case.profiled is None or r.rank in case.profiled]
        yield f"{case.kind} {case.seed}", study(kept).results


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_of_a_recording_add_up(name: str) -> None:
    gathered = gather([RECORDINGS / name])
    adds_up(study(gathered.ranks, gathered.missing, gathered.warnings).results)


def test_the_figures_of_simulated_jobs_add_up() -> None:
    for _, results in jobs():
        adds_up(results)


def adds_up(results: Results) -> None:
    steps = summary.evidence_steps(results)[0]
    accounts = [a for s in results["steps"] if s["step"] in steps for a in s["ranks"]]
    for a in accounts:
        parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
        assert sum(a[p] for p in parts) == a["duration_ns"]  # type: ignore[literal-required]
        assert 0 <= a["exposed_wait_ns"] <= a["exposed_communication_ns"] <= a["duration_ns"]
    entries = results["collectives"]["by_operation"]
    for account, operation in [
        ("communication_ns", "communication_ns_per_step"),
        ("exposed_communication_ns", "exposed_ns_per_step"),
        ("exposed_wait_ns", "exposed_wait_ns_per_step"),
    ]:
        each = sum(a[account] for a in accounts)  # type: ignore[literal-required]
        mean = each / len(steps) / len(results["ranks"])
        # each entry is rounded to a nanosecond
        assert sum(e[operation] for e in entries) == pytest.approx(mean, abs=len(entries))  # type: ignore[literal-required]
    for e in entries:
        assert e["exposed_wait_ns_per_step"] <= e["exposed_ns_per_step"]
        assert e["exposed_ns_per_step"] <= e["communication_ns_per_step"]
    figures_of_findings(results)


def figures_of_findings(results: Results) -> None:
    entries = results["collectives"]["by_operation"]
    table = {(e["operation"], e["communicator"]): e for e in entries}
    durations = [s["duration_ns"] for s in results["steps"] if s["settled"]]
    calls = {
        (*g["operations"], g["communicator"]): g["calls_per_step"]
        for g in results["topology"]["groups"]
    }
    for found in results["findings"]:
        assert 0 <= found["cost_ns_per_step"] <= np.mean(durations) + 1
        if found["code"] != "communication.exposed":
            continue
        for row in found["evidence"]:
            entry = table[row["operation"], row["communicator"]]
            assert all(row[key] == entry[key] for key in entry)  # type: ignore[literal-required]
    for key in set(table) & set(calls):
        assert table[key]["calls_per_step"] == calls[key]  # type: ignore[index]
