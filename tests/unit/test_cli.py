"""What the command line does with what no one thought of."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from clusterprof import merge_run, run_directory
from clusterprof.agent.contracts import states
from clusterprof.analysis.findings.registry import CODES
from clusterprof.cli import main
from clusterprof.launch import run_job
from clusterprof.launch.planning import LaunchPlan


def fault(*_: object, **__: object) -> None:
    raise RuntimeError("not thought of")


def test_a_fault_while_merging_keeps_the_job_s_status_and_says_where_the_reports_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory.create(tmp_path / "run")
    states.advance(str(run.rank(0)), "captured", chosen=True)
    (run.rank(0) / "report.nsys-rep").write_bytes(b"report")
    arguments = argparse.Namespace(no_merge=False, debug=False, strict=False)
    plan = cast(
        "LaunchPlan",
        SimpleNamespace(
            arguments=arguments,
            expected=(0,),
            job=SimpleNamespace(closed=""),
            capture=SimpleNamespace(nsys=None),
        ),
    )
    manifest = run.write_manifest({"schema_version": 1})
    monkeypatch.setattr(merge_run, "merge_run", fault)
    assert run_job.conclude(plan, run, manifest, 7) == 7
    printed = capsys.readouterr().err
    assert "not thought of" in printed
    assert str(run.path) in printed
    assert "Traceback" not in printed
    arguments.strict = True
    assert run_job.conclude(plan, run, manifest, 0) == 123


def test_a_fault_of_a_verb_is_an_error_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "verb_module", lambda verb: SimpleNamespace(main=fault))
    assert main.main(["merge", "somewhere"]) == 125
    printed = capsys.readouterr().err
    assert "not thought of" in printed
    assert "--debug" in printed
    assert "Traceback" not in printed
    assert main.main(["merge", "somewhere", "--debug"]) == 125
    assert "Traceback" in capsys.readouterr().err


def test_every_finding_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted(CODES)
    assert main.main(["explain", "straggler.host"]) == 0
    shown, code = capsys.readouterr().out, CODES["straggler.host"]
    for part in (code.title, code.meaning, code.when_wrong, code.recommendation):
        assert part in shown


def test_an_unknown_code_is_refused_with_those_near_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "straggler.hots"]) == 2
    refusal = capsys.readouterr().err
    assert "straggler.host" in refusal
    assert "clusterprof explain" in refusal
