"""Fifty questions about ten recordings, asked by a client over MCP, against their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from studies import studied

from clusterprof.cli.mcp import server
from clusterprof.report import results_json
from clusterprof.report.summary import Summary
from clusterprof.results import Results

anyio = pytest.importorskip("anyio")
client = pytest.importorskip("mcp.client.client")

RUNS = [
    *(f"nsys-2025.3/{name}" for name in (
        "ddp", "ddp-host-straggler", "ddp-gpu-straggler", "ddp-intermittent", "pipeline-imbalance",
        "loader-stall", "item-sync")),
    "kineto/pipeline", "kineto/gloo", "nsys-2024.2/pipeline",
]  # fmt: skip
Answer = dict[str, Any]


@pytest.mark.parametrize("recording", RUNS)
def test_five_questions_of_a_run_are_answered_as_its_results_say(
    recording: str, tmp_path: Path
) -> None:
    results = studied(recording).results
    for name in ("one", "two"):
        (tmp_path / name / "merged").mkdir(parents=True)
        results_json.write(tmp_path / name / "merged" / "results.json", results)
    questions: list[tuple[str, Answer]] = [
        ("runs", {}),
        ("verdict", {"run": "one"}),
        ("findings", {"run": "one"}),
        ("what_if", {"run": "one", "repaired": [1] if results["findings"] else []}),
        ("next_command", {"run": "one"}),
    ]
    answers = anyio.run(asked, tmp_path, questions)
    for check, answer in zip((listed, judged, weighed, repaired, advised), answers, strict=True):
        check(results, answer)


async def asked(folder: Path, questions: list[tuple[str, Answer]]) -> list[Answer]:
    """The answer to each question, in order."""
    answers = []
    async with client.Client(server(folder)) as session:
        for tool, given in questions:
            answer = await session.call_tool(tool, given)
            assert not answer.is_error, answer
            answers.append(answer.structured_content)
    return answers


def listed(results: Results, answer: Answer) -> None:
    assert [run["run"] for run in answer["runs"]] == ["one", "two"]
    assert {run["verdict"] for run in answer["runs"]} == {results["verdict"]}


def judged(results: Results, answer: Answer) -> None:
    assert " ".join(claim["claim"] for claim in answer["verdict"]) == results["verdict"]
    unknown = [claim["status"] == "cannot be determined" for claim in answer["verdict"]]
    expected = [s["code"] == "unknown" or "cannot be det" in s["text"] for s in results["headline"]]
    assert unknown == expected
    assert answer["measured"] == dict(Summary(results).measured)


def weighed(results: Results, answer: Answer) -> None:
    for finding, claim in zip(results["findings"], answer["findings"], strict=True):
        assert (claim["code"], claim["ranks"]) == (finding["code"], finding["ranks"])
        for key in ("ns_per_step", "alone_ns", "least_ns", "most_ns"):
            assert claim["saving"][key] == finding[f"saved_{key}"]  # type: ignore[literal-required]
        assert (claim["saving"]["status"] == "assumed") == (finding["saving"] is not None)


def repaired(results: Results, answer: Answer) -> None:
    combined = results["combined"]
    causes = combined["findings"] if combined else []
    first = [(f["code"], f["ranks"]) for f in results["findings"][:1]]
    places = [n for n, cause in enumerate(causes) if (cause["code"], cause["ranks"]) in first]
    if combined is None or len(places) < len(first):
        assert answer["status"] == "cannot be determined"
        return
    remaining_ns = combined["remaining_ns"][sum(1 << place for place in places)]
    assert answer["remaining_step_ns"] == remaining_ns
    assert answer["saved_ns"] == combined["remaining_ns"][0] - remaining_ns


def advised(results: Results, answer: Answer) -> None:
    leading = Summary(results).leading
    expected = (leading["code"], leading["next"] or None) if leading else (None, None)
    assert (answer["code"], answer["command"]) == expected


def test_each_tool_says_that_it_reads_only_and_an_error_is_an_answer(tmp_path: Path) -> None:
    async def look() -> tuple[list[Any], Any]:
        async with client.Client(server(tmp_path)) as session:
            tools = (await session.list_tools()).tools
            return tools, await session.call_tool("verdict", {"run": "../x"})

    tools, wrong = anyio.run(look)
    assert len(tools) == 7
    assert all(tool.annotations.read_only_hint for tool in tools)
    assert wrong.is_error
    assert "is no run of" in wrong.content[0].text
