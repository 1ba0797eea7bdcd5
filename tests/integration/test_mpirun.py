"""`clusterprof mpirun` on a real Open MPI and a real MPICH."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest
from lab.command import Completed
from lab.endings import outcomes, state, window
from lab.hosts import Hosts
from lab.parts import find

Cli = Callable[..., Completed]
pytestmark = pytest.mark.usefixtures("scripted")

#: Open MPI will not start as root, nor more ranks than processors, unless it is told to.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.needs_openmpi
def test_under_open_mpi_the_profiled_ranks_of_a_training_leave_their_nsys_reports(
    run_clusterprof: Cli, workdir: Path
) -> None:
    write_training(workdir)
    done = run_clusterprof(
        ["mpirun", "--ranks", "0,2", "--steps", "3:6", "--step-on", "loop:step", "--run-dir",
         "the run's dir", "--oversubscribe", "-np", "3", "--", "python", "train.py", "12", "-1"],
        env=OPEN_MPI,
    )  # fmt: skip
    run = workdir / "the run's dir"
    assert done.returncode == 0, done
    assert done.stdout.count("trained") == 3
    assert outcomes(run) == {0: "collected", 2: "collected"}, done
    reports = sorted(path.parent.name for path in run.glob("ranks/*/report.nsys-rep"))
    assert reports == ["00000", "00002"]
    steps = {
        log.parent.name: len(log.read_text().splitlines()) for log in run.glob("ranks/*/steps*.csv")
    }
    assert steps == {"00000": 13, "00001": 13, "00002": 13}
    assert json.loads((run / "ranks/00002/state.json").read_text())["identity"] == "mpirun"
    assert json.loads((run / "merged/results.json").read_text())["ranks"][1]["rank"] == 2


def mpich_first(folder: Path) -> str:
    """A PATH in which mpirun is MPICH's."""
    # Beside Open MPI, Debian's MPICH has this name only: give it the common one, in front.
    shim = folder / "bin" / "mpirun"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{find("mpirun.mpich")}" "$@"\n')
    shim.chmod(0o755)
    return f"{shim.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.needs_mpich
def test_mpich_is_known_by_what_it_says_of_itself(run_clusterprof: Cli, workdir: Path) -> None:
    write_training(workdir)
    done = run_clusterprof(
        ["mpirun", "--ranks", "1", "--steps", "3:6", "--step-on", "loop:step", "--no-merge",
         "--run-dir=run", "-genvlist", "PATH,HOME", "-n", "2", "--", "python", "train.py", "12",
         "-1"],
        env={"PATH": mpich_first(workdir)},
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "+ mpirun -genv CLUSTERPROF_PLAN" in done.stderr
    assert outcomes(workdir / "run") == {1: "collected"}, done
    state = json.loads((workdir / "run/ranks/00001/state.json").read_text())
    assert (state["world_size"], state["local_rank"]) == (2, 1)


@pytest.mark.needs_openmpi
def test_status_streams_and_words_are_those_of_mpirun_alone(
    run_clusterprof: Cli, run_command: Cli, workdir: Path
) -> None:
    (workdir / "tell me.py").write_text(
        dedent("""
        import os, pathlib, sys, time
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        print(rank, sys.argv[1:], os.environ.get("A"), flush=True)
        print("error", rank, file=sys.stderr, flush=True)
        here = pathlib.Path(os.environ["MARKS"])
        (here / str(rank)).touch()
        while rank == 1 and not (here / "0").exists():  # mpirun kills the others at once
            time.sleep(0.05)
        sys.exit(3 if rank == 1 else 0)
        """)
    )
    line = ["-x", "A=it's $HOME", "--oversubscribe", "-np", "2"]
    program = ["python", "tell me.py", "a b", "it's", "$HOME", "--", "-n9", "two\nlines", "ü", ":x"]
    marks = workdir / "plain", workdir / "profiled"
    for each in marks:
        each.mkdir()
    plain = run_command(["mpirun", *line, *program], env={**OPEN_MPI, "MARKS": str(marks[0])})
    done = run_clusterprof(
        ["mpirun", "--ranks", "1", "--profiler=torch", "--run-dir=run", *line, "--", *program],
        env={**OPEN_MPI, "MARKS": str(marks[1])},
    )
    assert done.returncode == plain.returncode == 3, done
    assert sorted(done.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert {"error 0", "error 1"} <= set(done.stderr.splitlines())
    assert outcomes(workdir / "run") == {1: "lost"}


@pytest.mark.needs_openmpi
def test_a_rank_that_open_mpi_kills_for_a_peer_s_failure_leaves_its_report(
    run_clusterprof: Cli, workdir: Path
) -> None:
    # Half a second after SIGTERM comes SIGKILL, sooner than nsys has written.
    write_training(workdir)
    done = run_clusterprof(
        ["mpirun", "--ranks", "0", *UNTIL_KILLED, "--step-on", "loop:step",
         "--profiler=nsys", "--run-dir=run", "--no-merge", "--oversubscribe", "-np", "2", "--",
         "python", "train.py", "5000", "1"],
        env=OPEN_MPI,
    )  # fmt: skip
    assert done.returncode == 3, done
    assert outcomes(workdir / "run") == {0: "collected"}, done
    assert window(state(workdir / "run")) == "inside"
    assert (workdir / "run/ranks/00000/report.nsys-rep").stat().st_size > 0


#: a window that a rank does not reach the end of before it is killed
UNTIL_KILLED = ["--steps=5:5000", "--max-steps=5000"]
#: Counts its steps without torch, which takes long to import. The rank of the second argument
#: goes on until rank 0 is inside the window, and fails.
TRAIN = """
import os, pathlib, sys, loop
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
steps, failing = map(int, sys.argv[1:])
count = 0
while count < steps or rank == failing:
    loop.step()
    count += 1
    if rank == 0 and count == 20:
        pathlib.Path("inside").touch()
    if rank == failing and pathlib.Path("inside").exists():
        os._exit(3)
print("trained", rank, os.uname().nodename, flush=True)
"""


def find_mpirun() -> str:
    """Open MPI's, where it is installed."""
    return os.path.realpath(Path(sys.executable).parent / "mpirun")


def write_training(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "loop.py").write_text("import time\ndef step():\n    time.sleep(0.02)\n")


@pytest.fixture
def two_nodes(
    workdir: Path, run_command: Cli, slurm: Mapping[str, str]
) -> Callable[..., Completed]:
    """Run a line in an allocation of two nodes, where mpirun has its daemons started by srun."""
    write_training(workdir)

    def run(line: list[str], **environ: str) -> Completed:
        salloc = ["salloc", "-Q", "-N2", "--ntasks-per-node=2"]
        return run_command([*salloc, *line], env={**slurm, **OPEN_MPI, **environ})

    return run


MPIRUN = ["clusterprof", "mpirun", "--step-on", "loop:step", "--profiler=nsys", "--run-dir=run",
          "--no-merge", "-n", "4"]  # fmt: skip


@pytest.mark.needs_openmpi
def test_open_mpi_takes_the_agent_to_the_ranks_of_another_node(
    workdir: Path, two_nodes: Callable[..., Completed]
) -> None:
    done = two_nodes(
        [*MPIRUN, "--ranks", "0,3", "--steps=3:9", "--", "python", "train.py", "12", "-1"]
    )
    assert done.returncode == 0, done
    hosts = {line.split()[1]: line.split()[2] for line in done.stdout.splitlines()}
    assert sorted(hosts) == ["0", "1", "2", "3"]
    assert hosts["0"] != hosts["3"]
    assert outcomes(workdir / "run") == {0: "collected", 3: "collected"}, done
    for rank in range(4):
        stated = json.loads((workdir / f"run/ranks/{rank:05d}/state.json").read_text())
        assert (stated["host"], stated["world_size"]) == (hosts[str(rank)], 4)


@pytest.mark.needs_openmpi
def test_open_mpi_over_ssh_ends_with_the_failing_rank_s_status_and_leaves_the_other_s_report(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts
) -> None:
    write_training(workdir)
    # Its daemons are started by ssh, which takes no variable along.
    there = ["--prtemca", "plm_ssh_args", f"-F {ssh_hosts.config}", "--host", "h1:1,h2:1"]
    where = ["--prefix", str(Path(find_mpirun()).parents[1]), "-n", "2"]
    done = run_clusterprof(
        ["mpirun", "--ranks", "0", *UNTIL_KILLED, *MPIRUN[2:-2], *there, *where, "--",
         sys.executable, "train.py", "5000", "1"],
        env=OPEN_MPI,
    )  # fmt: skip
    assert done.returncode == 3, done
    assert outcomes(workdir / "run") == {0: "collected"}, done
    stated = [
        json.loads((workdir / f"run/ranks/0000{rank}/state.json").read_text()) for rank in (0, 1)
    ]
    assert [each["host"] for each in stated] == ["h1", "h2"]


@pytest.mark.needs_mpich
def test_a_rank_that_fails_under_mpich_gives_its_status_and_the_others_go_on_on_both_nodes(
    workdir: Path, two_nodes: Callable[..., Completed]
) -> None:
    path = mpich_first(workdir)
    line = ["-n", "4", "python", "train.py", "40", "3"]
    plain = two_nodes(["mpirun", *line], PATH=path)
    (workdir / "inside").unlink()
    done = two_nodes([*MPIRUN, "--ranks", "0", "--steps=3:9", "--", *line[2:]], PATH=path)
    assert done.returncode == plain.returncode == 3, done
    assert outcomes(workdir / "run") == {0: "collected"}, done
    hosts = [
        json.loads((workdir / f"run/ranks/{rank:05d}/state.json").read_text())["host"]
        for rank in range(4)
    ]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


@pytest.mark.needs_openmpi
def test_a_dry_run_shows_the_line_and_leaves_nothing(run_clusterprof: Cli, workdir: Path) -> None:
    done = run_clusterprof(
        ["mpirun", "--ranks", "0,2", "--profiler=torch", "--dry-run", "-np", "4",
         "-hostfile", "some hosts", "--", "python", "train.py"],
        env=OPEN_MPI,
    )  # fmt: skip
    assert done.returncode == 0, done
    line = "mpirun -x CLUSTERPROF_PLAN -x PYTHONPATH -np 4 -hostfile '***' python train.py"
    assert line in done.stdout, done
    assert list(workdir.iterdir()) == []


@pytest.mark.needs_openmpi
def test_a_rank_outside_of_the_world_of_mpirun_is_refused(
    run_clusterprof: Cli, workdir: Path
) -> None:
    done = run_clusterprof(
        ["mpirun", "--ranks", "0,4", "-np", "4", "--", "python", "train.py"], env=OPEN_MPI
    )
    assert done.returncode == 2
    assert re.search(r"rank\D+4\b", done.stderr), done
    assert "-np 4" in done.stderr
