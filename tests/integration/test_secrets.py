"""Secrets on a command line reach the job, and nothing that clusterprof writes or says."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from lab.command import Completed


def test_a_secret_argument_reaches_the_job_alone(
    run_clusterprof: Callable[..., Completed], workdir: Path
) -> None:
    words = ["--token=hunter2", "--api-key", "hunter2", "postgres://me:hunter2@db", "--lr=0.1"]
    line = ["run", "--profiler=torch", "--run-dir=run", "--", "sh", "-c", 'echo "$@"', "sh", *words]
    shown = run_clusterprof([line[0], "--dry-run", *line[1:]])
    assert "hunter2" not in shown.stdout + shown.stderr
    assert "--token=" in shown.stdout
    done = run_clusterprof(line)
    assert done.returncode == 0, done
    assert done.stdout == " ".join(words) + "\n"
    assert "--api-key '***'" in done.stderr
    assert "hunter2" not in done.stderr
    written = [path for path in Path("run").rglob("*") if path.is_file()]
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []
    assert "--lr=***" in Path("run/run.json").read_text()
    assert "--lr=0.1" in Path("run/again.json").read_text()
    assert stat.S_IMODE(Path("run/again.json").stat().st_mode) == 0o600
