"""Ten lines for a site's operators."""

from __future__ import annotations

import hardware_sample
import pytest
import report_sample as sample

from clusterprof.report.ticket import ticket
from clusterprof.results import Results

LABELS = ["problem", "who", "node", "GPU", "when", "how", "hardware", "evidence", "measured",
          "command"]  # fmt: skip


def lines(results: Results) -> dict[str, str]:
    page = ticket(results, "runs/x")
    assert page.endswith("\n")
    assert [line.split()[0] for line in page.splitlines()] == LABELS
    return {line.split()[0]: line[10:] for line in page.splitlines()}


def test_a_straggler_is_named_with_its_node_gpu_time_cost_and_command() -> None:
    results = sample.results()
    results["hardware"] = [hardware_sample.row(rank, "gpu-07") for rank in range(4)]
    results["hardware"][2]["uuid"] = "GPU-0123"
    ticket_lines = lines(results)
    assert ticket_lines["problem"] == results["verdict"]
    assert ticket_lines["who"] == "rank 2"
    assert ticket_lines["node"] == "gpu-07 (rank 2)"
    assert "UUID GPU-0123 (rank 2)" in ticket_lines["GPU"]
    assert " UTC, steps 7–9" in ticket_lines["when"]
    assert "repair saves 17.9 ±1.2 ms per step" in ticket_lines["how"]
    assert ticket_lines["hardware"] == "like that of the other ranks"
    assert ticket_lines["command"] == results["findings"][0]["next"]


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    ticket_lines = lines(sample.results())
    assert "UUID unknown (rank 2)" in ticket_lines["GPU"]
    assert ticket_lines["hardware"].startswith("cannot be determined")


def test_without_a_finding_there_is_nothing_to_repair_and_the_report_is_the_command() -> None:
    ticket_lines = lines(sample.healthy())
    assert (ticket_lines["who"], ticket_lines["how"]) == ("nothing", "nothing")
    assert ticket_lines["command"] == "clusterprof report runs/x"


def test_where_stragglers_cannot_be_determined_the_ticket_does_not_say_nothing() -> None:
    results = sample.healthy()
    results["headline"] = [{"code": "unknown", "ranks": [], "text": "Not enough steps."}]
    results["verdict"] = "Not enough steps."
    ticket_lines = lines(results)
    assert (ticket_lines["who"], ticket_lines["how"]) == ("cannot be determined",) * 2


def test_the_rows_of_the_evidence_are_told_with_their_source_and_interval() -> None:
    results = sample.results()
    results["evidence_table"] = [{
        "number": 1, "source": "looks", "what": "lateness", "ranks": [2], "first_step": 20,
        "last_step": 90, "steps": 60, "value_ns": 7_400_000, "least_ns": 7_300_000,
        "most_ns": 7_500_000, "profiler": False,
    }]  # fmt: skip
    results["findings"][0]["rows"] = [1]
    evidence = lines(results)["evidence"]
    assert (
        evidence == "lateness 7.40 ms (7.30 ms to 7.50 ms) by looks in 60 steps without a profiler"
    )


@pytest.mark.parametrize("name", ["a\nwho  rank 9", "\x1b[2J"])
def test_a_host_s_name_makes_no_line_of_its_own(name: str) -> None:
    lines(sample.results(host=name))


def test_without_any_rank_s_report_it_still_has_ten_lines() -> None:
    results = sample.healthy()
    results["ranks"], results["steps"], results["clock"]["ranks"] = [], [], []
    ticket_lines = lines(results)
    assert ticket_lines["when"] == "cannot be determined"


@pytest.mark.parametrize(
    ("since", "until", "when"),
    [(600, None, "since step 600"), (None, 699, "since the start, until step 699")],
)
def test_a_lateness_by_looks_has_its_steps(since: int, until: int | None, when: str) -> None:
    results = sample.results()
    (suspect, *_) = (results["shallow"] or {"suspects": []})["suspects"]
    suspect |= {"since_step": since, "until_step": until, "looked_steps": 400}
    results["findings"][0]["ranks"], results["findings"][0]["steps"] = [suspect["rank"]], []
    assert lines(results)["when"] == when


def test_a_run_without_findings_compares_no_hardware() -> None:
    results = sample.results() | {"findings": []}
    results["hardware"] = [hardware_sample.row(rank, "gpu-07") for rank in range(4)]
    assert lines(results)["hardware"] == "cannot be determined"
