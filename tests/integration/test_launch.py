"""Whole runs: a real training under real launchers, captured, merged, judged."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab.command import Completed
from lab.endings import PROGRAMS, outcomes, window
from lab.fakes import fake_nsys
from lab.tiers import few, long_but
from lab.warm import Warm

pytestmark = pytest.mark.needs_torch

Cli = Callable[..., Completed]
SECRET = b"hunter2-of-the-environment"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
#: a slow rank that costs a window of eight steps twice as much as a machine that stalls a step
SLOW = ("--slow-rank", "2", "--slow-ms", "400", "--steps", "15")


#: a launcher in one file: `clusterprof env NAME=VALUE... -- PROGRAM...`
LAUNCHER = """
from clusterprof.jobs import Job

SUMMARY = "run a program with variables of its own"
PASSES_OPTIONS_TO = "env"

def job(line):
    return Job(
        launcher="env", command=("env", *line.options, *line.program), world_size=1,
        size_source="env", identity="environment",
    )
"""


class Run:
    """What a run left in its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state(self, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.text(f"ranks/{rank:05d}/state.json"))
        return state

    def text(self, name: str) -> str:
        return (self.path / name).read_text()

    @property
    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self.text("run.json"))
        return manifest

    @property
    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = json.loads(self.text("merged/results.json"))
        return results

    def logged_steps(self) -> dict[int, int]:
        """How many steps each rank of the job logged."""
        return {
            int(log.parent.name): len(log.read_text().splitlines()) - 1
            for log in (self.path / "ranks").glob("*/steps.csv")
        }


def straggler(run: Run) -> dict[str, Any]:
    """The first finding that names a rank."""
    return next(
        finding for finding in run.results["findings"] if finding["code"].startswith("straggler.")
    )


@pytest.mark.usefixtures("scripted")
def test_a_launcher_is_one_file_in_a_folder_of_launchers(
    run_clusterprof: Cli, workdir: Path
) -> None:
    (workdir / "own").mkdir()
    (workdir / "own" / "env.py").write_text(LAUNCHER)
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "train.py").write_text("import loop\nfor _ in range(8): loop.step()\n")
    env = {"CLUSTERPROF_LAUNCHERS": str(workdir / "own")}
    (summary,) = re.findall('SUMMARY = "(.+)"', LAUNCHER)
    assert summary in run_clusterprof(["--help"], env=env).stdout
    (workdir / "own" / "long.py").write_text("SUMMARY = (\n    'run it '\n    'all alone'\n)\n")
    (workdir / "own" / "helper.py").write_text("raise SystemExit('loaded')\n")
    assert "run it all alone" in run_clusterprof(["--help"], env=env).stdout
    line = ["env", "--profiler=nsys", "--ranks=0", "--steps=2:4", "--step-on=loop:step",
            "--run-dir=run", "--no-merge", "RANK=0", "WORLD_SIZE=1", "--", "python",
            "train.py"]  # fmt: skip
    dry = run_clusterprof([line[0], "--dry-run", *line[1:]], env=env)
    assert "env 'RANK=***' 'WORLD_SIZE=***' python train.py" in dry.stdout, dry
    done = run_clusterprof(line, env=env)
    assert done.returncode == 0, done
    run = Run(workdir / "run")
    assert (run.manifest["launcher"], run.state(0)["state"]) == ("env", "collected")
    assert run_clusterprof(line).returncode == 2, "without the folder there is no such verb"


@pytest.mark.parametrize("torch", long_but(["there before"], ["loaded by each"]))
def test_torchrun_names_the_slow_rank_of_a_real_training_and_collect_finishes_what_was_not(
    run_clusterprof: Cli, workdir: Path, torch_process: Warm, torch: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    program = ["--", EXAMPLE]
    if torch == "there before":
        request.getfixturevalue("warm_torchrun")
        program = ["--no-python", "--", *torch_process.launcher(0), EXAMPLE]
    done = run_clusterprof(
        ["torchrun", "--ranks", "0,2", "--steps", "4:12", "--profiler=torch", "--run-dir=run",
         "--nproc-per-node", "3", *program, *SLOW],
    )  # fmt: skip
    run = Run(workdir / "run")
    assert done.returncode == 0, done
    assert run.logged_steps() == {0: 15, 1: 15, 2: 15}
    assert outcomes(run.path) == {0: "collected", 2: "collected"}
    assert {run.state(rank)["identity"] for rank in range(3)} == {"torchrun"}
    found = straggler(run)
    assert (found["code"], found["rank"]) == ("straggler.host", 2), done
    assert "rank 2" in done.stdout.lower(), done
    assert run.results["collectives"]["matched"] > 0
    assert "rank 2" in run.text("report.html").lower()
    again = run_clusterprof(["report", "run"])
    assert again.returncode == 0
    assert "rank 2" in again.stdout.lower()

    # as if it had been interrupted before anything was brought from the last rank, and merged
    (run.path / "report.html").unlink()
    shutil.rmtree(run.path / "merged")
    shutil.rmtree(run.path / "ranks" / "00002")
    finished = run_clusterprof(["collect", "run"])
    assert finished.returncode == 0, finished
    assert "rank 2" in finished.stderr
    assert (run.path / "report.html").exists()
    assert run.results["missing"][0]["rank"] == 2


@pytest.mark.needs_nsys
@pytest.mark.parametrize(
    ("ranks", "chosen", "program"),
    few({"steps": (2, (1,), ["ending.py", "none", "0"]),
         "training": (3, (0, 2), ["looked_at.py", "2", "30", "light"])}, "steps"),
)  # fmt: skip
def test_srun_with_nsys_leaves_reports_the_step_logs_of_all_and_a_merged_result(
    run_clusterprof: Cli, workdir: Path, slurm: dict[str, str],
    ranks: int, chosen: tuple[int, ...], program: list[str],
) -> None:  # fmt: skip
    done = run_clusterprof(
        ["srun", "--ranks", ",".join(map(str, chosen)), "--steps", "4:12", "--step-on", "loop:step",
         "--run-dir=run", f"-n{ranks}", "--", "python", PROGRAMS / program[0], *program[1:]],
        env={**slurm, "SOME_TOKEN": SECRET.decode()},
    )  # fmt: skip
    run = Run(workdir / "run")
    assert done.returncode == 0, done
    for rank in chosen:
        assert (run.path / f"ranks/{rank:05d}/report.nsys-rep").stat().st_size > 0
        assert run.state(rank)["state"] == "collected"
    reports = sorted(int(path.parent.name) for path in run.path.glob("ranks/*/report.nsys-rep"))
    assert reports == list(chosen)
    assert run.logged_steps() == dict.fromkeys(range(ranks), 30)
    if "light" in program:
        assert straggler(run)["rank"] == 2, done
    profilers = [(rank["rank"], rank["profiler"].split()[0]) for rank in run.results["ranks"]]
    assert profilers == [(rank, "nsys") for rank in chosen]
    # nsys' own report holds the whole environment of the rank; nothing else may.
    own = [path for path in run.path.rglob("*") if path.is_file() and path.suffix != ".nsys-rep"]
    assert [path for path in own if SECRET in path.read_bytes()] == []
    assert SECRET.decode() not in done.stdout + done.stderr


@pytest.mark.usefixtures("scripted")
def test_the_program_keeps_its_streams_status_and_umask_under_nsys_and_beside_it(
    run_clusterprof: Cli, run_command: Cli, workdir: Path, slurm: dict[str, str]
) -> None:
    (workdir / "program.py").write_text(
        dedent("""
        import os, sys
        rank = int(os.environ["SLURM_PROCID"])
        parent = open(f"/proc/{os.getppid()}/comm").read().strip()
        mask = os.umask(0)
        print(f"rank {rank}: {parent} {mask:o} {sys.argv[1:]}", flush=True)
        print(f"error {rank}", file=sys.stderr, flush=True)
        sys.exit(3 if rank == 1 else 0)
        """)
    )
    line = ["python", "program.py", "a b", "it's", "--x=$HOME", "-n9"]
    plain = run_command(["srun", "-n2", *line], env=slurm)
    done = run_clusterprof(["srun", "--ranks", "1", "--run-dir=run", "-n2", "--", *line], env=slurm)
    assert done.returncode == plain.returncode == 3
    words = [" ".join(each.split()[3:]) for each in sorted(done.stdout.splitlines()) if each]
    assert words == [" ".join(each.split()[3:]) for each in sorted(plain.stdout.splitlines())], done
    assert "rank 0: slurmstepd" in done.stdout, "a rank that is not chosen is srun's own child"
    assert {"error 0", "error 1"} <= set(done.stderr.splitlines())
    stated = Run(workdir / "run").state(1)
    assert (stated["state"], window(stated), stated["program_status"]) == ("lost", "before", 3)


def test_a_profiled_rank_whose_nsys_does_not_start_trains_without_it(
    run_clusterprof: Cli, workdir: Path, slurm: dict[str, str]
) -> None:
    broken = fake_nsys(workdir, "2024.5.1.1")
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "train.py").write_text(
        "import loop\nfor _ in range(12): loop.step()\nprint('trained')\n"
    )
    done = run_clusterprof(
        ["srun", "--ranks", "0", "--nsys", broken, "--step-on=loop:step", "--run-dir=run", "-n2",
         "--", "python", "train.py"],
        env=slurm,
    )  # fmt: skip
    run = Run(workdir / "run")
    assert done.returncode == 0, done
    assert done.stdout.split() == ["trained", "trained"]
    assert (run.state(0)["state"], window(run.state(0))) == ("lost", "before")
    assert "nsys" in run.state(0)["reason"]
    assert run.logged_steps() == {0: 12, 1: 12}
    strict = run_clusterprof(["collect", "run"])
    assert strict.returncode == 3
    assert outcomes(run.path) == {0: "lost"}


def test_a_lost_rank_is_a_missing_report_and_strict_says_so_in_the_status(
    run_clusterprof: Cli, workdir: Path, torch_process: Warm
) -> None:
    done = run_clusterprof(
        ["run", "--ranks", "0-3", "--steps", "4:200", "--profiler=torch", "--run-dir=run",
         "--strict", "--", *torch_process.launcher(2), EXAMPLE, "--steps", "8"],
    )  # fmt: skip
    run = Run(workdir / "run")
    assert done.returncode == 123, done
    assert outcomes(run.path) == {0: "collected", 1: "collected", 2: "lost", 3: "lost"}
    assert [rank for rank in range(4) if f"rank {rank}" in done.stderr] == [0, 1, 2, 3]
    assert (window(run.state(0)), run.state(0)["step_end"]) == ("inside", 8)
    assert [lost["rank"] for lost in run.results["missing"]] == [2, 3]
    assert [rank["rank"] for rank in run.results["ranks"]] == [0, 1]
    assert run.manifest["exit_status"] == 0


@pytest.fixture
def small_disk(workdir: Path) -> Iterator[Path]:
    """A file system with space for a few states and no trace."""
    disk = workdir / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.needs_root
def test_a_full_disk_loses_the_report_and_nothing_of_the_training(
    run_clusterprof: Cli, small_disk: Path, torch_process: Warm
) -> None:
    done = run_clusterprof(
        ["run", "--ranks", "0", "--steps", "2:6", "--profiler=torch", "--run-dir",
         small_disk / "run", "--", *torch_process.launcher(1), EXAMPLE, "--steps", "8"],
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "8 steps on 1 ranks" in done.stdout
    assert "clusterprof: rank 0" in done.stderr
    assert os.strerror(errno.ENOSPC).lower() in done.stderr.lower()
    assert not list((small_disk / "run").glob("ranks/*/trace*"))
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("warm_torchrun")
def test_a_failing_program_keeps_its_launcher_s_status(run_clusterprof: Cli, workdir: Path) -> None:
    (workdir / "fails.py").write_text("raise SystemExit(5)")
    done = run_clusterprof(
        ["torchrun", "--profiler=torch", "--run-dir=run", "--nproc-per-node", "1", "--", "fails.py"]
    )
    assert done.returncode == 1  # torchrun's own for any failing worker
    assert set(outcomes(workdir / "run").values()) == {"lost"}
