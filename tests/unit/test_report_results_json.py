"""results.json: deterministic when written, checked when read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import report_sample as sample

from clusterprof.errors import ReportError, RunDirectoryError
from clusterprof.report import results_json


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    results_json.write(tmp_path / "results.json", sample.results())
    assert results_json.read(tmp_path / "results.json") == sample.results()


def test_the_same_results_in_another_order_give_the_same_bytes() -> None:
    shuffled = copy.deepcopy(sample.results())
    for part in (shuffled["ranks"], shuffled["steps"], shuffled["findings"]):
        part.reverse()
    for step in shuffled["steps"]:
        step["ranks"].reverse()
    shuffled["clock"]["ranks"].reverse()
    shuffled["collectives"]["by_operation"].reverse()
    before = copy.deepcopy(shuffled)
    assert results_json.dumps(shuffled) == results_json.dumps(sample.results())
    assert shuffled == before, "writing must not change what it writes"


def test_the_file_ends_in_a_newline_and_starts_with_its_version() -> None:
    written = results_json.dumps(sample.results())
    assert written.endswith(b"}\n")
    assert next(iter(json.loads(written))) == "schema_version"


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    results_json.write(tmp_path / "results.json", sample.results())
    results_json.write(tmp_path / "results.json", sample.healthy())
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be written") as caught:
        results_json.write(tmp_path / "absent" / "results.json", sample.results())
    assert str(tmp_path / "absent") in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError):
        results_json.write(tmp_path / "file" / "results.json", sample.results())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "results.json is empty"),
        (b"{", "is not JSON"),
        (b"[]", "holds no results of clusterprof"),
        (b"{}", "holds no results of clusterprof"),
        (b'{"schema_version": 2}', "has schema version 2, this clusterprof reads 1"),
        (b'{"schema_version": "1"}', "has schema version '1', this clusterprof reads 1"),
        (b'{"schema_version": 1}', "is not complete: clusterprof_version is missing"),
    ],
)
def test_what_is_not_a_results_json_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=message) as caught:
        results_json.read(path)
    assert str(path) in str(caught.value)
    assert "next: " in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot read"):
        results_json.read(tmp_path / "results.json")


def _damaged(path: list[str | int], value: Any) -> bytes:
    results: Any = json.loads(results_json.dumps(sample.results()))
    place = results
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(results).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["steps", 1, "duration_ns"], "61", r"steps\[1\].duration_ns should be a whole number"),
        (["steps", 0, "ranks"], {}, r"steps\[0\].ranks should be a list"),
        (["findings", 0, "severity"], "bad", r"findings\[0\].severity should be one of critical"),
        (["findings", 0, "confidence"], True, r"confidence should be a number"),
        (["findings", 0, "evidence", 0], 1, r"evidence\[0\] should be an object"),
        (["clock"], None, "clock should be an object"),
        (["ranks", 0, "world_size"], 1.5, "world_size should be a whole number"),
    ],
)
def test_damage_is_refused_with_its_place(
    path: list[str | int], value: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(_damaged(path, value))
    with pytest.raises(ReportError, match=message):
        results_json.read(file)


def test_keys_of_a_later_minor_version_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(_damaged(["findings", 0, "group"], "network"))
    assert results_json.read(file)["findings"][0]["group"] == "network"  # type: ignore[typeddict-item]
