"""results.json: deterministic when written, checked when read."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

import pytest
import report_sample as sample

from clusterprof.baselines import BASELINE_VERSION
from clusterprof.comparison import COMPARISON_VERSION
from clusterprof.errors import ReportError, RunDirectoryError
from clusterprof.report import results_json
from clusterprof.results import SCHEMA_VERSION, Baseline, Comparison, Results, Verification
from clusterprof.verification import VERIFICATION_VERSION


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    results_json.write(tmp_path / "results.json", sample.results())
    assert results_json.read(tmp_path / "results.json") == sample.results()


def test_the_file_ends_in_a_newline_and_starts_with_its_version() -> None:
    written = results_json.dumps(sample.results())
    assert written.endswith(b"}\n")
    assert next(iter(json.loads(written))) == "schema_version"


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    results_json.write(tmp_path / "results.json", sample.results())
    results_json.write(tmp_path / "results.json", sample.healthy())
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        results_json.write(tmp_path / "absent" / "results.json", sample.results())
    assert str(tmp_path / "absent") in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError):
        results_json.write(tmp_path / "file" / "results.json", sample.results())


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[]", "no schema_version"),
        (b"{}", "no schema_version"),
        (b'{"schema_version": 1}', "schema version 1, "),
        (b'{"schema_version": 2}', "schema version 2, this clusterprof reads 3"),
        (b'{"schema_version": 4}', "schema version 4, "),
        (b'{"schema_version": "1"}', "schema version '1', "),
        (b'{"schema_version": 3}', "clusterprof_version"),
    ],
)
def test_what_is_not_a_results_json_is_refused(content: bytes, fact: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=fact) as caught:
        results_json.read(path)
    assert str(path) in str(caught.value)
    assert "next: " in str(caught.value)


def _form(kind: Any) -> Any:
    """A type of the contract with all that is in it: lists, members, members' members."""
    if is_typeddict(kind):
        return {name: _form(of) for name, of in get_type_hints(kind).items()}
    return [_form(each) for each in get_args(kind)] or str(kind)


@pytest.mark.parametrize(
    ("kind", "version", "checksum"),
    [(Results, SCHEMA_VERSION, (3, 1781886181)), (Baseline, BASELINE_VERSION, (2, 588375602)),
     (Comparison, COMPARISON_VERSION, (2, 724228594)),
     (Verification, VERIFICATION_VERSION, (1, 3872323734))],
)  # fmt: skip
def test_a_version_is_raised_with_its_form(
    kind: type, version: int, checksum: tuple[int, int]
) -> None:
    """Else files of an earlier form are called incomplete, and not of another version."""
    assert (version, zlib.crc32(json.dumps(_form(kind)).encode())) == checksum


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError) as caught:
        results_json.read(tmp_path / "results.json")
    assert str(tmp_path / "results.json") in str(caught.value)


def _damaged(path: list[str | int], value: Any) -> bytes:
    results: Any = json.loads(results_json.dumps(sample.results()))
    place = results
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(results).encode()


@pytest.mark.parametrize(
    ("path", "value", "place", "kind"),
    [
        (["steps", 1, "duration_ns"], "61", "steps[1].duration_ns", "`int`, got `str`"),
        (["steps", 0, "ranks"], {}, "steps[0].ranks", "`array`, got `object`"),
        (["findings", 0, "severity"], "bad", "findings[0].severity", "enum value 'bad'"),
        (["findings", 0, "confidence"], True, "findings[0].confidence", "`float`, got `bool`"),
        (["findings", 0, "evidence", 0], 1, "findings[0].evidence[0]", "`object`, got `int`"),
        (["clock"], None, "clock", "`object`, got `null`"),
        (["ranks", 0, "world_size"], 1.5, "ranks[0].world_size", "`int | null`, got `float`"),
    ],
)
def test_damage_is_refused_with_its_place(
    path: list[str | int], value: Any, place: str, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(_damaged(path, value))
    with pytest.raises(ReportError) as caught:
        results_json.read(file)
    text = str(caught.value)
    assert f"`$.{place}`" in text
    assert kind in text
    assert str(file) in text


def test_keys_of_a_later_minor_version_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(_damaged(["findings", 0, "group"], "network"))
    assert results_json.read(file)["findings"][0]["group"] == "network"  # type: ignore[typeddict-item]
