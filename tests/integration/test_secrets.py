"""Secrets on a command line reach the job, and nothing that clusterprof writes or says."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from lab.command import Completed
from lab.stub import OPTIONS, PROGRAM, RANK
from secret_forms import FORMS, SECRET


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


def test_no_form_of_a_secret_is_in_what_a_run_and_its_merge_leave(
    run_clusterprof: Callable[..., Completed], workdir: Path, recordings: Path,
    fault: Callable[..., None],
) -> None:  # fmt: skip
    (workdir / "train.py").write_text(PROGRAM)
    given = [word for form in FORMS for word in form]
    line = ["run", *OPTIONS, "--profiler=torch", "--", "python", "train.py", *given]
    done = run_clusterprof(line, env=RANK)
    # one with steps and operators, of which there is a result
    shutil.copy(recordings / "kineto/gloo/rank0.json.gz", "run/ranks/00000/trace.json.gz")
    merged = run_clusterprof(["merge", "run", "--html", "page.html", "--output", "out"])
    shown = run_clusterprof(["report", "run"])
    fault(f"{len(FORMS)} forms of a secret", 0, max(done.returncode, merged.returncode), 0.0, {})
    assert done.returncode == merged.returncode == 0, (done, merged)
    written = [path for path in Path().rglob("*") if path.is_file()]
    assert {"plan.json", "run.json", "again.json", "results.json", "page.html"} <= {
        path.name for path in written
    }
    found = [path for path in written if SECRET.encode() in path.read_bytes()]
    # what the next run of the same command needs is the user's alone
    assert found == [Path("run/again.json")]
    assert stat.S_IMODE(found[0].stat().st_mode) == 0o600
    for each in (done, merged, shown):
        assert SECRET not in each.stdout + each.stderr, each
