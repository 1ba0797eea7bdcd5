"""What each launcher makes of the user's own command line."""

from __future__ import annotations

import pytest

from clusterprof import launchers
from clusterprof.errors import UsageError
from clusterprof.jobs import CommandLine, Job

ADDED = {"CLUSTERPROF_PLAN": "/runs/a b/plan.json", "PYTHONPATH": "/inject"}


def job(
    name: str, line: str, program: str = "python train.py", environ: dict[str, str] | None = None
) -> Job:
    return launchers.job(name, CommandLine(line.split(), program.split(), environ or {}, ADDED))


def test_srun_gets_its_own_options_verbatim_and_nothing_else() -> None:
    line = "-N2 --ntasks-per-node=8 --gpus-per-node=8 --cpu-bind=none"
    made = job("srun", line, "python train.py --lr 1e-3")
    assert made.command == ("srun", *line.split(), "python", "train.py", "--lr", "1e-3")
    assert made.identity == "srun"


@pytest.mark.parametrize(
    ("line", "environ", "size"),
    [
        ("-n4", {}, 4),
        ("-n 4", {}, 4),
        ("--ntasks=4", {}, 4),
        ("--ntasks 4", {}, 4),
        ("-N2 --ntasks-per-node=8", {}, 16),
        ("--nodes=2 --ntasks-per-node 8", {}, 16),
        ("--ntasks-per-node=8", {"SLURM_NNODES": "3"}, 24),
        ("", {"SLURM_NTASKS": "12"}, 12),
        ("-N2", {"SLURM_NTASKS": "12"}, None),
        ("-N1-4", {}, None),
        ("", {}, None),
        ("-n2 : -n4", {}, None),
    ],
)
def test_the_world_of_srun_is_known_where_its_options_say_it(
    line: str, environ: dict[str, str], size: int | None
) -> None:
    assert job("srun", line, environ=environ).world_size == size


@pytest.mark.parametrize(
    "program",
    [
        "torchrun --nproc-per-node=8 train.py",
        "/opt/env/bin/torchrun train.py",
        "python -m torch.distributed.run train.py",
        "env OMP_NUM_THREADS=1 torchrun train.py",
        "conda run -n env --no-capture-output torchrun train.py",
        "uv run --with numpy python3.12 -u -m torch.distributed.launch train.py",
        "numactl --cpunodebind=0 python -Wignore -um torch.distributed.run train.py",
    ],
)
def test_under_srun_the_workers_of_an_inner_launcher_are_the_ranks(program: str) -> None:
    made = job("srun", "-N2 --ntasks-per-node=1", program)
    assert made.identity == "torchrun"
    assert made.world_size is None


@pytest.mark.parametrize(
    "program",
    ["accelerate launch train.py", "deepspeed train.py", "python -m accelerate.commands.launch x"],
)
def test_under_srun_a_rank_may_be_a_worker_or_the_task_of_what_starts_one_or_many(
    program: str,
) -> None:
    made = job("srun", "-N2 --ntasks-per-node=1", program)
    assert (made.identity, made.world_size) == ("srun", None)


@pytest.mark.parametrize(
    ("line", "program", "size"),
    [
        ("-N2 --ntasks-per-node=1", "./run.sh", None),
        ("-N2 -n2", "bash -c", None),
        ("-N2 --ntasks-per-node=4", "./run.sh", 8),
        ("-N2 --ntasks-per-node=1", "python train.py --strategy deepspeed", 2),
        ("-N2 --ntasks-per-node=1", "/env/bin/python3 train.py torchrun", 2),
    ],
)
def test_one_script_a_node_may_start_any_number_of_ranks_and_a_python_is_one(
    line: str, program: str, size: int | None
) -> None:
    made = job("srun", line, program)
    assert (made.identity, made.world_size) == ("srun", size)


@pytest.mark.parametrize(
    ("program", "size"),
    [
        ("python a.py : -n 2 python b.py -n 9", 3),
        ("python a.py : --ntasks=2 --mpi pmix ./b -n 9 : -n4 c", 7),
        ("python a.py : python b.py", None),
    ],
)
def test_the_components_of_a_heterogeneous_job_are_one_world(
    program: str, size: int | None
) -> None:
    made = job("srun", "-n1", program)
    assert made.world_size == size
    assert made.command == ("srun", "-n1", *program.split())


@pytest.mark.parametrize(
    "export",
    ["--export=NONE", "--export=A=1,B=2", "--export NONE", "--export=ALL,PYTHONPATH=/theirs"],
)
def test_an_export_without_our_variables_is_answered_by_a_shell_that_sets_them(
    export: str,
) -> None:
    made = job("srun", f"-n2 {export}")
    place = made.command.index("/bin/sh")
    # By its whole path: the tasks may have no PATH. The script is always the same.
    assert made.command[place + 3 :] == (
        "clusterprof", "/inject", "/runs/a b/plan.json", "python", "train.py",
    )  # fmt: skip
    assert made.command[place + 2] == job("srun", "--export=NIL").command[4]
    assert made.remarks
    assert made.carries, "srun's own environment must not have them as well"


def test_an_export_with_all_needs_no_shell() -> None:
    made = job("srun", "-n2 --export=ALL,A=1")
    assert made.command == ("srun", "-n2", "--export=ALL,A=1", "python", "train.py")
    assert not made.carries
    assert job("srun", "-n2", environ={"SLURM_EXPORT_ENV": "NONE"}).carries


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("-n2 --export=NONE", "python a.py : -n1 python b.py"),
        ("-n2", "python a.py : -n1 --export=A=1 python b.py"),
        ("-n2 --multi-prog --export=PATH", "programs.conf"),
    ],
)
def test_several_programs_without_the_environment_are_refused(line: str, program: str) -> None:
    with pytest.raises(UsageError, match="--export"):
        job("srun", line, program)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("python -I train.py", "python -I ignores PYTHONPATH"),
        ("env A=1 python3 -u -Es train.py", "python -E ignores PYTHONPATH"),
        ("/env/bin/python -S -m train", "python -S ignores sitecustomize"),
        ("env PYTHONPATH=/theirs python train.py", "append :$PYTHONPATH"),
        ("python -P -s -Wignore -m train -I", ""),
        ("python train.py -I", ""),
        ("./run.sh -I", ""),
        ("./run.sh python -I x.py", ""),
        ("train.py --with python -E PYTHONPATH=x", ""),
    ],
)
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_python_that_the_agent_cannot_get_into_is_known_beforehand(
    launcher: str, program: str, why: str
) -> None:
    closed = job(launcher, "", program).closed
    assert closed.startswith(why) if why and "PYTHONPATH=" not in program else why in closed
    assert bool(closed) == bool(why)


def test_torchrun_takes_a_script_as_it_stands() -> None:
    made = job("torchrun", "--standalone --nproc-per-node 4", "train.py --slow-rank 2")
    assert made.command == (
        "torchrun", "--standalone", "--nproc-per-node", "4", "train.py", "--slow-rank", "2",
    )  # fmt: skip
    assert (made.world_size, made.identity) == (4, "torchrun")


def test_torchrun_takes_a_python_before_the_script_as_well() -> None:
    made = job("torchrun", "--nproc-per-node=4", "python3.11 train.py")
    assert made.command[-3:] == ("--no-python", "python3.11", "train.py")


def test_torchrun_m_with_a_python_is_refused() -> None:
    with pytest.raises(UsageError, match=r"-m .* python"):
        job("torchrun", "-m", "python train.py")


@pytest.mark.parametrize(
    ("line", "environ", "size"),
    [
        ("--nnodes=2 --nproc_per_node=8", {}, 16),
        ("--nnodes=1:4 --nproc-per-node=8", {}, None),
        ("--nproc-per-node=gpu", {}, None),
        ("", {"PET_NPROC_PER_NODE": "2"}, 2),
        ("", {}, 1),
    ],
)
def test_the_world_of_torchrun_is_known_where_its_options_say_it(
    line: str, environ: dict[str, str], size: int | None
) -> None:
    assert job("torchrun", line, environ=environ).world_size == size


CONTAINER = "-n2 --container-image=x.sqsh"


@pytest.mark.parametrize(
    ("line", "program", "needed"),
    [
        (CONTAINER, "python train.py", "/site/agent and /runs/1"),
        (f"{CONTAINER} --container-mounts=/data:/data,/site:/site:ro", "python x", "/runs/1"),
        (f"{CONTAINER} --container-mounts=/site:/elsewhere,/runs", "python x", "/site/agent"),
        (f"{CONTAINER} --container-mounts=/site:/site,/runs:/runs", "python x", ""),
        (f"{CONTAINER} --container-mounts /site,/runs/1", "python x", ""),
        ("-n2", "/usr/bin/apptainer exec x.sif python train.py", "/site/agent and /runs/1"),
        ("-n2", "python train.py", ""),
    ],
)
def test_what_a_container_must_show_is_said_and_never_mounted_by_us(
    line: str, program: str, needed: str
) -> None:
    added = {"CLUSTERPROF_PLAN": "/runs/1/plan.json", "PYTHONPATH": "/site/agent/inject:/mine"}
    made = launchers.job("srun", CommandLine(line.split(), program.split(), {}, added))
    assert made.command == ("srun", *line.split(), *program.split()), "nothing is added"
    printed = [remark.partition(" must see ")[2].partition(" under ")[0] for remark in made.remarks]
    assert printed == ([needed] if needed else [])


def test_a_program_as_it_stands_is_run_so_and_options_before_it_are_refused() -> None:
    made = job("run", "", "accelerate launch --multi_gpu train.py")
    assert made.command == ("accelerate", "launch", "--multi_gpu", "train.py")
    assert (made.identity, made.world_size) == ("run", None)
    assert job("run", "", "bash launch.sh").identity == "run"
    assert job("run", "", "python -m torch.distributed.run train.py").identity == "torchrun"
    with pytest.raises(UsageError, match=r" -n2\b"):
        job("run", "-n2", "python train.py")
