"""What each command line would run: `--dry-run`, plan.json and run.json, and nothing is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import clusterprof
from clusterprof.agent import nsys
from clusterprof.launch import run_job
from clusterprof.launchers import mpirun, ssh
from golden.plans import planned
from golden.store import Golden, stored


def command_lines() -> dict[str, list[str]]:
    """The lines of `command-lines.txt`, by their heading."""
    lines: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("command-lines.txt").read_text().splitlines():
        if line.startswith("["):
            lines[line.strip("[]")] = under_heading = []
        elif line and not line.startswith("#"):
            under_heading.append(line)
    return lines


LINES = command_lines()
SAYS = {
    "--version": "NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0",
    "--help": "--trace= cuda nvtx osrt --pytorch= --stats= --discard-environment=",
}
_OPEN_MPI = "mpirun (Open MPI) 5.0.11\n"
#: times and process ids, and how wide a column is by a path in it
VARYING = {
    r"runs/\d{8}T\d{6}Z-": "runs/STAMP-",
    r"runs/STAMP-\d+": "runs/STAMP-ID",
    r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00": "NOW",
    r"(?<=\S) {2,}": "  ",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in an empty environment that has launchers and an nsys, which never run."""
    for name in set(os.environ) - {"PYTEST_CURRENT_TEST"}:
        monkeypatch.delenv(name)
    programs = [
        tmp_path / "bin" / name for name in ("nsys", "srun", "sbatch", "mpirun", "torchrun")
    ]
    for program in (*programs, tmp_path / "host-linux-x64" / "QdstrmImporter"):
        program.parent.mkdir(exist_ok=True)
        program.touch(0o755)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(nsys, "ask", lambda command, patience_s: SAYS[command[-1]])
    monkeypatch.setattr(mpirun, "version", lambda program: _OPEN_MPI)
    monkeypatch.setattr(ssh, "hostname", lambda name, path: f"{name}.address")
    return folder


@pytest.mark.parametrize("name", LINES)
def test_a_command_line_would_run_what_it_would_have_run(
    name: str, here: Path, golden: Golden, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    outputs = [dry_run(line, capsys, monkeypatch) for line in LINES[name]]
    assert list(here.iterdir()) == []
    names = [
        (str(here.parent), ""),
        (sys.executable, "PYTHON"),
        (str(Path(sys.executable).parent), "/environment"),
        (str(Path(clusterprof.__file__).parents[1]), "/repository"),
        (clusterprof.__version__, "VERSION"),
        (sys.version.split()[0], "PYTHON_VERSION"),
    ]
    text = "\n".join(outputs)
    for value, name_of_it in names:
        text = text.replace(value, name_of_it)
    for pattern, instead in VARYING.items():
        text = re.sub(pattern, instead, text)
    golden(f"dry-runs/{name}", text)


def dry_run(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """All that a line decides, as text."""
    words = shlex.split(line)
    with monkeypatch.context() as patched:
        while "=" in words[0]:
            patched.setenv(*words.pop(0).split("=", 1))
        status, plans = planned(words)
    printed = capsys.readouterr()
    text = f"$ {line}\n{printed.out}{printed.err}status {status}\n"
    for plan in plans:
        documents = {"plan.json": plan.for_agent.to_json(), "run.json": run_job.first_members(plan)}
        for name, content in documents.items():
            for key, value in sorted(json.loads(json.dumps(content)).items()):
                text += f"{name} {key}: {json.dumps(value, sort_keys=True)}\n"
    return text


def test_what_is_stored_of_dry_runs_belongs_to_a_case() -> None:
    assert {f"dry-runs/{name}" for name in LINES} == stored("dry-runs")
