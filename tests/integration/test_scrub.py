"""An export that was scrubbed holds no secret of the process that it is of, and still merges."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.command import Completed

from clusterprof.ingest import read_report

Run = Callable[..., Completed]


@pytest.mark.needs_nsys
def test_a_scrubbed_export_keeps_its_rank_and_no_secret(
    run_command: Run, run_clusterprof: Run, workdir: Path
) -> None:
    secret = "hunter2-in-a-variable"
    env = {
        "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "node-1", "API_TOKEN": secret, "TMPDIR": str(workdir),
    }  # fmt: skip
    for _ in range(3):  # on a busy machine nsys may lose its own agent, and leaves nothing
        run_command(
            ["nsys", "profile", "--trace=osrt", "--sample=none", "--cpuctxsw=none", "--output=r",
             sys.executable, "-c", "open('/dev/null').close(); print('printed-' + 'words')",
             "--token", secret],
            env=env,
        )  # fmt: skip
        if Path("r.nsys-rep").exists() or Path("r.qdstrm").exists():
            break
    importer = "/usr/lib/nsight-systems/host-linux-x64/QdstrmImporter"
    if not Path("r.nsys-rep").exists():
        run_command([importer, "-i", "r.qdstrm"])
    run_command(["nsys", "export", "--type=sqlite", "--output=full.sqlite", "r.nsys-rep"])
    assert secret.encode() in Path("full.sqlite").read_bytes(), "else this test shows nothing"

    done = run_clusterprof(["scrub", "full.sqlite", "clean.sqlite"])
    assert done.returncode == 0, done
    assert secret.encode() not in Path("clean.sqlite").read_bytes()
    full, clean = read_report(Path("full.sqlite")), read_report(Path("clean.sqlite"))
    assert clean.rank == full.rank == 3
    assert clean.info.job == full.info.job is not None
    assert clean.host_calls.equals(full.host_calls)

    again = run_clusterprof(["scrub", "full.sqlite", "clean.sqlite"])
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert run_clusterprof(["scrub", "--force", "full.sqlite", "clean.sqlite"]).returncode == 0
    full_before = Path("full.sqlite").read_bytes()
    wrong = run_clusterprof(["scrub", "--force", "clean.sqlite", "full.sqlite"])
    assert wrong.returncode == 2
    assert Path("full.sqlite").read_bytes() == full_before, "a recording is not what scrub wrote"


def test_what_is_no_export_is_refused(run_clusterprof: Run, workdir: Path) -> None:
    Path("notes.txt").write_text("not a database")
    done = run_clusterprof(["scrub", "notes.txt", "out.sqlite"])
    assert done.returncode == 3
    assert not Path("out.sqlite").exists()
