"""Whatever stdout and stderr are: the job runs, ends with its own status, and has its own streams.

With real redirections of a real shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.tiers import long_but

Cli = Callable[..., Completed]

#: as a user types it: no rank of this job trains, so that it needs no nsys
OURS = shlex.join([*command.clusterprof(["run"]), "--ranks=0", "--profiler=torch", "--"])
JOB = "sh -c 'touch ran; echo said; exit 3'"


def bash(line: str) -> Completed:
    return command.run(["bash", "-c", line])


@pytest.mark.parametrize(
    "redirected",
    long_but(
        ["2> >(head -2)", "2>&- <&-", "2>/dev/full >&2"], ["2> >(exit 0)", "2>/dev/full", "2>&-"]
    ),
)
def test_a_job_runs_and_keeps_its_status_wherever_stderr_goes(
    redirected: str, workdir: Path, fault: Callable[..., None]
) -> None:
    plain = bash(f"{JOB} {redirected}")
    (workdir / "ran").unlink()
    done = bash(f"{OURS} {JOB} {redirected}")
    added = done.seconds - plain.seconds
    fault(f"stderr is {redirected}", plain.returncode, done.returncode, added, {})
    assert done.returncode == plain.returncode == 3, done
    assert (workdir / "ran").exists(), done
    if "head" not in redirected:
        assert done.stdout == plain.stdout, done


@pytest.mark.parametrize("redirected", long_but(["| exit 0", ">&-"], [">/dev/full"]))
def test_a_job_keeps_its_status_wherever_stdout_goes(redirected: str, workdir: Path) -> None:
    job = "sh -c 'touch ran; exit 3'"
    done = bash(f"set -o pipefail; {OURS} {job} {redirected}")
    assert done.returncode == 3, done
    assert (workdir / "ran").exists(), done


def test_closed_streams_are_closed_for_the_job_and_nothing_of_ours_gets_into_its_files(
    workdir: Path,
) -> None:
    (workdir / "job.py").write_text("""
import os
first = os.open("first", os.O_CREAT | os.O_WRONLY)
open("number", "w").write(str(first))
""")
    plain = bash("python job.py <&- >&- 2>&-")
    number = (workdir / "number").read_text()
    done = bash(f"{OURS} python job.py <&- >&- 2>&-")
    assert done.returncode == plain.returncode == 0, done
    assert (workdir / "number").read_text() == number
    assert (workdir / "first").read_bytes() == b""


def test_the_end_of_a_job_by_its_own_broken_pipe_is_its_own(workdir: Path) -> None:
    done = bash(f"set -o pipefail; {OURS} yes | head -1")
    assert done.returncode == 141, done


def test_a_reading_verb_may_be_read_no_further(workdir: Path) -> None:
    verbs = "torchrun --ranks 0 --profiler torch --run-dir r --dry-run -- train.py"
    read = shlex.join([*command.clusterprof(verbs.split())])
    assert bash(f"set -o pipefail; {read} | exit 0").returncode == 0
    full = bash(f"{read} >/dev/full")
    assert full.returncode not in (0, 120), full
    assert "Traceback" not in full.stderr
    assert bash(f"{read} 2>&-").stdout == bash(read).stdout != ""


def test_descriptors_reach_a_job(workdir: Path) -> None:
    (workdir / "train.py").write_text("import os\nos.write(3, b'metrics\\n')\n")
    done = bash(f"{OURS} python <(cat train.py) 3>metrics.txt")
    assert done.returncode == 0, done
    assert (workdir / "metrics.txt").read_text() == "metrics\n"


def test_names_whose_bytes_are_no_text_are_printed_as_they_are(workdir: Path) -> None:
    read = shlex.join(
        command.clusterprof(["torchrun", "--ranks", "0", "--profiler", "torch", "--dry-run"])
    )
    strict = "PYTHONIOENCODING=utf-8:strict"
    done = bash(
        f"{strict} {read} --run-dir $'odd\\xff' -- train.py >said; grep -ac $'odd\\xff' said"
    )
    assert int(done.stdout) > 0, done
