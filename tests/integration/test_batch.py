"""Batch jobs on a real Slurm: the templates as they are, and what `clusterprof sbatch` makes."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab import command, reading
from lab.command import Completed
from lab.parts import LAB

from clusterprof import run_directory
from clusterprof.agent.contracts import states as rank_states
from clusterprof.arguments import parse_ranks
from clusterprof.cli.main import main

Run = Callable[..., Completed]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train.py"
SLURM = ROOT / "slurm"
RECORDING = ROOT / "tests" / "data" / "recordings" / "kineto" / "gloo"


@pytest.fixture
def wait_for(run_command: Run, slurm: dict[str, str]) -> Callable[[str], str]:
    """Wait until a job has ended; returns the state that Slurm gives it."""

    def wait(job: str, seconds: float = command.PATIENCE_S) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stated = run_command(["scontrol", "--oneliner", "show", "job", job], env=slurm)
            state = stated.stdout.partition("JobState=")[2].split(" ")[0]
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return state
            time.sleep(0.5)
        raise AssertionError(f"job {job} is still {state}")

    return wait


#: a training without torch, as `--step-on train:step` counts it
TRAIN = """
import os, sys, time

def step():
    time.sleep(0.02)

if __name__ == "__main__":
    import train
    count = int(sys.argv[1]) if sys.argv[1:] else 30
    for _ in range(count):
        train.step()
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    print(f"rank {rank}: {count} steps\\n", end="")
"""
STEPS = {"CLUSTERPROF_STEP_ON": "train:step"}


@pytest.fixture
def project(workdir: Path, scripted: None) -> Path:
    """A folder that has a training where the source tree has the example, which needs torch."""
    (workdir / "examples").mkdir()
    (workdir / "examples" / "train.py").write_text(TRAIN)
    return workdir


def states(run: Path) -> dict[int, str]:
    return {
        int(file.parent.name): json.loads(file.read_text())["state"]
        for file in run.glob("ranks/*/state.json")
    }


def ranks_in(run: Path) -> list[int]:
    """The ranks whose reports were merged."""
    results = json.loads((run / "merged" / "results.json").read_text())
    return [rank["rank"] for rank in results["ranks"]]


def printed(done: Completed) -> dict[str, str]:
    """What `clusterprof sbatch` says on stdout: `job 12`, `merge 13`, `run DIR`."""
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.needs_torch
@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "steps", "collected"),
    [
        (["one-task-per-gpu.sbatch"], 30, {0: "collected", 1: "counted"}),
        (["torchrun-per-node.sbatch", "--nproc-per-node", "1", "examples/train.py", "--steps=18"],
         18, {0: "collected", 1: "collected"}),
    ],
)  # fmt: skip
def test_a_template_runs_the_example(
    template: list[str],
    steps: int,
    collected: dict[int, str],
    run_command: Run,
    workdir: Path,
    slurm: dict[str, str],
    wait_for: Callable[[str], str],
) -> None:
    (workdir / "examples").symlink_to(ROOT / "examples")
    done = run_command(
        ["sbatch", "--parsable", "--output=out", f"-N{len(template) // 4 + 1}",
         SLURM / template[0], *template[1:]],
        env={**slurm, "CLUSTERPROF_PROFILER": "torch"},
    )  # fmt: skip
    assert wait_for(done.stdout.strip()) == "COMPLETED", (workdir / "out").read_text()
    (run,) = (workdir / "runs").iterdir()
    assert states(run) == collected
    assert f"{steps} steps on 2 ranks" in (workdir / "out").read_text()
    assert (run / "report.html").exists()
    results = json.loads((run / "merged" / "results.json").read_text())
    assert (results["collectives"]["matched"] > 0) == (steps == 18)


def test_the_template_of_one_task_per_gpu_runs_as_it_is(
    run_command: Run, project: Path, slurm: dict[str, str], wait_for: Callable[[str], str]
) -> None:
    done = run_command(
        ["sbatch", "--parsable", "--output=out", SLURM / "one-task-per-gpu.sbatch"],
        env={**slurm, **STEPS},
    )
    assert wait_for(done.stdout.strip()) == "COMPLETED", (project / "out").read_text()
    (run,) = (project / "runs").iterdir()
    assert states(run) == {0: "collected", 1: "counted"}
    printed_text = (project / "out").read_text()
    assert all(f"rank {rank}: 30 steps\n" in printed_text for rank in (0, 1))
    assert ranks_in(run) == [0]
    assert (run / "report.html").exists()


@pytest.mark.needs_torch
def test_the_template_of_a_torchrun_on_each_node_runs_as_it_is(
    run_command: Run, project: Path, slurm: dict[str, str], wait_for: Callable[[str], str]
) -> None:
    done = run_command(
        ["sbatch", "--parsable", "--output=out", SLURM / "torchrun-per-node.sbatch",
         "--nproc-per-node", "2", "examples/train.py", "28"],
        env={**slurm, **STEPS},
    )  # fmt: skip
    ended = wait_for(done.stdout.strip())
    printed_text = (project / "out").read_text()
    assert ended == "COMPLETED", printed_text
    assert all(f"rank {rank}: 28 steps\n" in printed_text for rank in (0, 1))
    (run,) = (project / "runs").iterdir()
    assert states(run) == {0: "collected", 1: "counted"}
    assert ranks_in(run) == [0]
    assert (run / "report.html").exists()


def mpich(folder: Path) -> dict[str, str]:
    """What makes tasks of Slurm those of MPI: its own PMI is that of MPICH."""
    # mpi4py takes the library by the name of its standard
    (folder / "libmpi.so.12").symlink_to(next(Path("/usr/lib").glob("*/libmpich.so.12")))
    # it would use interfaces of other tests' networks as well, which come and go
    return {"LD_LIBRARY_PATH": str(folder), "MPI4PY_MPIABI": "mpich", "SLURM_MPI_TYPE": "pmi2",
            "UCX_NET_DEVICES": "lo"}  # fmt: skip


@pytest.mark.needs_mpich
@pytest.mark.long
def test_over_four_nodes_a_task_that_is_killed_costs_no_report_and_its_node_is_named(
    run_command: Run, workdir: Path, slurm: dict[str, str]
) -> None:
    for rank in range(3):
        shutil.copy(RECORDING / f"rank{rank}.json.gz", workdir)
    reading.fails(workdir / "rank1.json.gz").write_text("task killed")
    program = [sys.executable, LAB / "programs" / "merging.py", "failing", "8", workdir, "--json"]
    done = run_command(["srun", "-N4", "--ntasks-per-node=1", *program],
                       env={**slurm, **mpich(workdir), "PYTHONPATH": str(LAB.parent)})  # fmt: skip
    results = json.loads(done.stdout)
    assert [each["rank"] for each in results["ranks"]] == [0, 1, 2], done
    (warning,) = [each for each in results["warnings"] if "reading process" in each]
    assert re.match(r"rank 1: its reading process on n[2-4] sent no update for 8 s", warning)
    assert "another one on n1 read it" in warning
    # what Slurm itself says of the task that was killed
    assert done.returncode == 137, done


@pytest.fixture
def merged_alone(run_clusterprof: Run, workdir: Path) -> tuple[run_directory.Window, str]:
    """A run of three ranks, and the results that one process makes of it."""
    run = run_directory.create(workdir / "run")
    for rank in range(3):
        rank_states.advance(str(run.rank(rank)), "captured", chosen=True)
        shutil.copy(RECORDING / f"rank{rank}.json.gz", run.rank(rank) / "trace.json.gz")
    run.directory.write_manifest({"schema_version": 1, "selection": parse_ranks("all")._asdict(),
                        "world_size": 3, "window": [5, 10]})  # fmt: skip
    alone = run_clusterprof(["merge", "--json", "run"])
    assert alone.returncode == 0, alone
    return run, alone.stdout


@pytest.mark.needs_mpich
def test_a_merge_job_over_two_nodes_leads_to_the_results_of_one_process(
    run_command: Run,
    workdir: Path,
    merged_alone: tuple[run_directory.Window, str],
    slurm: dict[str, str],
    wait_for: Callable[[str], str],
) -> None:
    run, alone = merged_alone
    (run.merged / "results.json").unlink()
    job = run_command(
        ["sbatch", "--parsable", "--output=out", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1",
         SLURM / "merge.sbatch", "run"],
        env={**slurm, **mpich(workdir)},
    )  # fmt: skip
    ended, printed_text = wait_for(job.stdout.strip()), (workdir / "out").read_text()
    assert ended == "COMPLETED", printed_text
    assert "MPI does not start" not in printed_text
    assert "this node alone" not in printed_text
    assert printed_text.count("clock     ") == 1, "only the first task prints"
    assert (run.merged / "results.json").read_bytes() == alone.encode()


@pytest.mark.needs_mpich
@pytest.mark.long
def test_the_documented_merge_over_four_nodes_leads_to_the_results_of_one_process(
    run_command: Run,
    workdir: Path,
    merged_alone: tuple[run_directory.Window, str],
    slurm: dict[str, str],
) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    (documented,) = re.findall(r"^(srun .*?) +clusterprof (merge) runs/big", page, re.MULTILINE)
    line = documented[0].replace("--mpi=pmix ", "").split()
    over = run_command([*line, *command.clusterprof(["merge", "run", "--json"])],
                       env={**slurm, **mpich(workdir)})  # fmt: skip
    assert (over.returncode, over.stderr.count("MPI")) == (0, 0), over
    alone = merged_alone[1]
    assert json.loads(over.stdout)["warnings"] == json.loads(alone)["warnings"]
    assert over.stdout == alone


#: What shells, sbatch and argparse like to take for themselves.
AWKWARD = [
    "a b", "it's", '"', "$HOME", "`id`", "\\", "two\nlines\n#SBATCH -N9", "tab\there", "\r\n", "",
    "-N9", "--", "--ranks=7", "*", "; exit 3", "!!", "é",
]  # fmt: skip


@pytest.mark.usefixtures("scripted")
def test_sbatch_submits_the_program_as_it_was_written_and_a_job_that_merges(
    run_clusterprof: Run, workdir: Path, slurm: dict[str, str], wait_for: Callable[[str], str]
) -> None:
    folder = workdir / "it's a $folder"
    folder.mkdir()
    (folder / "train it.py").write_text(
        dedent("""
        import json, os, runpy, sys
        with open(os.environ["SLURM_PROCID"] + ".json", "w") as file:
            json.dump(sys.argv[1:], file)
        sys.argv = ["train"]
        runpy.run_path("train.py", run_name="__main__")
        """)
    )
    (folder / "train.py").write_text(TRAIN)
    done = run_clusterprof(
        ["sbatch", "-n", "2", "--output=out %j", "--ranks", "0,1", "--steps", "3:8",
         "--step-on", "train:step", "--", "python", "train it.py", *AWKWARD],
        env=slurm, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done
    stated = printed(done)
    ended = wait_for(stated["job"])
    assert ended == "COMPLETED", [each.read_text() for each in folder.glob("out*")]
    for rank in (0, 1):
        assert json.loads((folder / f"{rank}.json").read_text()) == AWKWARD
    run = Path(stated["run"])
    assert run.parent == folder / "runs"
    assert run.name.endswith("-" + stated["job"])
    assert wait_for(stated["merge"]) == "COMPLETED"
    assert states(run) == {0: "collected", 1: "collected"}
    assert ranks_in(run) == [0, 1]


@pytest.mark.usefixtures("scripted")
def test_the_merge_job_finishes_a_run_whose_job_was_cancelled(
    run_clusterprof: Run,
    run_command: Run,
    workdir: Path,
    slurm: dict[str, str],
    wait_for: Callable[[str], str],
) -> None:
    done = run_clusterprof(
        ["sbatch", "-n1", "--output=out%j", "--ranks", "0", "--steps", "3:8", "--step-on",
         "loop:step", "--run-dir", "here", "--", "python", LAB / "programs/ending.py", "hang", "9"],
        env=slurm,
    )  # fmt: skip
    assert done.returncode == 0, done
    stated = printed(done)
    deadline = time.monotonic() + command.PATIENCE_S
    report = workdir / "here" / "ranks" / "00000" / "report.nsys-rep"
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert run_command(["scancel", stated["job"]], env=slurm).returncode == 0
    assert wait_for(stated["job"]) == "CANCELLED"
    assert wait_for(stated["merge"]) == "COMPLETED", (workdir / f"out{stated['merge']}").read_text()
    assert states(workdir / "here") == {0: "collected"}
    assert (workdir / "here" / "report.html").exists()


def test_a_refused_submission_is_sbatchs_own_and_leaves_nothing(
    run_clusterprof: Run, run_command: Run, workdir: Path, slurm: dict[str, str]
) -> None:
    line = ["--partition=nowhere", "-N1"]
    plain = run_command(["sbatch", *line, SLURM / "merge.sbatch"], env=slurm)
    done = run_clusterprof(["sbatch", *line, "--", "true"], env=slurm)
    assert done.returncode == plain.returncode != 0
    assert done.stderr == plain.stderr
    assert (done.stdout, list(workdir.iterdir())) == ("", [])


def test_with_parsable_stdout_is_the_jobs_id_as_sbatchs_would_be(
    run_clusterprof: Run, workdir: Path, slurm: dict[str, str]
) -> None:
    done = run_clusterprof(
        ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--", "true"], env=slurm
    )
    assert done.returncode == 0, done
    assert done.stdout.strip().isdigit()
    assert "merge " in done.stderr


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (["-N2", "--ntasks-per-node=2", "--ranks", "4", "--", "x"], ("--ranks 4", "rank: 4")),
        (["--steps", "5:500", "--", "x"], ("5:500", "--max-steps 200")),
        (["train.py", "--", "x"], ("train.py", " -- ")),
        (["-N2", "train.py", "--", "x"], ("train.py", " -- ")),
        (["--hold", "train.py", "--", "x"], ("train.py", " -- ")),
        (["--wrap=true", "--", "x"], ("--wrap",)),
        (["-N1"], ("clusterprof sbatch", " -- ")),
        (["-N1", "--"], ("clusterprof sbatch", " -- ")),
        (["--", "torchrun"], ("torchrun",)),
        (["--template", "nope", "--", "x"], ("nope",)),
        (["--template", str(EXAMPLE), "--", "x"], (str(EXAMPLE),)),
        (["--array=0-3", "--run-dir=x", "--", "x"], ("--run-dir", "--array")),
        (["--run-dir=/etc", "--", "x"], ("/etc", "--run-dir")),
    ],
)
def test_what_can_be_found_wrong_is_found_before_the_queue(
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    line: list[str],
    facts: tuple[str, ...],
) -> None:
    # There is no Slurm for this test: nothing may reach it.
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    status = main(["sbatch", *line])
    printed_text = capfd.readouterr().err
    assert status in (2, 5), printed_text
    assert all(fact in printed_text for fact in facts), printed_text


def shown(run_clusterprof: Run, *line: str, env: dict[str, str] | None = None) -> str:
    done = run_clusterprof(["sbatch", "--dry-run", *line], env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_merge_job_is_given_the_nodes_that_it_is_to_run_on(
    run_clusterprof: Run, workdir: Path
) -> None:
    text = shown(run_clusterprof, "--merge-nodes", "3", "-N2", "--", "python", "x.py")
    training, merging = text.split("\nsbatch ")
    assert "--nodes=3 --ntasks=12 --ntasks-per-node=4" in merging.splitlines()[0]
    assert "--merge-nodes" not in training
    refused = run_clusterprof(["sbatch", "--dry-run", "--merge-nodes", "0", "--", "x"])
    assert refused.returncode == 2
    assert "nodes" in refused.stderr


def test_a_dry_run_shows_both_scripts_and_submits_nothing(
    run_clusterprof: Run, workdir: Path
) -> None:
    text = shown(
        run_clusterprof, "-N2", "-A", "me", "-t", "5", "--merge-arg=--mem=1G", "--ranks", "0,1",
        "--srun-arg=--cpu-bind=none", "--", "python", "train.py", "--lr", "1e-4",
        env={"CLUSTERPROF_STEPS": "4:9", "SLURM_CONF": "/nowhere"},
    )  # fmt: skip
    assert "sbatch --parsable -N2 -A me -t 5 <<'SCRIPT'\n#!/bin/bash\n" in text
    assert "\noptions=(--ranks=0,1 --steps=4:9 --no-merge)\n" in text
    assert "\nsrun_options=(--cpu-bind=none)\n" in text
    assert "\nprogram=(python train.py --lr 1e-4)\n" in text
    assert (
        "\nsbatch --parsable --dependency=afterany:JOBID --account=me --mem=1G <<'SCRIPT'" in text
    )
    assert f"\nruns=({workdir}/runs/" in text


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (["torchrun", "--nproc-per-node", "4", "t.py"], "program=(--nproc-per-node 4 t.py)"),
        (["python", "-m", "torch.distributed.run", "t.py"], "program=(t.py)"),
        (["accelerate", "launch", "t.py"], "program=(accelerate launch t.py)"),
    ],
)
def test_programs_that_start_the_ranks_themselves_get_one_task_on_each_node(
    run_clusterprof: Run, workdir: Path, program: list[str], expected: str
) -> None:
    text = shown(run_clusterprof, "-N2", "--ranks", "9", "--", *program)
    assert expected in text
    assert "--ntasks-per-node=1" in text


def test_an_array_merges_in_each_of_its_jobs(run_clusterprof: Run, workdir: Path) -> None:
    text = shown(run_clusterprof, "--array=0-3", "--", "python", "t.py")
    assert "--no-merge" not in text
    assert "afterany:JOBID --" not in text


def script_of(text: str, clusterprof: Path) -> str:
    """The first script that a dry run shows, with another clusterprof in it."""
    script = text.partition("<<'SCRIPT'\n")[2].partition("\nSCRIPT\n")[0]
    lines = [
        f"clusterprof=({clusterprof})" if line.startswith("clusterprof=") else line
        for line in script.splitlines()
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("template", ["one-task-per-gpu", "torchrun-per-node", "container-pyxis"])
def test_a_job_that_is_started_over_has_another_run_directory(
    template: str, run_command: Run, run_clusterprof: Run, workdir: Path, teller: Path
) -> None:
    # Slurm starts a requeued job over after two minutes: its variable stands in for that.
    text = shown(run_clusterprof, f"--template={template}", "--run-dir=here", "-N1", "--", "true")
    (workdir / "job").write_text(script_of(text, teller))
    again = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": "1"}
    words = run_command(["bash", "job"], env=again).stdout.splitlines()
    assert words[:3] == ["srun", "--run-dir", f"{workdir}/here-restart1"]


def test_all_starts_of_a_job_are_merged(run_command: Run, workdir: Path, teller: Path) -> None:
    (workdir / "here-restart1").mkdir()
    done = run_command(
        ["bash", SLURM / "merge.sbatch", "here"], env={"PATH": f"{teller.parent}:/usr/bin:/bin"}
    )
    assert done.stdout.split() == ["collect", "here", "collect", "here-restart1"], done


@pytest.fixture
def teller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clusterprof that says its arguments, a line each."""
    fake = tmp_path_factory.mktemp("bin") / "clusterprof"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    return fake


def test_the_container_template_has_one_list_of_mounts_with_what_the_rank_needs(
    run_command: Run, run_clusterprof: Run, workdir: Path, teller: Path
) -> None:
    # pyxis is not here: what clusterprof is told is all that can be looked at.
    text = shown(run_clusterprof, "--template=container-pyxis", "--", "python", "a b.py")
    (workdir / "job").write_text(script_of(text, teller))
    done = run_command(
        ["bash", "job"], env={"SLURM_JOB_ID": "7", "CONTAINER_MOUNTS": "/data:/data,/my set:/b"}
    )
    assert done.returncode == 0, done
    printed_text: list[Any] = done.stdout.splitlines()
    (mounts,) = [line for line in printed_text if line.startswith("--container-mounts=")]
    package = str(ROOT / "clusterprof")
    assert mounts.partition("=")[2].split(",") == [
        "/data:/data", "/my set:/b", f"{workdir}:{workdir}", f"{package}:{package}:ro",
        f"{workdir}/runs:{workdir}/runs",
    ]  # fmt: skip
    assert printed_text[-3:] == ["--", "python", "a b.py"]
