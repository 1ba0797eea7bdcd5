"""Which rank a process is, from its own environment."""

from __future__ import annotations

from clusterprof.agent.identity import identify

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
