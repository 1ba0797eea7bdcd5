"""What `clusterprof mpirun` makes of a command line, for each family of mpirun."""

from __future__ import annotations

import pytest

from clusterprof import jobs
from clusterprof.agent.contracts.identity import identify
from clusterprof.errors import LaunchError, UsageError
from clusterprof.jobs import CommandLine, Job
from clusterprof.launchers import mpirun

ADDED = {"CLUSTERPROF_PLAN": "/runs/a b;c'd/plan.json", "PYTHONPATH": "/inject:/mine"}

#: The first lines of what each says to --version.
SAYS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/\n",
    "openmpi4": "mpirun (Open MPI) 4.1.8\n",
    "debian": "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/\n",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626\n",
    "other": "Some Vendor's MPI Toolkit 1.2\n",
}


def job(
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    line: list[str],
    program: list[str] | None = None,
    environ: dict[str, str] | None = None,
) -> Job:
    monkeypatch.setattr(jobs, "find_program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(mpirun, "version", lambda program: SAYS[says])
    return mpirun.job(CommandLine(line, program or ["python", "train.py"], environ or {}, ADDED))


@pytest.mark.parametrize("says", ["openmpi5", "openmpi4", "debian"])
def test_open_mpi_passes_our_two_names_on_and_no_value_is_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    line = ["--hostfile", "my hosts", "-np", "4", "--map-by", "ppr:2:node"]
    made = job(monkeypatch, says, line)
    assert made.command == (
        "mpirun", "-x", "CLUSTERPROF_PLAN", "-x", "PYTHONPATH", *line, "python", "train.py",
    )  # fmt: skip
    assert (made.world_size, made.size_source, made.identity) == (4, "-np 4", "mpirun")


@pytest.mark.parametrize("says", ["mpich", "intel"])
def test_hydra_gets_our_variables_for_all_its_programs(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    made = job(monkeypatch, says, ["-n", "2", "-genvlist", "PATH"])
    assert made.command == (
        "mpirun", "-genv", "CLUSTERPROF_PLAN", ADDED["CLUSTERPROF_PLAN"],
        "-genv", "PYTHONPATH", "/inject:/mine", "-n", "2", "-genvlist", "PATH",
        "python", "train.py",
    )  # fmt: skip


def test_a_name_that_the_user_passes_on_already_is_not_given_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = job(monkeypatch, "openmpi5", ["-x", "PYTHONPATH", "-n", "2"])
    assert made.command[:6] == ("mpirun", "-x", "CLUSTERPROF_PLAN", "-x", "PYTHONPATH", "-n")
    assert made.command.count("PYTHONPATH") == 1


@pytest.mark.parametrize(
    ("says", "line", "environ", "path"),
    [
        ("other", ["-n", "2"], {}, "/inject:/mine"),
        ("openmpi5", ["-x", "PYTHONPATH=/their own", "-n", "2"], {}, "/inject:/their own"),
        ("mpich", ["-genv", "PYTHONPATH", "/their own", "-n", "2"], {}, "/inject:/their own"),
        ("mpich", ["-n", "2", "-env", "PYTHONPATH=/their own"], {}, "/inject:/their own"),
        ("openmpi4", ["--mca", "mca_base_env_list", "A=1", "-n", "2"], {}, "/inject:/mine"),
        ("openmpi4", ["-n", "2"], {"OMPI_MCA_mca_base_env_list": "A=1"}, "/inject:/mine"),
    ],
)
def test_where_mpirun_cannot_carry_our_variables_env_does_and_says_why(
    monkeypatch: pytest.MonkeyPatch, says: str, line: list[str], environ: dict[str, str], path: str
) -> None:
    made = job(monkeypatch, says, line, environ=environ)
    assert made.command == (
        "mpirun", *line, "env", f"CLUSTERPROF_PLAN={ADDED['CLUSTERPROF_PLAN']}",
        f"PYTHONPATH={path}", "python", "train.py",
    )  # fmt: skip
    assert "env sets" in made.remarks[0]


def test_several_programs_are_one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ["python", "a.py", ":", "-np", "3", "python", "b.py", ":", "-n", "1", "python", "c"]
    made = job(monkeypatch, "openmpi5", ["-np", "2"], program)
    assert (made.world_size, made.size_source) == (6, "-np 2 : -np 3 : -n 1")
    assert made.command[-len(program) :] == tuple(program)
    with pytest.raises(UsageError, match="several programs"):
        job(monkeypatch, "other", ["-np", "2"], program)


@pytest.mark.parametrize(
    ("says", "line", "size"),
    [
        ("openmpi5", ["--np", "4"], 4),
        ("openmpi4", ["-c", "4"], 4),
        ("mpich", ["-c", "4"], None),
        ("openmpi5", ["--map-by", "ppr:2:node"], None),
        ("openmpi5", ["-nolocal", "-npernode", "2"], None),
        ("openmpi5", ["-n"], None),
        ("mpich", ["-ppn", "2", "-n", "8"], 8),
    ],
)
def test_the_world_of_mpirun_is_known_where_its_options_say_it(
    monkeypatch: pytest.MonkeyPatch, says: str, line: list[str], size: int | None
) -> None:
    assert job(monkeypatch, says, line).world_size == size


def test_under_mpirun_the_workers_of_an_inner_launcher_are_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = ["torchrun", "--nproc-per-node=8", "train.py"]
    made = job(monkeypatch, "openmpi5", ["-np", "2", "--map-by", "ppr:1:node"], program)
    assert (made.identity, made.world_size) == ("torchrun", None)


@pytest.mark.parametrize("word", ["a b", "it's", 'say "x"', "$HOME", "-n9", "new\nline", "", "ü"])
def test_arguments_reach_mpirun_as_they_stand(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    made = job(monkeypatch, "openmpi5", ["-np", "2", "--wdir", word], ["./run me.sh", word])
    assert made.command[-2:] == ("./run me.sh", word)
    assert made.command[-3] == word


def test_without_mpirun_the_error_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(LaunchError, match=r"^mpirun (.|\n)*/nowhere/python"):
        mpirun.job(CommandLine(["-n", "2"], ["python", "train.py"], {}, ADDED))


def test_the_ranks_of_both_families_know_their_place() -> None:
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    found = identify(hydra, "mpirun")
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (3, 4, 1)
    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
    }  # fmt: skip
    found = identify(open_mpi, "mpirun")
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (2, 4, 0)
