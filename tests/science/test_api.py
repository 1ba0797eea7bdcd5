"""A merged run in Python: its frames, what-ifs, the notebook, and what is refused."""

from __future__ import annotations

import builtins
import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_sample import results as sample

import clusterprof
from clusterprof import api
from clusterprof.align.lateness import SHALLOW
from clusterprof.cli import merge
from clusterprof.errors import ReportError, UsageError
from clusterprof.report import results_json

ROOT = Path(__file__).resolve().parents[2]
RECORDING = "nsys-2025.3/ddp-host-straggler"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, recordings: Path) -> Path:
    """The recording of a late host, merged."""
    made = tmp_path_factory.mktemp("api") / "example"
    assert merge.main("merge", [str(recordings / RECORDING), "--output", str(made)], None) == 0
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> api.Run:
    return clusterprof.load(folder)


def test_each_frame_has_the_columns_of_its_schema(run: api.Run) -> None:
    for name, schema in api.SCHEMAS.items():
        frame: pd.DataFrame = (
            run.what_if("host", ranks=[2]) if name == "what_if" else getattr(run, name)
        )
        assert list(frame.columns) == schema.names
        assert all(isinstance(kind, pd.ArrowDtype) for kind in frame.dtypes)
        assert len(frame) or name == "shallow"
    assert list(run.shallow.columns) == SHALLOW.names


def test_frames_say_what_the_report_says(run: api.Run) -> None:
    first = run.findings.iloc[0]
    assert (first["code"], first["rank"]) == ("straggler.host", 2)
    assert run.steps.query("steady")["step"].unique().tolist() == [7, 8, 9]
    parts = run.steps[["compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns"]]
    assert (parts.sum(axis=1) == run.steps["duration_ns"]).all()
    assert run.kernels["rank"].unique().tolist() == [0, 1, 2, 3]
    assert run.verdict.startswith("Rank 2 delays")
    assert "Rank 2 delays" in repr(run)


def test_a_what_if_of_a_finding_saves_what_the_finding_says(run: api.Run) -> None:
    (row,) = run.what_if("host", ranks=[2]).to_dict("records")
    first = run.findings.iloc[0]
    assert row["saved_ns"] == first["saved_ns_per_step"]
    assert row["saved_uncertainty_ns"] == first["saved_uncertainty_ns"]
    assert row["step_ns"] - row["without_ns"] == pytest.approx(row["saved_ns"], abs=1)
    every = run.what_if()
    assert every.loc[every["saved_ns"].idxmax(), "who"] == "rank 2"
    assert len(every) == 8


def test_who_and_what_can_be_chosen(run: api.Run) -> None:
    assert run.what_if("host", ranks=[0, 1, 2, 3])["saved_ns"].isna().all()
    assert run.what_if("gpu", by="host", times=0.5)["who"].tolist() == ["host vm"]
    assert run.what_if("gpu", by="stage", times=1.0)["saved_ns"].tolist() == [0]
    halved = run.what_if(["gpu", "communication", "copy", "host"], times=0.5)
    assert halved["who"].tolist() == ["all ranks"] * 4
    assert (halved["saved_ns"] >= 0).all()
    assert (halved["without_ns"] > 0).all()


@pytest.mark.parametrize(
    "wrong",
    [{"what": "disk"}, {"what": "copy"}, {"ranks": [9]}, {"ranks": []}, {"times": -1.0},
     {"times": float("nan")}, {"by": "rack"}],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(run: api.Run, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        run.what_if(**wrong)


def test_every_column_has_a_meaning_and_is_documented() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    documented = runpy.run_path(str(ROOT / "scripts" / "frame_columns.py"))
    assert page.endswith(documented["reference"]()), "run: python scripts/readme.py --findings"
    named = {name for schema in api.SCHEMAS.values() for name in schema.names}
    assert {name.rpartition(".")[2] for name in documented["MEANINGS"]} == named


def test_names_of_a_report_run_nothing_in_a_notebook(folder: Path, tmp_path: Path) -> None:
    results = sample()
    results["verdict"] = "<script>alert(1)</script>"
    results["findings"][0]["code"] = "<img src=x onerror=y>"
    made = tmp_path / "hostile"
    (made / "merged").mkdir(parents=True)
    for name in ("collectives", "accounts"):
        (made / f"merged/{name}.parquet").write_bytes(
            (folder / f"merged/{name}.parquet").read_bytes()
        )
    results_json.write(made / "merged" / "results.json", results)
    shown = clusterprof.load(made)._repr_html_()
    assert "<script" not in shown
    assert "<img" not in shown


def test_a_run_that_was_not_merged_or_is_damaged_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has not been merged"):
        clusterprof.load(tmp_path)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "results.json").write_text("{")
    with pytest.raises(ReportError):
        clusterprof.load(str(tmp_path))


def test_without_pandas_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="need pandas") as caught:
        _ = clusterprof.load(folder).findings
    assert "clusterprof[pandas]" in str(caught.value)


def test_a_what_if_without_reports_says_so(folder: Path) -> None:
    moved = clusterprof.load(folder)
    for entry in moved.results["ranks"]:
        entry["source"] = "/nowhere/rank.sqlite"
    with pytest.raises(ReportError, match="needs the reports"):
        moved.what_if()
