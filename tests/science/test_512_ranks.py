"""What docs/512-ranks.md shows is what clusterprof says of that simulated job."""

from __future__ import annotations

from pathlib import Path

from simulate import Cause, Job, simulate

from clusterprof.report.summary import saved_text
from clusterprof.study import study

PAGE = Path(__file__).resolve().parents[2] / "docs" / "512-ranks.md"
JOB = Job(dp=64, tp=8, layers=12, synchronous=True, causes=(Cause("host", 301, 8_000_000),))


def test_the_verdict_of_the_page_is_that_of_four_ranks_of_the_simulated_job() -> None:
    ranks, _ = simulate(JOB)
    results = study([ranks[rank] for rank in (5, 293, 300, 301)], source="reports").results
    assert f"```text\n{results['verdict']}\n```" in PAGE.read_text("utf-8")
    saved = saved_text(results["findings"][0])
    assert f"Its repair saves {saved} per step" in PAGE.read_text("utf-8")
