"""What an assistant is answered, without the protocol around it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_sample as sample

from clusterprof.cli import mcp
from clusterprof.cli.mcp import Answers
from clusterprof.errors import ClusterprofError, ReportError, RunDirectoryError, UsageError
from clusterprof.report import results_json
from clusterprof.results import Results


def merged(folder: Path, name: str, results: Results) -> Answers:
    (folder / name / "merged").mkdir(parents=True)
    results_json.write(folder / name / "merged" / "results.json", results)
    return Answers(folder)


def test_a_cost_is_assumed_a_cause_measured_and_what_is_not_known_is_said_so(
    tmp_path: Path,
) -> None:
    results = sample.results()
    straggler = results["findings"][0]
    texts = ("Rank 2 delays the other ranks.", "Cause: its host blocks.")
    sample.say(results, *((straggler, text) for text in texts), (None, "It cannot be determined."))
    claims = merged(tmp_path, "a", results).verdict("a")["verdict"]
    assert [claim["claim"] for claim in claims] == [*texts, "It cannot be determined."]
    assert [claim["status"] for claim in claims] == ["assumed", "measured", "cannot be determined"]


def test_findings_come_with_their_interval_and_the_rows_of_their_evidence(tmp_path: Path) -> None:
    results = sample.results()
    row: Any = {
        "number": 1, "source": "looks", "what": "lateness", "ranks": [2], "first_step": 20,
        "last_step": 90, "steps": 60, "value_ns": 7_400_000, "least_ns": None, "most_ns": None,
        "profiler": False,
    }  # fmt: skip
    results["evidence_table"] = [row, {**row, "number": 2, "source": "replay"}]
    results["findings"][0]["rows"] = [1, 2]
    found = merged(tmp_path, "a", results).findings("a")["findings"][0]
    assert [row["status"] for row in found["evidence"]] == ["measured", "assumed"]
    assert found["saving"]["ns_per_step"] == results["findings"][0]["saved_ns_per_step"]
    assert found["saving"]["status"] == "assumed"


def test_of_many_findings_the_first_are_answered_and_the_others_counted(tmp_path: Path) -> None:
    results = sample.results()
    results["findings"] = [results["findings"][0]] * 50
    answer = merged(tmp_path, "a", results).findings("a")
    assert (len(answer["findings"]), answer["more"]) == (20, 30)


def test_repairs_that_were_not_replayed_together_cannot_be_determined(tmp_path: Path) -> None:
    results = sample.results()
    results["combined"] = None
    answers = merged(tmp_path, "a", results)
    assert answers.what_if("a", [1])["status"] == "cannot be determined"
    with pytest.raises(UsageError, match="there is no finding 99"):
        answers.what_if("a", [99])


def test_a_bound_that_rests_on_an_assumption_is_assumed(tmp_path: Path) -> None:
    results = sample.results()
    assert merged(tmp_path, "a", results).verdict("a")["clock"]["status"] == "measured"
    results["clock"]["assumed"] = [1]
    assert merged(tmp_path, "b", results).verdict("b")["clock"]["status"] == "assumed"


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "", ".", "link", "\0", 5000 * "a"])
def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, name: str) -> None:
    merged(tmp_path, "other", sample.results())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "other")
    with pytest.raises(UsageError, match="is no run of"):
        Answers(tmp_path / "runs").verdict(name)


def test_a_run_that_was_not_merged_or_is_damaged_is_an_error_and_not_in_the_list(
    tmp_path: Path,
) -> None:
    answers = merged(tmp_path, "whole", sample.results())
    (tmp_path / "bare").mkdir()
    (tmp_path / "spoilt" / "merged").mkdir(parents=True)
    (tmp_path / "spoilt" / "merged" / "results.json").write_text("[]")
    for name in ("bare", "spoilt", "absent"):
        with pytest.raises(ReportError):
            answers.verdict(name)
    assert [run["run"] for run in answers.runs()["runs"]] == ["whole"]
    with pytest.raises(UsageError, match="there is no finding 'nothing'"):
        answers.explain("nothing")


def test_without_a_finding_there_is_no_command(tmp_path: Path) -> None:
    answer = merged(tmp_path, "a", sample.healthy()).next_command("a")
    assert (answer["code"], answer["command"]) == (None, None)


def test_the_schema_takes_results_and_names_each_member() -> None:
    made = mcp.schema()
    members = made["$defs"]["Results"]["properties"]
    assert set(sample.results()) <= set(members)
    assert msgspec.json.decode(msgspec.json.encode(made)) == made


def test_without_the_package_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(ClusterprofError) as error:
        mcp.main("mcp", [str(tmp_path)], None)
    assert "clusterprof[mcp]" in str(error.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="there is no folder"):
        mcp.main("mcp", [str(tmp_path / "absent")], None)
