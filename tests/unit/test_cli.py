"""What the command line does with what nobody thought of."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterprof import merge_run, ranks, run_directory
from clusterprof.agent.contracts import states
from clusterprof.cli import main
from clusterprof.launch import run_job
from clusterprof.launch.request import LaunchPlan


def fault(*_: object, **__: object) -> None:
    raise RuntimeError("nobody thought of this")


def test_a_fault_while_merging_keeps_the_job_s_status_and_says_where_the_reports_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory.create(tmp_path / "run")
    states.advance(str(run.rank(0)), "captured", chosen=True)
    (run.rank(0) / "report.nsys-rep").write_bytes(b"report")
    plan = cast(
        "LaunchPlan",
        SimpleNamespace(
            selection=ranks.parse("0"),
            job=SimpleNamespace(world_size=1, closed=""),
            capture=SimpleNamespace(agent={}),
        ),
    )
    arguments = argparse.Namespace(no_merge=False, debug=False, strict=False)
    manifest: dict[str, Any] = {"schema_version": 1}
    monkeypatch.setattr(merge_run, "merge_run", fault)
    assert run_job.conclude(plan, arguments, run, manifest, 7) == 7
    said = capsys.readouterr().err
    assert "nobody thought of this" in said
    assert str(run.path) in said
    assert "Traceback" not in said
    arguments.strict = True
    assert run_job.conclude(plan, arguments, run, manifest, 0) == 123


def test_a_fault_of_a_verb_is_an_error_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "verb_module", lambda verb: SimpleNamespace(main=fault))
    assert main.main(["merge", "somewhere"]) == 125
    said = capsys.readouterr().err
    assert "nobody thought of this" in said
    assert "--debug" in said
    assert "Traceback" not in said
    assert main.main(["merge", "somewhere", "--debug"]) == 125
    assert "Traceback" in capsys.readouterr().err
