"""What each launcher makes of the user's own command line."""

from __future__ import annotations

import pytest

from clusterprof import launchers
from clusterprof.errors import UsageError
from clusterprof.plan import Job

ADDED = {"CLUSTERPROF_PLAN": "/runs/a b/plan.json", "PYTHONPATH": "/inject"}


def job(
    name: str, line: str, program: str = "python train.py", environ: dict[str, str] | None = None
) -> Job:
    return launchers.load(name).job(line.split(), program.split(), environ or {}, ADDED)


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
        "accelerate launch train.py",
        "deepspeed train.py",
    ],
)
def test_under_srun_the_workers_of_an_inner_launcher_are_the_ranks(program: str) -> None:
    made = job("srun", "-N2 --ntasks-per-node=1", program)
    assert made.identity == "torchrun"
    assert made.world_size is None


@pytest.mark.parametrize("export", ["--export=NONE", "--export=A=1,B=2", "--export NONE"])
def test_an_export_without_all_is_answered_by_env(export: str) -> None:
    made = job("srun", f"-n2 {export}")
    place = made.command.index("env")
    assert made.command[place:] == (
        "env", "CLUSTERPROF_PLAN=/runs/a b/plan.json", "PYTHONPATH=/inject", "python", "train.py",
    )  # fmt: skip
    assert made.remarks


def test_an_export_with_all_needs_no_env() -> None:
    assert "env" not in job("srun", "-n2 --export=ALL,A=1").command
    assert "env" in job("srun", "-n2", environ={"SLURM_EXPORT_ENV": "NONE"}).command


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
    with pytest.raises(UsageError, match="takes a module"):
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
