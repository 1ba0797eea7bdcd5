"""results.json: deterministic when written, checked when read."""

from __future__ import annotations

import json
import runpy
import zlib
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

import pytest
import report_sample as sample
from hardware_sample import row
from jsonschema import Draft202012Validator

from clusterprof.analysis.findings import evidence_table
from clusterprof.baselines import BASELINE_VERSION
from clusterprof.comparison import COMPARISON_VERSION
from clusterprof.errors import ReportError, RunDirectoryError
from clusterprof.hardware import with_energy
from clusterprof.report import results_json
from clusterprof.results import SCHEMA_VERSION, Baseline, Comparison, Results, Verification
from clusterprof.verification import VERIFICATION_VERSION

ROOT = Path(__file__).resolve().parent.parent.parent


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
        return {name: _form(of) for name, of in sorted(get_type_hints(kind).items())}
    return [_form(each) for each in get_args(kind)] or str(kind)


@pytest.mark.parametrize(
    ("kind", "version", "checksum"),
    [(Results, SCHEMA_VERSION, (3, 2128378411)), (Baseline, BASELINE_VERSION, (2, 3126794896)),
     (Comparison, COMPARISON_VERSION, (2, 2801354193)),
     (Verification, VERIFICATION_VERSION, (1, 1496734217))],
)  # fmt: skip
def test_a_version_is_raised_with_its_form(
    kind: type, version: int, checksum: tuple[int, int]
) -> None:
    """Else files of an earlier form are called incomplete, and not of another version."""
    assert (version, zlib.crc32(json.dumps(_form(kind)).encode())) == checksum


def test_the_published_schema_is_that_of_the_types() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "results_schema.py"))["text"]()
    assert made == (ROOT / "docs" / "results.schema.json").read_text(), "run: make schema"


def test_the_published_schema_takes_what_is_written_and_no_value_beyond_its_range() -> None:
    validator = Draft202012Validator(json.loads((ROOT / "docs/results.schema.json").read_text()))
    assert validator.is_valid(json.loads(results_json.dumps(whole())))
    damages: list[tuple[list[str | int], object]] = [
        (["ranks", 0, "rank"], -1), (["findings", 0, "confidence"], 1.5),
        (["evidence_table", 0, "source"], "hearsay"), (["clock"], None),
    ]  # fmt: skip
    for path, value in damages:
        assert not validator.is_valid(json.loads(_damaged(path, value)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError) as caught:
        results_json.read(tmp_path / "results.json")
    assert str(tmp_path / "results.json") in str(caught.value)


def whole() -> Results:
    """Results with all that may be missing."""
    made = sample.paused()
    assert made["shallow"]
    made["shallow"]["watch"] = {
        "looks": 3, "first_step": 100, "last_step": 400, "steps": 300, "step_ns": 61_000_000,
        "late": [{"rank": 2, "steps": 40}],
    }  # fmt: skip
    rows = [row(rank, f"node{rank}") for rank in range(2)]
    made["hardware"] = with_energy(rows, sample.STEP_NS)
    made["run_size"] = {"steps": 100_000, "gpus": 64, "gpu_hour": 2.5}
    evidence_table.add_to(made)
    return made


def _damaged(path: list[str | int], value: Any) -> bytes:
    results: Any = json.loads(results_json.dumps(whole()))
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
        (["ranks", 0, "rank"], -1, "ranks[0].rank", "`int` >= 0"),
        (["shallow", "watch", "first_step"], -5, "shallow.watch.first_step", "`int` >= 0"),
        (["shallow", "watch", "first_step"], 401, "shallow.watch",
         "`first_step` 401 is beyond `last_step` 400"),
        (["shallow", "watch", "late", 0, "rank"], 90, "shallow.watch.late[0]",
         "Rank 90 is none of 8 ranks"),
        (["shallow", "suspects", 1, "rank"], 8, "shallow.suspects[1]", "Rank 8 is none of 8 ranks"),
        (["findings", 0, "share_of_step"], 1.01, "findings[0].share_of_step", "`float` <= 1.0"),
        (["findings", 0, "saved_least_ns"], 1 << 60, "findings[0].saved_least_ns",
         "`int` <= 9007199254740992"),
        (["findings", 0, "rows"], [99], "findings[0]", "Row 99 is none of "),
        (["headline", 0, "rows"], [0], "headline[0].rows[0]", "`int` >= 1"),
        (["evidence_table", 0, "first_step"], 90, "evidence_table[0]", "`first_step` 90 is beyond"),
        (["evidence_table", 0, "first_step"], -1, "evidence_table[0]", "No step has the number -1"),
        (["evidence_table", 0, "steps"], -1, "evidence_table[0].steps", "`int` >= 0"),
        (["evidence_table", 0, "source"], "hearsay", "evidence_table[0].source", "'hearsay'"),
        (["hardware", 0, "steal", "median"], 1.5, "hardware[0].steal.median", "`float` <= 1.0"),
        (["hardware", 1, "memory_pressure", "median"], 100.5,
         "hardware[1].memory_pressure.median", "`float` <= 100.0"),
        (["hardware", 0, "working_samples"], 99, "hardware[0]", "`working_samples` 99 is beyond"),
        (["hardware", 0, "power_w"], -1.0, "hardware[0].power_w", "`float` >= 0.0"),
        (["run_size", "gpus"], 0, "run_size.gpus", "`int` >= 1"),
        (["run_size", "gpu_hour"], 1.7e308, "run_size.gpu_hour", "`float` <= 1e+300"),
        (["pauses", "entries", 0, "share_of_run"], 1.2, "pauses.entries[0].share_of_run",
         "`float` <= 1.0"),
        (["pauses", "entries", 1, "most_ns"], 1, "pauses.entries[1]", "is beyond `most_ns` 1"),
        (["pauses", "entries", 1, "ranks"], [8], "pauses.entries[1]", "Rank 8 is none of 8 ranks"),
        (["pauses", "run_ns"], 0, "pauses.run_ns", "`int` >= 1"),
        (["pace", "step_ns"], 0, "pace.step_ns", "`int` >= 1"),
        (["steps", 0, "duration_ns"], -1, "steps[0].duration_ns", "`int` >= 0"),
    ],
)  # fmt: skip
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
    assert "next: write it again with clusterprof merge RUN" in text


def test_all_that_may_be_missing_is_read_back(tmp_path: Path) -> None:
    results_json.write(tmp_path / "results.json", whole())
    assert results_json.read(tmp_path / "results.json") == whole()


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999", b"-1e400"])
def test_what_is_no_number_of_json_is_refused(number: bytes, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(_damaged(["run_size", "gpu_hour"], 2.75).replace(b"2.75", number))
    with pytest.raises(ReportError, match="is not JSON"):
        results_json.read(file)


def test_keys_of_a_later_minor_version_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(_damaged(["findings", 0, "group"], "network"))
    assert results_json.read(file)["findings"][0]["group"] == "network"  # type: ignore[typeddict-item]
