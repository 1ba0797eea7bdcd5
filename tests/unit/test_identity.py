"""Which rank a process is, from its own environment."""

from __future__ import annotations

import os

import pytest

from clusterprof.agent.contracts import identity
from clusterprof.agent.contracts.identity import COUNTING, PLAN, PROFILED, identify, is_starter

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "3"}


def test_each_launcher_tells_a_process_its_place() -> None:
    assert identify(TORCHRUN) == (5, 8, 1, "torchrun")
    assert identify(SRUN) == (1, 2, 0, "srun")
    openmpi = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    assert identify(openmpi) == (2, 4, 0, "mpirun")


def test_a_worker_of_torchrun_under_srun_is_what_torchrun_says() -> None:
    assert identify({**SRUN, **TORCHRUN}) == (5, 8, 1, "torchrun")


def test_torchrun_itself_under_srun_is_no_rank() -> None:
    assert identify(SRUN, "torchrun") is None


def test_a_batch_script_on_the_first_node_is_no_rank() -> None:
    assert identify({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_numbers_that_are_none_make_no_rank() -> None:
    assert identify({**TORCHRUN, "RANK": "x"}) is None
    assert identify({}) is None


#: as deepspeed's launcher sets them for each of its workers
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
    "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2",
}  # fmt: skip


def test_a_worker_of_a_launcher_inside_of_another_s_task_is_what_the_inner_one_says() -> None:
    assert identify({**SRUN, **TORCHRUN}, "srun") == (5, 8, 1, "torchrun")
    assert identify({**SRUN, **DEEPSPEED}, "srun") == (3, 4, 1, "deepspeed")
    assert identify({**SRUN, **DEEPSPEED}, "torchrun") == (3, 4, 1, "deepspeed")
    assert identify(SRUN, "srun") == (1, 2, 0, "srun")
    assert identify({"RANK": "1", "WORLD_SIZE": "2", **SRUN}, "srun") == (1, 2, 0, "srun")


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("python /env/bin/torchrun --nproc-per-node 2 train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -Wignore -um torch.distributed.launch train.py", True),
        ("python -X dev -W error -mtorch.distributed.run train.py", True),
        ("python3.12 /env/bin/accelerate launch train.py", True),
        ("/usr/bin/python -u -m deepspeed.launcher.launch --world_info=x train.py", True),
        ("/opt/conda/bin/python /opt/conda/bin/conda run python train.py", True),
        ("python train.py torchrun", False),
        ("python -u train.py -m torch.distributed.run", False),
        ("python -c pass torchrun", False),
        ("python - torchrun", False),
        ("python -m train --strategy deepspeed", False),
        ("python", False),
    ],
)
def test_what_starts_ranks_is_none_itself(line: str, starts: bool) -> None:
    assert is_starter(line.split()) == starts


def test_a_program_that_nothing_numbers_is_the_only_rank_where_it_was_run_as_it_stands() -> None:
    assert identify({}, "run") == (0, 1, 0, "run")
    assert identify(TORCHRUN, "run") == (5, 8, 1, "torchrun")
    assert identify(SRUN, "run") == (1, 2, 0, "srun")
    assert identify({}, "srun") is None


def test_lightning_s_children_are_known_on_the_first_node_only() -> None:
    child = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}
    assert identify(child, "run") == (1, 4, 1, "lightning")
    assert identify({**child, "NODE_RANK": "1"}, "run") == (0, 1, 0, "run")
    assert identify({**child, "NODE_RANK": "1", "RANK": "3"}, "run") == (3, 4, 1, "environment")
    assert identify({"LOCAL_RANK": "1", "WORLD_SIZE": "4"}, "run") == (0, 1, 0, "run")
    assert identify(child, "srun") is None


@pytest.mark.parametrize("path", ["/run/plan.json", "/a run;x=1/50%/plan.json", "plan.json"])
def test_what_a_rank_says_of_itself_stands_behind_its_plan_s_path(path: str) -> None:
    environ = {PLAN: path}
    values = {COUNTING: "7", PROFILED: "session:/tmp/a;b%2F=c/socket0"}
    for name, value in values.items():
        identity.set_field(environ, name, value)
    assert identity.fields(environ) == values
    assert identity.plan_path(environ) == path
    assert os.path.dirname(environ[PLAN]) == os.path.dirname(path)
    for name in values:
        identity.set_field(environ, name, None)
    assert environ == {PLAN: path}


def test_without_a_plan_nothing_is_said() -> None:
    environ: dict[str, str] = {}
    identity.set_field(environ, COUNTING, "7")
    identity.give_back(environ)
    assert (environ, identity.fields(environ)) == ({}, {})
