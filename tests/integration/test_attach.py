"""`clusterprof attach` on processes that have a rank and a pipe, as NCCL's watchdog makes it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.command import Completed

TESTS = Path(__file__).parent.parent
WATCHDOG = TESTS / "lab" / "nccl_watchdog.py"
DUMPS = TESTS / "data" / "flight" / "pipe" / "timed"
Cli = Callable[..., Completed]
SETTINGS = {
    "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "TORCH_NCCL_ENABLE_TIMING": "1",
    "SECRET_TOKEN": "hunter2",
}  # fmt: skip


def shorter(rank: int, folder: Path) -> Path:
    """A rank's recorded dump as it was 400 calls before."""
    dump = pickle.loads(gzip.decompress((DUMPS / f"rank_{rank}.gz").read_bytes()))
    dump["entries"] = dump["entries"][:-400]
    path = folder / f"before_{rank}.gz"
    path.write_bytes(gzip.compress(pickle.dumps(dump, 2)))
    return path


@pytest.fixture
def job(workdir: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that run, and make 400 calls between two dumps."""
    names = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{workdir}/pipe_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{workdir}/dump_",
    }
    with contextlib.ExitStack() as ending:
        ranks = []
        for rank in range(2):
            dumps = [str(shorter(rank, workdir)), str(DUMPS / f"rank_{rank}.gz")]
            process = ending.enter_context(
                subprocess.Popen(
                    [sys.executable, str(WATCHDOG), *dumps],
                    env=os.environ | SETTINGS | names | {"RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            ending.callback(process.terminate)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            ranks.append(process)
        yield ranks


def test_the_ranks_of_this_host_are_listed_without_what_else_their_environment_has(
    job: list[subprocess.Popen[str]], run_clusterprof: Cli
) -> None:
    done = run_clusterprof(["attach"])
    assert done.returncode == 0
    for rank, process in enumerate(job):
        (line,) = [line for line in done.stdout.splitlines() if f" {process.pid} " in line]
        assert line.split() == [
            str(rank), "of", "2", str(process.pid), "torchrun", "yes", "torch's", "default", "on",
        ]  # fmt: skip
    assert "hunter2" not in done.stdout + done.stderr


def test_a_job_that_runs_is_dumped_twice_and_its_late_rank_named(
    job: list[subprocess.Popen[str]], run_clusterprof: Cli, workdir: Path
) -> None:
    done = run_clusterprof(["attach", str(job[1].pid), "--every", "1s", "-o", "look"])
    assert done.returncode == 0, done.stderr
    assert "the job runs: each rank made 400 calls between the two dumps" in done.stderr
    assert done.stdout.startswith("Rank 1 delays the other ranks by 8.12 ms of each 13.8 ms step")
    again = run_clusterprof(["attach", "look", "--json"])
    assert json.loads(again.stdout)["findings"][0]["ranks"] == [1]
    # a prefix says the same as the process
    done = run_clusterprof(["attach", "--pipes", "pipe_", "--dumps", "dump_", "--every", "1s"])
    assert "ranks 0–1 made no call between the two dumps" in done.stderr
    assert "AllReduce" in done.stdout


def test_a_rank_that_has_ended_is_named_and_the_other_is_dumped(
    job: list[subprocess.Popen[str]], run_clusterprof: Cli, workdir: Path
) -> None:
    job[0].kill()
    job[0].wait()
    line = ["attach", "--pipes", "pipe_", "--dumps", "dump_", "--every", "1s", "-o", "look"]
    done = run_clusterprof(line)
    assert done.returncode == 0, done.stderr
    assert "rank 0: no process here reads pipe_0.pipe: its rank has ended" in done.stderr
    assert "who is late cannot be determined from one rank" in done.stderr


def test_dumps_that_lie_there_are_read_and_no_rank_is_asked(
    run_clusterprof: Cli, workdir: Path
) -> None:
    recorded = TESTS / "data" / "flight" / "nccl" / "watchdog"
    (dump, *_) = sorted(path for path in recorded.iterdir() if path.is_file())
    (workdir / "dump_0").write_bytes(dump.read_bytes())
    done = run_clusterprof(["attach", "--dumps", "dump_", "-o", "look"])
    assert done.returncode == 0, done.stderr
    assert "AllReduce 10" in done.stdout
    assert "dumps of rank 0, written 20" in done.stderr
    assert "a call that was on its way looks like one that does not end" in done.stderr
    done = run_clusterprof(["attach", "--dumps", "none_", "-o", "other"])
    assert done.returncode == 3
    assert "there is no dump none_<rank> on this host" in done.stderr
    assert not (workdir / "other").exists()
