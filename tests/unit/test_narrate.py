"""What is printed, wherever its words come from, has nothing in it that a terminal obeys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report_sample as sample

from clusterprof import run_directory
from clusterprof.agent.contracts import states
from clusterprof.arguments import parse_ranks
from clusterprof.cli import main
from clusterprof.report import results_json

#: moves the cursor, titles the window (C1 and C0), turns the text, is deleted
HOSTILE = "gpu\x1b[2J\x9b2J\x9d0;x\x07\u202egnp\u2066.\r\x7f"
SHOWN = "gpu\\u001b[2J\\u009b2J\\u009d0;x\\u0007\\u202egnp\\u2066.\\u000d\\u007f"


def harmless(text: str) -> bool:
    """Whether nothing in it is obeyed."""
    return not set(text) & (set(HOSTILE) - set("gpu[2J0;x.n"))


@pytest.fixture
def run(tmp_path: Path) -> run_directory.Window:
    """A run whose rank 0 is on a host of a hostile name, and lost for a hostile reason."""
    run = run_directory.create(tmp_path / "run")
    run.directory.write_manifest(
        {
            "schema_version": 1, "began": "2026-01-01T00:00:00+00:00", "window": [5, 10],
            "ended": "2026-01-01T00:01:00+00:00", "exit_status": 3, "world_size": 1,
            "selection": parse_ranks("0")._asdict(), "launcher": "srun",
        }
    )  # fmt: skip
    states.make(str(run.rank(0)))
    states.advance(str(run.rank(0)), "lost", HOSTILE, chosen=True, host=HOSTILE)
    run.merged.mkdir()
    results_json.write(run.merged / "results.json", sample.results(host=HOSTILE))
    return run


@pytest.mark.parametrize("verb", ["status", "report"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_results_are_harmless(
    verb: str, form: str, run: run_directory.Window, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([verb, str(run.path), *(["--json"] if form == "json" else [])]) == 0
    printed = capsys.readouterr().out
    assert harmless(printed)
    if form == "json":
        assert HOSTILE in {each["host"] for each in json.loads(printed)["ranks"]}
    elif verb == "status":
        assert SHOWN in printed


def test_narration_and_errors_are_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["merge", str(tmp_path / HOSTILE)]) == 3
    printed = capsys.readouterr().err
    assert SHOWN in printed
    assert harmless(printed)


def test_what_argparse_says_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["torchrun", "--profiler", HOSTILE, "--", "x"]) == 2
    assert harmless(capsys.readouterr().err)


def test_our_own_colours_are_obeyed_and_no_others(
    run: run_directory.Window,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clusterprof.console.wants_colour", lambda stream: True)
    assert main.main(["report", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\x1b[1m")
    assert harmless(printed.replace("\x1b[", ""))
    assert "\x1b[2J" not in printed
